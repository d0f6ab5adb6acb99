"""Schedules on paper: none deadlocks, each forward has its backward, and balanced cuts are the best there are."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from tests.pipeline.steps import Net, token_batch
from tests.pipeline.test_composition import make_mixtral
from tests.runtime.llama import make_llama
from vescale.ir import lower
from vescale.pipeline import Action, StagedProgram, make_schedule, measure_costs, partition, schedule_page, state_bytes
from vescale.pipeline._balance import block_memory, block_work
from vescale.pipeline._schedule import releases
from vescale.plans import PIPELINE_SCHEDULES, Plan, PlanError

PER_RANK = {"GPipe": (1,), "1F1B": (1,), "ZBVZeroBubble": (2,), "DualPipeV": (2,)}
CASES = [
    (name, ranks, per_rank, microbatches)
    for name in PIPELINE_SCHEDULES
    for ranks in (2, 4)
    for per_rank in PER_RANK.get(name, (1, 2))
    for microbatches in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
]


def entry_of(**options: Any) -> Any:
    entry = Plan({"pp": 2}).pipeline(split_before=["x"], **options).pipeline_entry
    assert entry is not None
    return entry


@pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
def test_dry_runs(name: str) -> None:
    """Either a plan error with the numbers that are needed, or a schedule that ends, and computes each thing once."""
    ran = 0
    for _, ranks, per_rank, microbatches in (case for case in CASES if case[0] == name):
        stages = ranks * per_rank
        try:
            schedule = make_schedule(entry_of(schedule=name, microbatches=microbatches), ranks, stages)
        except PlanError as error:
            assert re.search(r"use (a multiple of|microbatches=)", str(error)), (name, ranks, per_rank, microbatches)
            continue
        ran += 1
        assert sorted(schedule.rank_of) == sorted(list(range(ranks)) * per_rank)
        done = [action for actions in schedule.actions for action in actions]
        assert len(done) == len(set(done))
        for stage, microbatch in itertools.product(range(stages), range(microbatches)):
            assert Action(stage, "F", microbatch) in done
            whole = Action(stage, "B", microbatch) in done
            halves = [Action(stage, kind, microbatch) in done for kind in "IW"]
            assert halves == [not whole] * 2
        for actions in schedule.actions:
            place = {action: n for n, action in enumerate(actions)}
            for stage, kind, microbatch in actions:
                if kind != "F":
                    before = "I" if kind == "W" else "F"
                    assert place[Action(stage, before, microbatch)] < place[Action(stage, kind, microbatch)]
        # As text, it is the same schedule.
        again = make_schedule(entry_of(schedule=schedule.to_csv(), microbatches=microbatches), ranks, stages)
        assert (again.actions, again.starts, again.peak) == (schedule.actions, schedule.starts, schedule.peak)
        sent = schedule.messages()
        assert sum(m["forward_sends"] for m in sent.values()) == sum(m["forward_receives"] for m in sent.values())
    assert ran >= 8


def test_bubbles_and_peaks_are_those_of_the_papers() -> None:
    for ranks, m in ((2, 4), (4, 8), (4, 16)):
        one, pipe = (make_schedule(entry_of(schedule=n, microbatches=m), ranks, ranks) for n in ("1F1B", "GPipe"))
        assert one.length == pipe.length == 3 * (m + ranks - 1)
        assert one.bubble == pytest.approx((ranks - 1) / (m + ranks - 1))
        assert pipe.peak == (m,) * ranks
        assert one.peak == tuple(min(m, ranks - rank) for rank in range(ranks))
        zbv = make_schedule(entry_of(schedule="ZBV", microbatches=m), ranks, 2 * ranks)
        assert zbv.bubble < one.bubble


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0F0,0B0\n1B0,1F0\n", "stage 1, microbatch 0 without first running Forward"),
        ("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n", "the last stage processes micro-batches 1, 0; write 0 to 1 in order"),
        ("0F0,0B0\n1F0\n", "Invalid backward microbatches for stage 1"),
        ("0F0,0B0\n0F1,0B1\n", "Stage 0 is assigned to both rank 1 and rank 0"),
    ],
)
def test_schedules_that_cannot_run(text: str, problem: str) -> None:
    m = 2 if "B1" in text else 1
    with pytest.raises(PlanError, match=f"schedule CSV: .*({problem})"):
        make_schedule(entry_of(schedule=text, microbatches=m), 2, 2)


def test_stages_that_are_let_go() -> None:
    """Four stages on a rank, three resident at most: of a looped schedule the first is let go when the fourth is near."""
    actions = [Action(stage, kind, 0) for kind, order in (("F", range(4)), ("B", range(3, -1, -1))) for stage in order]
    gone = releases(actions)
    resident: set[int] = set()
    gathers = 0
    for action in actions:
        resident -= set(gone.get(action, ()))
        gathers += action.stage not in resident
        resident.add(action.stage)
        assert len(resident) <= 3
    assert gathers == 5  # the first stage twice
    assert releases([Action(0, kind, m) for m in range(3) for kind in "FB"]) == {}
    # Between the halves of its backward a stage stays, whatever comes between them.
    halved = [Action(0, "F", 0), Action(0, "I", 0), *(Action(stage, "F", 0) for stage in (1, 2, 3)), Action(0, "W", 0)]
    assert not any(0 in stages for stages in releases(halved).values())
    assert releases([*halved[:1], *halved[2:5], Action(0, "B", 0)])[halved[2]] == (0,)


def brute_force(costs: list[int], parts: int, sizes: list[int], limit: float) -> float | None:
    found = []
    for inner in itertools.combinations(range(1, len(costs)), parts - 1):
        edges = [0, *inner, len(costs)]
        if all(sum(sizes[a:b]) <= limit for a, b in itertools.pairwise(edges)):
            found.append(max(sum(costs[a:b]) for a, b in itertools.pairwise(edges)))
    return min(found, default=None)


def test_partition_is_the_best_under_the_limit() -> None:
    draws = random.Random(0)
    for _ in range(60):
        n = draws.randint(1, 8)
        parts = draws.randint(1, n)
        costs, sizes = ([draws.randint(1, 9) for _ in range(n)] for _ in range(2))
        limit = draws.choice([float("inf"), draws.randint(5, 30)])
        best = brute_force(costs, parts, sizes, limit)
        if best is None:
            with pytest.raises(ValueError, match="are all under"):
                partition(costs, parts, sizes, limit)
            continue
        edges = [*partition(costs, parts, sizes, limit), n]
        assert max(sum(costs[a:b]) for a, b in itertools.pairwise(edges)) == best
        assert all(sum(sizes[a:b]) <= limit for a, b in itertools.pairwise(edges))


def uneven() -> nn.Module:
    net = Net(depth=8, dropout=0.0)
    for n in (0, 1):
        net.blocks[n].up = nn.Linear(16, 320)
        net.blocks[n].down = nn.Linear(320, 16)
    return net


def test_balance_by_cost_and_memory() -> None:
    plan = Plan({"pp": 2}).pipeline(balance="cost", microbatches=4)
    assert StagedProgram.of(plan, uneven()).cut.splits == ("blocks.1",)
    weights = sum(p.numel() for p in uneven().parameters()) * 4 * 4 / 2**30  # gradients, and two states
    with pytest.raises(PlanError, match=r"memory_gib=.* take .* GiB on the fullest rank .* pass memory_gib="):
        StagedProgram.of(Plan({"pp": 2}).pipeline(balance="cost", microbatches=4, memory_gib=weights / 4), uneven())
    again = Plan({"pp": 2}).pipeline(balance="cost", microbatches=4, memory_gib=weights)
    assert StagedProgram.of(again, uneven()).cut.splits == ("blocks.1",)
    written = Plan.from_yaml(again.to_yaml())
    assert written.pipeline_entry == again.pipeline_entry
    for per_rank, num_stages in ((1, 2), (2, 4)):
        made = Plan({"pp": 2}).pipeline(
            balance="cost", schedule="Interleaved1F1B", microbatches=4, stages_per_rank=per_rank
        )
        assert StagedProgram.of(made, uneven()).cut.num_stages == num_stages


class Repeated(nn.Module):
    """Equal parameters; the first block uses its own three times, the last multiplies tokens with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *rest = self.blocks
        for _ in range(3):
            x = first(x)
        for block in rest:
            x = block(x)
        return x.sum()


