"""Every plan of the zoo on five meshes with four stages of ZeRO: bytes at rest and of gathered units of every rank are those
of the engine, and bytes of collectives those of its ledger.

The engine runs two steps of each rank on a fake group. One case runs daily, the sweep at night:
``python -m tests.estimation.test_zoo_bytes [PART OF]`` runs it, or every n-th plan, and prints what differs.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.estimation.measure import groups_of, held
from tests.plan_zoo.models import model_of, tokens
from tests.plan_zoo.test_zero import CALLED_ALONE
from vescale import Plan, RaggedShard, parallelize, plan_zoo
from vescale.buffer import observe_allocations
from vescale.comm import CommRecord, record_comms
from vescale.compat import local_of
from vescale.compat.simulated_ranks import fake_world
from vescale.estimation import estimate, zero_plan, zero_units
from vescale.plans import PlanError

MESHES = ({"dp": 2}, {"dp": 3}, {"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 4, "tp": 2})
STAGES = (None, 1, 2, 3)
DAILY = ("qwen3", {"dp": 3}, 3)


def plan_of(name: str, sizes: dict[str, int], stage: int | None, model: nn.Module) -> Plan:
    plan = plan_zoo.load(name, sizes)
    if stage is not None:
        units = (*zero_units(model), *([CALLED_ALONE[name]] if name in CALLED_ALONE else []))
        plan = zero_plan(plan, ("dp",), stage, units)
    return plan


class Gathered:
    """Listens to allocations, for the most bytes of gathered units at any time."""

    def __init__(self) -> None:
        self._events: list[tuple[int, int]] = []

    def __call__(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        self._events.append((storage._cdata, num_bytes))

    def most(self, model: nn.Module) -> int:
        memories = [group.memory.gathered for group in groups_of(model)]
        units = {one.storage._cdata for one in memories if one is not None}
        now: dict[int, int] = {}
        found = 0
        for key, size in self._events:
            if key in units:
                now[key] = size
                found = max(found, sum(now.values()))
        return found


def moved(records: Iterable[CommRecord]) -> dict[str, int]:
    """Bytes by axes and op, without those of experts' tokens."""
    found: dict[str, int] = {}
    for record in records:
        name = f"{record.axes or 'world'} {record.op.removesuffix('_v')}"
        if not is_of_tokens(name):
            found[name] = found.get(name, 0) + record.bytes
    return found


def is_of_tokens(name: str) -> bool:
    """Ranks of a fake group choose no experts: how many tokens go where is not known of them."""
    return name.endswith("all_to_all")


def loss_of_outputs(output: Any, _: Any) -> torch.Tensor:
    first = output if isinstance(output, torch.Tensor) else next(x for x in output.values() if x is not None)
    return first.float().square().mean()


