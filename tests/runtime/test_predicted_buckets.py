"""The buckets that ``explain`` predicts are those that a step reduces gradients in, gradient by gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from tests.ranks import RankPools
from vescale.comm import fused_bytes, record_comms
from vescale.ir import lower, predict
from vescale.plans import Plan
from vescale.runtime import gradient_reducer, parallelize

R, S = Replicate, Shard


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).double()


def make_plan(names: tuple[str, ...], sizes: tuple[int, ...]) -> Plan:
    """Batch over dp, sequence over cp and outside of the MLPs over tp, features over tp."""
    plan = Plan(init_device_mesh("cpu", sizes, mesh_dim_names=names))
    plan.shard("<in>", S(0), mesh="dp")
    if "cp" in names:
        plan.shard("<in>", S(1), mesh="cp")
    plan.shard(r"\d.norm.<in>", S(1), mesh="tp")
    plan.shard(r"\d.up.<in>", R(), mesh="tp").shard(r"\d.down.<out>", S(1), mesh="tp")
    plan.shard(r"\d.up.(weight|bias)", S(0), mesh="tp").shard(r"\d.down.weight", S(1), mesh="tp")
    return plan


def predicted_and_done(names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    model, x = make_model(), torch.randn(8, 16, 16, dtype=torch.float64)
    plan = make_plan(names, sizes)
    with torch.device("meta"):
        on_meta = make_model()
    prediction = predict(lower(plan, on_meta), on_meta, {"input": x.to("meta")})
    assert prediction.stopped is None
    parallelize(model, plan)
    for _ in range(2):
        model.zero_grad()
        with record_comms() as ledger:
            model(x).to_local().square().sum().backward()
        reducer = gradient_reducer(model)
        done = [record for record in ledger.records if record.asker.startswith("bucket")]
        assert len(done) == reducer.num_buckets == len(prediction.buckets)

        def sort_key(pair: tuple[tuple[str, ...], int]) -> str:
            return str(pair)

        expected = sorted(((b.axes, b.num_bytes) for b in prediction.buckets), key=sort_key)
        found = [(bucket.reduction.stages[0].axes.names, bucket.num_bytes) for bucket in reducer.buckets]
        assert sorted(found, key=sort_key) == expected
        assert sorted(record.bytes for record in done) == sorted(b.cost.num_bytes for b in prediction.buckets)
        by_name = {slot.name: bucket for bucket in reducer.buckets for slot in bucket.slots}
        for bucket in prediction.buckets:
            (own,) = {by_name[name.removesuffix(".grad")] for name in bucket.names}
            assert {slot.name for slot in own.slots} == {name.removesuffix(".grad") for name in bucket.names}
            axis_sizes = [dict(zip(names, sizes))[axis] for axis in bucket.axes]
            assert own.moved_bytes == bucket.cost.num_bytes == fused_bytes(own.num_bytes, axis_sizes)
            assert bucket.per_axis_bytes >= bucket.cost.num_bytes
    every = {bucket.axes for bucket in prediction.buckets}
    assert names in every and names[:-1] in every  # norms over all axes, weights over those of the data


@pytest.mark.parametrize(("names", "sizes"), [(("dp", "tp"), (4, 2))], ids=str)
def test_on_8_ranks(ranks: RankPools, names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    ranks.run(predicted_and_done, names, sizes, world_size=8, timeout=120)
