"""Batch normalization over a sharded batch: statistics of the whole batch, as one device computes them.

====================  ======================================================================================================
moment                communication
====================  ======================================================================================================
forward, training     one all-gather of ``2 C + 1`` numbers a rank over the axes that cut the batch (or rows, or columns)
forward, evaluation   none
backward, training    one all-reduce of ``2 C`` numbers over the same axes
running statistics    none where they are sharded as the channels are; else they are gathered (implicit)
instance norm         forward, training, with running statistics: one all-reduce of ``C`` numbers for each of the two
====================  ======================================================================================================

No plan could avoid this communication, so that it does not count as implicit. ``C`` is the number of this rank's channels:
along an axis that shards channels nothing is exchanged. Gradients of weight and bias are Partial. The means and squared
deviations of the ranks are merged (Chan et al.), so that no difference of large sums is taken.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import all_gather_into, all_reduce, axis_group, requested_by
from vescale.compat import local_of, make_dtensor, make_spec, no_torch_function, note_writes
from vescale.ops._conversion import bring, bring_with_gradient, differentiable_once, enter_local, leave_local
from vescale.ops._registry import OpContext, replaces
from vescale.placements import shard_dim

_OP = "batch_norm"
_SIGNATURE, _INSTANCE_SIGNATURE = inspect.signature(F.batch_norm), inspect.signature(F.instance_norm)
_RUNNING = ("running_mean", "running_var")


@replaces(F.batch_norm, backward="custom")
def _batch_norm(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``F.batch_norm`` of a DTensor of shape ``(N, C, ...)``."""
    call = _SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    options = call.arguments
    x, mean, var = options["input"], options["running_mean"], options["running_var"]
    training, momentum, eps = options["training"], options["momentum"], options["eps"]
    whole = isinstance(x, DTensor) and all(p.is_replicate() for p in x.placements)
    if not isinstance(x, DTensor) or whole or (mean is None and not training):
        return func(*args, **kwargs)
    num_values = x.numel() // x.shape[1] if x.shape[1] else 0
    if training and num_values <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    layout = _Layout.of(x)
    x = bring_with_gradient(x, layout.input, _OP, "input")
    weight, bias = (
        None if t is None else enter_local(bring_with_gradient(t, layout.channels, _OP, name), layout.channel_grads)
        for t, name in ((options["weight"], "weight"), (options["bias"], "bias"))
    )
    local = enter_local(x)
    with no_torch_function():
        if training:
            statistics = _whole_statistics(local.detach(), layout.group)
            if mean is not None:
                note_writes([mean, var])
                unbiased = statistics.var * (num_values / (num_values - 1))
                layout.update(mean, statistics.mean, momentum, "running_mean", x.shape[1])
                layout.update(var, unbiased, momentum, "running_var", x.shape[1])
        else:
            running = (bring(t, layout.channels, _OP, n) for t, n in ((mean, "running_mean"), (var, "running_var")))
            statistics = _Statistics(*(local_of(t) for t in running))
        result = _Normalize.apply(local, weight, bias, statistics, eps, num_values if training else None, layout.group)
        return leave_local(result, x.device_mesh, layout.input, x.shape, _OP)


@replaces(F.instance_norm)
def _instance_norm(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``F.instance_norm`` of a DTensor. Its running statistics are means over all rows of the batch; PyTorch writes them to
    a copy, which DTensor redistributes, so that they would get lost."""
    call = _INSTANCE_SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    options = call.arguments
    x, running, momentum = options["input"], {name: options[name] for name in _RUNNING}, options["momentum"]
    if not isinstance(x, DTensor) or None in running.values() or not options["use_input_stats"]:
        return func(*args, **kwargs)
    options |= dict.fromkeys(_RUNNING)
    result = func(*call.args, **call.kwargs)
    with no_torch_function(), torch.no_grad():
        var, mean = torch.var_mean(x, _rows(x)[1:])
        for (name, kept), of_rows in zip(running.items(), (mean, var)):
            new: Any = of_rows.mean(0)
            with requested_by(f"instance_norm: {name}"):
                new = new.redistribute(kept.device_mesh, kept.placements)
            kept.mul_(1 - momentum).add_(new.to(kept.dtype), alpha=momentum)
    return result


@dataclass(frozen=True)
class _Statistics:
    """For each of this rank's channels."""

    mean: torch.Tensor
    var: torch.Tensor


@dataclass(frozen=True)
class _Layout:
    """Placements of the operands of a normalization.

    Attributes:
        input: never Partial.
        channels: of tensors with a value for each channel.
        channel_grads: of their gradients: Partial where ranks hold different rows.
        group: the ranks that hold other rows of this rank's channels; None if there are none.
    """

    mesh: DeviceMesh
    input: tuple[Placement, ...]
    channels: tuple[Placement, ...]
    channel_grads: tuple[Placement, ...]
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, x: DTensor) -> _Layout:
        mesh = x.device_mesh
        # Rows may be sharded in any way; channels only as weight and bias can be.
        fits = [p == Shard(1) or shard_dim(p) not in (None, 1) for p in x.placements]
        placed = tuple(p if fit else Replicate() for p, fit in zip(x.placements, fits))
        channels = tuple(Shard(0) if p == Shard(1) else Replicate() for p in placed)
        cuts_rows = [shard_dim(p) not in (None, 1) for p in placed]
        grads = tuple(Partial() if cut else p for cut, p in zip(cuts_rows, channels))
        axes = [axis for axis, cut in enumerate(cuts_rows) if cut and mesh.size(axis) > 1]
        return cls(mesh, placed, channels, grads, axis_group(mesh, axes).group if axes else None)

    def update(self, running: DTensor, value: torch.Tensor, momentum: float, name: str, num_channels: int) -> None:
        """``running = (1 - momentum) * running + momentum * value``, in place."""
        spec = make_spec(self.mesh, self.channels, (num_channels,), (1,), value.dtype)
        new = local_of(bring(make_dtensor(value, spec), running.placements, _OP, name))
        local_of(running).mul_(1 - momentum).add_(new.to(running.dtype), alpha=momentum)


