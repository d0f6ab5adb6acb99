"""``FunctionSource``: the syntax tree of a Python function, and which of its nodes each of its instructions belongs to."""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import linecache
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_FUTURES = functools.reduce(
    lambda flags, name: flags | getattr(__future__, name).compiler_flag, __future__.all_feature_names, 0
)
_OUTER = "__vescale_outer__"
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True, eq=False)
class FunctionSource:
    """Where a code object comes from.

    Attributes:
        code: of the function.
        tree: the function's definition. The nodes of a copy that :func:`compile_function` may change have the same order.
        nodes: the nodes of ``tree`` in the order of ``ast.walk``.
        node_of: for each code object of the function and of those defined in it, by position in :func:`code_objects`: the
            number of the node that an instruction belongs to, by the instruction's offset.
        imported: modules' names that the function uses, and its file imports.
    """

    code: types.CodeType
    tree: Function
    nodes: tuple[ast.AST, ...]
    node_of: tuple[dict[int, int], ...]
    imported: tuple[str, ...]

    @functools.cached_property
    def numbers(self) -> dict[int, int]:
        """The number of each of ``nodes``, by its ``id``."""
        return {id(node): number for number, node in enumerate(self.nodes)}

    def copy_tree(self) -> Function:
        copied: Function = _copied(self.tree)
        return copied


