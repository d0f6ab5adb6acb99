"""Check checkpoints of other formats as far as these allow: structure and sizes, and the checksums that zips have."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

from vescale.checkpoint._dcp import chunk_places, is_dcp
from vescale.checkpoint._open import open_stored
from vescale.checkpoint._regular_files import open_regular
from vescale.checkpoint._torch_save import FilePart, is_torch_save
from vescale.checkpoint._verification import verify
from vescale.errors import CheckpointError, CheckpointWarning

__all__ = ["verify_any"]


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
    except CheckpointError as error:
        if not path.exists() or "no checkpoint in a known format" in str(error):
            raise
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
                    problems.append(f"{about}: {bad} is not as it was written: its checksum differs")
            except Exception as error:  # zipfile raises many kinds for garbled files
                problems.append(f"{about}: {error}")
        progress(length)
    return problems
