"""``Decision``: what a placement rule decides about one op call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vescale.ops._call import OpCall, Placements


@dataclass(frozen=True)
class Decision:
    """How an op runs: each operand is moved to ``inputs``, something runs on the local tensors, results get ``outputs``.

    Attributes:
        inputs: the placements of each operand while the op runs; an operand that the op writes to must keep its own.
        outputs: the placements of each result, one entry for an op with one; None: results are passed on as they are
            (numbers, nothing).
        local: runs in place of the op, with its arguments and local tensors for operands; None: the op itself.
        local_sizes: for an op whose arguments are a tensor and sizes: the sizes with which the op itself gives, on the local
            tensor, what ``local`` does. Such a decision is cached by DTensor's dispatcher.
        prepare: ``(operand index, function)``: applied to an operand's local tensor after it was moved.
        redispatch: run the op on DTensors with ``inputs`` placements, all stock, instead of local tensors.
        scratch: operands that the op writes to for its own use only, so that a moved copy will do.
        write_back: operands that the op writes to and that have other placements: moved, written to, and moved back.
        fallback: the placements were given up because there is no rule: reported, and refused in strict mode.
    """

    inputs: tuple[Placements, ...]
    outputs: tuple[Placements | None, ...] | None = None
    local: Callable[..., Any] | None = None
    local_sizes: tuple[int, ...] | None = None
    prepare: tuple[tuple[int, Callable[[Any], Any]], ...] = ()
    redispatch: bool = False
    scratch: tuple[int, ...] = ()
    write_back: tuple[int, ...] = ()
    fallback: bool = False


# A pure function of the call; None: the call is left to the next rule.
Rule = Callable[[OpCall], Decision | None]
