"""Random ops: :mod:`vescale.rng` draws the numbers of one device; without it they are refused.

Its handlers are installed by ``vescale.rng.enable()`` and removed by ``disable()``, apart from the other handlers.
"""

from __future__ import annotations

from typing import Any

import torch

from vescale.errors import OpPlacementError
from vescale.ops._call import OpCall
from vescale.ops._decision import Decision
from vescale.ops._registry import register, register_family
from vescale.rng import handlers


def is_random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def random_rule(call: OpCall) -> Decision | None:
    """Refuse what no handler of :mod:`vescale.rng` has run before."""
    spec = call.operands[0]
    raise OpPlacementError(
        f"{call.op} on a tensor of shape {tuple(spec.shape)} placed as {spec.placements}: every rank's generator would "
        "draw different numbers, unlike one device; call vescale.rng.enable(), or draw on a replicated tensor and "
        "redistribute the result"
    )


register_family("random", covers=is_random, rule=random_rule)
for _op, _handler in handlers().items():
    register(_op, random_handler=_handler)
