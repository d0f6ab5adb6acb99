"""Parameters sharded at rest over several axes in one cut: experts spread over ``ep`` and the rest over the whole mesh."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.device import device_type
from tests.examples import NIGHTLY, daily_sample
from tests.ranks import RankPools, run_cases
from tests.runtime.test_expert_sharding import loss_of, make, read_elsewhere
from tests.runtime.zero import mesh_of, same_steps
from tests.whole import whole, whole_tensors
from vescale import Plan, deferred_init, no_sync, optim, parallelize
from vescale.comm import join_axes, record_comms
from vescale.compat import make_dtensor, make_spec
from vescale.estimation import predict
from vescale.fsdp import report
from vescale.ir import lower, unit_buckets
from vescale.placements import RaggedShard
from vescale.plans import INIT, RUN
from vescale.runtime import gradient_reducer

EXPERTS = r"blocks.\d+.mixture.experts.(gate_up|down)_proj"
DENSE = f"(?!{EXPERTS}).*"


def whole_while_running(plan: Plan, paths: str, axes: tuple[str, ...], rest: Any = None) -> Plan:
    rest = RaggedShard() if rest is None else rest
    return plan.shard(paths, rest, mesh=axes, phase=INIT).shard(paths, Replicate(), mesh=axes, phase=RUN)


def plan_on(sizes: dict[str, int], rest: Any = None) -> Plan:
    """The batch over every axis; experts over ep and, at rest, over fsdp; all the rest at rest over fsdp and ep together."""
    plan = Plan(mesh_of(sizes))
    plan.shard("<in:x>", dict.fromkeys(sizes, Shard(0)))
    plan.shard(EXPERTS, Shard(0), mesh="ep")
    plan.local(r"blocks.\d+.mixture.experts", kind="experts", dispatch="all_to_all")
    whole_while_running(plan, EXPERTS, ("fsdp",))
    return whole_while_running(plan, DENSE, ("fsdp", "ep"), rest)


def clip(model: nn.Module, _: Any) -> None:
    is_ours = isinstance(next(model.parameters()), DTensor)
    clip_grad_norm_ = optim.clip_grad_norm_ if is_ours else nn.utils.clip_grad_norm_
    clip_grad_norm_(model.parameters(), 0.1)


def trained(sizes: dict[str, int], favourite: int | None, rest: Any, num_steps: int) -> dict[str, Any]:
    """Steps of AdamW with clipping, of which a part is what one device does; what lies where, and what moves."""
    reference, model = make(favourite), make(favourite)
    plan = plan_on(sizes, rest)
    expected = unit_buckets(lower(plan, model), model)
    parallelize(model, plan, strict=True)
    at_rest = Counter[str]()
    for name, parameter in model.named_parameters():
        at_rest["experts" if "experts" in name else "dense"] += parameter.to_local().nbytes  # type: ignore[attr-defined]
    dense, experts = model.blocks[1].dense.weight, model.blocks[0].mixture.experts.down_proj  # type: ignore[union-attr,index]
    found = same_steps(reference, model, loss_of, num_steps=num_steps, around=clip)
    with record_comms() as ledger:
        loss_of(model, 9)
    units = Counter(
        (r.requester, r.op.removesuffix("_v"), r.axes, r.bytes)
        for r in ledger.records
        if r.requester.startswith("blocks")
    )
    buffers = {bucket.parameters: bucket for bucket in report(model)}
    if not isinstance(rest, Shard):
        assert [buffers[b.names].digest for b in expected] == [b.digest for b in expected]
    return {
        "difference": found,
        "bytes": dict(at_rest),
        "buffers": {b.shard: buffers[b.names].resting_bytes for b in expected},
        "dense": (tuple(map(str, dense.placements)), dense.device_mesh.mesh_dim_names, tuple(dense.device_mesh.shape)),
        "experts": [type(p).__name__ for p in experts.placements],
        "units": units,
        "expected units": Counter((b.path, op, axes, n) for b in expected for _, op, axes, n in b.collectives),
    }


@pytest.mark.parametrize(
    ("favourite", "rest"),
    [(None, None), (2, None), (None, Shard(0)), (None, RaggedShard(block=1))],
    ids=["rows", "experts without tokens", "shard", "elements"],
)
def test_training_equals_one_device(ranks: RankPools, favourite: int | None, rest: Any) -> None:
    sizes = {"fsdp": 2, "ep": 2}
    by_rank = ranks.run(trained, sizes, favourite, rest, 4 if favourite is None and rest is None else 2)
    model = make()
    total = Counter[str]()
    for name, parameter in model.named_parameters():
        total["experts" if "experts" in name else "dense"] += parameter.nbytes
    for kind in total:  # each element on one rank
        assert sum(found["bytes"].get(kind, 0) for found in by_rank) == total[kind]
    for found in by_rank:
        assert found["difference"].within(1e-9), found["difference"]
        assert found["dense"][1:] == (("fsdp_ep",), (4,))
        assert found["experts"] == ["StridedRaggedShard", "Shard"]
        # One all-gather before a unit's forward and one before its backward, one reduce-scatter, for each set of axes.
        assert found["units"] == found["expected units"]
        assert Counter((op, axes) for _, op, axes, _ in found["units"].elements()) == {
            (op, axes): 2 * times
            for axes in ("fsdp,ep", "fsdp")
            for op, times in (("all_gather", 2), ("reduce_scatter", 1))
        }
        if isinstance(rest, RaggedShard):  # elements may be cut anywhere: nothing but alignment is lost
            block = sum(p.nbytes for n, p in model.blocks[0].named_parameters() if "experts" not in n)
            assert block / 4 <= found["buffers"]["fsdp", "ep"] <= block / 4 + 64


# Other axes


class Feedforward(nn.Module):
    """A norm, matrices that tensor parallelism cuts by rows and by columns, a scalar, and a vector shorter than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.short = nn.Parameter(torch.tensor([0.1, -0.2, 0.3]))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x)))) + self.short.sum()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Feedforward() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack().double()


