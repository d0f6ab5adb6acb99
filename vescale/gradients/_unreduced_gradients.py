"""``UnreducedGradients``: a bucket's gradients from autograd's hooks until they are reduced."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.buffer import Allocation, DBuffer
from vescale.compat import HookGate, ParameterRow, TensorRow, is_captured, local_of, set_versions, share_memory
from vescale.errors import GradientError, SparseGradientError
from vescale.gradients._arrival_hooks import ArrivalHooks
from vescale.gradients._complete_gradient import local_part
from vescale.gradients._parameter import LocalContribution, use_code


class GatheredParameter(Protocol):
    """A parameter that autograd leaves gradients at while it is gathered: ``unsharded``, a new object now and then. The
    buffer has room of shape ``place`` for its gradient, of which it takes ``shape``; ``sharded`` gets this rank's part."""

    name: str
    shape: tuple[int, ...]
    place: tuple[int, ...]
    contribution: LocalContribution
    sharded: nn.Parameter
    unsharded: nn.Parameter | None


class GradientPlace(Enum):
    """Where the unreduced gradients of a bucket are; decided at the first one of a backward.

    ============  =====================================  ============================================================
    place         until the parameters are resharded     then
    ============  =====================================  ============================================================
    ``NONE``      there are none                         all that were there have been reduced, or forgotten
    ``HELD``      ``grad`` of the unsharded parameters   all copied at once to where the parameters were (``IN_PLACE``),
                                                         or to memory of their own, if that has another dtype
    ``IN_PLACE``  each where its parameter was           there
    ``APART``     each copied, or added, to memory of    there; another backward may add to them
                  their own, or computed there
    ============  =====================================  ============================================================

    =========================  ============================  =========================================================
    move                       allocated, on the current     when
                               stream
    =========================  ============================  =========================================================
    ``NONE`` to ``HELD``       nothing                       the first gradient is about to come
    ``NONE`` to ``IN_PLACE``   nothing                       the same
    ``NONE`` to ``APART``      memory of their own           the same
    ``HELD`` to ``IN_PLACE``   nothing                       the parameters are not needed any more
    ``HELD`` to ``APART``      memory of their own           they are, or that place has another dtype
    ``IN_PLACE`` to ``APART``  memory of their own           the parameters' memory is freed or gathered anew
    any to ``NONE``            nothing                       they are complete, or an exception has ended the step
    =========================  ============================  =========================================================

    Nothing communicates. Any other move raises GradientError.
    """

    NONE = auto()
    APART = auto()
    HELD = auto()
    IN_PLACE = auto()


_MOVES = frozenset(
    {
        (GradientPlace.NONE, GradientPlace.HELD),
        (GradientPlace.NONE, GradientPlace.IN_PLACE),
        (GradientPlace.NONE, GradientPlace.APART),
        (GradientPlace.HELD, GradientPlace.IN_PLACE),
        (GradientPlace.HELD, GradientPlace.APART),
        (GradientPlace.IN_PLACE, GradientPlace.APART),
        *((place, GradientPlace.NONE) for place in GradientPlace),
    }
)


