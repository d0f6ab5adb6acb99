"""What a forward computes across the rows of its batch: that of one device, or a plan error before the first step."""

from __future__ import annotations

import copy
import random
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tests.pipeline.forwards import FORWARDS, Net, batch_for
from tests.pipeline.steps import mesh_of, rel
from tests.ranks import RankError, RankPools
from tests.whole import whole
from vescale import parallelize
from vescale.errors import PipelineWarning
from vescale.pipeline._gates import current_run
from vescale.pipeline._stage_run import StageRun
from vescale.plans import Plan, PlanError


class Rows(nn.Module):
    """A value for each row, and a loss of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.out = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        for n, block in enumerate(self.blocks):
            if n == 1 and self.kind == "rolled":
                x = x.roll(1, 0)
            x = block(x).tanh()
        return LOSSES[self.kind](self.out(x)[:, 0], r)


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "plain": lambda z, r: (z - r).square().mean(),
    "quotient": lambda z, r: (z * (r > 0)).sum() / (r > 0).sum(),
    "groups in micro-batches": lambda z, r: (
        (r.view(-1, 2) - r.view(-1, 2).mean(1, keepdim=True)).flatten() * z
    ).mean(),
    "rolled": lambda z, r: (z - r).square().mean(),
    "advantages": lambda z, r: -((r - r.mean()) / r.std() * z).mean(),
    "ratio of one": lambda z, r: -((r - r.mean()) / r.std() * (z - z.detach()).exp()).mean(),
    "halves": lambda z, r: -F.logsigmoid(z.chunk(2)[0] - z.chunk(2)[1]).mean(),
    "normalized weights": lambda z, r: (z * r.abs() / r.abs().sum()).sum(),
    "positions": lambda z, r: (z * torch.arange(len(z))).mean(),
    "groups across": lambda z, r: ((r.view(-1, 8) - r.view(-1, 8).mean(1, keepdim=True)).flatten() * z).mean(),
}
REFUSED = {"rolled"}


def batch_of_rows(rows: int = 8) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(rows, 6, generator=draws, dtype=torch.float64),
        "r": torch.randn(rows, generator=draws, dtype=torch.float64),
    }


def step_or_refusal(model: nn.Module, plan: Plan, batch: dict[str, Any], path: Callable[[Any], Any]) -> float | str:
    """The largest difference of loss and gradients from those of one device; or the message of a plan error."""
    one = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = path(one(**batch))
    expected.backward()
    try:
        model = parallelize(model, plan)
        torch.manual_seed(1)
        found = model.step(**batch)
    except PlanError as error:
        return str(error)
    largest = max(float(p.grad.abs().max()) for p in one.parameters() if p.grad is not None)
    differences = [rel(found, expected.detach()) if abs(float(expected)) > 1e-9 * largest else 0.0]
    for name, parameter in model.named_parameters():
        wanted = one.get_parameter(name).grad
        assert (parameter.grad is None) == (wanted is None), name
        if wanted is not None:  # a sum of zero has rounding errors alone
            scale = max(float(wanted.abs().max()), 1e-2 * largest) or 1.0  # all are zero
            differences.append(float((whole(parameter.grad) - wanted).abs().max()) / scale)
    return max(differences)


def kinds_case(kinds: list[str], rows: str) -> dict[str, float | str]:
    found = {}
    for kind in kinds:
        torch.manual_seed(0)
        plan = Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4, loss="out", rows=rows)
        found[kind] = step_or_refusal(Rows(kind).double(), plan, batch_of_rows(), lambda out: out)
    return found


def test_rows_that_depend_on_each_other(ranks: RankPools) -> None:
    one, other = ranks.run(kinds_case, list(LOSSES), "batch", world_size=2)
    assert {kind for kind, result in one.items() if isinstance(result, str)} == REFUSED
    for kind, result in one.items():
        if isinstance(result, str):
            assert result == other[kind] and "microbatches=1" in result, kind
        else:
            assert max(result, other[kind]) <= 1e-12, (kind, result, other[kind])


def forwards_case(cases: list[tuple[str, Any]], pp: int, microbatches: int, rows: int) -> dict[str, float | str]:
    """``cases``: names of forwards, and the policy of a checkpoint entry for blocks, or none."""
    found = {}
    for name, policy in cases:
        torch.manual_seed(0)
        splits = [f"blocks.{4 // pp * n}" for n in range(1, pp)]
        plan = Plan(mesh_of(pp=pp)).pipeline(split_before=splits, microbatches=microbatches, loss="out")
        if policy is not None:
            plan.checkpoint(r"blocks\.\d+", policy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PipelineWarning)
            found[name] = step_or_refusal(Net(name).double(), plan, batch_for(name, rows), lambda out: out)
    return found


def check_forwards(ranks: RankPools, cases: list[tuple[str, Any]], pp: int, microbatches: int, rows: int) -> None:
    results = ranks.run(forwards_case, cases, pp, microbatches, rows, world_size=pp, timeout=2400)
    wrong = {}
    for name, _ in cases:
        found = [result[name] for result in results]
        if isinstance(found[0], str):
            assert all(message == found[0] for message in found), found
            assert name in EDITED or (name in PAIRS and rows == microbatches), found[0]
        elif not max(found) <= 1e-12:
            wrong[name] = max(found)
    assert not wrong, wrong


SIZES = [(2, 4, 8), (2, 2, 8), (2, 8, 8), (4, 4, 8), (4, 6, 12), (2, 3, 6), (4, 5, 10), (4, 8, 16)]
PAIRS = {"pairs_mixed"}  # of rows, which go into modules together
POLICIES = [None, "full", "selective"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pp, microbatches, rows", SIZES)
def test_forwards(ranks: RankPools, pp: int, microbatches: int, rows: int, policy: Any) -> None:
    check_forwards(ranks, [(name, policy) for name in FORWARDS], pp, microbatches, rows)


def test_rows_that_are_compared_with_a_mean(ranks: RankPools) -> None:
    check_forwards(ranks, [("easier_than_the_mean", None), ("harder_than_the_mean", "full")], 2, 4, 16)


@pytest.mark.parametrize("seed", range(3))
def test_drawn_forwards(ranks: RankPools, seed: int) -> None:
    draw = random.Random(seed)
    cases = [(name, draw.choice(POLICIES)) for name in draw.sample(sorted(FORWARDS), 10)]
    check_forwards(ranks, cases, *draw.choice([size for size in SIZES if size[0] == 2 or seed == 2]))


# For each forward that is refused, a part of the message, and the edit that the message names, applied.
GPIPE = {"schedule": "GPipe", "microbatches": 1}
EDITED: dict[str, tuple[str, dict[str, Any], Callable[..., Any]]] = {
    **{
        name: ("depends on rows of several micro-batches: .* use microbatches=1 with GPipe", GPIPE, FORWARDS[name])
        for name in ("manifold_mixup", "whitened_features", "attention_over_rows")
    },
    "pairs_mixed": ("or use microbatches=1 with GPipe", GPIPE, FORWARDS["pairs_mixed"]),
    "uncertainties": (
        r"reads the parameter 'sigmas', .* pass stages=\[\[paths\], ...\], with 'sigmas' in that of stage 1",
        {
            "split_before": None,
            "stages": [["embed", "inp", r"blocks\.[01]"], [r"blocks\.[23]", "head", "value", "sigmas"]],
        },
        FORWARDS["uncertainties"],
    ),
    "baseline_of_values": (
        "calls 'inp' in stage 1, .* keep the result of the first call",
        {},
        lambda net, x, r: (lambda z: (z * (r - z.mean().detach())).mean())(net.score(x)),
    ),
    "small_loss_selection": (
        r"has shapes that depend on the values of parameters.* multiply by the mask and divide by its sum",
        {},
        lambda net, x, y: (lambda c: (lambda mask: (c * mask).sum() / mask.sum())((c <= c.detach().median()).double()))(
            F.cross_entropy(net.classes(x), y, reduction="none")
        ),
    ),
}


class Edited(Net):
    def forward(self, **batch: Any) -> Any:
        return EDITED[self.name][2](self, **batch)


def edits_case(names: list[str]) -> dict[str, tuple[str, float | str]]:
    found = {}
    for name in names:
        torch.manual_seed(0)
        _, options, _ = EDITED[name]
        results = []
        for made, changed in ((Net, {}), (Edited, options)):
            model = made(name).double()
            given = {"split_before": ["blocks.2"], "microbatches": 8, "loss": "out", **changed}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PipelineWarning)
                plan = Plan(mesh_of(pp=2)).pipeline(**given)
                results.append(step_or_refusal(model, plan, batch_for(name, 8), lambda out: out))
        found[name] = tuple(results)
    return found


def test_edits_of_messages(ranks: RankPools) -> None:
    """What is refused is equal to one device after the edit that the message names."""
    for results in ranks.run(edits_case, list(EDITED), world_size=2):
        for name, (message, after) in results.items():
            assert isinstance(message, str) and re.search(EDITED[name][0], message), (name, message)
            assert not isinstance(after, str) and after <= 1e-12, (name, after)


class Exhausted(nn.Module):
    """A block that has no memory for the rows of two micro-batches, on some ranks."""

    def __init__(self, error: type[Exception], *on: int) -> None:
        super().__init__()
        self.linear, self.error, self.on = nn.Linear(6, 6), error, on

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(current_run(), StageRun) or torch.distributed.get_rank() not in self.on or len(x) <= 2:
            return self.linear(x)
        raise self.error("out of memory: tried to allocate 9 GiB")


def exhausted_case(error: type[Exception], rank: int, block: int, pp: int) -> tuple[list[float | str], list[str]]:
    torch.manual_seed(0)
    model = Rows("plain").double()
    model.blocks[block] = Exhausted(error, rank).double()
    plan = Plan(mesh_of(pp=pp)).pipeline(
        split_before=[f"blocks.{4 // pp * n}" for n in range(1, pp)], microbatches=4, loss="out"
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = step_or_refusal(model, plan, batch_of_rows(), lambda out: out)
    return [found], [str(one.message) for one in told if one.category is PipelineWarning]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, MemoryError])
def test_a_trial_without_memory_is_left_out_on_all_ranks(ranks: RankPools, error: type[Exception]) -> None:
    for rank in range(4) if error is RuntimeError else (1,):
        results = ranks.run(exhausted_case, error, rank, rank, 4, world_size=4)
        assert all(found <= 1e-12 for (found,), _ in results), results
        assert any("there is not enough memory to run the first two micro-batches together" in t for t in results[0][1])
        assert not any(told for _, told in results[1:])


def exhausted_siblings_case(on: tuple[int, ...]) -> tuple[float | str, list[str]]:
    """Two ranks run a stage, and gather the result of the block."""
    torch.manual_seed(0)
    model = Rows("plain").double()
    model.blocks[1] = Exhausted(torch.OutOfMemoryError, *on).double()
    plan = Plan(mesh_of(pp=2, tp=2)).pipeline(split_before=["blocks.2"], microbatches=4, mesh="pp", loss="out")
    plan.shard("blocks.1.linear.(weight|bias)", Shard(0), mesh="tp").shard(
        "blocks.1.linear.<out>", Replicate(), mesh="tp"
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = step_or_refusal(model, plan, batch_of_rows(), lambda out: out)
    return found, [str(one.message) for one in told if one.category is PipelineWarning]


def test_ranks_of_a_stage_run_out_of_memory_together(ranks: RankPools) -> None:
    results = ranks.run(exhausted_siblings_case, (0, 1), world_size=4)
    assert all(found <= 1e-12 for found, _ in results), results
    assert any("there is not enough memory to run the first two micro-batches" in text for text in results[0][1])


def test_one_rank_of_a_stage_runs_out_of_memory() -> None:
    pools, started = RankPools(), time.monotonic()
    try:
        with pytest.raises(RankError, match="other ranks of the stage wait for this one"):
            pools.run(exhausted_siblings_case, (1,), world_size=4)
    finally:
        pools.close()
    assert time.monotonic() - started < 50  # gloo's limit is 60 s


class Stateful(Rows):
    """A loss with a number or a buffer of the model, which may change between steps; or with what a forward leaves."""

    def __init__(self, kind: str) -> None:
        super().__init__("plain")
        self.what, self.coefficient, self.steps, self.baseline = kind, 1.0, 0, 0.0
        self.register_buffer("scale", torch.tensor(1.0).double())
        if kind == "spectral norm":
            for block in (self.blocks[0], self.blocks[3]):
                nn.utils.parametrizations.spectral_norm(block)
            nn.utils.spectral_norm(self.blocks[2])
        if kind == "counting block":
            self.blocks[1] = Counting()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor, r: torch.Tensor, baseline: Any = None) -> torch.Tensor:
        kind = self.what
        if kind == "read early":
            x = x / self.scale
        if kind == "read early, counted late":
            x = x * (1 + self.calls)
        if kind in ("moving buffer", "counting buffer", "saved buffer"):
            self.scale.mul_(0.9).add_(0.1 * (r.abs().mean() if kind == "moving buffer" else 1.0))
        if kind == "moving number" and baseline is None:
            self.baseline = 0.9 * self.baseline + 0.1 * r.mean().item()
        before = self.baseline if baseline is None else baseline
        self.steps += 1
        for n, block in enumerate(self.blocks):
            x = block(x).tanh()
            if n == 0 and kind in ("written behind a block", "read by another stage"):
                with torch.no_grad():
                    self.scale.mul_(0.9).add_(0.1 * x.abs().mean())
            if (n in (0, 2) and kind == "written twice") or (n == 2 and kind == "counted behind a block"):
                self.calls += 1
        z = self.out(x)[:, 0]
        if kind == "read by another stage":
            z = z + self.scale.clone()
        if kind == "saved buffer":
            z = z / self.scale
        if kind == "assigned":
            self.scale = self.scale * 0.9 + 0.1 * r.mean()
        if kind in ("counted late", "read early, counted late"):
            self.calls += 1
        if kind == "moving late":
            self.scale.mul_(0.9).add_(0.1 * r.abs().mean())
        if kind == "moving attribute":
            self.baseline = 0.9 * self.baseline + 0.1 * z.mean().detach()
        with torch.no_grad():
            if kind in ("moving activations", "read early"):
                self.scale.mul_(0.9).add_(0.1 * z.abs().mean())
            if kind == "moving direction":
                F.normalize(z.mean().view(1), dim=0, out=self.scale.view(1))
        values = r * self.coefficient if kind == "number" else r
        if kind not in ("number", "read early", "counter", "written behind a block"):
            values = r / self.scale.clone()
        return (z * (r - before - values.mean())).mean()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("calls", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) / self.calls.clone()


CHOICES: dict[str, Callable[..., Any]] = {
    "mean": lambda net, ids, keep: -net.logps(ids)[keep].mean(),
    "sum": lambda net, ids, keep: -net.logps(ids)[keep].sum(),
    "positions": lambda net, ids, keep: -net.logps(ids)[keep.nonzero()[:, 0], keep.nonzero()[:, 1]].mean(),
    "selected": lambda net, ids, keep: net.logps(ids).masked_select(keep).square().mean(),
    "head": lambda net, ids, keep: F.cross_entropy(net.head(net.tokens(ids)[:, :-1][keep]), ids[:, 1:][keep]),
    "rows": lambda net, ids, keep: net.logps(ids).sum(1)[keep[:, 0]].mean(),
    "repeated": lambda net, ids, keep: net.logps(ids).sum(1).repeat_interleave(keep.sum(1)).mean(),
    "beside": lambda net, ids, keep: (
        net.logps(ids)[keep] * (ids[:, 1:][keep] - ids[:, 1:][keep].double().mean())
    ).mean(),
}


class Choosing(Net):
    def forward(self, **batch: Any) -> Any:
        return CHOICES[self.name](self, **batch)


def chosen_case(numbers: list[int]) -> dict[str, float | str]:
    """``numbers``: of elements that are chosen in each micro-batch; those of the first are a quarter of all."""
    draws = torch.Generator().manual_seed(2)
    ids, keep = torch.randint(1, 12, (8, 5), generator=draws), torch.zeros(8, 4, dtype=torch.bool)
    for n, number in enumerate(numbers):
        keep[2 * n : 2 * n + 2].view(-1)[torch.randperm(8, generator=draws)[:number]] = True
    found = {}
    for name in CHOICES:
        torch.manual_seed(0)
        plan = Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4, loss="out")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PipelineWarning)
            found[name] = step_or_refusal(Choosing(name).double(), plan, {"ids": ids, "keep": keep}, lambda out: out)
    return found


@pytest.mark.parametrize("numbers", [[4, 2, 6, 4], [4, 4, 2, 6], [3, 4, 2, 1]])
def test_rows_that_values_choose_may_be_as_many_by_chance(ranks: RankPools, numbers: list[int]) -> None:
    for found in ranks.run(chosen_case, numbers, world_size=2):
        assert all(not isinstance(each, str) and each <= 1e-12 for each in found.values()), found


def stateful_case(kind: str, edit: str = "", schedule: str = "1F1B", microbatches: int = 4) -> tuple[float | str, int]:
    """The largest difference of losses, gradients and buffers over four steps; and how often the forward was traced."""
    torch.manual_seed(0)
    one: Any = Stateful(kind)
    one = one.double()
    options: dict[str, Any] = (
        GPIPE if edit == "one micro-batch" else {"microbatches": microbatches, "schedule": schedule}
    )
    splits = [f"blocks.{n}" for n in ((1, 2, 3) if schedule == "ZBV" else (2,))]
    model: Any = parallelize(
        copy.deepcopy(one), Plan(mesh_of(pp=2)).pipeline(split_before=splits, loss="out", **options)
    )
    worst, baseline = 0.0, 0.0
    for step in range(4):
        batch: dict[str, Any] = {name: value + 0.1 * step for name, value in batch_of_rows().items()}
        expected = one(**batch)
        expected.backward()
        if edit == "before the step":
            baseline = 0.9 * baseline + 0.1 * float(batch["r"].mean())
            batch["baseline"] = torch.tensor(baseline, dtype=torch.float64)
        try:
            worst = max(worst, float((model.step(**batch) - expected).detach().abs()))
        except PlanError as error:
            return str(error), 0
        for name, parameter in model.named_parameters():
            worst = max(worst, float((whole(parameter.grad) - one.get_parameter(name).grad).abs().max()))
        for name, buffer in model.named_buffers():
            worst = max(worst, float((whole(buffer) - one.get_buffer(name)).abs().max()))
        for each in (one, model):
            each.zero_grad()
            each.coefficient += 0.1
            each.scale.add_(0.1)
    return worst, model._pipeline._num_traces


@pytest.mark.parametrize("kind", ["number", "buffer", "counter"])
def test_numbers_and_buffers_change_between_steps(ranks: RankPools, kind: str) -> None:
    for found, num_traces in ranks.run(stateful_case, kind, world_size=2):
        assert not isinstance(found, str) and found <= 1e-12, found
        assert num_traces <= 6 or kind == "number"  # what changes nothing is found once


ALIKE = [
    *("moving buffer", "counting buffer", "saved buffer", "counting block", "spectral norm", "counted late"),
    *("moving late", "read early, counted late", "counted behind a block"),
]


@pytest.mark.parametrize("kind", ALIKE)
def test_buffers_that_all_micro_batches_write_alike(ranks: RankPools, kind: str) -> None:
    for schedule, microbatches in (("1F1B", 4), ("ZBV", 2)):
        for found, _ in ranks.run(stateful_case, kind, "", schedule, microbatches, world_size=2):
            assert not isinstance(found, str) and found <= 1e-12, (schedule, found)


def test_ranks_have_the_same_of_a_buffer_that_one_stage_writes(ranks: RankPools) -> None:
    for found, _ in ranks.run(stateful_case, "written behind a block", "one micro-batch", world_size=2):
        assert not isinstance(found, str) and found <= 1e-12, found


STATE = {
    "moving number": ("'baseline'.*compute it before .step.. and pass it in the batch", "before the step"),
    "moving attribute": ("'baseline'|an earlier forward has left", ""),
    "moving activations": ("the buffer 'scale'.* use microbatches=1 with GPipe", "one micro-batch"),
    "moving direction": ("the buffer 'scale'.* use microbatches=1 with GPipe", "one micro-batch"),
    "read early": ("the buffer 'scale'.* use microbatches=1 with GPipe", "one micro-batch"),
    "read by another stage": ("computes from parameters, and reads it in stage 1", ""),
    "written twice": (
        "the buffer 'calls' around the modules of stages 0 and 1; write to it around those of one stage",
        "",
    ),
    "assigned": (r"assigns the buffer 'scale'; write to it in place, as in self.scale.copy_\(value\)", ""),
}


@pytest.mark.parametrize("kind", STATE)
def test_state_that_the_loss_depends_on_is_refused(ranks: RankPools, kind: str) -> None:
    """With the edit that the message names, it is as on one device."""
    pattern, edit = STATE[kind]
    for found, _ in ranks.run(stateful_case, kind, world_size=2):
        assert isinstance(found, str) and re.search(pattern, found), found
    for found, _ in ranks.run(stateful_case, kind, edit, world_size=2) if edit else ():
        assert not isinstance(found, str) and found <= 1e-12, found


class Dropped(nn.Module):
    """Blocks that are left out at random, or scaled, by numbers of Python, of NumPy, or of the batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.blocks, self.out = kind, nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 1)
        self.blocks[1] = nn.Sequential(nn.Linear(6, 6), Random(kind))

    def forward(self, x: torch.Tensor, keep: list[float]) -> torch.Tensor:
        for block, number in zip(self.blocks, keep):
            if self.kind == "dropped" and random.random() < 0.5:
                continue
            y = block(x).tanh()
            if self.kind == "scaled":
                y = y * np.random.rand()
            x = x + number * (y - x)
        return self.out(x).square().mean()


