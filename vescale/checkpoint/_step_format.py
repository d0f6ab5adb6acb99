"""The format of vescale's own checkpoints, as an index: a step, or the folder of steps."""

from __future__ import annotations

import base64
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from vescale.checkpoint._step_folder import (
    MANIFEST,
    complete_steps,
    find_problems,
    read_manifest,
    step_name,
    step_numbers,
)
from vescale.checkpoint._stored import Stored, StoredBox, StoredTensor
from vescale.errors import (
    CheckpointWarning,
    DamagedFileError,
    ManifestError,
    NoSuchStepError,
    UnknownFormatError,
    UnsavableError,
)


def is_step(path: Path) -> bool:
    """Also one that has lost its manifest."""
    return (path / MANIFEST).is_file() or (path.name.startswith("step-") and any(path.glob("data-*.bin")))


def is_step_folder(path: Path) -> bool:
    return bool(step_numbers(str(path)))


def open_newest_step(path: Path) -> Stored:
    """Of a folder of steps. Newer ones that are not complete are passed by with a warning. Raises CheckpointError if none is
    complete, with the reasons."""
    problems: dict[int, list[str]] = {}
    steps = complete_steps(str(path), problems.__setitem__)
    if not steps:
        found = "; ".join(text for texts in problems.values() for text in texts)
        raise NoSuchStepError(f"{path} has no complete step: {found}")
    for step, texts in sorted(problems.items()):
        if step > steps[-1]:
            text = f"step {step} is skipped, because it is not complete: {'; '.join(texts[:5])}"
            warnings.warn(text, CheckpointWarning, stacklevel=3)
    return open_step(path / step_name(steps[-1]))


def open_step(path: Path, *, check_sizes: bool = True) -> Stored:
    """``values`` is the manifest without its index of files and tensors. Raises CheckpointError for damaged ones, and files
    of other sizes."""
    if check_sizes and (problems := find_problems(str(path))):
        raise DamagedFileError(f"{path} is not complete: {'; '.join(problems)}")
    try:
        manifest = read_manifest(str(path))
    except ManifestError as error:
        raise DamagedFileError(str(error)) from error
    files = [file["name"] for file in manifest["files"]]
    for name in files:
        if os.path.basename(name) != name:
            raise DamagedFileError(f"{path}: the manifest refers to a file {name!r} outside of the step")
    values = {key: value for key, value in manifest.items() if key not in ("files", "tensors")}
    return Stored(path, _Tensors(manifest["tensors"], files, values["values"]), "vescale", values)


class _Tensors(Mapping[str, StoredTensor]):
    """Entries become values when they are asked for: there may be a million boxes. Tied tensors have all of their names."""

    def __init__(self, entries: Mapping[str, Any], files: list[str], values: Mapping[str, Any]) -> None:
        self._entries, self._files = entries, files
        aliases = (values["model"] or {"aliases": {}})["aliases"]
        self._names = {name: name for name in entries}
        self._names |= {
            f"model.{alias}": f"model.{name}" for alias, name in aliases.items() if f"model.{name}" in entries
        }
        self._made: dict[str, StoredTensor] = {}

    def __getitem__(self, name: str) -> StoredTensor:
        own = self._names[name]
        if own not in self._made:
            entry = self._entries[own]
            if any(not 0 <= file < len(self._files) for _, _, file, *_ in entry["boxes"]):
                raise DamagedFileError(f"{name}: the manifest assigns it to a file that it does not list")
            boxes = tuple(
                StoredBox(tuple(offset), tuple(sizes), self._files[file], start)
                for offset, sizes, file, start, _ in entry["boxes"]
            )
            dtype = getattr(torch, entry["dtype"], None)
            if not isinstance(dtype, torch.dtype):
                raise UnknownFormatError(
                    f"{name} has dtype {entry['dtype']!r}, which this version of torch does not have"
                )
            self._made[own] = StoredTensor(tuple(entry["shape"]), dtype, boxes)
        return self._made[own]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


# Plain Python data as JSON and back: numbers, text, containers, dtypes and bytes exactly; tensors are set apart by
# name.


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
    raise UnsavableError(
        f"{path} is a {kind}; a checkpoint holds tensors, numbers, text, lists, tuples and dicts, and never pickles: "
        "pass an object with state_dict() and load_state_dict(), or convert it first"
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
        raise UnknownFormatError(f"the checkpoint names a dtype {name!r} that this version of torch does not have")
    return found


def _numpy_dtype(text: str) -> np.dtype[Any]:
    found = np.dtype(text)
    if found.kind not in "biufc":
        raise UnknownFormatError(f"the checkpoint holds an array of dtype {text!r}; expected numbers")
    return found