def code_objects(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code object and those defined in it (comprehensions, lambdas, functions), outer ones first."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_objects(constant)


@functools.cache
def source_of(code: types.CodeType) -> FunctionSource | None:
    """The source of a function; None if it cannot be told: it was generated, or the file has changed since it was read."""
    if _is_mangled(code):
        return None
    for tree, imported in _readings(code):
        made = _with_tree(code, tree, imported) if tree is not None else None
        if made is not None:
            return made
    return None


def _with_tree(code: types.CodeType, tree: Function, imported: tuple[str, ...]) -> FunctionSource | None:
    """None if the tree is not that of the code."""
    nodes = tuple(ast.walk(tree))
    marked = _copied(tree)
    for number, node in enumerate(ast.walk(marked)):
        if hasattr(node, "lineno"):
            node.end_lineno = node.lineno  # type: ignore[attr-defined]
            node.col_offset = node.end_col_offset = number  # type: ignore[attr-defined]
    used = {name for part in code_objects(code) for name in part.co_names}
    imported = tuple(name for name in imported if name in used)
    compiled = compile_function(marked, code, imported)
    if compiled is None or not _is_same(compiled, code):
        return None
    node_of = []
    for part in code_objects(compiled):
        offsets = {}
        for index, (_, _, column, _) in enumerate(part.co_positions()):
            if column is not None and column < len(nodes):
                offsets[2 * index] = column
        node_of.append(offsets)
    return FunctionSource(code, tree, nodes, tuple(node_of), imported)


def compile_function(
    tree: Function, like: types.CodeType, imported: tuple[str, ...], names: tuple[str, ...] = ()
) -> types.CodeType | None:
    """The code object of a definition, compiled where ``like`` was: same file, flags and free variables, and ``names`` as
    further free variables. ``imported``: as in :class:`FunctionSource`. None if it does not compile."""
    free = [*like.co_freevars, *names]
    arguments = ast.arguments(
        posonlyargs=[], args=[ast.arg(arg=name) for name in free], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    body: ast.stmt = ast.Return(value=tree) if isinstance(tree, ast.Lambda) else tree
    outer = ast.FunctionDef(name=_OUTER, args=arguments, body=[body], decorator_list=[])
    # Method calls on imported modules compile to other instructions; nothing of this module runs but the definition.
    imports = [ast.Import(names=[ast.alias(name=name)]) for name in imported]
    module = ast.fix_missing_locations(ast.Module(body=[*imports, outer], type_ignores=[]))
    try:
        compiled = compile(module, like.co_filename, "exec", flags=like.co_flags & _FUTURES, dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    holder = next(part for part in compiled.co_consts if isinstance(part, types.CodeType))
    made = [part for part in holder.co_consts if isinstance(part, types.CodeType) and part.co_name == like.co_name]
    return made[-1] if made else None


def _readings(code: types.CodeType) -> Iterator[tuple[Function | None, tuple[str, ...]]]:
    """The definition, and names that its file imports: by the lines of the function, and then by the whole file, which takes
    longer."""
    lines = linecache.getlines(code.co_filename)
    text = "".join(lines)
    if code.co_name != "<lambda>":
        yield _evaluated(_definition_at(lines, code)), _imported(_import_statements(text))
    yield _evaluated(_definition(text, code)), _imported(text)


def _definition_at(lines: list[str], code: types.CodeType) -> Function | None:
    """The definition that begins at the function's first line. It ends before a line that is not indented more."""
    first = code.co_firstlineno - 1
    if first >= len(lines):
        return None
    indent, ends = _indent(lines[first]), 0
    for end in range(first + 1, len(lines) + 1):
        if end < len(lines) and (not lines[end].strip() or _indent(lines[end]) > indent):
            continue
        tree = _parsed("if 1:\n" * (indent > 0) + "".join(lines[first:end]))
        ends += 1
        if tree is None and ends < _MAX_ENDS:  # a decorator, or a bracket that has to be closed yet
            continue
        body = getattr(tree.body[0], "body", []) if tree is not None and indent else getattr(tree, "body", [])
        if len(body) != 1 or not isinstance(body[0], ast.FunctionDef) or body[0].name != code.co_name:
            return None
        ast.increment_lineno(body[0], first - (indent > 0))
        return body[0]
    return None


_MAX_ENDS = 16


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


@functools.lru_cache(maxsize=64)
def _import_statements(text: str) -> str:
    """Those that are not indented."""
    return "\n".join(re.findall(r"^(?:import|from)\b(?:[^(\n]*\([^)]*\)|.*)", text, re.MULTILINE))


@functools.lru_cache(maxsize=64)
def _imported(text: str) -> tuple[str, ...]:
    """Names that the module's own code imports."""
    names: dict[str, None] = {}
    waiting: list[ast.AST] = [_module(text)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            names.update({(alias.asname or alias.name).partition(".")[0]: None for alias in node.names})
        elif isinstance(node, ast.ImportFrom):
            names.update({alias.asname or alias.name: None for alias in node.names if alias.name != "*"})
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))
    return tuple(sorted(names))


def _definition(text: str, code: types.CodeType) -> Function | None:
    of_text = _lambdas(text) if code.co_name == "<lambda>" else _definitions(text)
    found = of_text.get((code.co_name, code.co_firstlineno), ())
    return _copied(found[0]) if len(found) == 1 else None


def _evaluated(definition: Function | None) -> Function | None:
    """Without decorators and annotations, which have been evaluated when the function runs, as have default values."""
    if isinstance(definition, ast.FunctionDef):
        definition.decorator_list = []
        definition.returns = None
        arguments = definition.args
        for argument in (
            *arguments.posonlyargs,
            *arguments.args,
            *arguments.kwonlyargs,
            arguments.vararg,
            arguments.kwarg,
        ):
            if argument is not None:
                argument.annotation = None
    return definition


@functools.lru_cache(maxsize=64)
def _definitions(text: str) -> dict[tuple[str, int], list[Function]]:
    """The functions of a module that have names, by name and first line. Only statements can hold them."""
    found: dict[tuple[str, int], list[Function]] = {}
    waiting: list[ast.AST] = [_module(text)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found.setdefault((node.name, first), []).append(node)
        for part in _BLOCKS:
            waiting.extend(getattr(node, part, ()))
    return found


_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


@functools.lru_cache(maxsize=64)
def _lambdas(text: str) -> dict[tuple[str, int], list[Function]]:
    found: dict[tuple[str, int], list[Function]] = {}
    for node in ast.walk(_module(text)):
        if isinstance(node, ast.Lambda):
            found.setdefault(("<lambda>", node.lineno), []).append(node)
    return found


def _copied(value: Any) -> Any:
    """A syntax tree, or a list of them, copied."""
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if not isinstance(value, ast.AST):
        return value
    made = type(value)()
    for name, item in vars(value).items():
        setattr(made, name, _copied(item))
    return made


@functools.lru_cache(maxsize=64)
def _module(text: str) -> ast.Module:
    return _parsed(text) or ast.Module(body=[], type_ignores=[])


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _is_mangled(code: types.CodeType) -> bool:
    """Whether names depend on the class that the function is defined in."""
    names = (name for part in code_objects(code) for name in (*part.co_names, *part.co_varnames, *part.co_freevars))
    return any(name.startswith("_") and "__" in name[1:] and not name.endswith("__") for name in names)


def _is_same(made: types.CodeType, code: types.CodeType) -> bool:
    """Whether two functions do the same: all but files, lines and columns is equal. A file that was edited since it was
    imported has other text than the function that runs, of which a constant may be the only difference."""
    ours, theirs = list(code_objects(made)), list(code_objects(code))
    return len(ours) == len(theirs) and all(
        _what_it_does(a) == _what_it_does(b) for a, b in zip(ours, theirs, strict=True)
    )


def _what_it_does(code: types.CodeType) -> tuple[Any, ...]:
    constants = tuple(_constant(value) for value in code.co_consts if not isinstance(value, types.CodeType))
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & ~inspect.CO_NESTED
    names = code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, counts, names, constants


def _constant(value: Any) -> Any:
    """A constant with its type: 1, 1.0 and True are equal."""
    if isinstance(value, tuple):
        return tuple, *map(_constant, value)
    if isinstance(value, frozenset):
        return frozenset, frozenset(map(_constant, value))
    return type(value), repr(value)
