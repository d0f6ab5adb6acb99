"""The server from which ranks and jobs of tests are forked: with torch, vescale and the test modules loaded."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import traceback
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path

__all__ = ["cpu_seconds_of", "cpu_seconds_of_forked", "fork_context", "start_fork_server"]

# DTensor loads torch._dynamo on first use, two seconds in every process if the server has not done it.
_PRELOAD = ["torch", "torch._dynamo", "torch.distributed.tensor", "torch.testing._internal.distributed.fake_pg"]
_PRELOAD += ["vescale.runtime", "vescale.fsdp", "vescale.optim", "vescale.pipeline", "vescale.debug", "vescale.static"]
# What the first `parallelize` of a process loads.
_PRELOAD += ["vescale.placements._checkpoint", "jsonschema", "pytest"]
# Slow to import as well, but only some runs need them: what test modules import when a model is built.
_PRELOAD_WITH = {
    "transformers": "transformers.models.llama.modeling_llama",
    "tests.plan_zoo.models": "diffusers.models.transformers",
}


def fork_context() -> multiprocessing.context.ForkServerContext:
    """The multiprocessing context whose processes are forked from the server. If :func:`start_fork_server` was not called,
    multiprocessing starts a server, which imports torch and vescale."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preload())
    return context


def start_fork_server() -> None:
    """Fork the server of multiprocessing's ``forkserver`` from this process, instead of starting an interpreter for it.

    Call it after the collection of all tests and before the first test: the server then has everything loaded that test
    modules import, and no state that tests leave behind.
    """
    server = forkserver._forkserver
    if server._forkserver_pid is not None or "authkey_r" in inspect.signature(forkserver.main).parameters:
        return  # the server of Python 3.14 authenticates its clients; multiprocessing starts it
    resource_tracker.ensure_running()  # the server's children use that of this process
    preload = _preload()
    with socket.socket(socket.AF_UNIX) as listener:
        address = connection.arbitrary_address("AF_UNIX")
        listener.bind(address)
        listener.listen()
        alive_reader, alive_writer = os.pipe()  # the server ends when this process does
        pid = os.fork()
        if pid == 0:
            try:
                os.close(alive_writer)
                _forget_pytest()
                forkserver.main(listener.fileno(), alive_reader, preload)
            except SystemExit:  # the tests have ended
                pass
            except BaseException:  # the tests get an EOFError that says nothing
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(0)
        os.close(alive_reader)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive_writer, pid


def cpu_seconds_of_forked() -> float:
    """CPU time of the server, of its living children, and of all their descendants that have ended."""
    server = forkserver._forkserver._forkserver_pid
    if server is None:
        return 0.0
    return sum(map(cpu_seconds_of, (server, *map(int, _words(f"/proc/{server}/task/{server}/children")))))


def cpu_seconds_of(process: int) -> float:
    """CPU time of a process and of its children that have ended."""
    ticks = sum(map(int, _words(f"/proc/{process}/stat")[-39:-35]))  # utime, stime, cutime, cstime
    return ticks / os.sysconf("SC_CLK_TCK")


def _words(file: str) -> list[str]:
    try:
        return Path(file).read_text().split()
    except OSError:  # the process has ended, or this is no Linux
        return []


def _preload() -> list[str]:
    return [*_PRELOAD, *(name for module, name in _PRELOAD_WITH.items() if module in sys.modules)]


def _forget_pytest() -> None:
    """Restore the streams and hooks of the interpreter that pytest has replaced. Its import hook stays, so that failed
    assertions in ranks have the same messages."""
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            # Handlers without a stream are torch's for traces, which close it. Others look for sys.stderr in each call.
            has_stream = "stream" in vars(handler) and handler.stream is not None
            if (
                has_stream
                and isinstance(handler, logging.StreamHandler)
                and not isinstance(handler, logging.FileHandler)
            ):
                handler.setStream(sys.__stderr__)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    signal.signal(signal.SIGINT, signal.default_int_handler)
