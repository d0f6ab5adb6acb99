"""``ModelUnits``: the units of a plan (ZeRO) during recorded and static forwards.

The engine gathers and reshards parameters, and reduces their gradients, at the same moments as in eager mode: its hooks are
called with local tensors. Between them, modules show the local tensors of the gathered parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from vescale.fsdp import ManagedParameter, ModuleState, state_of
from vescale.static._local_parameter import LocalParameter

__all__ = ["ModelUnits", "UnitForward"]


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

    def names(self) -> dict[int, str]:
        """Names of parameters, by ``id`` of both of their forms."""
        return {
            id(form): parameter.name
            for parameter in self.parameters.values()
            for form in (parameter.sharded, parameter.unsharded)
            if form is not None
        }

    def names_in(self, model: nn.Module) -> dict[int, str]:
        """Names of all parameters and buffers of the model, by ``id``."""
        named = [*model.named_parameters(), *model.named_buffers()]
        return {id(x): name for name, x in named} | self.names()

    def mark(self) -> tuple[int, list[int]]:
        """What of the order of forwards is known so far, for :meth:`return_to`."""
        if not self._states:
            return 0, []
        comm = self._states[0].tree.comm
        return 0 if comm is None else len(comm.prefetches), [len(group.forward_places) for group in self._groups]

    def return_to(self, mark: tuple[int, list[int]]) -> None:
        """Forget the modules that ran since, whose forward is repeated."""
        num_prefetches, num_places = mark
        for group, number in zip(self._groups, num_places, strict=True):
            del group.forward_places[number:]
        if self._states:
            del self._states[0].tree.comm.prefetches[num_prefetches:]


class UnitForward:
    """A module's forward on local tensors, with its unit's gather before it and what follows it.

    Args:
        parameters: of the unit.
    """

    def __init__(self, state: ModuleState, module: nn.Module, parameters: Iterable[LocalParameter]) -> None:
        self._state, self._module, self._parameters = state, module, list(parameters)

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state, module = self._state, self._module
        try:
            args, kwargs = state.before_forward(module, args, kwargs)
            try:
                for parameter in self._parameters:
                    parameter.show()
                result = forward(*args, **kwargs)
            finally:
                for parameter in self._parameters:
                    parameter.hide()
            return state.after_forward(module, args, result)
        except BaseException:
            state.after_exception(module, args, None)
            raise
