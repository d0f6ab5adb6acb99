"""Every model of the zoo runs its record, read from a file, without recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.plan_zoo.models import MODELS
from tests.runtime.hf import quiet
from vescale import parallelize, plan_zoo
from vescale.static import RecordedProgram, program, report

pytestmark = pytest.mark.helper("dispatch")
DAILY = {"llama"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in DAILY else [pytest.mark.slow]) for n in sorted(MODELS)]
)
def test_a_record_is_run(name: str, tmp_path: Path) -> None:
    MODELS[name].need()
    quiet()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        expected, model = losses(name, None)
        written = program(model)
        written.to_yaml(tmp_path / "record.yaml")
        read = RecordedProgram.from_yaml(tmp_path / "record.yaml")
        assert read == written
        found, model = losses(name, read)
        assert all(map(torch.equal, found, expected))
        told = report(model)
        assert (told.recordings, told.static_steps) == (0, len(found)), told
    finally:
        dist.destroy_process_group()


def losses(name: str, record: RecordedProgram | None) -> tuple[list[torch.Tensor], Any]:
    case = MODELS[name]
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    inputs: dict[str, Any] = {k: v.float() if v.is_floating_point() else v for k, v in case.inputs().items()}
    if case.package == "diffusers":
        inputs = {k: distribute_tensor(v, mesh, [Shard(0), Replicate()]) for k, v in inputs.items()}
    torch.manual_seed(0)
    model = case.build().float()
    parallelize(model, plan_zoo.load(name, mesh), mode="static", record=record)
    found = []
    for seed in range(2):
        model.zero_grad()
        torch.manual_seed(seed)
        loss = case.objective(model, inputs)
        loss.backward()
        found.append(loss.to_local() if isinstance(loss, DTensor) else loss)
    return found, model
