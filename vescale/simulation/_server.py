"""The process that a simulation's ranks are forked from: it has loaded torch once, and answers what ranks ask.

``python -m vescale.simulation._server FILE`` reads what to simulate, one script after another, from a file of JSON.
Ranks are forked when a processor is free: a rank that waits for another one takes none. Where all wait, which says nothing
yet about the program (values of asynchronous collectives are asked for early), each goes on with its own values; what would
stop the job is found afterwards, from the records.
"""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import defaultdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from vescale.simulation._link import seconds_without_processor

_GRACE_SECONDS = 5.0


class _Server:
    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.queue: list[int] = list(config["ranks"])
        self.known: set[int] = set(self.queue)
        self.running: dict[int, tuple[int, Connection, float]] = {}  # rank: process, connection, end of its time
        self.waiting: dict[int, dict[str, Any]] = {}
        self.store: dict[str, str] = {}
        self.given: dict[str, dict[int, Any]] = defaultdict(dict)  # values of a collective, by rank
        self.came: dict[str, set[int]] = defaultdict(set)
        self.processors = os.cpu_count() or 1
        self.parent = os.getppid()

    def run(self) -> None:
        while self.queue or self.running:
            while self.queue and len(self.running) - len(self.waiting) < self.processors:
                self._start(self.queue.pop(0))
            connections = {connection: rank for rank, (_, connection, _) in self.running.items()}
            for ready in wait(list(connections), timeout=0.5):
                self._read(connections[ready], ready)  # type: ignore[index, arg-type]
            self._kill_late()
            if os.getppid() != self.parent:  # who asked for this has gone
                for process, _, _ in self.running.values():
                    os.kill(process, signal.SIGKILL)
                os._exit(1)
            if not self.queue and self.running and len(self.waiting) == len(self.running):
                self._let_go()

    def _start(self, rank: int) -> None:
        mine, theirs = multiprocessing.Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if process == 0:
            mine.close()
            for _, connection, _ in self.running.values():
                connection.close()
            from vescale.simulation._rank import run_rank

            run_rank(rank, self.config, theirs)
        theirs.close()
        self.running[rank] = process, mine, time.monotonic() + self.config["timeout"] + _GRACE_SECONDS

    def _end(self, rank: int) -> None:
        process, connection, _ = self.running.pop(rank)
        self.waiting.pop(rank, None)
        connection.close()
        os.waitpid(process, 0)
        self._answer()

    def _kill_late(self) -> None:
        now = time.monotonic()
        for rank, (process, _, end) in list(self.running.items()):
            if rank not in self.waiting and now > end + seconds_without_processor(
                process
            ):  # not even signal handlers run
                os.kill(process, signal.SIGKILL)
                self._end(rank)

    def _read(self, rank: int, connection: Connection) -> None:
        try:
            request = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            self._end(rank)
            return
        do = request["do"]
        if do == "give":
            self.given[request["place"]][rank] = request["value"]
            self.came[request["place"]].add(rank)
        elif do in ("wait", "take"):
            self.waiting[rank] = {**request, "began": time.monotonic()}
            if do == "take":
                for source in request["needs"]:
                    if source not in self.known:
                        self.known.add(source)
                        self.queue.append(source)
        elif do == "need":
            if request["rank"] not in self.known:
                self.known.add(request["rank"])
                self.queue.append(request["rank"])
        else:
            self._reply(rank, self._of_store(do, request))
        self._answer()

    def _of_store(self, do: str, request: dict[str, Any]) -> Any:
        store, key = self.store, request.get("key", "")
        if do == "set":
            store[key] = request["value"]
            return None
        if do == "get":
            return store.get(key, "")
        if do == "check":
            return all(k in store for k in request["keys"])
        if do == "add":
            number = int(base64.b64decode(store.get(key, "")) or 0) + request["amount"]
            store[key] = base64.b64encode(str(number).encode()).decode()
            return number
        if do == "compare_set":
            if store.get(key, "") == request["expected"]:
                store[key] = request["desired"]
            return store.get(key, request["expected"])
        return store.pop(key, None) is not None

    def _reply(self, rank: int, answer: Any) -> None:
        request = self.waiting.pop(rank, None)
        process, connection, end = self.running[rank]
        if request is not None:  # the time of others is not its own
            self.running[rank] = process, connection, end + time.monotonic() - request["began"]
        try:
            connection.send_bytes(json.dumps(answer).encode())
        except OSError:
            self._end(rank)

    def _answer(self) -> None:
        """Ranks that have what they wait for go on."""
        for rank, request in list(self.waiting.items()):
            if rank not in self.waiting:
                continue
            if request["do"] == "wait":
                if all(key in self.store for key in request["keys"]):
                    self._reply(rank, "")
            else:
                alive = {r for r in request["from"] if r in self.running or r in self.queue}
                if not (alive - self.came[request["place"]]):
                    self._reply(rank, self._values(request))

    def _values(self, request: dict[str, Any]) -> dict[str, Any]:
        given = self.given[request["place"]]
        return {str(rank): given[rank] for rank in request["from"] if rank in given}

    def _let_go(self) -> None:
        """All ranks wait: for values, all go on with what there is; else for keys of the store that nobody sets."""
        takes = [rank for rank, request in self.waiting.items() if request["do"] == "take"]
        for rank in takes:
            self._reply(rank, self._values(self.waiting[rank]))
        if not takes:
            for rank, request in list(self.waiting.items()):
                self._reply(rank, next(key for key in request["keys"] if key not in self.store))


def main(path: str) -> None:
    import torch  # noqa: F401  # once for all ranks

    import vescale.simulation._rank  # noqa: F401

    for config in json.loads(Path(path).read_text()):
        _Server(config).run()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
