"""The buckets that ``explain`` predicts are those that a step reduces gradients in, gradient by gradient."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.device import device_type
from tests.gradients.test_destinations import Loss
from tests.ranks import RankPools
from tests.simulate import simulate
from vescale import parallelize
from vescale.comm import Ledger, fused_bytes, record_comms
from vescale.compat import local_of
from vescale.estimation import Prediction, predict
from vescale.placements import from_local
from vescale.plans import Plan
from vescale.runtime import gradient_reducer

P, R, S = Partial, Replicate, Shard


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


def make_plan(names: tuple[str, ...], sizes: tuple[int, ...], without_mesh: bool = False) -> Plan:
    """Batch over dp, sequence over cp and outside of the MLPs over tp, features over tp."""
    plan = Plan(
        dict(zip(names, sizes)) if without_mesh else init_device_mesh(device_type(), sizes, mesh_dim_names=names)
    )
    plan.shard("<in>", S(0), mesh="dp")
    if "cp" in names:
        plan.shard("<in>", S(1), mesh="cp")
    plan.shard(r"\d.norm.<in>", S(1), mesh="tp")
    plan.shard(r"\d.up.<in>", R(), mesh="tp").shard(r"\d.down.<out>", S(1), mesh="tp")
    plan.shard(r"\d.up.(weight|bias)", S(0), mesh="tp").shard(r"\d.down.weight", S(1), mesh="tp")
    return plan


def predicted(plan: Plan) -> Prediction:
    with torch.device("meta"):
        on_meta, x = make_model(), torch.empty(8, 16, 16, dtype=torch.float64)
    prediction = predict(on_meta, plan, {"input": x})
    assert prediction.stopped is None
    return prediction


def predicted_and_done(names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    model, x = make_model(), torch.randn(8, 16, 16, dtype=torch.float64)
    plan = make_plan(names, sizes)
    prediction = predicted(plan)
    parallelize(model, plan)
    for _ in range(2):
        model.zero_grad()
        with record_comms() as ledger:
            model(x).to_local().square().sum().backward()
        check_done(model, prediction, ledger, dict(zip(names, sizes)))


def check_done(model: nn.Module, prediction: Prediction, ledger: Ledger, sizes: dict[str, int]) -> None:
    """The buckets of a step against those predicted: gradients, axes, bytes, collectives."""
    reducer = gradient_reducer(model)
    done = [record for record in ledger.records if record.requester.startswith("bucket")]
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
        axis_sizes = [sizes[axis] for axis in bucket.axes]
        assert own.moved_bytes == bucket.cost.num_bytes == fused_bytes(own.num_bytes, axis_sizes)
        assert bucket.per_axis_bytes >= bucket.cost.num_bytes
    every = {bucket.axes for bucket in prediction.buckets}
    names = tuple(sizes)
    assert names in every and names[:-1] in every  # norms over all axes, weights over those of the data


def test_on_8_ranks(ranks: RankPools) -> None:
    ranks.run(predicted_and_done, ("dp", "tp"), (4, 2), world_size=8, timeout=120)


def as_they_come(sizes: tuple[int, ...], prediction: Prediction) -> None:
    """On three axes, where DTensor's own rules take minutes for a step: gradients put together as this model's come, of
    norms pending over all axes, of what tensor parallelism shards over those of the data."""
    names = ("dp", "cp", "tp")
    plan, model = make_plan(names, sizes), copy.deepcopy(_MODEL)
    parallelize(model, plan)
    for _ in range(2):
        model.zero_grad()
        losses, expected = [], {}
        for name, parameter in model.named_parameters():
            axes = names if ".norm." in name else names[:2]
            placements = [P() if n in axes else p for n, p in zip(names, parameter.placements)]
            local = torch.ones_like(local_of(parameter))
            gradient = from_local(local, plan.mesh, placements, shape=parameter.shape, stride=parameter.stride())
            losses.append(Loss.apply(parameter, gradient))
            expected[name] = local * fused_size(axes, names, sizes)
        with record_comms() as ledger:
            torch.stack(losses).sum().backward()
        check_done(model, prediction, ledger, dict(zip(names, sizes)))
        for name, parameter in model.named_parameters():
            assert torch.equal(local_of(parameter.grad), expected[name])


def fused_size(axes: tuple[str, ...], names: tuple[str, ...], sizes: tuple[int, ...]) -> int:
    return math.prod(size for name, size in zip(names, sizes) if name in axes)


def once(sizes: tuple[int, ...]) -> Prediction:
    """For all ranks: simulated ones would have to take turns."""
    return predicted(make_plan(("dp", "cp", "tp"), sizes, without_mesh=True))


_MODEL = make_model()  # simulated ranks share one generator, and would draw from it at the same time


def test_three_axes_on_8_ranks(ranks: RankPools) -> None:
    ranks.run(as_they_come, (2, 2, 2), once((2, 2, 2)), world_size=8, timeout=120)


def test_three_axes_on_64_simulated_ranks() -> None:
    simulate(as_they_come, 64, (4, 4, 4), once((4, 4, 4)), timeout=300)
