"""The check that the installed torch is one that vescale is made for, and has what :mod:`vescale.compat.needed_names` lists.

A name that an optional feature needs costs only that feature where it is missing.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch

from vescale.compat.needed_names import KNOWN_FIELDS, OPTIONAL_NAMES, REQUIRED_NAMES
from vescale.errors import (
    LIMITED_TORCH,
    SUPPORTED_TORCH,
    TORCH_RANGE,
    UnsupportedTorchError,
    UntestedTorchWarning,
    torch_promise,
)


@dataclasses.dataclass(frozen=True)
class Need:
    """One private name.

    Attributes:
        module: where it is.
        path: its name there; ``Class.method`` for members, ``a|b`` where either will do.
        parameters: parameters that it must have, in this order among its own.
        uses: names that its code must mention.
        locals: local variables that its frame must have.
        feature: the optional feature that needs it; "" if nothing works without it.
    """

    module: str
    path: str
    parameters: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    locals: tuple[str, ...] = ()
    feature: str = ""


@dataclasses.dataclass(frozen=True)
class Record:
    """One of torch's classes whose objects vescale makes, copies or decides by, and all fields that it knows of."""

    module: str
    name: str
    fields: frozenset[str]


def _entries(table: str) -> Iterator[tuple[str, str]]:
    for line in table.strip().replace("\n    ", " ").splitlines():
        module, _, entries = line.partition(": ")
        for entry in entries.split("; "):
            yield module, entry


def _needs(table: str, feature: str = "") -> Iterator[Need]:
    for module, entry in _entries(table):
        entry, _, variables = entry.partition(" locals ")
        entry, _, uses = entry.partition(" uses ")
        path, _, parameters = entry.rstrip(")").partition("(")
        yield Need(module, path, _names(parameters), _names(uses), _names(variables), feature)


def _records(table: str) -> Iterator[Record]:
    for module, entry in _entries(table):
        name, _, fields = entry.partition(" ")
        yield Record(module, name, frozenset(_names(fields)))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(", ")) if text else ()


NEEDS = tuple(_needs(REQUIRED_NAMES))
OPTIONAL = tuple(need for feature, table in OPTIONAL_NAMES.items() for need in _needs(table, feature))
KNOWN = tuple(_records(KNOWN_FIELDS))
_ALLOWED = "VESCALE_ALLOW_TORCH"
_WARNED: list[str] = []


def lacking(feature: str) -> list[str]:
    """What an optional feature needs and this torch does not have, and fields that it does not know."""
    needs = [need for need in OPTIONAL if need.feature == feature]
    records = {(need.module, need.path.split(".")[0]) for need in needs}
    unknown = [_unknown_fields(record) for record in KNOWN if (record.module, record.name) in records]
    return [found for found in (*map(_lack, needs), *unknown) if found is not None]


def require(feature: str) -> None:
    """Raise UnsupportedTorchError, which names what is missing, where this torch has not all that the feature needs."""
    missing = lacking(feature)
    if missing:
        raise UnsupportedTorchError(
            f"torch {torch.__version__} does not have what vescale needs for {feature}:{_listed(missing)}\nexpected: "
            f"{_expected()}; do not use the feature, or {_EDIT}"
        )


def self_check() -> None:
    """Check that vescale supports the installed torch, which has every name in :data:`NEEDS`, and whose records have no
    fields that :data:`KNOWN` does not list.

    Raises UnsupportedTorchError, which lists all problems. ``VESCALE_ALLOW_TORCH=1`` continues with another version and
    with unknown fields, after one warning; not without names. Communicates nothing and changes nothing.
    """
    version = str(torch.__version__)
    is_known, is_allowed = torch_promise(version) != "not supported", os.environ.get(_ALLOWED, "") not in ("", "0")
    if not is_known and not is_allowed:
        raise UnsupportedTorchError(
            f"found torch {version}, expected {_expected()}; {_EDIT}. {_ALLOWED}=1 continues with this version, at "
            "your own risk"
        )
    missing = [found for need in NEEDS if (found := _lack(need)) is not None]
    if missing:
        raise UnsupportedTorchError(
            f"torch {version} lacks names that vescale needs:{_listed(missing)}\nexpected: {_expected()}; {_EDIT}"
        )
    unknown = [found for record in KNOWN if (found := _unknown_fields(record)) is not None]
    if unknown and not is_allowed:
        raise UnsupportedTorchError(
            f"torch {version} has fields that vescale does not know and that may change "
            f"results:{_listed(unknown)}\nexpected: {_expected()}; {_EDIT}. {_ALLOWED}=1 continues with this version, "
            "at your own risk"
        )
    if (unknown or not is_known) and version not in _WARNED:
        _WARNED.append(version)
        what = f"; it has unknown fields: {', '.join(unknown)}" if unknown else ""
        warnings.warn(
            f"found torch {version}, expected {_expected()}: {_ALLOWED} is set, so vescale continues, untested{what}; "
            f"{_EDIT}",
            UntestedTorchWarning,
            stacklevel=2,
        )


