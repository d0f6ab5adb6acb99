"""``python -m tests.debug.forked_torchrun WHAT``: torchrun's agent with ranks that are forked with torch loaded.

The agent, its signal handling and the environment of ranks are those of ``torchrun --standalone``; a rank starts in
0.1 s instead of 4 s of CPU time.
"""

from __future__ import annotations

import sys

import torch._dynamo  # noqa: F401  # DTensor loads it on first use
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.debug import stopping

__all__: list[str] = []


def rank(what: str) -> None:
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # multiprocessing puts the null device there
    stopping.main(what)


if __name__ == "__main__":
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
    elastic_launch(config, rank)(sys.argv[1])
