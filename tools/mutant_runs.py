"""Runs tests in copies of the working tree for ``tools/mutate.py``, with limits that other work does not change.

A run is limited by the CPU time of its processes, and by the time in which none of them could run: a loop without end
and a rank that waits for ever are both ended, while a run that only gets little of a busy machine is not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

__all__ = ["NO_TESTS", "Copies", "Usage", "end", "failures", "usage"]

MARK = "VESCALE_MUTANT"  # in the environment of every process of a run, so that all of them are found and ended
IDLE_LIMIT = 300.0  # seconds without a runnable process; collectives of tests fail after 60, cases on ranks after 300
NO_TESTS = 5  # pytest's exit code
_TICKS = os.sysconf("SC_CLK_TCK")


class Usage:
    """CPU time of the processes of a run, ended ones included, and how long none of them could run."""

    def __init__(self, token: str) -> None:
        self.cpu = 0.0
        self.idle = 0.0
        self._token = token
        self._seen: dict[int, float] = {}
        self._last = time.monotonic()

    def update(self) -> None:
        now, runnable = time.monotonic(), False
        for process in processes(self._token):
            with contextlib.suppress(OSError, IndexError, ValueError):
                state, cpu = usage(process)
                self._seen[process] = max(cpu, self._seen.get(process, 0.0))
                runnable = runnable or state in "RD"
        cpu = sum(self._seen.values())
        # A process that ran between two looks sleeps at both of them.
        if runnable or cpu - self.cpu > 0.05 * (now - self._last):
            self.idle = 0.0
        else:
            self.idle += now - self._last
        self.cpu, self._last = cpu, now


def usage(process: int) -> tuple[str, float]:
    """The state of a process as the kernel abbreviates it, and the CPU seconds of all of its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    states = "".join(
        task.read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{process}/task").glob("*/stat")
    )
    return "R" if "R" in states else fields[0], (int(fields[11]) + int(fields[12])) / _TICKS


def processes(token: str) -> Iterator[int]:
    """Every process that was started, directly or not, with this token in its environment."""
    mark = f"{MARK}={token}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def end(process: subprocess.Popen[str], token: str) -> None:
    """Kill the process, its group, and whatever else was started with its environment."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for other in processes(token):
        with contextlib.suppress(OSError):
            os.kill(other, signal.SIGKILL)


class Copies:
    """Temporary copies of the working tree, one for each job, and the processes that run in them."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self._folder = root, folder
        self._local = threading.local()
        self._lock = threading.Lock()
        self._count = 0
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._sound: dict[str, bool] = {}
        self.stopped = False

    def here(self) -> Path:
        """The copy of the calling thread."""
        if not hasattr(self._local, "copy"):
            with self._lock:
                self._count += 1
                copy = self._folder / f"copy{self._count}"
            listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
            files = subprocess.run(listed, cwd=self._root, capture_output=True, text=True, check=True)
            built = [str(path.relative_to(self._root)) for path in (self._root / "vescale" / "csrc").glob("*.so")]
            for file in filter(None, [*files.stdout.split("\0"), *built]):
                if (self._root / file).is_file():
                    (copy / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(self._root / file, copy / file)
            self._warm(copy)
            self._local.copy = copy
        return self._local.copy

    def _warm(self, copy: Path) -> None:
        """Write the bytecode of the package and the tests, which runs read: compiling takes longer than most tests."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
        subprocess.run(
            collect, cwd=copy, env=environment | {"PYTHONPATH": str(copy)}, stdout=subprocess.DEVNULL, check=False
        )

    def run_tests(self, tests: Sequence[str], limit: float, left_out: Collection[str] = ()) -> tuple[int | None, str]:
        """Exit code of pytest, which stops at the first failure, and its output; None after ``limit`` seconds of CPU time
        or :data:`IDLE_LIMIT` seconds in which no process could run. Ends every process it started."""
        copy = self.here()
        token = f"{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
        environment = {name: value for name, value in os.environ.items() if name != "VESCALE_NIGHTLY"}
        environment |= {"PYTHONPATH": str(copy), MARK: token, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-m", "not slow", "-p", "no:cacheprovider", "--tb=line"]
        command += [word for test in left_out for word in ("--deselect", test)]
        with tempfile.TemporaryFile("w+") as output:
            with self._lock:
                if self.stopped:
                    raise KeyboardInterrupt
                process = subprocess.Popen(
                    [*command, *tests],
                    cwd=copy,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._running[token] = process
            used = Usage(token)
            code: int | None = None
            try:
                while used.cpu <= limit and used.idle <= IDLE_LIMIT:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        code = process.wait(1.0)
                        break
                    used.update()
            finally:
                end(process, token)
                self._running.pop(token, None)
            with self._lock:
                if self.stopped:
                    raise KeyboardInterrupt  # the processes were ended, their exit code means nothing
            output.seek(0)
            return code, output.read()

    def passes(self, test: str, limit: float) -> bool:
        """Whether a test passes in the calling thread's copy, in which nothing is planted now; run once a test."""
        if test not in self._sound:
            self._sound[test] = self.run_tests([test], limit)[0] == 0
        return self._sound[test]

    @property
    def broken(self) -> list[str]:
        """Tests that were seen to fail without a mutant."""
        return sorted(test for test, sound in self._sound.items() if not sound)

    def stop(self) -> None:
        with self._lock:
            self.stopped = True
            for token, process in list(self._running.items()):
                end(process, token)


def failures(output: str) -> list[str]:
    """Tests (or files, where the collection failed) that pytest's summary names."""
    words = [line.split(" ", 1)[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return [text.split(" - ")[0].strip() for text in words]
