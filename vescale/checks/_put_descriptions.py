"""``PutDescriptions``: what ranks that do not wait for each other have put in the store, to be compared later."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from vescale.compat import default_store, is_alone

__all__ = ["PutDescriptions"]


class PutDescriptions:
    """Of ``ranks``; each puts and reads them in the same order.

    Attributes:
        keys: of those that have not been read.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self.keys: deque[str] = deque()

    def add(self, key: str, message: bytes) -> None:
        """``key``: the same on all ranks, and used once."""
        if not is_alone():
            default_store().set(f"{key} {self._ranks.index(dist.get_rank())}", message.hex())
            self.keys.append(key)

    def complete(self) -> Iterator[list[dict[str, Any]]]:
        """Those that all ranks have put, of each rank. Nobody waits."""
        while self.keys:
            store, key = default_store(), self.keys[0]
            keys = [f"{key} {index}" for index in range(len(self._ranks))]
            if not store.check(keys):
                return
            found = [json.loads(bytes.fromhex(store.get(each).decode())) for each in keys]
            self.keys.popleft()
            if store.add(f"{key} read", 1) == len(self._ranks):
                for each in (*keys, f"{key} read"):
                    store.delete_key(each)
            yield found
