"""Convolutions and batch normalizations in a walk on the meta device: the placements of their results, and what batch
normalizations communicate. The same tables as in :mod:`vescale.ops.convolution` and :mod:`vescale.ops.batch_norm`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from vescale.ir._model_index import Running
from vescale.ir._placement_flow import AxisPlacement, Flow, Rule
from vescale.placements import shard_dim
from vescale.plans import MeshAxes

# (forward or backward, op, axes, bytes or None where unknown)
Found = tuple[str, str | None, str, int | None]

_PLAIN, _TRANSPOSED = ("conv1d", "conv2d", "conv3d"), ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_CONVOLUTIONS = (*_PLAIN, *_TRANSPOSED)
BATCH_NORM = F.batch_norm.__name__
_SIGNATURE = inspect.signature(F.batch_norm)


def _num_groups(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    return int(kwargs.get("groups", args[6] if len(args) > 6 else 1))  # the seventh, of both kinds


def _convolution(output_dim: int, flow: Flow) -> AxisPlacement:
    """Over a part of the batch, of the output channels (which the weight has in ``output_dim``), of the groups, or of the
    channels that are summed over."""
    x, weight, *bias = flow.placements
    whole = isinstance(x, Replicate)
    if x == Shard(0):
        return x if all(isinstance(placement, Replicate) for placement in (weight, *bias)) else None
    if (num_groups := _num_groups(flow.args, flow.kwargs)) > 1:
        fits = (x == Shard(1) and weight in (Shard(0), Replicate())) or (whole and weight == Shard(0))
        return Shard(1) if fits and num_groups % flow.size == 0 and _fit(bias) else None
    if weight == Shard(output_dim):
        return Shard(1) if whole and _fit(bias) else None
    if weight == Shard(1 - output_dim) and (whole or x == Shard(1)):
        return Partial() if all(isinstance(placement, Replicate) for placement in bias) else None
    return None


def _fit(bias: Sequence[AxisPlacement]) -> bool:
    """Whether a bias is sharded like the channels, or is replicated and can be sharded."""
    return all(placement in (Shard(0), Replicate()) for placement in bias)


def _batch_norm(flow: Flow) -> AxisPlacement:
    """As the input: over a part of what statistics are made of, or of the channels."""
    x, *others = flow.placements
    if len(flow.args) > len(_SIGNATURE.parameters):
        return None
    if x == Shard(1):
        return x if _fit(others) else None
    return x if shard_dim(x) is not None and all(isinstance(placement, Replicate) for placement in others) else None  # type: ignore[arg-type]


CHANNEL_RULES: dict[str, Rule] = {
    **dict.fromkeys(_PLAIN, functools.partial(_convolution, 0)),
    **dict.fromkeys(_TRANSPOSED, functools.partial(_convolution, 1)),
    BATCH_NORM: _batch_norm,
}


def cuts_operand(name: str, flow: Flow, placement: AxisPlacement, position: int) -> bool:
    """Whether an op with such a result takes this rank's channels of a replicated operand; its gradient is then sharded."""
    if placement != Shard(1) or name not in (*_CONVOLUTIONS, BATCH_NORM):
        return False
    grouped = name in _CONVOLUTIONS and position < 2 and _num_groups(flow.args, flow.kwargs) > 1
    return grouped or flow.tensors[position].ndim == 1


@dataclass(frozen=True)
class _Call:
    path: str
    placements: tuple[AxisPlacement, ...]
    num_channels: int
    element_bytes: int
    has_gradient: bool

    def collectives(self, axes: MeshAxes) -> Iterator[Found]:
        """Means and deviations of each channel, over the axes that cut the batch, or rows, or columns, together."""
        channels, over = self.num_channels, []
        for axis, placement in zip(axes, self.placements):
            if axes.size(axis) == 1 or isinstance(placement, Replicate):
                continue
            if placement is None or shard_dim(placement) is None:
                yield "forward", None, axis, None
                return
            if placement == Shard(1):
                channels //= axes.size(axis)
            else:
                over.append(axis)
        if not over:
            return
        size, together = math.prod(axes.size(axis) for axis in over), ",".join(over)
        yield "forward", "all_gather", together, (2 * channels + 1) * self.element_bytes * (size - 1)
        if self.has_gradient:
            yield "backward", "all_reduce", together, 2 * (2 * channels * self.element_bytes * (size - 1) // size)


class BatchNormCalls:
    """The calls in training seen so far; those in evaluation communicate nothing."""

    def __init__(self) -> None:
        self._running = Running("")
        self._calls: list[_Call] = []

    def watched(self, module: nn.Module, path: str) -> contextlib.AbstractContextManager[None]:
        """While open, calls inside the module are known to be its."""
        return self._running.watched(module, lambda _: path)

    def called(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        placements_of: Callable[[torch.Tensor], tuple[AxisPlacement, ...]],
    ) -> None:
        """``placements_of(tensor)``: its placement on each axis."""
        if len(args) > len(_SIGNATURE.parameters):
            return  # torch.batch_norm, whose result is unknown
        call = _SIGNATURE.bind(*args, **kwargs)
        call.apply_defaults()
        x, training = call.arguments["input"], call.arguments["training"]
        if not training:
            return
        size = max(x.element_size(), 4)  # statistics of half precision are float32
        has_gradient = any(
            t is not None and t.requires_grad for t in (x, *(call.arguments[n] for n in ("weight", "bias")))
        )
        self._calls.append(_Call(self._running.innermost, placements_of(x), x.shape[1], size, has_gradient))

    def collectives(self, axes: MeshAxes) -> Iterator[tuple[str, Found]]:
        """With the module that called."""
        for call in self._calls:
            yield from ((call.path, found) for found in call.collectives(axes))
