"""``ShardedParameters``: the parameters of a group at rest, in buckets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.checks import RegisteredParameters
from vescale.compat import own_part, policy_of_parameter
from vescale.fsdp._bucket import Bucket
from vescale.fsdp._extensions import check_one_kind
from vescale.fsdp._layout import Layout
from vescale.fsdp._parameter import ManagedParameter, Slot
from vescale.fsdp._registered import replacement
from vescale.gradients import DataParallelAxes


class GroupMember(NamedTuple):
    """One parameter to manage: its name, the object, where it is registered, elements that stay together, and the cut at
    rest where that is not the planner's choice: ``Shard(dim)`` or a ``RaggedShard`` with units."""

    name: str
    parameter: nn.Parameter
    slots: Sequence[Slot]
    block: int | None = None
    given: Placement | None = None


class ShardedParameters:
    """Buckets by dtypes, ``requires_grad`` and kind of cut, each with this rank's shards in one allocation (but tensor
    subclasses, which have memory of their own). Arguments as for :class:`ParameterGroup`.

    Attributes:
        is_stale: parameters may have been replaced in the modules; looked into before they are gathered.
    """

    def __init__(
        self,
        members: Sequence[GroupMember],
        axes: DataParallelAxes,
        *,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        alignment_bytes: int,
        path: str,
    ) -> None:
        self.path = path
        self.axes = axes
        self.device = axes.device
        self.offload_policy = offload_policy
        self.alignment_bytes = alignment_bytes
        self.is_stale = False
        self._policies = [policy_of_parameter(mp_policy, m.parameter) for m in members]
        self.parameters = [ManagedParameter(m.name, m.parameter, m.slots, axes, m.block, m.given) for m in members]
        self.buckets: list[Bucket] = []
        self._build([own_part(m.parameter) for m in members])

    @property
    def offloads(self) -> bool:
        return isinstance(self.offload_policy, CPUOffloadPolicy)

    def _build(self, locals_: Sequence[torch.Tensor]) -> None:
        """Buckets by dtype and requires_grad, filled from whole local tensors, whose memory can go afterwards."""
        for indices in self._kinds([tensor.dtype for tensor in locals_]):
            bucket = self._bucket(indices, [locals_[i] for i in indices])
            bucket.cut([locals_[i] for i in indices])
            self.buckets.append(bucket)

    def _kinds(self, dtypes: Sequence[torch.dtype]) -> list[list[int]]:
        found: dict[tuple[torch.dtype, torch.dtype | None, bool, str], list[int]] = {}
        for index, (parameter, policy, dtype) in enumerate(zip(self.parameters, self._policies, dtypes, strict=True)):
            kind = dtype, policy.param_dtype, parameter.requires_grad, Bucket.kind(parameter)
            found.setdefault(kind, []).append(index)
        return list(found.values())

    def _bucket(self, indices: Sequence[int], locals_: Sequence[torch.Tensor], layout: Layout | None = None) -> Bucket:
        """``layout``: of the same parameters in another dtype; None: a new one."""
        parameters = [self.parameters[i] for i in indices]
        bucket = Bucket(
            parameters,
            locals_,
            self.axes,
            mp_policy=self._policies[indices[0]],
            alignment_bytes=self.alignment_bytes,
            layout=layout,
        )
        self._allocate_shards(bucket, bucket.device)
        return bucket

    def _allocate_shards(self, bucket: Bucket, device: torch.device) -> None:
        if self.offloads and device.type != "meta":
            device = torch.device("cpu")
        # Pinned memory is for copies to a device; computing on the CPU copies none.
        pin = device.type == "cpu" != self.device.type and getattr(self.offload_policy, "pin_memory", False)
        bucket.allocate_shards(device, pin_memory=pin)

    def fill(self, device: torch.device, write: Callable[[ManagedParameter, torch.Tensor], bool]) -> None:
        """Give a group that was built on the meta device its memory. ``write(parameter, local)`` writes this rank's part of
        a parameter, placed as ``parameter.sharded``, to its place; False: it will, and registers the sharded form itself."""
        for bucket in self.buckets:
            self._allocate_shards(bucket, device)
            for index, parameter in enumerate(bucket.parameters):
                local = bucket.at_rest.local(index)
                if write(parameter, local):
                    parameter.make_sharded(local, bucket.layout.placement(index))

    def rebuild(self, before_change: Callable[[], None]) -> None:
        """Take up parameters that were replaced in modules (``to_empty``, ``load_state_dict(assign=True)``): their local
        tensors become slices of one buffer again. ``before_change`` runs before buckets are replaced."""
        self.is_stale = False
        changed, plain = False, RegisteredParameters()
        for parameter in self.parameters:
            found = replacement(parameter)
            if found is not None:
                if not isinstance(found, DTensor):
                    module, name = parameter.slots[0]
                    plain.add(parameter.name, type(module).__name__, module, name)
                parameter.take_up(found)
                changed = True
        on_meta = [parameter.sharded.is_meta for parameter in self.parameters]
        if any(on_meta) and not all(on_meta):  # of several modules in one group, others are still to be materialized
            self.is_stale = True
            return
        places = [(bucket, i) for bucket in self.buckets for i in range(len(bucket.parameters))]
        if not changed and all(bucket.at_rest.holds(i) for bucket, i in places):
            return
        for parameter in self.parameters:
            check_one_kind(parameter.name, own_part(parameter.sharded), parameter.is_extended)
        before_change()
        for parameter in self.parameters:
            parameter.unsharded = None
        self._regroup(self._layouts())
        plain.mark_replaced("the next forward")

    def _layouts(self) -> dict[tuple[int, ...], Layout]:
        """Of the buckets, by the parameters in them."""
        numbers = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        return {tuple(numbers[id(p)] for p in bucket.parameters): bucket.layout for bucket in self.buckets}

    def _regroup(self, layouts: dict[tuple[int, ...], Layout]) -> None:
        """New buckets, with memory of their own, for the sharded parameters as they are."""
        locals_ = [own_part(p.sharded) for p in self.parameters]
        self.buckets = []
        for indices in self._kinds([local.dtype for local in locals_]):
            bucket = self._bucket(indices, [locals_[i] for i in indices], layouts.get(tuple(indices)))
            bucket.adopt()
            self.buckets.append(bucket)

    def copy(self) -> ShardedParameters:
        """The same values in memory of its own. The copied parameters are not registered yet: the caller registers them,
        and sets their slots, in copies of the modules."""
        twin = copy.copy(self)
        twin.parameters = [parameter.copy() for parameter in self.parameters]
        slots = [parameter.slots for parameter in twin.parameters]
        for parameter in twin.parameters:
            parameter.slots = []  # those are of the modules that are copied
        twin._regroup(self._layouts())
        for parameter, its in zip(twin.parameters, slots, strict=True):
            parameter.slots = its
        return twin
