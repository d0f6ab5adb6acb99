"""Sends and receives between simulated ranks, which PyTorch's threaded process group does not have."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Messages"]


class Messages:
    """``send`` and ``recv`` of a class of process groups, until :meth:`uninstall`. A send never waits; messages from one
    rank to another of a group arrive in order."""

    def __init__(self, group_class: type[dist.ProcessGroup]) -> None:
        self._changed = threading.Condition()
        self._sent: dict[tuple[str, int, int, int], torch.Tensor] = {}
        self._numbers: Counter[tuple[str, str, int, int]] = Counter()
        self._is_over = False
        self._class: Any = group_class
        self._before = {name: group_class.__dict__.get(name) for name in ("send", "recv", "_get_backend")}

        def send(group: Any, tensors: list[torch.Tensor], to: int, tag: int = 0) -> _Work:
            (tensor,) = tensors
            with self._changed:
                self._sent[self._next("send", group.group_name, group.rank(), to)] = tensor.detach().clone()
                self._changed.notify_all()
            return _Work(lambda: None)

        def recv(group: Any, tensors: list[torch.Tensor], source: int, tag: int = 0) -> _Work:
            (tensor,) = tensors
            with self._changed:
                key = self._next("recv", group.group_name, source, group.rank())
            return _Work(lambda: self._receive(key, tensor))

        self._class.send, self._class.recv = send, recv
        self._class._get_backend = lambda group, device: group  # which PyTorch asks whether it takes several at once

    def _next(self, op: str, group: str, source: int, to: int) -> tuple[str, int, int, int]:
        """The message: receives get messages in the order in which they are posted, not in that of waiting."""
        self._numbers[op, group, source, to] += 1
        return group, source, to, self._numbers[op, group, source, to]

    def _receive(self, key: tuple[str, int, int, int], into: torch.Tensor) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or key in self._sent)
            if key not in self._sent:
                raise SystemExit  # as in the collectives of a world in which a rank has failed
            message = self._sent.pop(key)
        assert message.shape == into.shape and message.dtype == into.dtype, (message.shape, into.shape)
        with torch.no_grad():
            into.copy_(message)

    def give_up(self) -> None:
        """Ranks that wait for a message leave."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def uninstall(self) -> None:
        for name, before in self._before.items():
            delattr(self._class, name) if before is None else setattr(self._class, name, before)


class _Work:
    """What ``isend`` and ``irecv`` return; ``finish`` is called by the first wait."""

    def __init__(self, finish: Any) -> None:
        self._finish = finish
        self._is_done = False

    def wait(self, timeout: Any = None) -> bool:
        if not self._is_done:
            self._finish()
            self._is_done = True
        return True

    def is_completed(self) -> bool:
        return self._is_done
