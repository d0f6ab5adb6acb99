"""Functions that Python or C++ calls in a recorded forward: constructors, properties, callbacks. No call in the source can
be changed to run another function. They called no torch function, and must not take branches in which they may."""

from __future__ import annotations

import ast
import functools
import gc
import types
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from vescale.runtime import current_activation
from vescale.static._branches import untaken_of
from vescale.static._call_tree import FunctionCall
from vescale.static._exchanged_code import ExchangedFunction, code_of, is_exchanged
from vescale.static._patch import REFUSE, Patch, patched_code
from vescale.static._source import FunctionSource, source_of
from vescale.static._tensor_type import UnrecordedError

_TORCH = torch.__file__.rpartition("__init__")[0]
_HARMLESS = (ast.Constant, ast.Name, ast.expr_context, ast.Return, ast.Pass, ast.Break, ast.Continue, ast.Assign)


class UnreachedFunctions:
    """The functions that a recorded forward ran.

    Args:
        unreached: those that no call in the source reaches.
        recorded: all.
        held: their globals, by code.
    """

    def __init__(
        self,
        unreached: Iterable[FunctionCall] = (),
        recorded: Iterable[FunctionCall] = (),
        held: Mapping[types.CodeType, dict[str, Any]] | None = None,
    ) -> None:
        self.held = held or {}
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
    name = code.co_name.rstrip("_")  # decorators of dataclasses give their own another prefix
    return code.co_filename.startswith(_TORCH) or name.endswith(("getattribute", "getattr", "setattr"))


def _may_call(source: FunctionSource, patch: Patch) -> bool:
    """Whether what is refused may run anything, as far as its first statement tells."""
    if patch.refused_else:
        return True
    refused = (source.nodes[number] for number in patch.refused)
    return any(not isinstance(node, _HARMLESS) for part in refused for node in ast.walk(part))


@functools.lru_cache(maxsize=4096)  # the same code for all who guard the same branches: threads may share it
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


def _use(exchanged: ExchangedFunction, used: Sequence[ExchangedFunction]) -> None:
    """Raises UnrecordedError, and releases ``used``, while another thread has other code there."""
    if exchanged.use():
        return
    for each in used:
        each.release()
    name = exchanged.function.__qualname__
    raise UnrecordedError(f"another thread runs {name} in a static forward of another record")


class GuardedFunctions:
    """Exchanges the code of functions for the time of static forwards.

    Attributes:
        missing: where functions are that were not found, and whose other branches nothing would refuse.
    """

    def __init__(self, unreached: UnreachedFunctions) -> None:
        self._unreached = unreached
        self._functions: list[ExchangedFunction] = []
        self._known: set[types.CodeType] = set()
        self._num_shown = 0
        self.missing = self.add(unreached.codes, None)

    def add(self, codes: Iterable[types.CodeType], called: Any) -> list[str]:
        """Guard the functions with these codes, too, and return where those are that were not found; ``called``: the class
        or builtin function that calls them."""
        new = {
            code: made
            for code in codes
            if code not in self._known and (made := self._unreached.guarded(code)) is not None
        }
        found = {code: functions_with(code, called, self._unreached.held.get(code, {})) for code in new}
        self._known.update(code for code in codes if found.get(code, True))
        for code, functions in found.items():
            for function in functions:
                exchanged = ExchangedFunction(function, code, new[code])
                for number in range(self._num_shown):
                    _use(exchanged, [exchanged] * number)
                self._functions.append(exchanged)
        return [f"{code.co_filename}:{code.co_firstlineno}" for code, functions in found.items() if not functions]

    def show(self) -> None:
        """Raises UnrecordedError, with nothing changed, while another thread has other code in a function."""
        for number, exchanged in enumerate(self._functions):
            _use(exchanged, self._functions[:number])
        self._num_shown += 1

    def hide(self) -> None:
        self._num_shown -= 1
        for exchanged in self._functions:
            exchanged.release()


def functions_with(code: types.CodeType, called: Any, held: Mapping[str, Any]) -> list[types.FunctionType]:
    """The functions with this code: by its name in the module's globals ``held`` or in the class ``called``, else among all
    objects. None where some may be left out: those that ``gc.freeze`` has taken away cannot be searched."""
    methods = [value for base in called.__mro__ for value in vars(base).values()] if isinstance(called, type) else []
    named = [*methods, _named(code.co_qualname, held)]
    found = {id(f): f for value in named for f in _functions_of(value) if code_of(f) is code}
    if found:
        return list(found.values())
    if gc.get_freeze_count():
        return []
    functions = (f for f in gc.get_objects() if type(f) is types.FunctionType)
    return [f for f in functions if f.__code__ is code or (is_exchanged(f.__code__) and code_of(f) is code)]


def _named(name: str, held: Mapping[str, Any]) -> Any:
    first, *parts = name.split(".")
    value = held.get(first)
    for part in parts:
        value = vars(value).get(part) if isinstance(value, type) else None
    return value


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    """A function, those of a property or of a method of a class, and what decorators have wrapped."""
    if type(value) is types.FunctionType:
        yield value
    if value is not None:
        inner = ("fget", "fset", "fdel") if isinstance(value, property) else ("__func__", "func", "__wrapped__")
        for part in inner:
            below = getattr(value, part, None) if not isinstance(value, type) else None
            if below is not None and below is not value:
                yield from _functions_of(below)
