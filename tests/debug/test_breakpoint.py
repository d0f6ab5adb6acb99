"""Breakpoints in torchrun jobs of four ranks, through a pseudo-terminal: each command, each way to leave, no orphan."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import sys
import termios
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from tests.debug.forked_torchrun import launch
from tests.fork_server import fork_context

pytestmark = pytest.mark.waits

ROOT = Path(__file__).parent.parent.parent
LIMIT = 120.0


def _take_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _is_alive(process: Path) -> bool:
    """Not a zombie, which stays until its parent waits for it."""
    return (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"


class Job:
    """A job of four ranks on a pseudo-terminal of its own, or without one, started by torchrun or by its agent."""

    def __init__(
        self, what: str, *, terminal: bool = True, env: dict[str, str] | None = None, torchrun: bool = False
    ) -> None:
        self.mark = f"VESCALE_TEST_JOB={uuid.uuid4()}"
        self.output = ""
        self._seen = 0
        master, slave = pty.openpty()
        self.master, self.slave = master, slave
        self.modes = termios.tcgetattr(slave)
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "PYTHONBREAKPOINT": "vescale.breakpoint"}
        name, _, value = self.mark.partition("=")
        variables = {**quiet, name: value, **(env or {})}
        self.reader = master
        self.process: Popen[bytes] | BaseProcess
        if torchrun:
            launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "tests.debug.stopping"]
            self.process = Popen(
                [sys.executable, "-m", *launcher, what],
                stdin=slave,
                stdout=slave,
                stderr=slave,
                preexec_fn=_take_terminal,  # nothing else runs in the child before exec
                cwd=ROOT,
                env={**os.environ, **variables},
            )
        else:
            context = fork_context()
            reader, writer = (None, None) if terminal else context.Pipe(duplex=False)
            self.process = context.Process(target=launch, args=(what, os.ttyname(slave), writer, variables))
            self.process.start()
            if reader is not None and writer is not None:
                self.reader = os.dup(reader.fileno())
                writer.close()
        assert self.process.pid is not None
        self.launcher = self.process.pid

    def code(self) -> int | None:
        """The exit code of the launcher, if it has ended."""
        return self.process.poll() if isinstance(self.process, Popen) else self.process.exitcode

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def expect(self, pattern: str, limit: float = LIMIT) -> str:
        """Reads on until ``pattern`` is there; what came up to its end."""
        deadline = time.monotonic() + limit
        while True:
            found = re.compile(pattern, re.S).search(self.output, self._seen)
            if found:
                begin, self._seen = self._seen, found.end()
                return self.output[begin : self._seen]
            if not self._read(deadline):
                came = f"{self.output[self._seen :]}\n--- before:\n{self.output[: self._seen]}"
                raise AssertionError(f"no {pattern!r} in\n{came}\n--- {self._state()}")

    def _state(self) -> str:
        """The exit code, or where each process of a job that goes on is: ``launch`` registers the signal."""
        if self.code() is not None or isinstance(self.process, Popen):
            return f"exit code {self.code()}"
        begin = len(self.output)
        for pid in (self.launcher, *self.workers()):
            self.output += f"\nprocess {pid}:\n"
            os.kill(pid, signal.SIGUSR2)
            while self._read(time.monotonic() + 1):
                pass
        return self.output[begin:]

    def _read(self, deadline: float) -> bool:
        while time.monotonic() < deadline:
            if self.reader < 0:
                time.sleep(0.1)
                continue
            if select.select([self.reader], [], [], 0.2)[0]:
                try:
                    data = os.read(self.reader, 65536)
                except OSError:
                    return False
                self.output += data.decode(errors="replace").replace("\r", "")
                return bool(data)
            if self.code() is not None and not select.select([self.reader], [], [], 0)[0]:
                return False
        return False

    def ask(self, line: str) -> str:
        """Sends a line; what comes up to the next prompt."""
        self.send(line + "\n")
        return self.expect(r"\(rank \w+\) ").partition("\n")[2]

    def workers(self) -> list[int]:
        """Every process of the job except the launcher. They are in its session; ranks of torchrun itself have sessions of
        their own, and are found by an environment variable."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != self.launcher:
                with contextlib.suppress(OSError):
                    in_session = os.getsid(int(folder.name)) == self.launcher and _is_alive(folder)
                    if in_session or self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
        return found

    def pid_of(self, rank: int) -> int:
        (pid,) = re.findall(rf"rank {rank} is process (\d+)", self.output)
        return int(pid)

    def end(self, limit: float = 45.0) -> int:
        """Waits for the launcher; its exit code. Nothing of the job may be left, and the terminal as it was found."""
        deadline = time.monotonic() + limit
        while self.code() is None and time.monotonic() < deadline:
            self._read(time.monotonic() + 0.2)
        assert self.code() is not None, f"the job goes on\n{self.output}"
        while self.workers() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not self.workers(), f"orphans\n{self.output}"
        if self.master >= 0:
            assert termios.tcgetattr(self.slave) == self.modes
        return int(self.code() or 0)

    def hang_up(self) -> None:
        """The terminal is gone, as when a window is closed."""
        os.close(self.master)
        self.master = self.reader = -1

    def close(self) -> None:
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        if isinstance(self.process, Popen):
            self.process.wait()
        else:
            self.process.join()
        for fd in {self.master, self.slave, self.reader} - {-1}:
            with contextlib.suppress(OSError):
                os.close(fd)


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def started(*args: object, **kwargs: object) -> Job:
        jobs.append(Job(*args, **kwargs))  # type: ignore[arg-type]
        return jobs[-1]

    yield started
    for job in jobs:
        job.close()


