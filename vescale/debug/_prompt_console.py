"""The console of a prompt: a terminal, or a socket to which ``vescale attach`` connects."""

from __future__ import annotations

import abc
import contextlib
import os
import select
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Console", "SocketConsole", "TerminalConsole", "newest_socket", "terminal_of_this_process"]

_POLL_SECONDS = 0.1


class Console(abc.ABC):
    """Reads lines and writes text. While ``read_line`` waits, it calls ``poll`` repeatedly, which may raise."""

    def __init__(self) -> None:
        self._typed = b""

    @abc.abstractmethod
    def write(self, text: str) -> None:
        """Show ``text``; ignored if the other end is gone."""

    @abc.abstractmethod
    def close(self) -> None:
        """Restore the terminal, or remove the socket."""

    @abc.abstractmethod
    def _ready(self) -> bool:
        """Whether reading would not block, after a short wait."""

    @abc.abstractmethod
    def _read(self) -> bytes:
        """The input so far; empty if the other end is gone."""

    def read_line(self, prompt: str, poll: Callable[[], None]) -> str | None:
        """The next line; None at the end of input."""
        self.write(prompt)
        while b"\n" not in self._typed:
            poll()
            if not self._ready():
                continue
            try:
                read = self._read()
            except OSError:
                return None
            if not read:
                return None
            self._typed += read
        line, _, self._typed = self._typed.partition(b"\n")
        return line.decode(errors="replace").rstrip("\r")


class TerminalConsole(Console):
    """A terminal, whose mode is not changed: the kernel edits lines and turns Ctrl-C into a signal. It is used even if
    standard input or output are redirected."""

    def __init__(self, path: str) -> None:
        super().__init__()
        import termios

        self._fd = os.open(path, os.O_RDWR | os.O_NOCTTY)
        self._found = termios.tcgetattr(self._fd)

    def write(self, text: str) -> None:
        data = text.encode()
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._fd, data) :]

    def _ready(self) -> bool:
        return bool(select.select([self._fd], [], [], _POLL_SECONDS)[0])

    def _read(self) -> bytes:
        return os.read(self._fd, 4096)

    def close(self) -> None:
        import termios

        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._found)
        os.close(self._fd)


class SocketConsole(Console):
    """A Unix socket in a folder that only this user can enter. It serves one connection at a time; a lost connection
    counts as a lost terminal."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        super().__init__()
        self._folder = tempfile.mkdtemp(prefix=f"vescale-{os.getuid()}-")  # mode 0700
        self.path = os.path.join(self._folder, "breakpoint")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(1)
        self._client: socket.socket | None = None
        self._unseen: list[str] = []
        announce(self.path)

    def write(self, text: str) -> None:
        if self._client is None:
            self._unseen.append(text)
            return
        with contextlib.suppress(OSError):
            self._client.sendall(text.encode())

    def _ready(self) -> bool:
        if self._client is not None:
            return bool(select.select([self._client], [], [], _POLL_SECONDS)[0])
        if select.select([self._listener], [], [], _POLL_SECONDS)[0]:
            self._client, _ = self._listener.accept()
            self.write("".join(self._unseen))
            self._unseen.clear()
        return False

    def _read(self) -> bytes:
        assert self._client is not None
        return self._client.recv(4096)

    def close(self) -> None:
        for one in (self._client, self._listener):
            if one is not None:
                with contextlib.suppress(OSError):
                    one.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)
            os.rmdir(self._folder)


def terminal_of_this_process() -> str | None:
    """The path of the terminal that was passed to this process, or that controls it."""
    candidates: list[Any] = [0, 2, 1]
    for fd in candidates:
        with contextlib.suppress(OSError):
            if os.isatty(fd):
                return os.ttyname(fd)
    with contextlib.suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
        return "/dev/tty"
    return None


def newest_socket() -> str | None:
    """The socket of this user's job on this machine that stopped last."""
    if sys.platform == "win32":
        return None
    found = Path(tempfile.gettempdir()).glob(f"vescale-{os.getuid()}-*/breakpoint")
    return max((str(path) for path in found), key=lambda path: os.stat(path).st_mtime, default=None)
