"""Which indices are the same in each step, as long as guards hold and branches and loops run as recorded."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import inspect
import types
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any

from vescale.static._call_tree import FunctionCall, Site
from vescale.static._decisions import first_instruction
from vescale.static._fixed_arguments import is_computed
from vescale.static._selection_points import parents_of
from vescale.static._source import FunctionSource, code_objects, source_of

# ``caller_arguments``: the expressions that callers give for an argument of a function.

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


# What they return depends on nothing but their arguments.
_FIXED_FUNCTIONS = frozenset(
    (
        *(abs, all, any, bool, dict, enumerate, float, frozenset, getattr, int, isinstance, len, list, max, min, range),
        *(reversed, round, set, sorted, str, sum, tuple, zip, dataclasses.fields),
    )
)
_FIXED_METHODS = frozenset(("get", "items", "keys", "values"))


class FixedIndices:
    """Expressions of constants, of what guards compare, and of names that are set to nothing else: local variables, what
    loops count with, and arguments of which the caller's expression is such a one.

    Args:
        held: the globals of functions.
        changed: names of globals and attributes that the recorded step has changed.
    """

    def __init__(self, held: Mapping[types.CodeType, Mapping[str, Any]], changed: Collection[str]) -> None:
        self._held, self._changed = held, changed
        self._assumed: set[tuple[FunctionCall, str]] = set()  # names that are looked at, and may be set to each other

    def is_fixed(self, call: FunctionCall, node: ast.AST | None) -> bool:
        source = source_of(call.code)
        if source is None:
            return False

        def fixed(part: ast.AST | None) -> bool:
            return self.is_fixed(call, part)

        match node:
            case None | ast.Constant():
                return True
            case ast.Name(id=name):
                key = call, name
                if key in self._assumed:
                    return True
                self._assumed.add(key)
                try:
                    return self._is_fixed_name(call, source, node, name)
                finally:
                    self._assumed.remove(key)
            case ast.Attribute(attr=name) if name in self._changed:
                return False
            case ast.Attribute(value=holder, attr=name):
                if call.owner is not None and self._is_owner(call, holder):
                    return not is_computed(call.owner, name)
                return fixed(holder)
            case ast.BinOp(left=left, right=right):
                return fixed(left) and fixed(right)
            case ast.UnaryOp(operand=operand):
                return fixed(operand)
            case ast.JoinedStr(values=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
                return all(map(fixed, parts))
            case ast.FormattedValue(value=value):
                return fixed(value)
            case ast.Subscript(value=value, slice=index):
                return fixed(value) and fixed(index)
            case ast.Slice(lower=lower, upper=upper, step=step):
                return fixed(lower) and fixed(upper) and fixed(step)
            case ast.Call(func=function, args=args, keywords=[]):
                return self._is_fixed_call(call, function, args) or self._returns_fixed(call, source, node)
        return False

    def _is_fixed_call(self, call: FunctionCall, function: ast.expr, args: list[ast.expr]) -> bool:
        def fixed(part: ast.AST) -> bool:
            return self._is_owner(call, part) or self.is_fixed(call, part)

        if isinstance(function, ast.Attribute):
            if function.attr in ("items", "keys") and _is_first_argument(call, function.value):
                return True  # an object has its keys in the order in which its class sets them
            return function.attr in _FIXED_METHODS and fixed(function.value) and all(map(fixed, args))
        called = self._global(call, function.id) if isinstance(function, ast.Name) else None
        if not isinstance(called, Hashable) or called not in _FIXED_FUNCTIONS:
            return False
        if called is dataclasses.fields and args:
            return _is_first_argument(call, args[0]) or fixed(args[0])
        if called is len and args and isinstance(args[0], ast.Name):
            source = source_of(call.code)  # what is appended to a list is not known, but how often
            setters = [] if source is None else _setters(source).get(args[0].id, [])
            if setters and all(isinstance(value, ast.List) for _, value in setters):
                return True
        return all(map(fixed, args))

    def _returns_fixed(self, call: FunctionCall, source: FunctionSource, node: ast.AST) -> bool:
        """Whether a call runs a function of the model's that returns what is fixed."""
        number = source.numbers[id(node)]
        found = [
            called
            for (part, offset, _), called in call.called.items()
            if source.node_of[part].get(offset, -1) == number
        ]
        for called in found:
            inner = source_of(called.code)
            returns = (
                [] if inner is None else [n for n in inner.nodes if isinstance(n, ast.Return) and n.value is not None]
            )
            if inner is None or not returns:
                return False
            for one in returns:
                place = first_instruction(inner, inner.numbers[id(one)])
                if (place is None or called.visits[place]) and not self.is_fixed(called, one.value):
                    return False
        return bool(found)

    def _is_owner(self, call: FunctionCall, node: ast.AST) -> bool:
        """Whether an expression is ``self`` of a module, of which guards compare the attributes."""
        return call.owner is not None and _is_first_argument(call, node)

    def _is_fixed_name(self, call: FunctionCall, source: FunctionSource, node: ast.AST, name: str) -> bool:
        code = call.code
        if name in code.co_freevars:  # which guards compare unless the forward has made the function
            return not any(code in other.co_consts for other in self._held)
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        setters = _setters_of(call, source, node, name)
        if name in arguments and not self._is_fixed_argument(call, name):
            return False
        if not setters and name not in arguments:
            return name not in self._changed and self._global(call, name) is not None
        values = [value for _, value in setters]
        if any(isinstance(value, ast.List) for value in values) and not _is_only_read(source, name):
            return False
        return all(value is not None and self.is_fixed(call, value) for value in values)

    def _global(self, call: FunctionCall, name: str) -> Any:
        """What a function calls by the name, if that is no local variable of its own; else None."""
        if any(name in (*part.co_varnames, *part.co_cellvars) for part in code_objects(call.code)):
            return None
        return self._held.get(call.code, {}).get(name, getattr(builtins, name, None))

    def _is_fixed_argument(self, call: FunctionCall, name: str) -> bool:
        """Whether the callers give a fixed value, or none."""
        given = caller_arguments(call, name)
        return given is not None and all(self.is_fixed(caller, node) for caller, node in given)


