"""Reports against the memory that is there and the ledger of what was communicated."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile

from tests.fsdp.compare import by_block, mesh_of, resting_memory
from tests.fsdp.models import Net, net_loss
from tests.ranks import RankPools
from vescale.comm import record_comms
from vescale.fsdp import fully_shard, report


def frozen_bias(model: Any) -> None:
    model.blocks[0].up.bias.requires_grad_(False)


def check() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model: Any = Net()
    frozen_bias(model)
    num_elements = sum(p.numel() for p in model.parameters())
    by_block(model, fully_shard, mesh_of(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
    found = report(model)
    assert sum(one.num_elements for one in found) == num_elements
    assert [one.path for one in found] == ["", "blocks.0", "blocks.0", "blocks.1", "blocks.2"]
    for one in found:
        assert one.resting_bytes * world == 4 * (one.num_elements + one.padding_elements) == one.whole_bytes
        assert one.gradient_bytes == (2 * one.whole_bytes if one.requires_grad else 0)
    assert found.resting_bytes == sum(resting_memory(model).values())  # shards and padding, and nothing else

    net_loss(model, 0, rank).backward()  # the first step also compares the ranks
    model.zero_grad()
    assert report(model)[0].num_all_gathers == 1 and report(model)[1].num_all_gathers == 2  # the root keeps its own
    with profile(activities=[ProfilerActivity.CPU]) as prof, record_comms() as ledger:
        net_loss(model, 1, rank).backward()
    found = report(model)
    asked = [r.bytes for r in ledger.records if r.requester in {one.path for one in found}]
    assert sum(asked) == found.step_bytes
    for path in ("blocks.0", "blocks.2"):
        of_group = [one for one in found if one.path == path]
        assert sum(r.bytes for r in ledger.records if r.requester == path) == sum(one.step_bytes for one in of_group)
    names = {event.name for event in prof.events() or []}
    for path in ("blocks.0", "blocks.1", "blocks.2"):
        assert {f"vescale.fsdp::all_gather ({path})", f"vescale.fsdp::reduce ({path})"} <= names

    data = json.loads(found.to_json())
    assert data["resting_bytes"] == found.resting_bytes and len(data["buckets"]) == len(found)
    assert data["buckets"][1]["parameters"] == list(found[1].parameters)
    lines = str(found).splitlines()
    assert len(lines) == len(found) + 3 and len({len(line) for line in lines[:-1]}) == 1


def test_report(ranks: RankPools) -> None:
    ranks.run(check, world_size=2)
