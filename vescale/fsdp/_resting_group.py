"""``RestingGroup``: parameters that are cut together, and the buffers of their shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import local_of
from vescale.fsdp._axes import DataParallelAxes
from vescale.fsdp._bucket import Bucket
from vescale.fsdp._extended_bucket import ExtendedBucket
from vescale.fsdp._extensions import check_one_kind
from vescale.fsdp._given_bucket import GivenBucket
from vescale.fsdp._parameter import ManagedParameter, Slot
from vescale.fsdp._registered import replacement

__all__ = ["GroupMember", "RestingGroup"]


class GroupMember(NamedTuple):
    """One parameter to manage: its name, the object, where it hangs, elements that stay together, and the cut at rest where
    that is not the planner's choice: ``Shard(dim)`` or a ``RaggedShard`` with units."""

    name: str
    parameter: nn.Parameter
    slots: Sequence[Slot]
    block: int | None = None
    given: Placement | None = None


class RestingGroup:
    """What a :class:`ParameterGroup` is at rest: buckets by dtype, ``requires_grad`` and kind of cut, each with this rank's
    shards in one allocation (but tensor subclasses, which have memory of their own). Arguments as for
    :class:`ParameterGroup`."""

    def __init__(
        self,
        members: Sequence[GroupMember],
        axes: DataParallelAxes,
        *,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        alignment_bytes: int,
    ) -> None:
        self.axes = axes
        self.device = axes.device
        self.mp_policy = mp_policy
        self.offload_policy = offload_policy
        self.alignment_bytes = alignment_bytes
        self.is_stale = False
        """Parameters may have been replaced in the modules; looked into before they are gathered."""
        self.parameters = [ManagedParameter(m.name, m.parameter, m.slots, axes, m.block, m.given) for m in members]
        self.buckets: list[Bucket] = []
        self._build([_local(m.parameter) for m in members])

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
        found: dict[tuple[torch.dtype, bool, type[Bucket]], list[int]] = {}
        for index, (parameter, dtype) in enumerate(zip(self.parameters, dtypes, strict=True)):
            found.setdefault((dtype, parameter.requires_grad, _kind(parameter)), []).append(index)
        return list(found.values())

    def _bucket(self, indices: Sequence[int], locals_: Sequence[torch.Tensor], like: Bucket | None = None) -> Bucket:
        parameters = [self.parameters[i] for i in indices]
        bucket = _kind(parameters[0])(
            parameters,
            locals_,
            self.axes,
            mp_policy=self.mp_policy,
            alignment_bytes=self.alignment_bytes,
            like=like,
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
                local = bucket.shard(index)
                if write(parameter, local):
                    parameter.make_sharded(local, bucket.placement(index))

    def rebuild(self) -> None:
        """Take up parameters that were replaced in modules (``to_empty``, ``load_state_dict(assign=True)``): their local
        tensors become slices of one buffer again."""
        self.is_stale = False
        changed = False
        for parameter in self.parameters:
            found = replacement(parameter)
            if found is not None:
                parameter.sharded = found
                parameter.register(found)
                changed = True
        on_meta = [parameter.sharded.is_meta for parameter in self.parameters]
        if any(on_meta) and not all(on_meta):  # of several modules in one group, others are still to be materialized
            self.is_stale = True
            return
        places = [(bucket, i) for bucket in self.buckets for i in range(len(bucket.parameters))]
        if not changed and all(bucket.holds(i) for bucket, i in places):
            return
        for parameter in self.parameters:
            check_one_kind(parameter.name, _local(parameter.sharded), parameter.is_extended)
        self._drop_unsharded()
        old = {p: _local(p.sharded) for p in self.parameters}
        before = {tuple(map(id, bucket.parameters)): bucket for bucket in self.buckets}
        self.buckets = []
        for indices in self._kinds([old[p].dtype for p in self.parameters]):
            like = before.get(tuple(id(self.parameters[i]) for i in indices))
            bucket = self._bucket(indices, [old[self.parameters[i]] for i in indices], like)
            bucket.adopt()
            self.buckets.append(bucket)

    def _drop_unsharded(self) -> None:
        """Forget what was made of the buckets that are about to be replaced."""
        for parameter in self.parameters:
            parameter.unsharded = None


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return local_of(parameter) if isinstance(parameter, DTensor) else parameter


def _kind(parameter: ManagedParameter) -> type[Bucket]:
    if parameter.is_extended:
        return ExtendedBucket
    return Bucket if parameter.given is None else GivenBucket
