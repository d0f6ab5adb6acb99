"""One file of tensor data: boxes at aligned positions, zeros between them; the standard library only."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from typing import Any

from vescale.checkpoint import _disk
from vescale.checkpoint._checksums import combine

__all__ = ["ALIGNMENT", "align", "box_checksums", "write_data_file"]

ALIGNMENT = 64
_CHUNK = 4 << 20  # stays in the cache between its checksum and its way to the file
_JOINED = 1 << 20


def align(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def write_data_file(path: str, boxes: Iterable[tuple[int, int, Iterable[Any]]]) -> dict[str, Any]:
    """Write boxes and sync the file. Each box is (position, bytes, its data in chunks), positions ascending and aligned.

    Returns ``{"name": ..., "bytes": ..., "crc32": ..., "boxes": [crc32 of each box]}``. Checksums are of what is given to
    the system, chunk by chunk. Raises OSError; the file is then incomplete.
    """
    descriptor = _disk.create(path)
    try:
        position, whole, found = 0, 0, []
        waiting = bytearray()
        for start, nbytes, chunks in boxes:
            padding = bytes(start - position)
            whole = combine(whole, zlib.crc32(padding), len(padding))
            waiting += padding
            checksum, end = 0, start
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                for at in range(0, len(view), _CHUNK):
                    piece = view[at : at + _CHUNK]
                    checksum = zlib.crc32(piece, checksum)
                    if len(piece) < _JOINED:
                        waiting += piece
                    if len(waiting) >= _JOINED or len(piece) >= _JOINED:
                        _disk.write(descriptor, waiting)
                        waiting = bytearray()
                    if len(piece) >= _JOINED:
                        _disk.write(descriptor, piece)
                end += len(view)
            if end - start != nbytes:
                raise ValueError(f"{path}: a box at {start} has {end - start} bytes, expected {nbytes}")
            found.append(checksum)
            whole, position = combine(whole, checksum, nbytes), end
        _disk.write(descriptor, waiting)
        _disk.sync(descriptor)
    finally:
        _disk.close(descriptor)
    return {"name": os.path.basename(path), "bytes": position, "crc32": whole, "boxes": found}


def box_checksums(path: str, boxes: Iterable[tuple[int, int]]) -> tuple[list[int], bool]:
    """(crc32 of each box as it is in the file, whether everything between the boxes is zero). Boxes are (start, bytes) in
    ascending order; one that reaches beyond the end has the checksum of what is there."""
    found, are_gaps_zero, position = [], True, 0
    with open(path, "rb", buffering=0) as file:
        for start, nbytes in boxes:
            if start > position:
                file.seek(position)
                are_gaps_zero &= not any(file.read(start - position))
            file.seek(start)
            checksum, rest = 0, nbytes
            while rest and (piece := file.read(min(rest, _CHUNK))):
                checksum, rest = zlib.crc32(piece, checksum), rest - len(piece)
            found.append(checksum)
            position = max(position, start + nbytes)
        file.seek(position)
        while piece := file.read(_CHUNK):
            are_gaps_zero &= not any(piece)
    return found, are_gaps_zero
