"""``stack`` of numbers on several meshes: the norms of gradients that are not all on one mesh."""

from __future__ import annotations

import math

from torch.distributed.tensor import Replicate

from vescale.errors import OpPlacementError
from vescale.ops._call import OpCall
from vescale.ops._decision import Decision
from vescale.ops._registry import register_aten

__all__: list[str] = []


def stack_rule(call: OpCall) -> Decision | None:
    """``stack`` of replicated numbers on several meshes over the same ranks. Local; the result is on the mesh of the first.

    Raises RuntimeError for meshes of different ranks, some of which lack a number.
    """
    if len({spec.mesh for spec in call.operands}) == 1:
        return None
    if any(math.prod(spec.shape) != 1 or not all(p.is_replicate() for p in spec.placements) for spec in call.operands):
        return None
    first = frozenset(call.mesh.mesh.flatten().tolist())
    other = next((s.mesh for s in call.operands if frozenset(s.mesh.mesh.flatten().tolist()) != first), None)
    if other is not None:
        raise OpPlacementError(
            f"{call.op}: numbers on {call.mesh} and on {other}, which have other ranks; expected meshes over the same "
            "ranks: take the numbers out with full_tensor(), and bring them to all ranks"
        )
    whole = (Replicate(),) * call.mesh.ndim
    return Decision(tuple(tuple(spec.placements) for spec in call.operands), (whole,), local=call.op)


register_aten("stack", rule=stack_rule)
