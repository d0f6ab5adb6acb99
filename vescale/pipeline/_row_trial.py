"""``RowTrial``: what a forward computes of two micro-batches together, compared with what it computes of each.

On one device the rows of a batch are together. A stage has those of one micro-batch, and what it computes is the same only
if no row depends on others. The first two micro-batches run together once, before the first step; what modules return and
what stages send is compared, row by row, with the first two forwards of that step. The loss, and its gradients by what the
last stage's modules return, are computed of these results together and apart, before the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from vescale.compat import local_of, no_torch_function
from vescale.compat.tensor_subclasses import tree_leaves
from vescale.pipeline._batches import Signature
from vescale.pipeline._hooked_calls import TensorLike
from vescale.pipeline._row_states import cut_dim
from vescale.pipeline._traced import NOTHING, TracedCall
from vescale.placements import CustomPlacement, shard_dim

_Projected = tuple[torch.Tensor, torch.Tensor]  # a projection of each row, and its norm

NOWHERE = 1 << 40
TOGETHER, AGAIN = 2, 3
"""The numbers of runs of both micro-batches, before those of each (0 and 1) and behind them."""


class RowTrial:
    """``apart`` is of micro-batches, ``together`` of the first two as one.

    Places are numbers in the order of the forward: ``2 * n`` is what the n-th call of a gated module returns, and
    ``2 * n - 1`` what is sent where a stage begins with it.
    """

    def __init__(self, apart: Signature, together: Signature, model: nn.Module) -> None:
        self.apart, self.together = apart, together
        self._dims = {2 * n: dims for n, dims in enumerate(_dims_of_calls(together.part.calls, apart.part.calls))}
        for stage, part in apart.part.boundaries.items():
            whole = together.part.boundaries.get(stage, NOTHING)
            if len(whole.shapes) == len(part.shapes) and part.call == whole.call:
                self._dims[2 * part.call - 1] = [cut_dim(a, b, 2) for a, b in zip(whole.shapes, part.shapes)]
        dtypes = {v.dtype for call in apart.part.calls for v in call.leaves if isinstance(v, TensorLike)}
        dtypes |= {p.dtype for p in model.parameters()}
        if torch.is_autocast_enabled(next((p.device.type for p in model.parameters()), "cpu")):
            dtypes.add(torch.bfloat16)
        self.eps = max((torch.finfo(d).eps for d in dtypes if d.is_floating_point), default=2.0**-23)
        self._seen: list[dict[int, list[_Projected | None]]] = [{}, {}, {}]
        self._losses: dict[int, tuple[float, list[_Projected | None], float | None]] = {}  # by run

    def run_of(self, known: Signature, microbatch: int) -> int | None:
        """None of a forward that is not compared: behind one that has written to buffers, the state is another."""
        if known is self.together:
            return TOGETHER
        return microbatch if microbatch < (1 if self.together.of_rows else 2) else None

    def returned(self, run: int, number: int, result: Any) -> None:
        self._note(run, 2 * number, tree_leaves(result))

    def sent(self, run: int, stage: int, tensors: Sequence[torch.Tensor]) -> None:
        """What enters a stage."""
        self._note(run, 2 * self.apart.part.boundaries[stage].call - 1, tensors)

    def _note(self, run: int, place: int, leaves: Sequence[Any]) -> None:
        dims = self._dims.get(place, ())
        if len(dims) == len(leaves):
            with no_torch_function(), torch.no_grad():
                self._seen[run][place] = [None if d is None else _projected(v, d) for v, d in zip(leaves, dims)]

    def note_loss(
        self, run: int, total: torch.Tensor, count: Any, leaves: Sequence[tuple[torch.Tensor, int | None]]
    ) -> None:
        """``count``: what sums are divided by; None for shares of a loss. ``leaves``: what
        the loss is computed of, each with its dim of the rows. Communication: of a backward of what is computed around
        modules."""
        given = [leaf for leaf, _ in leaves]
        found: Sequence[Any] = [None] * len(given)
        if given and total.requires_grad:
            found = torch.autograd.grad(total, given, allow_unused=True)
        with no_torch_function():
            gradients = [None if g is None or d is None else _projected(g, d) for g, (_, d) in zip(found, leaves)]
            value = total.detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value
        self._losses[run] = float(value), gradients, None if count is None else float(count)

    def dims_of(self, place: int, num_stages: int) -> Sequence[int | None]:
        """The dims of the rows in the results of a call, or (-1) in what enters the last stage."""
        if place == -1:
            return self._dims.get(2 * self.apart.part.boundaries.get(num_stages - 1, NOTHING).call - 1, ())
        return self._dims.get(2 * place, ())

    def loss_differs(self) -> bool:
        """Whether the loss of both is not what those of each add up to, on a rank that has computed it."""
        if not self._losses:
            return False
        losses = [self._losses[run] for run in (0, 1, TOGETHER)]
        counts: list[Any] = [count for *_, count in losses]
        totals = [counts[0] + counts[1], counts[2]] if counts[2] is not None else [1.0, 1.0]
        scales = [1.0 / total if total else math.nan for total in (totals[0], *totals)]
        one, other, whole = (value * scale for (value, *_), scale in zip(losses, scales))
        gradients = [[v and (v[0] * s, v[1] * s) for v in run] for (_, run, _), s in zip(losses, scales)]
        largest = max((float(v[1].max()) for v in gradients[2] if v is not None and len(v[1])), default=0.0)
        floor = self.eps * (10 * largest + 1e-3)
        for a, b, c in zip(*gradients):
            if a is not None and b is not None and c is not None and not _agree([a, b], c, self.eps, floor):
                return True
        limit = self.eps**0.4 * max(abs(one), abs(other), abs(whole)) + self.eps
        return abs(one + other - whole) > limit or math.isnan(one + other) != math.isnan(whole)

    def state_counts(self) -> bool:
        """Whether the loss of both is another one behind those of each."""
        before, after = (self._losses.get(run, (0.0,))[0] for run in (TOGETHER, AGAIN))
        return abs(before - after) > self.eps**0.4 * max(abs(before), abs(after)) + self.eps

    def first_difference(self) -> int:
        """The first place, of those on this rank, where a row is another one in the two micro-batches together, or
        :data:`NOWHERE`."""
        *apart, both = self._seen
        for place in sorted(both):
            given = [run[place] for run in apart if place in run]
            for n, c in enumerate(both[place]):
                found = [leaf for leaves in given if (leaf := leaves[n]) is not None]
                if c is not None and found and not _agree(found, c, self.eps, self.eps, self._outer(place, n)):
                    return place
        return NOWHERE

    def _outer(self, place: int, leaf: int) -> int | None:
        """The outer size of the rows, if a loss of all rows puts them together by it."""
        boundaries = self.apart.part.boundaries
        enters = boundaries[max(boundaries)].call if boundaries else -1
        call = place // 2 if place % 2 == 0 else -1 if place == 2 * enters - 1 else len(self.apart.part.calls)
        rows = (self.apart.loss.rows or {}).get(call)
        found = rows[leaf] if rows is not None and leaf < len(rows) and self.apart.loss.whole else None
        return found[1] if found is not None else None

    def describe(self, place: int) -> str:
        """What depends on other rows at a place, for a message."""
        path = self.apart.part.calls[(place + 1) // 2].path
        what = f"the input of the stage that begins before {path!r}" if place % 2 else f"what {path!r} returns"
        return f"{what} differs between two micro-batches run together and each of them run separately"


def _dims_of_calls(whole: Sequence[TracedCall], part: Sequence[TracedCall]) -> Iterator[list[int | None]]:
    """For each call and each leaf of its result, the dim of the rows. Of calls that differ, none is known."""
    if [call.path for call in whole] != [call.path for call in part]:
        return
    for big, small in zip(whole, part):
        yield [
            cut_dim(a.shape, b.shape, 2)
            if isinstance(a, TensorLike) and isinstance(b, TensorLike) and b.dtype.is_floating_point
            else None
            for a, b in zip(big.leaves, small.leaves)
        ]


def _projected(leaf: torch.Tensor, dim: int) -> _Projected:
    """Communication: of a tensor whose rows are on several ranks, or pending sums, an all-gather."""
    leaf = leaf.detach()
    if isinstance(leaf, DTensor):
        kept = [
            Replicate() if p.is_partial() or isinstance(p, CustomPlacement) or shard_dim(p) == dim else p
            for p in leaf.placements
        ]
        leaf = local_of(leaf.redistribute(leaf.device_mesh, kept))  # of other dims the same part in all runs
    rows = leaf.movedim(dim, 0)
    rows = rows.reshape(len(rows), -1).to(torch.float64 if leaf.dtype is torch.float64 else torch.float32)
    weights = torch.arange(1, rows.shape[1] + 1, dtype=torch.float64, device=rows.device).mul_(12.9898).sin_()
    return rows @ weights.to(rows.dtype), rows.norm(dim=1)


def _agree(
    runs: Sequence[_Projected], both: _Projected, eps: float, floor: float, known_outer: int | None = None
) -> bool:
    """Whether the rows of both are those of the first run and the second, or begin with those of the first. Dims before that
    of the rows may have been merged with it (``[tokens, rows]`` made ``[tokens * rows]``): it is enough if they agree in
    one such order, if that is not known."""
    found, norms = both
    count = len(runs[0][0])
    if len(found) != 2 * count or any(len(run[0]) != count for run in runs):
        return True  # not the rows of the trace: what values choose
    limit = eps**0.4 * (norms + 0.01 * norms.max()) + floor if count else norms
    for outer in range(1, count + 1) if known_outer is None else (known_outer,):
        if count % outer:
            continue
        apart = torch.cat([run[0].view(outer, -1) for run in runs], 1)
        wanted, most = (v.view(outer, -1)[:, : apart.shape[1]] for v in (found, limit))
        if bool((((apart - wanted).abs() <= most) | (apart.isnan() & wanted.isnan()) | (apart == wanted)).all()):
            return True
    return not count


CHANGES = (0.1, 0.3, 0.6, 0.9)


def changed(leaf: torch.Tensor, most: float) -> torch.Tensor:
    """Each element made smaller by up to a part, by its own value: it keeps its sign, and stays in [0, 1]. (Where a loss is
    zero at the first values of parameters, or stationary, it is not after that; and rows that a loss selects by their order
    are others with each of several changes.)"""
    if isinstance(leaf, DTensor) and any(p.is_partial() for p in leaf.placements):
        return leaf * 1.0  # its local values are no elements
    bounded = leaf / (1 + leaf.abs())
    return leaf * (1 - most * (80 * most * bounded).sin().square())


class StatisticsOfEach(TorchFunctionMode):
    """In a forward of two micro-batches, batch normalization takes the statistics of each: of that, users are warned."""

    sees_recomputations = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        given = {**dict(zip(names, args)), **kwargs}
        if not given.get("training") or len(given["input"]) % 2:
            return func(**given)
        return torch.cat([func(**{**given, "input": half}) for half in given["input"].chunk(2)])


def around_call(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with StatisticsOfEach():
        return call(*args, **kwargs)
