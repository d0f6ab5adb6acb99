"""Random ops: refused here, because the generators of the ranks would repeat or diverge."""

from __future__ import annotations

from typing import Any

import torch

from vescale.ops._call import OpCall
from vescale.ops._decision import Decision
from vescale.ops._registry import register_family

__all__: list[str] = []


def is_random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def random_rule(call: OpCall) -> Decision | None:
    """Refuse what no handler of :mod:`vescale.rng` has run before."""
    spec = call.operands[0]
    raise RuntimeError(
        f"{call.op} on a tensor of shape {tuple(spec.shape)} placed as {spec.placements}: every rank's generator would "
        "draw different numbers, unlike one device; call vescale.rng.enable(), or draw on a replicated tensor and "
        "redistribute the result"
    )


register_family("random", covers=is_random, rule=random_rule)
