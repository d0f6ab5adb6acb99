"""Moves the parts of matrices to their owners and the results back, while other matrices are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from vescale.comm import Pending, all_to_all_v
from vescale.optim._matrix_schedule import MatrixRound, OwnedMatrix
from vescale.optim._round_parts import Part, RoundParts, round_parts
from vescale.placements import Box

__all__ = ["MatrixExchange", "MatrixStep"]


class MatrixStep:
    """What an optimizer does with its matrices; :class:`MatrixExchange` calls it."""

    def part(self, parameter: int) -> torch.Tensor:
        """This rank's local tensor of what travels to the owners. Asked for wherever the parameter has a part on this rank,
        before the first update of the parameter comes back."""
        raise NotImplementedError

    def release(self, parameter: int) -> None:
        """:meth:`part` is not asked for again."""

    def compute(self, matrices: Sequence[tuple[OwnedMatrix, torch.Tensor]]) -> Sequence[torch.Tensor]:
        """The updates of matrices that this rank owns. Each is given, and returned, in the shape of its box."""
        raise NotImplementedError

    def apply(self, matrix: OwnedMatrix, block: Box, update: torch.Tensor) -> None:
        """Take the update of ``block``, the part of the matrix that this rank's local tensor holds."""
        raise NotImplementedError


class MatrixExchange:
    """Rounds of matrices with the index arithmetic of this rank's part, which is done once.

    Communication of each round: one uneven all-to-all to the owners and one back; one more along replicas. Every
    element goes to its matrix's owner once, and comes back once to each rank that holds it. Rounds along no axes have
    none.
    """

    def __init__(self, kinds: Sequence[Sequence[MatrixRound]], device: torch.device, requester: str) -> None:
        self._kinds = [[(each, round_parts(each)) for each in rounds] for rounds in kinds]
        self._device, self._requester = device, requester
        self._last: dict[int, RoundParts] = {}
        for rounds in self._kinds:
            for _, parts in rounds:
                for parameter in parts.parameters:
                    self._last[parameter] = parts

    def received_bytes(self) -> dict[int, int]:
        """By parameter, the bytes that this rank receives in a step."""
        found: dict[int, int] = {}
        for rounds in self._kinds:
            for round_, parts in rounds:
                gathered, returned = round_.sends.itemsize, round_.receives.itemsize
                for each, size in ((parts.receives, gathered), (parts.sends, returned), (parts.takes, returned)):
                    for part in each:
                        number = part.matrix.parameter
                        found[number] = found.get(number, 0) + part.held.numel * size
        return found

    def run(self, step: MatrixStep) -> None:
        """One step of an optimizer.

        The gather of the next round and the scatter of the last one run while a round is computed. Ranks that share a
        process group start its collectives in the same order: each kind's rounds end before the next kind's begin.
        """
        for rounds in self._kinds:
            running = [_RunningRound(*each, step, self._device, self._requester, self._last) for each in rounds]
            running[0].gather()
            for number, current in enumerate(running):
                if number + 1 < len(running):
                    running[number + 1].gather()
                current.compute()
                if number:
                    running[number - 1].take_scattered()
                if number > 1:
                    running[number - 2].take_copied()
            running[-1].take_scattered()
            for last in running[-2:]:
                last.take_copied()


class _RunningRound:
    """This rank's part of a round in one step; the methods in the order in which they are called."""

    def __init__(
        self,
        round_: MatrixRound,
        parts: RoundParts,
        step: MatrixStep,
        device: torch.device,
        requester: str,
        last: dict[int, RoundParts],
    ) -> None:
        self._round, self._parts, self._step = round_, parts, step
        self._device, self._requester, self._last = device, requester, last
        self._gathered: Pending | None = None
        self._scattered: Pending | None = None
        self._copied: Pending | None = None

    def gather(self) -> None:
        """Start to send this rank's parts to the owners."""
        parts, step, dtype = self._parts, self._step, self._round.sends
        self._whole = {m: torch.empty(m.box.sizes, dtype=dtype, device=self._device) for m in parts.owned}
        for part in parts.kept:
            part.within.view(self._whole[part.matrix]).copy_(part.held.view(step.part(part.matrix.parameter)))
        if parts.group is not None:
            sent = self._packed(((part.held.view(step.part(part.matrix.parameter))) for part in parts.sends), dtype)
            self._gathered = all_to_all_v(
                sent, parts.send_sizes, parts.receive_sizes, parts.group.group, requester=f"{self._requester}: gather"
            )
        for parameter in sorted(parts.parameters):
            step.part(parameter)
            if self._last[parameter] is parts:
                step.release(parameter)

    def compute(self) -> None:
        """Compute this rank's matrices and start to send the results."""
        parts = self._parts
        if self._gathered is not None:
            _unpack(
                self._gathered.wait(),
                parts.receives,
                lambda p, values: p.within.view(self._whole[p.matrix]).copy_(values),
            )
        self._updates = dict(zip(parts.owned, self._step.compute(list(self._whole.items())) if parts.owned else ()))
        self._whole, self._gathered = {}, None
        if parts.group is not None:
            sent = self._packed(
                (part.within.view(self._updates[part.matrix]) for part in parts.receives), self._round.receives
            )
            self._scattered = all_to_all_v(
                sent, parts.receive_sizes, parts.send_sizes, parts.group.group, requester=f"{self._requester}: scatter"
            )

    def take_scattered(self) -> None:
        """Apply the results of this rank's bucket, and start to copy them to the replicas."""
        parts, found = self._parts, []

        def take(part: Part, values: torch.Tensor) -> None:
            self._step.apply(part.matrix, part.held, values)
            found.append(values)

        for part in parts.kept:
            take(part, part.within.view(self._updates[part.matrix]))
        if self._scattered is not None:
            _unpack(self._scattered.wait(), parts.sends, take)
        if parts.copies is not None:
            others = parts.copies.size - 1
            own = self._packed((found[index] for index in parts.copied), self._round.receives)
            sizes = [own.numel()] * parts.copies.size
            sizes[parts.copies.index] = 0
            self._copied = all_to_all_v(
                own.repeat(others),
                sizes,
                parts.take_sizes,
                parts.copies.group,
                requester=f"{self._requester}: replicas",
            )
        self._updates, self._scattered = {}, None

    def take_copied(self) -> None:
        """Apply the results that other replicas have computed."""
        if self._copied is not None:
            _unpack(
                self._copied.wait(), self._parts.takes, lambda p, values: self._step.apply(p.matrix, p.held, values)
            )
        self._copied = None

    def _packed(self, pieces: Iterable[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The pieces one after the other, flat."""
        flat = [piece.reshape(-1).to(dtype) for piece in pieces]
        return torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=self._device)


def _unpack(flat: torch.Tensor, parts: Sequence[Part], take: Callable[[Part, torch.Tensor], object]) -> None:
    start = 0
    for part in parts:
        take(part, flat[start : start + part.held.numel].view(part.held.sizes))
        start += part.held.numel
