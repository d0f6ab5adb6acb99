"""The index of safetensors files: a single file, or a folder of them, read without the safetensors package.

The format: eight bytes with the length of a header (little endian, at most 100 MB), the header as JSON, and the elements of
all tensors, one after the other. Everything that the header claims is checked against the size of the file, so that a
truncated or garbled file is an error here and not zeros in a model.
"""

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
from vescale.checkpoint._step_folder import open_regular, read_regular
from vescale.checkpoint._stored import Stored, StoredBox, StoredTensor
from vescale.checkpoint._stored_blocks import cover_fault
from vescale.compat import bytes_of
from vescale.errors import (
    ArgumentError,
    CheckpointError,
    DamagedFileError,
    HfExportError,
    UnknownFormatError,
    kind_of,
)

MAX_HEADER = 100_000_000
"""Bytes; longer headers are refused, as by the safetensors package."""

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_SHARDS = "DCP_SHARDING_INFO"  # where torch.distributed.checkpoint's writer puts the offsets of the blocks in a file
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True)
class Header:
    """What one file holds.

    Attributes:
        tensors: name -> (dtype, shape, position of the first byte in the file).
        metadata: of the writer; names and values are strings.
    """

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...], int]]
    metadata: Mapping[str, str]


def read_header(path: Path) -> Header:
    """The header of one file, checked: tensors cover the file's bytes without holes and overlaps.

    Raises CheckpointError, which says what is wrong with the file.
    """
    try:
        with open(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(8)
            if len(first) < 8:
                raise _damaged(path, f"has {size} bytes, fewer than the 8 that hold the length of the header")
            length = struct.unpack("<Q", first)[0]
            if length > MAX_HEADER:
                raise _damaged(
                    path, f"has a header of {length} bytes, more than the {MAX_HEADER} that the format allows"
                )
            if length > size - 8:
                raise _damaged(path, f"ends inside its header: {size} bytes, header of {length}")
            text = file.read(length)
    except OSError as error:
        raise DamagedFileError(f"{path}: {error.strerror or error}") from error
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"has a header that is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise _damaged(path, f"has a header that is {kind_of(found)}; expected an object")
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, "has a __metadata__ that is not an object of strings")
    spans = {name: _entry(path, name, entry) for name, entry in found.items()}
    _check_cover(path, spans, size - 8 - length)
    tensors = {name: (dtype, shape, 8 + length + begin) for name, (dtype, shape, begin, _) in spans.items()}
    return Header(tensors, metadata)


def _entry(path: Path, name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"describes {name} by {str(entry)[:200]}; expected dtype, shape and data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise DamagedFileError(f"{path}: {name} has the dtype {code!r}; expected one of {', '.join(DTYPES)}")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise _damaged(path, f"describes {name} by shape {str(shape)[:200]} and offsets {str(offsets)[:200]}")
    begin, end = offsets
    needed = math.prod(shape) * dtype.itemsize
    if end - begin != needed:
        raise _damaged(
            path, f"has {end - begin} bytes for {name}: {needed} are needed for {code} of shape {tuple(shape)}"
        )
    return dtype, tuple(shape), begin, end


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _check_cover(path: Path, spans: Mapping[str, tuple[Any, Any, int, int]], size: int) -> None:
    at, before = 0, "the header"
    for name, (_, _, begin, end) in sorted(spans.items(), key=lambda item: item[1][2:]):
        if begin != at:
            kind = "a hole" if begin > at else "an overlap"
            raise _damaged(
                path, f"has {kind} between {before} and {name}: {name} begins at byte {begin} instead of {at}"
            )
        at, before = end, name
    if at != size:
        less = (
            f"{at - size} bytes are missing: the file is truncated"
            if at > size
            else (f"{size - at} extra bytes follow")
        )
        raise _damaged(path, f"should end with {before}, at byte {at} of its data, and {less}")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"two entries named {next(name for name in names if names.count(name) > 1)!r}")
    return found


def _damaged(path: Path, what: str) -> CheckpointError:
    return DamagedFileError(f"{path} is not a valid safetensors file: it {what}; copy or download the file again")


def weight_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """The names of a folder's safetensors files, and the map of its index (tensor -> file) if it has one.

    Raises CheckpointError where an index is no sound JSON, names files outside of the folder or files that are not there,
    and where several files stand beside each other without an index or numbers that are complete.
    """
    indexes = sorted(path.name for path in folder.glob("*.safetensors.index.json"))
    if indexes:
        chosen = "model.safetensors.index.json" if "model.safetensors.index.json" in indexes else indexes[0]
        if chosen == indexes[0] and len(indexes) > 1 and chosen != "model.safetensors.index.json":
            raise UnknownFormatError(f"{folder} has several index files: {', '.join(indexes)}; pass a folder with one")
        weights = _weight_map(folder / chosen)
        return sorted(set(weights.values())), weights
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    for usual in ("model.safetensors", "diffusion_pytorch_model.safetensors"):
        if usual in files:
            return [usual], None
    numbered = [match for name in files if (match := _NUMBERED.fullmatch(name))]
    if len(files) > 1 or numbered:
        sets = {(match[1], int(match[3])) for match in numbered}
        complete = {int(match[2]) for match in numbered} == set(range(1, max([n for _, n in sets], default=0) + 1))
        sharded = all(name.startswith(("shard-", "__")) for name in files)
        if not sharded and (len(sets) != 1 or len(numbered) != len(files) or not complete):
            raise UnknownFormatError(
                f"{folder} has {len(files)} safetensors files and no index: {', '.join(files[:8])}; expected "
                "model.safetensors, model.safetensors.index.json, or all files of one numbered set"
            )
    if not files:
        raise UnknownFormatError(f"{folder} has no safetensors file; expected model.safetensors or an index")
    return files, None


