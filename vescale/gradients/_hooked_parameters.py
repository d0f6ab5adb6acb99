"""``HookedParameters``: the parameters of a reducer, those of a module and those given by name, and their hooks."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from vescale.compat import HookGate, is_captured
from vescale.errors import GradientReducerError, kind_of
from vescale.gradients._arrival_hooks import ArrivalHooks, HooksOfPrograms
from vescale.gradients._parameter import GradientRule, ReducedParameter
from vescale.gradients._reduction import Policy

# Attribute of parameters that have a reducer.
_OWNED = "_vescale_reduced"
_REDUCING = (
    DistributedDataParallel,
    FullyShardedDataParallel,
    FSDPModule,
)  # modules of vescale.fsdp are FSDPModules, too
_checks: list[Callable[[nn.Module], str | None]] = []


def refuse_reducers_of(check: Callable[[nn.Module], str | None]) -> None:
    """Refuse a :class:`GradientReducer` for modules whose gradients are reduced otherwise.

    ``check`` gets each part of the module and returns None, or how its gradients are reduced and what to do instead.
    """
    _checks.append(check)


class HookedParameters:
    """Parameters with hooks.

    Args:
        module: the module whose parameters get hooks, frozen ones too, because they may be unfrozen later. ValueError if
            something else reduces their gradients.
        begin: called with each gradient before it is accumulated, unless the gate is shut. Not called for gradients that
            ``torch.autograd.grad`` returns if the parameter's rule completes them.
        take: called with the parameter after its gradient has been accumulated.
        gate: shut while ``begin`` has nothing to do.

    Attributes:
        waiting: hooks of programs for accumulated gradients, which are called when those are complete.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: Policy,
        begin: Callable[[torch.Tensor], None],
        take: Callable[[ReducedParameter, nn.Parameter], None],
        gate: HookGate,
    ) -> None:
        _refuse_reducing(module)
        self._module, self._policy = module, policy
        self._begin, self._take, self._gate = begin, take, gate
        self._tree: ModuleTree | None = None  # as of the last call of `changes`
        self.waiting: dict[int, HooksOfPrograms] = {}
        self._of_module: dict[int, ReducedParameter] = {}  # by id of the nn.Parameter, which the value keeps alive

    def have_changed(self) -> bool:
        """Whether the module's parameters have changed since the last call of :meth:`changes`."""
        return self._tree is None or self._tree.has_changed()

    def changes(self) -> tuple[list[ReducedParameter], list[ReducedParameter]]:
        """The parameters that the module has got since the last call, and those that it no longer has."""
        self._tree = ModuleTree(self._module)
        now = set(map(id, self._tree.parameters()))
        gone = [reduced for key, reduced in self._of_module.items() if key not in now]
        for reduced in gone:
            del self._of_module[id(reduced.parameter)]
        named = [(n, p, GradientRule()) for n, p in self._module.named_parameters() if id(p) not in self._of_module]
        new = self.wrap([each for each in named if _has_gradients(each[1])])
        self._of_module.update((id(reduced.parameter), reduced) for reduced in new)
        return new, gone

    def wrap(self, parameters: Sequence[tuple[str, nn.Parameter, GradientRule]]) -> list[ReducedParameter]:
        """The parameters as :class:`ReducedParameter`, without hooks. Skips those on meshes that lack this rank."""
        found = []
        for name, parameter, rule in parameters:
            if getattr(parameter, _OWNED, None) == id(parameter):  # a copy carries its original's
                if not parameter.requires_grad:
                    continue
                raise GradientReducerError(
                    f"{name} already has a GradientReducer, so that its gradient would be reduced twice; use that "
                    "reducer (gradient_reducer(model) of a parallelized model), or remove() it"
                )
            if not isinstance(parameter, DTensor) or parameter.device_mesh.get_coordinate() is not None:
                found.append(ReducedParameter(name, parameter, rule, self._policy))
        return found

    def watch(self, added: Sequence[ReducedParameter]) -> None:
        for reduced in added:
            parameter, complete = reduced.parameter, reduced.rule.on_captured
            setattr(parameter, _OWNED, id(parameter))
            begin = self._begin if complete is None else functools.partial(self._complete_or_begin, complete)
            take = functools.partial(self._take, reduced)
            HooksOfPrograms.of(parameter, self.waiting)
            reduced.hooks = ArrivalHooks(parameter, begin, take, self._gate)
            reduced.notify(True)

    def _complete_or_begin(
        self, complete: Callable[[torch.Tensor], torch.Tensor], gradient: torch.Tensor
    ) -> torch.Tensor | None:
        if is_captured():
            return complete(gradient)
        self._begin(gradient)
        return None

    def release(self, released: Sequence[ReducedParameter]) -> None:
        for reduced in released:
            self._of_module.pop(id(reduced.parameter), None)
            if reduced.hooks is not None:
                reduced.hooks.remove()
                reduced.hooks = None
                of_programs = reduced.parameter._post_accumulate_grad_hooks
                if isinstance(of_programs, HooksOfPrograms):
                    of_programs.leave()
            if hasattr(reduced.parameter, _OWNED):
                delattr(reduced.parameter, _OWNED)


class ModuleTree:
    """The modules below a module, and their parameters. Changes are detected from the modules' dictionaries without walking
    the tree, because this happens in every step."""

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        self._parameters = [part._parameters.values() for part in modules]
        self._contents = [*self._parameters, *(part._modules.values() for part in modules)]
        self._known: list[object] = list(itertools.chain.from_iterable(self._contents))

    def has_changed(self) -> bool:
        found, known = list(itertools.chain.from_iterable(self._contents)), self._known
        return len(found) != len(known) or not all(map(operator.is_, found, known))

    def parameters(self) -> list[nn.Parameter | None]:
        """Shared ones once for each use."""
        return list(itertools.chain.from_iterable(self._parameters))


def _has_gradients(parameter: nn.Parameter) -> bool:
    return (parameter.is_floating_point() or parameter.is_complex()) and not parameter.is_inference()


def _refuse_reducing(module: nn.Module) -> None:
    for name, part in module.named_modules():
        reason = next((found for check in _checks if (found := check(part)) is not None), None)
        if reason is None and isinstance(part, _REDUCING):
            reason = (
                f"{kind_of(part)}, which reduces the gradients of its parameters; pass only modules without such "
                "parts to the reducer"
            )
        if reason is not None:
            raise GradientReducerError(f"GradientReducer of a module whose part {name or '(itself)'!r} is {reason}")
