"""Convolutions over a sharded batch, sharded channels and groups: one device's values on every mesh.

Stock DTensor takes the result to lie as the input does, whatever the weight: over cut input channels it takes each rank's
term of the sum for the result.

Each mesh axis has one part in a convolution:

=================  ==================  ==================  ======  =======================================================
part               input               weight              result  gradients of input, weight, bias
=================  ==================  ==================  ======  =======================================================
batch              ``S(0)``            Replicate           S(0)    ``S(0)``, Partial, Partial
output channels    Replicate           its output dim      S(1)    Partial, as the weight, ``S(0)``
groups             ``S(1)``            its first dim       S(1)    ``S(1)``, as the weight, ``S(0)``
input channels     ``S(1)``            its input dim       Partial ``S(1)``, as the weight, Replicate
none               Replicate           Replicate           R       Replicate
=================  ==================  ==================  ======  =======================================================

The output dim of a weight is 0 (1 if transposed), the input dim the other. Where only one operand is cut as a part
needs it, the other, if replicated, is cut, too, which moves nothing: a weight to its rank's groups, an input to the channels
of its rank's weight. An axis whose operands fit no part has them gathered: implicit communication, counted and refused in
strict mode like any other.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import local_of, make_dtensor, make_spec, no_torch_function
from vescale.ops import bring, stride_like, wrap_global
from vescale.placements import local_region

__all__ = ["CONVOLUTION_HANDLERS"]

_aten = torch.ops.aten


class _Part(enum.Enum):
    """What a mesh axis does in a convolution; see the module's table."""

    BATCH = enum.auto()
    OUTPUT_CHANNELS = enum.auto()
    GROUPS = enum.auto()
    INPUT_CHANNELS = enum.auto()
    NONE = enum.auto()


@dataclass(frozen=True)
class _Geometry:
    """The arguments of a convolution that are numbers, in the order of ``aten.convolution``."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, arguments: Sequence[Any]) -> _Geometry:
        stride, padding, dilation, transposed, output_padding, groups = arguments
        return cls(tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)

    def arguments(self, groups: int) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, groups

    @property
    def output_dim(self) -> int:
        """The weight's dim of output channels."""
        return 1 if self.transposed else 0


