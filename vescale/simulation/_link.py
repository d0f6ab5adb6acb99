"""``Link``: a simulated rank's connection to the server of its simulation; ``SharedStore``: the rendezvous over it."""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist


def seconds_without_processor(process: int | str = "self") -> float:
    """How long a process was ready to run while others did, which is no time of its own; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


class KeyNeverComes(RuntimeError):
    """A key of the store for which a program waits is set by no simulated rank."""


class Link:
    """Requests, one at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def tell(self, do: str, **given: Any) -> None:
        self._connection.send_bytes(json.dumps({"do": do, **given}).encode())

    def ask(self, do: str, **given: Any) -> Any:
        """The rank's own time stops while it waits for others."""
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        self.tell(do, **given)
        answer = json.loads(self._connection.recv_bytes())
        if left:
            signal.setitimer(signal.ITIMER_REAL, left)
        return answer


class SharedStore(dist.Store):
    """A store that all simulated ranks share. Values are bytes."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    def set(self, key: str, value: Any) -> None:
        self._link.ask("set", key=key, value=_text(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return _bytes(self._link.ask("get", key=key))

    def add(self, key: str, amount: int) -> int:
        return int(self._link.ask("add", key=key, amount=amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._link.ask("check", keys=list(keys)))

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        lacking = self._link.ask("wait", keys=list(keys))
        if lacking:
            raise KeyNeverComes(
                f"waits for key {lacking!r} of the store, which no simulated rank sets; also simulate the rank that "
                "sets it"
            )

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return _bytes(self._link.ask("compare_set", key=key, expected=_text(expected), desired=_text(desired)))

    def delete_key(self, key: str) -> bool:
        return bool(self._link.ask("delete", key=key))

    def clone(self) -> SharedStore:
        return self


def _text(value: Any) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else bytes(value)).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
