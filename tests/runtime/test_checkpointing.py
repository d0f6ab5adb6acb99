"""Activation checkpointing by plan: the bits of a run without it, its collectives, and what is held for backward."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import vescale
from tests.plan_zoo.models import MODELS
from tests.ranks import RankPools
from tests.runtime.llama import batch, double_loss, make_llama
from tests.runtime.zero import llama_plan, mesh_of, sharded_at_rest
from vescale import Plan, parallelize, plan_zoo
from vescale.comm import record_comms

LLAMA = r"model\.layers\.\d+"
POLICIES: dict[str, Any] = {
    "full": "full",
    "selective": "selective",
    "ops": {"save": ["aten.mm"]},
    "every": {"save": ["aten.mm", "aten.silu"], "every": 2},
    "selector": {"save": [LLAMA + r"\.mlp\.(up|gate)_proj :: aten.mm"]},
    "offload": "offload",
}


def with_checkpoints(plan: Plan, path: str, policy: Any, budget: float | None = None) -> Plan:
    found = Plan(plan.mesh if plan.mesh is not None else plan.axes)
    for entry in plan.entries:
        found.add(entry)
    return found.checkpoint(path, policy, budget)


def local(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x


Steps = list[tuple[torch.Tensor, list[torch.Tensor | None]]]


def run(model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor], num_steps: int = 2) -> Steps:
    """Loss and local gradients of each step; the generator's state after it is a part of the result."""
    found: Steps = []
    for number in range(num_steps):
        torch.manual_seed(100 + number)
        loss = loss_of(model)
        loss.backward()
        grads = [None if p.grad is None else local(p.grad).clone() for p in model.parameters()]
        found.append((local(loss.detach()).clone(), [*grads, torch.get_rng_state()]))
        model.zero_grad()
    return found


def assert_same_bits(one: Steps, other: Steps) -> None:
    for (loss, grads), (expected, wanted) in zip(one, other, strict=True):
        assert torch.equal(loss, expected)
        for number, (a, b) in enumerate(zip(grads, wanted, strict=True)):
            assert (a is None) == (b is None), number
            assert a is None or b is None or torch.equal(a, b), number


def compared(
    build: Callable[[], nn.Module],
    plan: Plan,
    path: str,
    policies: dict[str, Any],
    loss_of: Callable[[nn.Module], torch.Tensor],
) -> dict[str, int]:
    """Saved bytes by policy; bits and collectives are those without checkpointing."""
    warnings.simplefilter("ignore")
    first = build()
    models = {"": copy.deepcopy(first), **{name: copy.deepcopy(first) for name in policies}}
    saved, steps, moved = {}, {}, {}
    for name, model in models.items():
        parallelize(model, with_checkpoints(plan, path, policies[name]) if name else plan)
        with record_comms() as ledger:
            steps[name] = run(model, loss_of)
        moved[name] = Counter((r.op, r.axes, r.bytes) for r in ledger.records)
        try:
            saved[name] = vescale.report(model).saved_bytes
        except RuntimeError:
            loss = loss_of(model)
            saved[name] = vescale.report(model).saved_bytes
            del loss
    for name in policies:
        assert_same_bits(steps[name], steps[""])
        assert moved[name] == moved[""], (name, moved[name] - moved[""], moved[""] - moved[name])
    return saved


def llama_loss(model: nn.Module) -> torch.Tensor:
    ids, labels = batch()
    return double_loss(model(ids).logits, labels)


def llama() -> None:
    mesh = mesh_of({"dp": 1, "tp": 2})
    saved = compared(
        lambda: make_llama(attention_dropout=0.3).train(), plan_zoo.load("llama", mesh), LLAMA, POLICIES, llama_loss
    )
    assert saved["full"] < saved["every"] < saved["ops"] < saved[""]
    assert saved["full"] < saved["selective"] < saved[""] and saved["full"] < saved["selector"] < saved["ops"]
    assert saved["offload"] < saved["full"]


