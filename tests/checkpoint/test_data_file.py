"""A file of boxes, small and large ones in turn: bytes, checksums, what the disk is told, errors of the writing thread."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from vescale.checkpoint import _disk
from vescale.checkpoint import _reader as reader
from vescale.checkpoint._data_file import align, box_checksums, write_data_file

# From a few bytes to more than the pieces that are handed to the thread; chunks of one box likewise.
CHUNKS = ((3,), (5 << 20,), (100, 1 << 20, 7), (1 << 20,), (), (9 << 20, 64), (1,))


def boxes_of(data: bytes) -> list[tuple[int, int, list[bytes]]]:
    found, position = [], 0
    for sizes in CHUNKS:
        start, at, chunks = align(position), align(position), []
        for size in sizes:
            chunks.append(data[at : at + size])
            at += size
        found.append((start, at - start, chunks))
        position = at
    return found


@pytest.mark.parametrize("has_functions", [True, False])
def test_bytes_and_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_functions: bool) -> None:
    """The file is what the boxes say, whether the system has the functions that Python does not have, or not."""
    boxes = boxes_of(os.urandom(1 << 20) * 17)
    started: list[tuple[int, int]] = []
    begin = _disk.start_sync

    def start_sync(descriptor: int, start: int, nbytes: int) -> None:
        started.append((start, nbytes))
        begin(descriptor, start, nbytes)

    monkeypatch.setattr(_disk, "start_sync", start_sync)
    if not has_functions:
        monkeypatch.setattr(_disk, "_function", lambda *_: None)
    path, size = tmp_path / "file", boxes[-1][0] + boxes[-1][1]
    written = write_data_file(str(path), boxes, size)
    expected = bytearray(size)
    for start, nbytes, chunks in boxes:
        expected[start : start + nbytes] = b"".join(chunks)
    found = path.read_bytes()
    assert found == expected and written["bytes"] == size and written["crc32"] == zlib.crc32(found)
    checksums, are_gaps_zero = box_checksums(str(path), [(start, nbytes) for start, nbytes, _ in boxes])
    assert checksums == written["boxes"] and are_gaps_zero
    ends = [0, *(start + nbytes for start, nbytes in started)]
    assert len(started) > 2 and [start for start, _ in started] == ends[:-1]  # each byte once, in order


def test_a_write_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the thread as well: the error reaches the caller, and the file is closed."""
    written: list[int] = []

    def write(descriptor: int, data: Any) -> None:
        written.append(descriptor)
        if len(written) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(_disk, "write", write)
    with pytest.raises(OSError, match="No space left"):
        write_data_file(str(tmp_path / "file"), boxes_of(bytes(17 << 20)))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(written[0])


@pytest.mark.parametrize(
    ("processors", "ranks", "expected"), [(64, "8", 4), (8, "4", 2), (2, "4", 1), (64, "", 4), (3, "x", 3), (1, "", 2)]
)
def test_reading_threads(monkeypatch: pytest.MonkeyPatch, processors: int, ranks: str, expected: int) -> None:
    """A rank's share of the processors; two at least for the only rank of a host."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    assert reader._num_threads() == expected
