"""Drawn pipelines on simulated ranks: schedule, ranks, stages, numbers of micro-batches (odd ones, too), cut, tensor
parallelism, accumulation; a step is that of one device, and its messages and reductions those that ``counts`` has.

Simulated ranks share a generator: there is no dropout here (``test_eight_ranks.py`` has it on real ones).
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from tests.pipeline.steps import Net, counts_of, make_gpt2, mesh_of, same_steps, token_batch
from tests.pipeline.test_composition import net_plan, sum_and_count
from tests.pipeline.test_steps import NAMES, assert_exact
from tests.runtime.llama import make_llama
from tests.simulate import simulate
from vescale import parallelize, plan_zoo
from vescale.comm import record_comms
from vescale.pipeline import StagedProgram
from vescale.plans import PIPELINE_SCHEDULES, Plan, PlanError

ONE, TWO = {"GPipe", "1F1B"}, {"ZBVZeroBubble", "DualPipeV"}
BLOCKS = {"net": "blocks", "gpt2": "transformer.h", "llama": "model.layers"}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "gpt2":
        return make_gpt2(0.0, layers=8, attention=0.0)
    if name == "llama":
        return make_llama(num_hidden_layers=8)
    return Net(depth=8, dropout=0.0).double()


def drawn(seed: int) -> dict[str, Any]:
    """A pipeline that can run."""
    draws = random.Random(seed)
    while True:
        schedule, ranks = draws.choice(PIPELINE_SCHEDULES), draws.choice([2, 2, 4])
        per_rank = 1 if schedule in ONE else 2 if schedule in TWO else draws.choice([1, 2])
        found = {
            "name": draws.choice(list(BLOCKS)),
            "sizes": {"pp": ranks, **draws.choice([{}, {"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}])},
            "splits": sorted(draws.sample(range(1, 8), ranks * per_rank - 1)),
            "schedule": schedule,
            "microbatches": draws.choice([1, 2, 3, 4, 5, 7, 8, 9]),
            "reduce": draws.choice(["step", "microbatch"]),
            "accumulate": draws.random() < 0.5,
        }
        if torch.Size(found["sizes"].values()).numel() > 8:
            continue
        try:
            StagedProgram.of(plan_of(found["sizes"], found), make(found["name"]))
        except PlanError:
            continue
        return found


def plan_of(mesh: Any, found: dict[str, Any]) -> Plan:
    axes = mesh if isinstance(mesh, dict) else dict(zip(mesh.mesh_dim_names, mesh.shape))
    if found["name"] == "net":
        plan = net_plan(mesh) if {"dp", "tp"} <= axes.keys() else Plan(mesh)
    else:
        plan = plan_zoo.load(found["name"], mesh) if {"dp", "tp"} <= axes.keys() else Plan(mesh)
    return plan.pipeline(
        split_before=[f"{BLOCKS[found['name']]}.{n}" for n in found["splits"]],
        schedule=found["schedule"],
        microbatches=found["microbatches"],
        reduce=found["reduce"],
        loss=loss_of(found) or "out.loss",
    )


def loss_of(found: dict[str, Any]) -> Any:
    """GPT-2's own loss is float32, whose gradient over parts of a cut vocabulary is rounded otherwise, also without stages
    (3.8e-8): one in float64."""
    return sum_and_count if found["name"] == "gpt2" and {"dp", "tp"} <= found["sizes"].keys() else None


def batches_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = found["microbatches"] * -(-8 // found["microbatches"])  # the first two have no labels
    names = NAMES if found["name"] == "net" else ("input_ids", "labels")
    return [token_batch(step, rows=rows, names=names) for step in range(2)]


def drawn_case(found: dict[str, Any], model: nn.Module) -> tuple[dict[str, float], Counter[str]]:
    batches = batches_of(found)
    exact = same_steps(
        lambda: copy.deepcopy(model),
        lambda: plan_of(mesh_of(**found["sizes"]), found),
        batches,
        draws=False,
        loss=loss_of(found),
        accumulate=found["accumulate"],
    )
    parallel = parallelize(copy.deepcopy(model), plan_of(mesh_of(**found["sizes"]), found))
    parallel.step(**batches[0])
    with record_comms() as ledger:
        parallel.step(**batches[0])
    counts = Counter({"send": "sends", "recv": "receives"}[r.op] for r in ledger.records if r.op in ("send", "recv"))
    counts["reductions"] = sum("bucket " in r.requester or "tied" in r.requester for r in ledger.records)
    return exact, counts


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_drawn_pipelines(seed: int) -> None:
    found = drawn(seed)
    world = torch.Size(found["sizes"].values()).numel()
    predicted = counts_of(plan_of(found["sizes"], found), make(found["name"]), batches_of(found)[0])
    results = simulate(drawn_case, world, found, make(found["name"]), timeout=600.0)  # eight ranks on two cores
    # Hugging Face's losses are float32; parts of a cut vocabulary are rounded otherwise.
    assert_exact([exact for exact, _ in results], loss=1e-12 if found["name"] == "net" else 1e-6)
    per_rank = world // found["sizes"]["pp"]
    schedule = StagedProgram.of(plan_of(found["sizes"], found), make(found["name"])).schedule
    for rank, (_, counts) in enumerate(results):
        for what in ("sends", "receives", "reductions"):
            wanted = sum(predicted[stage][what] for stage in schedule.stages_of(rank // per_rank))
            assert counts[what] == wanted, (found, rank, what, counts, predicted)
