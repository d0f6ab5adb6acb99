"""``Placing``: one instruction, carried out on the tensors in an input or an output of a module; and writes to these."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import (
    EarlyStop,
    counts_local_writes,
    is_written_back,
    local_of,
    map_tensors,
    own_part,
    set_versions,
    spec_of,
    versions,
)
from vescale.errors import BoundaryError, EntryError
from vescale.ir import Annotate, Instruction, Redistribute, Wrap
from vescale.ops import (
    PreparedConversion,
    convert,
    enter_local,
    is_sparse,
    num_writes,
    require_current,
    settle,
    settling,
    share_version,
    stages_between,
    wrap_global,
)
from vescale.placements import contiguous_stride, from_front, from_local, shard_dim
from vescale.runtime._activation import THREAD, current_activation
from vescale.runtime._implicit_site import placements_text
from vescale.runtime._runtime import Runtime

# Inputs of a module that its entries have moved, and writes to them.
#
# On one device a module writes to the very tensor that its caller holds. Where an ``<in>`` entry moves nothing, the two are
# one tensor here, too (:func:`vescale.ops.convert`). Where it moves data, a write goes to a copy. When the module ends, the
# caller's tensor gets the new values, in autograd, too: its version counts the write, and its gradient goes through it.


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """An input, and what the module gets in its place: a DTensor that does not share its memory, or not its version.

    Attributes:
        given: as the caller holds it, a DTensor or a plain tensor.
        name: as a plan names the input.
        before: versions of ``given`` and of ``result`` before the forward.
        num_writes: to ``result`` before the forward, as far as Python counts them.
    """

    given: torch.Tensor
    result: DTensor
    name: str
    instruction: Instruction
    runtime: Runtime
    before: tuple[tuple[int, ...], tuple[int, ...]]
    num_writes: int

    @classmethod
    def of(
        cls, given: torch.Tensor, result: torch.Tensor, name: str, instruction: Instruction, runtime: Runtime
    ) -> Placed:
        found = cast(DTensor, result)
        return cls(given, found, name, instruction, runtime, (versions(given), versions(found)), num_writes(found))

    def is_written(self) -> bool:
        """Whether there was a write to ``result`` itself: both tensors may have one version for autograd."""
        before, now = self.before[1], versions(self.result)
        if before == now or before[1:] != now[1:]:
            return before != now
        known = num_writes(self.result)
        return not counts_local_writes() and (known == -1 or known != self.num_writes)


def write_back(placed: Sequence[Placed]) -> None:
    """At the end of the forward: bring what was written to ``result`` to ``given``. Communicates if anything was, as the
    entry does in the other direction.

    After an exception nothing happens, because other ranks may not have one; reading ``given`` raises then. One is no error:
    it ends a recomputation when all saved tensors are there, on all ranks at the same op.

    Raises:
        PlanError: another input is the same memory, and was brought elsewhere: the module may have read old values of it;
            the module has changed the shape of its input in place; or a plain tensor of the caller would keep old values.
    """
    raised = sys.exc_info()[1]
    if raised is not None and not isinstance(raised, EarlyStop):
        return
    written = [one for one in placed if one.is_written()]
    for one in placed:
        if one in written or not isinstance(one.given, DTensor):  # nobody will see that a plain tensor has old values
            require_current(one.result)
    for one in written:
        for other in placed:
            if other.result is not one.result and _share_memory(other.given, one.given):
                raise BoundaryError(
                    f"the module writes to its input {one.name} in place, which on one device shares memory with "
                    f"{other.name}; here they are two tensors, because the plan moves them. Write the same entry for "
                    "both, or write to a copy in the module (x = x.clone())",
                    one.instruction.source,
                )
        if one.result.shape != one.given.shape and not _is_local(one):
            raise BoundaryError(
                f"the module changes the shape of its input {one.name} in place, from {tuple(one.given.shape)} to "
                f"{tuple(one.result.shape)}; the caller's tensor cannot follow, because the plan moves it. Use an op that "
                "returns a new tensor",
                one.instruction.source,
            )
    for one in dict.fromkeys(written):
        _write(one)


def _write(one: Placed) -> None:
    given, result = one.given, one.result
    requester = f"{one.name}: written back"
    if isinstance(given, DTensor):
        settle(result, given)  # so that both may be read
        require_current(given)  # also what it views, all of which is written back
    new: torch.Tensor
    if isinstance(given, DTensor):
        new = convert(result, given.placements, requester=requester)
    elif _is_local(one):
        op = one.instruction.op
        assert isinstance(op, Annotate | Wrap)
        new = enter_local(convert(result, op.placements, requester=requester))
    else:
        new = enter_local(convert(result, one.runtime.replicated, requester=requester))
    version = versions(given)[0]
    has_counted = version != one.before[0][0]
    if has_counted:  # before the copy: a view remembers the version at which its history was written
        set_versions((given,), (version - 1,))
    with torch.inference_mode() if given.is_inference() else contextlib.nullcontext(), settling():
        given.copy_(new)
    if has_counted and versions(given)[0] != version:
        set_versions((given,), (version,))
    if isinstance(given, DTensor):
        settle(result, given)
    else:
        is_written_back(given)


def _is_local(one: Placed) -> bool:
    """Whether ``given`` is each rank's part."""
    op = one.instruction.op
    return isinstance(op, Annotate) or (isinstance(op, Wrap) and op.given == "local")


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Storages are compared, and not addresses: empty parts have none, and all ranks have to find the same."""
    first, second = own_part(one), own_part(other)
    return first.untyped_storage() is second.untyped_storage()


def _refuse_outdated(name: str, instruction: Instruction) -> None:
    """An op is about to read one of the tensors at a boundary, and another has been written to."""
    raise BoundaryError(
        f"an op is about to read the tensor before or after {name}, after the other one was written to in place. On "
        "one device they are one tensor; here they are two, because the plan moves data there, so that the op would "
        "read old values. Write to a copy in the program (x = x.clone()), or change the entry so that nothing moves",
        instruction.source,
    )


# One conversion for all modules that get the same tensor with equal ``<in>`` entries (query, key and value
# projections). It is one all-gather in forward instead of three, and one reduction in backward instead of three,
# because autograd adds the gradients of the one result first.

Stage = Sequence[Placement | None]


class Stages:
    """A conversion: the placements of the tensor, and those of its gradient (see ``convert``).

    There is one object for all equal ones (:func:`stages_of`), so that they are compared by identity.
    """

    def __init__(self, target: Stage, grad_source: Stage | None, grad_target: Stage | None) -> None:
        self._target, self._grad_source, self._grad_target = target, grad_source, grad_target

    def convert(self, x: DTensor, requester: str, outdated: Callable[[], None]) -> DTensor:
        return convert(
            x,
            self._target,
            grad_source=self._grad_source,
            grad_target=self._grad_target,
            requester=requester,
            outdated=outdated,
        )

    def prepared(self, placements: tuple[Placement, ...], requester: str) -> PreparedConversion:
        """:meth:`convert` of tensors with these placements, to which nobody writes, for many calls."""
        target, grad_source, grad_target = (
            None if stage is None else tuple(stage) for stage in (self._target, self._grad_source, self._grad_target)
        )
        assert target is not None
        return PreparedConversion(placements, target, (grad_source, grad_target), requester)

    def bound(self, x: DTensor) -> tuple[object, object]:
        """Target and stages of the gradient, as :meth:`convert` passes them to C++ for tensors placed as ``x``."""
        target, source, last = (
            None if stage is None else tuple(stage) for stage in (self._target, self._grad_source, self._grad_target)
        )
        assert target is not None
        return stages_between(tuple(x.placements), target, source, last, False)

    def convert_once(self, x: DTensor, requester: str, outdated: Callable[[], None]) -> DTensor:
        """:meth:`convert`, or its earlier result within the forward of the module that passes ``x`` on.

        Results are kept until that module returns, and their sources, so that no other tensor gets the ``id`` of one. A
        write to either ends the sharing, also one to a local tensor (``to_local()``), and a change of what requires a
        gradient. Tensors of inference mode have no version, and are not shared.
        """
        activation = current_activation()
        if activation is None or x.is_inference():
            return self.convert(x, requester, outdated)
        made = activation.frames[-1].converted
        key = (id(x), self, torch.is_grad_enabled())
        held = made.get(key)
        if held is not None:
            _, result, before = held
            if before == _state(x, result):
                return result
        result = self.convert(x, requester, outdated)
        made[key] = x, result, _state(x, result)
        return result


def _state(x: DTensor, result: DTensor) -> tuple[object, ...]:
    """What changes with what ``x`` and ``result`` hold."""
    return (*versions(x), *versions(result), x.requires_grad, id(local_of(x)))


@functools.cache
def stages_of(
    target: tuple[Placement | None, ...],
    grad_source: tuple[Placement | None, ...] | None,
    grad_target: tuple[Placement | None, ...] | None,
) -> Stages:
    return Stages(target, grad_source, grad_target)


# Values without tensors, which are most arguments of a call.
_PLAIN = frozenset((type(None), bool, int, float, str))
# Specs of which a conversion remembers that it has checked them. A module usually gets one; they are kept alive.
_MAX_KNOWN = 8


class Placing:
    """Called with an input or an output, which may hold tensors in containers; returns it with these placed.

    Attributes:
        index: which input or output, as in the instruction.
        requester: name of its communication in the ledger.
        outdated: called before an op that would read an old value; see :func:`vescale.ops.convert`. A global table holds it,
            so it must not reference the model.
    """

    def __init__(self, runtime: Runtime, instruction: Instruction) -> None:
        path, target = instruction.path, instruction.target
        self.runtime, self.instruction, self.index = runtime, instruction, instruction.index
        self._op = instruction.op
        self.requester = f"{path}.{target}" if path else target
        self.outdated = functools.partial(_refuse_outdated, self.target_text, instruction)
        self._is_shared = target == "<in>"
        self._is_handed_out = path == "" and target == "<out>"
        self._known: dict[int, tuple[Any, Stages]] = {}  # by id of a spec, which the value keeps alive
        self._planned: dict[int, tuple[Placement, ...]] = {}  # of plain inputs, by their number of dims

    def __deepcopy__(self, memo: dict[int, Any]) -> Placing:
        return Placing(copy.deepcopy(self.runtime, memo), self.instruction)

    def __call__(self, value: Any, placed: list[Placed] | None = None) -> Any:
        """``placed`` gets the tensors that are not one with what they were made of: writes to them have to be followed."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        place = self._place if placed is None else functools.partial(self._place_and_note, placed)
        result = place(value) if kind is DTensor else map_tensors(place, value)
        return map_tensors(self._handed_out, result) if self._is_handed_out else result

    def _place_and_note(self, placed: list[Placed], x: torch.Tensor) -> torch.Tensor:
        for one in placed:
            if one.given is x and one.instruction.op == self._op:  # a tensor that is passed twice stays one
                return one.result
        result = self._place(x)
        if result is not x and not (isinstance(x, DTensor) and local_of(x) is local_of(result)):  # type: ignore[arg-type]
            placed.append(Placed.of(x, result, self.target_text, self.instruction, self.runtime))
        return result

    def _handed_out(self, x: torch.Tensor) -> torch.Tensor:
        """An output of the model that an entry names: the plain global tensor if it is Replicate on every axis."""
        whole = isinstance(x, DTensor) and tuple(x.placements) == self.runtime.replicated
        return enter_local(x) if whole else x  # type: ignore[arg-type]

    def _place(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor):
            if not isinstance(self._op, Redistribute):
                return x
            stages = self._stages_of(x)
            recorder = _recorder()
            if recorder is not None:
                return recorder.boundary(self, x, stages, self._is_shared)
            convert = stages.convert_once if self._is_shared else stages.convert
            return convert(x, self.requester, self.outdated)
        runtime, op = self.runtime, self._op
        if isinstance(op, Redistribute):
            return x if is_sparse(x) else self._place(wrap_global(x, runtime.mesh, runtime.replicated, self.requester))
        assert isinstance(op, Wrap | Annotate), op
        placements = self.planned(x)
        if is_sparse(x):
            return self._whole_sparse(x, placements)
        if isinstance(op, Annotate):
            return from_local(x, runtime.mesh, placements)
        if op.given == "local" and self.runtime not in THREAD.generating:
            shape = THREAD.global_shapes.get(id(x)) if THREAD.global_shapes is not None else None
            stride = contiguous_stride(shape) if shape is not None else None
            size = torch.Size(shape) if shape is not None else None
            made = from_local(x, runtime.mesh, placements, shape=size, stride=stride)
            share_version(x, made)  # so that backward refuses what it has saved when the caller has written to it since
            return made
        return wrap_global(x, runtime.mesh, placements, self.requester)

    def _whole_sparse(self, x: torch.Tensor, placements: Sequence[Placement]) -> torch.Tensor:
        if self.takes_local_parts or any(not p.is_replicate() for p in placements):
            raise EntryError(
                f"{self.target_text} places a {x.layout} tensor of shape {tuple(x.shape)} as {tuple(placements)}: "
                "sparse tensors must be the same on every rank. Remove the entry, or pass a dense tensor, "
                "x.to_dense()",
                self.instruction.source,
            )
        return x

    def way(self, x: DTensor) -> tuple[Any, ...]:
        """For hooks in C++ (``csrc/boundaries.h``), what happens to DTensors with the spec of ``x``: the spec, the target,
        the stages of the gradient, the requester, ``outdated``, and by what the results are shared, None: by nothing.
        The target is None where DTensors stay as they are."""
        if not isinstance(self._op, Redistribute):
            return spec_of(x), None, None, None, None, None
        stages = self._stages_of(x)
        return spec_of(x), *stages.bound(x), self.requester, self.outdated, stages if self._is_shared else None

    @property
    def takes_local_parts(self) -> bool:
        """Whether a plain tensor is one rank's part."""
        op = self._op
        return isinstance(op, Annotate) or (isinstance(op, Wrap) and op.given == "local")

    def planned(self, x: torch.Tensor) -> tuple[Placement, ...]:
        """The placements of a plain input."""
        ndim = x.ndim
        known = self._planned.get(ndim)
        if known is None:
            assert isinstance(self._op, Wrap | Annotate), self._op
            planned = tuple(r if p is None else p for p, r in zip(self._op.placements, self.runtime.replicated))
            self._check(x, planned)
            known = self._planned[ndim] = cast(tuple[Placement, ...], _front(planned, ndim))
        return known

    def _stages_of(self, x: DTensor) -> Stages:
        spec = spec_of(x)
        known = self._known.get(id(spec))
        return known[1] if known is not None and known[0] is spec else self._stages(x)

    def _stages(self, x: DTensor) -> Stages:
        """The conversion of a tensor with this spec, after checks that depend on nothing else."""
        op = self._op
        assert isinstance(op, Redistribute), op
        self._check(x, op.dst)
        if op.src is not None:
            self._check_arrival(x, op.src)
        stages, _ = self.conversion(x.ndim)
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        spec = spec_of(x)
        self._known[id(spec)] = spec, stages
        return stages

    def conversion(self, ndim: int) -> tuple[Stages, bool]:
        """What a redistribution does to DTensors of ``ndim`` dims, and whether other entries share its results."""
        op = self._op
        assert isinstance(op, Redistribute), op
        target = _front(op.dst, ndim)
        assert target is not None
        return stages_of(target, _front(op.grad_src, ndim), _front(op.grad_dst, ndim)), self._is_shared

    @property
    def name(self) -> tuple[str, str]:
        """The path of the module, and the text of the instruction without it."""
        path, text = self.instruction.path, self.instruction.text(self.runtime.axes)
        return path, text[len(path) :]

    # Checks

    def _check(self, x: torch.Tensor, placements: Sequence[Placement | None]) -> None:
        for axis, placement in zip(self.runtime.axes, placements):
            dim = shard_dim(placement) if placement is not None else None
            if dim is not None and x.ndim and not -x.ndim <= dim < x.ndim:
                raise BoundaryError(
                    f"{self.target_text} has shape {tuple(x.shape)}, but the plan shards its dim {dim} over {axis!r}; "
                    f"name the tensor that is meant (<in:name>, <out:0>), or use a dim below {x.ndim}",
                    self.instruction.source,
                )

    def _check_arrival(self, x: DTensor, source: Sequence[Placement | None]) -> None:
        expected = tuple(f if s is None else s for f, s in zip(x.placements, _front(source, x.ndim) or ()))
        if expected != tuple(x.placements):
            raise BoundaryError(
                f"{self.target_text} of shape {tuple(x.shape)} arrives as "
                f"{placements_text(x.placements, self.runtime.axes)}, but the plan's redistribute expects "
                f"{placements_text(expected, self.runtime.axes)}; correct its src, or use shard, which accepts any "
                "placement",
                self.instruction.source,
            )

    @property
    def target_text(self) -> str:
        """As a plan names it."""
        instruction = self.instruction
        index = "" if instruction.index is None else f":{instruction.index}"
        target = instruction.target.replace(">", f"{index}>")
        return f"{instruction.path}.{target}" if instruction.path else target


def _recorder() -> Any:
    activation = current_activation()
    return activation.recorder if activation is not None else None


def _front(stage: Sequence[Placement | None] | None, ndim: int) -> tuple[Placement | None, ...] | None:
    """Placements with dims counted from the front."""
    if stage is None:
        return None
    return tuple(None if p is None else from_front(p, ndim) for p in stage)
