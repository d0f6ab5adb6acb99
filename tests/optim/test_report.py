"""Reports of optimizers: planned numbers against those of the states that a step makes."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.device import device_type
from tests.ranks import RankPools
from vescale.optim import AdamW8bit, ParameterReport, report

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True, "fused": True}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adafactor, {}),
]


def model_of() -> nn.Module:
    model = nn.Sequential(nn.Linear(70, 64), nn.Linear(64, 3))
    model[1].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("kind, options", OPTIMIZERS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_planned_bytes_of_stock_optimizers(kind: Any, options: dict[str, Any]) -> None:
    model = model_of()
    optimizer = kind(model.named_parameters(), **options)
    planned = report(optimizer, file=io.StringIO())
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    assert planned == report(optimizer, file=io.StringIO())
    assert [one.name for one in planned.parameters] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert planned.step_bytes == 0
    if kind is not torch.optim.Adagrad:  # which makes states of frozen parameters
        assert planned.parameters[3].state_bytes == 0
    held = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    assert planned.state_bytes == sum(value.nbytes for value in held)
    assert {one.algorithm for one in planned.parameters} == {kind.__name__.lower()}


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of()
    found = report(AdamW8bit(model.parameters()))
    printed = capsys.readouterr().out
    assert [line.rstrip() for line in printed.splitlines()] == str(found).splitlines()
    first = found.parameters[0]
    assert first == ParameterReport("group 0, parameter 0", "adamw8bit", None, 2 * 4480 + 2 * 4 * 18 + 4, 0)
    assert found.parameters[1].algorithm == "adamw" and found.parameters[1].state_bytes == 8 * 64 + 4
    assert f"{found.state_bytes:,}" in printed.splitlines()[-1]
    assert len(printed.splitlines()) == 6


def test_an_optimizer_that_knows() -> None:
    class Owned(torch.optim.SGD):
        def parameter_reports(self) -> list[ParameterReport]:
            return [ParameterReport("w", "muon", (0, 3), 10, 20), ParameterReport("v", "muon", 2, 1, 2)]

    found = report(Owned([nn.Parameter(torch.zeros(2))], lr=0.1), file=io.StringIO())
    assert (found.state_bytes, found.step_bytes) == (11, 22)
    assert "0, 3" in str(found).splitlines()[1]


def test_a_step_that_needs_values() -> None:
    with pytest.raises(NotImplementedError, match="LBFGS has no states yet"):
        report(torch.optim.LBFGS([nn.Parameter(torch.zeros(2))]), file=io.StringIO())


def sharded() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    p = nn.Parameter(distribute_tensor(torch.randn(5, 64), mesh, [Shard(0)]))
    rows = 3 if dist.get_rank() == 0 else 2
    file = io.StringIO()
    (one,) = report(torch.optim.AdamW([p]), file=file).parameters
    assert one.state_bytes == 2 * rows * 64 * 4 + 4 and one.step_bytes == 0
    assert bool(file.getvalue()) == (dist.get_rank() == 0)
    (one,) = report(torch.optim.Muon([p]), file=file).parameters
    assert one.step_bytes == (5 - rows) * 64 * 2
    optimizer = torch.optim.AdamW([p])
    p.grad = DTensor.from_local(torch.ones(rows, 64), mesh, [Shard(0)], shape=p.shape, stride=p.stride())
    optimizer.step()
    assert report(optimizer, file=file).parameters[0].state_bytes == 2 * rows * 64 * 4 + 4


def test_sharded_parameters(ranks: RankPools) -> None:
    ranks.run(sharded, world_size=2)
