"""Processes that are killed while they save, disks that are full, folders that cannot be written to or vanish: what was
saved before is always there, and a step that is there is right."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.killing import check_folder, filled, model_of
from tests.fork_server import fork_context
from vescale.checkpoint import Checkpointer, CheckpointError, CheckpointWarning, _disk, save, verify

# What changes files and folders: a child process ends before one of these, or in the middle of a write.
CHANGES = ("make_folder", "create", "write", "sync", "sync_folder", "rename", "exchange", "remove_tree")


def in_child(work: Callable[[], None]) -> int:
    """The exit status of a forked process that does ``work``: 0, 1 after an exception, or minus a signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def counting(act: Callable[[int], None]) -> None:
    """``act(n)`` before the n-th change; a write is two changes."""
    count = 0

    def wrapped(name: str, original: Any) -> Any:
        def change(*args: Any) -> Any:
            nonlocal count
            count += 1
            act(count)
            if name == "write":
                half = memoryview(args[1])[: len(args[1]) // 2]
                original(args[0], half)
                count += 1
                act(count)
                return original(args[0], memoryview(args[1])[len(half) :])
            return original(*args)

        return change

    for name in CHANGES:
        setattr(_disk, name, wrapped(name, getattr(_disk, name)))


def kill_at(point: int) -> Callable[[int], None]:
    def act(count: int) -> None:
        if count == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def check(folder: Path, allowed: set[int]) -> int:
    """See :func:`check_folder`."""
    newest = check_folder(folder, min(allowed), last=max(allowed))
    assert newest in allowed
    return newest


def save_three(folder: Path) -> None:
    with Checkpointer(folder, asynchronous=False, keep=2) as checkpoints:
        checkpoints.save(3, model=model_of(3))


def points(folder: Path) -> int:
    """How many changes a save makes."""
    counted = folder.parent / "count"

    def work() -> None:
        counting(lambda count: counted.write_text(str(count)) and None)
        save_three(folder)

    assert in_child(work) == 0
    return int(counted.read_text())


def test_killed_at_every_change(tmp_path: Path) -> None:
    """Synchronous, with the step that is pruned: files, manifest, names, pointer, removal."""
    number = points(filled(tmp_path / "counted"))
    assert number > 15
    outcomes = []
    for point in range(1, number + 1):
        folder = filled(tmp_path / str(point))

        def work(folder: Path = folder, point: int = point) -> None:
            counting(kill_at(point))
            save_three(folder)

        assert in_child(work) == -signal.SIGKILL
        outcomes.append(check(folder, {2, 3}))
        shutil.rmtree(folder)
    assert outcomes == sorted(outcomes) and {2, 3} == set(outcomes)  # there is one change that makes the step


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file can grow beyond 3 MiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_room(tmp_path: Path, asynchronous: bool, full_disk: None) -> None:
    folder = tmp_path / "run"
    with Checkpointer(folder, asynchronous=asynchronous, keep=2) as checkpoints:
        checkpoints.save(1, model=model_of(1, 8))
        checkpoints.wait()

        def fails() -> None:
            checkpoints.save(2, model=model_of(2, 8), filler=list(range(500_000)))
            checkpoints.wait()

        with pytest.raises(
            CheckpointError, match=r"step-2 was not saved; earlier steps are unchanged: .*File too large"
        ):
            if asynchronous:
                with pytest.warns(CheckpointWarning, match="step-2 was not saved"):
                    fails()
            else:
                fails()
        checkpoints.save(3, model=model_of(3, 8))
        checkpoints.wait()
        assert checkpoints.steps() == [1, 3]
    assert sorted(os.listdir(folder)) == [".lock", "latest", "step-1", "step-3"]


def test_disk_full_errors_name_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = filled(tmp_path / "run")

    def full(descriptor: int, data: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_disk, "write", full)
    with Checkpointer(folder, asynchronous=False, keep=2) as checkpoints:
        with pytest.raises(CheckpointError, match="No space left on device"):
            checkpoints.save(3, model=model_of(3))
        monkeypatch.undo()
        assert check(folder, {2}) == 2


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="cannot be written to"):
        Checkpointer(tmp_path / "file" / "run", asynchronous=False).save(1, model=model_of(1))

    def read_only(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(_disk, "make_folder", read_only)
    with pytest.raises(CheckpointError, match=r"cannot be written to: .*Permission denied"):
        Checkpointer(tmp_path / "run", asynchronous=False).save(1, model=model_of(1))


def test_a_folder_that_is_removed(tmp_path: Path) -> None:
    folder = filled(tmp_path / "run")
    with Checkpointer(folder, keep=2) as checkpoints:
        checkpoints.save(3, model=model_of(3))
        checkpoints.wait()
        shutil.rmtree(folder)
        with (
            pytest.warns(CheckpointWarning, match="was not saved"),
            pytest.raises(CheckpointError, match="No such file"),
        ):
            checkpoints.save(4, model=model_of(4))
            checkpoints.wait()
        checkpoints.save(5, model=model_of(5))
        checkpoints.wait()
        assert checkpoints.steps() == [5]
        assert (
            in_child(lambda: Checkpointer(folder, asynchronous=False).save(6, model=model_of(6))) == 1
        )  # the lock is held


def test_a_forked_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Workers of a DataLoader may live on for a while when their job has been killed."""
    ready, done = os.pipe(), os.pipe()

    def job() -> None:
        checkpoints = Checkpointer(tmp_path, asynchronous=False)
        checkpoints.save(1, model=model_of(1))
        if os.fork() == 0:  # the worker
            os.close(done[1])
            os.write(ready[1], b"x")
            os.read(done[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(job) == -signal.SIGKILL
    with Checkpointer(tmp_path, asynchronous=False) as checkpoints:
        checkpoints.save(2, model=model_of(2))
    assert checkpoints.steps() == [1, 2]
    for descriptor in (*ready, *done):
        os.close(descriptor)


def saves_step_four(folder: Path) -> None:
    Checkpointer(folder, asynchronous=False).save(4, note=1)


def test_two_jobs_in_one_folder(tmp_path: Path) -> None:
    folder = filled(tmp_path / "run")
    with Checkpointer(folder, asynchronous=False, keep=2) as checkpoints:
        checkpoints.save(3, model=model_of(3))
        with (
            ProcessPoolExecutor(1, fork_context()) as other,
            pytest.raises(CheckpointError, match=f"another job is saving to.*{os.getpid()}"),
        ):
            other.submit(saves_step_four, folder).result()
        with Checkpointer(folder, asynchronous=False, keep=2) as own:  # of the same process
            own.save(4, model=model_of(4))
    assert Checkpointer(folder).steps() == [3, 4]


def test_a_step_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    folder = filled(tmp_path / "run")
    with Checkpointer(folder, asynchronous=False, keep=3) as checkpoints:
        with pytest.raises(CheckpointError, match="step-2 already exists"):
            checkpoints.save(2, model=model_of(7))
        checkpoints.restore(model=model_of(0), step=1)
        with pytest.warns(CheckpointWarning, match=r"newer than the step that was restored"):
            checkpoints.save(4, model=model_of(4))
        assert checkpoints.steps() == [1, 4]
        checkpoints.restore(model=model_of(0), step=1)
        checkpoints.save(4, model=model_of(6))
        model = model_of(0)
        checkpoints.restore(model=model)
        assert all((p == 6).all() for p in model.parameters())


def test_the_writer_lives_and_ends_with_its_process(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path / "run", keep=2)
    pids = set()
    for step in range(3):
        checkpoints.save(step, model=model_of(step))
        checkpoints.wait()
        pids.add(checkpoints._saver.writer_pid)
    assert len(pids) == 1
    pid = pids.pop()
    assert pid is not None and "torch" not in Path(f"/proc/{pid}/maps").read_text()
    checkpoints.close()
    assert not Path(f"/proc/{pid}").exists()
    checkpoints.save(3, model=model_of(3))  # starts another one
    checkpoints.close()
    assert checkpoints.steps() == [2, 3]


def test_one_shot_is_exchanged_as_a_whole(tmp_path: Path) -> None:
    save(tmp_path / "one", model=model_of(1))
    with pytest.raises(CheckpointError, match="already exists"):
        save(tmp_path / "one", model=model_of(2))

    def count(n: int) -> None:
        (tmp_path / "count").write_text(str(n))

    def counted() -> None:
        counting(count)
        save(tmp_path / "other", model=model_of(2))

    assert in_child(counted) == 0
    number = int((tmp_path / "count").read_text()) + 2
    for point in range(1, number + 1):

        def work(point: int = point) -> None:
            counting(kill_at(point))
            save(tmp_path / "one", model=model_of(2), overwrite=True)

        in_child(work)
        assert not verify(tmp_path / "one")
