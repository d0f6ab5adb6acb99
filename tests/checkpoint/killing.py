"""Jobs that save step after step while one of their processes is killed by signal 9, and what is in the folder then.

``python -m tests.checkpoint.killing 1000 0`` draws a thousand moments with seed 0 and prints how often which step was there.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vescale.checkpoint import Checkpointer, CheckpointError, verify

__all__ = ["Point", "check_folder", "draw_points", "filled", "kill_once", "model_of"]

FIRST, LAST = 3, 5
"""Steps that a job saves; 1 and 2 are there before, and two are kept."""
VICTIMS = ("rank 0", "rank 1", "writer of rank 0", "writer of rank 1")


def model_of(step: int, size: int = 40) -> nn.Module:
    """Every value tells the step."""
    model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(step)
    return model


def filled(folder: Path, size: int = 40) -> Path:
    """Steps 1 and 2."""
    with Checkpointer(folder, asynchronous=False, keep=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, model=model_of(step, size))
    return folder


@dataclass(frozen=True)
class Point:
    """Who is killed when.

    Attributes:
        victim: one of ``VICTIMS``.
        asynchronous: how the job saves.
        moment: in the time that a job without a victim takes for its saves; 0 is the beginning, and 1 the end.
        size: rows and columns of the two matrices that are saved.
        delay: seconds until a launcher kills the others; None: they go on, with another writer.
    """

    victim: str
    asynchronous: bool
    moment: float
    size: int
    delay: float | None


def draw_points(number: int, seed: int) -> list[Point]:
    """All victims alike; ranks in both modes."""
    draw = random.Random(seed)
    points = []
    for index in range(number):
        victim = VICTIMS[index % len(VICTIMS)]
        asynchronous = victim.startswith("writer") or index // len(VICTIMS) % 2 == 0
        delay = None if victim.startswith("writer") and index // len(VICTIMS) % 2 else draw.random() * 0.03
        points.append(Point(victim, asynchronous, draw.random() * 1.05, draw.choice([40, 200, 700]), delay))
    return points


def _rank(folder: Path, rank: int, point: Point, ready: int, go: int) -> None:
    """A rank of two: tells who its writer is, and each step that is saved."""
    torch.set_num_threads(1)
    store = f"file://{folder}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    checkpoints = Checkpointer(folder, asynchronous=point.asynchronous, keep=2)
    writer: Any = checkpoints._saver._writer
    if writer is not None:
        writer._start()
    os.write(ready, b"%d\n" % (writer.pid if writer is not None else 0))
    os.read(go, 1)
    for step in range(FIRST, LAST + 1):
        with contextlib.suppress(CheckpointError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoints.save(step, model=model_of(step, point.size))
            checkpoints.wait()
            os.write(ready, b"saved %d\n" % step)
    checkpoints.close()


class _Job:
    """Two ranks, forked."""

    def __init__(self, folder: Path, point: Point) -> None:
        self.pids: list[int] = []
        self.outputs = []
        go, self.start = os.pipe()
        for rank in range(2):
            output, ready = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    os.close(self.start)
                    _rank(folder, rank, point, ready, go)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            os.close(ready)
            self.pids.append(pid)
            self.outputs.append(os.fdopen(output))
        os.close(go)
        self.writers = [int(output.readline()) for output in self.outputs]

    def run(self, point: Point | None, duration: float) -> float:
        """Until all have ended; seconds that the saves took."""
        begin = time.monotonic()
        os.write(self.start, b"gg")
        if point is not None:
            time.sleep(point.moment * duration)
            number = int(point.victim[-1])
            pid = (self.writers if point.victim.startswith("writer") else self.pids)[number]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if point.delay is not None:
                time.sleep(point.delay)
                for pid in self.pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        for pid in self.pids:
            os.waitpid(pid, 0)
        return time.monotonic() - begin

    def saved(self) -> int:
        """The last step that a rank was told to be saved; 2: none. Waits until the writers are gone."""
        found = 2
        for output in self.outputs:
            with output:
                found = max([found, *(int(line.split()[1]) for line in output.read().splitlines())])
        os.close(self.start)
        deadline = time.monotonic() + 30
        while any(pid and _runs(pid) for pid in self.writers):
            assert time.monotonic() < deadline, "a writer outlives its rank"
            time.sleep(0.01)
        return found


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def measure(folder: Path, point: Point) -> float:
    """Seconds of a job's saves if nobody is killed."""
    filled(folder, point.size)
    job = _Job(folder, point)
    seconds = job.run(None, 0)
    assert job.saved() == LAST, "a job without a victim has not saved"
    shutil.rmtree(folder)
    os.unlink(f"{folder}.store")
    return seconds


def kill_once(folder: Path, point: Point, duration: float) -> int:
    """Run a job with a victim; the newest step that is there afterwards."""
    filled(folder, point.size)
    job = _Job(folder, point)
    job.run(point, duration)
    saved = job.saved()
    newest = check_folder(folder, saved, point.size)
    shutil.rmtree(folder)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{folder}.store")
    return newest


def check_folder(folder: Path, saved: int, size: int = 40, last: int = LAST) -> int:
    """There are complete steps, at least that which ranks know to be saved; every step that is taken for complete has its
    values; a further save works and cleans up. Returns the newest."""
    with Checkpointer(folder, asynchronous=False, keep=2) as checkpoints:
        steps = checkpoints.steps()
        assert len(steps) >= 2 and saved <= steps[-1] <= last, (steps, saved)
        for step in steps:
            model = model_of(-1, size)
            found = checkpoints.restore(model=model, step=step, rng=False)
            assert found is not None and found["step"] == step
            assert all((p == step).all() for p in model.parameters()), step
            assert not verify(folder / f"step-{step}")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is passed by
            found = checkpoints.restore(model=model, rng=False)
            assert found is not None and found["step"] == steps[-1]
        checkpoints.save(9, model=model_of(9, size))
        assert checkpoints.steps() == [steps[-1], 9]
    assert sorted(os.listdir(folder)) == sorted([".lock", "latest", f"step-{steps[-1]}", "step-9"])
    return steps[-1]


def main() -> None:
    number, seed = int(sys.argv[1]), int(sys.argv[2])
    outcomes: dict[str, Counter[int]] = {}
    durations: dict[tuple[bool, int], list[float]] = {}
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        for count, point in enumerate(draw_points(number, seed)):
            known = durations.setdefault((point.asynchronous, point.size), [])
            if len(known) < 3 or count % 100 < 2:
                known.append(measure(Path(name, "run"), point))
            key = f"{point.victim}, {'asynchronous' if point.asynchronous else 'synchronous'}"
            try:
                newest = kill_once(Path(name, f"run {count}"), point, sorted(known)[len(known) // 2])
                outcomes.setdefault(key, Counter())[newest] += 1
            except AssertionError:
                failures += 1
                print(point, traceback.format_exc(), flush=True)
            if (count + 1) % 100 == 0:
                print(f"{count + 1} points, {failures} failures", flush=True)
    for key, counter in sorted(outcomes.items()):
        print(f"{key}: {sum(counter.values())} points, newest step afterwards {dict(sorted(counter.items()))}")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
