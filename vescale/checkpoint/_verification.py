"""Check every byte of a step against its manifest."""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from vescale.checkpoint._box_cover import cover_fault
from vescale.checkpoint._data_file import box_checksums
from vescale.checkpoint._manifest_text import ManifestError
from vescale.checkpoint._step_folder import MANIFEST, find_problems, read_manifest, step_name, step_numbers
from vescale.checkpoint._stored import StoredBox
from vescale.errors import UnknownDtypeError, UnknownFormatError

__all__ = ["verify", "verify_step"]


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
                found.append(f"{file['name']} is listed with a copy of {name} at byte {start}, and has none")
    return found


def _check_file(path: Path, boxes: list[tuple[int, int, str, str]]) -> list[str]:
    try:
        found, are_gaps_zero = box_checksums(str(path), [(start, nbytes) for start, nbytes, _, _ in boxes])
    except OSError as error:
        return [f"{path}: {error}"]
    problems = [
        f"{path}: bytes {start} to {start + nbytes}, of {name}, are not those that were written (crc32 {checksum:08x}, "
        f"expected {expected})"
        for checksum, (start, nbytes, expected, name) in zip(found, boxes)
        if f"{checksum:08x}" != expected
    ]
    return problems if are_gaps_zero else [*problems, f"{path}: bytes between tensors are not zero"]


def _itemsize(name: str) -> int:
    found: Any = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UnknownDtypeError(f"the manifest names a dtype {name!r} that this torch does not know")
    return found.itemsize
