"""``ManagedParameter``: one parameter in its two forms, and the modules' attributes that it is registered as."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import (
    DTensorSpec,
    StridedShard,
    concatenate_meshes,
    keep_memory,
    local_of,
    make_dtensor,
    make_spec,
    no_torch_function,
    own_part,
    permit_gradients_of_any_dtype,
    spec_of,
)
from vescale.errors import FullyShardError, UnsupportedParameterError
from vescale.fsdp._extensions import check_extended, copied, is_extended
from vescale.gradients import DataParallelAxes, LocalContribution
from vescale.placements import (
    RaggedShard,
    StridedRaggedShard,
    distribute_tensor,
    largest_shape,
    shard_dim,
)

_LEAF = "_vescale_leaf"
"""Attribute of sharded parameters: :class:`_Leaf`."""


class Slot(NamedTuple):
    """A module's attribute that a parameter is registered as; a tied parameter has several."""

    module: nn.Module
    name: str


class ManagedParameter:
    """One parameter of a group.

    ===========  ====================================  ===============================================================
    form         object                                registered in the modules
    ===========  ====================================  ===============================================================
    sharded      DTensor over a slice of the shards    at rest: initialization, optimizer step, state dicts
    unsharded    view of the gathered buffer: a plain  while the group computes
                 tensor, or a DTensor on the axes
                 that are not data-parallel
    ===========  ====================================  ===============================================================

    Both are ``nn.Parameter`` objects that live as long as the group. ``shape`` is what a rank computes with, ``place``
    the shape that the buffer reserves: that of the largest rank, where tensor parallelism has cut unevenly. ``given`` is
    the cut at rest that was asked for instead of the planner's: ``Shard(dim)`` or a ``RaggedShard`` with units.

    Raises:
        NotImplementedError: tensor parallelism that has cut an inner dim unevenly, or a tensor subclass that would be
            sharded in another way than into chunks of dim 0.
        ValueError: a DTensor that is already cut along a data-parallel axis, or a tensor subclass with one of the two
            all-gather hooks.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        slots: Sequence[Slot],
        axes: DataParallelAxes,
        block: int | None = None,
        given: Placement | None = None,
    ) -> None:
        self.name = name
        self.given = given
        self.slots = list(slots)
        self.axes = axes
        self.reduce_op = "avg"
        self.requires_grad = parameter.requires_grad
        self.global_shape = tuple(parameter.shape)
        self.unsharded_spec: DTensorSpec | None = None
        if isinstance(parameter, DTensor):
            self.unsharded_spec = spec_of(parameter)
        local = own_part(parameter)
        self.shape = tuple(local.shape)
        self.is_extended = is_extended(local)
        """Of a tensor subclass, which is gathered by its own hooks; ``given`` is ``Shard(0)``."""
        if self.is_extended:
            check_extended(name, local)
            self.given = Shard(0)
        self._mesh, self._others, self._shard_position = self._placement_of_others()
        self.place = self._largest_local_shape()
        self.block = self._granule(block)
        if self.is_extended:
            self._check_chunks(given)
        self.sharded: nn.Parameter
        self.unsharded: nn.Parameter | None = None
        spec = self.unsharded_spec
        on_running_mesh = spec is not None and spec.mesh == axes.running_mesh
        self.contribution = LocalContribution(name, spec, axes.running_data_parallel if on_running_mesh else ())

    # What the sharded form is

    def _placement_of_others(self) -> tuple[DeviceMesh, list[Placement], int]:
        """The sharded DTensor's mesh, its placements with Replicate on data-parallel axes, and which axis is sharded."""
        axes, spec = self.axes, self.unsharded_spec
        if spec is None:
            return axes.mesh, [Replicate() for _ in range(axes.mesh.ndim)], axes.shard
        if spec.mesh == axes.running_mesh:
            for axis in axes.running_data_parallel:
                if not spec.placements[axis].is_replicate():
                    raise FullyShardError(
                        f"parameter {self.name!r} of shape {self.global_shape} is placed as {tuple(spec.placements)}, "
                        f"and fully_shard shards it over axis {axis}; expected Replicate() on that axis"
                    )
            return axes.mesh, axes.others_at_rest(spec.placements), axes.shard
        joined = concatenate_meshes([axes.mesh, spec.mesh])
        return joined, [Replicate() for _ in range(axes.mesh.ndim)] + list(spec.placements), axes.shard

    def _largest_local_shape(self) -> tuple[int, ...]:
        """Raises NotImplementedError, on all ranks, where some hold less of an inner dim than others."""
        shape, mesh_shape = tuple(self.global_shape), tuple(self._mesh.shape)
        largest = largest_shape(shape, tuple(self._others), mesh_shape)
        for dim in range(1, len(shape)):
            parts = math.prod(n for n, placement in zip(mesh_shape, self._others) if shard_dim(placement) == dim)
            if largest[dim] * parts != shape[dim]:
                raise UnsupportedParameterError(
                    f"parameter {self.name!r} of shape {shape} is placed as {tuple(self._others)}, which divides the "
                    f"{shape[dim]} indices of dim {dim} into {parts} parts of unequal length; fully_shard needs even "
                    "shards of inner dims: make the size a multiple of the number of ranks, or replicate the "
                    "parameter"
                )
        return largest

    def _granule(self, block: int | None) -> int:
        """Elements that stay together: the policy's block, grown so that no dim that another axis cuts is cut again."""
        granule = RaggedShard((0,), block=block or 1).granule(self.place, self._inner_dims)
        return max(1, granule)

    def _check_chunks(self, given: Placement | None) -> None:
        """Raises NotImplementedError, on all ranks, where a tensor subclass cannot be cut into chunks of dim 0 as wanted."""
        found = None
        if not self.shape:
            found, edit = "is a scalar", "add a dim to it, or pass it in ignored_params"
        elif given is not None and given != Shard(0):
            found, edit = f"has the placement {given}", "return Shard(0) or None from shard_placement_fn"
        elif self.given_part(0, self.axes.shard_size)[1] * math.prod(self.place[1:]) % self.block:
            found, edit = (
                (f"must not be divided inside blocks of {self.block} elements"),
                "leave it out of orig_param_policy",
            )
        if found is not None:
            raise UnsupportedParameterError(
                f"parameter {self.name!r} of shape {self.shape} is a tensor subclass and {found}; fully_shard divides "
                f"those into chunks of dim 0, one for each of the {self.axes.shard_size} ranks: {edit}"
            )

    @property
    def dim(self) -> int | None:
        """Of the ``Shard(dim)`` that was asked for."""
        return shard_dim(self.given) if self.given is not None else None

    def given_part(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """(first index, number of indices) of a rank's part, along :attr:`dim` or the flattened tensor, by the given cut."""
        if isinstance(self.given, RaggedShard):
            begin, end = self.given.run(self.shape, self.place, num_ranks, rank, self._inner_dims)
        else:
            assert self.dim is not None
            size = self.shape[self.dim]
            chunk = -(-size // num_ranks)
            begin, end = min(rank * chunk, size), min((rank + 1) * chunk, size)
        return begin, end - begin

    def given_placement(self) -> Placement:
        """The given cut as the placement of the sharded form."""
        given, factor = self.given, self.split_factor
        if isinstance(given, RaggedShard):
            if factor == 1 or isinstance(given, StridedRaggedShard):
                return given
            return StridedRaggedShard(given.dims, given.local_units, given.block, split_factor=factor)
        assert self.dim is not None
        return Shard(self.dim) if factor == 1 else StridedShard(self.dim, split_factor=factor)

    @property
    def _inner_dims(self) -> list[int]:
        """Dims above 0 that other axes cut."""
        return [dim for p in self._others if (dim := shard_dim(p)) is not None and dim > 0]

    @property
    def split_factor(self) -> int:
        """Pieces into which ``Shard`` on axes behind the sharded one has cut dim 0 (or the ``dim`` asked for)."""
        pieces = 1
        for axis in range(self._shard_position + 1, self._mesh.ndim):
            if shard_dim(self._others[axis]) == (self.dim or 0):
                pieces *= self._mesh.size(axis)
        return pieces

    def sharded_spec(self, cut: Placement, dtype: torch.dtype) -> DTensorSpec:
        placements = list(self._others)
        placements[self._shard_position] = cut
        stride, strides = 1, []
        for size in reversed(self.global_shape):
            strides.append(stride)
            stride *= size
        return make_spec(self._mesh, placements, self.global_shape, tuple(reversed(strides)), dtype)

    @property
    def sharded_placements(self) -> tuple[Placement, ...]:
        assert isinstance(self.sharded, DTensor)
        return tuple(self.sharded.placements)

    # The two forms

    def local_as(self, spec: DTensorSpec) -> torch.Tensor:
        """The local tensor of what is registered, a DTensor, placed as ``spec``; communicates where it is placed otherwise.

        Raises ValueError for one on another mesh.
        """
        found: torch.Tensor = self.sharded
        assert isinstance(found, DTensor)
        if found.device_mesh != spec.mesh:
            raise FullyShardError(
                f"parameter {self.name!r} of shape {self.global_shape} was replaced by a DTensor on "
                f"{found.device_mesh}, but it is sharded on {spec.mesh}; use a plain tensor, or one on that mesh, or "
                "load without assign=True"
            )
        if tuple(found.placements) != tuple(spec.placements):
            found = found.redistribute(placements=spec.placements)
        return local_of(found)

    def make_sharded(self, local: torch.Tensor, cut: Placement) -> None:
        """The sharded form over ``local``, registered in the modules."""
        spec = self.sharded_spec(cut, local.dtype)
        self.sharded = nn.Parameter(make_dtensor(local, spec), requires_grad=self.requires_grad)
        keep_memory(self.sharded)
        self.take_up(self.sharded)

    def take_up(self, sharded: nn.Parameter) -> None:
        """``sharded`` is the sharded form from now on, registered in the modules."""
        self.sharded = sharded
        sharded.__dict__[_LEAF] = _Leaf(self)
        self.register(sharded)

    def make_unsharded(self, view: torch.Tensor) -> nn.Parameter:
        """The unsharded form over ``view``."""
        with torch.inference_mode(False), torch.no_grad():
            local = view if view.shape == self.shape else view[: self.shape[0]]
            data = local
            if self.unsharded_spec is not None:
                spec = self.unsharded_spec
                meta = spec.tensor_meta
                assert meta is not None
                data = make_dtensor(local, make_spec(spec.mesh, spec.placements, meta.shape, meta.stride, local.dtype))
            self.unsharded = nn.Parameter(data, requires_grad=self.requires_grad)
            for key, value in self.sharded.__dict__.items():
                self.unsharded.__dict__.setdefault(key, value)
        return self.unsharded

    def copy(self) -> ManagedParameter:
        """Another one with the same values; those of a plain one are in the same memory."""
        twin = copy.copy(self)
        twin.contribution = copy.copy(self.contribution)
        assert isinstance(self.sharded, DTensor)
        with torch.no_grad():
            local = copied(local_of(self.sharded)) if self.is_extended else local_of(self.sharded)
        data = make_dtensor(local, spec_of(self.sharded))
        twin.sharded, twin.unsharded = nn.Parameter(data, requires_grad=self.sharded.requires_grad), None
        keep_memory(twin.sharded)
        twin.sharded.__dict__[_LEAF] = _Leaf(twin)
        return twin

    def register(self, parameter: nn.Parameter, slots: Sequence[Slot] | None = None) -> None:
        """Register a form in ``slots``; None: in all."""
        for module, name in self.slots if slots is None else slots:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = parameter
            else:  # nn.RNN keeps a list of its weights
                setattr(module, name, parameter)

    def part_of(self, value: Any) -> Any:
        """This rank's part of a plain tensor of the global shape, placed as the sharded form; other values as they are."""
        sharded, is_plain = self.sharded, isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        assert isinstance(sharded, DTensor)
        if not is_plain or self.is_extended or value.is_meta or tuple(value.shape) != self.global_shape:
            return value
        with no_torch_function(), torch.no_grad():  # of a forward, where this may happen
            own = value.to(sharded.device_mesh.device_type)
            return distribute_tensor(own, sharded.device_mesh, sharded.placements, src_data_rank=None)

    def share_gradient(self) -> torch.Tensor | None:
        """Inside of a forward, ``.grad`` of the unsharded form, which is registered and has none, is the sharded form's.
        Returns it."""
        gradient, unsharded = self.sharded.grad, self.unsharded
        if gradient is None or unsharded is None or gradient.device.type != unsharded.device.type:
            return None
        if gradient.dtype != unsharded.dtype:
            permit_gradients_of_any_dtype(unsharded)
        unsharded.grad = gradient
        return gradient

    def take_gradient(self, shared: torch.Tensor | None) -> None:
        """What a program has made the gradient since :meth:`share_gradient`, which has returned ``shared``, is the sharded
        form's: a DTensor, or the global tensor, the same on every rank."""
        unsharded, sharded = self.unsharded, self.sharded
        if unsharded is None:
            return
        found = unsharded.grad
        if found is not None:
            unsharded.grad = None
            if found.dtype != unsharded.dtype:
                permit_gradients_of_any_dtype(unsharded, unsharded.dtype)
        if found is not shared:
            sharded.grad = self.part_of(found)

    def to_rest(self) -> None:
        """Register the sharded form where the unsharded one is, and leave what a program has put into other places."""
        if self.unsharded is not None:
            self.register(self.sharded, [s for s in self.slots if s.module._parameters.get(s.name) is self.unsharded])

    def __repr__(self) -> str:
        return f"ManagedParameter({self.name!r}, {self.global_shape})"


class _Leaf:
    """Of a sharded parameter: what graphs have in its place. The reference is weak: modules and groups own parameters."""

    def __init__(self, managed: ManagedParameter) -> None:
        self.managed = weakref.ref(managed)

    def __reduce__(self) -> Any:
        return type(None), ()  # a parameter that is copied or loaded has none


def managed_by(value: Any) -> ManagedParameter | None:
    """Of the sharded form of a parameter; None for everything else."""
    leaf = value.__dict__.get(_LEAF) if isinstance(value, DTensor) else None
    managed = None if leaf is None else leaf.managed()
    return managed if managed is not None and managed.sharded is value else None


def leaf_of(parameter: torch.Tensor) -> torch.Tensor:
    """What a graph has in the place of a sharded parameter that a group gathers; of other tensors themselves."""
    managed = managed_by(parameter)
    return parameter if managed is None or managed.unsharded is None else managed.unsharded


def registered_of(leaf: torch.Tensor) -> torch.Tensor:
    """The sharded parameter in whose place a graph has ``leaf``; other tensors themselves."""
    found = leaf.__dict__.get(_LEAF)
    managed = None if found is None else found.managed()
    return leaf if managed is None else managed.sharded


def find_slots(modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, list[Slot]]:
    """For each of ``parameters``, every attribute in the trees of ``modules`` that it is registered as."""
    found: dict[nn.Parameter, list[Slot]] = {parameter: [] for parameter in parameters}
    seen: set[nn.Module] = set()
    for root in modules:
        for module in root.modules():
            if module in seen:
                continue
            seen.add(module)
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter in found:
                    found[parameter].append(Slot(module, name))
    return found