class Random(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "dropped inside" and random.random() < 0.5:
            return x
        return self.linear(x) * (np.random.rand() if self.kind == "scaled inside" else 1.0)


def drawn_on_host(kind: str) -> list[float | str]:
    found = []
    for edit in (kind, ""):
        torch.manual_seed(0)
        random.seed(1), np.random.seed(1)
        plan = Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4, loss="out")
        one: Any = Dropped(edit).double()
        model: Any = None
        state, worst = random.getstate(), 0.0
        for step in range(2):
            batch = {"x": batch_of_rows()["x"], "keep": [float((n + step) % 2) for n in range(4)]}
            try:
                model = model if step else parallelize(copy.deepcopy(one), plan)
                loss = model.step(**batch)
            except PlanError as error:
                assert random.getstate() == state
                found.append(str(error))
                break
            expected = one(**batch)
            expected.backward()
            worst = max(worst, float((loss - expected).detach().abs()))
            for name, parameter in model.named_parameters():
                worst = max(worst, float((whole(parameter.grad) - one.get_parameter(name).grad).abs().max()))
        else:
            found.append(worst)
    return found


@pytest.mark.parametrize("kind", ["dropped", "scaled", "dropped inside", "scaled inside"])
def test_draws_of_python_and_numpy_are_refused(ranks: RankPools, kind: str) -> None:
    for message, edited in ranks.run(drawn_on_host, kind, world_size=2):
        assert isinstance(message, str) and "Python's random module or NumPy" in message, message
        assert isinstance(edited, float) and edited <= 1e-12, edited


