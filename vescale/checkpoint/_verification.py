"""Check every byte of a step against its manifest."""

from __future__ import annotations

import math
import os
import re
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vescale.checkpoint._convert import plain_values
from vescale.checkpoint._data_file import box_checksums
from vescale.checkpoint._dcp import chunk_places, is_dcp
from vescale.checkpoint._one_shot import open_stored
from vescale.checkpoint._step_folder import (
    MANIFEST,
    find_problems,
    open_regular,
    read_manifest,
    step_name,
    step_numbers,
)
from vescale.checkpoint._step_format import encode
from vescale.checkpoint._stored import Stored, StoredBox, StoredTensor
from vescale.checkpoint._stored_blocks import BLOCK_BYTES, block_shapes, block_values, cover_fault
from vescale.checkpoint._torch_save import FilePart, is_torch_save
from vescale.compat import bytes_of
from vescale.errors import CheckpointError, CheckpointWarning, ManifestError, UnknownFormatError


def verify(path: str | os.PathLike[str], progress: Callable[[int], None] = lambda num_bytes: None) -> list[str]:
    """What is wrong with a checkpoint of vescale's own format, one line each; nothing if every byte is as it was written.

    Of a folder of steps, all are checked. Files are read once, in one process; ``progress`` is called with the bytes of
    each file. Raises CheckpointError if there is no such checkpoint.

    Args:
        path: a step, or a folder of steps.
    """
    found = Path(path)
    if not (found / MANIFEST).exists():
        if re.fullmatch(r"step-\d+", found.name) or any(found.glob("data-*.bin")):
            return find_problems(str(found))
        steps = step_numbers(str(found))
        if not steps:
            raise UnknownFormatError(f"{found} has no {MANIFEST} and no steps; expected a step, or a folder of steps")
        return [line for step in steps for line in verify_step(found / step_name(step), progress=progress)]
    return verify_step(found, progress=progress)


def verify_step(
    path: Path, *, part: int = 0, parts: int = 1, progress: Callable[[int], None] = lambda num_bytes: None
) -> list[str]:
    """``part``, ``parts``: every so-manieth file only, so that ranks can divide them."""
    problems = find_problems(str(path))
    if problems:
        return problems
    try:
        manifest = read_manifest(str(path))
    except ManifestError as error:
        return [str(error)]
    listed = {file["name"] for file in manifest["files"]} | {MANIFEST}
    problems += [f"{path / name} is not listed in the manifest" for name in sorted(set(os.listdir(path)) - listed)]
    if faults := _faults_of_index(manifest):  # by a program: a damaged manifest has another checksum
        return problems + [f"{path / MANIFEST}: {fault}" for fault in faults]
    boxes: dict[int, list[tuple[int, int, str, str]]] = defaultdict(list)
    for name, entry in manifest["tensors"].items():
        for _, sizes, file, start, checksum in entry["boxes"]:
            nbytes = math.prod(sizes) * _itemsize(entry["dtype"])
            boxes[file].append((start, nbytes, checksum, name))
    for number, file in enumerate(manifest["files"]):
        for name, sizes, start, checksum in file.get("copies", ()):
            nbytes = math.prod(sizes) * _itemsize(manifest["tensors"][name]["dtype"])
            boxes[number].append((start, nbytes, checksum, f"another copy of {name}"))
        if number % parts == part:
            problems += _check_file(path / file["name"], sorted(boxes[number]))
            progress(file["bytes"])
    return problems


def _faults_of_index(manifest: Mapping[str, Any]) -> list[str]:
    """Tensors whose boxes overlap, leave elements out, or are not inside of their files."""
    found = []
    sizes = [file["bytes"] for file in manifest["files"]]

    def is_inside(file: int, start: int, nbytes: int) -> bool:
        return 0 <= file < len(sizes) and 0 <= start <= start + nbytes <= sizes[file]

    for name, entry in manifest["tensors"].items():
        itemsize = _itemsize(entry["dtype"])
        boxes = [StoredBox(tuple(offset), tuple(block), "", 0) for offset, block, *_ in entry["boxes"]]
        fault = cover_fault(boxes, entry["shape"])
        if fault is not None:
            found.append(f"the boxes of {name}, of shape {entry['shape']}, {fault}")
        for box, (_, _, file, start, _) in zip(boxes, entry["boxes"]):
            if not is_inside(file, start, box.numel * itemsize):
                found.append(f"a box of {name} is listed at byte {start} of file {file}, which has no such bytes")
    for number, file in enumerate(manifest["files"]):
        for name, block, start, _ in file.get("copies", ()):
            entry = manifest["tensors"].get(name)
            if entry is None or not is_inside(number, start, math.prod(block) * _itemsize(entry["dtype"])):
                found.append(f"{file['name']} is listed with a copy of {name} at byte {start}, but has none")
    return found


def _check_file(path: Path, boxes: list[tuple[int, int, str, str]]) -> list[str]:
    try:
        found, are_gaps_zero = box_checksums(str(path), [(start, nbytes) for start, nbytes, _, _ in boxes])
    except OSError as error:
        return [f"{path}: {error}"]
    problems = [
        f"{path}: bytes {start} to {start + nbytes}, of {name}, differ from what was written (crc32 {checksum:08x}, "
        f"expected {expected})"
        for checksum, (start, nbytes, expected, name) in zip(found, boxes)
        if f"{checksum:08x}" != expected
    ]
    return problems if are_gaps_zero else [*problems, f"{path}: bytes between tensors are not zero"]


def _itemsize(name: str) -> int:
    found: Any = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UnknownFormatError(f"the manifest names a dtype {name!r} that this version of torch does not have")
    return found.itemsize


# Check checkpoints of other formats as far as these allow: structure and sizes, and the checksums that zips have.


