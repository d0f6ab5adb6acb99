"""Changing functions at recorded positions: other functions run there, and branches that were not taken are refused."""

from __future__ import annotations

import ast
import functools
import operator
import types
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vescale.static._source import FunctionSource, compile_function


@dataclass(frozen=True)
class Patch:
    """What is changed in a function; nodes are numbers of ``source.nodes``.

    Attributes:
        sites: expressions (calls, operators, attributes, subscripts) whose function another one gets: ``f(x)`` becomes
            ``site(f, x)``, and ``a + b`` ``site(None, a, b)``.
        swaps: calls whose function is looked up: ``f(x)`` becomes ``swap(f)(x)``.
        refused: statements and expressions of which the first in a list, or the whole, is preceded by a refusal.
        refused_else: ``if`` statements that get a refusal as their ``else``.
        refused_false, refused_true: expressions whose value is refused if it is false, or true.
        marked: statements and expressions that are told when they begin to run.
        wrapped: ``with`` statements whose body must not raise, because the context may suppress it.
    """

    sites: tuple[int, ...] = ()
    swaps: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
    refused_else: tuple[int, ...] = ()
    refused_false: tuple[int, ...] = ()
    refused_true: tuple[int, ...] = ()
    marked: tuple[int, ...] = ()
    wrapped: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return self != Patch()


REFUSE, SLICE, MARK = "_vescale_refuse_", "_vescale_slice_", "_vescale_mark_"


def site_name(node: int) -> str:
    return f"_vescale_{node}_"


def mark_of(code: types.CodeType, node: int) -> int:
    """What is told when a marked node of a function begins to run."""
    return code.co_firstlineno * 100_003 + node


def callee_of(node: ast.AST) -> Any:
    """What an expression that is no call computes, as a function of the operands that a site gets."""
    if isinstance(node, ast.Attribute):
        return operator.attrgetter(node.attr)
    if isinstance(node, ast.Subscript):
        return operator.getitem if isinstance(node.ctx, ast.Load) else _set_item
    if isinstance(node, ast.AugAssign):
        return _IN_PLACE[type(node.op).__name__]
    if isinstance(node, ast.BinOp | ast.UnaryOp):
        return _OPERATORS[type(node.op).__name__]
    if isinstance(node, ast.Compare):
        return _OPERATORS[type(node.ops[0]).__name__]
    return None


_OPERATORS = {
    "Add": operator.add, "Sub": operator.sub, "Mult": operator.mul, "Div": operator.truediv, "FloorDiv": operator.floordiv,
    "Mod": operator.mod, "Pow": operator.pow, "MatMult": operator.matmul, "BitAnd": operator.and_, "BitOr": operator.or_,
    "BitXor": operator.xor, "LShift": operator.lshift, "RShift": operator.rshift,
    "Eq": operator.eq, "NotEq": operator.ne, "Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt, "GtE": operator.ge,
    "USub": operator.neg, "UAdd": operator.pos, "Invert": operator.invert,
}  # fmt: skip
_IN_PLACE = {
    "Add": operator.iadd, "Sub": operator.isub, "Mult": operator.imul, "Div": operator.itruediv,
    "FloorDiv": operator.ifloordiv, "Mod": operator.imod, "Pow": operator.ipow, "MatMult": operator.imatmul,
    "BitAnd": operator.iand, "BitOr": operator.ior, "BitXor": operator.ixor, "LShift": operator.ilshift,
    "RShift": operator.irshift,
}  # fmt: skip


def _set_item(value: Any, x: Any, index: Any) -> None:
    x[index] = value


def can_be_site(node: ast.AST, nodes: Iterable[ast.AST]) -> bool:
    """Whether :class:`Patch` can have a site at a node; ``nodes``: of the function."""
    if isinstance(node, ast.Attribute):
        return isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Subscript):
        if isinstance(node.ctx, ast.Store):
            return any(isinstance(other, ast.Assign) and other.targets == [node] for other in nodes)
        return isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Compare):
        return len(node.ops) == 1 and type(node.ops[0]).__name__ in _OPERATORS
    if isinstance(node, ast.UnaryOp):
        return not isinstance(node.op, ast.Not)
    if isinstance(node, ast.AugAssign):
        return isinstance(node.target, ast.Name)
    return isinstance(node, ast.Call | ast.BinOp)


@functools.lru_cache(maxsize=4096)
def patched_code(source: FunctionSource, patch: Patch, calls_constant: bool = False) -> types.CodeType | None:
    """The code of the changed function; None if it does not compile.

    Args:
        calls_constant: refusals call the text :data:`REFUSE`, which the caller exchanges, in place of a free variable.
    """
    tree = source.copy_tree()
    numbers = {id(node): number for number, node in enumerate(ast.walk(tree))}
    changed = _Rewriter(numbers, patch, source.code).visit(tree)
    if calls_constant:
        changed = _CallsConstant().visit(changed)
    names = [site_name(node) for node in (*patch.sites, *patch.swaps)]
    return compile_function(changed, source.code, source.imported, (*names, REFUSE, SLICE, MARK))