def test_each_micro_batch_by_itself(ranks: RankPools) -> None:
    for found in ranks.run(kinds_case, ["quotient", "advantages"], "microbatch", world_size=2):
        assert found["quotient"] <= 1e-12 and found["advantages"] > 0.1


def normalized_case() -> float | str:
    """With batch normalization in a block, of which users are warned."""
    torch.manual_seed(0)
    model = Rows("plain").double()
    model.blocks[1] = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double()
    plan = Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4, loss="out")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = step_or_refusal(model, plan, batch_of_rows(), lambda out: out)
    assert torch.distributed.get_rank() or any(one.category is PipelineWarning for one in told)
    return found


def test_batch_normalization_is_no_refusal(ranks: RankPools) -> None:
    for found in ranks.run(normalized_case, world_size=2):
        assert not isinstance(found, str), found


class Labelled(nn.Module):
    """A classifier whose inputs can be guessed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def unnamed_case() -> str:
    with pytest.raises(PlanError) as raised:
        parallelize(Labelled(), Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.1"], loss="out.losses"))
    parallelize(Labelled(), Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.1"], loss="out.loss"))
    return str(raised.value)


def test_a_loss_that_names_nothing_is_found_before_a_batch(ranks: RankPools) -> None:
    for message in ranks.run(unnamed_case, world_size=2):
        assert "has no 'losses'" in message
