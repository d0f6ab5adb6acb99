"""Functions that Python or C++ calls in a recorded forward: constructors, properties, callbacks. No call in the source can
be changed to run another function. They called no torch function, and must not take branches in which they may."""

from __future__ import annotations

import ast
import functools
import gc
import threading
import types
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from vescale.runtime import current_activation
from vescale.static._branches import untaken_of
from vescale.static._call_tree import FunctionCall
from vescale.static._patch import REFUSE, Patch, patched_code
from vescale.static._source import FunctionSource, source_of
from vescale.static._tensor_type import UnrecordedError

__all__ = ["GuardedFunctions", "UnreachedFunctions"]

_TORCH = torch.__file__.rpartition("__init__")[0]
_HARMLESS = (ast.Constant, ast.Name, ast.expr_context, ast.Return, ast.Pass, ast.Break, ast.Continue, ast.Assign)


class UnreachedFunctions:
    """The functions that a recorded forward ran.

    Args:
        unreached: those that no call in the source reaches.
        recorded: all.
    """

    def __init__(self, unreached: Iterable[FunctionCall] = (), recorded: Iterable[FunctionCall] = ()) -> None:
        self.codes = {call.code for call in unreached if not _is_left_alone(call.code)}
        self._visits: dict[types.CodeType, Counter[tuple[int, int]]] = {}
        for call in recorded:
            self._visits[call.code] = self._visits.get(call.code, Counter()) | call.visits

    def guarded(self, code: types.CodeType) -> types.CodeType | None:
        """What the function with this code runs in a static forward: the same with refusals at branches that no recorded
        call of it has taken; None where there are none."""
        source, visits = source_of(code), self._visits.get(code)
        if source is None or visits is None:
            return None
        # Values of `and` and `or` decide what runs in callers, which are guarded.
        patch = replace(untaken_of(source, visits), refused_false=(), refused_true=())
        return _guarded(source, patch) if _may_call(source, patch) else None


def _is_left_alone(code: types.CodeType) -> bool:
    """Whether a function is PyTorch's, or one that also runs when others than the model look at an object."""
    return code.co_filename.startswith(_TORCH) or code.co_name in ("__getattribute__", "__getattr__", "__setattr__")


def _may_call(source: FunctionSource, patch: Patch) -> bool:
    """Whether what is refused may run anything, as far as its first statement tells."""
    if patch.refused_else:
        return True
    refused = (source.nodes[number] for number in patch.refused)
    return any(not isinstance(node, _HARMLESS) for part in refused for node in ast.walk(part))


def _guarded(source: FunctionSource, patch: Patch) -> types.CodeType | None:
    """None if it cannot stand in place of the function's code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # a constant is called, which is exchanged here
        code = patched_code(source, patch, True)
    if code is None or code.co_freevars != source.code.co_freevars:
        return None
    return _with_refusal(code, functools.partial(_refuse, source.code.co_filename))


def _with_refusal(code: types.CodeType, refuse: Any) -> types.CodeType:
    constants: list[Any] = []
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            value = _with_refusal(value, refuse)
        constants.append(refuse if isinstance(value, str) and value == REFUSE else value)
    return code.replace(co_consts=tuple(constants))


def _refuse(file: str, line: int) -> None:
    """Other threads, and models in eager mode, may run the function meanwhile."""
    activation = current_activation()
    if activation is not None and activation.static is not None:
        raise UnrecordedError(f"{file}:{line} was not recorded")


_lock = threading.Lock()
_users: Counter[int] = Counter()  # static forwards that run with a function's guarded code, by id of the function


class GuardedFunctions:
    """Exchanges the code of functions for the time of static forwards."""

    def __init__(self, unreached: UnreachedFunctions) -> None:
        self._unreached = unreached
        self._functions: list[tuple[types.FunctionType, types.CodeType, types.CodeType]] = []
        self._known: set[types.CodeType] = set()
        self._num_shown = 0
        self.add(unreached.codes, None)

    def add(self, codes: Iterable[types.CodeType], called: Any) -> None:
        """Guard the functions with these codes, too; ``called``: the class or builtin function that calls them."""
        new = {
            code: made
            for code in codes
            if code not in self._known and (made := self._unreached.guarded(code)) is not None
        }
        self._known.update(codes)
        found = _functions(set(map(id, new)), called)
        with _lock:
            for function in found:
                row = function, function.__code__, new[function.__code__]
                self._functions.append(row)
                for _ in range(self._num_shown):
                    self._show(row)

    def _show(self, row: tuple[types.FunctionType, types.CodeType, types.CodeType]) -> None:
        function, _, guarded = row
        _users[id(function)] += 1
        function.__code__ = guarded

    def show(self) -> None:
        with _lock:
            self._num_shown += 1
            for row in self._functions:
                self._show(row)

    def hide(self) -> None:
        with _lock:
            self._num_shown -= 1
            for function, code, _ in self._functions:
                _users[id(function)] -= 1
                if not _users[id(function)]:
                    function.__code__ = code


def _functions(codes: set[int], called: Any) -> list[types.FunctionType]:
    """The functions with these codes, given by id."""
    if not codes:
        return []
    methods = [value for base in called.__mro__ for value in vars(base).values()] if isinstance(called, type) else ()
    found = [f for f in methods if type(f) is types.FunctionType and id(f.__code__) in codes]
    if {id(function.__code__) for function in found} == codes:
        return found
    return [f for f in gc.get_objects() if type(f) is types.FunctionType and id(f.__code__) in codes]
