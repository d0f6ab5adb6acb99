"""Where a function decides what runs next: branches and loops."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vescale.static._source import FunctionSource

Place = tuple[int, int]  # of an instruction: the number of a code object of the function, and the offset


@dataclass(frozen=True)
class Decision:
    """A branch or a loop. Nodes are numbers of ``source.nodes``.

    Attributes:
        node: of the whole.
        start: what runs first, which decides or is before it; -1: nothing that is seen whenever it runs.
        arms: what runs, or does not, or several times.
        is_loop: whether it is a loop; its first arm is what it repeats.
    """

    node: int
    start: int
    arms: tuple[int, ...]
    is_loop: bool = False


@functools.lru_cache(maxsize=4096)
def decisions_of(source: FunctionSource) -> tuple[Decision, ...]:
    """All in a function, and in those that are defined in it."""
    numbers = source.numbers

    def made(node: ast.AST, start: ast.AST | None, arms: list[ast.AST], is_loop: bool = False) -> Decision:
        first = -1 if start is None else numbers[id(start)]
        return Decision(numbers[id(node)], first, tuple(numbers[id(arm)] for arm in arms), is_loop)

    def found(node: ast.AST) -> Iterator[Decision]:
        match node:
            case ast.If():
                yield made(node, node.test, [node.body[0]])
            case ast.IfExp():
                yield made(node, node.test, [node.body])
            case ast.BoolOp():
                yield made(node, node.values[0], list(node.values[1:]))
            case ast.Try():
                yield made(node, node.body[0], [handler.body[0] for handler in node.handlers])
            case ast.Match():
                yield made(node, node.subject, [case.body[0] for case in node.cases])
            case ast.For():
                yield made(node, node.iter, [node.body[0]], True)
            case ast.While():  # the test stands twice in the code
                yield made(node, None, [node.body[0]], True)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                tests = [test for generator in node.generators for test in generator.ifs]
                yield made(node, None, [node.elt, *tests], True)
            case ast.DictComp():
                tests = [test for generator in node.generators for test in generator.ifs]
                yield made(node, None, [node.key, *tests], True)

    return tuple(decision for node in source.nodes for decision in found(node))


@functools.lru_cache(maxsize=4096)
def decision_points(source: FunctionSource) -> Mapping[Place, tuple[int, ...]]:
    """The nodes of decisions that an instruction is the first of, outer ones first."""
    points: dict[Place, list[int]] = {}
    for number in sorted({n for one in decisions_of(source) for n in (one.start, *one.arms) if n >= 0}):
        place = first_instruction(source, number)
        if place is not None:
            points.setdefault(place, []).append(number)
    return {place: tuple(nodes) for place, nodes in points.items()}


def first_instruction(source: FunctionSource, number: int) -> Place | None:
    """Of a node; None if it has none."""
    return _first_instructions(source)[number]


@functools.lru_cache(maxsize=4096)
def _first_instructions(source: FunctionSource) -> list[Place | None]:
    numbers = source.numbers
    first: list[Place | None] = [None] * len(source.nodes)
    for part, offsets in enumerate(source.node_of):
        for offset, node in offsets.items():
            known = first[node]
            if known is None or (part, offset) < known:
                first[node] = part, offset
    for number in reversed(range(len(source.nodes))):  # parts of a node come after it
        places = [first[numbers[id(part)]] for part in ast.iter_child_nodes(source.nodes[number])]
        first[number] = min((place for place in (first[number], *places) if place is not None), default=None)
    return first
