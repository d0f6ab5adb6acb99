"""Digests of functions and modules, by which a record is compared with a model in another process."""

from __future__ import annotations

import enum
import functools
import hashlib
import linecache
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.compat import CALL_OVERRIDE
from vescale.fsdp import ManagedParameter
from vescale.static._source import code_objects

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size)
_FUNCTIONS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_MAX_DEPTH = 6
# Fields of every module: hooks, which guards compare, containers of what is described by itself, and what compilers leave.
_OF_ALL_MODULES = frozenset(nn.Module().__dict__) - {"training"} | {CALL_OVERRIDE, "_is_torch_compile"}


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


@functools.cache
def _file_digest(file: str) -> str:
    return _digest("".join(linecache.getlines(file)))


def code_digest(code: types.CodeType) -> str:
    """Of the text of a function's file, of its place there and of its instructions: where it is equal, the trees are."""
    return _digest(_file_digest(code.co_filename), str(code.co_firstlineno), _instructions(code))


@functools.lru_cache(maxsize=4096)
def _instructions(code: types.CodeType) -> str:
    names = (code.co_qualname, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    constants = [_instructions(c) if isinstance(c, types.CodeType) else _text(c) for c in code.co_consts]
    return _digest(repr(names), repr(counts), code.co_code.hex(), *constants)


def globals_digest(code: types.CodeType, held: Mapping[str, Any]) -> str:
    """Of the functions, classes, modules and constants that a function finds in its globals ``held``."""
    names = sorted({name for part in code_objects(code) for name in part.co_names if name in held})
    return _digest(*(f"{name}={_global_text(held[name])}" for name in names))


def _global_text(value: Any) -> str:
    """Of other values only the type: loggers and caches change while a process runs."""
    described = (*_CONSTANTS, *_FUNCTIONS, types.FunctionType, types.ModuleType, type, tuple, frozenset)
    is_described = isinstance(value, described)
    return _text(value) if is_described else _name(type(value))


def state_digest(module: nn.Module, managed: Mapping[tuple[int, str], ManagedParameter]) -> str:
    """Of a module without its parts: the text of its class, its attributes, parameters and buffers, not their values.

    Args:
        managed: parameters of units, by (``id`` of the module, name in it).
    """
    held = module.__dict__
    # Names with two underscores are keys that PyTorch's composable functions draw in each process.
    names = (name for name in sorted(held) if name not in _OF_ALL_MODULES and not name.startswith("__"))
    attributes = (f"{name}={_text(held[name])}" for name in names)
    return _digest(
        *_class_texts(cast(Any, type(module))), *attributes, *_tensor_texts(module, managed), *module._modules
    )


@functools.cache
def _class_texts(kind: type) -> tuple[str, ...]:
    """Names of a class and its bases, and the files that define them."""
    found = []
    for base in kind.__mro__:
        file = getattr(sys.modules.get(base.__module__), "__file__", None) or ""
        found.append(f"{_name(base)} {_file_digest(file) if file.endswith('.py') else ''}")
    return tuple(found)


def _tensor_texts(module: nn.Module, managed: Mapping[tuple[int, str], ManagedParameter]) -> Iterator[str]:
    for kind in (module._parameters, module._buffers):
        for name, x in kind.items():
            of_unit = managed.get((id(module), name))
            if of_unit is not None:
                x = of_unit.sharded
            yield f"{name}={None if x is None else _tensor_text(x)}"


def _tensor_text(x: torch.Tensor) -> str:
    placements = repr(tuple(x.placements)) if isinstance(x, DTensor) else ""
    return f"{tuple(x.shape)} {x.dtype} {x.device.type} {x.requires_grad} {placements}"


def _text(value: Any, depth: int = 0, seen: Collection[int] = ()) -> str:
    """Of anything, without addresses; equal texts stand for equal values as far as a forward depends on them."""
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, _CONSTANTS):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, torch.Tensor):
        return _tensor_text(value)
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, type):
        return _name(value)
    if isinstance(value, _FUNCTIONS):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    if depth >= _MAX_DEPTH or id(value) in seen or type(value).__module__.startswith("vescale."):
        return _name(type(value))
    inner = functools.partial(_text, depth=depth + 1, seen=(*seen, id(value)))
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if not _is_empty(cell)]
        parts = map(inner, (value.__defaults__, value.__kwdefaults__, *cells))
        return f"{value.__qualname__} {code_digest(value.__code__)} {list(parts)}"
    if isinstance(value, types.MethodType):
        return f"{inner(value.__func__)} of {_name(type(value.__self__))}"
    if isinstance(value, functools.partial):
        return f"partial {inner(value.func)} {inner(value.args)} {inner(value.keywords)}"
    if isinstance(value, nn.Module):
        return _name(type(value))
    if isinstance(value, Mapping):
        return f"{_name(type(value))} {[(inner(key), inner(item)) for key, item in value.items()]}"
    if isinstance(value, set | frozenset):
        return f"{_name(type(value))} {sorted(map(inner, value))}"
    if isinstance(value, list | tuple):
        return f"{_name(type(value))} {list(map(inner, value))}"
    attributes = getattr(value, "__dict__", None)
    return f"{_name(type(value))} {inner(_alike_in_processes(attributes)) if isinstance(attributes, dict) else ''}"


def _alike_in_processes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Of an object: in one order, since a constructor may set them in that of a set, and without private hashes of the
    others. Both differ between processes."""
    return {
        name: value
        for name, value in sorted(attributes.items())
        if not (name.startswith("_") and name.endswith("_hash") and isinstance(value, int))
    }


def _is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
