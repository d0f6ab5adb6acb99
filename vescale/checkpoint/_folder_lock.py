"""One job saves to a folder at a time: a lock that ends with the process that holds it, however it ends."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading

from vescale.compat import note
from vescale.errors import FolderInUseError

try:
    import fcntl
except ImportError:  # Windows: no lock
    fcntl = None  # type: ignore[assignment]

__all__ = ["FolderLock"]

_NAME = ".lock"
_UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)

# Of this process, by path: descriptor and number of holders, who know of each other.
_HELD: dict[str, tuple[int, int]] = {}
_HELD_LOCK = threading.Lock()


class FolderLock:
    """Held until :meth:`release`. ``is_certain``: False on file systems without locks, where nobody knows who else saves.

    Raises CheckpointError if another process holds it, naming host and process.
    """

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(os.path.realpath(folder), _NAME)
        with _HELD_LOCK:
            descriptor, count = _HELD.get(self._path, (-1, 0))
            if count == 0:
                descriptor = self._open()
            _HELD[self._path] = descriptor, count + 1
        self.is_certain = descriptor >= 0
        self._is_released = False

    def _open(self) -> int:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if fcntl is None:
                raise OSError(errno.ENOSYS, "no locks")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 4096, 0).decode(errors="replace")
            os.close(descriptor)
            raise FolderInUseError(
                f"another job saves to {os.path.dirname(self._path)}: {holder or 'its name is not known'}; give each job a "
                "folder of its own, or end that one"
            ) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno in _UNSUPPORTED:
                return -1
            raise
        with contextlib.suppress(OSError):  # a full disk: the name is for messages only
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"host": socket.gethostname(), "process": os.getpid()}).encode(), 0)
        return descriptor

    def release(self) -> None:
        if self._is_released:
            return
        self._is_released = True
        with _HELD_LOCK:
            descriptor, count = _HELD.pop(self._path, (-1, 0))  # none in a forked process
            if count > 1:
                _HELD[self._path] = descriptor, count - 1
            elif descriptor >= 0:
                os.close(descriptor)


def _leave_to_parent() -> None:
    """In a forked process, which may outlive the job (workers of a DataLoader): the lock is not to be held by it, too."""
    global _HELD_LOCK
    _HELD_LOCK = threading.Lock()  # another thread may have held it
    for descriptor, _ in _HELD.values():
        if descriptor >= 0:
            os.close(descriptor)
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    note("checkpoint._folder_lock:process", "os.register_at_fork")
    os.register_at_fork(after_in_child=_leave_to_parent)
