"""Jobs that lose ranks or hosts come back on those that are left, on another mesh, with one device's numbers."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from tests.example_scripts.conftest import Host
from tests.example_scripts.loading import FOLDER, arguments, load, losses_on_ranks
from tests.ranks import RankPools

pytest.importorskip("transformers")


_EPOCH = 1500
"""Steps that are compared at most, of the first epoch."""


def on_one_device(argv: list[str]) -> list[float]:
    """Stock PyTorch alone, with dropout."""
    args, module = arguments("elastic", argv), load("elastic")
    torch.manual_seed(17)
    model = module.make_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = iter(DataLoader(module.make_data(args), args.batch, shuffle=True, drop_last=True))
    losses = []
    for _ in range(min(args.steps, _EPOCH)):
        (ids,) = next(rows)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def records(out: Path) -> list[dict[str, object]]:
    path = out / "losses.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_one_device(out: Path, argv: list[str]) -> None:
    """Every step that any attempt has made, also those that were made twice."""
    expected, found = on_one_device(argv), records(out)
    steps = {int(str(record["step"])) for record in found}
    assert steps == set(range(max(steps) + 1)) and len(expected) == min(len(steps), _EPOCH)
    for record in found:
        step = int(str(record["step"]))
        if step >= _EPOCH:
            break
        assert record["loss"] == pytest.approx(expected[step], rel=3e-5), record


def test_meshes() -> None:
    mesh_text = load("elastic").mesh_text
    assert [mesh_text(ranks, 2, 12) for ranks in (1, 2, 3, 4, 6, 8)] == [
        "dp=1,tp=1",
        "dp=1,tp=2",
        "dp=3,tp=1",
        "dp=2,tp=2",
        "dp=3,tp=2",
        "dp=4,tp=2",
    ]
    with pytest.raises(SystemExit, match=r"--batch 12 cannot be divided among 5 ranks of dp"):
        mesh_text(5, 2, 12)


def run_until(argv: list[str], end: int) -> list[float]:
    """On a rank: as if the job had ended behind step ``end``, with nothing saved at that point."""
    os.environ["WORLD_SIZE"] = str(torch.distributed.get_world_size())
    return losses_on_ranks("elastic", [*argv, "--steps", str(end)])


def test_fewer_ranks_and_more(ranks: RankPools, tmp_path: Path) -> None:
    argv = ["--out", str(tmp_path), "--save-every", "2"]
    first = ranks.run(run_until, argv, 3, world_size=2)[0]
    rest = ranks.run(run_until, argv, 5, world_size=1)[0]
    assert (len(first), len(rest)) == (3, 3)  # step 2 is made twice
    assert [record["mesh"] for record in records(tmp_path)] == ["dp=1,tp=2"] * 3 + ["dp=1,tp=1"] * 3
    assert_one_device(tmp_path, [*argv, "--steps", "5"])


SETTINGS = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Agent:
    """``torchrun`` on one host, with its ranks; their output goes to a file."""

    def __init__(self, log: Path, run: list[str], script: list[str], enter: list[str], **variables: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), *sys.path])}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*enter, sys.executable, "-m", "torch.distributed.run", *run, str(FOLDER / "elastic.py"), *script],
                env={**environment, **SETTINGS, **variables},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ranks(self) -> list[int]:
        """Processes of ranks, of all attempts."""
        return [int(number) for number in re.findall(r"process (\d+), attempt", self.log.read_text())]

    def kill_host(self) -> None:
        """Nobody says good-bye."""
        self.process.kill()
        for pid in self.ranks():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def ended(self, seconds: float = 400) -> str:
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill_host()
            raise AssertionError(self.log.read_text()[-4000:]) from None
        assert code == 0, self.log.read_text()[-4000:]
        return self.log.read_text()


def wait_for_step(out: Path, step: int, agents: list[Agent], mesh: str | None = None) -> None:
    deadline = time.monotonic() + 400
    while not any(r["step"] >= step and mesh in (None, r["mesh"]) for r in records(out)):  # type: ignore[operator]
        assert time.monotonic() < deadline and all(agent.process.poll() is None for agent in agents), [
            agent.log.read_text()[-4000:] for agent in agents
        ]
        time.sleep(0.02)


def meshes_of(found: list[dict[str, object]]) -> list[str]:
    """One after the other."""
    return [name for name, _ in itertools.groupby(str(record["mesh"]) for record in found)]


def wait_for_change(out: Path, number: int, agents: list[Agent]) -> None:
    """Until the job has its ``number``-th mesh, and has saved a step on it."""
    deadline = time.monotonic() + 400
    while len(meshes_of(records(out))) < number:
        assert time.monotonic() < deadline and all(agent.process.poll() is None for agent in agents), [
            agent.log.read_text()[-4000:] for agent in agents
        ]
        time.sleep(0.1)
    wait_for_step(out, int(str(records(out)[-1]["step"])) + 5, agents)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank(tmp_path: Path, victim: int) -> None:
    """torchrun starts the ranks again; the job goes on from the newest complete step. Later, with fewer ranks."""
    argv = ["--out", str(tmp_path), "--save-every", "3"]
    run = ["--standalone", "--nproc-per-node", "4", "--max-restarts", "1"]
    agent = Agent(tmp_path / "log", run, [*argv, "--steps", "30"], [])
    try:
        wait_for_step(tmp_path, 8, [agent])
        (pid,) = re.findall(rf"rank {victim} of .*process (\d+), attempt 0", agent.log.read_text())
        os.kill(int(pid), signal.SIGKILL)
        text = agent.ended()
    finally:
        agent.kill_host()
    (step,) = set(re.findall(r"attempt 1: from step (\d+)", text))
    assert int(step) % 3 == 0 and 6 <= int(step) <= 30
    fewer = Agent(tmp_path / "log of 3", [*run[:2], "3"], [*argv, "--steps", "33"], [])
    assert "rank 2 of dp=3,tp=1" in fewer.ended()
    assert_one_device(tmp_path, [*argv, "--steps", "33"])


@pytest.mark.slow
def test_two_hosts_of_which_one_is_lost_and_comes_back(tmp_path: Path, hosts: list[Host]) -> None:
    """Two agents save to one folder; one goes on alone, on another mesh; both resume when the lost one is back."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"{hosts[0].address}:{free.getsockname()[1]}"
    argv = ["--out", str(tmp_path), "--save-every", "5", "--steps", "1000000"]

    def start(number: int, name: str) -> Agent:
        enter, _, address, variables = hosts[number]
        run = ["--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "5", "--rdzv-backend", "c10d"]
        run += ["--rdzv-endpoint", endpoint, "--rdzv-id", "elastic", "--local-addr", address]
        run += ["--rdzv-conf", f"is_host={1 - number},last_call_timeout=3,keep_alive_interval=1"]
        return Agent(tmp_path / name, run, argv, enter, **variables)

    agents = [start(0, "a"), start(1, "b")]
    try:
        wait_for_step(tmp_path, 8, agents, "dp=2,tp=2")
        agents[1].kill_host()
        reached = max(int(str(record["step"])) for record in records(tmp_path))
        wait_for_step(tmp_path, reached + 3, agents[:1], "dp=1,tp=2")
        agents.append(start(1, "b again"))
        wait_for_change(tmp_path, 3, agents[::2])
    finally:
        for agent in agents:
            agent.kill_host()
    found = records(tmp_path)
    assert meshes_of(found) == ["dp=2,tp=2", "dp=1,tp=2", "dp=2,tp=2"]
    assert_one_device(tmp_path, [*argv, "--steps", str(int(str(found[-1]["step"])) + 1)])
