"""What C++ runs for a change of placements (``csrc/moves.h``): the steps of ``_move_steps.py``, with everything decided.

The collectives, and the order of local reductions, are those of :mod:`vescale.comm`. What is not worth a program in C++
stays in Python: ragged placements, reductions that placements know themselves, skewed gathers, complex reductions, and
whatever raises.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement

from vescale.comm import REDUCE_OPS, AxisGroup, axis_group, gathered_size, one_reduction, uses_nccl
from vescale.placements._exchange_plan import Exchange, Piece, plan_exchange
from vescale.placements._placement_kinds import contiguous_stride
from vescale.placements._redistribute import (
    Step,
    check_partials,
    contribution_factors,
    exchanged_axes,
    move_steps,
    neutral_value,
)
from vescale.placements._region import Box, own_region


class NativeCopy(NamedTuple):
    """``num_blocks`` blocks of ``sizes``, each at a constant distance from the one before.

    Attributes:
        source: index of the first block in the local tensor, or, if ``source_strides`` are given, its offset.
        source_step: distance of two blocks, in the same terms.
        target, target_step, target_strides: offsets and strides in the memory that is written.
    """

    sizes: tuple[int, ...]
    source: tuple[int, ...]
    source_strides: tuple[int, ...] | None
    target: int
    target_strides: tuple[int, ...]
    num_blocks: int = 1
    source_step: tuple[int, ...] = ()
    target_step: int = 0


class NativeStep(NamedTuple):
    """One launch, or one local copy. Sizes are in elements.

    Attributes:
        kind: ``clone``, ``all_reduce``, ``copy``, ``all_gather``, ``all_to_all`` or ``reduce_scatter``.
        shape: of the new local tensor.
        group, op, divisor: of the collective; what its result is divided by.
        span: the part of the contiguous local tensor that is sent as it is; None: it is packed.
        packed, packed_size: what is copied into the memory that is sent.
        send_sizes, receive_sizes: of an all-to-all.
        received_size: of what arrives.
        combine, num_rows: how the received rows are reduced to one; 0 rows: not at all.
        unpacked: what is copied into the new local tensor; None: what arrives is the new local tensor.
        neutral: value of the elements that are not written.
        factors: what is multiplied at last; 0 sets zeros.
    """

    kind: str
    shape: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    op: Any = None
    divisor: int = 1
    span: tuple[int, int] | None = None
    packed: tuple[NativeCopy, ...] = ()
    packed_size: int = 0
    send_sizes: tuple[int, ...] = ()
    receive_sizes: tuple[int, ...] = ()
    received_size: int = 0
    combine: str = ""
    num_rows: int = 0
    unpacked: tuple[NativeCopy, ...] | None = None
    neutral: float | int | None = None
    factors: tuple[int, ...] = ()


class NativeMove(NamedTuple):
    """The steps, for local tensors of this shape, dtype and device type."""

    local_shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    steps: tuple[NativeStep, ...]


def native_move(
    mesh: DeviceMesh, shape: Sequence[int], source: Sequence[Placement], target: Sequence[Placement], dtype: torch.dtype
) -> NativeMove | None:
    """What C++ runs on this rank for ``move_local(local, mesh, shape, source, target)``; None: Python has to."""
    held = own_region(shape, source, mesh)
    assert held is not None
    planner = _Planner(mesh, tuple(shape), dtype)
    try:
        check_partials(source, target, dtype)
        steps = [planner.plan(step) for step in move_steps(shape, tuple(mesh.shape), source, target)]
    except (_InPythonError, ValueError):  # errors are raised by Python again
        return None
    return NativeMove(held.local_shape, dtype, mesh.device_type, tuple(step for some in steps for step in some))


class _InPythonError(Exception):
    """A step that C++ does not run."""


class _Planner:
    def __init__(self, mesh: DeviceMesh, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.mesh, self.shape, self.dtype = mesh, shape, dtype
        self.mesh_shape = tuple(mesh.shape)
        self.own = tuple(mesh.get_coordinate() or ())

    def plan(self, step: Step) -> list[NativeStep]:
        if step.kind == "exchange":
            return [self._exchange(step)]
        if step.kind == "own reduction":
            raise _InPythonError
        if step.kind == "clone":
            return [NativeStep("clone", self._held(step.before))]
        group, partial = self._group((step.axis,)), step.before[step.axis]
        assert isinstance(partial, Partial)
        if self.dtype.is_complex:
            raise _InPythonError
        if step.kind == "all-reduce":
            return self._all_reduce(step, group, partial.reduce_op)
        return [self._reduce_scatter(step, group, partial.reduce_op)]

    def _held(self, placements: Sequence[Placement]) -> tuple[int, ...]:
        region = own_region(self.shape, placements, self.mesh)
        if region is None or region.flat is not None:
            raise _InPythonError
        return region.shape

    def _group(self, axes: tuple[int, ...]) -> AxisGroup:
        group = axis_group(self.mesh, axes)
        if type(group.group) is not dist.ProcessGroup:  # one that is written in Python
            raise _InPythonError
        return group

    def _all_reduce(self, step: Step, group: AxisGroup, op: str) -> list[NativeStep]:
        held = self._held(step.before)
        numel = math.prod(held)
        if numel == 0:
            return [NativeStep("copy", held)]
        reduction = one_reduction(op, self.dtype, self.mesh.device_type, group.group)
        if reduction is not None:
            return [NativeStep("all_reduce", held, group.group, *reduction)]
        base, extra = divmod(numel, group.size)
        sizes = [base + (rank < extra) for rank in range(group.size)]
        own = (sizes[group.index],)
        sent = NativeStep("", own, group.group, span=(0, numel), packed=_whole(held), packed_size=numel)
        scattered = self._scatter(sent, group, sizes, op)
        starts = [sum(sizes[:rank]) for rank in range(group.size)]
        blocks = [NativeCopy((n,), (0,), (1,), start, (1,)) for n, start in zip(sizes, starts)]
        return [scattered, self._gather(NativeStep("", held), group, sizes, own, [[block] for block in blocks], True)]

    def _reduce_scatter(self, step: Step, group: AxisGroup, op: str) -> NativeStep:
        plan = self._exchange_plan(step, group)
        sizes = [piece.numel for piece in plan.sends]
        packed, packed_size = _pack(piece.source for piece in plan.sends)
        unpacked = None if plan.keeps_in_place else _unpack([plan.kept], plan.target.shape)
        sent = NativeStep(
            "",
            plan.target.shape,
            group.group,
            span=plan.send_span,
            packed=packed,
            packed_size=packed_size,
            unpacked=unpacked,
        )
        return self._scatter(sent, group, sizes, op)

    def _scatter(self, sent: NativeStep, group: AxisGroup, sizes: list[int], op: str) -> NativeStep:
        """A reduce-scatter of what ``sent`` sends, in pieces of ``sizes``."""
        own = sizes[group.index]
        if sum(sizes) == 0:
            return sent._replace(kind="copy", group=None, span=None, packed=(), packed_size=0, unpacked=())
        if uses_nccl(self.mesh.device_type, group.group):
            if len(set(sizes)) > 1:
                raise _InPythonError
            return sent._replace(kind="reduce_scatter", op=REDUCE_OPS[op], received_size=own)
        return sent._replace(
            kind="all_to_all",
            send_sizes=tuple(sizes),
            receive_sizes=(own,) * group.size,
            received_size=own * group.size,
            combine=op,
            num_rows=group.size,
        )

    def _exchange_plan(self, step: Step, group: AxisGroup | None) -> Exchange:
        peers = (self.own,) if group is None else group.coordinates
        plan = plan_exchange(self.shape, self.mesh_shape, step.before, step.after, self.own, peers)
        if plan.source.flat is not None or plan.target.flat is not None:
            raise _InPythonError
        return plan

    def _exchange(self, step: Step) -> NativeStep:
        axes = exchanged_axes(step, self.mesh_shape)
        group = self._group(axes) if axes else None
        plan = self._exchange_plan(step, group)
        made = NativeStep(
            "copy",
            plan.target.shape,
            neutral=neutral_value(step, self.dtype),
            factors=contribution_factors(step, self.mesh_shape, self.own),
        )
        if group is None or not plan.moves:
            strides = contiguous_stride(plan.target.shape)
            pairs = zip(plan.kept.source, plan.kept.target)
            return made._replace(unpacked=_merged(_copy(a, None, _offset(b, strides), strides) for a, b in pairs))
        if plan.gathers:
            strides = contiguous_stride(plan.target.shape)
            blocks = []
            for piece, region in zip(plan.receives, plan.peer_sources):
                inner, pairs = contiguous_stride(region.shape), zip(piece.source, piece.target)
                blocks.append([_copy(a, inner, _offset(b, strides), strides) for a, b in pairs])
            sizes = [region.numel for region in plan.peer_sources]
            return self._gather(made, group, sizes, plan.source.shape, blocks, plan.receives_in_place)
        packed, packed_size = _pack(piece.source for piece in plan.sends)
        return made._replace(
            kind="all_to_all",
            group=group.group,
            span=plan.send_span,
            packed=packed,
            packed_size=packed_size,
            send_sizes=tuple(piece.numel for piece in plan.sends),
            receive_sizes=tuple(piece.numel for piece in plan.receives),
            received_size=sum(piece.numel for piece in plan.receives),
            unpacked=None if plan.receives_in_place else _unpack(plan.receives, plan.target.shape),
        )

    def _gather(
        self,
        made: NativeStep,
        group: AxisGroup,
        sizes: list[int],
        held: tuple[int, ...],
        blocks: list[list[NativeCopy]],
        is_in_place: bool,
    ) -> NativeStep:
        """An all-gather; ``blocks`` copies what each rank sent, from its start, to the new local tensor."""
        size = gathered_size(sizes)
        if size is None:
            raise _InPythonError
        if size == 0:
            return made
        is_padded = size * len(sizes) > sum(sizes)
        moved = [c._replace(source=(c.source[0] + i * size,)) for i, some in enumerate(blocks) for c in some]
        return made._replace(
            kind="all_gather",
            group=group.group,
            span=(0, size) if sizes[group.index] == size else None,
            packed=_whole(held),
            packed_size=size,
            received_size=size * len(sizes),
            unpacked=None if is_in_place and not is_padded else _merged(moved),
        )


def _offset(box: Box, strides: Sequence[int]) -> int:
    return sum(start * stride for start, stride in zip(box.local_start, strides))


def _copy(box: Box, strides: tuple[int, ...] | None, target: int, target_strides: tuple[int, ...]) -> NativeCopy:
    """Of a block of the local tensor, or, with strides, of memory that is laid out by them."""
    source = box.local_start if strides is None else (_offset(box, strides),)
    return NativeCopy(box.sizes, source, strides, target, target_strides)


def _whole(shape: tuple[int, ...]) -> tuple[NativeCopy, ...]:
    """The local tensor, flat."""
    return _merged([NativeCopy(shape, (0,) * len(shape), None, 0, contiguous_stride(shape))])


def _pack(pieces: Iterable[Sequence[Box]]) -> tuple[tuple[NativeCopy, ...], int]:
    """Copies of blocks of the local tensor, one after the other; and their size."""
    copies, size = [], 0
    for boxes in pieces:
        for box in boxes:
            copies.append(_copy(box, None, size, contiguous_stride(box.sizes)))
            size += box.numel
    return _merged(copies), size


def _unpack(pieces: Sequence[Piece], shape: tuple[int, ...]) -> tuple[NativeCopy, ...]:
    """Copies of blocks that arrive one after the other into a tensor of this shape."""
    copies, start, strides = [], 0, contiguous_stride(shape)
    for piece in pieces:
        for box in piece.target:
            copies.append(NativeCopy(box.sizes, (start,), contiguous_stride(box.sizes), _offset(box, strides), strides))
            start += box.numel
    return _merged(copies)


def _merged(copies: Iterable[NativeCopy]) -> tuple[NativeCopy, ...]:
    """Neighbours of equal sizes and distances become one copy."""
    merged: list[NativeCopy] = []
    for copy in copies:
        if not math.prod(copy.sizes):
            continue
        last = merged[-1] if merged else None
        if last is not None and (last.sizes, last.source_strides, last.target_strides) == (
            copy.sizes,
            copy.source_strides,
            copy.target_strides,
        ):
            before = [
                s + (last.num_blocks - 1) * by
                for s, by in zip(last.source, last.source_step or (0,) * len(last.source))
            ]
            step = tuple(s - b for s, b in zip(copy.source, before))
            target_step = copy.target - last.target - (last.num_blocks - 1) * last.target_step
            is_regular = last.num_blocks == 1 or (step, target_step) == (last.source_step, last.target_step)
            if is_regular and min(*step, target_step, 0) == 0:  # tensors have no negative strides
                merged[-1] = last._replace(num_blocks=last.num_blocks + 1, source_step=step, target_step=target_step)
                continue
        merged.append(copy)
    return tuple(merged)