def verify_any(path: Path, progress: Callable[[int], None] = lambda count: None) -> list[str]:
    """What is wrong with a checkpoint of any format, one line each.

    ============ =====================================================================
    vescale      every byte, against the manifest's checksums
    torch, dcp   structure, sizes, and the CRC-32 that the zip of each record has
    safetensors  structure and sizes: the format has no checksums
    ============ =====================================================================

    Raises CheckpointError if there is no checkpoint.
    """
    stored = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)  # steps that are not complete are among the problems
            stored = open_stored(path)
    except UnknownFormatError:
        raise
    except CheckpointError as error:
        return [str(error)]
    if stored.format == "vescale":
        return verify(path, progress)
    if is_dcp(path):
        return _records(path, chunk_places(path), progress)
    if is_torch_save(path):
        return _records(path.parent, [("", path.name, 0, path.stat().st_size)], progress)
    for name in {box.file for tensor in stored.tensors.values() for box in tensor.boxes}:
        progress((stored.folder / name).stat().st_size)
    return []


def _records(folder: Path, places: list[tuple[str, str, int, int]], progress: Callable[[int], None]) -> list[str]:
    problems = []
    for name, file, start, length in sorted(places, key=lambda place: place[1:3]):
        with open(open_regular(folder / file), "rb") as stream:
            if os.pread(stream.fileno(), 4, start) != b"PK\x03\x04":
                continue  # a file in the format of safetensors, which has no checksums
            about = f"{folder / file}" + (f": the record of {name} at byte {start}" if name else "")
            try:
                bad = zipfile.ZipFile(FilePart(stream, start, length)).testzip()
                if bad is not None:
                    problems.append(f"{about}: {bad} has changed since it was written: its checksum differs")
            except Exception as error:  # zipfile raises many kinds for garbled files
                problems.append(f"{about}: {error}")
        progress(length)
    return problems


# What two checkpoints have different: names, shapes, dtypes and values, in whatever formats; and what is beside
# tensors.


@dataclass(frozen=True)
class ValueDifference:
    """Two tensors of equal shape and dtype.

    Attributes:
        elements: how many differ in any bit (NaNs of equal bits are equal).
        largest: absolute difference; None for not-a-number.
        first: index of the first that differs.
    """

    elements: int
    largest: float | None
    first: tuple[int, ...]


@dataclass
class StoredDifference:
    """By name. ``forms``: (shape and dtype in A, in B). ``plain_values``: beside tensors; compared within one format only,
    because formats hold them differently. The number of a step is not counted."""

    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    forms: dict[str, tuple[str, str]] = field(default_factory=dict)
    values: dict[str, ValueDifference] = field(default_factory=dict)
    plain_values: list[str] = field(default_factory=list)
    equal: int = 0

    def __bool__(self) -> bool:
        return bool(self.only_in_a or self.only_in_b or self.forms or self.values or self.plain_values)


def compare_stored(
    a: Stored, b: Stored, *, values: bool = True, progress: Callable[[int], None] = lambda count: None
) -> StoredDifference:
    """Compare in one process; memory: 128 MiB and the indexes.

    Where one of the two is in vescale's own format and the other is not, the prefix ``model.`` is not counted.
    """
    ours, theirs = _names(a, b), _names(b, a)
    found = StoredDifference(sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys()))
    for name in sorted(ours.keys() & theirs.keys()):
        left, right = a.tensors[ours[name]], b.tensors[theirs[name]]
        if (left.shape, left.dtype) != (right.shape, right.dtype):
            found.forms[name] = (_form(left), _form(right))
            continue
        difference = _compare(a, ours[name], b, theirs[name], progress) if values else None
        if difference is None:
            found.equal += 1
        else:
            found.values[name] = difference
    if values and a.format == b.format:
        one, two = _encoded_values(a), _encoded_values(b)
        found.plain_values = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    return found


def _encoded_values(stored: Stored) -> dict[str, Any]:
    """As JSON, in which not-a-number equals itself."""
    left_out = {"vescale": "step", "safetensors": "metadata"}.get(stored.format)
    return {name: encode(value, name, {}) for name, value in plain_values(stored).items() if name != left_out}


def _names(stored: Stored, other: Stored) -> Mapping[str, str]:
    if (stored.format == "vescale") == (other.format == "vescale"):
        return {name: name for name in stored.tensors}
    return {name.removeprefix("model."): name for name in stored.tensors}


def _form(tensor: StoredTensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _compare(a: Stored, name_a: str, b: Stored, name_b: str, progress: Callable[[int], None]) -> ValueDifference | None:
    tensor = a.tensors[name_a]
    elements, largest, first = 0, 0.0, None
    for offset, sizes in block_shapes(tensor.shape, BLOCK_BYTES // tensor.dtype.itemsize):
        one, two = block_values(a, name_a, offset, sizes), block_values(b, name_b, offset, sizes)
        progress(one.nbytes)
        bits = [bytes_of(values).view(-1, values.element_size()) for values in (one, two)]
        if torch.equal(*bits):
            continue
        differs = (bits[0] != bits[1]).any(1)
        elements += int(differs.sum())
        if first is None:
            first = _index(int(differs.nonzero()[0]), offset, sizes)
        wide = torch.complex128 if one.is_complex() else torch.float64
        gap = (one.reshape(-1)[differs].to(wide) - two.reshape(-1)[differs].to(wide)).abs().max().item()
        largest = max(largest, gap) if not math.isnan(gap) else math.nan
    if first is None:
        return None
    return ValueDifference(elements, None if math.isnan(largest) else largest, first)


def _index(flat: int, offset: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for at, size in zip(reversed(offset), reversed(sizes)):
        flat, index = divmod(flat, size)
        found.append(at + index)
    return tuple(reversed(found))