def stack_plan(sizes: dict[str, int], paths: str = ".*", rest: Any = None) -> Plan:
    """Joint cuts over fsdp and ep; the sequence over tp between the matrices, replicas over dp."""
    plan = Plan(mesh_of(sizes))
    plan.shard("<in:x>", {axis: Shard(0) for axis in sizes if axis != "tp"})
    if "tp" in sizes:
        plan.shard("first.<out>", Shard(1), mesh="tp")  # norms see a part of it: their gradients stay sums over tp
        plan.shard(r"blocks.\d+.up.(weight|bias)", Shard(0), mesh="tp").shard(
            r"blocks.\d+.up.<in>", Replicate(), mesh="tp"
        )
        plan.shard(r"blocks.\d+.down.weight", Shard(1), mesh="tp")
        plan.shard(r"blocks.\d+.down.<out>", Shard(1), mesh="tp").shard("<out>", Replicate(), mesh="tp")
    return whole_while_running(plan, paths, ("fsdp", "ep"), rest)


def stack_loss(model: nn.Module, number: int) -> Tensor:
    x = torch.randn(8, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    loss = (model(x).sin() ** 2).mean()
    loss.backward()
    return loss


def stack_trained(sizes: dict[str, int], **unit: Any) -> None:
    reference, model = stack(), stack()
    plan = stack_plan(sizes)
    if unit:
        plan.unit(r"blocks\.\d+", **unit)
    parallelize(model, plan, strict=True)
    up = model.blocks[0].up.weight
    assert isinstance(up, DTensor) and up.device_mesh.mesh_dim_names == (
        *(a for a in sizes if a not in ("fsdp", "ep")),
        "fsdp_ep",
    )
    assert isinstance(up.placements[-1], RaggedShard) and (Shard(0) in up.placements) == ("tp" in sizes)
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        held, [p.to_local().numel() for n, p in model.named_parameters() if "scale" in n or "short" in n]
    )
    assert any(not any(sizes) for sizes in held), held  # a rank that holds nothing of the small ones
    found = same_steps(reference, model, stack_loss, num_steps=2, around=clip)
    assert found.within(1e-9), found
    with record_comms() as ledger:
        stack_loss(model, 7)
    units = Counter(
        (r.op.removesuffix("_v"), r.axes) for r in ledger.records if r.requester in ("blocks.0", "blocks.1")
    )
    kept = unit.get("reshard_after_forward") is False
    expected = {("all_gather", "fsdp,ep"): 2 if kept else 4, ("reduce_scatter", "fsdp,ep"): 2}
    if "reshard_after_forward" in unit and not kept:  # again among the ranks that keep pieces
        expected["all_gather", "fsdp,ep"] = 2
        units = Counter({key: n for key, n in units.items() if key in expected or "dp" in key[1]})
    if "dp" in sizes:
        expected["all_reduce", "dp"] = 2
    assert units == expected, (units, sizes, unit)


