"""Python code that runs in a pipeline's backward (hooks of hidden tensors and of modules, custom functions, saved tensors'
hooks) and computes across rows: one device's gradients, or a plan error before the first step."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import Shard

from tests.examples import daily_sample
from tests.pipeline.steps import mesh_of
from tests.pipeline.test_rows import batch_of_rows, step_or_refusal
from tests.ranks import RankPools
from tests.runtime.zero import sharded_at_rest
from tests.whole import whole
from vescale import no_sync, parallelize
from vescale.errors import PipelineWarning
from vescale.pipeline._gates import current_run
from vescale.pipeline._stage_run import StageRun
from vescale.plans import Plan, PlanError


class Normalized(torch.autograd.Function):
    """Divides the gradient by its norm: of a row, or of all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, of_row: bool) -> torch.Tensor:
        ctx.of_row = of_row
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g / (g.norm(dim=-1, keepdim=True) if ctx.of_row else g.norm()), None


class Scaled(torch.autograd.Function):
    """Linear in the gradient, with a factor of all rows that forward has seen."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * ctx.saved_tensors[0].norm()


class SignedWeight(torch.autograd.Function):
    """Gives a weight the sign of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w.T, (x.T @ g).sign()


def packed(x: torch.Tensor) -> Any:
    return (x / x.abs().max() * 7).round(), x.abs().max()


def packed_by_rows(x: torch.Tensor) -> Any:
    most = x.abs().amax(-1, keepdim=True).clamp(min=1e-9)
    return (x / most * 7).round(), most


def scaled_by_module(module: Any, given: Any, gradients: Any) -> Any:
    return tuple(None if g is None else g * 0.5 for g in given)


def normalized_by_module(module: Any, given: Any, gradients: Any) -> Any:
    return tuple(None if g is None else g / g.norm() for g in given)


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.one, self.other = kind, nn.Linear(6, 6), nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.eye(6) + 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(x).tanh()
        if self.kind in HOOKS:
            h.register_hook(HOOKS[self.kind])
        if self.kind == "hook of a computed weight":
            weight = self.weight * 2
            weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
            h = h @ weight
        if self.kind == "hook of a node":
            h.grad_fn.register_prehook(lambda gs: tuple(g / g.norm() for g in gs))
        if self.kind in ("function of all rows", "function of a row"):
            h = Normalized.apply(h, self.kind == "function of a row")
        if self.kind == "function that has seen all rows":
            h = Scaled.apply(h)
        if self.kind == "function of a weight":
            h = SignedWeight.apply(h, self.weight)
        if self.kind in ("saved by all rows", "saved by rows"):
            packs = packed if self.kind == "saved by all rows" else packed_by_rows
            with saved_tensors_hooks(packs, lambda both: both[0] / 7 * both[1]):
                h = h * h.sin()
        return self.other(h)


HOOKS = {
    "hook of all rows": lambda g: g / g.norm(),
    "hook of a row": lambda g: g / g.norm(dim=-1, keepdim=True),
    "hook of an element": lambda g: g.clamp(-1e-3, 1e-3),
    "linear hook": lambda g: 2 * g,
}


class Model(nn.Module):
    """``place``: the number of the block with code in its backward, or 4: around modules, in the loss."""

    def __init__(self, kind: str, place: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind if n == place else "") for n in range(4))
        self.out, self.hook = nn.Linear(6, 1), HOOKS.get(kind) if place == 4 else None
        hooks = {"module's hook of all rows": normalized_by_module, "module's linear hook": scaled_by_module}
        if kind in hooks:
            self.blocks[place].other.register_full_backward_hook(hooks[kind])  # type: ignore[union-attr]

    def forward(self, x: torch.Tensor, r: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x).tanh()
        z = self.out(x)[:, 0]
        if self.hook is not None:
            z.register_hook(self.hook)
        return {"loss": (z - r).square().mean(), "z": z}


def sum_and_count(out: Any, batch: Any) -> Any:
    return (out["z"] - batch["r"]).square().sum(), len(out["z"])


