"""In which order groups are gathered and reduced: without prefetch, implicitly, and as modules say, in both directions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.device import device_type
from tests.fsdp.compare import by_block, mesh_of, same_gradients
from tests.fsdp.models import Net, net_loss
from tests.ranks import RankPools, run_functions
from vescale.comm import record_comms
from vescale.fsdp import Residency, fully_shard

FORWARD = {"blocks.0": 0, "blocks.1": 1, "blocks.2": 2}


def sharded() -> Any:
    torch.manual_seed(0)
    model = Net()
    by_block(model, fully_shard, mesh_of())
    net_loss(model, 0, dist.get_rank()).backward()  # the first step compares the ranks
    model.zero_grad()
    return model


def events(model: Any) -> list[str]:
    """Of one step: ``gather i``, ``reduce i``, and ``forward i`` when block i begins to compute."""
    found: list[str] = []
    handles = []
    with record_comms() as ledger:

        def take() -> None:
            for record in ledger.records:
                if record.requester in FORWARD:
                    what = "gather" if record.op == "all_gather_v" else "reduce"
                    found.append(f"{what} {FORWARD[record.requester]}")
            ledger.records.clear()

        for place, block in enumerate(model.blocks):

            def begins(*_: Any, place: int = place) -> None:
                take()
                found.append(f"forward {place}")

            handles.append(block.norm.register_forward_pre_hook(begins))
        loss = net_loss(model, 0, dist.get_rank())
        take()
        found.append("backward")
        loss.backward()
        take()
    for handle in handles:
        handle.remove()
    return found


NO_PREFETCH = ["gather 0", "forward 0", "gather 1", "forward 1", "gather 2", "forward 2"]
BACK_ONE_BY_ONE = ["backward", "gather 2", "reduce 2", "gather 1", "reduce 1", "gather 0", "reduce 0"]
BACK_BESIDE = ["backward", "gather 2", "gather 1", "reduce 2", "gather 0", "reduce 1", "reduce 0"]


def back() -> list[str]:
    """On a CPU one by one, each started when the group before is done; on a device beside the group before."""
    return BACK_ONE_BY_ONE if device_type() == "cpu" else BACK_BESIDE


def implicit() -> None:
    model = sharded()
    assert events(model) == NO_PREFETCH + back()
    # The group that is gathered at the end of another's backward is the one that ran before it in forward.
    begun: list[bool] = []
    model.blocks[2].norm.register_full_backward_hook(
        lambda *_: begun.append(model.blocks[1]._state.groups[0].memory.residency is Residency.GATHERING)
    )
    group = model.blocks[1]._state.groups[0]
    before_backward = group.before_backward

    def prefetched(**options: Any) -> None:
        begun.append(group.memory.residency is Residency.GATHERING)
        before_backward(**options)

    group.before_backward = prefetched
    net_loss(model, 0, dist.get_rank()).backward()
    assert begun[:2] == [device_type() != "cpu", True], begun


def explicit_in_forward() -> None:
    model = sharded()
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    forward = ["gather 0", "gather 1", "gather 2", "forward 0", "forward 1", "forward 2"]
    found = events(model)
    # What follows is gathered once block 0's parameters are there, before it computes.
    assert found == forward + back(), found


def explicit_in_backward() -> None:
    """Started before the module's own backward: both are gathered before the first is reduced."""
    model = sharded()
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1], model.blocks[0]])
    found = events(model)
    assert found == [
        *NO_PREFETCH,
        "backward",
        "gather 2",
        "gather 1",
        "gather 0",
        "reduce 2",
        "reduce 1",
        "reduce 0",
    ], found


def the_same_numbers() -> None:
    models = [sharded() for _ in range(2)]
    models[0].blocks[0].set_modules_to_forward_prefetch([models[0].blocks[1]])
    models[0].blocks[2].set_modules_to_backward_prefetch([models[0].blocks[0]])
    models[0].set_reduce_scatter_max_input_buffers(2)
    for step in range(2):
        for model in models:
            net_loss(model, step, dist.get_rank()).backward()
        same_gradients(models, f"step {step}")


def run() -> int:
    cases = [implicit, explicit_in_forward, explicit_in_backward, the_same_numbers]
    return run_functions(cases)


def test_prefetch(ranks: RankPools) -> None:
    ranks.run(run, world_size=2)
