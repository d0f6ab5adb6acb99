"""Batch normalization over sharded batches, images and channels against one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.ranks import RankPools, run_cases
from tests.runtime.llama import make_mesh
from vescale import parallelize
from vescale.comm import record_comms
from vescale.plans import Plan
from vescale.runtime import implicit_communication

R, S0, S1 = Replicate(), Shard(0), Shard(1)


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def batches(*shape: int) -> list[torch.Tensor]:
    """Far from zero and different on every row, so that ranks' statistics differ."""
    generator = torch.Generator().manual_seed(4)
    scale = torch.arange(1, shape[0] + 1, dtype=torch.float64).view(-1, *[1] * (len(shape) - 1))
    return [100 + step + scale * torch.randn(shape, dtype=torch.float64, generator=generator) for step in range(3)]


def same(mesh: Any, kind: str, options: dict[str, Any], shape: Any, placed: Any, channels: Any = (R, R)) -> None:
    """Three steps of training, then evaluation: values, gradients, running statistics."""
    reference, model = (Normed(getattr(nn, kind)(shape[1], dtype=torch.float64, **options)) for _ in range(2))
    with torch.no_grad():
        for module in (reference, model):
            for seed, parameter in enumerate(module.parameters()):
                parameter.copy_(torch.randn(shape[1], generator=torch.Generator().manual_seed(seed)))
    plan = Plan(mesh)
    plan.shard("<in:x>", dict(zip(("dp", "tp"), placed)))
    if channels != (R, R):
        plan.shard(r"norm\.(weight|bias|running_mean|running_var)", dict(zip(("dp", "tp"), channels)))
    parallelize(model, plan, strict=True)
    for step, x in enumerate([*batches(*shape), batches(*shape)[0]]):
        if step == 3:
            reference.eval(), model.eval()
        expected_in, found_in = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected, found = reference(expected_in), model(found_in)
        assert found.placements == tuple(placed)
        torch.testing.assert_close(whole(found), expected)
        weight = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        expected.backward(weight)
        found.backward(distribute_tensor(weight, mesh, placed, src_data_rank=None))
        torch.testing.assert_close(found_in.grad, expected_in.grad)
        for own, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(own.grad), other.grad)
        for own, other in zip(model.buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(whole(own), other)
    assert not implicit_communication(model)


def normalizations() -> int:
    mesh = make_mesh(dp=2, tp=2)
    image, flat, volume = (5, 4, 3, 6), (6, 3), (2, 3, 2, 3, 4)
    return run_cases(
        same,
        [
            (mesh, "BatchNorm2d", {}, image, (S0, R)),
            (mesh, "BatchNorm2d", {}, image, (S0, S0)),
            (mesh, "BatchNorm2d", {}, (3, 4, 2, 2), (S0, S0)),  # a rank without rows
            (mesh, "BatchNorm2d", {"momentum": None}, image, (S0, Shard(3))),
            (mesh, "BatchNorm2d", {"affine": False}, image, (R, Shard(2))),
            (mesh, "BatchNorm2d", {"track_running_stats": False}, image, (S0, R)),
            (mesh, "BatchNorm1d", {"eps": 0.1}, flat, (S0, S0)),
            (mesh, "BatchNorm3d", {}, volume, (S0, R)),
            (mesh, "BatchNorm2d", {}, image, (S0, S1), (R, S0)),
            (mesh, "BatchNorm1d", {}, (5, 6), (S0, S1), (R, S0)),
            (mesh, "BatchNorm2d", {}, image, (R, R)),
        ],
    )


def test_like_one_device(ranks: RankPools) -> None:
    assert set(ranks.run(normalizations)) == {11}


def collectives() -> None:
    mesh = make_mesh(dp=2, tp=2)
    model = Normed(nn.BatchNorm2d(6))
    parallelize(model, Plan(mesh).shard("<in:x>", {"dp": S0}), strict=True)
    with record_comms() as forward:
        found = model(torch.randn(4, 6, 2, 2).requires_grad_())
    assert forward.count() == forward.count("all_gather_v") == 1
    assert forward.bytes() == (2 * 6 + 1) * 4  # from one other rank
    model.eval()
    with record_comms() as evaluation:
        model(torch.randn(4, 6, 2, 2))
    assert evaluation.count() == 0
    with record_comms() as backward:
        found.square().mean().backward()
    asked = [event for event in backward.records if event.requester.startswith("batch_norm")]
    assert [event.op for event in asked] == ["all_reduce"]


def test_collectives(ranks: RankPools) -> None:
    ranks.run(collectives)


def half() -> None:
    mesh = make_mesh(dp=4)
    torch.manual_seed(0)
    x = 3 + torch.randn(8, 4, 5, 5)
    reference, model = Normed(nn.BatchNorm2d(4)), Normed(nn.BatchNorm2d(4))
    parallelize(model, Plan(mesh).shard("<in:x>", {"dp": S0}))
    expected_in, found_in = (x.bfloat16().requires_grad_() for _ in range(2))
    expected, found = reference(expected_in), model(found_in)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(whole(found), expected)
    expected.float().pow(3).sum().backward()
    found.float().pow(3).sum().backward()
    torch.testing.assert_close(found_in.grad, expected_in.grad, rtol=0.02, atol=0.5)
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(own.grad), other.grad, rtol=1e-2, atol=1e-2)


def test_half_precision_activations(ranks: RankPools) -> None:
    ranks.run(half)


def one_value() -> None:
    model = Normed(nn.BatchNorm1d(3))
    parallelize(model, Plan(make_mesh(dp=4)).shard("<in:x>", {"dp": S0}))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.randn(1, 3))


def test_one_value_per_channel_is_torchs_error(ranks: RankPools) -> None:
    ranks.run(one_value)