def test_with_other_axes(ranks: RankPools) -> None:
    """Also where the joined axes are no neighbours."""
    cases = [({"fsdp": 2, "tp": 2, "ep": 2},), ({"dp": 2, "fsdp": 2, "ep": 2},)]
    ranks.run(run_cases, stack_trained, daily_sample(cases), world_size=8)
    ranks.run(explained, cases[0][0], world_size=8)


def explained(sizes: dict[str, int]) -> None:
    """What ``explain`` predicts of units and of what they leave pending is what runs."""
    plan = stack_plan(sizes)
    with torch.device("meta"):
        twin, x = stack(), torch.empty(8, 4, 6, dtype=torch.float64)
    prediction = predict(twin, plan, {"x": x})
    model = stack()
    parallelize(model, plan, strict=True)
    for number in range(2):
        with record_comms() as ledger:
            stack_loss(model, number)
    ours = ("", "blocks.0", "blocks.1")
    assert prediction.stopped is None
    assert Counter(
        (r.requester, r.op.removesuffix("_v"), r.axes, r.bytes) for r in ledger.records if r.requester in ours
    ) == Counter((c.path, c.op, c.axis, c.num_bytes) for c in prediction.collectives if c.target.startswith("<unit>"))
    buckets = [r for r in ledger.records if r.requester.startswith("bucket")]
    assert buckets and [(r.op, r.axes) for r in buckets] == [
        (op, axes) for bucket in prediction.buckets for op, axes, _ in bucket.collectives
    ]
    own = gradient_reducer(model).buckets
    empty = sum(
        not slot.numel for bucket in own for slot in bucket.slots
    )  # one element tells whether there is a gradient
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, sum(bucket.num_bytes for bucket in own) - 8 * empty)
    assert sum(of_ranks) == len(of_ranks) * sum(bucket.num_bytes for bucket in prediction.buckets), of_ranks


def stages() -> None:
    sizes = {"fsdp": 2, "ep": 2}
    stack_trained(sizes)
    stack_trained(sizes, reshard_after_forward=False)
    stack_trained(sizes, reshard_after_forward=False, reshard_after_backward=False)
    stack_trained(sizes, reshard_after_forward=2)
    stack_trained(sizes, offload_policy=CPUOffloadPolicy(pin_memory=False))


def test_stages(ranks: RankPools) -> None:
    ranks.run(stages)


def given(paths: str, rest: Any, lengths: list[int]) -> None:
    """A cut that the plan gives is the one at rest: uneven, with ranks that hold nothing, of an inner dim."""
    reference, model = stack(), stack()
    parallelize(model, stack_plan({"fsdp": 2, "ep": 2}, paths, rest), strict=True)
    first = model.first.weight
    assert isinstance(first, DTensor) and first.placements == (rest,)
    assert first.to_local().numel() == 6 * lengths[dist.get_rank()]
    assert isinstance(model.blocks[0].scale, DTensor) and model.blocks[0].scale.placements == (Replicate(), Replicate())
    found = same_steps(reference, model, stack_loss, num_steps=2, around=clip)
    assert found.within(1e-9), found
    twin = stack_plan({"fsdp": 2, "ep": 2})
    other = stack()
    parallelize(other, twin, strict=True)
    other.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
    assert_same(other, reference)


