"""Experts spread over ``ep``, and sharded at rest over ``fsdp`` with all the rest: one optimizer, one clip, one state."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import Shard

from tests.ranks import RankPools
from tests.runtime.test_experts import Mixture
from tests.runtime.test_zero_llama import put, state_of
from tests.runtime.zero import mesh_of, same_steps, sharded_at_rest
from tests.whole import whole, whole_tensors
from vescale import Plan, optim, parallelize
from vescale.comm import record_comms
from vescale.placements import RaggedShard


class Block(nn.Module):
    def __init__(self, favourite: int | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.dense = nn.Linear(8, 8)
        self.mixture = Mixture(favourite, separate=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixture(self.dense(self.norm(x)))


class Model(nn.Module):
    def __init__(self, favourite: int | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(favourite) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def make(favourite: int | None = None) -> Model:
    torch.manual_seed(0)
    return Model(favourite).double()


def plan_on(sizes: dict[str, int], dispatch: str = "all_to_all") -> Plan:
    """Batches over both axes; gradients of experts are summed over fsdp alone, of the rest over both."""
    plan = Plan(mesh_of(sizes))
    plan.shard("<in:x>", {"fsdp": Shard(0), "ep": Shard(0)})
    plan.shard(r"blocks.\d+.mixture.experts.(gate_up|down)_proj", Shard(0), mesh="ep")
    plan.local(r"blocks.\d+.mixture.experts", kind="experts", dispatch=dispatch)
    return sharded_at_rest(plan, ".*", "fsdp")


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    x = torch.randn(8, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    loss = (model(x).sin() ** 2).mean()
    loss.backward()
    return loss


def trained(favourite: int | None, dispatch: str) -> dict[str, Any]:
    reference, model = make(favourite), make(favourite)
    parallelize(model, plan_on({"fsdp": 2, "ep": 2}, dispatch), strict=True)
    norms: dict[bool, list[float]] = {True: [], False: []}

    def clip(m: nn.Module, _: Any) -> None:
        is_ours = m is model
        clip_grad_norm_ = optim.clip_grad_norm_ if is_ours else nn.utils.clip_grad_norm_
        norms[is_ours].append(float(whole(clip_grad_norm_(m.parameters(), 0.1))))

    found = same_steps(reference, model, loss_of, around=clip)
    experts = model.blocks[0].mixture.experts.down_proj  # type: ignore[union-attr]
    with record_comms() as ledger:
        loss_of(model, 9)
    return {
        "difference": found,
        "norms": norms,
        "experts": [type(p).__name__ for p in experts.placements],
        "local": experts.to_local().numel(),
        "exchanges": Counter(r.op for r in ledger.records if r.requester.startswith("experts")),
    }


@pytest.mark.parametrize("dispatch", ["all_to_all", "mask"])
@pytest.mark.parametrize("favourite", [None, 0, 2])
def test_training_equals_one_device(ranks: RankPools, favourite: int | None, dispatch: str) -> None:
    by_rank = ranks.run(trained, favourite, dispatch)
    assert sum(found["local"] for found in by_rank) == 4 * 8 * 6  # each element on one rank
    for found in by_rank:
        assert found["difference"].within(1e-9), found["difference"]
        assert found["norms"][True] == pytest.approx(found["norms"][False], rel=1e-12)
        assert found["experts"] == ["StridedRaggedShard", "Shard"]
        if dispatch == "all_to_all":
            assert found["exchanges"] == {"all_to_all_v": 2 * 4, "all_gather_v": 2}


def read_elsewhere(path: str, plan: Plan, others: Sequence[Any]) -> nn.Module:
    """Write a checkpoint after two steps under ``plan``, read it where parameters lie otherwise (under another plan; FSDP's,
    ``stock``; None: on one device) and train on there. Returns the model that was written."""
    reference, model = make(), make()
    parallelize(model, plan, strict=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (reference, model)]
    for number in range(2):
        for m, optimizer in zip((reference, model), optimizers, strict=True):
            loss_of(m, number)
            optimizer.step()
            optimizer.zero_grad()
    dcp.save(state_of(model, optimizers[1]), checkpoint_id=path)
    for way in others:
        other, expected = make(), copy.deepcopy(reference)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        if isinstance(way, Plan):
            parallelize(other, way, strict=True)
        elif way == "stock":
            stock_fully_shard(other, mesh=mesh_of({"dp": 4}))
        pair = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (expected, other)]
        pair[0].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        loaded = state_of(other, pair[1])
        dcp.load(loaded, checkpoint_id=path)
        put(other, pair[1], loaded)
        if way != "stock":  # which averages over ranks that each have a batch
            for m, optimizer in zip((expected, other), pair, strict=True):
                loss_of(m, 2)
                optimizer.step()
        found: Any = whole_tensors(dict(other.named_parameters()))
        for (name, own), (_, theirs) in zip(found.items(), expected.named_parameters(), strict=True):
            torch.testing.assert_close(own.detach(), theirs.detach(), rtol=1e-9, atol=1e-12, msg=name)
    return model


def saved(path: str) -> None:
    """Experts and shards spread otherwise."""
    plans = [plan_on(sizes) for sizes in ({"fsdp": 1, "ep": 4}, {"fsdp": 4, "ep": 1})]
    model = read_elsewhere(path, plan_on({"fsdp": 2, "ep": 2}), plans)
    assert isinstance(model.blocks[0].dense.weight.placements[0], RaggedShard)  # type: ignore[union-attr,index]


def test_checkpoints_cross_meshes(ranks: RankPools, tmp_path: Any) -> None:
    ranks.run(saved, str(tmp_path))
