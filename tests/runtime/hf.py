"""One training step of a tiny Hugging Face model on a mesh against one device."""

from __future__ import annotations

import copy
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.device import device_type
from tests.whole import whole, whole_tensors
from vescale import parallelize
from vescale.comm import record_comms
from vescale.plans import Plan
from vescale.runtime import implicit_communication

__all__ = ["Objective", "Step", "one_step", "quiet"]

Objective = Callable[[nn.Module, Mapping[str, Any]], torch.Tensor]


_DESCENT = functools.partial(torch.optim.SGD, lr=0.1)


@dataclass(frozen=True)
class Step:
    """What one forward, backward and optimizer step on a mesh came to.

    Attributes:
        loss: relative difference to one device's.
        gradient: the worst gradient's largest difference, relative to its largest element, and its parameter.
        parameter: the same after a step of the optimizer (SGD), absolute.
        collectives: how many, by op and axes, beside the reductions of parameters' gradients; ``counts``: the all-gathers
            of how many tokens go where.
        implicit: how many sites communicated without an entry.
    """

    loss: float
    gradient: tuple[float, str]
    parameter: float
    collectives: Counter[tuple[str, str]]
    implicit: int

    def is_same(self, tolerance: float) -> bool:
        return self.loss <= tolerance and self.gradient[0] <= tolerance and self.parameter <= tolerance


def quiet() -> None:
    """Warnings about what a test does on purpose, and transformers' advice."""
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


def one_step(
    build: Callable[[], nn.Module],
    inputs: Mapping[str, Any],
    make_plan: Callable[[nn.Module, DeviceMesh], Plan],
    sizes: Mapping[str, int],
    *,
    strict: bool = False,
    loss: Callable[[Any], torch.Tensor] | None = None,
    objective: Objective | None = None,
    batch_axis: str | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = _DESCENT,
) -> Step:
    """A float64 step with a loss that reads every element of the output, or the given one of the model's output, or an
    objective of model and inputs. The inputs of the parallelized model are DTensors when ``batch_axis`` cuts them."""
    quiet()
    model = build().double()
    reference = copy.deepcopy(model)
    mesh = init_device_mesh(device_type(), tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    parallelize(model, make_plan(model, mesh), strict=strict)
    optimizers = [optimizer(m.parameters()) for m in (reference, model)]
    take = loss or (lambda output: _every_element(_main(output), mesh))
    compute = objective or (lambda model, inputs: take(model(**inputs)))
    torch.manual_seed(7)  # what the model draws
    expected = compute(reference, inputs)
    expected.backward()
    if batch_axis is not None:
        rows = [Shard(0) if axis == batch_axis else Replicate() for axis in sizes]
        inputs = {name: distribute_tensor(value, mesh, rows) for name, value in inputs.items()}
    torch.manual_seed(7)
    with record_comms() as ledger:
        found = compute(model, inputs)
        found.backward()
    gradient = _worst_gradient(model, reference)
    for stepped in optimizers:
        stepped.step()
    parameters: Any = whole_tensors(dict(model.named_parameters()))
    pairs = zip(parameters.values(), reference.parameters(), strict=True)
    return Step(
        abs(whole(found.detach()).item() - expected.item()) / abs(expected.item()),
        gradient,
        max((own.detach() - other.detach()).abs().max().item() for own, other in pairs if own.numel()),
        Counter(
            ("counts" if r.requester.endswith(": counts") else r.op, r.axes)
            for r in ledger.records
            if ".grad:" not in r.requester
        ),
        len(implicit_communication(model)),
    )


def _main(output: Any) -> torch.Tensor:
    for name in ("logits", "last_hidden_state", "sample"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return output[0]


def _every_element(y: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).mul(7).sin().view(y.shape)
    if isinstance(y, DTensor):
        weights = DTensor.from_local(weights, mesh, [Replicate()] * mesh.ndim)
    return (y * weights).square().mean()


def _worst_gradient(model: nn.Module, reference: nn.Module) -> tuple[float, str]:
    """Relative to each gradient's own largest element; to a millionth of the largest of all where it is nearly zero."""
    gradients = [p.grad for p in reference.parameters() if p.grad is not None]
    floor = 1e-6 * max(gradient.abs().max().item() for gradient in gradients)
    worst = (0.0, "")
    found: Any = whole_tensors({name: own.grad for name, own in model.named_parameters()})
    for (name, own), (_, other) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        if other.grad is None:
            assert own.grad is None or not found[name].any(), name  # an expert without tokens has zeros
            continue
        assert own.grad is not None, name
        assert own.grad.placements == own.placements, (name, own.grad.placements)
        difference = (found[name] - other.grad).abs().max().item() / max(other.grad.abs().max().item(), floor)
        worst = max(worst, (difference, name))
    return worst
