"""Regions of experts in a forward on the meta device: their communication, without running data-dependent code."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import Replicate

from vescale.ir._operations import Local
from vescale.ir._placement_flow import AxisPlacement
from vescale.plans import MeshAxes

__all__ = ["ExpertCall", "ExpertCalls", "stand_in_for_experts"]

# (forward or backward, op or None where unknown, axes, bytes or None where unknown)
Found = tuple[str, str | None, str, int | None]


class _Walk(Protocol):
    def tokens_met(self, path: str, tokens: torch.Tensor) -> tuple[AxisPlacement, ...]: ...


@dataclass(frozen=True)
class ExpertCall:
    """One call of a region.

    Attributes:
        path: the module.
        op: how its experts are cut, and how tokens meet them.
        placements: of the tokens, on each axis.
        has_gradient: whether backward goes through it.
    """

    path: str
    op: Local
    placements: tuple[AxisPlacement, ...]
    has_gradient: bool

    def collectives(self, axes: MeshAxes) -> Iterator[Found]:
        """Numbers of rows are exchanged, then rows, as many as are routed: their bytes are not known before."""
        spread = [axis for axis in self.op.experts if axes.size(axis) > 1]
        if spread and self.op.dispatch == "all_to_all":
            together, size = ",".join(spread), 1
            for axis in spread:
                size *= axes.size(axis)
            yield "forward", "all_gather", together, 4 * size * (size - 1)
            for when in ("forward", "backward") if self.has_gradient else ("forward",):
                yield when, "all_to_all", together, None
                yield when, "all_to_all", together, None
            spread = [axis for axis in spread if isinstance(self.placements[axes.index(axis)], Replicate)]
        for axis in (*spread, *(axis for axis in self.op.features if axes.size(axis) > 1)):
            if not isinstance(self.placements[axes.index(axis)], Replicate):
                yield "forward", None, axis, None
            if self.has_gradient:
                yield "backward", None, axis, None  # of the weights at least


class ExpertCalls:
    """The calls seen so far."""

    def __init__(self) -> None:
        self.calls: list[ExpertCall] = []

    @contextlib.contextmanager
    def replaced(self, module: nn.Module, path: str, op: Local, walk: _Walk) -> Iterator[None]:
        """Inside, the module returns a tensor of its result's shape if it is called with tokens, ids and weights."""
        original, own = module.forward, vars(module).get("forward")
        signature = inspect.signature(original)

        def forward(*args: Any, **kwargs: Any) -> Any:
            tokens = _tokens(list(signature.bind(*args, **kwargs).arguments.values()))
            if tokens is None:
                return original(*args, **kwargs)
            has_gradient = tokens.requires_grad or any(p.requires_grad for p in module.parameters())
            self.calls.append(ExpertCall(path, op, walk.tokens_met(path, tokens), has_gradient))
            return tokens * 1

        module.forward = forward
        try:
            yield
        finally:
            if own is None:
                del module.forward
            else:
                module.forward = own


def stand_in_for_experts(module: nn.Module) -> None:
    """From now on, a module of experts on the meta device returns a tensor of its result's shape, where it is called with
    tokens, ids and weights: how many tokens each expert gets is not known there."""
    original = module.forward
    signature = inspect.signature(original)

    def forward(*args: Any, **kwargs: Any) -> Any:
        tokens = _tokens(list(signature.bind(*args, **kwargs).arguments.values()))
        return original(*args, **kwargs) if tokens is None else tokens * 1

    module.forward = forward


def _tokens(arguments: Sequence[Any]) -> torch.Tensor | None:
    """The tokens among (tokens, ids, weights) in any order; None where the arguments are others."""
    found = [x for x in arguments if isinstance(x, torch.Tensor)]
    ids = [x for x in found if not x.is_floating_point()]
    others = [x for x in found if x.is_floating_point()]
    if len(ids) != 1 or len(others) != 2:
        return None
    return next((x for x in others if x.shape != ids[0].shape), others[0])
