"""Torch functions whose collectives a static forward starts between local tensors, without DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import make_spec, native_static
from vescale.ops import (
    ROWS,
    AttentionWork,
    PreparedConversion,
    attend_to_prefixes,
    cross_entropy_of_rows,
    enter_local,
    has_whole_rows,
    leave_local,
    sequence_axes,
    without_dim,
)
from vescale.placements import contiguous_stride, shard_dim, without_partials
from vescale.plans import AttentionMethod
from vescale.static._tensor_type import TensorType, UnrecordedError

# Attention over a sequence that is cut over ranks, with gathered keys and values, between local tensors.

_MAX_SHAPES = 64

Runs = Sequence[tuple[int, int]]


def gathered_attention(
    inputs: Sequence[TensorType], outputs: Sequence[TensorType], methods: Sequence[str | None]
) -> Callable[..., torch.Tensor | None] | None:
    """What ``vescale.ops.attention`` does with a query, a key and a value of these types, where the plan gathers keys and
    values; None: something else would be moved, or the gradients arrive otherwise."""
    if len(inputs) != 3 or len(outputs) != 1 or not all(_is_usual(kind) for kind in (*inputs, *outputs)):
        return None
    query, key, value = inputs
    given, kept = key.placements, query.placements
    if given is None or kept is None or value.placements != given or len(key.factors) != len(value.factors):
        return None
    mesh, rows = query.mesh, len(query.factors) - 2
    axes = [axis for axis, p in enumerate(kept) if shard_dim(p) == rows and mesh.size(axis) > 1]
    if not axes or not methods or len(key.factors) != len(query.factors):
        return None
    if any(methods[axis] != "all_gather" or shard_dim(given[axis]) != rows for axis in axes):
        return None
    if any(shard_dim(p) == rows + 1 for p in given):
        return None
    names = mesh.mesh_dim_names or ()
    requester = f"attention: all_gather on {','.join(names[axis] for axis in axes)}"
    return _GatheredAttention(query, key, value, outputs[0], axes, requester)


def _is_usual(kind: TensorType) -> bool:
    """Whether the gradient of a tensor arrives as it is placed, and ranks share sizes evenly."""
    placements = kind.placements
    if placements is None or tuple(without_partials(placements)) != placements:
        return False
    return kind.is_even and kind.grad in (None, placements)


class _GatheredAttention:
    """The function itself. It answers None for arguments that take DTensors."""

    def __init__(
        self,
        query: TensorType,
        key: TensorType,
        value: TensorType,
        result: TensorType,
        axes: Sequence[int],
        requester: str,
    ) -> None:
        self._types, self._result, self._requester = (query, key, value), result, requester
        self._mesh = mesh = query.mesh
        assert key.placements is not None
        self._given = key.placements
        self._gathered = tuple(Replicate() if axis in axes else p for axis, p in enumerate(self._given))
        self._summed: tuple[Placement, ...] = tuple(
            Partial() if axis in axes else p for axis, p in enumerate(self._given)
        )
        target = tuple(Replicate() if axis in axes else None for axis in range(mesh.ndim))
        self._convert = PreparedConversion(self._given, target, (None, None), requester)
        self._convert_local = native_static().LocalConversion(
            mesh,
            self._given,
            key.factors,
            key.sizes,
            None,
            self._convert.target,
            self._convert.stages,
            requester,
            self._summed,
            _accept,
        )
        self._runs: dict[Any, Runs | None] = {}  # by shapes; None: the operands are moved or cut otherwise

    def __call__(
        self,
        query: torch.Tensor,  # names and defaults of PyTorch's function
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor | None:
        shapes = query.shape, key.shape, value.shape
        if attn_mask is not None or dropout_p or key.dtype != value.dtype or shapes[1][:-1] != shapes[2][:-1]:
            return None
        runs = self._runs.get(shapes)
        if runs is None:
            if len(self._runs) >= _MAX_SHAPES:
                self._runs.clear()
            runs = self._runs[shapes] = self._runs_of(query, key, value)
            if runs is None:
                return None
        keys, values = self._whole(torch.cat([key, value], -1)).split([key.shape[-1], value.shape[-1]], -1)
        options = {
            "dropout_p": dropout_p,
            "scale": scale,
            "enable_gqa": enable_gqa and query.ndim > 3 and query.shape[-3] != keys.shape[-3],
        }
        function = torch.nn.functional.scaled_dot_product_attention
        if is_causal:
            return attend_to_prefixes(function, query, keys, values, runs, options)
        return function(query, keys, values, **options)  # type: ignore[arg-type]

    def _whole(self, packed: torch.Tensor) -> torch.Tensor:
        found = self._convert_local(packed)
        if found is not None:
            return found
        shape = (*self._types[1].global_shape(packed)[:-1], packed.shape[-1])
        made = leave_local(packed, self._mesh, self._given, shape, self._requester)
        return enter_local(self._convert(made), self._summed)

    def _runs_of(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Runs | None:
        """The rows of the query that this rank has."""
        placed = (self._types[0].placements, self._gathered, self._gathered)
        specs = []
        for x, kind, placements in zip((query, key, value), self._types, placed, strict=True):
            shape = kind.global_shape(x)
            assert placements is not None
            specs.append(make_spec(self._mesh, placements, shape, contiguous_stride(shape), x.dtype))
        if not sequence_axes(specs[0]):
            return None
        work = AttentionWork.of(*specs, None)
        grads = placed[0], self._summed, self._summed
        for spec, name, grad in zip(specs, ("query", "key", "value"), grads, strict=True):
            use = work.use(spec, name)
            if use.placements != tuple(spec.placements) or use.grads != grad or use.cuts:
                return None
        return work.held(work.shape, work.placements, ROWS) if work.placements == self._result.placements else None


def _accept(_: Any) -> None:
    """Of gathered keys and values, only the local tensor counts."""


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
    arguments = mesh, pending, (1,), (), None, whole.target, whole.stages, "nll_loss", None, _local_functions_accept
    return native_static().LocalConversion(*arguments)


def _local_functions_accept(_: Any) -> None:
    """Placements are known."""
