"""How a forward on meta tensors is followed: a mode that tells each torch function, and what functions do with dims."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from vescale.compat.grouped_products import taking_more_dtypes
from vescale.ops import is_elementwise as is_elementwise_op

# The strides of a tensor of which every view shows where its dims are.
_STRIDES = (15485863, 15485867, 15485917, 15485927, 15485933, 15485941, 15485959, 15485989, 15485993, 15486013)


def source_dims(name: str, x: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, int]:
    """Dims of ``x`` -> the dims of the results that run over the same elements in the same order, or over some of them:
    for a method or an attribute of tensors that gives views. Those that are gone, or joined with others, are left out."""
    function = getattr(torch.Tensor, name, None)
    if function is None or x.ndim > len(_STRIDES):
        return {}
    probe = torch.empty_strided(x.shape, _STRIDES[: x.ndim], dtype=x.dtype, device="meta")
    try:
        found = function(probe, *args, **kwargs) if callable(function) else function.__get__(probe)
    except (RuntimeError, TypeError, IndexError):  # not lost: no view of these strides, as where sizes are joined
        return {}
    first = next(tensors_of(found), None)
    if first is None or first._base is not probe:
        return {}
    # Of two dims with the same stride, the first is one of size 1 that was put in front.
    return {_STRIDES.index(stride): dim for dim, stride in enumerate(first.stride()) if stride in _STRIDES[: x.ndim]}


@functools.cache
def is_elementwise(name: str) -> bool:
    """Whether each element of the result depends on the operands' elements at the same place only: by the registry's family
    of elementwise ops, for the ATen op of the torch function ``name``."""
    base = name.strip("_")
    if name.startswith("__") and base[0] in "ri":  # y + x and x += y
        base = base[1:]
    packet = getattr(torch.ops.aten, {"truediv": "div"}.get(base, base), None)
    overloads = packet.overloads() if packet is not None and hasattr(packet, "overloads") else ()
    if "dim" in overloads:  # max and min: of two tensors, or a reduction
        return False
    return base in _COPIES or any(is_elementwise_op(getattr(packet, overload)) for overload in overloads)


def indexed_dims(index: Any, ndim: int) -> Iterator[tuple[int, Any, int]]:
    """(dim, what is taken of it, the result's dim) of ``x[index]`` with numbers, slices, None and ``...``; nothing for other
    indices."""
    index = index if isinstance(index, tuple) else (index,)
    if not all(item is None or item is ... or isinstance(item, int | slice) for item in index):
        return
    rest = [slice(None)] * (ndim - sum(item is not None and item is not ... for item in index))
    at = index.index(...) if ... in index else len(index)
    before = after = 0
    for item in (*index[:at], *rest, *index[at + 1 :]):
        if item is not None:
            yield before, item, after
        before, after = before + (item is not None), after + (not isinstance(item, int))


# Elementwise functions without an ATen op of their name, and random ones.
_COPIES = frozenset(("dropout", "type_as", "contiguous", "float", "to", "half", "bfloat16", "double", "view_as"))


def keeps_tokens(
    name: str,
    operands: Sequence[torch.Tensor],
    has_tokens: Sequence[bool],
    result: torch.Tensor,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> bool:
    """Whether dim 1 of the result, which has three dims, runs over the tokens in dim 1 of the operands that have them, each
    computed of its own token alone."""
    base, x = name.strip("_"), operands[0]
    shapes = [t.shape for t, has in zip(operands, has_tokens) if has]
    if result.ndim != 3 or any(len(shape) != 3 or shape[1] != result.shape[1] for shape in shapes):
        return False
    if is_elementwise(name):
        return True
    if base == "cat":  # which leaves vectors without elements out: what a key-value cache holds at first
        return all(has or t.shape == (0,) for t, has in zip(operands, has_tokens))
    if not has_tokens[0] or any(has_tokens[1:]):
        return False
    second = args[1] if len(args) > 1 else None
    if base in ("mean", "sum", "softmax", "var"):
        dims = kwargs.get("dim", second)
        dims = (dims,) if isinstance(dims, int) else dims
        along = isinstance(dims, tuple | list) and all(isinstance(dim, int) for dim in dims)
        return along and 1 not in {dim % 3 for dim in dims}
    if base in ("layer_norm", "rms_norm"):
        shape = kwargs.get("normalized_shape", second)
        return isinstance(shape, int) or (shape is not None and len(shape) == 1)
    if base in ("view", "reshape", "flatten"):
        return result.shape[:2] == x.shape[:2]
    return base == "linear" or source_dims(name, x, args[1:], kwargs).get(1) == 1


# ``FlowMode``: calls a follower for each torch function of a model's forward on meta tensors.


class Follower(Protocol):
    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """After a torch function has returned."""


class FlowMode(TorchFunctionMode):
    """Calls the follower, and keeps real values beside meta tensors that are made from constants alone (positions,
    masks).

    Models branch on such values (`if mask.all():`), which meta tensors do not have.
    """

    def __init__(self, walk: Follower) -> None:
        super().__init__()
        self._walk = walk
        self._kernels = contextlib.ExitStack()
        self._values: WeakIdKeyDictionary = WeakIdKeyDictionary()  # meta tensor -> the same on the CPU

    def __enter__(self) -> Self:
        self._kernels.enter_context(taking_more_dtypes())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._kernels.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of an attribute, such as x.T
            name = getattr(func.__self__, "__name__", name)
        known = name not in _RANDOM and all(t in self._values for t in tensors_of((args, kwargs)))
        if name in _ASKS_VALUE and known:
            return func(*self._real(args), **self._real(kwargs))
        if name == "__contains__":  # models look for padding to warn of it
            return False
        result = func(*args, **kwargs)
        results = list(tensors_of(result)) or (list(tensors_of(args))[:1] if name == "__setitem__" else [])
        if results and known and all(t.device.type == "meta" and t.numel() <= _MAX_KNOWN for t in results):
            self._keep(func, args, kwargs, result)
        else:
            for tensor in results:
                self._values.pop(tensor, None)
        self._walk.follow(name, args, kwargs, result)
        return result

    def _keep(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "cpu"}
        elif not any(True for _ in tensors_of((args, kwargs))):
            return  # made on the default device, which may be anything; the model did not ask for it
        real = func(*self._real(args), **self._real(kwargs))
        for meta, value in zip(tensors_of(result), tensors_of(real)):
            if meta.shape == value.shape:
                self._values[meta] = value

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._values[value]
        if isinstance(value, dict):
            return {key: self._real(item) for key, item in value.items()}
        return type(value)(map(self._real, value)) if type(value) in (tuple, list) else value


# Calls that read a tensor's values into Python.
_ASKS_VALUE = {"__bool__", "__int__", "__float__", "__index__", "__contains__", "item", "tolist", "equal", "allclose"}
_RANDOM = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "normal", "bernoulli", "dropout", "empty"}
_MAX_KNOWN = 1 << 20  # elements


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Of nested containers, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)
