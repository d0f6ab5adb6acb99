"""What changes files and folders, one function for each kind of change; the standard library only.

Everything that a save does to the disk goes through here, so that tests can end the process between any two changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import sys
from typing import Any

_CHUNK = 16 << 20


def make_folder(path: str) -> None:
    os.makedirs(path, exist_ok=True)


def create(path: str) -> int:
    """A new file for writing; FileExistsError if there is one."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def reserve(descriptor: int, nbytes: int) -> None:
    """Take space for a file's first ``nbytes`` at once, where the file system can, so that it is in one place. Where it
    cannot, or the disk is full, nothing is lost: :func:`write` finds out."""
    take = _function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if take is not None and nbytes:
        take(descriptor, 0, 0, nbytes)


def write(descriptor: int, data: Any) -> None:
    rest = memoryview(data)
    while len(rest):
        rest = rest[os.write(descriptor, rest[:_CHUNK]) :]


def start_sync(descriptor: int, start: int, nbytes: int) -> None:
    """Let the disk begin with these bytes, and do not wait; :func:`sync` then has less to wait for."""
    begin = _function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    if begin is not None:
        begin(descriptor, start, nbytes, 2)  # SYNC_FILE_RANGE_WRITE; errors are those of sync()


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def close(descriptor: int) -> None:
    os.close(descriptor)


def sync_folder(path: str) -> None:
    """Names in a folder are on the disk only after this."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: str, target: str) -> None:
    os.rename(source, target)


def exchange(first: str, second: str) -> bool:
    """Swap two names at once, where the system can: Linux, on most file systems."""
    swap = _function("renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if swap is None:
        return False
    here, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    done: int = swap(here, os.fsencode(first), here, os.fsencode(second), both)
    return done == 0


def remove_tree(path: str) -> None:
    """Remove a folder that readers do not look at, or a file. What is left after an error is found by the next save."""
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


@functools.cache
def _function(name: str, *arguments: Any) -> Any:
    """A function of the system's C library that Python does not have; None where there is none."""
    found = getattr(ctypes.CDLL(None, use_errno=True), name, None) if sys.platform == "linux" else None
    if found is not None:
        found.argtypes = arguments
    return found
