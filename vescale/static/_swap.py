"""``Swap``: which changed function runs where the model calls one."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from vescale.static._analysis import FunctionPlan
from vescale.static._exchanged_code import code_of
from vescale.static._tensor_type import UnrecordedError
from vescale.static._unreached import GuardedFunctions

__all__ = ["Swap"]


class Swap:
    """Looks up the patched function that is called at a place, where the recorded step called those with ``plans``.
    ``originals``: the code of functions that were changed, by that which runs."""

    def __init__(
        self,
        plans: Mapping[types.CodeType, FunctionPlan | None],
        make: Callable[[Any, FunctionPlan], Any],
        guarded: GuardedFunctions,
        originals: Mapping[types.CodeType, types.CodeType],
    ) -> None:
        self.plans, self.make, self.guarded, self.originals = plans, make, guarded, originals
        self.has_sites = _have_sites(plans)
        self.is_guarded = False  # the functions that something else calls here
        self.made: dict[types.FunctionType, Any] = {}

    def __call__(self, called: Any) -> Any:
        function, own = called, None
        if type(called) is functools.partial and type(called.func) in (types.FunctionType, types.MethodType):
            return functools.partial(self(called.func), *called.args, **called.keywords)
        if type(called) is types.MethodType and type(called.__func__) is types.FunctionType:
            function, own = called.__func__, called.__self__
        elif type(called) is not types.FunctionType:
            if isinstance(called, nn.Module):  # one that the function has made for itself
                function, own = type(called).forward, called
            else:
                function, own = type(called).__call__, called
            if code_of(function) not in self.plans and not self.has_sites:
                if not self.is_guarded and isinstance(self.plans, dict):  # those of a file are not known in advance
                    missing = self.guarded.add(self.plans, called)
                    if missing:
                        raise UnrecordedError(f"the function at {missing[0]} cannot be found")
                    if any(plan is not None and plan.actions for plan in self.plans.values()):
                        raise UnrecordedError(f"{called} calls functions of which the arguments cannot be checked")
                self.is_guarded = True
                return called  # getattr, or a class, which calls the recorded function in turn
        made = self.made.get(function)
        if made is None:
            code = code_of(function)
            if code is not None:  # a changed function has defined this one
                code = self.originals.get(code, code)
            if code is None or code not in self.plans:
                raise UnrecordedError(f"{function} is another function than was recorded")
            plan = self.plans[code]
            made = self.made[function] = function if plan is None else self.make(function, plan)
        return made if own is None else types.MethodType(made, own)


def _have_sites(plans: Mapping[types.CodeType, FunctionPlan | None]) -> bool:
    known: bool | None = getattr(plans, "has_sites", None)  # of functions that are looked up when they are called
    return any(plan is not None and plan.has_sites for plan in plans.values()) if known is None else known