def test_given_cuts(ranks: RankPools) -> None:
    matrices = "first.weight|.*(up|down).weight"
    cases = [(".*(weight|bias)", Shard(0), [2, 2, 2, 0]), (matrices, Shard(1), [2, 2, 2, 0])]
    ranks.run(run_cases, given, [*cases, ("first.weight", RaggedShard((0,), (3, 0, 2, 1)), [3, 0, 2, 1])])


# Values, states, optimizers


def clipped() -> None:
    """PyTorch's own clipping, of gradients on two meshes, is that of one device too."""
    reference, model = make(), make()
    parallelize(model, plan_on({"fsdp": 2, "ep": 2}), strict=True)
    for number, options in enumerate([{}, {"foreach": True}, {"foreach": False}, {"norm_type": math.inf}]):
        for m in (reference, model):
            m.zero_grad()
            loss_of(m, number)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1, **options) for m in (reference, model)]  # type: ignore[arg-type]
        assert whole(norms[1]).item() == pytest.approx(norms[0].item(), rel=1e-12)
        found: Any = whole_tensors({name: own.grad for name, own in model.named_parameters()})
        for (name, own), other in zip(found.items(), reference.parameters(), strict=True):
            torch.testing.assert_close(own, other.grad, rtol=1e-9, atol=1e-14, msg=name)
    of_all, of_two = mesh_of({"x": 4}), DeviceMesh(device_type(), [0, 1])
    numbers = [
        make_dtensor(torch.ones(()), make_spec(mesh, [Replicate()], (), (), torch.float32)) for mesh in (of_all, of_two)
    ]
    with pytest.raises(RuntimeError, match="which have different ranks; expected meshes over the same ranks"):
        torch.stack(numbers)  # type: ignore[arg-type]


def test_pytorchs_clipping(ranks: RankPools) -> None:
    ranks.run(clipped)


def deferred() -> None:
    """The bits of one device, each rank computing its part, in the memory of its buffer; also after a copy."""
    reference = stack()
    with deferred_init():
        model = stack()
    parallelize(model, stack_plan({"fsdp": 2, "ep": 2}), strict=True)
    for own in (model, copy.deepcopy(model)):
        for (name, found), (_, other) in zip(own.named_parameters(), reference.named_parameters(), strict=True):
            assert torch.equal(whole(found.detach()), other), name
    twin = copy.deepcopy(model)
    found = same_steps(copy.deepcopy(reference), twin, stack_loss, num_steps=2, around=clip)
    assert found.within(1e-9), found
    with torch.device("meta"):
        on_meta = stack()
    parallelize(on_meta, stack_plan({"fsdp": 2, "ep": 2}), strict=True)
    assert on_meta.first.weight.is_meta and on_meta.first.weight.placements == model.first.weight.placements  # type: ignore[attr-defined]
    on_meta.to_empty(device=device_type())
    on_meta.load_state_dict(model.state_dict())
    plain = copy.deepcopy(model)
    plain.load_state_dict({name: value + 1 for name, value in reference.state_dict().items()})  # of one device
    for (name, found), other in zip(on_meta.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(found.detach()), other), name
        assert torch.equal(whole(plain.get_parameter(name).detach()), other + 1), name
    foreign = {
        name: DTensor.from_local(value, mesh_of({"x": 4}), [Replicate()])
        for name, value in reference.state_dict().items()
    }
    plain.load_state_dict(foreign, assign=True)
    with pytest.raises(
        ValueError, match=r"was replaced by a DTensor on .*, but it is sharded on .*; use a plain tensor"
    ):
        stack_loss(plain, 0)


def test_deferred_init_and_states(ranks: RankPools) -> None:
    ranks.run(deferred)


def optimized(make_optimizer: Any, **options: Any) -> None:
    """One optimizer and one schedule over parameters on two meshes, and over accumulated gradients."""
    reference, model = make(), make()
    parallelize(model, plan_on({"fsdp": 2, "ep": 2}), strict=True)
    pair = [make_optimizer(m.parameters(), lr=0.01, **options) for m in (reference, model)]
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=6) for o in pair]
    for number in range(2):
        loss_of(reference, 2 * number)
        with no_sync(model):
            loss_of(model, 2 * number)
        for m, optimizer, schedule in zip((reference, model), pair, schedules, strict=True):
            loss_of(m, 2 * number + 1)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert_same(model, reference)


