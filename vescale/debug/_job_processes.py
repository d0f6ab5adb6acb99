"""The processes of a job: whether one is running, stopped or gone, and how to end it."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies a process even though process numbers are reused, and differ between containers.

    Attributes:
        pid: its number.
        started: its start time, in the kernel's ticks.
        machine: the host name, boot and namespace in which ``pid`` is valid.
    """

    pid: int
    started: str
    machine: str

    @classmethod
    def own(cls) -> ProcessIdentity:
        return cls(os.getpid(), _stat(os.getpid())[1], _machine())

    @property
    def is_here(self) -> bool:
        """Whether this process could see it, if it exists."""
        return self.machine == _machine()

    @property
    def host(self) -> str:
        return self.machine.partition(" ")[0]

    def state(self) -> str:
        """``running``, ``stopped`` (by a signal or a debugger), ``ended``; ``unknown`` for a process on another host."""
        if not self.is_here:
            return "unknown"
        letter, started = _stat(self.pid)
        if not letter or started != self.started or letter in "ZX":
            return "ended"
        return "stopped" if letter in "Tt" else "running"

    def kill(self) -> bool:
        """End it at once, if it is on this host and has not ended."""
        if self.state() in ("unknown", "ended"):
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)
            return True
        return False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _stat(pid: int) -> tuple[str, str]:
    """(state, start time) from /proc; empty if there is no such process, or no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


@functools.cache
def _machine() -> str:
    boot = space = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {boot} {space}"