def test_cost_is_the_work_of_a_forward() -> None:
    rows = block_work(Repeated(), "blocks", 6)
    assert [work / rows[1] for work in rows] == [3, 1, 1, 1, 1, 1]
    plan = Plan({"pp": 2}).pipeline(balance="cost", microbatches=4)
    assert StagedProgram.of(plan, Repeated()).cut.splits == ("blocks.2",)  # by parameters it would be blocks.3
    # Tokens of the model's own length, 64: products with parameters, and of attention (scores, and what they weigh).
    llama = make_llama()
    config: Any = llama.config
    rows = block_work(llama, "model.layers", 2)
    products = sum(p.numel() for p in llama.model.layers[0].parameters() if p.ndim > 1)  # type: ignore[union-attr]
    length = config.max_position_embeddings
    assert rows[0] == 2 * length * (products + 2 * length * config.hidden_size)
    assert rows[1] - rows[0] == 2 * length * config.vocab_size * config.hidden_size
    # Experts in a loop do not run without values: two of four count.
    mixtral = make_mixtral()
    counts = [
        sum(p.numel() * (0.5 if "experts" in n else 1) for n, p in layer.named_parameters() if p.ndim > 1)
        for layer in mixtral.model.layers
    ]  # type: ignore[union-attr]
    head = mixtral.lm_head.weight.numel()  # type: ignore[union-attr]
    assert block_work(mixtral, "model.layers", 2) == [counts[0], counts[1] + head]


