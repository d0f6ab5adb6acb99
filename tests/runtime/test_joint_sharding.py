"""Parameters sharded at rest over several axes in one cut: experts spread over ``ep`` and the rest over the whole mesh."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.ranks import RankPools
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
