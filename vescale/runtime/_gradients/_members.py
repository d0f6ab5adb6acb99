"""Which parameters a reducer looks after: those of a module, as the module changes, and those it is given by name."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as StockFSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from vescale.compat import HookGate
from vescale.fsdp import FSDPModule
from vescale.runtime._gradients._entry import Entry, GradientRule
from vescale.runtime._gradients._reduction import Policy
from vescale.runtime._runtime import Runtime

__all__ = ["Members"]

# Set on a parameter that has a reducer.
_OWNED = "_vescale_reduced"
_REDUCING = (DistributedDataParallel, FullyShardedDataParallel, StockFSDPModule, FSDPModule)


class Members:
    """Parameters with hooks.

    Args:
        module: whose parameters are looked after, frozen ones too: their hooks wait for the day they are not. ValueError
            if something else reduces their gradients.
        begin: called with each gradient before it is accumulated, unless the gate is shut.
        take: called after that, with the entry and the parameter.
        gate: while it is shut, there is nothing to begin.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: Policy,
        begin: Callable[[torch.Tensor], None],
        take: Callable[[Entry, nn.Parameter], None],
        gate: HookGate,
    ) -> None:
        _refuse_reducing(module)
        self._module, self._policy = module, policy
        self._begin, self._take, self._gate = begin, take, gate
        self._tree: _Tree | None = None  # as it was seen last
        self._of_module: dict[int, Entry] = {}  # by id of the parameter, which the entry keeps alive
        self._handles: dict[Entry, Any] = {}
        self._takers: dict[Entry, Any] = {}

    def have_changed(self) -> bool:
        """Whether :meth:`changes` would look at something new."""
        return self._tree is None or self._tree.has_changed()

    def changes(self) -> tuple[list[Entry], list[Entry]]:
        """The parameters that the module has got since the last call, and those that it no longer has."""
        self._tree = _Tree(self._module)
        now = set(map(id, self._tree.parameters()))
        gone = [entry for key, entry in self._of_module.items() if key not in now]
        for entry in gone:
            del self._of_module[id(entry.parameter)]
        named = [(n, p, GradientRule()) for n, p in self._module.named_parameters() if id(p) not in self._of_module]
        new = self.entries_of([each for each in named if _has_gradients(each[1])])
        self._of_module.update((id(entry.parameter), entry) for entry in new)
        return new, gone

    def entries_of(self, parameters: Sequence[tuple[str, nn.Parameter, GradientRule]]) -> list[Entry]:
        """Without hooks yet. Skips parameters on meshes that this rank is not part of."""
        entries = []
        for name, parameter, rule in parameters:
            if getattr(parameter, _OWNED, None) == id(parameter):  # a copy carries its original's
                if not parameter.requires_grad:
                    continue
                raise ValueError(
                    f"{name} has a GradientReducer already, so that its gradient would be reduced twice; use that one "
                    "(gradient_reducer(model) of a parallelized model), or remove() it"
                )
            if not isinstance(parameter, DTensor) or parameter.device_mesh.get_coordinate() is not None:
                entries.append(Entry(name, parameter, rule, self._policy))
        return entries

    def watch(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            setattr(entry.parameter, _OWNED, id(entry.parameter))
            with _taking_hooks(entry.parameter) as parameter:
                self._handles[entry] = parameter.register_hook(self._begin)
                self._gate.guard(parameter)
            self.hear(entry, True)

    def hear(self, entry: Entry, is_heard: bool) -> None:
        """Whether ``take`` is called with this entry from now on; nothing if it is not looked after."""
        if not is_heard:
            if entry in self._takers:
                self._takers.pop(entry).remove()
        elif entry in self._handles and entry not in self._takers:
            with _taking_hooks(entry.parameter) as parameter:
                take = functools.partial(self._take, entry)
                self._takers[entry] = parameter.register_post_accumulate_grad_hook(take)

    def release(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._gate.release(entry.parameter)
            for handles in (self._handles, self._takers):
                if entry in handles:
                    handles.pop(entry).remove()
            if hasattr(entry.parameter, _OWNED):
                delattr(entry.parameter, _OWNED)

    def release_all(self) -> None:
        self.release(list(self._handles))
        self._of_module.clear()


@contextlib.contextmanager
def _taking_hooks(parameter: nn.Parameter) -> Iterator[nn.Parameter]:
    """Only a trained parameter takes hooks; they stay when it is frozen."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)
    yield parameter
    parameter.requires_grad_(is_trained)


class _Tree:
    """The modules in a module, and their parameters. Their dictionaries are looked at, not walked: this happens in every
    step."""

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        self._parameters = [part._parameters.values() for part in modules]
        self._contents = [*self._parameters, *(part._modules.values() for part in modules)]
        self._seen = self._found()

    def _found(self) -> list[object]:
        return list(itertools.chain.from_iterable(self._contents))

    def has_changed(self) -> bool:
        found, seen = self._found(), self._seen
        return len(found) != len(seen) or not all(map(operator.is_, found, seen))

    def parameters(self) -> list[nn.Parameter | None]:
        """Shared ones as often as they are met."""
        return list(itertools.chain.from_iterable(self._parameters))


def _has_gradients(parameter: nn.Parameter) -> bool:
    return (parameter.is_floating_point() or parameter.is_complex()) and not parameter.is_inference()


def _refuse_reducing(module: nn.Module) -> None:
    for name, part in module.named_modules():
        kind = next((kind for kind in _REDUCING if isinstance(part, kind)), None)
        if kind is None and Runtime.of(part) is None:
            continue
        raise ValueError(
            f"GradientReducer of a module whose part {name or '(itself)'!r} is "
            + (
                f"a {kind.__module__}.{kind.__qualname__}, which reduces the gradients of its parameters; give the "
                "reducer only modules without such parts"
                if kind is not None
                else "parallelized, so that its gradients are reduced already; use vescale.runtime.gradient_reducer(model)"
            )
        )