def test_every_command(start: Callable[..., Job]) -> None:
    job = start("in_model", env={"VESCALE_TIMEOUT": "4"})
    begin = job.expect(r"\(rank 0\) ")
    assert "(forward)  -> out = self.down(hidden)" in begin and "not stopped" not in begin, begin
    assert job.ask("p own") == "0\n(rank 0) "
    assert "rank 2 is at" in job.ask("rank 2") and job.ask("p own") == "2\n(rank 2) "
    assert "rank 7 is not stopped here; the stopped ranks are [0, 1, 2, 3]" in job.ask("rank 7")
    answers = job.ask("all own * 10")
    assert all(f"{rank}  {rank * 10}\n" in answers for rank in range(4)), answers
    assert "ZeroDivisionError" in job.ask("all 1 // own")
    assert "element [7, 3] of (10, 20) is 143.0 on rank 0 and -1.0 on rank 2" in job.ask("diff odd")
    assert "equal on all ranks: shape (2, 6), torch.float32, tp=R" in job.ask("diff x")
    assert "parts that ranks share are equal: shape (8, 6)" in job.ask("diff self.up.weight")
    assert "text differs" in job.ask("diff own")
    full = job.ask("full self.up.weight")
    assert "shape (8, 6), torch.float32, tp=S(0)" in full and full.count("[") == 9, full
    assert "own is an int, not a DTensor" in job.ask("full own")
    where = job.ask("where")
    for part in ("in forward of blocks.1", "plan: ", "pending collectives: none", "stopping.py(36)forward()"):
        assert part in where, where
    assert "vescale.breakpoint()" in job.ask("l")
    assert job.ask("!mine = own + 40") == "(rank 2) " and job.ask("p mine") == "42\n(rank 2) "
    assert "NameError" in job.ask("p nothing")
    assert "would separate this rank" in job.ask("interact")
    job.ask("u")
    assert "rank 0 is at" in job.ask("rank 0")
    time.sleep(5)  # longer than VESCALE_TIMEOUT: no time passes at a breakpoint
    stepped = job.ask("n")  # the line holds an all-reduce: all ranks run it
    assert "(forward)  -> return out * 2" in stepped and "not stopped" not in stepped, stepped
    assert "equal on all ranks: shape (2, 6)" in job.ask("diff out")
    assert "rank 3: 3\n" in job.ask("rank all") + job.ask("p own")
    job.send("c\n")
    for _ in range(4):
        job.expect(r"rank \d is done")
    assert job.end() == 0


@pytest.mark.slow
def test_the_block_of_the_page(start: Callable[..., Job]) -> None:
    job = start("of_the_page")
    job.expect(r"\(rank 0\) ")
    job.send("c\n")
    job.expect(r"\(rank 2\) ")
    assert "nan" in job.ask("rank 3") + job.ask("p loss")
    job.send("c\n")
    assert "planted" in job.expect(r"\(rank \d\) ")
    job.send("q\n")
    assert job.end() != 0


LEAVING: dict[str, Callable[[Job], None]] = {
    "q": lambda job: job.send("q\n"),
    "Ctrl-C": lambda job: job.send("\x03"),
    "end of input": lambda job: job.send("\x04"),
    "SIGTERM to a rank": lambda job: os.kill(job.pid_of(2), signal.SIGTERM),
    "SIGTERM to the launcher": lambda job: os.kill(job.launcher, signal.SIGTERM),
    "death of the rank with the prompt": lambda job: os.kill(job.pid_of(0), signal.SIGKILL),
    "dead terminal": Job.hang_up,
    "death of the launcher": lambda job: os.kill(job.launcher, signal.SIGKILL),
}


_QUICK = ("q", "Ctrl-C", "death of the rank with the prompt")


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "way", [way if way in _QUICK else pytest.param(way, marks=pytest.mark.slow) for way in LEAVING]
)
def test_every_way_of_leaving(start: Callable[..., Job], way: str, torchrun: bool) -> None:
    job = start("in_loop", torchrun=torchrun)
    job.expect(r"\(rank 0\) ")
    assert len(job.workers()) >= 4
    LEAVING[way](job)
    assert job.end() != 0
    assert "is done" not in job.output