def zero() -> None:
    """Units on dp x tp: regions that are units, and regions with several units inside."""
    mesh = mesh_of({"dp": 2, "tp": 2})
    policies = {name: POLICIES[name] for name in ("full", "selective", "offload")}
    compared(lambda: make_llama(attention_dropout=0.3).train(), llama_plan(mesh), LLAMA, policies, llama_loss)


def ring() -> None:
    mesh = mesh_of({"dp": 1, "cp": 2, "tp": 1})
    plan = Plan(mesh)
    plan.shard("<in:input_ids>", {"cp": Shard(1)})
    plan.attention(LLAMA + r"\.self_attn", "ring", mesh="cp")
    policies = {name: POLICIES[name] for name in ("full", "selective", "offload")}
    compared(lambda: make_llama().train(), plan, LLAMA, policies, llama_loss)


def zoo_loss(name: str) -> Callable[[nn.Module], torch.Tensor]:
    inputs = MODELS[name].inputs()

    def loss_of(model: nn.Module) -> torch.Tensor:
        labels = inputs["input_ids"].roll(1, 0)
        return double_loss(model(**inputs, use_cache=False).logits, labels)

    return loss_of


def zoo(name: str, path: str, policies: tuple[str, ...], **config: Any) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return MODELS[name].build().double().train()

    plan = plan_zoo.load(name, mesh_of({"dp": 1, "tp": 2}))
    compared(build, plan, path, {policy: POLICIES[policy] for policy in policies}, zoo_loss(name))