def _rows(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _whole_statistics(local: torch.Tensor, group: dist.ProcessGroup | None) -> _Statistics:
    """Mean and biased variance of each channel over this rank's rows and those of the group."""
    wide = local.float() if local.dtype in (torch.float16, torch.bfloat16) else local
    num_channels, num_values = local.shape[1], math.prod(local.shape[dim] for dim in _rows(local))
    mean = wide.new_zeros(num_channels)
    deviations = wide.new_zeros(num_channels)
    if num_values:
        var, mean = torch.var_mean(wide, _rows(local), correction=0)
        deviations = var * num_values
    if group is None:
        return _Statistics(mean, deviations / num_values)
    own = torch.cat([mean, deviations, mean.new_full((1,), num_values)])
    every = own.new_empty(group.size(), own.numel())
    with requested_by(f"{_OP}: statistics"):
        all_gather_into(every.view(-1), own, group).wait()
    means, squares, counts = every.split([num_channels, num_channels, 1], dim=1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    var = (squares + counts * (means - mean).square()).sum(0) / total
    return _Statistics(mean, var)


class _Normalize(torch.autograd.Function):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` of local tensors.

    ``num_values``: values of a channel on all ranks, if the statistics are those of the input, whose gradient then goes
    through them; None if the statistics are constants.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        statistics: _Statistics,
        eps: float,
        num_values: int | None,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.num_values, ctx.group, ctx.bias_dtype = num_values, group, None if bias is None else bias.dtype
        inverse = (statistics.var + eps).rsqrt()
        ctx.save_for_backward(x, weight, statistics.mean, inverse)
        if x.numel() == 0:
            return torch.empty_like(x)
        return F.batch_norm(x, statistics.mean, statistics.var, weight, bias, training=False, eps=eps)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        with torch.no_grad():
            found = _Normalize._gradients(ctx, grad, x, weight, mean, inverse)
        once = (
            "batch_norm over a sharded batch has no second derivatives, which create_graph=True requests; normalize "
            "with LayerNorm or GroupNorm, or replicate the batch: write R for the module's <in> in the plan's shard "
            "section"
        )
        return *differentiable_once(found, (grad, x, weight), once), None, None, None, None

    @staticmethod
    def _gradients(
        ctx: Any,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        mean: torch.Tensor,
        inverse: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        rows, shape = _rows(x), [1, -1, *[1] * (x.ndim - 2)]
        wide = grad.to(mean.dtype)
        centered = x.to(mean.dtype) - mean.view(shape)
        of_bias, of_weight = wide.sum(rows), (wide * centered).sum(rows)
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        of_input = None
        if ctx.needs_input_grad[0]:
            of_input = wide
            if ctx.num_values is not None:
                sums = torch.stack([of_bias, of_weight])
                if ctx.group is not None:
                    with requested_by(f"{_OP}: statistics: gradient"):
                        sums = all_reduce(sums, "sum", ctx.group).wait()
                sums = sums / ctx.num_values
                slope = (sums[1] * inverse.square()).view(shape)
                of_input = wide - sums[0].view(shape) - centered * slope
            of_input = (of_input * scale.view(shape)).to(grad.dtype)
        return (
            of_input,
            (of_weight * inverse).to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None,
            of_bias.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
        )
