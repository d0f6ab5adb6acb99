"""Convolutions over a sharded batch, sharded channels and groups: one device's values on every mesh.

Stock DTensor gives the result the placements of the input, whatever the weight: over sharded input channels each rank's
term of the sum is then taken for the result.

Each mesh axis has one role in a convolution:

=================  ==================  ==================  ======  =======================================================
role               input               weight              result  gradients of input, weight, bias
=================  ==================  ==================  ======  =======================================================
batch              ``S(0)``            Replicate           S(0)    ``S(0)``, Partial, Partial
output channels    Replicate           its output dim      S(1)    Partial, as the weight, ``S(0)``
groups             ``S(1)``            its first dim       S(1)    ``S(1)``, as the weight, ``S(0)``
input channels     ``S(1)``            its input dim       Partial ``S(1)``, as the weight, Replicate
none               Replicate           Replicate           R       Replicate
=================  ==================  ==================  ======  =======================================================

The output dim of a weight is 0 (1 if transposed), the input dim is the other one. If only one operand is sharded as a role
needs it and the other is Replicate, the other is sliced locally: a weight to its rank's groups, an input to the channels of
its rank's weight. Along an axis whose operands fit no role they are gathered, which is implicit communication.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import local_of, make_dtensor, make_spec
from vescale.ops._conversion import bring, wrap_global
from vescale.ops._registry import handles, is_spread
from vescale.placements import local_region, stride_like, without_partials

_aten = torch.ops.aten


class _Role(enum.Enum):
    """The role of a mesh axis in a convolution; see the module's table."""

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
    """Placements of the operands and results of one convolution."""

    mesh: DeviceMesh
    roles: tuple[_Role, ...]
    output_dim: int

    def _placed(self, by_role: dict[_Role, Placement]) -> tuple[Placement, ...]:
        return tuple(by_role.get(role, Replicate()) for role in self.roles)

    @property
    def input(self) -> tuple[Placement, ...]:
        return self._placed({_Role.BATCH: Shard(0), _Role.GROUPS: Shard(1), _Role.INPUT_CHANNELS: Shard(1)})

    @property
    def weight(self) -> tuple[Placement, ...]:
        cut = {_Role.OUTPUT_CHANNELS: self.output_dim, _Role.GROUPS: 0, _Role.INPUT_CHANNELS: 1 - self.output_dim}
        return self._placed({role: Shard(dim) for role, dim in cut.items()})

    @property
    def bias(self) -> tuple[Placement, ...]:
        return self._placed({_Role.OUTPUT_CHANNELS: Shard(0), _Role.GROUPS: Shard(0)})

    @property
    def result(self) -> tuple[Placement, ...]:
        cut = {_Role.BATCH: Shard(0), _Role.OUTPUT_CHANNELS: Shard(1), _Role.GROUPS: Shard(1)}
        return self._placed({**cut, _Role.INPUT_CHANNELS: Partial()})

    @property
    def result_grad(self) -> tuple[Placement, ...]:
        return without_partials(self.result)

    @property
    def input_grad(self) -> tuple[Placement, ...]:
        return tuple(Partial() if role is _Role.OUTPUT_CHANNELS else p for role, p in zip(self.roles, self.input))

    @property
    def weight_grad(self) -> tuple[Placement, ...]:
        return tuple(Partial() if role is _Role.BATCH else p for role, p in zip(self.roles, self.weight))

    @property
    def bias_grad(self) -> tuple[Placement, ...]:
        return tuple(Partial() if role is _Role.BATCH else p for role, p in zip(self.roles, self.bias))

    @property
    def group_ranks(self) -> int:
        """The number of ranks that share the groups."""
        return _ranks(self.mesh, [axis for axis, role in enumerate(self.roles) if role is _Role.GROUPS])

    @property
    def has_bias_here(self) -> bool:
        """Whether this rank adds the bias: the first rank of each sum does."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        return not any(index for role, index in zip(self.roles, coordinate) if role is _Role.INPUT_CHANNELS)


def _ranks(mesh: DeviceMesh, axes: Sequence[int]) -> int:
    ranks = 1
    for axis in axes:
        ranks *= mesh.size(axis)
    return ranks


def _layout(x: DTensor, weight: DTensor, geometry: _Geometry) -> _Layout:
    mesh, output_dim = x.device_mesh, geometry.output_dim
    roles: list[_Role] = []
    for axis, (placed, weight_placed) in enumerate(zip(x.placements, weight.placements)):
        divided = _ranks(mesh, [a for a, role in enumerate(roles) if role is _Role.GROUPS]) * mesh.size(axis)
        if placed == Shard(0):
            role = _Role.BATCH
        elif geometry.groups > 1:
            is_cut = placed == Shard(1) or (placed.is_replicate() and weight_placed == Shard(0))
            role = _Role.GROUPS if is_cut and geometry.groups % divided == 0 else _Role.NONE
        elif weight_placed == Shard(output_dim):
            role = _Role.OUTPUT_CHANNELS
        elif weight_placed == Shard(1 - output_dim) and (placed == Shard(1) or placed.is_replicate()):
            role = _Role.INPUT_CHANNELS
        else:
            role = _Role.NONE
        roles.append(role)
    return _Layout(mesh, tuple(roles), output_dim)


@functools.lru_cache(maxsize=4096)
def _result_shape(x: tuple[int, ...], weight: tuple[int, ...], geometry: _Geometry) -> tuple[int, ...]:
    """The global shape of the result; ``x`` and ``weight`` are global shapes."""
    x_meta, weight_meta = torch.empty(x, device="meta"), torch.empty(weight, device="meta")
    return tuple(_aten.convolution.default(x_meta, weight_meta, None, *geometry.arguments(geometry.groups)).shape)


def _wrapped(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    return make_dtensor(local, make_spec(mesh, placements, shape, stride_like(local, shape), local.dtype))


@handles(_aten.convolution.default, applies=is_spread, takes_plain=True)
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


@handles(_aten.convolution_backward.default, applies=is_spread, takes_plain=True)
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
    """DTensors of all operands; plain ones (constants of the model's code) are the same on every rank."""
    mesh = next(x for x in operands if isinstance(x, DTensor)).device_mesh
    replicated = (Replicate(),) * mesh.ndim
    return [
        wrap_global(x, mesh, replicated, str(op)) if isinstance(x, torch.Tensor) and not isinstance(x, DTensor) else x
        for x in operands
    ]
