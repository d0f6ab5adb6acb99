"""``simulate``: run a training script as some ranks of a job, without devices and without the other ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vescale.errors import SimulationError
from vescale.simulation._findings import Finding, find
from vescale.simulation._records import Ending, RankRecord

__all__ = ["Job", "Simulation", "simulate", "simulate_jobs"]


@dataclass
class Simulation:
    """What simulated ranks have done.

    Attributes:
        world_size: ranks of the job.
        ranks: by rank; those asked for, and those whose values they needed.
        findings: what would stop the job.
        logs: by rank, what its program has printed.
    """

    world_size: int
    ranks: dict[int, RankRecord]
    findings: list[Finding]
    logs: dict[int, str]

    def to_json(self) -> dict[str, Any]:
        """Plain data: ``ranks`` by rank, and ``findings``."""
        return {
            "ranks": {
                str(rank): {
                    "collectives": [
                        {"op": c.op, "axis": c.axis, "ranks": c.ranks, "bytes": c.bytes, "site": c.site}
                        for c in record.collectives
                    ],
                    "peak_bytes": record.peak_bytes,
                    "peak_at": record.peak_at,
                    "categories": record.categories,
                    "host_seconds": record.host_seconds,
                }
                for rank, record in sorted(self.ranks.items())
            },
            "findings": [finding.to_json() for finding in self.findings],
        }


@dataclass(frozen=True)
class Job:
    """A script to simulate; see :func:`simulate`."""

    script: str | os.PathLike[str]
    args: Sequence[str] = ()
    world_size: int = 1
    ranks: Sequence[int] = (0,)
    ranks_per_node: int = 8
    timeout: float = 300.0

    def config(self, folder: Path) -> dict[str, Any]:
        path = Path(self.script)
        if not path.is_file():
            raise SimulationError(f"there is no script {os.fspath(self.script)}")
        wrong = [rank for rank in self.ranks if not 0 <= rank < self.world_size]
        if wrong or not self.ranks:
            raise SimulationError(
                f"ranks {wrong} are not ranks of a job of {self.world_size}; give numbers from 0 to {self.world_size - 1}"
            )
        return {
            "script": str(path),
            "args": list(self.args),
            "world_size": self.world_size,
            "ranks": sorted(set(self.ranks)),
            "ranks_per_node": min(self.ranks_per_node, self.world_size),
            "timeout": self.timeout,
            "folder": str(folder),
        }


def simulate(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    world_size: int,
    ranks: Sequence[int],
    ranks_per_node: int = 8,
    timeout: float = 300.0,
) -> Simulation:
    """Run ``script``, unmodified, once for each of ``ranks``, each in a process that is this rank of ``world_size``.

    No devices and no other ranks are needed: collectives move nothing, but are recorded, and ops on large tensors compute
    nothing. Small tensors and objects that simulated ranks exchange have their values; those of other ranks are taken to be
    the own ones. The script's own effects (files, network) are real.

    Args:
        args: of the script.
        ranks_per_node: from which ``LOCAL_RANK`` follows.
        timeout: seconds that a rank may run, without its waits for others.

    Raises:
        ValueError: no such script; a rank outside of the job.
        RuntimeError: the simulation's own process failed.
    """
    return simulate_jobs([Job(script, args, world_size, ranks, ranks_per_node, timeout)])[0]


def simulate_jobs(jobs: Sequence[Job]) -> list[Simulation]:
    """Several simulations, one after another, for which torch is loaded once."""
    with tempfile.TemporaryDirectory(prefix="vescale-simulate-") as name:
        folders = [Path(name) / str(number) for number in range(len(jobs))]
        configs = [job.config(folder) for job, folder in zip(jobs, folders)]
        for folder in folders:
            folder.mkdir()
        file = Path(name) / "jobs.json"
        file.write_text(json.dumps(configs))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "vescale.simulation._server", str(file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SimulationError(f"the simulation ended with {done.returncode}:\n{done.stderr}")
        return [_read(job, folder) for job, folder in zip(jobs, folders)]


def _read(job: Job, folder: Path) -> Simulation:
    logs = {int(path.stem[5:]): path.read_text(errors="replace") for path in folder.glob("rank_*.log")}
    records = {}
    for rank in sorted(logs):
        result = folder / f"rank_{rank}.json"
        if result.exists():
            records[rank] = RankRecord.from_json(json.loads(result.read_text()))
        else:
            text = "its process was ended: it crashed, ran out of memory, or did not end in time"
            records[rank] = RankRecord(rank, ending=Ending("error", text))
    return Simulation(job.world_size, records, find(records), logs)
