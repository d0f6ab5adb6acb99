"""Random ops: local generators would repeat or diverge between ranks, so they are never run as if they were elementwise."""

from __future__ import annotations

import torch

from vescale.placements._rules._call import Decision, OpCall

__all__ = ["random_rule"]


def random_rule(call: OpCall) -> Decision | None:
    """Refuse what no handler took before."""
    if torch.Tag.nondeterministic_seeded not in call.op.tags:
        return None
    placements = next((spec.placements for spec in call.operands), ())
    raise RuntimeError(
        f"{call.op} on a tensor of shape {tuple(call.operands[0].shape)} placed as {placements}: every rank's generator "
        "would draw numbers of its own, unlike one device; call vescale.rng.enable(), or draw on a replicated tensor "
        "and redistribute the result"
    )