def cut_of(model: nn.Module, entries: Any = None, **options: Any) -> Any:
    plan = Plan({"pp": 2})
    if entries is not None:
        entries(plan)
    return StagedProgram.of(plan.pipeline(balance="cost", microbatches=4, **options), model)


def test_cost_is_a_table() -> None:
    costs = {r"blocks.[0-6]": 1, "blocks.7": 9.5, "head": 2}
    assert cut_of(uneven(), costs=costs).cut.splits == ("blocks.7",)
    written = Plan({"pp": 2}).pipeline(balance="cost", microbatches=4, costs=costs)
    assert Plan.from_yaml(written.to_yaml()).pipeline_entry == written.pipeline_entry
    with pytest.raises(PlanError, match=r"costs has no cost for 'blocks.7'; pass a cost for each block of 'blocks'"):
        cut_of(uneven(), costs={r"blocks.[0-6]": 1})
    with pytest.raises(PlanError, match=r"costs 'layers' matches no module of the model"):
        cut_of(uneven(), costs={r"blocks.\d": 1, "layers": 2})
    with pytest.raises(PlanError, match=r"costs: 'blocks.0' costs -1; use a non-negative number"):
        cut_of(uneven(), costs={"blocks.0": -1})
    with pytest.raises(PlanError, match=r'costs= needs balance="cost"'):
        Plan({"pp": 2}).pipeline(split_before=["blocks.1"], costs=costs)
    with pytest.raises(PlanError, match=r"microbatch_shape=\[4\]; use \[rows, tokens\], together with memory_gib="):
        cut_of(uneven(), memory_gib=1, microbatch_shape=[4])


class Slow(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.5)
        return super().forward(x)


