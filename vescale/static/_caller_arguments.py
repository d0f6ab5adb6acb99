"""``caller_arguments``: the expressions that callers give for an argument of a function."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from vescale.static._call_tree import FunctionCall, Site
from vescale.static._decisions import first_instruction
from vescale.static._selection_points import parents_of
from vescale.static._source import FunctionSource, source_of

__all__ = ["CallerArgument", "caller_arguments"]

CallerArgument = tuple[FunctionCall, ast.AST]
_METHODS_OF_OBJECTS = ("__init__", "__new__", "__call__")


def caller_arguments(call: FunctionCall, name: str) -> list[CallerArgument] | None:
    """For each caller that gives the argument, that caller and its expression; also if decorators (functions with ``*args``
    and ``**kwargs``) pass it on. None: one of them is not known. Where nobody gives
    it, it has its default value."""
    code = call.code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    index = names.index(name) if name in names[: code.co_argcount] else None
    has_self = code.co_varnames[:1] in (("self",), ("cls",))
    try:
        return list(_given(call, index, name, has_self, set()))
    except LookupError:
        return None


def _given(
    call: FunctionCall, index: int | None, name: str, has_self: bool, seen: set[tuple[FunctionCall, int | None]]
) -> Iterator[CallerArgument]:
    """Raises LookupError for a caller that is not known.

    Args:
        index: among the positional arguments; None: it is given by its name.
        has_self: whether the first of them is the object of a method.
    """
    if (call, index) in seen:
        return
    seen.add((call, index))
    callers = call.callers
    if not callers:
        raise LookupError
    for site in callers:
        if site is None:
            raise LookupError
        yield from _given_at(call, site, index, name, has_self, seen)


def _given_at(
    call: FunctionCall,
    site: Site,
    index: int | None,
    name: str,
    has_self: bool,
    seen: set[tuple[FunctionCall, int | None]],
) -> Iterator[CallerArgument]:
    caller, part, offset = site
    source = source_of(caller.code)
    number = -1 if source is None else source.node_of[part].get(offset, -1)
    if source is None or number < 0:
        raise LookupError
    node = source.nodes[number]
    if call.code.co_name == "__getitem__" and index == 1:
        if isinstance(node, ast.Subscript):
            yield caller, node.slice
            return
        if _unpacks(node):  # each key is read once
            return
    if not isinstance(node, ast.Call):
        raise LookupError
    is_bound = has_self and (
        call.is_of_module or isinstance(node.func, ast.Attribute) or call.code.co_name in _METHODS_OF_OBJECTS
    )
    named = {keyword.arg: keyword.value for keyword in node.keywords}
    if name in named:
        yield caller, named[name]
        return
    if index is not None:
        first = next((i for i, x in enumerate(node.args) if isinstance(x, ast.Starred)), len(node.args))
        position = index - is_bound
        if position < 0:
            return
        if position < first:
            yield caller, node.args[position]
            return
        if first < len(node.args):
            if first < len(node.args) - 1 or not _passes_on(caller, source, node.args[first].value, 0):  # type: ignore[attr-defined]
                raise LookupError
            yield from _given(caller, caller.code.co_argcount + position - first, name, has_self, seen)
    if None in named:
        if not _passes_on(caller, source, named[None], 1):
            raise LookupError
        yield from _given(caller, None, name, has_self, seen)


def _unpacks(node: ast.AST) -> bool:
    """Whether an expression unpacks a mapping, and does not call ``__getitem__`` by name."""
    match node:
        case ast.Call(func=ast.Attribute(attr="__getitem__")):
            return False
        case ast.Call(keywords=keywords):
            return any(keyword.arg is None for keyword in keywords)
        case ast.Dict(keys=keys):
            return None in keys
    return False


def _passes_on(call: FunctionCall, source: FunctionSource, node: ast.AST | None, place: int) -> bool:
    """Whether an unpacked expression is the function's own ``*args`` (``place`` 0) or ``**kwargs`` (1), as it got them."""
    code = call.code
    flags = inspect.CO_VARARGS, inspect.CO_VARKEYWORDS
    if not isinstance(node, ast.Name) or not code.co_flags & flags[place]:
        return False
    first = code.co_argcount + code.co_kwonlyargcount
    own = code.co_varnames[first + (place if code.co_flags & inspect.CO_VARARGS else 0)]
    return node.id == own and all(_only_reads(call, source, use) for use in _uses(source, own))


def _uses(source: FunctionSource, name: str) -> Iterator[ast.Name]:
    return (node for node in source.nodes if isinstance(node, ast.Name) and node.id == name)


def _only_reads(call: FunctionCall, source: FunctionSource, use: ast.Name) -> bool:
    """Whether a use of ``args`` or ``kwargs`` did not run, or changes nothing of it."""
    parents = parents_of(source)
    parent = parents[id(use)]
    match parent:
        case ast.Starred() | ast.keyword(arg=None) | ast.Compare() | ast.Subscript(ctx=ast.Load()):
            is_reading = isinstance(use.ctx, ast.Load)
        case ast.Attribute(attr="get" | "items" | "keys" | "values"):
            is_reading = True
        case _:
            is_reading = False
    if is_reading:
        return True
    place = first_instruction(source, source.numbers[id(use)])
    return place is not None and not call.visits[place]
