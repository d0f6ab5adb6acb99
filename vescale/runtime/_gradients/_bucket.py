"""``Bucket``: gradients that are reduced together, in one DBuffer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from vescale.comm import Pending, all_reduce_, axis_group, link_of, reduction_cost, ring_bytes
from vescale.compat import ParameterRow, TensorRow, is_dense, num_storage_users
from vescale.placements import unpack
from vescale.runtime._gradients._attention import Attention
from vescale.runtime._gradients._comm_hook import CommHook, GradientBucket, answer_of
from vescale.runtime._gradients._memory import BucketMemory
from vescale.runtime._gradients._reduction import Reduction
from vescale.runtime._gradients._slot import Slot
from vescale.runtime._gradients._untouched import clear_signs, neutral

__all__ = ["Bucket", "Versions"]

_LARGE_BYTES = 2**16
"""From here on a gradient on the CPU is copied when it comes, while it is in the cache; smaller ones cost less together."""

Versions = Mapping[int, int]
"""By id of a parameter with a gradient when a backward begins: that gradient's version. It is higher once one has come."""


class Bucket:
    """Slots with equal reductions, and the memory they are reduced in.

    ============  ==================================================================================================
    moment        what the memory holds
    ============  ==================================================================================================
    closed        results of the last reduction, which gradients are views of, or nothing that anyone sees
    ``launch``    contributions of all slots, neutral elements for those without; one collective is in flight
    ``advance``   the further collectives are in flight (all-reduce of the scattered piece; axes that have no common group)
    ``finish``    results
    ============  ==================================================================================================

    Contributions are handed over by ``arrive``. Those of *quiet* slots are taken from the parameters, all at once: it is
    known which of them comes last, and it alone is waited for.

    Nothing is copied into the bucket of one gradient that nobody else sees: it is reduced where it is.

    An average is a sum that is divided: before, where that is exact and a large gradient is copied anyway, else after.
    """

    num_missing: int
    """How many contributions are still to be handed over."""
    absent: list[Slot]
    """Once launched: those without a contribution."""
    is_launched: bool
    waited: list[Any]
    """The collective that has been waited for last, until the bucket is closed."""
    _is_open: bool
    _is_advanced: bool
    _has_all: bool  # contributions
    _is_irregular: bool  # there were more to come when all that are heard had come
    _last: Slot | None  # that was heard
    _told: dict[int, int]  # by slot that is heard, how often its gradient has come
    _given: dict[int, torch.Tensor]  # contributions by slot, but for those taken to their places
    _only: torch.Tensor | None  # the contribution of a bucket's one slot, to be reduced in place
    _result: torch.Tensor | None

    def __init__(self, index: int, reduction: Reduction, slots: Sequence[Slot], hook: CommHook | None = None) -> None:
        self.index, self.reduction, self.slots = index, reduction, tuple(slots)
        self.hook = hook
        for place, slot in enumerate(self.slots):
            slot.bucket, slot.index = self, place
        on_cpu = reduction.stages[0].axes.mesh.device_type == "cpu"
        self._copies_early = [
            on_cpu and slot.contribution.pieces is None and slot.num_bytes >= _LARGE_BYTES for slot in self.slots
        ]
        self._can_scale_early = any(self._copies_early) and _is_exact(reduction)
        self._memory = BucketMemory(reduction, self.slots, self._copies_early)
        self.num_bytes = self._memory.buffer.num_bytes
        self._cost = reduction_cost(
            self.num_bytes,
            reduction.stages[0].axes.num_ranks,
            reduction.num_pieces,
            link_of(self._memory.buffer.device.type),
        )
        self.scatters = self._cost.scatters
        self._takes_only = (
            len(self.slots) == 1 and reduction.scatter is None and not self._casts and self.slots[0].numel > 0
        )
        self.attention = Attention(
            self.slots,
            [not early and s.numel > 0 and not self._takes_only for s, early in zip(self.slots, self._copies_early)],
        )
        self._parameters = ParameterRow([slot.parameter for slot in self.slots if slot.parameter is not None])
        self._groups: list[dist.ProcessGroup] | None = None  # of the stages, made on first use
        self._pending: Pending | None = None
        others = f" with {len(self.slots) - 1} others" if len(self.slots) > 1 else ""
        self.asker = f"bucket {index}: {self.slots[0].name}.grad: reduced{others}"
        self._reset()

    @property
    def op(self) -> str:
        return self.reduction.stages[0].op

    @property
    def _casts(self) -> bool:
        return self.reduction.dtype != self.reduction.reduce_dtype

    @property
    def _early_scale(self) -> float:
        """What contributions are multiplied by. A hook is given sums."""
        return 1 / self.reduction.divisor if self._can_scale_early and self.hook is None else 1.0

    def place(self, slot: Slot) -> torch.Tensor | None:
        """Where ``slot``'s gradient may accumulate instead of elsewhere: a new view of the open buffer in the shape of
        the gradient; None when the buffer has another dtype or order, or is not needed."""
        if self.reduction.scatter is not None or self._casts or self._takes_only or not slot.numel:
            return None
        self._open()
        self._memory.is_lent = True
        return self._memory.view(slot.index).view(slot.contribution.local_shape)

    def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._memory.open()

    # One reduction

    def arrive(self, slot: Slot, gradient: torch.Tensor) -> None:
        """A contribution that nobody else writes to any more; a second one is added to the first."""
        index = slot.index
        before = self._given.get(index)
        if before is not None:
            is_scaled = self._copies_early[index] and self._only is None
            before.add_(gradient, alpha=self._early_scale if is_scaled else 1.0)
        elif self._takes_only and _is_sole(gradient):
            self._given[index] = gradient
            self._only = gradient.view(-1)
        elif self._copies_early[index]:
            self._open()
            view = self._given[index] = self._memory.view(index)
            _copy_scaled(view, gradient, self._early_scale)
        else:
            self._given[index] = gradient
        if slot.is_heard:
            self._tell(slot)

    def accept(self, slot: Slot) -> bool:
        """A parameter has got a gradient: be told, and have it handed over unless the slot is quiet. Returns False, and does
        nothing, for one that does not come as the slot expects it."""
        if self.is_launched:
            return False
        if slot.is_quiet:
            self._tell(slot)
            return True
        parameter = slot.parameter
        if parameter is None or parameter.grad is None or not is_dense(parameter.grad, self.reduction.dtype):
            return False
        gradient, parameter.grad = parameter.grad, None
        self.arrive(slot, gradient)
        return True

    def _tell(self, slot: Slot) -> None:
        """Of a gradient that has come. One that comes more often than is expected does not stand for another."""
        self._last = slot
        told = self._told.get(slot.index, 0)
        if told < slot.num_expected:
            self._told[slot.index] = told + 1
            self.num_missing -= 1

    def is_ready(self, versions: Versions) -> bool:
        """Whether all contributions that are expected have come; those of quiet slots are taken then.

        Args:
            versions: of gradients that were there when the backward began.
        """
        if self.num_missing > 0:
            return False
        if not self._has_all:
            self._has_all = self._take_quiet(versions)
            self._is_irregular |= not self._has_all
        return self._has_all

    def _take_quiet(self, versions: Versions) -> bool:
        quiet = self.attention
        if not quiet.indices:
            return True
        if versions and any(
            versions.get(id(parameter)) == gradient._version
            for parameter in quiet.parameters.tensors
            if (gradient := parameter.grad) is not None
        ):
            return False
        self._open()
        return quiet.parameters.take_grads(self._memory.places(quiet.indices), self.reduction.dtype)

    def has_news(self, versions: Versions) -> bool:
        """Whether a gradient has come to a quiet slot."""
        return any(
            versions.get(id(parameter)) != gradient._version
            for parameter in self.attention.parameters.tensors
            if (gradient := parameter.grad) is not None
        )

    def _take_present(self, versions: Versions | None) -> None:
        """Take what is there of quiet slots; with ``versions``, only what has come in this backward."""
        for slot in self.attention.quiet:
            assert slot.parameter is not None
            gradient = slot.parameter.grad
            if gradient is None or slot.index in self._given or not is_dense(gradient, self.reduction.dtype):
                continue
            if versions is None or versions.get(id(slot.parameter)) != gradient._version:
                self._given[slot.index], slot.parameter.grad = gradient, None

    def launch(self, versions: Versions, missing: float | None = None) -> None:
        """Bring all contributions together and start the first collective; the same on every rank.

        ``missing`` stands for those that have not come in a backward that was broken off; None: it was not, and an element
        that changes nothing does.
        """
        self.is_launched = True
        if not self._has_all:
            self._take_present(versions if missing is not None else None)
            self.absent = [slot for slot in self.slots if slot.index not in self._given]
            self._has_all = not self.absent
        local = self._filled(neutral(self.op) if missing is None else missing)
        if self.scatters and self.hook is None:
            assert self.reduction.scatter is not None
            scattering = self._memory.buffer.reduce_scatter([self.reduction.scatter], op="sum", asker=self.asker)
            self._pending = Pending(scattering.buffer.local, [scattering])
        else:
            self._pending = self._start(0, local)

    def _filled(self, missing: float) -> torch.Tensor:
        """What is to be reduced, flat."""
        given, self._given = self._given, {}
        scale = self._early_scale
        if self._only is not None:
            if scale != 1:
                self._only.mul_(scale)
            if self.op == "sum":
                clear_signs(self._only, [0])
            return self._only
        self._open()
        self._memory.fill(given, missing, scale, self.absent)
        if self.op == "sum":
            self._memory.clear_signs(self.absent)
        return self._memory.local

    def _start(self, number: int, tensor: torch.Tensor) -> Pending:
        """The collective of a stage."""
        stage = self.reduction.stages[number]
        if self._groups is None:
            self._groups = [stage.axes.group().group for stage in self.reduction.stages]
        group = self._groups[number]
        if self.hook is None:
            return all_reduce_(tensor, stage.op, group, asker=self.asker)
        names = tuple(slot.name for slot in self.slots)
        return answer_of(self.hook, GradientBucket(self.index, names, tensor, group, stage.op))

    def advance(self) -> None:
        """Wait for the first collective if another one follows it, and start that; once in a reduction."""
        if self._is_advanced:
            return
        self._is_advanced = True
        axes = self.reduction.stages[0].axes
        if self.scatters and self.hook is None:
            rest = tuple(axis for axis in axes.axes if axis != self.reduction.scatter)
            if rest:
                group = axis_group(axes.mesh, rest).group
                self._pending = all_reduce_(self._wait(), "sum", group, asker=self.asker)
        for number in range(1, len(self.reduction.stages)):
            self._pending = self._start(number, self._wait())

    def _wait(self) -> torch.Tensor:
        """The result of the collective in flight, where the one before left it."""
        assert self._pending is not None
        self.waited = self._pending.works()
        found = self._pending.wait()
        self._pending = None
        if self.hook is not None:
            local = self._only if self._only is not None else self._memory.local
            if found.data_ptr() != local.data_ptr() or found.dtype != local.dtype:
                local.copy_(found.view(-1))
            return local
        return found

    def finish(self) -> None:
        """Wait for the last collective; results are then there, and the bucket is closed."""
        result = self._wait()
        if self.reduction.divisor > 1 and self._early_scale == 1:
            _divide(torch.view_as_real(result) if result.is_complex() else result, self.reduction.divisor)
        if self.reduction.scatter is not None:
            if not (self.scatters and self.hook is None):
                length = self._memory.piece_length
                result = result[self._own * length : (self._own + 1) * length].clone()
            self._memory.buffer.free()  # results live in memory of their own
        if result.dtype != self.reduction.dtype:
            result = result.to(self.reduction.dtype)
        self._result = result

    def results(self) -> TensorRow:
        """The reduced gradients, by slot, in the shapes of the contributions; of a bucket that is not scattered."""
        assert self._result is not None
        return self._memory.results(self._result)

    def give_results(self) -> bool:
        """Make the results the parameters' gradients. Returns False, and changes nothing, unless they are so as they stand,
        and no parameter has a gradient."""
        return len(self._parameters.tensors) == len(self.slots) and self._parameters.give_grads(self.results())

    def scattered(self, slot: Slot, own_region_shape: tuple[int, ...]) -> torch.Tensor:
        """This rank's part of a reduced gradient in ``own_region_shape``; of a bucket that is scattered."""
        assert self._result is not None and slot.contribution.pieces is not None
        piece = slot.contribution.pieces[self._own]
        start = self._memory.start(slot, self._own)
        flat = self._result[start : start + piece.numel]
        out = flat.view(own_region_shape) if piece.numel == math.prod(own_region_shape) else flat
        if len(piece.target) > 1:
            out = flat.new_empty(own_region_shape)
            unpack(flat, [piece], out)
        return out

    def mark(self, slot: Slot) -> torch.Tensor:
        """One element that tells whether any rank contributed; see :func:`is_untouched`."""
        assert self._result is not None
        start = self._memory.start(slot, self._own if self.reduction.scatter is not None else None)
        return self._result[start : start + 1]

    def __repr__(self) -> str:
        return f"Bucket({self.index}, {len(self.slots)} gradients, {self.num_bytes} bytes, {self.reduction.text()})"

    def close(self) -> bool:
        """Ready for the next reduction; the results belong to the gradients now. Returns whether other slots are heard
        from now on."""
        is_changed = False
        if self.is_launched and len(self.absent) < len(self.slots):
            is_changed = self.attention.learn(self._last, came_all=self._has_all and not self._is_irregular)
        self._reset()
        return is_changed

    def _reset(self) -> None:
        self.num_missing = self.attention.num_expected
        self.absent = []
        self.is_launched = self._is_open = self._is_advanced = False
        self._has_all = self._is_irregular = False
        self._last = self._only = self._result = None
        self._told, self._given, self.waited = {}, {}, []

    @property
    def _own(self) -> int:
        assert self.reduction.scatter is not None
        return axis_group(self.reduction.stages[0].axes.mesh, (self.reduction.scatter,)).index

    # What it costs

    @property
    def num_collectives(self) -> int:
        return self._cost.num_collectives + len(self.reduction.stages) - 1

    @property
    def moved_bytes(self) -> int:
        """Bytes that this rank sends for one reduction, as the ledger counts them."""
        others = self.reduction.stages[1:]
        return self._cost.num_bytes + sum(
            ring_bytes("all_reduce", self.num_bytes, stage.axes.num_ranks) for stage in others
        )


def _copy_scaled(target: torch.Tensor, source: torch.Tensor, scale: float) -> None:
    if target.dtype == source.dtype and target.data_ptr() != source.data_ptr() and scale != 1:
        torch.mul(source, scale, out=target)
        return
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
    if scale != 1:
        target.mul_(scale)


def _divide(numbers: torch.Tensor, divisor: int) -> None:
    """In place. Complex division would make -0.0 0.0."""
    if _is_power_of_two(divisor):  # then as exact, and faster
        numbers.mul_(1 / divisor)
    else:
        numbers.div_(divisor)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _is_exact(reduction: Reduction) -> bool:
    """Whether contributions may be divided before they are added up: by a power of two, in a dtype with room below."""
    return reduction.divisor > 1 and _is_power_of_two(reduction.divisor) and reduction.reduce_dtype != torch.float16


def _is_sole(gradient: torch.Tensor) -> bool:
    """Whether nobody else sees the memory of a gradient, and it is one piece."""
    return gradient.is_contiguous() and num_storage_users(gradient) <= num_storage_users(torch.empty(0))
