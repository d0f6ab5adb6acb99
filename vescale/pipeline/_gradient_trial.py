"""``GradientTrial``: the gradients of two micro-batches together, compared with the sum of those of each.

Where Python runs in a backward, what it computes is in no trace. The first two micro-batches run forward and backward
together and apart, up to what the loss is computed of, where gradients begin that are made of each row's own values. The
gradients of parameters are those of one device if both ways give the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vescale.comm import record
from vescale.compat import no_torch_function, own_part
from vescale.fsdp import registered_of
from vescale.pipeline._backward_code import nodes_behind
from vescale.pipeline._batches import rows_error
from vescale.pipeline._row_trial import RowTrial
from vescale.pipeline._stage_results import Results, without_sums
from vescale.plans import PipelineEntry, PlanError

_SCALE = 4.0
_SHOWN = 3  # texts of a message


class GradientTrial:
    """``is_scaled``: the step divides gradients afterwards, so that a backward has to be linear in all.

    Attributes:
        is_both: whether the backward that comes is of both micro-batches together.
    """

    def __init__(self, model: nn.Module, rows: RowTrial, num_stages: int, *, is_scaled: bool) -> None:
        self.is_both, self._rows, self._num_stages, self._scale = True, rows, num_stages, _SCALE if is_scaled else 1.0
        self._names = {id(registered_of(p)): name for name, p in model.named_parameters()}
        self._sums: defaultdict[tuple[bool, str], float] = defaultdict(
            float
        )  # of projections; whether of both together
        self._squares: defaultdict[str, float] = defaultdict(float)

    def begin(self, results: Results) -> tuple[list[Any], list[Any]]:
        """The parts of the last stage's results that have rows, and the gradients with which a backward begins. Their graph
        is taken from ``results``. Communication: of pending sums."""
        roots = []
        for place, leaves in results.items():
            if isinstance(place, int):
                dims = self._rows.dims_of(place, self._num_stages)
                roots += [x for x, dim in zip(leaves, dims) if dim is not None and x.requires_grad]
                results[place] = [x.detach() if isinstance(x, torch.Tensor) else x for x in leaves]
        scale = 1.0 if self.is_both else 1 / self._scale
        with no_torch_function(), torch.no_grad():
            return roots, [(8 * without_sums(x.detach()) + 1).sin() * scale for x in roots]

    def backward(self, roots: Sequence[torch.Tensor], gradients: Any, received: Sequence[torch.Tensor]) -> None:
        """In place of a stage's backward: ``.grad`` of what it has received, and no other; gradients of parameters are
        noted. Communication: where ``torch.autograd.grad`` completes those of parameters."""
        found = {
            id(leaf): leaf
            for node in nodes_behind(roots, set())
            if (leaf := getattr(node, "variable", None)) is not None
        }
        found |= {id(root): root for root in roots if root.is_leaf}
        leaves = list(found.values())
        own = {id(leaf) for leaf in received}
        for leaf, gradient in zip(leaves, torch.autograd.grad(roots, leaves, gradients, allow_unused=True)):
            if gradient is None:
                continue
            if id(leaf) in own:
                leaf.grad = gradient
                continue
            name = self._names.get(id(registered_of(leaf)))
            if name is not None:
                with no_torch_function(), torch.no_grad():
                    self._note(name, own_part(gradient).double().flatten())

    def _note(self, name: str, gradient: torch.Tensor) -> None:
        weights = torch.arange(1, len(gradient) + 1, dtype=torch.float64, device=gradient.device).mul_(12.9898).sin_()
        self._sums[self.is_both, name] += float(gradient @ weights) * (1.0 if self.is_both else self._scale)
        self._squares[name] += float(gradient.square().sum())

    def first_difference(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> str:
        """The first parameter, of those on this rank, with other gradients; empty if there is none. Communication: one
        all-reduce for each axis of the stage's mesh, whose ranks have their parts of gradients, or of rows."""
        names = list(self._names.values())
        rows = [[self._sums[True, n], self._sums[False, n], self._squares[n]] for n in names] or [[0.0] * 3]
        found = torch.tensor(rows, dtype=torch.float64, device=device)
        for group in groups:
            with record(
                "all_reduce", group.size(), found.nbytes, requester="pipeline: the trial of gradients", group=group
            ):
                dist.all_reduce(found, group=group)
        both, apart, norms = found[:, 0], found[:, 1], found[:, 2].sqrt()
        limit = self._rows.eps**0.4 * norms + self._rows.eps**0.75 * norms.nan_to_num().max()
        differs = ((both - apart).abs() > limit) | (both.isfinite() & ~apart.isfinite())
        return next((name for name, is_other in zip(names, differs.tolist()) if is_other), "")


def refused_gradients(parameter: str, code: Sequence[str], entry: PipelineEntry) -> PlanError:
    """``code``: what runs in the backward."""
    shown = "; ".join(code[:_SHOWN]) + (f"; and {len(code) - _SHOWN} more" if len(code) > _SHOWN else "")
    scaled = (
        ". With a callable loss=, it gets gradients that are divided by the count of the batch only afterwards: if it is "
        "not linear, pass a path of the output as loss="
        if callable(entry.loss)
        else ""
    )
    return rows_error(
        f"code that runs in the backward computes something across the rows of the batch ({shown}): the gradient of "
        f"{parameter!r} differs between two micro-batches run together and each of them run separately{scaled}",
        entry,
    )
