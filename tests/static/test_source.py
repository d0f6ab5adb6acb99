"""Finding the source of functions, changing it, and knowing which branches ran."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from vescale.static import _source
from vescale.static._branches import untaken_branches
from vescale.static._call_tree import CallTree, FunctionCall
from vescale.static._patch import REFUSE, SLICE, Patch, callee_of, can_be_site, make_function, patched_code, site_name
from vescale.static._source import FunctionSource, source_of

offset = 3


class RefusedError(Exception):
    pass


def refuse(line: int) -> None:
    raise RefusedError(line)


def everything(x: int, /, *rest: int, step: int = 2, **named: int) -> Any:
    """Uses most of what a site can be."""
    values = [i * step for i in range(x) if i % 2]
    pair = (values + list(rest))[1:]
    lookup = {"a": pair, **named}
    total = sum(lookup["a"]) - offset
    total += len(pair)
    inner = lambda y: y + total  # noqa: E731
    return inner(-total) if total > 100 else (total, named.get("b"), not rest)


def closure(free: int) -> Callable[[int], int]:
    def inner(x: int, more: int = 4) -> int:
        return x * free + more

    return inner


class Child(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


def known(function: Any) -> FunctionSource:
    source = source_of(function.__code__)
    assert source is not None
    return source


def rewritten(function: types.FunctionType, patch: Patch, **cells: Any) -> types.FunctionType:
    source = known(function)
    code = patched_code(source, patch)
    assert code is not None
    return make_function(function, code, {REFUSE: refuse, SLICE: slice, **cells})


@pytest.mark.parametrize(
    "function", [everything, closure(2), Child.forward, nn.Linear.forward, nn.TransformerEncoderLayer.forward]
)
def test_source_compiles_to_the_same_code(function: Any) -> None:
    source = known(function)
    assert set(source.node_of[0].values()) <= set(range(len(source.nodes)))


LAYOUTS = '''
import functools
from math import (
    pi,
    tau,
)

if True:
    import operator


class Outer:
    @functools.lru_cache(
        maxsize=4,
    )
    def decorated(
        self, x,
    ):
        return functools.reduce(lambda a, b: a + b, [x, pi])

    def margins(self, x):
        """Text
at the margin."""
        return x * 2

    def last(self, x):
        return [x for x in (x, tau)]


def comments(x):
    y = x
# at the margin
    return y + 1


def imports(x):
    import random
    return random.random() + operator.add(x, 1)
'''


@pytest.mark.parametrize(
    "name, by_lines", [("decorated", True), ("margins", True), ("last", True), ("comments", False), ("imports", False)]
)
def test_definitions_are_found_by_their_lines(name: str, by_lines: bool, tmp_path: Path) -> None:
    """Or, where those tell too little, in the whole file."""
    path = tmp_path / "layouts.py"
    path.write_text(LAYOUTS)
    held: dict[str, Any] = {}
    exec(compile(LAYOUTS, str(path), "exec"), held)
    function = held[name] if name in held else vars(held["Outer"])[name]
    with mock.patch.object(_source, "_definition", side_effect=_source._definition) as searched:
        source = source_of(inspect.unwrap(function).__code__)
    assert source is not None and searched.called is not by_lines
    (line,) = {node.lineno for node in source.nodes if isinstance(node, ast.Return)}
    assert LAYOUTS.splitlines()[line - 1].strip().startswith("return")


def test_functions_without_source() -> None:
    namespace: dict[str, Any] = {}
    exec("def made(x):\n    return x", namespace)
    assert source_of(namespace["made"].__code__) is None
    assert source_of(nn.Module.__init__.__code__) is not None  # an untouched one has


@pytest.mark.parametrize("number", range(len(known(everything).nodes)))
def test_every_site_computes_the_same(number: int) -> None:
    source = known(everything)
    node = source.nodes[number]
    if not can_be_site(node, source.nodes):
        return
    seen = []

    def site(f: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(f)
        callee = callee_of(node)
        return (f if callee is None else callee)(*args, **kwargs)

    changed = rewritten(everything, Patch(sites=(number,)), **{site_name(number): site})
    for args, kwargs in (((7, 5), {"b": 3}), ((60,), {"step": 5})):
        assert changed(*args, **kwargs) == everything(*args, **kwargs)
    assert seen


def test_swapped_functions_and_closures() -> None:
    def outer(f: Callable[[int], int], x: int) -> int:
        return f(x) + 1

    source = known(outer)
    (call,) = (n for n, node in enumerate(source.nodes) if type(node).__name__ == "Call")
    changed = rewritten(outer, Patch(swaps=(call,)), **{site_name(call): lambda f: lambda x: f(x) * 10})
    assert changed(closure(2), 3) == (3 * 2 + 4) * 10 + 1
    inner = closure(5)
    assert isinstance(inner, types.FunctionType)
    assert (
        rewritten(
            inner,
            Patch(),
        )(3)
        == inner(3)
        == 19
    )


def branches(x: int) -> Any:
    if x > 0:
        y = 1
    elif x < -5:
        y = 2
    else:
        y = 3
    for _ in range(x):
        y += 1
    z = y if x != 4 else -y
    if x > 10:
        z += 1
    while y > 7:
        y -= 1
    try:
        1 // (x - 6)
    except ZeroDivisionError:
        z = 0
    return (x > 1 and z) or y, [i * 2 for i in range(3)]


@pytest.mark.parametrize("recorded", [(1,), (-1,), (-9,), (1, -1), (4,), (12,), (6, 5), (3, 12, -9, -1, 4, 6)])
def test_untaken_branches_are_refused(recorded: tuple[int, ...]) -> None:
    calls: dict[str, FunctionCall] = {}
    for x in recorded:
        tree = CallTree(lambda: None)
        with tree:
            branches(x)
        (call,) = tree.forwards.values()
        if calls:
            calls[""].visits.update(call.visits)
        else:
            calls[""] = call
    source = known(branches)
    changed = rewritten(branches, untaken_branches(calls[""], source, ()))

    def way(x: int) -> tuple[bool, ...]:
        return x > 0, x < -5, x != 4, x > 10, x == 6, x > 1

    for x in (*recorded, *range(-10, 14)):
        taken = {(i, on) for seen in recorded for i, on in enumerate(way(seen))}
        is_known = all((i, on) in taken for i, on in enumerate(way(x)) if i != 1 or x <= 0)
        if x in recorded:
            assert changed(x) == branches(x)
        elif not is_known:
            with pytest.raises(RefusedError):
                changed(x)
