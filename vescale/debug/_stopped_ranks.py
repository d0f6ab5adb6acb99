"""The protocol of stopped ranks through the store: where each rank stopped, commands, and replies."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vescale.agreement import PAUSED
from vescale.compat import own_connection

# The processes of a job: whether one is running, stopped or gone, and how to end it.


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


EXIT_CODE = 70
_TURN = "vescale breakpoint turn"
_PROMPT_TIMEOUT = 60.0  # seconds, where its process cannot be looked at


class JobEnded(BaseException):
    """Another rank has ended the job."""


class Session:
    """One stop of a job, from the first rank that arrives until all resume: the ranks' keys in the store.

    ============  ====================================================================================================
    key           value, and the rank that writes it
    ============  ====================================================================================================
    status r      rank r: whether it is stopped, for which time, where, its process, whether it has a terminal
    prompt        the rank that reads commands; written by the first one
    command k     the prompt's rank: the command, and the ranks that execute it in turn
    reply k r     rank r: its result
    end           the rank that ends the job: the reason
    closed        the prompt's rank, when all ranks resume: ranks that arrive later do not stop
    ============  ====================================================================================================

    One key is the job's: the stop that has the prompt now.
    """

    def __init__(self, name: str, store: Any = None) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self._store = store if store is not None else own_connection() if dist.is_initialized() else dist.HashStore()
        self._name = f"vescale breakpoint {name}"
        self._done = int(self._store.add(f"{self._name} commands", 0))
        self._is_paused = False
        self._stops = 0
        self.prompt_rank: int | None = None

    # Keys

    def _set(self, key: str, value: Any) -> None:
        self._store.set(f"{self._name} {key}", json.dumps(value))

    def _get(self, key: str) -> Any:
        full = f"{self._name} {key}"
        return json.loads(self._store.get(full)) if self._store.check([full]) else None

    # State

    @property
    def is_closed(self) -> bool:
        return self._get("closed") is not None

    def vote(self, stops: bool, ranks: Sequence[int], seconds: float = 10.0) -> bool:
        """Whether any of ``ranks`` wants to stop; waits a while for the answers of all."""
        self._set(f"vote {self.rank}", stops)
        deadline = time.monotonic() + seconds
        while True:
            votes = [self._get(f"vote {rank}") for rank in ranks]
            if any(votes) or None not in votes or time.monotonic() > deadline:
                return any(votes)
            time.sleep(0.01)

    def stop(self, place: str, terminal: str | None) -> None:
        if not self._is_paused:
            self._store.add(PAUSED, 1)
            self._is_paused = True
        process = ProcessIdentity.own().to_json()
        self._stops += 1
        own = {"stopped": True, "stops": self._stops, "place": place, "terminal": terminal, "process": process}
        self._set(f"status {self.rank}", own)

    def go_on(self) -> None:
        status = self._get(f"status {self.rank}") or {}
        self._set(f"status {self.rank}", {**status, "stopped": False})
        if self._is_paused:
            self._store.add(PAUSED, -1)
            self._is_paused = False

    def take_turn(self) -> None:
        """Wait until no other stop of the job is going on: there is one prompt."""
        while bytes(self._store.compare_set(_TURN, "", self._name)).decode() != self._name and not self.is_closed:
            self.look()
            time.sleep(0.05)

    def close(self) -> None:
        self._set("closed", True)
        self._store.compare_set(_TURN, self._name, "")

    def statuses(self) -> dict[int, dict[str, Any]]:
        found = {rank: self._get(f"status {rank}") for rank in range(self.size)}
        return {rank: status for rank, status in found.items() if status is not None}

    def stopped(self) -> list[int]:
        return [rank for rank, status in self.statuses().items() if status["stopped"]]

    def elect(self, wanted: int, seconds: float = 2.0) -> int:
        """The rank that reads commands: ``wanted`` if it has a terminal; else the first rank that has arrived and has
        one; else ``wanted``, or the first rank that has arrived."""
        begin = time.monotonic()
        while self.prompt_rank is None:
            self.look()
            self.prompt_rank = self._get("prompt")
            statuses = self.statuses()
            waited = time.monotonic() - begin > seconds
            with_terminal = [
                rank for rank, status in sorted(statuses.items()) if status["terminal"] and status["stopped"]
            ]
            if wanted in with_terminal:
                choice = wanted
            elif with_terminal and (waited or wanted in statuses):
                choice = with_terminal[0]
            elif waited:
                choice = wanted if wanted in statuses else min(statuses)
            else:
                choice = -1
            if self.prompt_rank is None and choice == self.rank:
                key = f"{self._name} prompt"
                self.prompt_rank = int(json.loads(self._store.compare_set(key, "", json.dumps(self.rank))))
            if self.prompt_rank is None:
                time.sleep(0.02)
        return self.prompt_rank

    # Commands

    def send(self, ranks: Iterable[int], kind: str, text: str) -> int:
        number = int(self._store.add(f"{self._name} commands", 1)) - 1
        self._set(f"command {number}", {"ranks": list(ranks), "kind": kind, "text": text})
        return number

    def replies(self, number: int, ranks: Iterable[int]) -> dict[int, Any]:
        """The replies of ``ranks``; none for ranks that have died."""
        waiting, found = set(ranks), {}
        while waiting:
            self.look()
            for rank in sorted(waiting):
                reply = self._get(f"reply {number} {rank}")
                if reply is not None:
                    found[rank] = reply
            waiting -= set(found)
            waiting -= {rank for rank in waiting if self.process(rank).state() == "ended"}
            if waiting:
                time.sleep(0.02)
        return found

    def process(self, rank: int) -> ProcessIdentity:
        return ProcessIdentity(**self.statuses()[rank]["process"])

    def next_command(self) -> tuple[int, Mapping[str, Any]] | None:
        """The next command that is not executed yet, if there is one."""
        self.look()
        command = self._get(f"command {self._done}")
        if command is None:
            return None
        self._done += 1
        return self._done - 1, command

    def reply(self, number: int, value: Any) -> None:
        self._set(f"reply {number} {self.rank}", value)

    def beat(self) -> None:
        """Announce that the prompt's rank is running."""
        self._set("beat", time.time())

    # The end

    def look(self) -> None:
        """Raises JobEnded if a rank has ended the job, or if the prompt's rank is gone."""
        try:
            reason = self._get("end")
            if reason is None and self.prompt_rank not in (None, self.rank):
                reason = self._loss_of_front()
        except RuntimeError as error:
            raise JobEnded("the job's store has ended together with its launcher") from error
        if reason is not None:
            raise JobEnded(str(reason))

    def _loss_of_front(self) -> str | None:
        assert self.prompt_rank is not None
        state = self.process(self.prompt_rank).state()
        if state == "ended":
            return f"rank {self.prompt_rank}, which had the prompt, has died"
        if state == "unknown":
            beat = self._get("beat")
            if beat is not None and time.time() - beat > _PROMPT_TIMEOUT:
                return f"rank {self.prompt_rank}, which had the prompt, does not respond"
        return None

    def end(self, reason: str) -> None:
        """End every rank, including this one: stopped ranks end themselves, others are killed. Does not return."""
        with contextlib.suppress(RuntimeError):
            self._set("end", reason)
            self._set(f"gone {self.rank}", True)
            if self.prompt_rank in (None, self.rank):
                deadline = time.monotonic() + 3.0
                others = [rank for rank in self.statuses() if rank != self.rank]
                while others and time.monotonic() < deadline:
                    others = [r for r in others if not self._get(f"gone {r}") and self.process(r).state() != "ended"]
                    time.sleep(0.02)
                for rank in others:
                    self.process(rank).kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_CODE)
