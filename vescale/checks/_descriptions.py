"""Descriptions of what a script passes to a model, by which ranks compare it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import operator
import os
import random
import sys
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from vescale import csrc
from vescale.checks._mismatches import DRAWN, NUMBERS, SEED, USED
from vescale.compat import no_torch_function, tensors_in

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


def sample(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What tells what the texts of ``describe(name, value, fully=False)`` of all arguments would say, without making
    them: of each constant a tuple with it, of another value a number."""
    native = csrc.step_marks()
    found = None if native is None else native.sample(args, kwargs)
    if found is None:
        found = tuple(map(_sampled, args)), {name: _sampled(value) for name, value in kwargs.items()}
    return found


def _sampled(value: Any) -> Any:
    if type(value) in _CONSTANTS or value is None:
        return (value,)
    seen: list[object] = []
    _sample(value, seen)
    return digest_of(seen)


def sampled_rows(seen: tuple[tuple[Any, ...], dict[str, Any]], named: Callable[..., Any]) -> list[tuple[str, str]]:
    """A description of what :func:`sample` has seen; ``named``: names and values of arguments."""
    rows = [(name, found) for name, found, *_ in named(*seen)]
    return [
        (name, repr(found[0]) if type(found) is tuple else f"values with digest {found:x}")
        for name, found in rows
        if found != (None,)
    ]


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


# The line of the user's program that is running.

_LIBRARIES = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(__file__)) if path)

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_IS_OF_A_LIBRARY: dict[str, bool] = {}  # by file


def _is_of_a_library(file: str) -> bool:
    found = _IS_OF_A_LIBRARY[file] = file.startswith(_LIBRARIES) or file.startswith("<")
    return found


def called_by_user(depth: int) -> bool:
    """Whether the code so many calls above this function is neither PyTorch's nor vescale's."""
    file = sys._getframe(depth).f_code.co_filename
    known = _IS_OF_A_LIBRARY.get(file)
    return not file.startswith(_PACKAGE) and not (_is_of_a_library(file) if known is None else known)


def call_site() -> str:
    """``train.py:37 (main)``: the innermost line outside of PyTorch and vescale; "" if there is none."""
    native = csrc.step_marks()
    if native is not None:
        return str(native.call_site(_IS_OF_A_LIBRARY, _is_of_a_library))
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        known = _IS_OF_A_LIBRARY.get(code.co_filename)
        if not (_is_of_a_library(code.co_filename) if known is None else known):
            break
        frame = frame.f_back
    else:
        return ""
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} ({code.co_name})"


# ``RandomStates``: the generators that a program draws from without naming one, which of them a forward has used, and
# what for. Nobody has to seed Python's ``random``, and others draw from it: libraries that are imported, that log a
# sample of what they see, and threads. So a draw says nothing by itself. What counts is what the model computes: the
# functions of its tensors and the numbers that they are called with; and of torch's own generator, whether one of these
# functions draws. A thread that draws from it meanwhile changes nothing of a model that draws nothing.


