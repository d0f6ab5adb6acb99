"""Collects the private names of torch that the package touches, from its source: the other side of the table of needs.

A name is private if a part of it begins with an underscore; so are the attributes of private classes, which may have none.
In Python, dotted names that begin with an import of torch are found, attributes of objects whose type the source does not
tell, and strings. In C++, names of torch that are not documented, and strings that Python is asked for.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import vescale

PACKAGE = Path(vescale.__file__).parent
TABLE = PACKAGE / "compat" / "needed_names.py"

# What programs ask dictionaries and functions for.
_BUILTIN = {"__code__", "get", "items", "keys", "values"}
_LOOK_UPS = {"attribute", "attrgetter", "delattr", "getattr", "hasattr", "methodcaller", "setattr"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SEEN = (
    *(
        ast.AnnAssign,
        ast.Assign,
        ast.Attribute,
        ast.Call,
        ast.ClassDef,
        ast.Compare,
        ast.Constant,
        ast.ImportFrom,
        ast.Module,
    ),
    *(ast.Subscript, ast.keyword),
)


def is_private(name: str) -> bool:
    return any(re.match(r"_(?!_)\w", part) for part in name.split("."))


def _places() -> defaultdict[str, set[str]]:
    return defaultdict(set)


@dataclass
class Names:
    """Names by kind, each with the places where it is.

    Attributes:
        chains: dotted private names that begin with an import of torch.
        attributes: of objects whose type the source does not tell, and private keywords of calls.
        of_others: the attributes among them that are not of ``self``.
        strings: parts of strings that are names.
        looked_up: private names among them that ``getattr`` and the like are given, or that index ``__dict__``.
        frame_variables: variables that a function reads which is given ``frame.f_locals``.
        defined: what classes and modules define, by package.
        imported: names that are imported from torch.
        functions: names of all functions, which may come in the place of torch's.
    """

    chains: dict[str, set[str]] = field(default_factory=_places)
    attributes: dict[str, set[str]] = field(default_factory=_places)
    of_others: dict[str, set[str]] = field(default_factory=_places)
    strings: dict[str, set[str]] = field(default_factory=_places)
    looked_up: dict[str, set[str]] = field(default_factory=_places)
    frame_variables: dict[str, set[str]] = field(default_factory=_places)
    defined: dict[str, set[str]] = field(default_factory=_places)
    imported: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)

    def foreign_attributes(self) -> dict[str, set[str]]:
        """The attributes that no class or module of the same package defines."""
        found = {
            name: {place for place in places if name not in self.defined[place.partition("/")[0]]}
            for name, places in self.attributes.items()
        }
        return {name: places for name, places in found.items() if places}


@cache
def names_of_package() -> Names:
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path != TABLE]
    return collect({str(path.relative_to(PACKAGE)): path.read_text() for path in files})


def collect(sources: Mapping[str, str]) -> Names:
    """The names in files of the package, by path."""
    found = Names()
    for path, text in sources.items():
        tree = ast.parse(text)
        _File(path, found, _imports(tree)).scope(tree, {})
        if "f_locals" in text:
            for name in _frame_variables(tree):
                found.frame_variables[name].add(path)
    return found


@cache
def native_text() -> str:
    """The C++ sources without comments."""
    files = [path for path in sorted((PACKAGE / "csrc").iterdir()) if path.suffix in (".h", ".cpp")]
    return "\n".join(re.sub(r"//[^\n]*", "", path.read_text()) for path in files)


def native_names(text: str) -> set[str]:
    """Names of C++ that torch does not document: of inner namespaces and autograd, with underscores, and ``THP...``."""
    dotted = set(re.findall(r"\b(?:at|c10|c10d|caffe2|torch)(?:::\w+)+", text))
    inner = {
        name for name in dotted if re.search(r"::(detail|impl|tracer|_\w+)(::|$)|^torch::(autograd|dynamo)::", name)
    }
    return inner | set(re.findall(r"(?<!:)\bTHP\w+", text))


def native_strings(text: str) -> set[str]:
    """Private names in strings: Python's attributes."""
    return {name for name in re.findall(r'"(\w+)"', text) if is_private(name)}


