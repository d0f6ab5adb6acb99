"""Jobs as ``torchrun --standalone`` runs them, without the import of torch in the launcher and in each rank.

The agent, its signal handling and the environment of the ranks are torchrun's. All processes are forked with torch loaded.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from multiprocessing.connection import Connection

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.debug import stopping
from vescale.debug import start_from_environment

__all__ = ["launch"]


def launch(what: str, terminal: str, output: Connection | None, env: dict[str, str]) -> None:
    """Run a job of four ranks from this process, which becomes the leader of a new session.

    Args:
        what: the function of ``stopping`` that each rank runs.
        terminal: the device file of the session's controlling terminal, which is its standard input and output.
        output: where the job writes instead, without a terminal; None: to the terminal.
        env: additional environment variables.
    """
    os.setsid()
    if output is None:  # it becomes the controlling terminal, because the leader of the session opens it
        fds = [os.open(terminal, os.O_RDWR)] * 3
    else:
        fds = [os.open(os.devnull, os.O_RDWR), output.fileno(), output.fileno()]
    for fd, place in zip(fds, range(3)):
        os.dup2(fd, place)
    sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), _writer(1), _writer(2)  # noqa: SIM115
    faulthandler.register(signal.SIGUSR2, 2)  # the ranks inherit it
    os.environ.update(env)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=4,
        run_id="breakpoints",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(),
    )
    elastic_launch(config, _rank)(what)


def _rank(what: str) -> None:
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # multiprocessing puts the null device there
    if "VESCALE_TIMEOUT" in os.environ:
        start_from_environment()  # as `import vescale` does in a new process
    stopping.main(what)


def _writer(fd: int) -> object:
    return open(fd, "w", buffering=1, closefd=False)
