"""Rows of tokens to the ranks that have their experts, and back: an uneven all-to-all each way, with gradients.

A token goes once to every rank that has one of its experts, and to no other; what a rank's experts make of it comes back as
one row. There is no capacity: whatever is routed is moved, and nothing else.

=============  ===================================================  =====================================================
function       forward                                              gradient
=============  ===================================================  =====================================================
``plan``       an all-gather of how many rows each rank sends to
               each other: ``n`` integers a rank
``dispatch``   rows of several tensors in one all-to-all            those of floating-point ones, in one all-to-all back
``combine``    one all-to-all back                                  one all-to-all
=============  ===================================================  =====================================================

Every rank of the group calls each of them, also with no row to send or to receive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vescale.comm import AxisGroup, all_gather_v, all_to_all_v, requested_by

__all__ = ["TokenExchange"]


@dataclass(frozen=True)
class TokenExchange:
    """Which rows this rank sends to the others, and how many it receives from them.

    Attributes:
        group: the ranks.
        rows: which of this rank's rows go out, those for the first rank first; a row may occur once for each rank.
        send: how many rows go to each rank.
        receive: how many rows come from each.
        requester: for the ledger.
    """

    group: AxisGroup
    rows: torch.Tensor
    send: tuple[int, ...]
    receive: tuple[int, ...]
    requester: str

    @classmethod
    def plan(cls, goes: torch.Tensor, group: AxisGroup, requester: str) -> TokenExchange:
        """``goes``, of shape (ranks, rows): whether a row goes to a rank."""
        counts = goes.sum(dim=1, dtype=torch.int32)
        with requested_by(f"{requester}: counts"):
            every = all_gather_v(counts, [group.size] * group.size, group.group).wait().view(group.size, group.size)
        # One wait for the device: what follows needs sizes.
        send, receive = torch.stack((counts, every[:, group.index])).tolist()
        return cls(group, goes.nonzero(as_tuple=True)[1], tuple(send), tuple(receive), requester)

    def dispatch(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The rows of each tensor (rows, columns) that come here, in the order of the ranks."""
        return self._exchanged("dispatch", self.send, self.receive, *(part[self.rows] for part in parts))

    def combine(self, part: torch.Tensor, num_rows: int) -> torch.Tensor:
        """The sum, for each of this rank's ``num_rows`` rows, of what came back for it; zero for a row that went nowhere."""
        (back,) = self._exchanged("combine", self.receive, self.send, part)
        return back.new_zeros(num_rows, back.shape[-1]).index_add(0, self.rows, back)

    def _exchanged(
        self, what: str, send: tuple[int, ...], receive: tuple[int, ...], *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = _Exchange.apply(
            self.group, send, receive, f"{self.requester}: {what}", *parts
        )
        return found


class _Exchange(torch.autograd.Function):
    """Consecutive rows of each part to the ranks; its gradient is the exchange the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        group: AxisGroup,
        send: tuple[int, ...],
        receive: tuple[int, ...],
        requester: str,
        *parts: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.send, ctx.receive, ctx.requester = group, send, receive, requester
        found = _moved(parts, send, receive, group, requester)
        ctx.mark_non_differentiable(*(x for x in found if not x.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        needed = [n for n, needs in enumerate(ctx.needs_input_grad[4:]) if needs]
        found: list[torch.Tensor | None] = [None] * len(grads)
        requester = f"{ctx.requester}: gradient"
        for n, part in zip(
            needed, _Exchange.apply(ctx.group, ctx.receive, ctx.send, requester, *(grads[n] for n in needed))
        ):
            found[n] = part
        return None, None, None, None, *found


def _moved(
    parts: Sequence[torch.Tensor], send: Sequence[int], receive: Sequence[int], group: AxisGroup, requester: str
) -> tuple[torch.Tensor, ...]:
    """All parts in one message: the bytes of their rows side by side."""
    pieces = [part.contiguous().view(torch.uint8) for part in parts]
    packed = torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]
    width = packed.shape[1]
    with requested_by(requester):
        flat = all_to_all_v(
            packed.view(-1), [n * width for n in send], [n * width for n in receive], group.group
        ).wait()
    rows = flat.view(sum(receive), width)
    widths = [part.shape[1] * part.element_size() for part in parts]
    return tuple(
        piece.contiguous().view(part.dtype) for part, piece in zip(parts, rows.split(widths, dim=1), strict=True)
    )
