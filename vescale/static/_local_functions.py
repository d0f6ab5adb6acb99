"""Torch functions whose collectives a static forward starts between local tensors, without DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate

from vescale.compat import native_static
from vescale.ops import PreparedConversion, cross_entropy_of_rows, enter_local, has_whole_rows, without_dim
from vescale.placements import without_partials
from vescale.plans import AttentionMethod
from vescale.static._gathered_attention import gathered_attention
from vescale.static._tensor_type import TensorType, UnrecordedError

__all__ = ["LocalFunction", "local_function"]

LocalFunction = Callable[..., torch.Tensor | None]


def local_function(
    function: Any,
    inputs: Sequence[TensorType],
    outputs: Sequence[TensorType],
    attention_methods: Sequence[AttentionMethod | None] = (),
) -> LocalFunction | None:
    """What does on local tensors of these types what ``function`` does on DTensors, with the same bits and collectives; it
    answers None for arguments of which it cannot. None: there is nothing.

    Args:
        attention_methods: of the module that calls the function, on each axis.
    """
    if function is F.scaled_dot_product_attention:
        return gathered_attention(inputs, outputs, attention_methods)
    if function is F.cross_entropy:
        return _cross_entropy(inputs, outputs)
    return _copy(inputs) if function is torch.Tensor.copy_ else None


def _copy(inputs: Sequence[TensorType]) -> LocalFunction | None:
    """A write to a tensor of values that have other placements: these move, the tensor does not."""
    if len(inputs) != 2 or any(kind.placements is None for kind in inputs):
        return None
    written, values = inputs
    placements, found = written.placements, values.placements
    assert placements is not None and found is not None
    are_parts = all(without_partials(kind) == kind for kind in (placements, found))
    if not are_parts or len(written.factors) != len(values.factors) or written.grad not in (None, placements):
        return None
    convert = PreparedConversion(found, placements, (None, None), "copy_")

    def copy(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if written.global_shape(x) != values.global_shape(source):
            raise UnrecordedError(f"copy_ of values of shape {tuple(source.shape)} to a tensor of {tuple(x.shape)}")
        moved: Any = convert(values.to_global(source, "copy_"))  # type: ignore[arg-type]
        return x.copy_(enter_local(moved), non_blocking)

    return copy


def _cross_entropy(inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> LocalFunction | None:
    """The loss of rows that are cut over ranks, each with all classes."""
    if len(inputs) != 2 or len(outputs) != 1:
        return None
    scores, labels, loss = *inputs, outputs[0]
    if scores.placements is None or loss.placements is None or len(scores.factors) != 2:
        return None
    if not has_whole_rows(scores.placements, 2):
        return None
    is_alike = labels.placements == tuple(without_dim(p, 1) for p in scores.placements)
    are_grads_known = scores.grad in (None, scores.placements) and loss.grad in (None, loss.placements)
    if not is_alike or not are_grads_known or not all(p.is_replicate() for p in loss.placements):
        return None
    mesh = scores.mesh
    axes = [axis for axis, p in enumerate(scores.placements) if not p.is_replicate() and mesh.size(axis) > 1]
    add_up = _sum_of_three(mesh, axes)

    def cross_entropy(
        input: torch.Tensor,  # names and defaults of PyTorch's function
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> torch.Tensor | None:
        is_simple = weight is None and size_average is None and reduce is None and not label_smoothing
        if not is_simple or reduction not in ("mean", "sum") or target.is_floating_point():
            return None
        return cross_entropy_of_rows(mesh, axes, input, target, reduction, ignore_index, add_up)

    return cross_entropy


def _sum_of_three(mesh: DeviceMesh, axes: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor | None] | None:
    """The sum of a vector of three numbers over the ranks along one axis, in C++; it answers None where Python has to. None:
    along several axes, where conversions and the loss may join them differently."""
    if len(axes) != 1:
        return None
    pending = tuple(Partial() if axis in axes else Replicate() for axis in range(mesh.ndim))
    whole = PreparedConversion(pending, (Replicate(),) * mesh.ndim, (None, None), "nll_loss")
    arguments = mesh, pending, (1,), (), None, whole.target, whole.stages, "nll_loss", None, _accept
    return native_static().LocalConversion(*arguments)


def _accept(_: Any) -> None:
    """Placements are known."""