def case(
    kind: str,
    place: int,
    schedule: str,
    axes: dict[str, int],
    policy: Any = None,
    loss: Any = "out.loss",
    microbatches: int = 4,
    in_no_sync: bool = False,
) -> tuple[float | str, list[bool]]:
    """The largest difference over two steps, or the message of a plan error; whether each of them had one.
    ``in_no_sync``: the first one is in it."""
    torch.manual_seed(0)
    one: Any = Model(kind, place).double()
    plan = Plan(mesh_of(**axes))
    if "dp" in axes:
        plan.shard("<in:(x|r)>", Shard(0), mesh="dp")
        sharded_at_rest(plan, ".*", "dp").unit(r"blocks\.\d+")
    if policy is not None:
        plan.checkpoint(r"blocks\.\d+", policy)
    pp = axes["pp"] * (2 if schedule in ("ZBV", "Interleaved1F1B") else 1)
    splits = [f"blocks.{4 // pp * n}" for n in range(1, pp)]
    plan.pipeline(split_before=splits, schedule=schedule, microbatches=microbatches, mesh="pp", loss=loss)
    model: Any = parallelize(copy.deepcopy(one), plan)
    worst: float | str = 0.0
    refused = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PipelineWarning)
        for step in range(2):
            batch = {name: value + step for name, value in batch_of_rows().items()}
            one(**batch)["loss"].backward()
            try:
                with no_sync(model) if in_no_sync and not step else contextlib.nullcontext():
                    model.step(**batch)
            except PlanError as error:
                worst = str(error)
                assert all(parameter.grad is None for parameter in model.parameters())
                refused.append(True)
                continue
            refused.append(False)
            for name, parameter in model.named_parameters() if step or not in_no_sync else ():
                wanted = one.get_parameter(name).grad
                assert (parameter.grad is None) == (wanted is None), name
                if wanted is not None:
                    difference = float(
                        (whole(parameter.grad) - wanted).abs().max() / wanted.abs().max().clamp(min=1e-9)
                    )
                    worst = max(worst, difference)
    return worst, refused


ACROSS = {
    "hook of all rows": "a hook of a tensor, registered at {here}, in 'blocks.{n}'",
    "hook of a computed weight": "a hook of a tensor, registered at {here}, in 'blocks.{n}'",
    "hook of a node": "a hook of a tensor, registered at {here}, in 'blocks.{n}'",
    "module's hook of all rows": "a backward hook of a module, in 'blocks.{n}'",
    "function of all rows": "Normalized.backward",
    "function that has seen all rows": "Scaled.backward",
    "function of a weight": "SignedWeight.backward",
    "saved by all rows": "a hook of saved tensors",
}
BY_ROWS = [
    "hook of a row",
    "hook of an element",
    "linear hook",
    "module's linear hook",
    "function of a row",
    "saved by rows",
]
SETTINGS: list[tuple[str, dict[str, int], Any]] = [
    ("1F1B", {"pp": 2}, None),
    ("1F1B", {"pp": 2}, "full"),
    ("GPipe", {"pp": 4}, None),
    ("ZBV", {"pp": 2}, None),
    ("Interleaved1F1B", {"pp": 2}, "selective"),
    ("1F1B", {"pp": 2, "dp": 2}, None),
    ("1F1B", {"pp": 2, "dp": 2}, "full"),
]
CASES = [(kind, place, *setting) for kind in (*ACROSS, *BY_ROWS) for place in range(4) for setting in SETTINGS]


@pytest.mark.parametrize(("kind", "place", "schedule", "axes", "policy"), daily_sample(CASES, 16))
def test_code_in_backward(
    ranks: RankPools, kind: str, place: int, schedule: str, axes: dict[str, int], policy: Any
) -> None:
    results = ranks.run(case, kind, place, schedule, axes, policy, world_size=axes["pp"] * axes.get("dp", 1))
    for found, refused in results:
        if kind in ACROSS:
            assert refused == [True, True], (found, refused)
            assert "across the rows of the batch" in found and "microbatches=1 with GPipe" in found
            here = r"\S+/test_code_in_backward.py:\d+"
            assert re.search(ACROSS[kind].format(here=here, n=place), found), found
        else:
            assert not isinstance(found, str) and found <= 1e-12, found


