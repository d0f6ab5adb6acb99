"""Ranks whose strings have different hashes, as those of a launcher do (the ranks of other tests share them): the order of a
set differs then, and what ranks do and compare must not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from tests.plan_zoo.models import MODELS
from tests.runtime.hf import quiet
from vescale import parallelize, plan_zoo

quiet()
torch.set_num_threads(1)
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
for name in sys.argv[3:]:
    case = MODELS[name]
    torch.manual_seed(3)
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in case.inputs().items()}
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize(case.build().float(), plan_zoo.load(name, mesh), mode="static")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(4):
        length = 8 - 2 * (number % 2)
        batch = {key: x[:, :length] if x.shape == inputs["input_ids"].shape else x for key, x in inputs.items()}
        torch.manual_seed(number)
        loss = case.objective(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(name, loss.item())
"""


@pytest.mark.slow
@pytest.mark.helper("dispatch")
def test_static_models(tmp_path: Path) -> None:
    names = ["llama", "gpt2", "gpt_oss", "mixtral"]
    ranks = []
    for rank in range(2):
        environment = {**os.environ, "PYTHONHASHSEED": str(11 + rank), "VESCALE_CHECK_EVERY": "1"}
        command = [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store"), *names]
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    found = [process.communicate(timeout=120) for process in ranks]
    assert not any(process.returncode for process in ranks), found
    lines = [out.splitlines() for out, _ in found]
    assert [line.split()[0] for line in lines[0]] == names and lines[0] == lines[1]
