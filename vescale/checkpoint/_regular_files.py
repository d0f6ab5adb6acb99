"""Files are opened for reading only if they are regular ones; the standard library only.

Opening a named pipe blocks until another process opens it for writing, and a device may have no end.
"""

from __future__ import annotations

import errno
import os
import stat

__all__ = ["open_regular", "read_regular"]


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor. Raises OSError, which says what is there instead of a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "named pipe", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
        kind = kinds.get(stat.S_IFMT(mode), "special file")
        raise OSError(errno.EINVAL, f"it is a {kind}, expected a regular file")
    return descriptor


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """The whole file. Raises OSError as :func:`open_regular` does."""
    with open(open_regular(path), "rb") as file:
        return file.read()