class RandomStates:
    """The states of the default generator of torch, of ``numpy.random`` and of ``random``, as they are now.

    Args:
        names_state: whether ranks that draw have to be in the same state; else, where ranks may have drawn different
            amounts before, of the same seed.
        sees_calls: whether :meth:`see` gets all that the model computes from now on.
    """

    def __init__(self, *, names_state: bool, sees_calls: bool) -> None:
        self._names_state = names_state
        self._calls: int | None = 0 if sees_calls else None
        self._draws = not sees_calls
        self._states = _states()

    def see(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """A torch function that the model has called. One that makes no DTensor, of no DTensor, computes nothing of the
        model: a read, a sum of local values."""
        name = getattr(function, "__name__", "")
        self._draws = self._draws or _draws(function)
        if self._calls is None or name in _ALIASES:
            return
        given = [*args, *kwargs.values()]
        makes = name == "__setitem__" or any(isinstance(x, DTensor) for x in tensors_in(result))
        if makes and any(isinstance(x, DTensor) for x in tensors_in(given)):
            self._calls = zlib.crc32(repr((name, *_numbers(given))).encode(), self._calls)

    def drawn_since(self) -> list[tuple[str, str]]:
        """Of the generators that have been drawn from since: name, and what tells where they stood; and of the calls that
        have been seen."""
        names = (SEED, *NUMBERS)
        texts = [f"{state:08x}" for state in self._states]
        texts[0] = f"{torch.initial_seed()}, {texts[0]}" if self._names_state else str(torch.initial_seed())
        moved = [state != now for state, now in zip(self._states, _states())]
        moved[0] = moved[0] and self._draws
        drawn = [(name, text) for name, text, has_moved in zip(names, texts, moved) if has_moved]
        return drawn if self._calls is None else [*drawn, (USED, f"{self._calls:08x}")]


@functools.lru_cache(maxsize=1024)
def _draws(function: Any) -> bool:
    """Whether a torch function may draw from the default generator: an op that PyTorch marks so, or that has an argument for
    it; a function that calls one; or anything that is none of PyTorch's."""
    if _is_drawn_by(getattr(function, "__name__", "")):
        return True
    code = getattr(function, "__code__", None)
    return any(map(_is_drawn_by, code.co_names)) if code is not None else not isinstance(function, _OF_PYTORCH)


def _is_drawn_by(name: str) -> bool:
    packet = getattr(torch.ops.aten, name.strip("_"), None)
    overloads = getattr(packet, "overloads", tuple)  # the namespace has attributes that are no ops
    ops = [getattr(packet, overload) for overload in overloads()]
    return any(
        torch.Tag.nondeterministic_seeded in op.tags
        or any("dropout" in argument.name or argument.name == "generator" for argument in op._schema.arguments)
        for op in ops
    )


_OF_PYTORCH = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
)

_ALIASES = ("__get__", "detach")
"""What gives a tensor with the same values, or an attribute: for a look at it as well as for the model."""


def _numbers(value: Any) -> Iterator[object]:
    """All that a program may have drawn among the arguments of a call."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    elif isinstance(value, np.ndarray | np.generic):
        yield value.tolist()
    elif isinstance(value, bool | int | float | complex):
        yield value
    elif type(value) is torch.Tensor and not value.ndim and value.is_cpu and not value.is_meta:
        yield value.item()


def describe_draw(shape: Sequence[int], what: str, generator: torch.Generator) -> tuple[str, str]:
    """For :meth:`StepChecks.note`, before ``what`` draws into a DTensor: which numbers are going to be drawn."""
    with no_torch_function():
        state = zlib.crc32(generator.get_state().numpy().tobytes())
    where = f"{DRAWN}what {what} has put into a DTensor of shape {tuple(shape)} ({call_site()})"
    return where, f"the seed {generator.initial_seed()} in state {state:08x}"


def _states() -> tuple[int, int, int]:
    mersenne = np.random.get_state()
    key, position = mersenne[1], mersenne[2]  # type: ignore[index]
    numbers = random.getstate()[1]
    return (
        zlib.crc32(torch.get_rng_state().numpy().tobytes()),
        zlib.crc32(repr(position).encode(), zlib.crc32(np.asarray(key).tobytes())),
        hash(numbers) & 0xFFFFFFFF,
    )


# ``TrainedParameters``: which parameters of a model are trained, for ranks to compare after each change.


_MAX_NAMES = 120
_requires_grad = operator.attrgetter("requires_grad")


class TrainedParameters:
    """Of one model, on all ranks that train it."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._parameters: list[torch.Tensor] = []
        self._seen: list[bool] = []

    def see(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
        """The parameters by name, from now on. Returns which of them are frozen, for the caller to compare."""
        found = [*parameters]
        self._names, self._parameters = [name for name, _ in found], [parameter for _, parameter in found]
        self._seen = [*map(_requires_grad, self._parameters)]
        return self._text()

    def changed(self) -> str | None:
        """The same where a parameter has been frozen or thawed since, else None."""
        now = [*map(_requires_grad, self._parameters)]
        if now == self._seen:
            return None
        self._seen = now
        return self._text()

    def _text(self) -> str:
        frozen = [name for name, is_trained in zip(self._names, self._seen, strict=True) if not is_trained]
        text = ", ".join(frozen)
        if len(text) >= _MAX_NAMES:
            text = f"{text[:_MAX_NAMES]}... ({len(frozen)}, {hash_of(text)})"
        return f"False of {text}" if frozen else "True of all"
