"""Tensors inside the arguments and results of modules."""

from __future__ import annotations

import copy
import dataclasses
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Tensor)

_WITHOUT_TENSORS = frozenset(_PLAIN) - {torch.Tensor}


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``value`` with every tensor in nested tuples, lists, mappings and dataclasses replaced.

    A container is rebuilt, as its own type, only when something inside it changed; mappings and dataclasses by a copy, for
    constructors may check, or lose what they were not told of. Any other object (a key/value cache, a configuration) is
    returned as it is: it has an identity that the model may rely on.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return _as_before(value, [map_tensors(change, item) for item in value])
    held = dict(value) if isinstance(value, Mapping) else _fields(value)
    changed = {key: map_tensors(change, item) for key, item in held.items()}
    changed = {key: item for key, item in changed.items() if item is not held[key]}
    if not changed:
        return value
    if isinstance(value, MutableMapping):
        rebuilt: Any = copy.copy(value)  # Hugging Face's outputs are dictionaries with attributes; keep their type
        for key, item in changed.items():
            rebuilt[key] = item
        return rebuilt
    if isinstance(value, Mapping):
        return type(value)({**held, **changed})  # type: ignore[call-arg]
    rebuilt = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(rebuilt, name, item)  # also a frozen one
    return rebuilt


def _as_before(value: Any, items: list[Any]) -> Any:
    """The list or tuple with these items; itself if they are its own."""
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


class Exchanged:
    """Tensors in the arguments of a call that are exchanged for others while it runs, in the containers that the caller has
    given: what the call adds to them, or takes out, is there afterwards."""

    def __init__(self) -> None:
        self._given: list[Any] = []
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def exchange(self, change: Callable[[torch.Tensor], Any], value: Any) -> Any:
        """``value`` with every tensor that :func:`map_tensors` would replace."""

        def note(tensor: torch.Tensor) -> Any:
            new = change(tensor)
            if new is not tensor:
                self._before[id(new)] = new, self._before.get(id(tensor), (tensor, tensor))[1]
            return new

        self._given.append(value)
        return _replaced(note, value)

    def put_back(self) -> None:
        def before(tensor: torch.Tensor) -> torch.Tensor:
            return self._before.get(id(tensor), (tensor, tensor))[1]

        if self._before:
            for value in self._given:
                _replaced(before, value)


def _replaced(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """As :func:`map_tensors`, but containers that can be written to stay the same objects."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        return _as_before(value, [_replaced(change, item) for item in value])
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return map_tensors(change, value)
    for key, item in list(_entries(value)):
        new = _replaced(change, item)
        if new is not item:
            _put(value, key, new)
    return value


def _entries(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, list):
        return enumerate(value)
    return (value if isinstance(value, Mapping) else _fields(value)).items()


def _put(value: Any, key: Any, item: Any) -> None:
    if isinstance(value, list | MutableMapping):
        value[key] = item
    else:
        object.__setattr__(value, key, item)  # also of a frozen one


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that :func:`map_tensors` would visit."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        yield value
    elif kind in _WITHOUT_TENSORS:
        return
    elif kind is tuple or isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    else:
        for item in (value if kind is dict or isinstance(value, Mapping) else _fields(value)).values():
            yield from tensors_in(item)


def hides_tensors(value: Any) -> bool:
    """Whether there is an object in ``value`` that :func:`map_tensors` does not look into, and that may hold tensors."""
    if isinstance(value, _PLAIN):
        return False
    if isinstance(value, list | tuple):
        return any(map(hides_tensors, value))
    if isinstance(value, Mapping):
        return any(map(hides_tensors, value.values()))
    fields = _fields(value)
    return any(map(hides_tensors, fields.values())) if fields else not isinstance(value, type)


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass; of anything else none."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type | torch.nn.Module):
        return {}
    names = [field.name for field in dataclasses.fields(value)]
    try:  # without the class's own access: configurations refuse to read some of their fields
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:  # it has slots
        return {name: getattr(value, name, None) for name in names}
    return {name: held.get(name) for name in names}


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the elements in row-major order, flat: in the tensor's memory if it is contiguous, else of a copy.

    A tensor of one element counts as contiguous whatever its strides, and ``view(torch.uint8)`` refuses all but 1.
    """
    flat = tensor.detach().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


AVERAGED_MODULES: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Those whose parameters are averages for the moment, and no state to go on training from."""

K = TypeVar("K")
V = TypeVar("V")

_GONE: Any = object()


def living_items(table: weakref.WeakKeyDictionary[K, V]) -> list[tuple[K, V]]:
    """What is in the table now. Its own iterators run Python between two items, and an entry that another thread adds
    meanwhile ends them with a RuntimeError."""
    keys = [key for reference in table.keyrefs() if (key := reference()) is not None]
    found = [(key, table.get(key, _GONE)) for key in keys]
    return [(key, value) for key, value in found if value is not _GONE]


# What PyTorch's wrappers of modules add to the names of parameters.

WRAPPER_MODULES = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
"""Modules around the one that the script has named: activation checkpointing, ``torch.compile``, PyTorch's first FSDP."""

_PARTS = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(WRAPPER_MODULES)})\.")


def unwrapped_name(name: str) -> str:
    """The name of a parameter, buffer or module in the model without wrappers."""
    return _PARTS.sub("", name)


def unwrapped_model(model: nn.Module) -> nn.Module:
    """Without ``DistributedDataParallel``, whose names begin with ``module.``."""
    return model.module if isinstance(model, DistributedDataParallel) else model
