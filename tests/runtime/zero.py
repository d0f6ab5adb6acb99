"""ZeRO stages by plan phases against one device: several optimizer steps, in float64, different data on each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate

from tests.device import device_type
from tests.whole import whole, whole_tensors
from vescale import plan_zoo
from vescale.placements import RaggedShard
from vescale.plans import INIT, RUN, Plan
from vescale.runtime import implicit_communication

__all__ = ["Difference", "llama_plan", "mesh_of", "same_steps", "sharded_at_rest"]


def mesh_of(sizes: Mapping[str, int]) -> DeviceMesh:
    return init_device_mesh(device_type(), tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def sharded_at_rest(plan: Plan, paths: str = ".*", axis: str = "dp") -> Plan:
    plan.shard(paths, RaggedShard(), mesh=axis, phase=INIT)
    return plan.shard(paths, Replicate(), mesh=axis, phase=RUN)


def llama_plan(mesh: DeviceMesh, shard: str = "dp", replicate: str | None = None) -> Plan:
    """The zoo's, its parameters ragged over ``shard`` at rest; the batch over ``replicate``, too."""
    base = plan_zoo.load("llama", {"dp": 1, "tp": 1})
    plan = Plan(mesh)
    for entry in base.entries:
        placements = dict(getattr(entry, "placements", ()))
        if "tp" in placements:
            plan.shard(entry.path.text, placements["tp"], mesh="tp")
        else:
            both = (replicate, shard) if replicate else (shard,)
            plan.shard(entry.path.text, dict.fromkeys(both, placements["dp"]))
    return sharded_at_rest(plan, ".*(weight|bias)", shard)


@dataclass
class Difference:
    """The largest, relative to the largest element of each tensor, over all steps."""

    loss: float = 0.0
    gradient: tuple[float, str] = (0.0, "")
    parameter: tuple[float, str] = (0.0, "")

    def within(self, tolerance: float) -> bool:
        return max(self.loss, self.gradient[0], self.parameter[0]) <= tolerance


def same_steps(
    reference: nn.Module,
    model: nn.Module,
    step: Callable[[nn.Module, int], torch.Tensor],
    *,
    num_steps: int = 3,
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    around: Callable[[nn.Module, torch.optim.Optimizer], None] | None = None,
    max_implicit: int = 0,
) -> Difference:
    """``step(model, number)`` runs forward and backward, and returns the loss; then an optimizer step on both."""
    found = Difference()
    pair = (reference, model)
    optimizers = [make_optimizer([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in pair]
    for number in range(num_steps):
        expected, loss = (step(m, number).detach() for m in pair)
        found.loss = max(found.loss, abs(whole(loss).item() - expected.item()) / abs(expected.item()))
        gradients: Any = whole_tensors({name: own.grad for name, own in model.named_parameters()})
        for (name, own), (_, other) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            assert (own.grad is None) == (other.grad is None), (number, name, own.grad, other.grad)
            if own.grad is not None:
                assert own.grad.placements == own.placements, (name, own.grad.placements)
                found.gradient = max(found.gradient, (_relative(gradients[name], other.grad), name))
        for m, optimizer in zip(pair, optimizers, strict=True):
            if around is not None:
                around(m, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        parameters: Any = whole_tensors(dict(model.named_parameters()))
        for (name, own), (_, other) in zip(parameters.items(), reference.named_parameters(), strict=True):
            found.parameter = max(found.parameter, (_relative(own, other), name))
    assert len(implicit_communication(model)) <= max_implicit, implicit_communication(model)
    return found


def _relative(own: Any, expected: Any) -> float:
    scale = max(expected.detach().abs().max().item(), 1e-9) if expected.numel() else 1.0
    difference = (own.detach() - expected.detach()).abs()
    return float(difference.max() / scale) if difference.numel() else 0.0
