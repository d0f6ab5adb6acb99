"""Descriptions of what a script passes to a model, by which ranks compare it."""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from vescale import csrc
from vescale.compat import no_torch_function, tensors_in

__all__ = ["describe", "digest_of", "hash_of", "sample", "sum_of_bits", "tensor_text"]

_SAMPLES = 8
_CONSTANTS = (bool, int, float, complex, str)
_MAX_TEXT = 60
_DTYPES = {dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_NUMPY = frozenset(
    getattr(torch, name)
    for name in [
        "float32",
        "float64",
        "int64",
        "int32",
        "bool",
        "uint8",
        "float16",
        "int8",
        "int16",
        "complex64",
        "complex128",
    ]
)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def describe(name: str, value: Any, *, fully: bool, is_nested: bool = False) -> Iterator[tuple[str, str]]:
    """(name, text) of each plain tensor, array and number in ``value``, and of itself if it is a string; ``fully``: with a
    sum over all elements.

    Strings in containers are names of what a rank was given. Of other objects than containers and dataclasses, the tensors
    in them. Nothing waits for a device unless ``fully``.
    """
    kind = type(value)
    if kind is DTensor or isinstance(value, DTensor):
        yield name, f"a DTensor of shape {tuple(value.shape)} placed as {tuple(value.placements)}"
    elif isinstance(value, torch.Tensor):
        grad = ", requires a gradient" if value.requires_grad else ""
        yield name, f"{tensor_text(value, fully=fully)}{grad}"
    elif kind is str and is_nested:
        return
    elif kind in _CONSTANTS:
        text = repr(value)
        yield name, text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}... of length {len(text)}, {hash_of(text)}"
    elif value is None:
        return
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from describe(f"{name}[{index}]", item, fully=fully, is_nested=True)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from describe(f"{name}[{key!r}]", item, fully=fully, is_nested=True)
    elif isinstance(value, np.ndarray | np.generic):
        yield name, _array_text(value, fully=fully)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            item = getattr(value, field.name, None)
            yield from describe(f"{name}.{field.name}", item, fully=fully, is_nested=True)
    else:
        for index, tensor in enumerate(tensors_in(value)):
            yield from describe(f"{name}, tensor {index}", tensor, fully=fully)


def _array_text(value: Any, *, fully: bool) -> str:
    array = np.asarray(value)
    text = f"an array of {array.dtype}{list(array.shape)}"
    if array.dtype.hasobject:
        return text
    if fully:
        return f"{text} beginning with {array.ravel()[:_SAMPLES].tolist()}, checksum {zlib.crc32(array.tobytes()):x}"
    return f"{text}, bits of some elements {array.ravel()[:: array.size // _SAMPLES or 1].tobytes()[:64].hex()}"


def sample(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """What tells what the texts of ``describe(name, value, fully=False)`` of all arguments would say, without making
    them. In C++ a number."""
    native = csrc.step_marks()
    found = None if native is None else native.sample(args, kwargs)
    if found is None:
        found = []
        for value in args:
            _sample(value, found)
        for name, value in kwargs.items():
            found.append(name)
            _sample(value, found)
    return found


def digest_of(value: object) -> int:
    """Of 48 bits, of nested tuples and lists of strings, numbers and bytes."""
    native = csrc.step_marks()
    found = None if native is None else native.digest_of(value)
    if found is None:
        text = repr(value).encode()
        found = (len(text) & 0xFFFF) << 32 | zlib.crc32(text)
    return int(found)


def _sample(value: Any, seen: list[object], is_nested: bool = False) -> None:
    kind = type(value)
    if kind is torch.Tensor:
        bits = _some_bits(value) if value.layout is torch.strided else b""
        seen.append((value.shape, value.dtype, bits))
    elif kind is str and is_nested:
        return
    elif kind in _CONSTANTS or value is None:
        seen.append(value)
    elif kind is list or kind is tuple:
        seen.append("[")
        for item in value:
            _sample(item, seen, True)
        seen.append("]")
    elif kind is dict:
        for key, item in value.items():
            seen.append(key)
            _sample(item, seen, True)
    else:
        seen += describe("", value, fully=False, is_nested=is_nested)


def _some_bits(x: torch.Tensor) -> bytes:
    """Of elements of a tensor; none of one outside of the host's memory."""
    if not (x.is_cpu and x.is_contiguous()) or x.is_conj() or x.is_neg() or x.is_quantized:
        return b""
    plain = x.detach() if x.requires_grad else x
    if x.dtype not in _NUMPY:
        plain = plain.view(_BITS[x.element_size()])
    bits = plain.numpy().ravel()
    return bytes(bits[:: bits.size // _SAMPLES or 1].tobytes()[:64])


def hash_of(text: str) -> str:
    """Eight hexadecimal digits."""
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def tensor_text(x: torch.Tensor, *, fully: bool) -> str:
    """Shape and dtype; some elements of a tensor in the host's memory; ``fully``: the sum of all bits."""
    shape = x.shape
    text = f"{_DTYPES.get(x.dtype) or x.dtype}{list(shape)}"
    kind = type(x)
    if (kind is not torch.Tensor and kind is not torch.nn.Parameter) or x.is_meta or x.layout is not torch.strided:
        return text
    if fully:
        with no_torch_function(), torch.no_grad():
            if x.device.type == "cpu" and x.numel():
                text += f" beginning with {x.detach().reshape(-1)[:_SAMPLES].tolist()}"
            return f"{text}, sum of bits {sum_of_bits(x):x}"
    bits = _some_bits(x)
    return f"{text}, bits of some elements {bits.hex()}" if bits else text


def sum_of_bits(tensor: torch.Tensor) -> int:
    """A number that changes with any one element; sums of bit patterns, so that it costs one pass."""
    if tensor.is_meta or tensor.numel() == 0:
        return 0
    with no_torch_function(), torch.no_grad():
        plain = tensor.detach()
        if plain.is_complex():
            plain = torch.view_as_real(plain.resolve_conj())
        size = plain.element_size()
        bits = plain.resolve_neg().contiguous().view(-1)
        bits = bits.view(_BITS[size]) if size in _BITS else bits
        return int(bits.sum(dtype=torch.int64))
