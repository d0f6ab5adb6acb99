"""The other end of the writer process: starts it, shares memory with it, and sends it jobs."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vescale.checkpoint import _writer_process
from vescale.compat.devices import pin, unpin
from vescale.errors import SaveFailedError

_GRANULE = 2 << 20


class Writer:
    """A long-lived process that writes what is in a shared block of memory. One job at a time.

    The block is made once and grows; between saves it stays, so that the next one allocates nothing. It has no name, and is
    gone when both processes are.
    """

    def __init__(self) -> None:
        self._memory = _anonymous_file()
        self._size = 0
        self._image: torch.Tensor | None = None
        self._is_pinned = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._finalizer = weakref.finalize(self, os.close, self._memory)

    def image(self, nbytes: int) -> torch.Tensor:
        """The shared memory as bytes, at least so many; pinned where a device is used. What was in it may be lost."""
        if nbytes > self._size or self._image is None:
            self._unpin()
            self._size = -(-max(nbytes, 1) // _GRANULE) * _GRANULE
            os.ftruncate(self._memory, self._size)
            self._image = torch.frombuffer(mmap.mmap(self._memory, self._size), dtype=torch.uint8)
            # So that copies from a device need no buffer of the driver's; without it they are slower, and nothing else.
            self._is_pinned = pin(self._image)
        return self._image

    def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Do a job in the process, which is started if need be, and wait for it. Called by one thread at a time.

        Raises CheckpointError with the reason if it failed, or the process is gone.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._connection is not None and self._process is not None
        try:
            _writer_process.send(self._connection, dict(job))
            answer = _writer_process.receive(self._connection)
        except ConnectionError:
            answer = None
        if answer is None:
            code = self._process.wait()
            self._process = None
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            raise SaveFailedError(f"the writer process {how}; the next save starts a new one")
        if "error" in answer:
            raise SaveFailedError(answer["error"])
        return answer

    @property
    def pid(self) -> int | None:
        """The process that is there now, or None."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def close(self) -> None:
        """End the process, and wait until it is gone."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.wait()
        self._process = self._connection = None
        self._unpin()

    def _unpin(self) -> None:
        """The driver forgets the memory, before that goes."""
        is_pinned, self._is_pinned = self._is_pinned, False
        if is_pinned:
            assert self._image is not None
            unpin(self._image)
        self._image = None

    def _start(self) -> None:
        if self._connection is not None:
            self._connection.close()
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[2])
        script = str(Path(_writer_process.__file__))
        arguments = [str(theirs.fileno()), str(self._memory), str(os.getpid()), root]
        environment = {key: value for key, value in os.environ.items() if key != "VESCALE_TIMEOUT"}
        with theirs:
            self._process = subprocess.Popen(
                # Neither the user's site nor the environment may import anything; Ctrl-C is for the job, not for the writer.
                [sys.executable, "-I", "-S", script, *arguments],
                pass_fds=(theirs.fileno(), self._memory),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        self._connection = ours


def _anonymous_file() -> int:
    """Memory that is shared by its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("vescale checkpoint", os.MFD_CLOEXEC)
    descriptor, path = tempfile.mkstemp(prefix="vescale-checkpoint-")
    os.unlink(path)
    return descriptor
