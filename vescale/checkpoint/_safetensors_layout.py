"""Safetensors files before they are written: which tensors each has, its header, and where every byte goes."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vescale.checkpoint._index_map import row_major
from vescale.checkpoint._safetensors import DTYPES, MAX_HEADER
from vescale.compat import bytes_of
from vescale.errors import CheckpointOptionError, HfExportError

__all__ = ["FileLayout", "create_file", "index_of", "parse_size", "plan_files", "write_block"]

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_MAX_COPY = 16 << 20  # bytes that are made contiguous at once


@dataclass(frozen=True)
class FileLayout:
    """One file.

    Attributes:
        name: within its folder.
        header: the file's first bytes, the length of the header included.
        tensors: name -> (dtype, shape, position of the first byte in the file).
        size: of the whole file, in bytes.
    """

    name: str
    header: bytes
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...], int]]
    size: int


def parse_size(size: int | str) -> int:
    """Bytes of ``"5GB"`` (10^9), ``"500MiB"`` (2^20) or a number. Raises ValueError for anything else."""
    if isinstance(size, int) and not isinstance(size, bool):
        found: float = size
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
        if match is None or match[2].upper() not in _UNITS:
            raise CheckpointOptionError(
                f"max_shard_size={size!r}; expected a number of bytes, or text like '5GB' or '500MiB'"
            )
        found = float(match[1]) * _UNITS[match[2].upper()]
    if found < 1:
        raise CheckpointOptionError(f"max_shard_size={size!r}; expected at least one byte")
    return int(found)


def plan_files(
    forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    max_shard_size: int | str,
    base: str = "model",
    metadata: Mapping[str, str] | None = None,
) -> list[FileLayout]:
    """The files of these tensors (shape and dtype by name), in their order, each at most ``max_shard_size`` unless one
    tensor alone is larger. One file is ``base.safetensors``, several are numbered.

    Raises CheckpointError for dtypes that the format does not have.
    """
    limit = parse_size(max_shard_size)
    groups: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = [{}]
    held = 0
    for name, (shape, dtype) in forms.items():
        if dtype not in _CODES:
            raise HfExportError(f"{name} is {dtype}, which safetensors files cannot hold; convert it, or leave it out")
        size = math.prod(shape) * dtype.itemsize
        if groups[-1] and held + size > limit:
            groups.append({})
            held = 0
        groups[-1][name] = (shape, dtype)
        held += size
    count = len(groups)
    names = (
        [f"{base}.safetensors"]
        if count == 1
        else [f"{base}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    )
    return [_layout(name, group, metadata or {"format": "pt"}) for name, group in zip(names, groups)]


def _layout(
    name: str, forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]], metadata: Mapping[str, str]
) -> FileLayout:
    # Wide dtypes first, so that each tensor begins at a multiple of its element's size.
    order = sorted(forms, key=lambda tensor: -forms[tensor][1].itemsize)
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begins, at = {}, 0
    for tensor in order:
        shape, dtype = forms[tensor]
        stop = at + math.prod(shape) * dtype.itemsize
        entries[tensor] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [at, stop]}
        begins[tensor], at = at, stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise HfExportError(f"{name} would have a header of {len(text)} bytes; choose a smaller max_shard_size")
    header = struct.pack("<Q", len(text)) + text
    tensors = {tensor: (forms[tensor][1], forms[tensor][0], len(header) + begins[tensor]) for tensor in order}
    return FileLayout(name, header, tensors, len(header) + at)


def index_of(files: Sequence[FileLayout]) -> str:
    """The text of ``model.safetensors.index.json``."""
    weights = {tensor: file.name for file in files for tensor in file.tensors}
    size = sum(file.size - len(file.header) for file in files)
    parameters = sum(math.prod(shape) for file in files for _, shape, _ in file.tensors.values())
    metadata = {"total_parameters": parameters, "total_size": size}
    return json.dumps({"metadata": metadata, "weight_map": dict(sorted(weights.items()))}, indent=2) + "\n"


def create_file(path: Path, layout: FileLayout) -> None:
    """The file with its header and its final size; elements are zeros until they are written."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        _write(descriptor, memoryview(layout.header), 0)
        os.ftruncate(descriptor, layout.size)
    finally:
        os.close(descriptor)


@torch.no_grad()
def write_block(
    descriptor: int, entry: tuple[torch.dtype, tuple[int, ...], int], offset: Sequence[int], values: torch.Tensor
) -> int:
    """Write a block of a tensor (``entry`` of :class:`FileLayout`) that begins at ``offset``; returns how many bytes.

    ``values`` may be on any device, in any dtype, and have any strides; at most 16 MiB of it are copied at once.
    """
    dtype, shape, start = entry
    written = 0
    for begin, piece in _pieces(tuple(offset), values, dtype.itemsize):
        found: Any = bytes_of(piece.to("cpu", dtype)).numpy()
        data = memoryview(found)
        strides = row_major(shape)
        inner = len(shape)  # dims from here on are one run of bytes
        while inner > 0 and piece.shape[inner:] == shape[inner:]:
            inner -= 1
        length = math.prod(piece.shape[inner:]) * dtype.itemsize
        base = start + sum(at * stride for at, stride in zip(begin, strides)) * dtype.itemsize
        steps = [[i * stride * dtype.itemsize for i in range(n)] for n, stride in zip(piece.shape[:inner], strides)]
        for number, shifts in enumerate(itertools.product(*steps)):
            _write(descriptor, data[number * length : (number + 1) * length], base + sum(shifts))
        written += len(data)
    return written


def _pieces(offset: tuple[int, ...], values: torch.Tensor, itemsize: int) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    if values.numel() == 0:
        return []
    if values.numel() * itemsize <= _MAX_COPY:
        return [(offset, values)]
    dim = next(dim for dim, size in enumerate(values.shape) if size > 1)
    half = values.shape[dim] // 2
    second = (*offset[:dim], offset[dim] + half, *offset[dim + 1 :])
    return [
        *_pieces(offset, values.narrow(dim, 0, half), itemsize),
        *_pieces(second, values.narrow(dim, half, values.shape[dim] - half), itemsize),
    ]


def _write(descriptor: int, data: memoryview, position: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, position)
        data, position = data[count:], position + count
