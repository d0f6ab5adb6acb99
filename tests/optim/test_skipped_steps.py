"""``skip_nonfinite``: one inf or nan, on whatever rank, and no rank takes the step, however parameters lie on meshes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.device import device_type
from tests.optim.meshes import on_mesh
from tests.pipeline.steps import Net, mesh_of, token_batch
from tests.placements.on_ranks import make_mesh
from tests.ranks import RankPools
from vescale import parallelize
from vescale.comm import record_comms
from vescale.optim import SOAP, AdamW8bit, Muon, Shampoo, muon_groups
from vescale.plans import Plan

KINDS: list[Callable[..., Any]] = [AdamW8bit, Muon, Shampoo, SOAP]


Named = list[tuple[str, nn.Parameter]]


def chain() -> Named:
    """Each rank shares parameters with its neighbours alone: {0, 1}, {1, 2}, {2, 3}."""
    meshes = [make_mesh(pair) for pair in ((0, 1), (1, 2), (2, 3))]
    values = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    own = [(str(place), mesh) for place, mesh in enumerate(meshes) if mesh.get_coordinate() is not None]
    return [(name, nn.Parameter(on_mesh(values, mesh, [Shard(0)]))) for name, mesh in own]


def rows_and_columns() -> Named:
    """Some parameters are on one axis of a mesh, the others on the other one: no parameter is on all ranks."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    values = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    return [(axis, nn.Parameter(on_mesh(values, mesh[axis], [Shard(0)]))) for axis in ("dp", "tp")]


def one_axis() -> Named:
    """On one axis of a mesh; along the other one are copies that would differ afterwards, one of them a plain tensor."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    values = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    return [("cut", nn.Parameter(on_mesh(values, mesh["tp"], [Shard(0)]))), ("plain", nn.Parameter(values.clone()))]


def skips_together(kind: Callable[..., Any], layout: Callable[[], Named]) -> None:
    named = layout()
    parameters = [parameter for _, parameter in named]
    optimizer = kind(named, lr=0.1, skip_nonfinite=True)
    for step, bad in enumerate((None, 3, None, 0, 1)):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
            parameter.grad = gradient
            if isinstance(parameter, DTensor):
                parameter.grad = on_mesh(gradient, parameter.device_mesh, parameter.placements)
        if dist.get_rank() == bad:
            last = parameters[-1].grad
            (last.to_local() if isinstance(last, DTensor) else last)[0, 0] = math.nan if step == 1 else math.inf
        before = [local(p).clone() for p in parameters]
        with record_comms() as ledger:
            optimizer.step()
        after = [local(p) for p in parameters]
        changed = not all(map(torch.equal, before, after))
        assert changed == (bad is None and (step > 0 or kind is not SOAP)), (step, dist.get_rank())
        assert sum(record.requester == "finite gradients" for record in ledger.records) == 1


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()


@pytest.mark.parametrize("layout", [chain, rows_and_columns, one_axis], ids=lambda layout: layout.__name__)
def test_all_ranks_skip(ranks: RankPools, layout: Callable[[], Named]) -> None:
    for kind in KINDS:
        ranks.run(skips_together, kind, layout, world_size=4)


def stages_skip(sizes: dict[str, int]) -> None:
    """A weight of the last stage has a nan, which no other stage sees."""
    torch.manual_seed(0)
    plan = Plan(mesh_of(**sizes))
    if "dp" in sizes:
        plan.shard("<in:ids>", Shard(0), mesh="dp").shard("<in:labels>", Shard(0), mesh="dp")
    plan.pipeline(split_before=["blocks.2"], microbatches=2, loss="out.loss")
    model = parallelize(Net(tied=False, dropout=0.0), plan)
    for kind in (AdamW8bit, Muon):
        groups = model.named_parameters() if kind is AdamW8bit else muon_groups(model, verbose=False)
        optimizer = kind(groups, lr=0.1, skip_nonfinite=True)
        for step in range(3):
            optimizer.zero_grad()
            model.step(**token_batch(step, names=("ids", "labels")))
            if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
                local(model.head.weight.grad)[0, 0] = math.nan
            before = [local(p).clone() for p in model.parameters()]
            optimizer.step()
            changed = not all(torch.equal(a, local(b)) for a, b in zip(before, model.parameters()))
            assert changed == (step != 1), (step, kind, dist.get_rank())


def scalers_agree(sizes: dict[str, int]) -> None:
    """An overflow in one stage: every rank skips the step and lowers its scale, also one whose stage is frozen."""
    torch.manual_seed(0)
    plan = Plan(mesh_of(**sizes)).pipeline(split_before=["blocks.2"], microbatches=2, loss="out.loss")
    model = parallelize(Net(tied=False, dropout=0.0), plan)
    for fused in (False, True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step, (bad, frozen) in enumerate(((None, False), (1, False), (0, False), (None, True), (1, True))):
            optimizer.zero_grad()
            scaler.scale(torch.zeros(()))
            model.step(**token_batch(step, names=("ids", "labels")))
            if frozen and dist.get_rank() == 0:
                optimizer.zero_grad()
            if dist.get_rank() == bad:
                local(next(p.grad for p in model.parameters() if p.grad is not None)).view(-1)[0] = math.inf
            before, scale = [local(p).clone() for p in model.parameters()], scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            changed = not all(torch.equal(a, local(b)) for a, b in zip(before, model.parameters()))
            assert changed == (bad is None and not (frozen and dist.get_rank() == 0)), (fused, step, dist.get_rank())
            assert scaler.get_scale() == (scale if bad is None else scale / 2), (fused, step, dist.get_rank())


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"pp": 2, "dp": 2}], ids=["pp", "pp-dp"])
def test_all_stages_skip(ranks: RankPools, sizes: dict[str, int]) -> None:
    ranks.run(stages_skip, sizes, world_size=math.prod(sizes.values()))


def test_scalers_of_all_stages_agree(ranks: RankPools) -> None:
    ranks.run(scalers_agree, {"pp": 2}, world_size=2)
