"""The index of safetensors files: a single file, or a folder of them, read without the safetensors package.

The format: eight bytes with the length of a header (little endian, at most 100 MB), the header as JSON, and the elements of
all tensors, one after the other. Everything that the header claims is checked against the size of the file, so that a
truncated or garbled file is an error here and not zeros in a model.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vescale.checkpoint._box_cover import cover_fault
from vescale.checkpoint._regular_files import open_regular, read_regular
from vescale.checkpoint._stored import Stored, StoredBox, StoredTensor
from vescale.errors import CheckpointError, DamagedFileError, SafetensorsFolderError, kind_of

__all__ = ["DTYPES", "MAX_HEADER", "Header", "is_safetensors", "open_safetensors", "read_header", "weight_files"]

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
                raise _damaged(path, f"has {size} bytes, fewer than the 8 with the length of the header")
            length = struct.unpack("<Q", first)[0]
            if length > MAX_HEADER:
                raise _damaged(
                    path, f"has a header of {length} bytes, more than the {MAX_HEADER} that the format allows"
                )
            if length > size - 8:
                raise _damaged(path, f"ends inside of its header: {size} bytes, header of {length}")
            text = file.read(length)
    except OSError as error:
        raise DamagedFileError(f"{path}: {error.strerror or error}") from error
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"has a header that is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise _damaged(path, f"has a header that is {kind_of(found)}; expected an object")
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, "has a __metadata__ that is no object of strings")
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
        less = f"{at - size} bytes are missing: the file is truncated" if at > size else f"{size - at} more follow"
        raise _damaged(path, f"should end with {before}, at byte {at} of its data, and {less}")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"two entries named {next(name for name in names if names.count(name) > 1)!r}")
    return found


def _damaged(path: Path, what: str) -> CheckpointError:
    return DamagedFileError(f"{path} is no sound safetensors file: it {what}; copy or download the file again")


def weight_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """The names of a folder's safetensors files, and the map of its index (tensor -> file) if it has one.

    Raises CheckpointError where an index is no sound JSON, names files outside of the folder or files that are not there,
    and where several files stand beside each other without an index or numbers that are complete.
    """
    indexes = sorted(path.name for path in folder.glob("*.safetensors.index.json"))
    if indexes:
        chosen = "model.safetensors.index.json" if "model.safetensors.index.json" in indexes else indexes[0]
        if chosen == indexes[0] and len(indexes) > 1 and chosen != "model.safetensors.index.json":
            raise SafetensorsFolderError(f"{folder} has several indexes: {', '.join(indexes)}; give a folder with one")
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
            raise SafetensorsFolderError(
                f"{folder} has {len(files)} safetensors files and no index: {', '.join(files[:8])}; expected "
                "model.safetensors, model.safetensors.index.json, or all files of one numbered set"
            )
    if not files:
        raise SafetensorsFolderError(f"{folder} has no safetensors file; expected model.safetensors or an index")
    return files, None


def _weight_map(path: Path) -> dict[str, str]:
    try:
        found = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise SafetensorsFolderError(f"{path} cannot be read as JSON: {error}; copy or download it again") from None
    weights = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(value, str) for value in weights.values()):
        raise SafetensorsFolderError(
            f"{path} has no weight_map from tensor names to file names; copy or download it again"
        )
    for name in sorted(set(weights.values())):
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
            raise SafetensorsFolderError(
                f"{path} names the file {name!r} outside of its folder; such an index is refused"
            )
        if not (path.parent / name).is_file():
            raise SafetensorsFolderError(f"{path} names the file {name}, which is not in the folder; download it, too")
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
                raise SafetensorsFolderError(
                    f"{folder}: {name} is in {boxes[name][0][1].file} and in {file}; expected it once"
                )
            boxes.setdefault(name, []).append((dtype, StoredBox(offset, shape, file, start)))
    gone = [name for name in weights or () if name not in boxes]
    if gone:
        file = (weights or {})[gone[0]]
        raise SafetensorsFolderError(f"{folder}: the index says that {gone[0]} is in {file}, which does not have it")
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
        raise _damaged(path, f"has {_SHARDS} that is no map from names to offsets") from None
    for name, offset in offsets.items():
        if not _counts(offset) or (name in header.tensors and len(offset) != len(header.tensors[name][1])):
            raise _damaged(path, f"puts its block of {name} at {str(offset)[:200]}")
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
