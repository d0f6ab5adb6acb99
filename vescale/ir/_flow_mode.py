"""``FlowMode``: calls a follower for each torch function of a model's forward on meta tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from vescale.compat.grouped_products import taking_more_dtypes

__all__ = ["FlowMode", "Follower", "tensors_of"]


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
