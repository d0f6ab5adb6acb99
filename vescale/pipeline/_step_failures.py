"""``StepFailures``: an error of one rank ends the steps of the others, which wait for its messages."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale.agreement import add_post, added_posts, end_for, post, posted
from vescale.compat import is_alone, living_items
from vescale.errors import PipelineCallError

_PATIENCE = (
    2.0  # seconds without a forward or backward, after which a rank asks whether others have failed, once a second
)


class StepFailures:
    """Of the ranks of a pipeline, in all columns. A message that never comes cannot be given up, so that a rank that waits
    for one prints the other rank's error, and its process ends; so does one that waits in a collective of its stage.
    Nothing is asked of the store while steps go on.

    Args:
        place: a prefix of keys in the store that they alone use.
    """

    def __init__(self, place: str, num_ranks: int) -> None:
        self._place, self._number, self._num_ranks = place, 0, num_ranks
        self._began: float | None = None  # the running action of the running step
        self._thread = 0

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Around what all ranks do in a step: what it raises here, the others are told."""
        self._number += 1
        if self._num_ranks == 1 or is_alone():
            yield
            return
        _WATCHED[self] = None
        _watch()
        self._thread = threading.get_ident()
        try:
            yield
        except BaseException as error:
            post(self._key, f"rank {dist.get_rank()} has failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._began = None

    def all_out_of_memory(self, where: str, position: int, mesh: DeviceMesh) -> bool:
        """Whether all ranks of a stage have come here behind the same collective, so that none of them waits in the next
        one. Waits for them for a while."""
        key, text, ends = f"{self._place}/{where}", f"{position}", time.monotonic() + 5 * _PATIENCE
        num_ranks = mesh.size()
        if num_ranks == 1:
            return True
        add_post(key, text)
        while True:
            found = added_posts(key)
            if len(found) == num_ranks or time.monotonic() > ends:
                return found == [text] * num_ranks
            time.sleep(0.05)

    def note(self) -> None:
        """A forward or backward begins, or this rank may wait for a message from now on."""
        self._began = time.monotonic()

    @property
    def _key(self) -> str:
        return f"{self._place}/failure of step {self._number}"

    def look(self) -> None:
        """End the process if another rank has failed in the step in which this one waits."""
        began = self._began
        if began is None or time.monotonic() - began < _PATIENCE:
            return
        with contextlib.suppress(dist.DistError):  # the store is gone
            text = posted(self._key)
            if text is not None and self._began == began:
                problem = (
                    f"pipeline: {text}; this rank waits for its messages, which will never arrive, and ends. Stages "
                    "cannot continue after an error in the middle of a step: let it end the job, and restart from a "
                    "checkpoint"
                )
                end_for(PipelineCallError(problem), self._thread)


_WATCHED: weakref.WeakKeyDictionary[StepFailures, None] = weakref.WeakKeyDictionary()


@functools.cache
def _watch() -> None:
    def run() -> None:
        while True:
            time.sleep(1.0)
            for each, _ in living_items(_WATCHED):
                each.look()

    threading.Thread(target=run, daemon=True, name="vescale pipeline").start()