def sums_case() -> list[float | str]:
    """A loss function, whose gradients are divided by the count at the end of a step."""
    kinds = ["hook of an element", "linear hook"]
    return [case(kind, 1, "1F1B", {"pp": 2}, loss=loss)[0] for kind in kinds for loss in (sum_and_count, "out.loss")]


def test_a_loss_function_needs_linear_code(ranks: RankPools) -> None:
    for refused, *others in ranks.run(sums_case, world_size=2):
        assert isinstance(refused, str) and "pass a path of the output as loss=" in refused, refused
        assert all(not isinstance(found, str) and found <= 1e-12 for found in others), others


def edits_case() -> list[Any]:
    """As the message says."""
    found: list[Any] = []
    for kind in ACROSS:
        model: Any = parallelize(
            Model(kind, 1).double(),
            Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4, loss="out.loss", rows="microbatch"),
        )
        model.step(**batch_of_rows())
        found.append(case(kind, 1, "GPipe", {"pp": 2}, microbatches=1)[0])
    found += [case(kind, 1, "1F1B", {"pp": 2}, in_no_sync=True)[0] for kind in ("hook of all rows", "linear hook")]
    return found


def test_edits_of_the_message(ranks: RankPools) -> None:
    for *edited, refused, accepted in ranks.run(edits_case, world_size=2):
        assert all(not isinstance(found, str) and found <= 1e-12 for found in edited), edited
        assert isinstance(refused, str) and accepted <= 1e-12, (refused, accepted)


def normalized_case() -> list[float | str]:
    """Batch normalization of each micro-batch, of which users are warned, is that in the trial's recomputations, too."""
    found = []
    for policy in (None, "full", "selective"):
        torch.manual_seed(0)
        model = Model("linear hook", 1)
        model.blocks[1].one = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        plan = Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4, loss="out.loss")
        if policy is not None:
            plan.checkpoint(r"blocks\.\d+", policy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PipelineWarning)
            found.append(step_or_refusal(model.double(), plan, batch_of_rows(), lambda out: out["loss"]))
    return found


def test_statistics_are_those_of_a_micro_batch(ranks: RankPools) -> None:
    for found in ranks.run(normalized_case, world_size=2):
        assert all(isinstance(one, float) for one in found), found


class Exhausted(Block):
    """Has no memory for the backward of two micro-batches, on some ranks."""

    def __init__(self, on: tuple[int, ...]) -> None:
        super().__init__("linear hook")
        self.on = on

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = super().forward(x)
        if isinstance(current_run(), StageRun):
            z.register_hook(self.exhaust)
        return z

    def exhaust(self, g: torch.Tensor) -> None:
        if torch.distributed.get_rank() in self.on and len(g) > 2:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 9 GiB")


def exhausted_case(block: int) -> tuple[float | str, list[str]]:
    torch.manual_seed(0)
    model = Model("linear hook", block)
    model.blocks[block] = Exhausted((block,))
    plan = Plan(mesh_of(pp=4)).pipeline(
        split_before=[f"blocks.{n}" for n in (1, 2, 3)], microbatches=4, loss="out.loss"
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = step_or_refusal(model.double(), plan, batch_of_rows(), lambda out: out["loss"])
    return found, [str(one.message) for one in told if one.category is PipelineWarning]


def test_a_backward_without_memory_is_left_out_on_all_ranks(ranks: RankPools) -> None:
    for block in range(4):
        results = ranks.run(exhausted_case, block, world_size=4)
        assert all(not isinstance(found, str) and found <= 1e-12 for found, _ in results), results
        assert any("there is not enough memory to run the first two micro-batches" in text for text in results[0][1])
