"""Checkpoints of a simulated rank: names, shapes and options are checked, and nothing is written or filled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vescale.checkpoint import _hf_export, _hf_load, _loading
from vescale.checkpoint._replicas import Gathering
from vescale.checkpoint._saving import Saver, Target
from vescale.checkpoint._snapshot import Snapshot


def leave_files_alone() -> None:
    """For a process whose tensors have no numbers and whose other ranks do not exist; not taken back.

    Saves write nothing. Loads read the index of a checkpoint, and what is not a tensor. Ranks agree with this one.
    """

    def agree(
        self: Gathering, message: str | Callable[[], str], first: Callable[[Sequence[str]], dict[str, Any]]
    ) -> dict[str, Any]:
        return dict(first([message if isinstance(message, str) else message()] * self.world))

    def left_out(*args: Any, **kwargs: Any) -> None:
        pass

    def not_written(*args: Any, **kwargs: Any) -> list[int]:
        return [0]

    def prepared(self: Saver, prepare: Callable[[], tuple[Snapshot, Target]]) -> Target:
        return prepare()[1]

    Gathering.round = agree  # type: ignore[method-assign]
    Saver.save = prepared  # type: ignore[method-assign]
    _loading.read_tensors = _hf_load._fill = left_out
    _hf_export._together = _hf_export._write_whole = not_written