def _is_first_argument(call: FunctionCall, node: ast.AST) -> bool:
    code = call.code
    return isinstance(node, ast.Name) and code.co_argcount > 0 and node.id == code.co_varnames[0]


def _is_only_read(source: FunctionSource, name: str) -> bool:
    """Whether a function only runs over a list, or reads its items."""
    parents = parents_of(source)
    uses = [n for n in source.nodes if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
    return all(
        (isinstance(parent := parents[id(use)], ast.For | ast.comprehension) and parent.iter is use)
        or isinstance(parent, ast.Compare)
        or (isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Load))
        for use in uses
    )


def _setters_of(
    call: FunctionCall, source: FunctionSource, node: ast.AST, name: str
) -> list[tuple[ast.AST, ast.AST | None]]:
    """What has set a name that is read at ``node``."""
    found = _setters(source).get(name, [])
    parents = parents_of(source)
    inner: ast.AST | None = node
    while inner is not None:  # a comprehension has names of its own
        if isinstance(inner, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            own = [setter for setter in found if parents.get(id(setter[0])) in inner.generators]
            if own:
                return own
        inner = parents.get(id(inner))
    return [setter for setter in found if _has_run(call, source, setter[0])]


def _has_run(call: FunctionCall, source: FunctionSource, name: ast.AST) -> bool:
    place = first_instruction(source, source.numbers[id(name)])
    return place is None or bool(call.visits[place])


@functools.lru_cache(maxsize=4096)
def _setters(source: FunctionSource) -> dict[str, list[tuple[ast.AST, ast.AST | None]]]:
    """Where each name of a function is set, and to what: an expression, or that of what a loop runs over; None: something
    else."""
    parents = parents_of(source)
    found: dict[str, list[tuple[ast.AST, ast.AST | None]]] = {}
    for node in source.nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            outer = parents[id(node)]
            target: ast.AST = outer if isinstance(outer, ast.Tuple) else node
            found.setdefault(node.id, []).append((target, _setter(node, target, parents[id(target)])))
    return found


def _setter(node: ast.Name, target: ast.AST, parent: ast.AST) -> ast.AST | None:
    match parent:
        case ast.Assign(targets=targets, value=value) if target in targets:
            return value
        case ast.For(target=own, iter=iterated) | ast.comprehension(target=own, iter=iterated) if own is target:
            return _counted(iterated, node, target)
    return None


def _counted(iterated: ast.expr, node: ast.Name, target: ast.AST) -> ast.AST:
    """What decides about a variable of a loop. The number of an item does not depend on the items."""
    match iterated:
        case ast.Call(func=ast.Name(id="enumerate"), args=[_], keywords=[]) if (
            isinstance(target, ast.Tuple) and target.elts[0] is node
        ):
            return ast.Constant(0)
    return iterated
