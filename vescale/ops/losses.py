"""Log-softmax and negative log likelihood over sharded classes and sharded rows: one device's values, no gathered logits.

These are op handlers, so that they serve ``F.cross_entropy``, ``F.nll_loss`` and ``F.log_softmax`` alike, inside a model
and outside of one, forward and backward. A loss of plain labels takes them as the labels of the whole batch.

======================  ===========================================================  ================================
op                      communication                                                placements of the result
======================  ===========================================================  ================================
log_softmax             all-reduce of the row maxima and of the row sums, over the   as the input
                        axes that shard the classes
log_softmax backward    all-reduce of the row sums of the gradient, over the same    as the input
nll_loss mean, sum      one all-reduce of three numbers, over the axes that shard    Replicate
                        rows or classes: ``(sum of losses, sum of weights, bad)``
nll_loss none           all-reduce of the rows' losses, over the class axes          as the rows
nll_loss backward       none                                                         as the input
======================  ===========================================================  ================================

Stock DTensor takes the mean of the ranks' means, which is another number where ranks ignore different counts of labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import all_reduce, axis_group, requested_by
from vescale.compat import (
    DTensorSpec,
    local_of,
    make_dtensor,
    make_spec,
    no_torch_function,
    tell_plain_value,
    tell_read,
)
from vescale.errors import IndexBoundsError
from vescale.ops._conversion import bring, convert, cut, enter_local, leave_local
from vescale.ops._registry import OpContext, handles, is_spread, replaces
from vescale.placements import RaggedShard, at_dim, contiguous_stride, local_region, shard_dim, without_partials

_aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2


def _sum_over(mesh: DeviceMesh, axes: Sequence[int], local: torch.Tensor, op: str, requester: str) -> torch.Tensor:
    if not axes:
        return local
    with requested_by(requester):
        return all_reduce(local, op, axis_group(mesh, axes).group).wait()


def _axes_on(x: DTensor | DTensorSpec, dim: int) -> list[int]:
    """The axes along which ranks hold different parts of a dim."""
    mesh = x.mesh if isinstance(x, DTensorSpec) else x.device_mesh
    return [a for a, placement in enumerate(x.placements) if shard_dim(placement) == dim and mesh.size(a) > 1]


def _classes_are_sharded(op: Any, schema: Any) -> bool:
    """Whether ``log_softmax(x, dim, ...)`` or its backward ``(grad, output, dim, ...)`` needs sums over ranks."""
    position = 0 if op is _aten._log_softmax.default else 1
    x, dim = schema.args_schema[position : position + 2]
    ragged = any(isinstance(placement, RaggedShard) for placement in x.placements)
    return ragged or bool(_axes_on(x, dim % max(len(x.shape), 1)))


def _with_rows(x: DTensor, op: Any) -> DTensor:
    """Gather ``x`` along ragged axes: a ragged local tensor is flat, and may begin and end inside of a row."""
    return bring(x, [Replicate() if isinstance(p, RaggedShard) else p for p in x.placements], str(op), "self")


def _like(x: DTensor, local: torch.Tensor, dtype: torch.dtype) -> DTensor:
    spec = make_spec(x.device_mesh, x.placements, x.shape, contiguous_stride(x.shape), dtype)
    return make_dtensor(local.contiguous(), spec)


@handles(_aten._log_softmax.default, applies=_classes_are_sharded)
def _log_softmax(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim, half_to_float = args
    x = _with_rows(x, op)
    dim %= max(x.ndim, 1)
    axes = _axes_on(x, dim)
    if not axes:  # now that it is not ragged any more
        return op(x, dim, half_to_float)
    x = bring(x, without_partials(x.placements), str(op), "self")
    tell_read(x, "log_softmax")
    local = local_of(x).float() if half_to_float else local_of(x)
    wide = local.float() if local.dtype in (torch.float16, torch.bfloat16) else local
    rows = [*local.shape[:dim], 1, *local.shape[dim + 1 :]]
    largest = wide.amax(dim, keepdim=True) if wide.shape[dim] else wide.new_full(rows, float("-inf"))
    largest = _sum_over(x.device_mesh, axes, largest, "max", "log_softmax")
    shifted = wide - largest
    total = _sum_over(x.device_mesh, axes, shifted.exp().sum(dim, keepdim=True), "sum", "log_softmax")
    return _like(x, (shifted - total.log()).to(local.dtype), local.dtype)


@handles(_aten._log_softmax_backward_data.default, applies=_classes_are_sharded)
def _log_softmax_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, output, dim, input_dtype = args
    dim %= max(output.ndim, 1)
    axes = _axes_on(output, dim)
    local_grad = local_of(bring(grad, output.placements, str(op), "grad_output"))
    total = _sum_over(output.device_mesh, axes, local_grad.sum(dim, keepdim=True), "sum", "log_softmax: gradient")
    return _like(output, (local_grad - local_of(output).exp() * total).to(input_dtype), input_dtype)


@dataclass(frozen=True)
class _Rows:
    """The local operands of a negative log likelihood.

    Attributes:
        scores: log probabilities, neither Partial nor ragged.
        labels: as the rows of ``scores``; the same on every rank of a class axis.
        weights: for each row the weight of its label's class, 0 where the label is ignored.
        index: the position of the label among this rank's classes, 0 where another rank has it.
        here: whether the label is one of this rank's classes, and not ignored.
        num_bad: number of labels that are neither a class nor ignored.
    """

    scores: DTensor
    class_dim: int
    class_axes: list[int]
    row_axes: list[int]
    placements: tuple[Placement, ...]
    weights: torch.Tensor
    index: torch.Tensor
    here: torch.Tensor
    num_bad: torch.Tensor

    @classmethod
    def of(cls, op: Any, scores: DTensor, target: Any, weight: Any, ignore_index: int) -> _Rows:
        mesh = scores.device_mesh
        class_dim = 0 if scores.ndim == 1 else 1
        scores = _with_rows(scores, op)
        scores = bring(scores, without_partials(scores.placements), str(op), "self")
        placements = tuple(without_dim(placement, class_dim) for placement in scores.placements)
        labels = local_part(target, mesh, placements, op, "target")
        num_classes = scores.shape[class_dim]
        valid = labels != ignore_index
        bad = valid & ((labels < 0) | (labels >= num_classes))
        in_range = labels.clamp(0, num_classes - 1)
        if weight is None:
            weights = valid.to(scores.dtype)
        else:
            whole = local_part(weight, mesh, (Replicate(),) * mesh.ndim, op, "weight")
            weights = torch.where(valid, whole[in_range], 0).to(scores.dtype)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        region = local_region(tuple(scores.shape), tuple(scores.placements), tuple(mesh.shape), coordinate)
        index, here, position = torch.zeros_like(labels), torch.zeros_like(valid), 0
        for start, stop in region.intervals[class_dim]:
            inside = valid & (labels >= start) & (labels < stop)
            index = torch.where(inside, labels - start + position, index)
            here, position = here | inside, position + stop - start
        class_axes = _axes_on(scores, class_dim)
        row_axes = [
            a for a, p in enumerate(scores.placements) if shard_dim(p) not in (None, class_dim) and mesh.size(a) > 1
        ]
        return cls(scores, class_dim, class_axes, row_axes, placements, weights, index, here, bad.sum())

    @property
    def counted_here(self) -> bool:
        """Whether this rank adds the weights of its rows to the sum: the first of the ranks that share them does."""
        coordinate = self.scores.device_mesh.get_coordinate()
        return coordinate is not None and all(coordinate[axis] == 0 for axis in self.class_axes)

    def losses(self) -> torch.Tensor:
        """For each row the contribution of this rank's classes."""
        local = local_of(self.scores)
        if local.shape[self.class_dim] == 0:
            return torch.zeros_like(self.weights)
        picked = local.gather(self.class_dim, self.index.unsqueeze(self.class_dim)).squeeze(self.class_dim)
        return torch.where(self.here, -picked * self.weights, 0)


