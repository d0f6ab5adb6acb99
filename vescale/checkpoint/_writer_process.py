"""The process that writes asynchronous saves: its program, which imports neither torch nor any other package.

It shares one block of memory with the process that started it, and answers its jobs one by one. It ends when that process
does, at once and in the middle of a file if need be: what it leaves behind is a temporary folder.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import socket
import sys
import threading
import time
from typing import Any

_ORPHAN_CHECK_SECONDS = 0.5


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    connection.sendall(len(data).to_bytes(8, "little") + data)


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """None when the other side is gone."""
    header = _receive_bytes(connection, 8)
    data = _receive_bytes(connection, int.from_bytes(header, "little")) if header is not None else None
    if data is None:
        return None
    found: dict[str, Any] = json.loads(data)
    return found


def _receive_bytes(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray(count)
    view = memoryview(data)
    while len(view):
        try:
            got = connection.recv_into(view)
        except ConnectionError:
            return None
        if got == 0:
            return None
        view = view[got:]
    return bytes(data)


def main(connection: socket.socket, memory: int, parent: int) -> None:
    """Serve jobs until the parent is gone. ``memory``: descriptor of the shared memory."""
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def take_jobs() -> None:
        while (job := receive(connection)) is not None:
            jobs.put(job)
        os._exit(0)

    def watch_parent() -> None:  # its end of the connection may be open in processes that it has forked
        while os.getppid() == parent:
            time.sleep(_ORPHAN_CHECK_SECONDS)
        os._exit(0)

    for task in (take_jobs, watch_parent):
        threading.Thread(target=task, daemon=True).start()
    mapped: mmap.mmap | None = None
    while True:
        job = jobs.get()
        try:
            if job["do"] == "write":
                size = os.fstat(memory).st_size
                if mapped is None or len(mapped) != size:
                    mapped = mmap.mmap(memory, size) if size else None
                answer = _write(job, memoryview(mapped) if mapped is not None else memoryview(b""))
            else:
                answer = _commit(job)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        try:
            send(connection, answer)
        except ConnectionError:  # the parent was killed meanwhile
            os._exit(0)


def _write(job: dict[str, Any], image: memoryview) -> dict[str, Any]:
    """The shared memory is the image of the file."""
    from vescale.checkpoint import _disk
    from vescale.checkpoint._data_file import write_data_file

    _disk.make_folder(job["folder"])
    boxes = ((start, count, [image[start : start + count]]) for start, count in job["boxes"])
    found = write_data_file(os.path.join(job["folder"], job["name"]), boxes, job["bytes"])
    _disk.sync_folder(job["folder"])
    return found


def _commit(job: dict[str, Any]) -> dict[str, Any]:
    from vescale.checkpoint._step_folder import commit

    return commit(job)


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[4])
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