@dataclass(frozen=True)
class _Layout:
    """Where the operands of one convolution have to lie, and where its results do, axis by axis."""

    mesh: DeviceMesh
    parts: tuple[_Part, ...]
    output_dim: int

    def _placed(self, by_part: dict[_Part, Placement]) -> tuple[Placement, ...]:
        return tuple(by_part.get(part, Replicate()) for part in self.parts)

    @property
    def input(self) -> tuple[Placement, ...]:
        return self._placed({_Part.BATCH: Shard(0), _Part.GROUPS: Shard(1), _Part.INPUT_CHANNELS: Shard(1)})

    @property
    def weight(self) -> tuple[Placement, ...]:
        cut = {_Part.OUTPUT_CHANNELS: self.output_dim, _Part.GROUPS: 0, _Part.INPUT_CHANNELS: 1 - self.output_dim}
        return self._placed({part: Shard(dim) for part, dim in cut.items()})

    @property
    def bias(self) -> tuple[Placement, ...]:
        return self._placed({_Part.OUTPUT_CHANNELS: Shard(0), _Part.GROUPS: Shard(0)})

    @property
    def result(self) -> tuple[Placement, ...]:
        cut = {_Part.BATCH: Shard(0), _Part.OUTPUT_CHANNELS: Shard(1), _Part.GROUPS: Shard(1)}
        return self._placed({**cut, _Part.INPUT_CHANNELS: Partial()})

    @property
    def result_grad(self) -> tuple[Placement, ...]:
        return tuple(Replicate() if placement.is_partial() else placement for placement in self.result)

    @property
    def input_grad(self) -> tuple[Placement, ...]:
        return tuple(Partial() if part is _Part.OUTPUT_CHANNELS else p for part, p in zip(self.parts, self.input))

    @property
    def weight_grad(self) -> tuple[Placement, ...]:
        return tuple(Partial() if part is _Part.BATCH else p for part, p in zip(self.parts, self.weight))

    @property
    def bias_grad(self) -> tuple[Placement, ...]:
        return tuple(Partial() if part is _Part.BATCH else p for part, p in zip(self.parts, self.bias))

    @property
    def group_ranks(self) -> int:
        """By how many ranks the groups are divided."""
        return _ranks(self.mesh, [axis for axis, part in enumerate(self.parts) if part is _Part.GROUPS])

    @property
    def has_bias_here(self) -> bool:
        """Whether this rank's term of a pending result contains the bias: the first of each sum."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        return not any(index for part, index in zip(self.parts, coordinate) if part is _Part.INPUT_CHANNELS)


def _ranks(mesh: DeviceMesh, axes: Sequence[int]) -> int:
    ranks = 1
    for axis in axes:
        ranks *= mesh.size(axis)
    return ranks


def _layout(x: DTensor, weight: DTensor, geometry: _Geometry) -> _Layout:
    mesh, output_dim = x.device_mesh, geometry.output_dim
    parts: list[_Part] = []
    for axis, (placed, weight_placed) in enumerate(zip(x.placements, weight.placements)):
        divided = _ranks(mesh, [a for a, part in enumerate(parts) if part is _Part.GROUPS]) * mesh.size(axis)
        if placed == Shard(0):
            part = _Part.BATCH
        elif geometry.groups > 1:
            is_cut = placed == Shard(1) or (placed.is_replicate() and weight_placed == Shard(0))
            part = _Part.GROUPS if is_cut and geometry.groups % divided == 0 else _Part.NONE
        elif weight_placed == Shard(output_dim):
            part = _Part.OUTPUT_CHANNELS
        elif weight_placed == Shard(1 - output_dim) and (placed == Shard(1) or placed.is_replicate()):
            part = _Part.INPUT_CHANNELS
        else:
            part = _Part.NONE
        parts.append(part)
    return _Layout(mesh, tuple(parts), output_dim)


@functools.lru_cache(maxsize=4096)
def _result_shape(x: tuple[int, ...], weight: tuple[int, ...], geometry: _Geometry) -> tuple[int, ...]:
    """Of a whole convolution: shapes of a whole input and a whole weight."""
    x_meta, weight_meta = torch.empty(x, device="meta"), torch.empty(weight, device="meta")
    return tuple(_aten.convolution.default(x_meta, weight_meta, None, *geometry.arguments(geometry.groups)).shape)


def _wrapped(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    return make_dtensor(local, make_spec(mesh, placements, shape, stride_like(local, shape), local.dtype))


def _convolution(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    x, weight, bias = _on_one_mesh(op, args[:3])
    geometry = _Geometry.of(args[3:9])
    layout = _layout(x, weight, geometry)
    shape = _result_shape(tuple(x.shape), tuple(weight.shape), geometry)
    local_x = local_of(bring(x, layout.input, str(op), "input"))
    local_weight = local_of(bring(weight, layout.weight, str(op), "weight"))
    local_bias = None if bias is None else local_of(bring(bias, layout.bias, str(op), "bias"))
    if not layout.has_bias_here:
        local_bias = None
    if local_x.numel() and local_weight.numel():
        arguments = geometry.arguments(geometry.groups // layout.group_ranks)
        local = op(local_x, local_weight, local_bias, *arguments)
    else:  # no rows, no channels: kernels refuse some of these
        local = local_x.new_zeros(_local_shape(shape, layout))
        if local_bias is not None:
            local += local_bias.view(1, -1, *[1] * (len(shape) - 2))
    return _wrapped(local, layout.mesh, layout.result, shape)


def _local_shape(shape: tuple[int, ...], layout: _Layout) -> tuple[int, ...]:
    coordinate = layout.mesh.get_coordinate()
    assert coordinate is not None
    return local_region(shape, layout.result, tuple(layout.mesh.shape), coordinate).local_shape


def _convolution_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor | None, ...]:
    grad, x, weight = _on_one_mesh(op, args[:3])
    bias_sizes, geometry, wanted = args[3], _Geometry.of(args[4:10]), args[10]
    layout = _layout(x, weight, geometry)
    local_grad = local_of(bring(grad, layout.result_grad, str(op), "grad_output"))
    local_x = local_of(bring(x, layout.input, str(op), "input"))
    local_weight = local_of(bring(weight, layout.weight, str(op), "weight"))
    num_channels = local_grad.shape[1]
    if local_grad.numel() and local_x.numel() and local_weight.numel():
        arguments = geometry.arguments(geometry.groups // layout.group_ranks)
        sizes = None if bias_sizes is None else [num_channels]
        found = op(local_grad, local_x, local_weight, sizes, *arguments, wanted)
    else:
        bias_grad = local_grad.sum([0, *range(2, local_grad.ndim)]) if wanted[2] else None
        found = (torch.zeros_like(local_x), torch.zeros_like(local_weight), bias_grad)
    placed = [
        (layout.input_grad, tuple(x.shape)),
        (layout.weight_grad, tuple(weight.shape)),
        (layout.bias_grad, tuple(bias_sizes or ())),
    ]
    return tuple(
        _wrapped(local, layout.mesh, placements, shape) if is_wanted else None
        for local, (placements, shape), is_wanted in zip(found, placed, wanted, strict=True)
    )


def _on_one_mesh(op: Any, operands: Sequence[Any]) -> list[Any]:
    """Plain operands are the same on every rank: constants of the model's code."""
    mesh = next(x for x in operands if isinstance(x, DTensor)).device_mesh
    replicated = (Replicate(),) * mesh.ndim
    return [
        wrap_global(x, mesh, replicated, str(op)) if isinstance(x, torch.Tensor) and not isinstance(x, DTensor) else x
        for x in operands
    ]


def _guarded(handler: Callable[..., Any]) -> Callable[..., Any]:
    def handle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with no_torch_function():
            return handler(op, args, kwargs)

    return handle


CONVOLUTION_HANDLERS = {
    _aten.convolution.default: _guarded(_convolution),
    _aten.convolution_backward.default: _guarded(_convolution_backward),
}
