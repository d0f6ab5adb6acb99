"""Implicit communication: the site at which an op moves an operand that no plan entry moves, and its messages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import bytes_text
from vescale.errors import Coded
from vescale.plans import MeshAxes, placement_text

_PACKAGE = str(Path(__file__).parent.parent)


class ImplicitCommunicationError(Coded, RuntimeError, code="VS0202"):
    """``parallelize(..., strict=True)``: an op needs communication that no plan entry requests."""


class ImplicitCommunicationWarning(Coded, UserWarning, code="VS0202"):
    """An op needed communication that no plan entry requests; issued once for each entry that would request it, repeated
    layers as one."""


@dataclass(frozen=True)
class ImplicitSite:
    """Where an op redistributes an operand without a plan entry.

    Attributes:
        module: path of the module in whose forward, or in whose backward, the op runs; "" for the model itself.
        phase: ``forward`` or ``backward``.
        op: the op's name, for example ``aten.mm.default``.
        operand: a parameter, an input, the output of a submodule, or the name of the op's argument.
        source: its placements.
        target: the placements that the op needs.
        edit: the plan entry that would make the communication explicit.
        line: of the model's source; not part of the identity of the site.
        num_bytes: what a rank sends in one call, about; likewise.
    """

    module: str
    phase: str
    op: str
    operand: str
    source: tuple[Placement, ...]
    target: tuple[Placement, ...]
    edit: str
    line: str = field(default="", compare=False)
    num_bytes: int = field(default=0, compare=False)

    def message(self, axes: MeshAxes) -> str:
        """What was found, what the op needs, and the edit."""
        where = f"{self.module or 'the model'} ({self.phase}{', ' + self.line if self.line else ''})"
        return (
            f"{where}: {self.op} got {self.operand} as {placements_text(self.source, axes)} but needs "
            f"{placements_text(self.target, axes)}, which communicates{self._cost()}; no plan entry asks for "
            f"it.{_pending_text(self.source, self.target, axes)} To make it explicit: {self.edit}"
        )

    def _cost(self) -> str:
        return f" (about {bytes_text(self.num_bytes)} from each rank and call)" if self.num_bytes else ""


def _pending_text(source: Sequence[Placement], target: Sequence[Placement], axes: MeshAxes) -> str:
    """What a pending value is, where it is completed."""
    for axis, before, after in zip(axes, source, target):
        if isinstance(before, Partial) and before != after:
            kind = {"sum": "sum", "avg": "mean"}.get(before.reduce_op, before.reduce_op)
            kind = kind if type(before) is Partial else "norm"
            return f" {one_placement_text(before)} is a pending {kind}: each rank along '{axis}' has one of its terms."
    return ""


def sent_bytes(num_bytes: int, source: Sequence[Placement], target: Sequence[Placement], sizes: Sequence[int]) -> int:
    """What a rank sends, about, to bring a local tensor of so many bytes from one placement to another, axis by axis."""
    total = 0.0
    for before, after, size in zip(source, target, sizes):
        if size == 1 or before == after or before.is_replicate():
            continue
        if before.is_partial():
            total += num_bytes * (size - 1) / size * (2 if after.is_replicate() else 1)
        else:
            total += num_bytes * (size - 1) / (1 if after.is_replicate() else size)
        if not before.is_partial() and after.is_replicate():
            num_bytes *= size
    return round(total)


def placements_text(placements: Sequence[Placement], axes: MeshAxes) -> str:
    return ",".join(f"{axis}={one_placement_text(p)}" for axis, p in zip(axes, placements))


def one_placement_text(placement: Placement) -> str:
    try:
        return placement_text(placement)
    except ValueError:  # plans cannot name it
        return str(placement)


def communicates(source: Sequence[Placement], target: Sequence[Placement], sizes: Sequence[int]) -> bool:
    """Whether going from ``source`` to ``target`` moves data between ranks."""
    for before, after, size in zip(source, target, sizes):
        if size == 1 or before == after or before.is_replicate():
            continue
        if after.is_partial() and not before.is_partial():
            continue  # each rank embeds its local tensor in zeros
        return True
    return False


def calling_line() -> str:
    """``file:line`` of the nearest caller outside torch and this library; "" when there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not (name.startswith((_PACKAGE, "<")) or "/torch/" in name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
