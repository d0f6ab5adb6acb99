"""What lowering and lint know about mixtures of experts, without a rank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from vescale import lower, plan_zoo
from vescale.estimation import predict
from vescale.ir import Local, Program, check
from vescale.placements import InterleavedShard
from vescale.plans import Plan, PlanError


class Experts(nn.Module):
    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.num_experts = 6
        self.is_concatenated = True
        self.gate_up_proj = nn.Parameter(torch.empty(6, 16, 4, device="meta"))
        self.down_proj = nn.Parameter(torch.empty(6, 4, 8, device="meta"))
        if biased:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(6, 16, device="meta"))
            self.down_proj_bias = nn.Parameter(torch.empty(6, 4, device="meta"))

    def forward(self, x: Any, ids: Any, weights: Any) -> Any:
        return x


class Block(nn.Module):
    def __init__(self, biased: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(4, 6, bias=False, device="meta")
        self.experts = Experts(biased)

    def forward(self, x: Any) -> Any:
        return self.experts(x, x, self.router(x))


def plan_of(*entries: Callable[[Plan], Any], **axes: int) -> Plan:
    plan = Plan(axes)
    for entry in entries:
        entry(plan)
    return plan


def region(dispatch: str | None = "all_to_all") -> Callable[[Plan], Any]:
    return lambda plan: plan.local("experts", kind="experts", dispatch=dispatch)


def cut(path: str, placement: Any, axis: str) -> Callable[[Plan], Any]:
    return lambda plan: plan.shard(path, placement, mesh=axis)


def local_of(program: Program) -> Local:
    return next(i.op for i in program if isinstance(i.op, Local))


def test_axes_of_a_region() -> None:
    program = lower(
        plan_of(
            region(),
            cut("experts.*", Shard(0), "ep"),
            cut("experts.gate_up_proj", InterleavedShard(1, 2), "tp"),
            cut("experts.gate_up_proj_bias", InterleavedShard(1, 2), "tp"),
            cut("experts.down_proj", Shard(2), "tp"),
            dp=2,
            ep=3,
            tp=2,
        ),
        Block(biased=True),
    )
    op = local_of(program)
    assert (op.experts, op.num_experts, op.features, op.biases) == (("ep",), 6, ("tp",), ("down_proj_bias",))
    assert "experts=6 over ep;features over tp;added once: down_proj_bias" in program.to_text()
    assert Program.from_json(program.to_json()) == program


def test_axes_that_spread_experts_together() -> None:
    op = local_of(
        lower(plan_of(region(), lambda p: p.shard("experts.*", Shard(0), mesh=("dp", "tp")), dp=3, tp=2), Block())
    )
    assert op.experts == ("dp", "tp") and op.num_experts == 6


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([cut("experts.(gate_up|down)_proj", Shard(0), "ep")], r"6 experts over 4 ranks \(ep=4\).* for example 3"),
        ([cut("experts.down_proj", Shard(2), "ep")], "leaves gate_up_proj replicated"),
        (
            [cut("experts.gate_up_proj", Shard(1), "ep"), cut("experts.down_proj", Shard(2), "ep")],
            r"Interleaved\(1, 2\)",
        ),
    ],
)
def test_errors_before_anything_runs(entries: list[Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        lower(plan_of(region(), *entries, ep=4), Block())


def test_a_bias_in_front_of_the_sum_must_be_cut() -> None:
    entries = (cut("experts.gate_up_proj", InterleavedShard(1, 2), "tp"), cut("experts.down_proj", Shard(2), "tp"))
    with pytest.raises(PlanError, match="leaves gate_up_proj_bias replicated"):
        lower(plan_of(region(None), *entries, tp=2), Block(biased=True))


@pytest.mark.parametrize(
    ("entries", "rule", "message"),
    [
        ([region()], "experts-whole", r"add 'experts.\(gate_up_proj\|down_proj\)': \{ep: S\(0\)\}"),
        ([region(None), cut("experts.(gate_up|down)_proj", Shard(0), "ep"), cut("router.weight", Shard(0), "ep")],
         "router", r"router.weight, the router of experts, is sharded S\(0\) over 'ep'"),
        ([cut("experts.(gate_up|down)_proj", Shard(0), "ep")],
         "missing-region", r"add local: \{'experts': \{kind: experts, dispatch: all_to_all\}\}"),
        ([region(None), cut("experts.gate_up_proj", Shard(2), "ep"), cut("experts.down_proj", Shard(2), "ep")],
         "experts-dim", r"gate_up_proj 16, down_proj 4"),
    ],
)  # fmt: skip
def test_warnings(entries: list[Any], rule: str, message: str) -> None:
    model = Block()
    model.experts.is_concatenated = None  # type: ignore[assignment]
    found = {finding.rule: finding for finding in check(plan_of(*entries, ep=2), model)}
    assert rule in found and found[rule].severity == "warning", found
    assert re.search(message, found[rule].problem), found[rule].problem


def mixtral() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    with torch.device("meta"):
        return transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4)
        )


def test_plans_of_the_zoo_have_no_findings() -> None:
    assert check(plan_zoo.load("mixtral", {"dp": 2, "tp": 2}), mixtral()) == ()


def test_predicted_exchanges() -> None:
    """Some of the rows that tokens are routed to, with their numbers."""
    model = mixtral()
    ids = torch.empty(2, 8, dtype=torch.int64, device="meta")
    found = predict(model, plan_zoo.load("mixtral", {"dp": 1, "tp": 2}), {"input_ids": ids})
    assert found.stopped is None
    exchanged = [c for c in found.collectives if c.target == "<experts>"]
    assert Counter((c.op, c.when) for c in exchanged) == {
        ("all_gather", "forward"): 2,
        ("all_to_all", "forward"): 4,
        ("all_to_all", "backward"): 4,
    }
    row = 32 * 4
    assert all(row <= c.num_bytes < 2 * 8 * 2 * (row + 16) for c in exchanged if c.op == "all_to_all")
    assert "forward" not in vars(model.get_submodule("model.layers.0.mlp.experts"))


class ListedExperts(nn.ModuleList):
    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(4, 8, device="meta"), nn.Linear(8, 4, device="meta")) for _ in range(6)
        )

    def forward(self, x: Any, ids: Any, weights: Any) -> Any:
        return x


def test_a_module_for_each_expert_has_features_to_cut_only() -> None:
    model = Block()
    model.experts = ListedExperts()  # type: ignore[assignment]
    rows = plan_of(region(), cut(r"experts\.\d+\.(0|1)\.(weight|bias)", Shard(0), "ep"), ep=2)
    with pytest.raises(PlanError, match=r"a module for each expert.*'ep'.*in one parameter of shape \(experts, ...\)"):
        lower(rows, model)
    features = plan_of(
        region("mask"),
        cut(r"experts\.\d+\.0\.(weight|bias)", Shard(0), "ep"),
        cut(r"experts\.\d+\.1\.weight", Shard(1), "ep"),
        ep=2,
    )
    (found,) = (i.op for i in lower(features, model) if isinstance(i.op, Local))
    assert found.experts == () and found.features == ("ep",)
