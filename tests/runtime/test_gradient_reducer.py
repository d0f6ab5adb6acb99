"""``GradientReducer`` by itself, on stock DTensor models and local modules, against one device and stock DTensor."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.ranks import RankPools
from tests.runtime.llama import counted
from vescale import GradientReducer
from vescale.comm import fused_bytes, record_comms

R, S, P = Replicate, Shard, Partial
F64 = torch.float64


def data(step: int, index: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(1000 * step + index))


def local_model(num_layers: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(7, 7) for _ in range(num_layers)], nn.LayerNorm(7)).to(F64)


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def assert_equal_gradients(model: nn.Module, reference: nn.Module, tolerance: float = 1e-12) -> None:
    for (name, own), (_, expected) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        if expected.grad is None:
            assert own.grad is None, name
            continue
        assert own.grad is not None, name
        if isinstance(own, DTensor):
            assert own.grad.placements == own.placements, (name, own.grad.placements)
        scale = max(expected.grad.abs().max().item(), 1e-9)
        difference = (whole(own.grad) - expected.grad).abs().max().item() / scale
        assert difference <= tolerance, (name, difference)


def meshes(sizes: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp", "tp")[: len(sizes)])


# Local modules: every rank feeds its part of the batch


def local_modules(sizes: tuple[int, ...], op: str | None, bucket_bytes: Any) -> None:
    model = local_model()
    reference = copy.deepcopy(model)
    mesh, world = meshes(sizes), dist.get_world_size()
    reducer = GradientReducer(model, mesh, bucket_bytes=bucket_bytes, op=op)
    weight = 1.0 if op == "sum" else 1 / world
    total = sum(p.numel() * 8 for p in model.parameters())
    expected_buckets = reducer.num_buckets
    for step in range(4):
        if step != 2:  # gradients of step 2 are added to those of step 1
            model.zero_grad(set_to_none=step != 3)
            reference.zero_grad()
        with record_comms() as ledger, counted() as counts:
            model(data(step, dist.get_rank(), 3, 7)).square().sum().backward()
        reducer.finish()
        (weight * sum(reference(data(step, rank, 3, 7)).square().sum() for rank in range(world))).backward()
        assert_equal_gradients(model, reference)
        assert len(ledger.records) == sum(counts.values()) == reducer.num_buckets == expected_buckets
        assert abs(ledger.bytes() - fused_bytes(total, sizes)) <= reducer.num_buckets
        assert {record.op for record in ledger.records} == {"all_reduce"}
    assert reducer.num_buckets == 1 or bucket_bytes != 2**20


@pytest.mark.parametrize("sizes", [(8,), (4, 2), (2, 2, 2)], ids=str)
def test_local_modules(ranks: RankPools, sizes: tuple[int, ...]) -> None:
    for op, bucket_bytes in ((None, 2**20), ("avg", 1000), ("sum", [300, 2000]), ("sum", "auto")):
        ranks.run(local_modules, sizes, op, bucket_bytes, world_size=8)


# Stock DTensor models


class Block(nn.Module):
    """Tensor and sequence parallel by stock DTensor: gradients are Partial over dp, over tp, and over both."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.mesh = mesh
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)
        self.gain = nn.Parameter(torch.ones(8))
        self.double()
        if mesh is not None:
            cut = {"up.weight": S(0), "up.bias": S(0), "down.weight": S(1)}
            for name, parameter in list(self.named_parameters()):
                owner = self.get_submodule(name.rpartition(".")[0])
                placements = [*[R()] * (mesh.ndim - 1), cut.get(name, R())]
                setattr(
                    owner,
                    name.rpartition(".")[2],
                    nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)),
                )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x) * self.gain
        if self.mesh is not None:
            y = y.redistribute(placements=[*y.placements[:-1], R()])
        y = self.down(self.up(y).relu())
        if self.mesh is not None:
            y = y.redistribute(placements=x.placements)
        return x + y


def dtensor_models(sizes: tuple[int, ...], op: str | None) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(*[Block(None) for _ in range(3)])
    mesh = meshes(sizes)
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(mesh) for _ in range(3)])
    stock = copy.deepcopy(model)
    reducer = GradientReducer(model, mesh, bucket_bytes=2**20, op=op)
    batch_axes = [S(0), S(0)][: mesh.ndim - 1]
    scale = 1 if op != "avg" else None
    for step in range(3):
        x = data(step, 0, 8, 4, 8)
        placed = distribute_tensor(x, mesh, [*batch_axes, S(1)])
        for m in (model, reference, stock):
            m.zero_grad()
        with record_comms() as ledger, counted() as counts:
            loss = model(placed)
            before = len(ledger.records), sum(counts.values())
            loss.square().sum().backward()
            buckets = [record for record in ledger.records if record.asker.startswith("bucket")]
        reference(x).square().sum().backward()
        stock(placed).square().sum().backward()
        partial = {name: p.grad.placements for name, p in stock.named_parameters()}
        assert any(q.is_partial() for placements in partial.values() for q in placements)
        if scale is not None:
            assert_equal_gradients(model, reference)
        for (name, own), other in zip(model.named_parameters(), stock.parameters()):
            expected = other.grad.redistribute(placements=other.placements).to_local()
            if op == "avg":
                n = [mesh.size(i) for i, q in enumerate(partial[name]) if q.is_partial()]
                expected = expected / torch.tensor(n).prod()
            torch.testing.assert_close(own.grad.to_local(), expected, rtol=1e-12, atol=1e-13)
        kinds = {tuple(i for i, q in enumerate(placements) if q.is_partial()) for placements in partial.values()}
        assert len(buckets) == reducer.num_buckets >= len(kinds) and before
        # every kind of gradient in one collective over the union of its axes
        for bucket in reducer.buckets:
            (stage,) = bucket.reduction.stages
            assert bucket.moved_bytes == fused_bytes(bucket.num_bytes, stage.axes.sizes)
        assert [record.bytes for record in buckets] == [bucket.moved_bytes for bucket in reducer.buckets]
        local = sum(p.to_local().numel() * 8 for name, p in model.named_parameters())
        assert sum(bucket.num_bytes for bucket in reducer.buckets) == local


@pytest.mark.parametrize("sizes", [(4, 2), (2, 2, 2)], ids=str)
def test_stock_dtensor_models(ranks: RankPools, sizes: tuple[int, ...]) -> None:
    for op in (None, "sum", "avg"):
        ranks.run(dtensor_models, sizes, op, world_size=8)
