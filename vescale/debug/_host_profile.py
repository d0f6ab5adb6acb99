"""``profile_host``: what a training step of one rank costs the host, without other ranks and without a device."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from vescale._parallelize import parallelize
from vescale.checks import unchecked
from vescale.comm import AxisGroup
from vescale.compat import dispatch_counts, is_native, own_part, reset_dispatch_counts
from vescale.compat.simulated_ranks import fake_world
from vescale.errors import DebugOptionError
from vescale.estimation import Routing, balanced_tokens, loss_of, make_batch, skeleton_of
from vescale.fsdp import values_are_of_no_interest
from vescale.plans import Plan
from vescale.runtime import TokenExchange

# What ran the ops on DTensors, and what it cost to decide that.

_NUM_ROWS = 20


@dataclass(frozen=True)
class OpDispatch:
    """The calls of one op on DTensors.

    Attributes:
        op: its name in ATen, with the overload.
        hits: calls that C++ ran on the local tensors.
        misses: calls for which it was decided what runs.
        miss_seconds: the time that these decisions took.
        fallbacks: calls that took PyTorch's path, by reason.
        fallback_seconds: the time that they took in all, the op included.
    """

    op: str
    hits: int
    misses: int
    miss_seconds: float
    fallbacks: Mapping[str, int]
    fallback_seconds: float


@dataclass(frozen=True)
class DispatchStats:
    """What :func:`dispatch_stats` returns; ``print`` it for a table, the most expensive ops first.

    Attributes:
        is_native: whether the C++ dispatcher is installed; without it nothing is counted.
        ops: one entry for each op that was called.
    """

    is_native: bool
    ops: tuple[OpDispatch, ...]

    @property
    def hits(self) -> int:
        return sum(op.hits for op in self.ops)

    @property
    def misses(self) -> int:
        return sum(op.misses for op in self.ops)

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Calls of all ops that took PyTorch's path, by reason."""
        found: Counter[str] = Counter()
        for op in self.ops:
            found.update(op.fallbacks)
        return MappingProxyType(dict(found))

    def __str__(self) -> str:
        if not self.is_native:
            return "ops on DTensors: PyTorch's path runs all of them (the C++ dispatcher is not installed)"
        total = sum(self.fallbacks.values())
        lines = [f"ops on DTensors: {self.hits} in C++, {self.misses} newly decided, {total} by PyTorch's path"]
        lines.append(f"{'op':36} {'C++':>8} {'decided':>8} {'us each':>8} {'PyTorch':>8} {'us each':>8}  why")
        costly = sorted(self.ops, key=lambda op: -(op.miss_seconds + op.fallback_seconds))
        for op in costly[:_NUM_ROWS]:
            calls = sum(op.fallbacks.values())
            lines.append(
                f"{op.op.removeprefix('aten::'):36} {op.hits:8} {op.misses:8} {_each(op.miss_seconds, op.misses):>8} "
                f"{calls:8} {_each(op.fallback_seconds, calls):>8}  {', '.join(op.fallbacks)}".rstrip()
            )
        if len(costly) > _NUM_ROWS:
            lines.append(f"... and {len(costly) - _NUM_ROWS} ops that take less time")
        return "\n".join(lines)


def _each(seconds: float, calls: int) -> str:
    return f"{seconds / calls * 1e6:.1f}" if calls else ""


def dispatch_stats(*, reset: bool = False) -> DispatchStats:
    """How ops on DTensors were dispatched in this process since the last reset, by op: hits of the C++ dispatcher, misses,
    and calls that took PyTorch's path, by reason. See docs/internals/dispatch.md for the reasons.

    Args:
        reset: restart the counts after this call.
    """
    ops = tuple(
        OpDispatch(
            name,
            hits,
            misses,
            miss_seconds,
            MappingProxyType({reason: calls for reason, (calls, _) in stock.items()}),
            sum(seconds for _, seconds in stock.values()),
        )
        for name, (hits, misses, miss_seconds, stock) in dispatch_counts().items()
    )
    if reset:
        reset_dispatch_counts()
    return DispatchStats(is_native(), ops)


