"""Which calls of torch functions may get other arguments in another step than in the recorded one."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import math
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vescale.static._call_tree import FunctionCall, is_of_torch
from vescale.static._given_arguments import is_fraction
from vescale.static._source import FunctionSource, code_objects
from vescale.static._step_records import Call

# Whether these do for the parts of a dim what they do for the whole depends on sizes, whatever the other arguments are.
_BY_SIZE = frozenset((
    torch.Tensor.narrow, torch.narrow, torch.Tensor.split, torch.split, torch.Tensor.chunk, torch.chunk,
    torch.Tensor.tensor_split, torch.tensor_split, torch.Tensor.split_with_sizes, torch.split_with_sizes,
    torch.Tensor.unfold, torch.Tensor.__getitem__, torch.Tensor.view, torch.Tensor.view_as, torch.Tensor.reshape,
    torch.reshape, torch.Tensor.reshape_as, torch.Tensor.unflatten, torch.unflatten, torch.Tensor.flatten, torch.flatten,
    torch.Tensor.squeeze, torch.squeeze,
))  # fmt: skip
_ITERATORS = frozenset(("enumerate", "zip", "reversed", "range", "len", "list", "tuple"))


class CallArguments:
    """The expressions in a function's calls, and whether guards compare all that they read.

    Args:
        held: the globals of the function.
        open_names: of globals and attributes that another step may find changed: functions that ran compute them, or have
            changed them.
    """

    def __init__(
        self, call: FunctionCall, source: FunctionSource, held: Mapping[str, Any], open_names: Collection[str]
    ) -> None:
        self._call, self._source, self._held, self._open_names = call, source, held, open_names

    def may_differ(self, node: ast.AST, calls: Sequence[Call]) -> bool:
        """Whether another step may run another function there, or give it other arguments than tensors and fractions."""
        if is_of_torch(self._call.code.co_filename) and not self._call.is_of_made_module:
            return False
        first = calls[0]
        if isinstance(node, ast.Subscript):
            parts = list(_parts(node.slice))
            cuts = any(isinstance(part, ast.Slice) and (part.lower or part.upper) for part in parts)
            bounds = (b for part in parts for b in (_bounds(part) if isinstance(part, ast.Slice) else (part,)))
            return (cuts and _is_cut(first)) or self._num_open(bounds) > len(first.inputs) - (
                2 if isinstance(node.ctx, ast.Store) else 1
            )
        if not isinstance(node, ast.Call):
            return False
        if not self.has_fixed_function(node, getattr(first.function, "__name__", "")):
            return True
        if first.function in _BY_SIZE and _is_cut(first):
            return True
        given = [*node.args, *(k.value for k in node.keywords)]
        parts = [part for value in given for part in _parts(value)]
        if any(isinstance(part, ast.Starred) for part in parts) or any(k.arg is None for k in node.keywords):
            return True
        is_method = isinstance(node.func, ast.Attribute) and self._module(node.func.value) is None
        is_one = len({call.function for call in calls}) == 1
        if is_one and first.is_direct and first.num_positional > len(node.args) + is_method:
            return True  # a wrapper has taken lists apart
        num_open = sum(not all(map(self._is_fixed, _parts(value))) for value in given)
        num_values = min(call.num_values for call in calls) - is_method
        return num_open > max(num_values - sum(map(self._may_be_value, given)), 0)

    def has_fixed_function(self, node: ast.Call, method: str = "") -> bool:
        """Whether guards compare the function that a call runs: a global, an attribute of the module or of its class.

        Args:
            method: the name of the torch function that ran, which is that of a method of tensors.
        """
        called = node.func
        if isinstance(called, ast.Attribute):
            if method and called.attr == method:
                return True
            if isinstance(called.value, ast.Call):
                return isinstance(called.value.func, ast.Name) and called.value.func.id == "super"
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == self._own:
            return self._call.owner is not None and not is_computed(self._call.owner, called.attr)
        return self._is_fixed(called)

    def calls_itself(self, node: ast.AST | None, code: types.CodeType) -> bool:
        """Whether a call runs the function with this code as what it names, and not in a constructor, or in a function that
        another has been given."""
        if not isinstance(node, ast.Call) or code.co_name in ("__init__", "__new__"):
            return False
        named = node.func
        if code.co_name == "__call__":  # of an object
            return not (isinstance(named, ast.Name) and hasattr(builtins, named.id))
        if isinstance(named, ast.Name):
            return named.id in self._locals or isinstance(self._held.get(named.id), types.FunctionType)
        if not isinstance(named, ast.Attribute):
            return False
        owner = self._call.owner
        if owner is not None and isinstance(named.value, ast.Name) and named.value.id == self._own:
            return isinstance(getattr(owner, named.attr, None), types.FunctionType)
        return named.attr == code.co_name

    def may_suppress(self, node: ast.With) -> bool:
        """Whether a context may be one that suppresses exceptions: none of PyTorch's does."""
        return not all(map(self._is_of_torch, (item.context_expr for item in node.items)))

    def _is_of_torch(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return False
        called: Any = None
        if isinstance(node.func, ast.Name) and node.func.id not in self._locals:
            called = self._held.get(node.func.id)
        elif isinstance(node.func, ast.Attribute):
            called = getattr(self._module(node.func.value), node.func.attr, None)
        package = getattr(called, "__module__", None)
        return called is contextlib.nullcontext or (isinstance(package, str) and package.partition(".")[0] == "torch")

    def is_fixed_loop(self, node: ast.AST) -> bool:
        """Whether guards compare all that decides how often a loop runs."""
        if isinstance(node, ast.For):
            return self._iterates_fixed(node.iter)
        generators = getattr(node, "generators", None)
        return generators is not None and all(self._iterates_fixed(g.iter) and not g.ifs for g in generators)

    def _iterates_fixed(self, node: ast.AST | None) -> bool:
        match node:
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _ITERATORS and name not in self._locals:
                return all(map(self._iterates_fixed, node.args))
            case ast.Subscript(value=value, slice=ast.Slice() as bounds):
                return self._iterates_fixed(value) and all(map(self._iterates_fixed, _bounds(bounds)))
            case ast.Tuple() | ast.List():
                return True
        return self._is_fixed(node)

    def _may_be_value(self, node: ast.AST) -> bool:
        """Whether a fixed argument may be a tensor or a fraction: attributes of modules are compared, and may be tensors."""
        if isinstance(node, ast.Constant):
            return is_fraction(node.value)
        return all(map(self._is_fixed, _parts(node)))

    def _num_open(self, expressions: Iterable[ast.AST]) -> int:
        return sum(not self._is_fixed(one) for one in expressions)

    def _is_fixed(self, node: ast.AST | None) -> bool:
        """Whether an expression has the value that guards compare, or a constant."""
        match node:
            case None | ast.Constant():
                return True
            case ast.Name(id=name):
                is_open = name in self._locals or name in self._open_names
                return not is_open and _is_compared(self._held.get(name, getattr(builtins, name, None)))
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in self._locals:
                owner = self._call.owner if name == self._own else None
                return owner is not None and attribute not in self._open_names and not is_computed(owner, attribute)
            case ast.Attribute(value=value):
                return isinstance(self._module(value), types.ModuleType)
            case ast.UnaryOp(operand=operand):
                return self._is_fixed(operand)
            case ast.BinOp(left=left, right=right):
                return self._is_fixed(left) and self._is_fixed(right)
        return False

    def _module(self, node: ast.AST) -> Any:
        """The imported module that an expression names; None for others."""
        if isinstance(node, ast.Name):
            return None if node.id in self._locals else self._held.get(node.id)
        if isinstance(node, ast.Attribute):
            outer = self._module(node.value)
            return getattr(outer, node.attr, None) if isinstance(outer, types.ModuleType) else None
        return None

    @functools.cached_property
    def _locals(self) -> frozenset[str]:
        parts = list(code_objects(self._call.code))
        return frozenset(n for part in parts for n in (*part.co_varnames, *part.co_cellvars, *part.co_freevars))

    @property
    def _own(self) -> str:
        """The name of the first argument."""
        return self._call.code.co_varnames[0] if self._call.code.co_argcount else ""


def is_computed(owner: type[nn.Module], attribute: str) -> bool:
    """Whether code of the model may run where an attribute of a module is read."""
    if owner.__getattr__ is not nn.Module.__getattr__ or owner.__getattribute__ is not nn.Module.__getattribute__:
        return True
    found = inspect.getattr_static(owner, attribute, None)
    return hasattr(type(found), "__get__") and not isinstance(found, types.FunctionType | staticmethod | classmethod)


def _is_compared(value: Any) -> bool:
    """Whether guards compare what a global holds."""
    return callable(value) or isinstance(value, bool | int | float | complex | str | bytes | tuple | torch.dtype)


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """The items of a display."""
    if isinstance(node, ast.Tuple | ast.List):
        for item in node.elts:
            yield from _parts(item)
    else:
        yield node


def _bounds(node: ast.Slice) -> Iterator[ast.AST]:
    yield from (bound for bound in (node.lower, node.upper, node.step) if bound is not None)


def _is_cut(call: Call) -> bool:
    return any(math.prod(r.shape) != math.prod(r.local_shape) for r in (*call.inputs, *call.outputs))
