"""Where the tensors of a checkpoint are in its files, for every format that the package reads.

vescale's own steps, safetensors files, DCP folders and ``torch.save`` files all store the elements of a tensor
uncompressed in files. So a format needs no reader of its own, only an index: this value. One reader then
fetches the bytes that a rank needs, whatever wrote them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


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
