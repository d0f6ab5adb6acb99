"""Programs that need a process in which vescale was never imported: forked from one that has only torch loaded."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
import types
from multiprocessing.connection import Connection
from typing import NamedTuple

from tests.fork_server import cpu_seconds_of

__all__ = ["Finished", "cpu_seconds_of_fresh", "run_fresh", "start_fresh_server"]

# What test modules import anyway, so that the processes of pytest-xdist lose no time with it.
_PRELOAD = ["torch.distributed.tensor", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
_PRELOAD += ["torch.testing._internal.distributed.fake_pg"]

_SERVER: list[tuple[int, Connection]] = []


class Finished(NamedTuple):
    """What a program has done, with the names of ``subprocess.CompletedProcess``."""

    returncode: int
    stdout: str
    stderr: str


def start_fresh_server(preload: bool) -> None:
    """Call it before the first test module is imported, which imports vescale. ``preload``: load here, before the fork,
    what programs need of torch; otherwise the first program waits for it."""
    if preload:
        _load()
    here, there = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            here.close()
            with contextlib.suppress(EOFError, ConnectionError):  # the test process has ended
                _serve(there)
        except BaseException:  # the test process, which waits for an answer, gets EOFError
            traceback.print_exc()
        finally:
            os._exit(0)
    there.close()
    _SERVER.append((pid, here))


def run_fresh(program: str, *arguments: str) -> Finished:
    """As ``python -c``, with a fork in place of an interpreter that imports torch."""
    _, pipe = _SERVER[0]
    pipe.send((program, arguments, dict(os.environ), os.getcwd()))
    finished: Finished = pipe.recv()
    return finished


def cpu_seconds_of_fresh() -> float:
    """CPU time of the server and of the programs that have ended."""
    return sum(cpu_seconds_of(pid) for pid, _ in _SERVER)


def _load() -> None:
    for name in _PRELOAD:
        importlib.import_module(name)


def _serve(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the test process, which then closes the pipe
    while True:
        program, arguments, environment, folder = pipe.recv()
        _load()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            pid = os.fork()
            if pid == 0:
                pipe.close()
                _run(program, arguments, environment, folder, (out.fileno(), err.fileno()))
            _, status = os.waitpid(pid, 0)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        pipe.send(Finished(os.waitstatus_to_exitcode(status), *texts))


def _run(program: str, arguments: list[str], environment: dict[str, str], folder: str, files: tuple[int, int]) -> None:
    """In the process of the program, which ends here."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in zip((1, 2), files):
        os.dup2(file, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vescale"]:
        del sys.modules[name]  # what conftest.py has imported
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["-c", *arguments]
    code = 0
    try:
        exec(compile(program, "<program>", "exec"), vars(main))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