@contextlib.contextmanager
def exchanges_of_nothing() -> Iterator[None]:
    """The fake group fills what a rank receives with what it sends, and refuses a rank that sends nothing."""
    original = dist.all_to_all_single

    def exchange(output: Any, input: Any, output_split_sizes: Any = None, *args: Any, **kwargs: Any) -> Any:
        if output.numel() and not input.numel():
            return original(
                output, torch.zeros_like(output), output_split_sizes, output_split_sizes, *args[1:], **kwargs
            )
        return original(output, input, output_split_sizes, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", exchange)
        yield


def differences(name: str, wide: dict[str, int], stage: int | None) -> list[str]:
    """What is estimated otherwise than it is. Raises PlanError for plans that the model does not take."""
    zoo = model_of(name)
    zoo.need()
    sizes = {axis: wide.get(axis, 1) for axis in plan_zoo.about(name).axes}
    if "cp" in sizes and wide.get("tp", 1) > 1:
        sizes |= {"cp": 2, "tp": 1}
    inputs = zoo.inputs() if "cp" not in sizes else {"input_ids": tokens()}

    model = zoo.build().double()
    found = estimate(
        model, plan_of(name, sizes, stage, model), batch=inputs, loss=loss_of_outputs, steps=2, optimizer="adamw"
    )
    wrong = []
    for rank in range(math.prod(sizes.values())):
        (own,) = (one for one in found.ranks if rank in one.ranks)
        with fake_world(math.prod(sizes.values()), rank):
            model, gathered = zoo.build().double(), Gathered()
            parallelize(model, plan_of(name, sizes, stage, model))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            with observe_allocations(gathered), exchanges_of_nothing():
                for _ in range(1 if rank else 2):  # every rank gathers alike; the last step is in steady state
                    optimizer.zero_grad()
                    with record_comms() as ledger:
                        loss_of_outputs(model(**inputs), inputs).backward()
                        grads = [p.grad for p in model.parameters() if p.grad is not None]
                        measured = {"gradients": held(grads, model, "gradients")}
                        optimizer.step()
            measured["unsharded"] = gathered.most(model)
            measured["parameters"] = held([*model.parameters(), *model.buffers()], model, "parameters")
            values = [
                local_of(x) if isinstance(x, DTensor) else x for s in optimizer.state.values() for x in s.values()
            ]
            measured["optimizer"] = held(values, model, "optimizer")
        estimated = {name: size for name, size in found.time.collective_bytes.items() if not is_of_tokens(name)}
        if rank == 0 and moved(ledger.records) != estimated:
            wrong.append(f"collectives {estimated} estimated, {moved(ledger.records)} measured")
        del model, optimizer, grads
        gc.collect()
        wrong += [
            f"rank {rank}: {kind} {own.maximum[kind]} estimated, {size} measured"
            for kind, size in measured.items()
            if own.maximum[kind] != size
        ]
    return wrong


def test_bytes_of_a_plan() -> None:
    assert differences(*DAILY) == []


class _CallsInside(nn.Module):
    """As DiT, which calls a part of its first block once more, from outside of the unit that holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.blocks[0][0](x).square().mean()


@pytest.mark.filterwarnings("ignore")
def test_uses_outside_of_units() -> None:
    """Ranks without a part of such a parameter have nothing of its gradient. Its backward gathers it again."""

    def plan() -> Plan:
        plan = Plan({"dp": 2}).shard("<in:x>", {"dp": Shard(0)})
        return plan.shard(".*", {"dp": RaggedShard()}, phase="init").shard(".*", {"dp": Replicate()}, phase="run")

    found = estimate(_CallsInside(), plan(), batch={"x": (4, 6)}, steps=2, rank=1)
    sizes = []
    for rank in range(2):
        (own,) = (one for one in found.ranks if rank in one.ranks)
        with fake_world(2, rank):
            model = parallelize(_CallsInside(), plan())
            with record_comms() as ledger:
                model(torch.ones(4, 6)).backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            sizes.append(held(grads, model, "gradients"))
        assert own.maximum["gradients"] == sizes[-1], rank
        if rank == 1:  # which is sent the parameter
            assert moved(ledger.records) == found.time.collective_bytes
    assert sizes[0] != sizes[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", plan_zoo.names())
def test_bytes_of_every_plan(name: str) -> None:
    wrong = {}
    for wide, stage in itertools.product(MESHES, STAGES):
        try:
            wrong[str(wide), stage] = differences(name, wide, stage)
        except PlanError as error:
            wrong[str(wide), stage] = [str(error)]
    assert {key: found for key, found in wrong.items() if found} == {}


def main(part: int = 0, of: int = 1) -> None:
    every = list(itertools.product(plan_zoo.names(), MESHES, STAGES))[part::of]
    for number, (name, wide, stage) in enumerate(every):
        if number < 2:  # most modules are loaded then, which collections of garbage look at again and again
            gc.collect()
            gc.freeze()
        try:
            wrong = differences(name, wide, stage)
        except Exception as error:  # the next plan is looked at
            wrong = [f"{type(error).__name__}: {error}"]
        print(f"{number + 1}/{len(every)} {name} {wide} stage {stage}: {'; '.join(wrong) or 'equal'}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