_MOST_BYTES = 2 << 30  # of a rank's parameters; gradients and activations come on top


@dataclass(frozen=True)
class HostProfile:
    """What :func:`profile_host` returns.

    Attributes:
        first_step_seconds: processor time of the first step, which decides what each op on DTensors runs.
        forward_seconds, backward_seconds: processor time of later steps, medians.
        dispatch: what ran the ops on DTensors in one later step.
    """

    first_step_seconds: float
    forward_seconds: float
    backward_seconds: float
    dispatch: DispatchStats


def profile_host(model: nn.Module, plan: Plan, batch: Mapping[str, Any], *, num_steps: int = 5) -> HostProfile:
    """Run ``num_steps`` steps of the first rank on the processor, among ranks that do not exist: collectives return at once.

    Numbers are drawn, and only times are of use: ids and labels are 0 and 1. Where devices compute longer than this, the
    host does not slow them down.

    Args:
        model: on any device, also the meta device; it stays as it is.
        plan: without a pipeline.
        batch: global tensors or their shapes, by the names of the forward's inputs.
        num_steps: at least 2; the first one is apart.

    Raises:
        DebugOptionError: the plan has stages, or the rank's parameters take more than 2 GiB.
    """
    if num_steps < 2:
        raise DebugOptionError(f"num_steps={num_steps}; pass 2 or more: the first step is measured separately")
    if plan.pipeline_entry is not None:
        raise DebugOptionError("the plan has a pipeline: profile the plan of a stage, without its `pipeline:` section")
    copied = skeleton_of(model)
    inputs = {name: _of_first_rank(value) for name, value in make_batch(copied, batch).items()}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), unchecked(), torch.enable_grad():
        warnings.simplefilter("ignore")
        with fake_world(math.prod(plan.axes.sizes), 0), balanced_tokens(Routing()), _equal_exchanges():
            parallelize(copied, plan)
            _check_size(copied)
            with values_are_of_no_interest():
                copied.to_empty(device="cpu")
            _draw(copied)
            return _measure(copied, inputs, num_steps)


def _measure(model: nn.Module, inputs: Mapping[str, Any], num_steps: int) -> HostProfile:
    times = []
    for _ in range(num_steps):
        dispatch_stats(reset=True)
        model.zero_grad()
        start = time.thread_time()
        loss = loss_of(model(**inputs), inputs)
        middle = time.thread_time()
        loss.backward()
        times.append((middle - start, time.thread_time() - middle))
    forward, backward = zip(*times[1:])
    return HostProfile(
        sum(times[0]), statistics.median(forward), statistics.median(backward), dispatch_stats(reset=True)
    )


def _of_first_rank(value: Any) -> Any:
    """Ids and labels that the first rank has rows of, where they are cut: no other rank looks up the others."""
    is_index = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.dtype is torch.bool)
    return value.remainder(2) if is_index else value


def _check_size(model: nn.Module) -> None:
    num_bytes = sum(local.numel() * local.element_size() for local in map(own_part, model.parameters()))
    if num_bytes > _MOST_BYTES:
        raise DebugOptionError(
            f"a rank's parameters take {num_bytes / 2**30:.1f} GiB, and a profile computes with them; pass a model "
            "with fewer layers and smaller dims: host time hardly depends on sizes"
        )


@torch.no_grad()
def _draw(model: nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        local = own_part(tensor)
        local.normal_(0, 0.02) if local.is_floating_point() else local.zero_()


@contextlib.contextmanager
def _equal_exchanges() -> Iterator[None]:
    """Inside, each rank sends as many tokens as it gets: what ranks that do not exist would send is not known."""
    original = TokenExchange.plan

    def plan(goes: torch.Tensor, group: AxisGroup, requester: str) -> TokenExchange:
        found = original(goes, group, requester)
        return replace(found, receive=found.send)

    TokenExchange.plan = plan  # type: ignore[method-assign]
    try:
        yield
    finally:
        TokenExchange.plan = original  # type: ignore[method-assign]
