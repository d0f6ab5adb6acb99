"""Plain Python data as JSON and back: numbers, text, containers, dtypes and bytes exactly; tensors are set apart by name."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from vescale.errors import UnknownDtypeError, UnsavableValueError

__all__ = ["TensorName", "decode", "encode"]


class TensorName(str):
    """Stands for a tensor of the checkpoint in decoded values; ``is_sharded``: it was a DTensor."""

    is_sharded: bool = False


_TAGS = (
    "$tuple",
    "$dict",
    "$tensor",
    "$dtensor",
    "$float",
    "$bytes",
    "$complex",
    "$dtype",
    "$device",
    "$set",
    "$numpy",
    "$counter",
)


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """``value`` as JSON; its tensors are added to ``tensors`` by their path, ``path`` and keys joined with dots.

    Raises CheckpointError for objects of other classes, with the path: nothing is pickled.
    """
    if value is None or (isinstance(value, bool | str) and type(value) in (bool, str)):
        return value
    if isinstance(value, torch.Tensor):
        while tensors.get(path, value) is not value:  # keys "a.b" and "a", "b" have one path
            path += "~"
        tensors[path] = value
        return {"$dtensor" if isinstance(value, DTensor) else "$tensor": path}
    if type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if type(value) in (list, tuple, torch.Size):
        found = [encode(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
        return found if type(value) is list else {"$tuple": found}
    if type(value) is Counter:  # of MultiStepLR, which uses its methods
        return {"$counter": [[encode(key, f"{path} (a key)", {}), encode(n, path, {})] for key, n in value.items()]}
    if isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections"):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(item, f"{path}.{key}", tensors) for key, item in value.items()}
        return {
            "$dict": [
                [encode(key, f"{path} (a key)", {}), encode(item, f"{path}.{key}", tensors)]
                for key, item in value.items()
            ]
        }
    if type(value) in (bytes, bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if type(value) is complex:
        return {"$complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if type(value) in (set, frozenset):
        return {"$set": [encode(item, path, {}) for item in sorted(value, key=repr)]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {"$numpy": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, np.generic):
        return encode(value.item(), path, tensors)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise UnsavableValueError(
        f"{path} is a {kind}; a checkpoint holds tensors, numbers, text, lists, tuples and dicts, and never pickles: give "
        "what has state_dict() and load_state_dict(), or convert it first"
    )


def decode(value: Any, tensor: Callable[[TensorName], Any] = lambda name: name) -> Any:
    """The inverse of :func:`encode`; ``tensor`` gives what stands in place of a tensor."""
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or (tag := next(iter(value))) not in _TAGS:
        return {key: decode(item, tensor) for key, item in value.items()}
    held = value[tag]
    if tag in ("$tensor", "$dtensor"):
        name = TensorName(held)
        name.is_sharded = tag == "$dtensor"
        return tensor(name)
    plain: dict[str, Callable[[], Any]] = {
        "$tuple": lambda: tuple(decode(item, tensor) for item in held),
        "$dict": lambda: {decode(key): decode(item, tensor) for key, item in held},
        "$float": lambda: float(held),
        "$bytes": lambda: base64.b64decode(held),
        "$complex": lambda: complex(float(held[0]), float(held[1])),
        "$dtype": lambda: _dtype(held),
        "$device": lambda: torch.device(held),
        "$counter": lambda: Counter({decode(key): decode(count) for key, count in held}),
        "$set": lambda: {decode(item) for item in held},
        "$numpy": lambda: np.frombuffer(base64.b64decode(held[2]), _numpy_dtype(held[0])).reshape(held[1]).copy(),
    }
    return plain[tag]()


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UnknownDtypeError(f"the checkpoint names a dtype {name!r} that this torch does not know")
    return found


def _numpy_dtype(text: str) -> np.dtype[Any]:
    found = np.dtype(text)
    if found.kind not in "biufc":
        raise UnknownDtypeError(f"the checkpoint holds an array of dtype {text!r}; expected numbers")
    return found
