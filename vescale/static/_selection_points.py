"""Where a function may choose one of several tensors by a value, as far as its source tells."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping

from vescale.static._decisions import first_instruction
from vescale.static._source import FunctionSource

_DISPLAYS = (ast.List, ast.Tuple, ast.ListComp)


@functools.lru_cache(maxsize=4096)
def selection_points(source: FunctionSource) -> Mapping[tuple[int, int], tuple[int, ...]]:
    """Subscripts, calls, repeated displays, and displays whose order is that of values: their nodes, by the instruction that
    is the first of them."""
    points: dict[tuple[int, int], list[int]] = {}
    for number, node in enumerate(source.nodes):
        place = first_instruction(source, number) if _may_select(node) else None
        if place is not None:
            points.setdefault(place, []).append(number)
    return {place: tuple(nodes) for place, nodes in points.items()}


def _may_select(node: ast.AST) -> bool:
    match node:
        case ast.Subscript(slice=index):
            return not _is_constant(index)
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            return isinstance(left, _DISPLAYS) or isinstance(right, _DISPLAYS)
        case ast.Dict(keys=keys):
            return any(not (key is None or isinstance(key, ast.Constant)) for key in keys)
        case ast.Set(elts=items):
            return not all(map(_is_constant, items))
    return isinstance(node, ast.Call)


def _is_constant(node: ast.AST | None) -> bool:
    match node:
        case None | ast.Constant():
            return True
        case ast.UnaryOp(operand=operand):
            return _is_constant(operand)
        case ast.Slice(lower=lower, upper=upper, step=step):
            return _is_constant(lower) and _is_constant(upper) and _is_constant(step)
        case ast.Tuple(elts=items):
            return all(map(_is_constant, items))
    return False


@functools.lru_cache(maxsize=4096)
def parents_of(source: FunctionSource) -> Mapping[int, ast.AST]:
    """The node around each node, by ``id``."""
    return {id(child): node for node in source.nodes for child in ast.iter_child_nodes(node)}
