"""One file of tensor data: boxes at aligned positions, zeros between them; the standard library only."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vescale.checkpoint import _disk
from vescale.checkpoint._step_folder import open_regular

# CRC-32 (that of zlib and gzip) of parts that follow each other; the standard library only.

_POLYNOMIAL = 0xEDB88320


def combine(first: int, second: int, second_bytes: int) -> int:
    """The checksum of two runs of bytes, one behind the other, from their own."""
    if second_bytes == 0:
        return first
    return _multiply(_shift(second_bytes), first) ^ second


def _multiply(a: int, b: int) -> int:
    """a * b modulo the polynomial; the highest bit is the coefficient of x ** 0."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return product


@functools.lru_cache(maxsize=4096)
def _shift(num_bytes: int) -> int:
    """x ** (8 * num_bytes) modulo the polynomial."""
    result, power, rest = 1 << 31, 1 << 23, num_bytes  # 1 and x ** 8
    while rest:
        if rest & 1:
            result = _multiply(power, result)
        power = _multiply(power, power)
        rest >>= 1
    return result


ALIGNMENT = 64
_CHUNK = 4 << 20  # stays in the cache between its checksum and its way to the file
_JOINED = 1 << 20


def align(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def write_data_file(path: str, boxes: Iterable[tuple[int, int, Iterable[Any]]], nbytes: int = 0) -> dict[str, Any]:
    """Write boxes and sync the file. Each box is (position, bytes, its data in chunks), positions ascending and aligned.
    ``nbytes``: of the whole file, where that is known; space for it is taken first.

    Returns ``{"name": ..., "bytes": ..., "crc32": ..., "boxes": [crc32 of each box]}``. Checksums are of what is given to
    the system, chunk by chunk. Raises OSError; the file is then incomplete.
    """
    descriptor = _disk.create(path)
    try:
        _disk.reserve(descriptor, nbytes)
        position, whole, found = 0, 0, []
        with _Stream(descriptor) as file:
            for start, box_bytes, chunks in boxes:
                padding = bytes(start - position)
                whole = combine(whole, zlib.crc32(padding), len(padding))
                file.write(padding)
                checksum, end = 0, start
                for chunk in chunks:
                    view = memoryview(chunk).cast("B")
                    for at in range(0, len(view), _CHUNK):
                        piece = view[at : at + _CHUNK]
                        file.write(piece)
                        checksum = zlib.crc32(piece, checksum)
                    end += len(view)
                if end - start != box_bytes:
                    raise ValueError(f"{path}: the box at {start} has {end - start} bytes, expected {box_bytes}")
                found.append(checksum)
                whole, position = combine(whole, checksum, box_bytes), end
        _disk.sync(descriptor)
    finally:
        _disk.close(descriptor)
    return {"name": os.path.basename(path), "bytes": position, "crc32": whole, "boxes": found}


class _Stream:
    """Bytes on their way to a file: small pieces together, large ones on a thread while the caller computes checksums, and
    the disk begins with them before all are there. At most two large pieces are held."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting = bytearray()
        self._written = self._started = 0
        self._thread = ThreadPoolExecutor(1, "writing a checkpoint")
        self._under_way: Future[None] | None = None

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
                self._settle()
        finally:
            self._thread.shutdown()

    def write(self, piece: Any) -> None:
        """``piece`` must not change before the end."""
        if len(piece) < _JOINED:
            self._waiting += piece
            if len(self._waiting) >= _JOINED:
                self._flush()
            return
        self._flush()
        self._settle()
        self._under_way = self._thread.submit(self._pass_on, piece)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, bytearray()
        if waiting:
            self._settle()
            self._pass_on(waiting)

    def _settle(self) -> None:
        found, self._under_way = self._under_way, None
        if found is not None:
            found.result()

    def _pass_on(self, piece: Any) -> None:
        _disk.write(self._descriptor, piece)
        self._written += len(piece)
        if self._written - self._started >= _CHUNK:
            _disk.start_sync(self._descriptor, self._started, self._written - self._started)
            self._started = self._written


def box_checksums(path: str, boxes: Iterable[tuple[int, int]]) -> tuple[list[int], bool]:
    """(crc32 of each box as it is in the file, whether everything between the boxes is zero). Boxes are (start, bytes) in
    ascending order; one that reaches beyond the end has the checksum of what is there."""
    found, are_gaps_zero, position = [], True, 0
    with open(open_regular(path), "rb", buffering=0) as file:
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