def make_function(original: types.FunctionType, code: types.CodeType, cells: Mapping[str, Any]) -> types.FunctionType:
    """A function like ``original`` that runs ``code``; ``cells``: the values of its further free variables."""
    own = dict(zip(original.__code__.co_freevars, original.__closure__ or (), strict=True))
    closure = tuple(own[name] if name in own else types.CellType(cells[name]) for name in code.co_freevars)
    copy = types.FunctionType(code, original.__globals__, original.__name__, original.__defaults__, closure)
    copy.__kwdefaults__ = original.__kwdefaults__
    copy.__dict__.update(original.__dict__)
    copy.__qualname__, copy.__module__, copy.__doc__ = original.__qualname__, original.__module__, original.__doc__
    return copy


class _Rewriter(ast.NodeTransformer):
    def __init__(self, numbers: Mapping[int, int], patch: Patch, code: types.CodeType) -> None:
        self.numbers, self.code = numbers, code
        self.sites: Collection[int] = frozenset(patch.sites)
        self.swaps: Collection[int] = frozenset(patch.swaps)
        self.refused: Collection[int] = frozenset(patch.refused)
        self.refused_else: Collection[int] = frozenset(patch.refused_else)
        self.refused_false: Collection[int] = frozenset(patch.refused_false)
        self.refused_true: Collection[int] = frozenset(patch.refused_true)
        self.marked: Collection[int] = frozenset(patch.marked)
        self.wrapped: Collection[int] = frozenset(patch.wrapped)

    def visit(self, node: ast.AST) -> Any:
        number = self.numbers.get(id(node), -1)
        made: ast.AST = node
        if isinstance(node, ast.Assign) and self.numbers.get(id(node.targets[0]), -1) in self.sites:
            made = self._stored(node)
        self.generic_visit(node)
        if number in self.sites and not _is_stored(node):
            made = _as_site(node, site_name(number))
        elif number in self.swaps:
            assert isinstance(node, ast.Call)
            node.func = _call(site_name(number), [node.func])
        if number in self.wrapped:
            assert isinstance(node, ast.With)
            handler = ast.ExceptHandler(
                ast.Name("Exception", ast.Load()), None, [ast.Expr(_refusal(node)), ast.Raise()]
            )
            node.body = [ast.Try(node.body, [handler], [], [])]
        if number in self.refused_else:
            assert isinstance(node, ast.If)
            node.orelse = [ast.Expr(_refusal(node))]
        if number in self.refused_false:
            made = ast.copy_location(ast.BoolOp(ast.Or(), [made, _refusal(node)]), node)  # type: ignore[list-item]
        elif number in self.refused_true:
            made = ast.copy_location(ast.BoolOp(ast.And(), [made, _refusal(node)]), node)  # type: ignore[list-item]
        if number in self.refused:
            return _preceded(made, node, _refusal(node))
        if number in self.marked:
            return _preceded(made, node, _call(MARK, [ast.Constant(mark_of(self.code, number))]))
        return ast.copy_location(made, node) if made is not node and hasattr(node, "lineno") else made

    def _stored(self, node: ast.Assign) -> ast.AST:
        """``x[i] = v`` as a call. The parts are visited here, for they are not parts of ``node`` any more."""
        (target,) = node.targets
        assert isinstance(target, ast.Subscript)
        value, x, index = (self.visit(part) for part in (node.value, target.value, target.slice))
        call = _call(site_name(self.numbers[id(target)]), [_none(), value, x, _index(index)])
        node.targets, node.value = [], _none()
        return ast.Expr(call)


class _CallsConstant(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.copy_location(ast.Constant(REFUSE), node) if node.id == REFUSE else node


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)


def _call(name: str, args: list[Any], keywords: list[ast.keyword] | None = None) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), args, keywords or [])


def _none() -> ast.Constant:
    return ast.Constant(None)


def _refusal(node: ast.AST) -> ast.Call:
    return _call(REFUSE, [ast.Constant(getattr(node, "lineno", 0))])


def _as_site(node: ast.AST, name: str) -> ast.AST:
    match node:
        case ast.Call():
            return _call(name, [node.func, *node.args], node.keywords)
        case ast.Attribute():
            return _call(name, [_none(), node.value])
        case ast.Subscript():
            return _call(name, [_none(), node.value, _index(node.slice)])
        case ast.BinOp():
            return _call(name, [_none(), node.left, node.right])
        case ast.UnaryOp():
            return _call(name, [_none(), node.operand])
        case ast.Compare():
            return _call(name, [_none(), node.left, node.comparators[0]])
        case ast.AugAssign():
            assert isinstance(node.target, ast.Name)
            value = _call(name, [_none(), ast.Name(node.target.id, ast.Load()), node.value])
            return ast.Assign([node.target], value)
    raise AssertionError(f"no site at {ast.dump(node)}")


def _preceded(made: Any, node: ast.AST, call: ast.Call) -> Any:
    """What a node became, after a call that returns None."""
    if isinstance(made, ast.stmt):
        return [ast.copy_location(ast.Expr(call), node), ast.copy_location(made, node)]
    return ast.copy_location(ast.BoolOp(ast.Or(), [call, made]), node)


def _index(node: ast.expr) -> ast.expr:
    """An index as an expression of its own: slices become objects."""
    if isinstance(node, ast.Slice):
        bounds = [bound if bound is not None else ast.Constant(None) for bound in (node.lower, node.upper, node.step)]
        return ast.Call(ast.Name(SLICE, ast.Load()), bounds, [])
    if isinstance(node, ast.Tuple):
        return ast.Tuple([_index(item) for item in node.elts], ast.Load())
    return node