def _weight_map(path: Path) -> dict[str, str]:
    try:
        found = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UnknownFormatError(f"{path} cannot be read as JSON: {error}; copy or download it again") from None
    weights = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(value, str) for value in weights.values()):
        raise UnknownFormatError(f"{path} has no weight_map from tensor names to file names; copy or download it again")
    for name in sorted(set(weights.values())):
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
            raise UnknownFormatError(
                f"{path} refers to the file {name!r} outside of its folder; such an index is refused"
            )
        if not (path.parent / name).is_file():
            raise UnknownFormatError(f"{path} refers to the file {name}, which is not in the folder; download it, too")
    return weights


def is_safetensors(path: Path) -> bool:
    """A file ``*.safetensors``, or a folder with such files."""
    if path.is_dir():
        return any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json"))
    return path.suffix == ".safetensors"


def open_safetensors(path: Path) -> Stored:
    """The index of a file or folder; only headers are read.

    Files that ``torch.distributed.checkpoint`` wrote by rank (with ``save_distributed=True``) are put together.

    Raises CheckpointError for damaged files, and for one name in two files.
    """
    folder = path if path.is_dir() else path.parent
    files, weights = weight_files(path) if path.is_dir() else ([path.name], None)
    boxes: dict[str, list[tuple[torch.dtype, StoredBox]]] = {}
    metadata: dict[str, Any] = {}
    for file in files:
        header = read_header(folder / file)
        offsets = _shard_offsets(folder / file, header)
        metadata |= {key: value for key, value in header.metadata.items() if not key.startswith("DCP_")}
        for name, (dtype, shape, start) in header.tensors.items():
            if weights is not None and weights.get(name, file) != file:
                continue
            offset = offsets.get(name, (0,) * len(shape))
            if name in boxes and name not in offsets:
                raise UnknownFormatError(
                    f"{folder}: {name} is in {boxes[name][0][1].file} and in {file}; expected it once"
                )
            boxes.setdefault(name, []).append((dtype, StoredBox(offset, shape, file, start)))
    gone = [name for name in weights or () if name not in boxes]
    if gone:
        file = (weights or {})[gone[0]]
        raise UnknownFormatError(f"{folder}: the index says that {gone[0]} is in {file}, which does not have it")
    tensors = {name: _joined(folder, name, found) for name, found in boxes.items()}
    return Stored(folder, tensors, "safetensors", {"metadata": metadata} if metadata else {})


def _shard_offsets(path: Path, header: Header) -> dict[str, tuple[int, ...]]:
    """By name, where the file's block of a tensor begins, in files that a rank wrote."""
    if _SHARDS not in header.metadata:
        return {}
    try:
        found = json.loads(header.metadata[_SHARDS])
        offsets = {name: entry["saved_offsets"] for name, entry in found.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _damaged(path, f"has {_SHARDS} that is not a map from names to offsets") from None
    for name, offset in offsets.items():
        if not _counts(offset) or (name in header.tensors and len(offset) != len(header.tensors[name][1])):
            raise _damaged(path, f"places its block of {name} at {str(offset)[:200]}")
    return {name: tuple(offset) for name, offset in offsets.items()}


def _joined(folder: Path, name: str, found: list[tuple[torch.dtype, StoredBox]]) -> StoredTensor:
    dtype, first = found[0]
    if len(found) == 1 and not any(first.offset):
        return StoredTensor(first.sizes, dtype, (first,) if first.numel else ())
    if any(other != dtype or len(box.sizes) != len(first.sizes) for other, box in found):
        raise DamagedFileError(f"{folder}: the blocks of {name} have different dtypes or numbers of dims")
    boxes = tuple({box.offset: box for _, box in found}.values())  # replicas have equal blocks
    shape = tuple(max(box.offset[dim] + box.sizes[dim] for box in boxes) for dim in range(len(first.sizes)))
    wrong = cover_fault(boxes, shape)
    if wrong is not None:
        raise DamagedFileError(f"{folder}: the blocks of {name} of shape {shape} {wrong}; a file may be missing")
    return StoredTensor(shape, dtype, tuple(box for box in boxes if box.numel))


# Safetensors files before they are written: which tensors each has, its header, and where every byte goes.

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
            raise ArgumentError(f"max_shard_size={size!r}; expected a number of bytes, or text like '5GB' or '500MiB'")
        found = float(match[1]) * _UNITS[match[2].upper()]
    if found < 1:
        raise ArgumentError(f"max_shard_size={size!r}; expected at least one byte")
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