def test_measured_costs() -> None:
    """One block sleeps, which no count of operations knows."""
    net = Net(dropout=0.0)
    net.blocks[3].up = Slow(16, 32)
    net.head.weight.grad = torch.ones(32, 16)
    costs = measure_costs(net, token_batch(0, names=("ids", "labels")), repeat=2)
    assert set(costs) == {f"blocks.{n}" for n in range(4)} | {"embed", "position", "norm", "head"}
    assert costs["blocks.3"] >= 0.5 > 3 * costs["blocks.1"]
    assert net.embed.weight.grad is net.head.weight.grad and bool((net.head.weight.grad == 1).all())
    assert all(parameter.grad is None for parameter in net.blocks.parameters())
    assert cut_of(net, costs=costs).cut.splits == ("blocks.3",)
    assert cut_of(net).cut.splits == ("blocks.2",)


def saved_by(model: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """Bytes that autograd saves, each memory once, beside parameters and inputs."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *batch.values())}
    found: dict[int, int] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        output = model(**batch)
    del output
    return sum(found.values())


def test_memory_counts_what_forwards_hold() -> None:
    """1F1B: the first stage holds two micro-batches, the second one."""
    net = Net(depth=8, dropout=0.0)
    saved = block_memory(net, "blocks", 8, None, 4, 8)
    assert sum(saved) == pytest.approx(saved_by(net, token_batch(0, 4, 8, names=("ids", "labels"))), rel=0.1)
    states = sum(state_bytes(p) for p in net.parameters())
    shape = [4096, 8]
    large = sum(saved) * 4096 / 4
    assert large > 20 * states
    gib = 2**30
    assert cut_of(net, memory_gib=4 * large / gib, microbatch_shape=shape).cut.splits == ("blocks.4",)
    assert cut_of(net, memory_gib=0.8 * large / gib, microbatch_shape=shape).cut.splits[0] in ("blocks.2", "blocks.3")
    with pytest.raises(PlanError, match="that forwards hold take"):
        cut_of(net, memory_gib=0.3 * large / gib, microbatch_shape=shape)
    cut_of(net, lambda plan: plan.checkpoint(r"blocks.\d+"), memory_gib=0.5 * large / gib, microbatch_shape=shape)
    full, half = (
        sum(block_memory(net, "blocks", 8, lower(Plan({"dp": 1}).checkpoint(r"blocks.\d+", policy), net), 4, 8))
        for policy in ("full", {"save": ["aten.addmm"]})
    )
    assert full < half < sum(saved)


def test_page_stands_alone() -> None:
    plan = Plan({"pp": 2}).pipeline(split_before=["blocks.1", "blocks.2", "blocks.3"], schedule="ZBV", microbatches=4)
    staged = StagedProgram.of(plan, Net())
    page = schedule_page(staged.schedule, "Net & <stages>", ["stage"], [["0 <b>"]])
    assert "<script" not in page and "http" not in page and "src=" not in page and "<link" not in page
    assert page.count("<rect") == sum(map(len, staged.schedule.actions))
    assert "Net &amp; &lt;stages&gt;" in page and "0 &lt;b&gt;" in page
    counts = staged.counts(token_batch(0, names=("ids", "labels")), ())
    assert [counts[stage]["sends"] for stage in range(4)] == [4, 4, 4, 4]


def test_forwards_that_are_held_together() -> None:
    """Against a count of all moments: what is found covers each of them, and is one of them."""
    for name, splits in (("1F1B", 1), ("GPipe", 1), ("ZBV", 3), ("Interleaved1F1B", 3), ("DualPipeV", 3)):
        schedule = make_schedule(entry_of(schedule=name, microbatches=8), 2, splits + 1)
        for rank, actions in enumerate(schedule.actions):
            alive, moments = Counter[int](), []
            for action in actions:
                alive[action.stage] += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
                moments.append(dict(alive))
            found = schedule.held_together(rank)
            for moment in moments:
                assert any(all(one[stage] >= n for stage, n in moment.items()) for one in found), (name, rank, moment)
            assert all(any(all(m.get(s, 0) == n for s, n in one.items()) for m in moments) for one in found)
            for stage in schedule.stages_of(rank):
                assert max(one[stage] for one in found) == schedule.held_forwards(stage)
