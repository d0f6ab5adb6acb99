"""``clip_grad_norm_``, ``get_total_norm`` and ``GradScaler`` of PyTorch look at the gradients of all stages of a model."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from vescale.comm import record
from vescale.compat import install_part, note
from vescale.errors import PipelineCallError
from vescale.gradients import pipeline_groups, shares_of, shares_of_gradients
from vescale.optim._clip import get_total_norm

# Optimizers whose step of one parameter depends on other parameters: with those of a rank's stages alone they compute
# something else than on one device, without a word. Whether one does is tried, with two small parameters.

_SEEN: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_NUM_STEPS = 3


def refuse_coupled_steps() -> None:
    """From now on, before the first step of an optimizer that has parameters of a model in stages; called once in a process.
    PipelineCallError is raised on every rank."""
    note("optim._torch_stages:torch", "torch.optim.optimizer._global_optimizer_pre_hooks")
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _SEEN:
        return
    _SEEN.add(optimizer)
    if not any(shares_of([p for group in optimizer.param_groups for p in group["params"]])):
        return
    if not getattr(optimizer, "knows_stages", False) and _is_coupled(optimizer):
        name = type(optimizer).__name__
        raise PipelineCallError(
            f"pipeline: {name} computes the step of each parameter from all parameters, but this rank has only those "
            "of its stages, so that the result would differ from one device; use an optimizer that treats parameters "
            f"independently (SGD, AdamW, vescale.optim.Muon), or {name} with a plan without a pipeline"
        )


def _is_coupled(optimizer: Optimizer) -> bool:
    """False for one that cannot be made, or cannot step, like this."""
    own = [torch.tensor([[1.0, -2.0], [0.5, 3.0]]), torch.tensor([[40.0, 10.0], [-20.0, 70.0]])]
    try:
        with torch.random.fork_rng(devices=()):
            together = _stepped(optimizer, own)
            apart = [value for one in own for value in _stepped(optimizer, [one])]
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError):
        return False
    return not all(torch.allclose(one, other, rtol=1e-9) for one, other in zip(together, apart, strict=True))


def _stepped(optimizer: Optimizer, values: list[torch.Tensor]) -> list[torch.Tensor]:
    kind: Any = type(optimizer)
    taken = inspect.signature(kind.__init__).parameters
    parameters = [nn.Parameter(value.double()) for value in values]
    made = kind(parameters, **{name: value for name, value in optimizer.defaults.items() if name in taken})

    arguments = inspect.signature(made.step).parameters.values()
    needs_closure = any(a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD for a in arguments)

    def closure() -> torch.Tensor:
        made.zero_grad()
        loss = sum((parameter.square() * 0.3 + parameter.sin()).sum() for parameter in parameters)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        return loss

    with torch.enable_grad():
        for _ in range(_NUM_STEPS):
            closure()
            made.step(*((closure,) if needs_closure else ()))
    return [parameter.detach() for parameter in parameters]


_INSTALLED: list[bool] = []  # hooks of optimizers


class _OverStages:
    """In place of what PyTorch computes of this rank's gradients, for models in stages; none at all may be those of a stage
    without any."""

    total_norm = staticmethod(get_total_norm)

    @staticmethod
    def concern(gradients: Sequence[torch.Tensor]) -> bool:
        return any(shares_of_gradients(gradients)) if gradients else bool(pipeline_groups())

    @staticmethod
    def share_overflow(parameters: Sequence[torch.Tensor], flags: Sequence[torch.Tensor]) -> bool:
        groups = dict.fromkeys(share.group for share in shares_of(parameters) if share is not None)
        known = pipeline_groups()
        for group in groups:
            found = torch.stack([flag.to(known[group].device) for flag in flags]).amax()
            with record("all_reduce", group.size(), found.nbytes, requester="overflow in any stage", group=group):
                dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
            for flag in flags:
                flag.copy_(found)
        return bool(groups)


def extend_torch_for_stages() -> None:
    """Once in a process; see the part ``stages`` of the table of patches."""
    if not _INSTALLED:
        _INSTALLED.append(True)
        refuse_coupled_steps()
    install_part("stages", _OverStages())
