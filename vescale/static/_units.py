"""``ModelUnits``: the units of a plan (ZeRO) during recorded and static forwards.

The engine gathers and reshards parameters, and reduces their gradients, at the same moments as in eager mode: its hooks are
called with local tensors. Between them, and in recomputations of what ran there, modules show the local tensors of the
gathered parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import no_torch_function, tensors_in, with_torch_function
from vescale.fsdp import ManagedParameter, ModuleState, state_of
from vescale.static._gradients import Shown, shown_local, with_attributes

# ``LocalParameter``: a parameter of a unit, shown as its local tensor while the unit runs in a static forward.


class LocalParameter:
    """Shows the local tensor of a parameter as an attribute of its modules, in front of the parameter.

    Args:
        parameter_name: in the model.
        current: gives the parameter, which is another object than the one at rest.
        places: the ``__dict__`` of each module that has the parameter, and its name there.
        grad: placements of the local gradients; None: there are none.
        requires_grad: whether the parameter does.
    """

    def __init__(
        self,
        parameter_name: str,
        current: Callable[[], DTensor],
        places: list[tuple[dict[str, Any], str]],
        grad: tuple[Placement, ...] | None,
        requires_grad: bool,
    ) -> None:
        self.parameter_name = parameter_name
        self.on_show: Callable[[torch.Tensor], None] | None = None
        """Called with the local tensor before modules show it."""
        self._current, self._places, self._grad, self._requires_grad = current, places, grad, requires_grad
        self._source: torch.Tensor | None = None
        self._shown: Shown | None = None
        self._last: torch.Tensor | None = None

    def show(self) -> None:
        """Show the local tensor if the parameter is gathered, and nothing if it is not."""
        x, (module, own_name) = self._current(), self._places[0]
        if module["_parameters"].get(own_name) is not x:
            self.hide()
            return
        local = with_attributes(x)
        if self._requires_grad and torch.is_grad_enabled():
            if self._source is not local or self._shown is None or self._shown.tensor.data_ptr() != local.data_ptr():
                self._source, self._shown = local, shown_local(x, self._grad, self._places[0][1])
            local = self._shown.tensor
        self._last = local
        if self.on_show is not None:
            self.on_show(local)
        self.show_again()

    def show_again(self) -> None:
        """What the last :meth:`show` has shown, if the parameter is still gathered."""
        module, own_name = self._places[0]
        if module["_parameters"].get(own_name) is self._current():
            for held, name in self._places:
                held[name] = self._last

    def hide(self) -> None:
        for held, name in self._places:
            held.pop(name, None)


_AT_REST = " (sharded)"


class ModelUnits:
    """The units of a model.

    Attributes:
        parameters: by (``id`` of the module, name in it).
    """

    def __init__(self, model: nn.Module) -> None:
        found = (state_of(module) for module in model.modules())
        self._states = list(dict.fromkeys(state for state in found if state is not None))
        self._groups = [group for state in self._states for group in state.groups]
        self.parameters: dict[tuple[int, str], ManagedParameter] = {
            (id(slot.module), slot.name): parameter
            for group in self._groups
            for parameter in group.parameters
            for slot in parameter.slots
        }
        self._owners = {p.name: state for state in self._states for group in state.groups for p in group.parameters}

    def names(self) -> dict[int, str]:
        """Names of parameters, by ``id`` of both of their forms. These are two tensors, with gradients of their own."""
        names = {id(p.sharded): p.name + _AT_REST for p in self.parameters.values()}
        return names | {id(p.unsharded): p.name for p in self.parameters.values() if p.unsharded is not None}

    def names_in(self, model: nn.Module) -> dict[int, str]:
        """Names of all parameters and buffers of the model, by ``id``."""
        named = [*model.named_parameters(), *model.named_buffers()]
        return {id(x): name for name, x in named} | self.names()

    def is_elsewhere(self, name: str, running: Iterable[nn.Module]) -> bool:
        """Whether the parameter belongs to a unit that has not gathered it for the modules that run. It is sharded there, or
        gathered for an earlier use."""
        if name.endswith(_AT_REST):
            return True
        owner = self._owners.get(name)
        return owner is not None and not any(module in owner.modules for module in running)

    def mark(self) -> tuple[int, list[int]]:
        """What of the order of forwards is known so far, for :meth:`return_to`."""
        if not self._states:
            return 0, []
        comm = self._states[0].iteration.comm
        return 0 if comm is None else len(comm.prefetches), [len(group.forward_places) for group in self._groups]

    def return_to(self, mark: tuple[int, list[int]]) -> None:
        """Forget the modules that ran since, whose forward is repeated."""
        num_prefetches, num_places = mark
        for group, number in zip(self._groups, num_places, strict=True):
            del group.forward_places[number:]
        if self._states:
            del self._states[0].iteration.comm.prefetches[num_prefetches:]


class UnitForward:
    """A module's forward on local tensors, with its unit's gather before it and what follows it.

    Args:
        parameters: of the unit.
        running: to which this is added while it runs.
        on_views: called with what the hooks give in place of tensors.
    """

    def __init__(
        self,
        state: ModuleState,
        module: nn.Module,
        parameters: Iterable[LocalParameter],
        running: list[UnitForward],
        on_views: Callable[[list[torch.Tensor]], None],
    ) -> None:
        self._state, self._module, self.parameters = state, module, list(parameters)
        self._running, self._is_shown, self._on_views = running, False, on_views

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The unit's hooks run aside of the cursor."""
        with no_torch_function():
            return self._run(forward, args, kwargs)

    def _run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state, module = self._state, self._module
        try:
            args, kwargs = state.before_forward(module, args, kwargs)
            self._on_views(list(tensors_in((args, kwargs))))
            with self.shown():
                self._running.append(self)
                try:
                    with with_torch_function():
                        result = forward(*args, **kwargs)
                finally:
                    self._running.pop()
            result = state.after_forward(module, args, result)
            self._on_views(list(tensors_in(result)))
            if self._is_shown:  # the module has called itself, and its parameters may be sharded again
                self.show()
            return result
        except BaseException:
            state.after_exception(module, args, None)
            raise

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Modules show the local tensors of the parameters, which are gathered."""
        is_outermost, self._is_shown = not self._is_shown, True
        try:
            self.show()
            yield
        finally:
            if is_outermost:
                self._is_shown = False
                self.hide()

    def show(self) -> None:
        for parameter in self.parameters:
            parameter.show()

    def show_again(self) -> None:
        for parameter in self.parameters:
            parameter.show_again()

    def hide(self) -> None:
        for parameter in self.parameters:
            parameter.hide()
