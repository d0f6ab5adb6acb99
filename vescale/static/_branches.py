"""Branches of a recorded function that were not taken."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from types import CodeType

from vescale.static._call_tree import FunctionCall
from vescale.static._decisions import Decision, decisions_of, first_instruction
from vescale.static._patch import Patch
from vescale.static._source import FunctionSource, code_objects


def untaken_branches(call: FunctionCall, source: FunctionSource, ran: Collection[CodeType]) -> Patch:
    """Refusals at all branches that the recorded forward did not take, and in functions that it has defined and not called.

    Args:
        ran: the code of all functions that ran.
    """
    patch = untaken_of(source, call.visits)
    parts, uncalled = list(code_objects(source.code)), []
    for number, node in enumerate(source.nodes):
        if number > 0 and isinstance(node, ast.Lambda | ast.FunctionDef):
            body = node.body if isinstance(node.body, list) else [node.body]
            for first in (source.numbers[id(part)] for part in body):
                place = first_instruction(source, first)
                if place is not None:
                    if place not in call.visits and parts[place[0]] not in ran:
                        uncalled.append(first)
                    break
    return replace(patch, refused=(*patch.refused, *uncalled))


def untaken_of(source: FunctionSource, visits: Mapping[tuple[int, int], int]) -> Patch:
    """``visits``: how often each instruction ran."""
    return _untaken(source, frozenset(item for item in visits.items() if item[1]))


@functools.lru_cache(maxsize=4096)
def _untaken(source: FunctionSource, visited: frozenset[tuple[tuple[int, int], int]]) -> Patch:
    """``visited``: how often the instruction at a position ran. It is the same for most of a model's layers."""
    numbers = source.numbers
    visits = _Visits(dict(visited), source)
    refused: list[int] = []
    refused_else: list[int] = []
    for node in source.nodes:
        for statements in _sequences(node):
            left = _never_reached(statements, visits)
            if left is not None:
                refused.append(numbers[id(left)])
        for arm in _arms(node):
            count = visits.of(arm[0] if isinstance(arm, list) else arm)
            if count == 0:
                refused.append(numbers[id(arm[0] if isinstance(arm, list) else arm)])
        if isinstance(node, ast.If) and not node.orelse:
            tests, taken = visits.of(node.test), visits.of(node.body[0])
            if tests and taken is not None and tests == taken:
                refused_else.append(numbers[id(node)])
    refused_false: list[int] = []
    refused_true: list[int] = []
    in_tests = {id(inner) for node in source.nodes if (test := getattr(node, "test", None)) for inner in ast.walk(test)}
    for node in source.nodes:
        if isinstance(node, ast.BoolOp) and id(node) not in in_tests:  # in a test, the branches after it tell as much
            for value, following in zip(node.values, node.values[1:]):
                if visits.of(following) and visits.of(value) == visits.of(following):
                    (refused_false if isinstance(node.op, ast.And) else refused_true).append(numbers[id(value)])
    return Patch((), (), tuple(refused), tuple(refused_else), tuple(refused_false), tuple(refused_true))


def both_ways(call: FunctionCall, source: FunctionSource) -> list[Decision]:
    """Branches that the recorded forward took, and did not take."""
    found = []
    for decision in decisions_of(source):
        if decision.is_loop:
            continue
        started, *taken = (_count(call, source, number) for number in (decision.start, *decision.arms))
        if any(count for count in taken) and any(count != started for count in taken):
            found.append(decision)
    return found


def _count(call: FunctionCall, source: FunctionSource, number: int) -> int:
    place = first_instruction(source, number)
    return 0 if place is None else call.visits[place]


def _arms(node: ast.AST) -> Iterator[list[ast.stmt] | ast.expr]:
    match node:
        case ast.If() | ast.For() | ast.While():
            yield node.body
            if node.orelse:
                yield node.orelse
        case ast.IfExp():
            yield node.body
            yield node.orelse
        case ast.BoolOp():
            yield from node.values[1:]
        case ast.Try():
            yield from (handler.body for handler in node.handlers)
            if node.orelse:
                yield node.orelse
        case ast.Match():
            yield from (case.body for case in node.cases)


def _sequences(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Statements that run after each other, as far as none leaves them."""
    for name in ("body", "orelse", "finalbody"):
        statements = getattr(node, name, None)
        if isinstance(statements, list) and len(statements) > 1:
            yield statements


def _never_reached(statements: list[ast.stmt], visits: _Visits) -> ast.stmt | None:
    """The first statement that has not run behind one that has."""
    has_run = False
    for statement in statements:
        count = visits.of(statement)
        if has_run and count == 0:
            return statement
        has_run |= bool(count)
    return None


class _Visits:
    """``counts``: how often instructions ran."""

    def __init__(self, counts: Mapping[tuple[int, int], int], source: FunctionSource) -> None:
        self._counts, self._source = counts, source
        self._entered = {part for part, _ in counts}

    def of(self, node: ast.AST) -> int | None:
        """How often a node was reached: visits of its first instruction; None if that cannot be told."""
        place = first_instruction(self._source, self._source.numbers[id(node)])
        if place is None or place[0] not in self._entered:
            return None  # a function that is defined here, and may run elsewhere
        return self._counts.get(place, 0)