class UnreducedGradients:
    """Takes gradients to where they are reduced from.

    Args:
        parameters: of one bucket.

    Attributes:
        memory: what is not the parameters'. There is none before :meth:`prepare`.
        place: changes in :meth:`_move` only.
    """

    memory: Allocation

    def __init__(self, parameters: Sequence[GatheredParameter]) -> None:
        self.parameters = list(parameters)
        self.buffer: DBuffer
        self.place = GradientPlace.NONE
        self._overwritten: list[tuple[torch.Tensor, int]] = []
        """Parameters whose memory holds a gradient, and the versions of their values."""
        self._row: ParameterRow | None = None
        self._gate = HookGate()
        self._hooks: dict[int, ArrivalHooks] = {}
        self._are_notified = False
        self.drop()

    @property
    def apart(self) -> DBuffer:
        """The memory of gradients that do not take the place of parameters. AttributeError before :meth:`prepare`."""
        return self._apart

    def prepare(
        self, whole: DBuffer | None, apart: DBuffer, *, of_one_loss: bool, begin: Callable[[], GradientPlace]
    ) -> None:
        """``whole`` holds the parameters; None: there is no place that gradients could take. ``apart`` is other memory.
        ``begin`` is called before the first gradient and returns where they go."""
        self._whole, self._apart, self.memory = whole, apart, apart.allocation
        self._over_whole = None if whole is None or whole.dtype != apart.dtype else whole.over(apart.placements)
        self._of_one_loss, self._begin_in_group = of_one_loss, begin
        self.buffer = apart
        self._targets: dict[int, TensorRow] = {}

    def free(self) -> None:
        """Free :attr:`memory`."""
        if "memory" in self.__dict__:
            self.memory.free()

    def _move(self, place: GradientPlace) -> None:
        if (self.place, place) not in _MOVES:
            names = ", ".join(repr(parameter.name) for parameter in self.parameters[:3])
            legal = ", ".join(to.name for of, to in _MOVES if of is self.place)
            raise GradientError(
                f"gradients of {names} are {self.place.name} and were to be {place.name}; expected one of {legal}. This is "
                "a bug in vescale, or the module is used by several threads"
            )
        self.place = place

    @property
    def has_any(self) -> bool:
        return self.place is not GradientPlace.NONE

    @property
    def in_place(self) -> bool:
        """Whether they are where the parameters were."""
        return self.place is GradientPlace.IN_PLACE

    @property
    def has_overwritten(self) -> bool:
        """Whether parameters' memory holds gradients, or what is left of them, until they are gathered again."""
        return self.in_place or bool(self._overwritten)

    # As they come

    def watch(self, index: int, unsharded: nn.Parameter) -> None:
        """Take the gradients of a parameter's unsharded form, which is a new object."""
        self._row = None
        if unsharded.requires_grad:
            # Weak: what an attribute of a parameter refers to is not collected while a graph has the parameter.
            reference = weakref.ref(self)
            begin, take = functools.partial(_arrive, reference), functools.partial(_receive, reference, index)
            hooks = self._hooks[index] = ArrivalHooks(unsharded, begin, take, self._gate)
            hooks.notify(self._are_notified)

    def _arrive(self, gradient: torch.Tensor | None) -> None:
        """Before the first gradient of a backward is accumulated; the gate is shut for those after it."""
        if not self.has_any and gradient is not None and not is_captured():
            self._begin()

    def _receive(self, index: int, unsharded: torch.Tensor) -> None:
        """A gradient has been accumulated. By then, all ops of this backward that contribute to it have run."""
        if unsharded.grad is None or self.place is GradientPlace.HELD:
            return
        with torch.no_grad():
            if self.in_place:
                self._overwrite(index)
            self._take(index)

    def receive_all(self) -> None:
        """Take the gradients that have come to the unsharded parameters without autograd's hooks."""
        for index, parameter in enumerate(self.parameters):
            if parameter.unsharded is not None and parameter.unsharded.grad is not None:
                self._begin()
                self._receive(index, parameter.unsharded)

    def place_for(self, index: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Where an op may write a parameter's whole gradient in place of returning one of its own; None when something is
        there already, or the reduction has another dtype. Autograd must be given exactly this tensor: it then keeps it,
        and the hook finds the gradient where it belongs."""
        if dtype != self.buffer.dtype:
            return None
        self._begin()
        self._hold_no_more()
        if self.in_place:  # other ops may need the parameter still
            return None
        if self._received[index] or self._claimed[index]:
            return None
        self._claimed[index] = True
        return self.buffer.alias(self._apart.group.layout.offsets[index], self.parameters[index].shape)

    def _begin(self) -> None:
        """Before the first gradient: where gradients go."""
        if self.has_any:
            return
        place = self._begin_in_group()
        if self._whole is None:
            place = GradientPlace.APART
        elif place is GradientPlace.IN_PLACE and self._over_whole is None:
            place = GradientPlace.HELD
        if place is GradientPlace.IN_PLACE:
            assert self._over_whole is not None
            self.buffer = self._over_whole
        elif place is GradientPlace.APART:
            self.buffer = self._apart.allocate()
        self._move(place)
        self._gate.shut()
        self._notify(place is not GradientPlace.HELD)

    def abandon(self) -> None:
        """Forget them all, wherever an exception has interrupted this."""
        self._clear()
        self.drop()
        for hooks in self._hooks.values():
            hooks.notify(self._are_notified)

    def _notify(self, are_notified: bool) -> None:
        """Gradients that are held need no hook each."""
        if are_notified != self._are_notified:
            self._are_notified = are_notified
            for hooks in self._hooks.values():
                hooks.notify(are_notified)

    def _take(self, index: int) -> None:
        """Move what autograd has left at one parameter to the buffer: one copy (with the cast to the reduction's dtype), an
        addition when an earlier backward has left a gradient, nothing when it was computed there."""
        parameter = self.parameters[index]
        gradient = _taken_from(parameter)
        if gradient is None:
            return
        earlier = self._view(self.buffer, index) if self._received[index] else None
        local = parameter.contribution.of(gradient, earlier, of_one_loss=self._of_one_loss)
        self._received[index] = True
        self._claimed[index] = False
        view = self._view(self.buffer, index)
        if local is None:  # another rank has all of this gradient
            if earlier is None:
                view.zero_()
        elif earlier is not None:
            view.add_(local)
        elif local.data_ptr() != view.data_ptr() or local.dtype != view.dtype or not local.numel():
            view.copy_(local)

    def _view(self, buffer: DBuffer, index: int) -> torch.Tensor:
        """A parameter's place in a buffer."""
        view = buffer.views[index]
        shape = self.parameters[index].shape
        return view if view.shape == shape else view[: shape[0]]

    # Between backwards

    @property
    def are_of_one_loss(self) -> bool:
        return self._of_one_loss

    def shown(self, index: int) -> torch.Tensor:
        """A parameter's gradient as it has come so far, in its place; zeros if none has. There must be some of others."""
        self._hold_no_more()
        view = self._view(self.buffer, index)
        return view if self._received[index] else view.zero_()

    def keep(self, index: int) -> None:
        """Something has been added to :meth:`shown`."""
        self._received[index] = True

    def forget(self, index: int) -> None:
        """The next gradient of this parameter is the first one."""
        self._received[index] = False

    # Those that are held

    def take_place_of_parameters(self) -> None:
        """The gathered parameters are not needed any more: held gradients go where those were, if they are of one dtype."""
        if self.place is GradientPlace.HELD and self._over_whole is not None:
            self._move(GradientPlace.IN_PLACE)
            self._mark_as_overwritten(p.unsharded for p in self.parameters if p.unsharded is not None)
            self._take_all(self._over_whole)

    def _hold_no_more(self) -> None:
        """Gradients that are held go to memory of their own, and so do those that are still to come."""
        if self.place is GradientPlace.HELD:
            self._move(GradientPlace.APART)
            self._notify(True)
            self._take_all(self._apart.allocate())

    def _take_all(self, target: DBuffer) -> None:
        self.buffer = target
        if self._take_as_row(target):
            return
        with torch.no_grad():
            if target is self._over_whole:
                self.save_from_overwriting()
            for index in range(len(self.parameters)):
                self._take(index)

    def _take_as_row(self, target: DBuffer) -> bool:
        """In one call, when there is an ordinary gradient for each parameter, which is this rank's contribution as it is."""
        if self._row is None:
            unsharded = [
                p.unsharded for p in self.parameters if p.unsharded is not None and not isinstance(p.unsharded, DTensor)
            ]
            self._row = ParameterRow(unsharded if len(unsharded) == len(self.parameters) else ())
        if not self._row.tensors or self._whole is None:
            return False
        places = self._targets.get(id(target))
        if places is None:
            places = self._targets[id(target)] = TensorRow(
                [self._view(target, index) for index in range(len(self.parameters))]
            )
        if not self._row.take_grads(places, self._whole.dtype):
            return False
        self._received = [True] * len(self.parameters)
        return True

    def save_from_overwriting(self) -> None:
        """Held gradients that are (parts of) parameters, before others are written there."""
        if not self.has_any or self._whole is None:
            return
        for parameter in self.parameters:
            unsharded = parameter.unsharded
            if unsharded is None or unsharded.grad is None or unsharded.grad.layout is not torch.strided:
                continue
            if share_memory(local_part(unsharded.grad), self._whole.local):
                unsharded.grad = unsharded.grad.clone()

    # Where parameters were

    def _overwrite(self, index: int) -> None:
        """A gradient takes its parameter's place while the module's backward still runs."""
        parameter = self.parameters[index]
        if self._received[index]:
            raise GradientError(
                f"parameter {parameter.name!r} of shape {parameter.shape} got two gradients in one backward (as with "
                "reentrant activation checkpointing), and the first one has already replaced the parameter in "
                "memory, so that the second may be wrong; expected one: checkpoint with use_reentrant=False, or call "
                "set_in_place_gradients(False) on the module that was passed to fully_shard"
            )
        assert parameter.unsharded is not None
        self._mark_as_overwritten([parameter.unsharded])

    def _mark_as_overwritten(self, parameters: Iterable[torch.Tensor]) -> None:
        """To autograd these parameters are modified, so that whatever has saved them and is still to run fails, until they
        are gathered again."""
        tensors = [t for p in parameters for t in ([p, local_of(p)] if isinstance(p, DTensor) else [p])]
        self._overwritten += [(tensor, tensor._version) for tensor in tensors]
        torch.autograd.graph.increment_version(tensors)

    def restore_versions(self) -> None:
        """The parameters have been gathered again."""
        if self._overwritten:
            set_versions(*zip(*self._overwritten, strict=True))
            self._overwritten = []

    def leave_place_of_parameters(self) -> None:
        """Their memory is about to be freed or gathered anew."""
        if not self.in_place:
            return
        source, self.buffer = self.buffer, self._apart.allocate()
        self._move(GradientPlace.APART)
        with torch.no_grad():
            for index, received in enumerate(self._received):
                if received:
                    self.buffer.views[index].copy_(source.views[index])

    # To the reduction

    def complete(self) -> list[int]:
        """Zero what no gradient has come for, and start anew; :attr:`buffer` is complete. Returns which parameters had one,
        as :func:`use_code`."""
        if not self.has_any:
            self._begin_in_group()
            self.buffer = self._apart.allocate().zero_()
        else:
            self._hold_no_more()
            with torch.no_grad():
                for index, has in enumerate(self._received):
                    if not has:
                        self.buffer.views[index].zero_()
        for index, parameter in enumerate(self.parameters):
            if self._received[index] and parameter.shape != parameter.place:
                self.buffer.views[index][parameter.shape[0] :].zero_()
        found = list(map(int, self._received))
        if self._of_one_loss:
            found = [has and use_code(p.contribution.pending) for has, p in zip(found, self.parameters)]
        self.drop()
        return found

    def drop(self) -> None:
        """Forget them all."""
        if self.has_any:
            self._clear()
        self._received = [False] * len(self.parameters)
        self._claimed = [False] * len(self.parameters)
        self._gate.open()
        self._move(GradientPlace.NONE)

    def _clear(self) -> None:
        for parameter in self.parameters:
            if parameter.unsharded is not None:
                parameter.unsharded.grad = None


def _taken_from(parameter: GatheredParameter) -> torch.Tensor | None:
    """``grad`` of the unsharded form, which is None afterwards."""
    unsharded = parameter.unsharded
    gradient = unsharded.grad if unsharded is not None else None
    if unsharded is None or gradient is None:
        return None
    unsharded.grad = None
    if gradient.layout is not torch.strided:
        raise SparseGradientError(
            f"the gradient of {parameter.name!r} of shape {tuple(gradient.shape)} is a {gradient.layout} tensor; "
            "fully_shard reduces dense ones: make it dense, nn.Embedding(sparse=False)"
        )
    return gradient


def _arrive(gradients: weakref.ref[UnreducedGradients], gradient: torch.Tensor | None) -> None:
    found = gradients()
    if found is not None:
        found._arrive(gradient)


def _receive(gradients: weakref.ref[UnreducedGradients], index: int, unsharded: torch.Tensor) -> None:
    found = gradients()
    if found is not None:
        found._receive(index, unsharded)