def assert_same(model: nn.Module, reference: nn.Module) -> None:
    found: Any = whole_tensors(dict(model.named_parameters()))
    for (name, own), (_, other) in zip(found.items(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(
            own.detach(), other.detach(), rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_one_optimizer(ranks: RankPools) -> None:
    adamw, sgd = torch.optim.AdamW, torch.optim.SGD
    options: list[dict[str, Any]] = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"amsgrad": True}]
    cases = [(functools.partial(adamw, **more),) for more in options]
    cases += [(functools.partial(sgd, momentum=0.9, foreach=True),), (torch.optim.NAdam,)]
    ranks.run(run_cases, optimized, daily_sample(cases))


def on_fsdp_alone(sizes: dict[str, int]) -> Plan:
    """All parameters at rest over one axis: the plan that a checkpoint of another layout is read with."""
    plan = Plan(mesh_of(sizes)).shard("<in:x>", dict.fromkeys(sizes, Shard(0)))
    plan.shard(EXPERTS, Shard(0), mesh="ep").local(r"blocks.\d+.mixture.experts", kind="experts", dispatch="mask")
    return whole_while_running(plan, ".*", ("fsdp",))


def saved(path: str) -> None:
    """On other meshes, with other plans, under stock FSDP, and on one device."""
    plans = [plan_on({"fsdp": 1, "ep": 4}), on_fsdp_alone({"fsdp": 2, "ep": 2})]
    if NIGHTLY:
        plans.append(plan_on({"fsdp": 4, "ep": 1}))
    read_elsewhere(path, plan_on({"fsdp": 2, "ep": 2}), [*plans, "stock", None])


def test_checkpoints_cross_meshes(ranks: RankPools, tmp_path: Any) -> None:
    ranks.run(saved, str(tmp_path))


# Meshes


def stage() -> None:
    """Each of two pipeline stages parallelizes another model on its own slice of the mesh, one of them jointly: the group of
    the joined axes is made by its members alone."""
    mesh = mesh_of({"pp": 2, "fsdp": 2, "ep": 2})
    own = mesh["fsdp", "ep"]
    if mesh.get_local_rank("pp") == 0:
        reference, model = stack(), stack()
        plan = Plan(own).shard("<in:x>", {"fsdp": Shard(0), "ep": Shard(0)})
        parallelize(model, whole_while_running(plan, ".*", ("fsdp", "ep")), strict=True)
        found = same_steps(reference, model, stack_loss, num_steps=2, around=clip)
        assert found.within(1e-9), found
        assert model.first.weight.device_mesh == join_axes(own, (0, 1))  # type: ignore[comparison-overlap]
        assert model.first.weight.device_mesh is model.blocks[0].up.weight.device_mesh  # type: ignore[union-attr]


def test_pipeline_stages(ranks: RankPools) -> None:
    ranks.run(stage, world_size=8)


def part_of_the_world() -> None:
    """Ranks outside of the mesh learn where parameters lie, and hold nothing."""
    for in_advance, rest in ((False, Shard(0)), (True, RaggedShard())):
        mesh = DeviceMesh(device_type(), [[0, 1], [2, 3]], mesh_dim_names=("fsdp", "ep"))
        plan = Plan(mesh).shard("<in:x>", {"fsdp": Shard(0), "ep": Shard(0)})
        with deferred_init() if in_advance else contextlib.nullcontext():
            model = stack()
        parallelize(model, whole_while_running(plan, "first.*", ("fsdp", "ep"), rest))
        weight = model.first.weight
        assert isinstance(weight, DTensor) and weight.device_mesh.mesh_dim_names == ("fsdp_ep",)
        assert weight.shape == (6, 6) and isinstance(weight.placements[0], type(rest))
        if mesh.get_coordinate() is None:
            assert weight.to_local().numel() == 0
        else:
            found = same_steps(stack(), model, stack_loss, num_steps=1)
            assert found.within(1e-9), found


def test_ranks_outside_of_the_mesh(ranks: RankPools) -> None:
    ranks.run(part_of_the_world, world_size=8)
