"""``Checkpointer``: the steps of a training run in a folder."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from vescale.checkpoint._loading import load_stored
from vescale.checkpoint._replicas import Gathering, first_rank_decides
from vescale.checkpoint._saving import Saver, Target
from vescale.checkpoint._snapshot import Snapshot, take_snapshot
from vescale.checkpoint._step_folder import MANIFEST, Retention, complete_steps, find_problems, step_name, step_numbers
from vescale.checkpoint._step_format import open_step
from vescale.checkpoint._verification import verify_step
from vescale.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointWarning,
    NoSuchStepError,
    SaveFailedError,
    UnsavableError,
)

Verify = Literal["none", "sizes", "checksums"]

_RESTORE = "Checkpointer.restore"


class Checkpointer:
    """Saves steps of a training run to a folder, and resumes from them, on the same or another mesh.

        with Checkpointer("runs/7", keep=3) as checkpoints:
            found = checkpoints.restore(model=model, optimizer=optimizer, scheduler=scheduler)
            for step in range(found["step"] + 1 if found else 0, steps):
                ...
                if step % 500 == 0:
                    checkpoints.save(step, model=model, optimizer=optimizer, scheduler=scheduler)

    Every rank of the job must create it, and make the same calls; without a process group, it serves a single process.
    A step is there as a whole or not at all, whenever and however processes are ended (``docs/checkpoint.md`` has the
    protocol).

    Args:
        folder: of the steps, on a file system that all ranks share. Made by the first save.
        keep: how many of the newest steps stay; None: all. At least two, so that one is left if the newest is damaged.
        keep_every: steps that are multiples of it stay as well.
        best: the name of a number that is passed to ``save``: the step with the smallest one is kept. ``(name,
            "max")``: the largest. Infinity and not-a-number do not count.
        asynchronous: ``save`` returns when the values have been copied to host memory; a separate process writes them.
        verify: what ``restore`` checks before it takes a step: that files are there and have their sizes, or also checksums
            of all their bytes, which the ranks divide.

    Raises ValueError for arguments out of range.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        keep_every: int | None = None,
        best: str | tuple[str, Literal["min", "max"]] | None = None,
        asynchronous: bool = True,
        verify: Verify = "sizes",
    ) -> None:
        if keep is not None and (_whole_number(keep) or 0) < 2:
            raise ArgumentError(
                f"keep is {keep!r}; expected at least 2 (so that a damaged step is never the only one), or None to "
                "keep all"
            )
        if keep_every is not None and (_whole_number(keep_every) or 0) < 1:
            raise ArgumentError(f"keep_every is {keep_every!r}; expected a positive number of steps")
        if not isinstance(asynchronous, bool):
            raise ArgumentError(f"asynchronous is {asynchronous!r}; expected True or False")
        if verify not in ("none", "sizes", "checksums"):
            raise ArgumentError(f'verify is {verify!r}; expected "none", "sizes" or "checksums"')
        match (best, "min") if best is None or isinstance(best, str) else best:
            case (None | str() as name, "min" | "max" as which):
                pass
            case _:
                raise ArgumentError(f'best is {best!r}; expected a name, or (name, "min" or "max")')
        self.folder = Path(os.path.abspath(folder))  # wherever the script goes afterwards
        if self.folder.exists() and not self.folder.is_dir():
            raise ArgumentError(f"{self.folder} is a file; expected a folder of steps, or a path that does not exist")
        self._best = name
        self._retention = Retention(keep, keep_every, name, which == "max")
        self._verify: Verify = verify
        self._saver = Saver(str(self.folder), "Checkpointer.save", asynchronous=asynchronous)
        self._abandoned: tuple[int, ...] = ()  # steps of a branch that restore() has left; until a save puts them aside
        self._leaving: Target | None = None  # the save that does
        self._restored: int | None = None  # until the first save, which may be of this step again
        self._lock, self._is_busy = threading.RLock(), False

    def save(self, step: int, *, model: nn.Module | None = None, optimizer: Any = None, **more: Any) -> None:
        """Save everything that is needed to resume training, including random state, mesh and plan.

        Waits for a save that is under way. Communication: in the first save, and when tensors have come or gone, ranks
        compare names through the store; each save ends with one message of each rank, and a second one where ranks have
        different values beside tensors. No collectives.

        Args:
            step: not negative; a step that is there already can be saved again only after ``restore`` of it, or of an
                earlier one.
            model: in any placement, sharded or not; tied parameters are saved once, frozen ones and buffers, too.
            optimizer: one, or a list or dict of them. States are saved by the names of parameters.
            **more: objects with ``state_dict`` (schedulers, samplers, averages), generators, tensors, and plain data. What
                is no tensor may differ between ranks: each gets its own back.

        Raises:
            CheckpointError: an earlier save has failed (this one is not tried), or, in synchronous mode, this one. What
                was saved before is as it was. Ranks that have not called this within the time limit (``VESCALE_TIMEOUT``,
                else that of the process group); a LateRanksWarning names them after 3 seconds. Objects that are no tensors
                and no plain data; nothing is pickled. Where one rank cannot save, all of them raise, in asynchronous mode
                from the next ``save`` or ``wait``.
        """
        number = _whole_number(step)
        if number is None or number < 0:
            raise ArgumentError(f"step is {step!r}; expected a non-negative number")
        with self._turn("save"):
            self.wait()
            self._leave_branch()

            def prepare() -> tuple[Snapshot, Target]:
                name = step_name(number)
                aside = tuple(s for s in self._abandoned if s != number)
                metric = self._metric(more)
                snapshot = take_snapshot(model, optimizer, more)
                return snapshot, Target(name, number, metric, self._retention, self._may_be_replaced(number), aside)

            self._leaving = self._saver.save(prepare)
            self._restored = None

    def restore(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: Any = None,
        step: int | Literal["latest"] = "latest",
        strict: bool = True,
        rng: bool = True,
        cast: bool = False,
        **more: Any,
    ) -> dict[str, Any] | None:
        """Fill model and optimizer in place from the newest complete step, or from ``step``.

        Steps that are not complete are passed by with a warning. Each rank reads the bytes that it holds; ranks that hold
        the same read once and broadcast. After an earlier step than the newest, the next save puts the later ones aside.

        Args:
            model, optimizer: None: left out. Meshes and placements may differ from those of the save.
            strict: everything that is wanted is there, and everything that is there is wanted. False: load what fits.
            rng: also restore the random state; on any number of ranks, if all of them had the same seed.
            cast: convert tensors that have another dtype.
            **more: objects that were saved under these names, to be given their state.

        Returns:
            ``{"step": n, **more}`` as it was saved (states, in place of objects); with ``strict=False`` also
            ``"not_loaded"``: ``missing``, ``surplus`` and ``misshapen`` names. None if there is no complete step.

        Raises:
            CheckpointError: no such step (naming those that are there), or names, shapes and dtypes that do not fit, with
                the nearest names. On every rank, before anything is changed.
        """
        with self._turn("restore"):
            self.wait()
            found = self._choose(step)
            if found is None:
                return None
            path = self.folder / step_name(found)
            opened = functools.partial(open_step, path, check_sizes=False)
            result = load_stored(opened, model, optimizer, more, strict=strict, rng=rng, cast=cast, call=_RESTORE)
            later = first_rank_decides(
                _RESTORE, lambda: {"steps": [s for s in step_numbers(str(self.folder)) if s > found]}
            )
            self._abandoned, self._leaving, self._restored = tuple(later["steps"]), None, found
            return {**result, "step": found}  # also of a folder that save() or a conversion has made

    def steps(self) -> list[int]:
        """The complete steps in the folder, ascending. No communication; the first rank may see a save before others do."""
        return complete_steps(str(self.folder))

    def wait(self) -> None:
        """Until no save is under way. Raises CheckpointError if the last one has failed, on every rank."""
        with self._lock:
            self._saver.wait()

    def close(self) -> None:
        """Wait, and end the writer process. A later save starts another one."""
        with self._lock:
            self._saver.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            self.close()
        except CheckpointError as error:
            if kind is None:
                raise
            warnings.warn(str(error), CheckpointWarning, stacklevel=2)  # an error is on its way already

    @contextlib.contextmanager
    def _turn(self, call: str) -> Iterator[None]:
        """One call after the other, whichever threads they come from."""
        with self._lock:
            if self._is_busy:
                raise SaveFailedError(
                    f"Checkpointer.{call} was called during another call of this Checkpointer (from a signal handler "
                    "or a state_dict()); set a flag there, and check it between two steps"
                )
            self._is_busy = True
            try:
                yield
            finally:
                self._is_busy = False

    def _metric(self, more: dict[str, Any]) -> dict[str, Any] | None:
        if self._best is None:
            return None
        value = more.get(self._best)
        try:
            number = None if value is None else float(value)
        except (TypeError, ValueError):
            raise UnsavableError(f"{self._best} is {value!r}; best={self._best!r} needs a number or None") from None
        return {"name": self._best, "value": number if number is not None and math.isfinite(number) else None}

    def _leave_branch(self) -> None:
        """Forget the steps of a branch that was left if the last save has put them aside; after one that failed, the next
        one does."""
        if self._leaving is not None and self._saver.saved is self._leaving:
            self._abandoned, self._leaving = (), None

    def _may_be_replaced(self, step: int) -> bool:
        """The step that was restored, one of a branch of the run that was left, or one that is no longer complete."""
        path = str(self.folder / step_name(step))
        return step in (*self._abandoned, self._restored) or (os.path.lexists(path) and bool(find_problems(path)))

    def _choose(self, step: int | Literal["latest"]) -> int | None:
        """The step to restore, the same on every rank."""
        number = None if isinstance(step, str) and step == "latest" else _whole_number(step)
        if number is None and step != "latest":
            raise ArgumentError(f'step is {step!r}; expected "latest", or the number of a step')
        folder = str(self.folder)
        excluded: list[int] = []
        told: list[str] = []
        while True:
            found: int | None = first_rank_decides(
                _RESTORE, lambda: {"step": self._candidate(folder, number, excluded, told.append)}
            )["step"]
            for text in told:
                warnings.warn(text, CheckpointWarning, stacklevel=3)
            told.clear()
            if found is None or self._verify != "checksums":
                return found
            problems = self._damage(found)
            if not problems:
                return found
            text = f"{self.folder / step_name(found)} is damaged: {'; '.join(problems[:5])}"
            if number is not None:
                raise NoSuchStepError(text)
            warnings.warn(f"passed by: {text}", CheckpointWarning, stacklevel=3)
            excluded.append(found)

    def _candidate(
        self, folder: str, step: int | None, excluded: Sequence[int], tell: Callable[[str], None]
    ) -> int | None:
        """On the first rank; ``tell`` is called with why a step is passed by."""
        checks = self._verify != "none"
        known = [
            s for s in step_numbers(folder) if os.path.exists(os.path.join(folder, step_name(s), MANIFEST)) or checks
        ]
        if step is not None:
            if step not in known:
                raise NoSuchStepError(f"{folder} has no step {step}; it has {self.steps()}")
            problems = find_problems(os.path.join(folder, step_name(step))) if checks else []
            if problems:
                raise NoSuchStepError(
                    f"step {step} is not complete: {'; '.join(problems)}; the complete steps are {self.steps()}"
                )
            return step
        for candidate in reversed(known):
            if candidate in excluded:
                continue
            problems = find_problems(os.path.join(folder, step_name(candidate))) if checks else []
            if not problems:
                return candidate
            tell(f"step {candidate} is skipped, because it is not complete: {'; '.join(problems[:5])}")
        return None

    def _damage(self, step: int) -> list[str]:
        """Checksums of all files; each rank checks some."""
        gathering = Gathering(_RESTORE)
        path = self.folder / step_name(step)
        answer = gathering.round(
            lambda: "\n".join(verify_step(path, part=gathering.rank, parts=gathering.world)),
            lambda texts: {"problems": [line for text in texts for line in text.split("\n") if line]},
        )
        found: list[str] = answer["problems"]
        return found


def _whole_number(value: Any) -> int | None:
    """An integer of Python, NumPy or PyTorch; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