class _File:
    def __init__(self, path: str, found: Names, imports: dict[str, str]) -> None:
        self._path, self._package, self._found, self._imports = path, path.partition("/")[0], found, imports

    def scope(self, scope: ast.AST, outer: Mapping[str, str]) -> None:
        """A module or function, with the names that stand for torch's there: imports, and what is assigned from them
        (``propagator = DTensor._op_dispatcher.sharding_propagator``)."""
        known = {**self._imports, **outer}
        if isinstance(scope, _FUNCTIONS):
            for argument in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs):
                known.pop(argument.arg, None)
        functions: list[ast.AST] = []
        inner = [node for node in _own_nodes(scope, functions) if isinstance(node, _SEEN)]
        for node in inner:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                self._assigned(node, known)
        for node in inner:
            self._node(node, known)
        for function in functions:
            self._found.functions.add(getattr(function, "name", ""))
            self.scope(function, known)

    def _assigned(self, node: ast.Assign | ast.AnnAssign, known: dict[str, str]) -> None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts))
            for left, right in pairs:
                name = None if right is None else _dotted(right, known)
                if name is not None and isinstance(left, ast.Name):
                    known.setdefault(left.id, name)

    def _node(self, node: ast.AST, known: Mapping[str, str]) -> None:
        found, place = self._found, f"{self._path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute):
            self._attribute(node, place, known)
        elif isinstance(node, ast.Constant):
            for part in _parts(node):
                found.strings[part].add(place)
        elif isinstance(node, ast.ImportFrom) and _is_torch(node.module):
            for alias in node.names:
                found.imported.add(alias.name)
                if is_private(f"{node.module}.{alias.name}"):
                    found.chains[f"{node.module}.{alias.name}"].add(place)
        elif isinstance(node, ast.keyword) and node.arg and is_private(node.arg):
            found.attributes[node.arg].add(f"{self._path}:{node.value.lineno}")
        elif isinstance(node, ast.ClassDef | ast.Module):
            for line in node.body:
                found.defined[self._package].update(_bound(line))
        elif isinstance(node, ast.Call | ast.Subscript | ast.Compare):
            for part in _looked_up(node):
                found.looked_up[part].add(place)

    def _attribute(self, node: ast.Attribute, place: str, known: Mapping[str, str]) -> None:
        name, found = _dotted(node, known), self._found
        if name is not None:
            if is_private(name):
                found.chains[name].add(place)
            return
        found.attributes[node.attr].add(place)
        is_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if not is_self:
            found.of_others[node.attr].add(place)
        elif isinstance(node.ctx, ast.Store):
            found.defined[self._package].add(node.attr)


def _own_nodes(scope: ast.AST, functions: list[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a module or function, outer ones first; functions in it are put aside."""
    if isinstance(scope, ast.Module):
        yield scope
    left = deque([scope])
    while left:
        for node in ast.iter_child_nodes(left.popleft()):
            if isinstance(node, _FUNCTIONS):
                functions.append(node)
            else:
                yield node
                left.append(node)


def _is_torch(module: str | None) -> bool:
    return (module or "").split(".")[0] == "torch"


def _imports(tree: ast.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_torch(alias.name):
                    found[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and _is_torch(node.module):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _dotted(node: ast.expr, known: Mapping[str, str]) -> str | None:
    """``torch.a.b`` of a chain of attributes that begins with a known name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in known:
        return None
    while parts and parts[0] in _BUILTIN:
        del parts[0]
    return ".".join([known[node.id], *reversed(parts)])


def _bound(line: ast.stmt) -> Iterator[str]:
    """What a line of a class or module defines."""
    if isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield line.name
    elif isinstance(line, ast.Assign | ast.AnnAssign):
        for target in line.targets if isinstance(line, ast.Assign) else [line.target]:
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))
            if isinstance(target, ast.Name) and target.id == "__slots__" and line.value is not None:
                yield from (str(node.value) for node in ast.walk(line.value) if isinstance(node, ast.Constant))
    elif isinstance(line, ast.If | ast.Try | ast.With):
        for inner in line.body:
            yield from _bound(inner)


def _parts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
        yield from (part for part in node.value.split(".") if part.isidentifier())


def _looked_up(node: ast.AST) -> Iterator[str]:
    given: Iterable[ast.AST] = ()
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        is_of_dict = isinstance(node.func, ast.Attribute) and _is_dict(node.func.value)
        given = node.args if name in _LOOK_UPS or is_of_dict else ()
    elif isinstance(node, ast.Subscript) and _is_dict(node.value):
        given = [node.slice]
    elif isinstance(node, ast.Compare) and any(map(_is_dict, node.comparators)):
        given = [node.left]
    yield from (part for each in given for part in _parts(each) if is_private(part))


def _is_dict(node: ast.expr) -> bool:
    """``x.__dict__`` and ``vars(x)``."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "vars"
    return isinstance(node, ast.Attribute) and node.attr == "__dict__"


def _frame_variables(tree: ast.Module) -> Iterator[str]:
    readers = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and any(isinstance(each, ast.Attribute) and each.attr == "f_locals" for each in node.args)
    }
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name in readers:
            variable = function.args.args[0].arg
            for node in ast.walk(function):
                if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == variable:
                    yield from _parts(node.slice)