class Net(nn.Module):
    """Dropout, plain random numbers, a write in place to what has been received, a module that is called twice."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(Mlp(width) for _ in range(4))
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, scale={"of": x.detach().abs().mean()})
        return self.head(self.layers[0](x, scale={"of": 1.0}))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: torch.Tensor, *, scale: dict[str, Any]) -> torch.Tensor:
        y = self.down(self.dropout(F.gelu(self.up(x))))
        y += 0.1 * torch.randn_like(y) / (1 + scale["of"])  # y was received by <out>
        return x + self.dropout(y)


def net_plan(axes: Any) -> Plan:
    plan = Plan(axes)
    plan.shard("<in:x>", Shard(0), mesh="dp")
    plan.shard(r"layers\.\d+\.up\.(weight|bias)", Shard(0), mesh="tp")
    plan.shard(r"layers\.\d+\.down\.weight", Shard(1), mesh="tp")
    plan.shard(r"layers\.\d+.<in>", vescale.plans.parse_placement("R"), mesh="tp")
    plan.shard(r"layers\.\d+\.down.<out>", vescale.plans.parse_placement("R"), mesh="tp")
    return plan


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def net_loss(model: nn.Module) -> torch.Tensor:
    x = torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return model(x).square().mean()


NET: dict[str, Any] = {
    "full": "full",
    "selective": "selective",
    "ops": {"save": ["aten.gelu", "aten.randn_like"]},
    "selector": {"save": [r"layers\.\d+\.up :: aten.addmm"]},
    "offload": "offload",
}


def net() -> None:
    """The result of ``<out>`` is written to in place, so that it is received again; that is the only difference."""
    warnings.simplefilter("ignore")
    plan = net_plan(mesh_of({"dp": 1, "tp": 2}))
    steps = {}
    for name, policy in {"": None, **NET}.items():
        model = make_net()
        parallelize(model, plan if policy is None else with_checkpoints(plan, r"layers\.\d+", policy))
        steps[name] = run(model, net_loss)
        assert_same_bits(steps[name], steps[""])


def again() -> None:
    """Collectives run again where that is asked for, with the same bits."""
    mesh = mesh_of({"dp": 1, "tp": 2})
    plan, counts, steps, saved = plan_zoo.load("llama", mesh), {}, {}, {}
    for again in (False, True):
        model = make_llama(use_cache=False)
        policy = {"save": [], "recompute_communication": again}
        parallelize(model, with_checkpoints(plan, LLAMA, policy))
        with record_comms() as ledger:
            steps[again] = run(model, llama_loss, 1)
        counts[again] = ledger.count()
        saved[again] = vescale.report(model).saved_bytes
    assert_same_bits(steps[True], steps[False])
    assert counts[True] == counts[False] + 2 * 4  # two all-gathers and two reduce-scatters a layer
    assert saved[True] < saved[False]


def twice() -> None:
    """Two backwards of one forward, and a forward that never gets one."""
    plan = plan_zoo.load("llama", mesh_of({"dp": 1, "tp": 2}))
    found = []
    for checkpointed in (False, True):
        model = make_llama(use_cache=False)
        parallelize(model, with_checkpoints(plan, LLAMA, "full") if checkpointed else plan)
        llama_loss(model)
        loss = llama_loss(model)
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([local(p.grad) for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def gathers() -> None:
    """ZeRO-3: a unit is gathered once for its forward, and once for recomputation and backward, also where a region holds
    several units."""
    mesh = mesh_of({"dp": 2})
    for unit in (r"layers\.\d+", r"layers\.\d+\.(up|down)"):
        counts, steps = [], []
        for checkpointed in (False, True):
            plan = sharded_at_rest(Plan(mesh).shard("<in:x>", Shard(0), mesh="dp")).unit(unit)
            model = parallelize(make_net(), plan.checkpoint(r"layers\.\d+") if checkpointed else plan)
            with record_comms() as ledger:
                steps.append(run(model, net_loss))
            counts.append(Counter((r.op, r.bytes) for r in ledger.records))
        assert_same_bits(*steps)
        assert counts[0] == counts[1], (unit, counts[1] - counts[0], counts[0] - counts[1])


def deep_copy() -> None:
    plan = with_checkpoints(net_plan(mesh_of({"dp": 1, "tp": 2})), r"layers\.\d+", "full")
    model = parallelize(make_net(), plan)
    twin = copy.deepcopy(model)
    assert_same_bits(run(twin, net_loss), run(model, net_loss))
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        model(torch.zeros(2, 3, 8, dtype=torch.float64))


def budgets() -> None:
    """Nothing is checkpointed under a large budget, everything under a small one, and what is held is within it."""
    mesh = mesh_of({"dp": 1, "tp": 2})
    warnings.simplefilter("ignore")
    bytes_of, found = {}, {}
    for gib in (1.0, 2.6e-4, 1e-9):
        model = parallelize(
            make_llama(num_hidden_layers=4, use_cache=False),
            with_checkpoints(plan_zoo.load("llama", mesh), LLAMA, "full", gib),
        )
        steps = run(model, llama_loss, 3)
        if not found:
            first = steps
        assert_same_bits(steps, first)
        report = vescale.report(model)
        found[gib] = Counter(report.policies.values())
        bytes_of[gib] = sum(sum(ops.values()) for path, ops in report.saved.items() if path.startswith("model.layers"))
    assert found[1.0] == {"none": 4} and found[1e-9] == {"full": 4}
    assert len(found[2.6e-4]) > 1 and bytes_of[1e-9] < bytes_of[2.6e-4] <= 2.6e-4 * 2**30 < bytes_of[1.0], (
        found,
        bytes_of,
    )


TWO = (llama, ring, net, again, twice, gathers, deep_copy, budgets)


@pytest.mark.parametrize("case", TWO, ids=lambda case: case.__name__)
def test_two_ranks(ranks: RankPools, case: Callable[[], None]) -> None:
    ranks.run(case, world_size=2)


def test_units(ranks: RankPools) -> None:
    ranks.run(zero, world_size=4)


@pytest.mark.parametrize(
    ("name", "path"), [("mixtral", LLAMA), ("gpt2", r"transformer\.h\.\d+")], ids=lambda value: str(value)[:7]
)
def test_zoo(ranks: RankPools, name: str, path: str) -> None:
    ranks.run(zoo, name, path, ("full", "selective", "offload"), world_size=2)