_EDIT = f'run: pip install "torch{TORCH_RANGE}"'


def _expected() -> str:
    return f"{', '.join(SUPPORTED_TORCH)} (with limits {', '.join(LIMITED_TORCH)})"


def _listed(lines: list[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)


def _lack(need: Need) -> str | None:
    """What is wrong with one name, or None."""
    try:
        module = importlib.import_module(need.module)
    except ImportError:
        return f"module {need.module} (for {need.path})"
    name = f"{need.module}.{need.path}"
    found: Any = _MISSING
    for path in need.path.split("|"):
        found = _resolve(module, path)
        if found is not _MISSING:
            break
    if found is _MISSING:
        return name
    if need.uses or need.locals:
        code = _code(found)
        used = set() if code is None else set(_mentioned(code))
        held = set() if code is None else {*code.co_varnames, *code.co_cellvars}
        unused = [word for word in need.uses if word not in used] + [word for word in need.locals if word not in held]
        if unused:
            return f"{name}: code that uses {', '.join(unused)}"
    return _parameters_lacking(found, name, need.parameters)


_MISSING = object()
_STORED = object()
"""Stands for what only objects of a class have."""


def _resolve(found: Any, path: str) -> Any:
    for part in path.split("."):
        if found is _STORED:
            return _MISSING
        inner = getattr(found, part, _MISSING)
        if inner is _MISSING and isinstance(found, type) and _objects_have(found, part):
            inner = _STORED
        if inner is _MISSING:
            return _MISSING
        found = inner
    return found


def _code(function: Any) -> CodeType | None:
    found = inspect.unwrap(getattr(function, "__func__", function))
    return getattr(found, "__code__", None)


def _mentioned(code: CodeType) -> Iterator[str]:
    """The names and strings in a function's code, and in functions that it defines."""
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, str):
            yield value
        elif isinstance(value, CodeType):
            yield from _mentioned(value)


def _objects_have(kind: type, name: str) -> bool:
    if name in _stored(kind) or any(name in _mentioned(code) for code in _made_by(kind)):
        return True
    # Programs replace the ``__init__`` of modules, and call the original in any way.
    return kind is torch.nn.Module and hasattr(kind(), name)


def _stored(kind: type) -> set[str]:
    """The attributes that objects of a class get when they are made."""
    found = set(getattr(kind, "__dataclass_fields__", ()))
    for code in _made_by(kind):
        found.update(_set_attributes(code))
    return found


def _made_by(kind: type) -> Iterator[CodeType]:
    functions: list[Any] = [
        vars(base).get(name) for base in kind.__mro__[:-1] for name in ("__init__", "__post_init__")
    ]
    yield from (code for function in functions if function is not None and (code := _code(function)) is not None)


@functools.lru_cache(maxsize=128)
def _set_attributes(code: CodeType) -> tuple[str, ...]:
    return tuple(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")


def _unknown_fields(record: Record) -> str | None:
    """The fields of a record that are not known, or None."""
    try:
        kind = getattr(importlib.import_module(record.module), record.name)
    except (ImportError, AttributeError):  # this version has no such record
        return None
    fields = set(getattr(kind, "_fields", ()) or vars(kind).get("__slots__", ())) or _stored(kind)
    unknown = sorted(fields - record.fields)
    return f"{record.module}.{record.name}: fields {', '.join(unknown)}" if unknown else None


def _parameters_lacking(function: Any, name: str, wanted: tuple[str, ...]) -> str | None:
    if not wanted:
        return None
    own = [parameter for parameter in _parameters(function) if parameter in wanted]
    if tuple(own) == wanted:
        return None
    return f"{name}: parameters {', '.join(wanted)} in this order; it has {inspect.signature(function)}"


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of parameters, from the code where there is one: ``inspect.signature`` takes ten times as long."""
    code = _code(function) if not isinstance(function, type) else None
    if code is None:
        return tuple(inspect.signature(function).parameters)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
