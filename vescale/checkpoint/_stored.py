"""Where the tensors of a checkpoint are in its files, for every format that the package reads.

vescale's own steps, safetensors files, DCP folders and ``torch.save`` files all store the elements of a tensor
uncompressed in files. So a format needs no reader of its own, only an index: this value. One reader then
fetches the bytes that a rank needs, whatever wrote them.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vescale.errors import ContentMismatchError


@dataclass(frozen=True, slots=True)
class StoredBox:
    """An N-D block of a global tensor whose elements are in one file.

    Attributes:
        offset: global index of the first element, one per dim.
        sizes: one per dim; a tensor without dims is one box of sizes ``()``.
        file: path of the file, relative to the folder of the checkpoint.
        start: position of the box's first element in the file, in bytes.
        strides: in elements; None: row-major without gaps.
    """

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    strides: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint: its global shape and dtype, and the boxes that hold it.

    The boxes are disjoint and cover the tensor; one without elements may have no box.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True)
class Stored:
    """What a checkpoint holds: its tensors by name, and values that are not tensors.

    Attributes:
        folder: ``StoredBox.file`` is relative to it.
        tensors: by global name.
        values: everything else, as plain data (what JSON can hold).
        format: ``"vescale"``, ``"safetensors"``, ``"dcp"`` or ``"torch"``.
        file: if it is one file of a folder.
    """

    folder: Path
    tensors: Mapping[str, StoredTensor]
    format: str
    values: Mapping[str, Any] = field(default_factory=dict)
    file: Path | None = None

    @property
    def path(self) -> Path:
        """What a message calls it."""
        return self.file or self.folder


# Compare what a checkpoint holds with what is to be loaded, and name the differences with the nearest names.


_SHOWN = 8


@dataclass
class Differences:
    """What does not fit, by name.

    Attributes:
        missing: wanted, but not in the checkpoint; with the nearest names that are.
        surplus: in the checkpoint, but nobody wants it; with the nearest names that are wanted.
        misshapen: (found, expected) as text.
    """

    missing: dict[str, list[str]] = field(default_factory=dict)
    surplus: dict[str, list[str]] = field(default_factory=dict)
    misshapen: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.surplus or self.misshapen)

    def describe(self) -> str:
        lines = []
        for what, names in (("not in the checkpoint", self.missing), ("only in the checkpoint", self.surplus)):
            for name in list(names)[:_SHOWN]:
                near = f" (nearest: {', '.join(names[name])})" if names[name] else ""
                lines.append(f"  {name}: {what}{near}")
            if len(names) > _SHOWN:
                lines.append(f"  and {len(names) - _SHOWN} more {what}")
        for name, (found, expected) in list(self.misshapen.items())[:_SHOWN]:
            lines.append(f"  {name}: the checkpoint has {found}, expected {expected}")
        if len(self.misshapen) > _SHOWN:
            lines.append(f"  and {len(self.misshapen) - _SHOWN} more with other shapes or dtypes")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """Names that are missing and surplus, and (found, expected) of the others."""
        return {
            "missing": sorted(self.missing),
            "surplus": sorted(self.surplus),
            "misshapen": dict(sorted(self.misshapen.items())),
        }

    def refuse(self, where: str) -> None:
        if self:
            raise ContentMismatchError(
                f"{where} does not match the model and optimizer:\n{self.describe()}\nBuild the same model and "
                "optimizer as were saved, or pass strict=False to load the rest; the result lists these differences"
            )


def compare(
    stored: Mapping[str, StoredTensor], wanted: Mapping[str, torch.Tensor], *, cast: bool, surplus: Collection[str] = ()
) -> Differences:
    """``surplus``: names of ``stored`` that somebody should want."""
    found = Differences()
    for name, tensor in wanted.items():
        if name not in stored:
            found.missing[name] = []
            continue
        entry = stored[name]
        same_dtype = cast or entry.dtype == tensor.dtype
        if tuple(entry.shape) != tuple(tensor.shape) or not same_dtype:
            found.misshapen[name] = (_form(entry.shape, entry.dtype), _form(tensor.shape, tensor.dtype))
    found.surplus = {name: [] for name in surplus if name not in wanted}
    for names, others in ((found.missing, list(stored)), (found.surplus, list(wanted))):
        for name in list(names)[:_SHOWN]:
            names[name] = nearest(name, others)
    return found


def nearest(name: str, others: Collection[str]) -> list[str]:
    """At most three names that are like ``name``; those that end alike are found among any number of others."""
    last = name.rsplit(".", 1)[-1]
    near = [other for other in others if other.rsplit(".", 1)[-1] == last] or list(others)
    return difflib.get_close_matches(name, near[:2000], n=3, cutoff=0.6)


def _form(shape: Collection[int], dtype: torch.dtype) -> str:
    return f"shape {tuple(shape)} {str(dtype).removeprefix('torch.')}"