def without_dim(placement: Placement, dim: int) -> Placement:
    """The placement of a tensor that lacks dim ``dim`` and is otherwise placed alike."""
    own = shard_dim(placement)
    if own is None:
        return placement
    if own == dim:
        return Replicate()
    return at_dim(placement, own - (own > dim))


def local_part(x: Any, mesh: DeviceMesh, placements: Sequence[Placement], op: Any, name: str) -> torch.Tensor:
    """The local tensor of an operand, redistributed to ``placements``; a plain tensor is the same on every rank."""
    if isinstance(x, DTensor):
        return local_of(bring(x, placements, str(op), name))
    tell_plain_value(op, name, x, mesh)
    return cut(x, mesh, placements)


def _scalar(mesh: DeviceMesh, value: torch.Tensor) -> DTensor:
    return make_dtensor(value, make_spec(mesh, (Replicate(),) * mesh.ndim, (), (), value.dtype))


@handles(
    _aten.nll_loss_forward.default,
    _aten.nll_loss2d_forward.default,
    applies=is_spread,
    takes_plain=True,
)
def _nll_loss(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    scores, target, weight, reduction, ignore_index = args
    if not isinstance(scores, DTensor):
        raise ValueError(_mixed_loss(scores, target))
    tell_read(scores, "the loss")
    if reduction != _NONE and has_whole_rows(scores.placements, scores.ndim):
        return _loss_of_whole_rows(op, scores, target, weight, reduction, ignore_index)
    rows = _Rows.of(op, scores, target, weight, ignore_index)
    mesh, losses = rows.scores.device_mesh, rows.losses()
    if reduction == _NONE and rows.scores.ndim > 1:
        _refuse_bad_labels(rows.scores, int(rows.num_bad) if losses.device.type == "cpu" else 0)
        losses = _sum_over(mesh, rows.class_axes, losses, "sum", "nll_loss")
        shape = [n for dim, n in enumerate(rows.scores.shape) if dim != rows.class_dim]
        spec = make_spec(mesh, rows.placements, shape, contiguous_stride(shape), losses.dtype)
        return make_dtensor(losses.contiguous(), spec), _scalar(mesh, losses.new_zeros(()))
    counts = torch.stack([rows.weights.sum(), rows.num_bad.to(losses.dtype)])
    numbers = torch.cat([losses.sum().view(1), counts if rows.counted_here else torch.zeros_like(counts)])
    numbers = _sum_over(mesh, sorted([*rows.row_axes, *rows.class_axes]), numbers, "sum", "nll_loss")
    total, weights, num_bad = numbers.unbind()
    _refuse_bad_labels(rows.scores, int(num_bad) if losses.device.type == "cpu" else 0)
    return _scalar(mesh, total / weights if reduction == _MEAN else total.clone()), _scalar(mesh, weights.clone())


def has_whole_rows(placements: Sequence[Placement], ndim: int) -> bool:
    """Whether ranks have all classes of their rows, so that the kernel of local tensors gives a rank's part of the loss."""
    return ndim > 1 and all(
        p.is_replicate() or not (p.is_partial() or isinstance(p, RaggedShard) or shard_dim(p) in (None, 1, 1 - ndim))
        for p in placements
    )


def _whole_rows(op: Any, scores: DTensor, target: Any, weight: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """The local scores, labels and weights of classes."""
    mesh = scores.device_mesh
    placements = tuple(without_dim(placement, 1) for placement in scores.placements)
    labels = local_part(target, mesh, placements, op, "target")
    weights = None if weight is None else local_part(weight, mesh, (Replicate(),) * mesh.ndim, op, "weight")
    return local_of(scores), labels, weights


def _loss_of_whole_rows(
    op: Any, scores: DTensor, target: Any, weight: Any, reduction: int, ignore_index: int
) -> tuple[DTensor, DTensor]:
    mesh = scores.device_mesh
    local, labels, class_weights = _whole_rows(op, scores, target, weight)
    numbers, _ = _sums_of_rows(op, local, labels, class_weights, ignore_index)
    axes = [axis for axis, p in enumerate(scores.placements) if not p.is_replicate() and mesh.size(axis) > 1]
    total, weights, bad = _sum_over(mesh, axes, numbers, "sum", "nll_loss").unbind()
    _refuse_bad_labels(scores, int(bad) if total.is_cpu else 0)
    result = total / weights if reduction == _MEAN else total.clone()
    return _scalar(mesh, result.to(local.dtype)), _scalar(mesh, weights.to(local.dtype, copy=True))


def cross_entropy_of_rows(
    mesh: DeviceMesh,
    axes: Sequence[int],
    scores: torch.Tensor,
    labels: torch.Tensor,
    reduction: str,
    ignore_index: int,
    add_up: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
) -> torch.Tensor:
    """``F.cross_entropy`` of the rows of all ranks along ``axes``, from local scores of shape ``[rows, classes]`` and local
    labels: the bits of the loss, and of the gradient, of DTensors. One all-reduce of three numbers, for which ``add_up`` is
    asked first.

    Raises IndexBoundsError, on every rank, for a label that is neither a class nor ignored.
    """
    logarithms = F.log_softmax(scores, 1)
    numbers, total = _sums_of_rows(_aten.nll_loss_forward.default, logarithms, labels, None, ignore_index)
    added = None if add_up is None else add_up(numbers)
    if added is None:
        added = _sum_over(mesh, axes, numbers, "sum", "nll_loss")
    whole, weights, bad = added.unbind()
    _refuse_bad_labels(scores, int(bad) if scores.is_cpu else 0)
    if reduction == "sum":
        return cast(torch.Tensor, _OfAllRows.apply(total, whole.to(total.dtype, copy=True), None))
    return cast(torch.Tensor, _OfAllRows.apply(total, (whole / weights).to(total.dtype), weights.to(total.dtype)))


class _OfAllRows(torch.autograd.Function):
    """``whole`` in place of this rank's ``total``; ``weights``: its gradient is divided by them."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, whole: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        ctx.weights = weights
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad if ctx.weights is None else grad / ctx.weights, None, None


def _sums_of_rows(
    op: Any, scores: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor | None, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a rank's rows: ``(sum of losses, sum of weights, bad labels)``, without gradient, and the sum of losses."""
    num_bad = 0
    try:
        total, weights = op(scores, labels, class_weights, _SUM, ignore_index)
    except IndexError:  # raised later, on all ranks
        outside = (labels < 0) | (labels >= scores.shape[1])
        num_bad = int((outside & (labels != ignore_index)).sum())
        total = weights = scores.new_zeros(())
    numbers = torch.stack([total.detach(), weights, weights.new_full((), num_bad)])
    # A count of rows has more digits than half precision.
    return numbers.float() if scores.element_size() < 4 else numbers, total


def _refuse_bad_labels(scores: torch.Tensor, num_bad: int) -> None:
    if num_bad:
        last = scores.shape[min(scores.ndim - 1, 1)] - 1
        raise IndexBoundsError(
            f"nll_loss: {num_bad} labels are out of bounds; expected classes 0..{last} or ignore_index: check the "
            "labels, or the model's number of classes"
        )


def _mixed_loss(scores: torch.Tensor, target: Any) -> str:
    return (
        f"nll_loss: plain scores of shape {tuple(scores.shape)} with labels placed as {tuple(target.placements)}; "
        "pass the model's own output as the scores, or plain labels"
    )


@handles(_aten.nll_loss_backward.default, _aten.nll_loss2d_backward.default, applies=is_spread, takes_plain=True)
def _nll_loss_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    grad, scores, target, weight, reduction, ignore_index, total_weight = args
    if reduction != _NONE and has_whole_rows(scores.placements, scores.ndim):
        replicated = (Replicate(),) * scores.device_mesh.ndim
        local, labels, class_weights = _whole_rows(op, scores, target, weight)
        share = local_part(grad, scores.device_mesh, replicated, op, "grad_output")
        total = local_part(total_weight, scores.device_mesh, replicated, op, "total_weight")
        share = share / total if reduction == _MEAN else share
        found = op(share, local, labels, class_weights, _SUM, ignore_index, total)
        return _like(scores, found, found.dtype)
    rows = _Rows.of(op, scores, target, weight, ignore_index)
    mesh = rows.scores.device_mesh
    replicated = (Replicate(),) * mesh.ndim
    per_row = reduction == _NONE and rows.scores.ndim > 1
    row_grad = local_part(grad, mesh, rows.placements if per_row else replicated, op, "grad_output")
    if reduction == _MEAN:
        row_grad = row_grad / local_part(total_weight, mesh, replicated, op, "total_weight")
    local = torch.zeros_like(local_of(rows.scores), memory_format=torch.contiguous_format)
    if local.shape[rows.class_dim]:
        values = torch.where(rows.here, -rows.weights * row_grad, 0).to(local.dtype)
        local.scatter_(rows.class_dim, rows.index.unsqueeze(rows.class_dim), values.unsqueeze(rows.class_dim))
    return _like(rows.scores, local, local.dtype)


# ``F.cross_entropy`` with label smoothing on DTensors, inside a model: one device's value, and no gathered logits. The
# smoothed loss of a row is ``(1 - s) * nll + s / C * -sum(weight * log_softmax)``. The negative log likelihood
# communicates as in :mod:`vescale.ops.losses`; the second part adds an all-reduce of one number over the axes that
# shard rows or classes (without a reduction, of one number a row over those that shard classes).

_SIGNATURE = inspect.signature(F.cross_entropy)
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_OP = "cross_entropy: label smoothing"


def _is_smoothed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(_SIGNATURE.bind(*args, **kwargs).arguments.get("label_smoothing", 0.0))


@replaces(F.cross_entropy, changes=_is_smoothed)
def cross_entropy(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Without smoothing, and where targets are probabilities, this is torch's own composite."""
    call = _SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    options = call.arguments
    logits, target, smoothing = options["input"], options["target"], options["label_smoothing"]
    legacy = options["size_average"] is not None or options["reduce"] is not None
    if not smoothing or legacy or target.is_floating_point() or options["reduction"] not in _REDUCTIONS:
        return func(*args, **kwargs)
    if not 0 < smoothing <= 1:
        return func(*args, **kwargs)  # torch's own error
    return _smoothed(logits, target, options["weight"], options["ignore_index"], options["reduction"], smoothing)


def _smoothed(
    logits: DTensor, target: torch.Tensor, weight: torch.Tensor | None, ignored: int, reduction: str, smoothing: float
) -> torch.Tensor:
    class_dim = 0 if logits.ndim == 1 else 1
    num_classes = logits.shape[class_dim]
    scores: Any = F.log_softmax(logits, class_dim)
    op = torch.ops.aten.nll_loss2d_forward if logits.ndim == 4 else torch.ops.aten.nll_loss_forward
    if logits.ndim in (1, 2, 4):
        nll, total_weight = op(scores, target, weight, _REDUCTIONS[reduction], ignored)
    else:  # (N, C, d1, ...) as (N, C, d1, the rest)
        shape = (*logits.shape[:2], logits.shape[2], -1)
        nll, total_weight = torch.ops.aten.nll_loss2d_forward(
            scores.reshape(shape),
            target.reshape(target.shape[0], target.shape[1], -1),
            weight,
            _REDUCTIONS[reduction],
            ignored,
        )
        nll = nll.view(target.shape) if reduction == "none" else nll
    uniform = _uniform(scores, target, weight, ignored, class_dim, per_row=reduction == "none")
    uniform = uniform / total_weight if reduction == "mean" else uniform
    return (1 - smoothing) * nll + uniform * (smoothing / num_classes)


def _uniform(
    scores: DTensor, target: torch.Tensor, weight: torch.Tensor | None, ignored: int, class_dim: int, *, per_row: bool
) -> torch.Tensor:
    """``-sum(weight * scores)`` over the classes, and over the rows that are not ignored unless ``per_row``."""
    mesh, placements = scores.device_mesh, tuple(scores.placements)
    rows = tuple(without_dim(placement, class_dim) for placement in placements)
    classes: list[Placement] = [at_dim(p, 0) if shard_dim(p) == class_dim else Replicate() for p in placements]
    local = enter_local(scores)
    with no_torch_function():
        counted = local_part(target, mesh, rows, _OP, "target") != ignored
        if weight is not None:
            shape = [-1 if dim == class_dim else 1 for dim in range(scores.ndim)]
            local = local * local_part(weight, mesh, classes, _OP, "weight").view(shape)
        local = -local.sum(class_dim) * counted
        if not per_row:
            local = local.sum()
    pending: list[Placement] = [
        Partial() if shard_dim(own) == class_dim or (shard_dim(own) is not None and not per_row) else row
        for own, row in zip(placements, rows)
    ]
    shape = [size for dim, size in enumerate(scores.shape) if dim != class_dim] if per_row else []
    result = leave_local(local, mesh, pending, shape, _OP)
    return convert(result, without_partials(pending), requester=_OP)