def attached(job: Job) -> Popen[str]:
    path = job.expect(r"vescale attach \S+").split()[-1]
    return Popen(
        [sys.executable, "-m", "vescale", "attach", path],
        stdin=PIPE,
        stdout=PIPE,
        text=True,
        cwd=ROOT,
    )


def test_a_job_without_a_terminal(start: Callable[..., Job]) -> None:
    """Somebody attaches, and the job goes on; at the next stop the connection is lost, which ends every rank."""
    job = start("in_loop", terminal=False)
    first = attached(job)
    said, _ = first.communicate("all step + 40\nc\n", timeout=LIMIT)
    assert first.returncode == 0 and all(f"{rank}  40\n" in said for rank in range(4)), said
    second = attached(job)
    assert second.stdin is not None and second.stdout is not None
    second.stdin.write("p step\n")
    second.stdin.flush()
    while "1" not in (line := second.stdout.readline()):
        assert line, job.output
    second.kill()
    second.wait()
    assert job.end() != 0 and "is done" not in job.output


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_exception_stops_the_job_where_it_was_raised(start: Callable[..., Job], torchrun: bool) -> None:
    job = start("failing", torchrun=torchrun)
    begin = job.expect(r"\(rank 1\) ")
    assert "ValueError: planted 11" in begin and '-> raise ValueError(f"planted {lost}")' in begin, begin
    assert "(not stopped here: ranks [0, 2, 3])" in begin and job.ask("p lost").startswith("11\n")
    job.send("c\n")
    assert job.end() != 0
    # The agent of forked ranks prints the first error that it finds, which may be that of a rank that has lost this one.
    rest = job.output.rpartition("(rank 1)")[2]
    assert ("ValueError: planted 11" if torchrun else "(exitcode: 1) local_rank") in rest, rest


def test_stages_stop_one_after_the_other(start: Callable[..., Job]) -> None:
    """Each stage's ranks stop together, in each micro-batch, with one prompt at a time."""
    job = start("in_stages")
    met = []
    for _ in range(4):
        begin = job.expect(r"\(rank \d\) ")
        stage, microbatch = (int(n) for n in re.findall(r"in stage (\d), micro-batch (\d)", begin)[0])
        met.append((stage, microbatch))
        assert f"not stopped here: ranks {[[2, 3], [0, 1]][stage]}" in begin, begin
        answers = job.ask("all own")
        assert all((f"{rank}  {rank}\n" in answers) == (rank // 2 == stage) for rank in range(4)), answers
        assert f"in forward of blocks.{stage} (stage {stage}, micro-batch {microbatch})" in job.ask("where")
        job.send("c\n")
    assert sorted(met) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert job.end() == 0 and job.output.count("is done") == 4


@pytest.mark.slow
def test_a_condition_that_one_rank_meets_stops_all(start: Callable[..., Job]) -> None:
    job = start("conditional")
    assert "not stopped" not in job.expect(r"\(rank all\) ")
    assert job.ask("p step") == "".join(f"rank {rank}: 2\n" for rank in range(4)) + "(rank all) "
    job.send("c\n")
    assert job.end() == 0 and job.output.count("is done") == 4


def test_a_step_over_a_line_that_one_rank_runs_keeps_the_prompt(start: Callable[..., Job]) -> None:
    job = start("uneven", env={"VESCALE_TIMEOUT": "4"})
    job.expect(r"\(rank 0\) ")
    assert "rank 0 is at" in job.ask("n")
    running = job.ask("n")  # rank 0 waits in its collective, and the prompt goes to a rank that has stopped
    assert re.search(r"rank 0 is still running .*stopping.py:\d+ \(uneven\)  -> dist.all_reduce\(x\)", running), running
    assert re.search(r"rank 3 has stopped at .*-> if dist.get_rank\(\) != 0", running), running
    assert running.endswith("(rank 1) ")
    assert "tensor([1.])" in job.ask("p x")  # commands still work
    assert "rank 0 is not stopped here" in job.ask("rank 0")
    job.ask("n")  # to their collective
    together = job.ask("n")  # into it: all four go on, and the prompt is rank 0's again
    together = together if together.endswith("(rank 0) ") else job.expect(r"\(rank 0\) ")
    assert "has stopped" not in together.partition("> ")[2], together
    job.send("c\n")
    assert job.end() == 0


def test_all_go_on_from_the_prompt_of_a_running_rank(start: Callable[..., Job]) -> None:
    job = start("uneven")
    job.expect(r"\(rank 0\) ")
    job.ask("n")
    assert job.ask("n").endswith("(rank 1) ")
    job.send("c\n")
    assert job.end() == 0 and job.output.count("is done") == 4
