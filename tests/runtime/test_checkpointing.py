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
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import vescale
from tests.plan_zoo.models import MODELS
from tests.ranks import RankPools
from tests.runtime.llama import batch, counted, double_loss, make_llama
from tests.runtime.zero import llama_plan, mesh_of, sharded_at_rest
from vescale import Plan, plan_zoo
from vescale.comm import record_comms
from vescale.fsdp import report as fsdp_report
from vescale.placements import RaggedShard
from vescale.runtime import parallelize

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


def experts() -> None:
    model = MODELS["mixtral"]
    print(model)


def test_llama(ranks: RankPools) -> None:
    ranks.run(llama, world_size=2)


def test_units(ranks: RankPools) -> None:
    ranks.run(zero, world_size=4)


def test_ring(ranks: RankPools) -> None:
    ranks.run(ring, world_size=2)
