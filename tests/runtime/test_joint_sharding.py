"""Parameters sharded at rest over several axes in one cut: experts spread over ``ep`` and the rest over the whole mesh."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.ranks import RankPools, run_cases
from tests.runtime.test_expert_sharding import loss_of, make
from tests.runtime.zero import mesh_of, same_steps
from vescale import Plan, optim, parallelize
from vescale.comm import record_comms
from vescale.fsdp import report
from vescale.ir import lower, unit_buckets
from vescale.placements import RaggedShard
from vescale.plans import INIT, RUN

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


def trained(sizes: dict[str, int], favourite: int | None, rest: Any) -> dict[str, Any]:
    """Four steps of AdamW with clipping, of which a part is what one device does; what lies where, and what moves."""
    reference, model = make(favourite), make(favourite)
    plan = plan_on(sizes, rest)
    expected = unit_buckets(lower(plan, model), model)
    parallelize(model, plan, strict=True)
    at_rest = Counter[str]()
    for name, parameter in model.named_parameters():
        at_rest["experts" if "experts" in name else "dense"] += parameter.to_local().nbytes  # type: ignore[attr-defined]
    dense, experts = model.blocks[1].dense.weight, model.blocks[0].mixture.experts.down_proj  # type: ignore[union-attr,index]
    found = same_steps(reference, model, loss_of, num_steps=4, around=clip)
    with record_comms() as ledger:
        loss_of(model, 9)
    units = Counter(
        (r.asker, r.op.removesuffix("_v"), r.axes, r.bytes) for r in ledger.records if r.asker.startswith("blocks")
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
    by_rank = ranks.run(trained, sizes, favourite, rest)
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


def stack_plan(sizes: dict[str, int]) -> Plan:
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
    return whole_while_running(plan, ".*", ("fsdp", "ep"))


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
    found = same_steps(reference, model, stack_loss, num_steps=3, around=clip)
    assert found.within(1e-9), found
    with record_comms() as ledger:
        stack_loss(model, 7)
    units = Counter((r.op.removesuffix("_v"), r.axes) for r in ledger.records if r.asker in ("blocks.0", "blocks.1"))
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
    ranks.run(run_cases, stack_trained, cases, world_size=8)


def stages() -> None:
    sizes = {"fsdp": 2, "ep": 2}
    stack_trained(sizes)
    stack_trained(sizes, reshard_after_forward=False)
    stack_trained(sizes, reshard_after_forward=False, reshard_after_backward=False)
    stack_trained(sizes, reshard_after_forward=2)


def test_stages(ranks: RankPools) -> None:
    ranks.run(stages)
