"""Numbers of several meshes in one tensor: the norms of gradients that do not lie on one mesh."""

from __future__ import annotations

import math

from torch.distributed.tensor import Replicate

from vescale.placements._rules._call import Decision, OpCall

__all__ = ["stack_rule"]


def stack_rule(call: OpCall) -> Decision | None:
    """``stack`` of numbers that every rank has, whichever meshes they are on. Local; on the mesh of the first.

    Raises RuntimeError for meshes of different ranks, some of which lack a number.
    """
    if call.name != "stack" or len({spec.mesh for spec in call.operands}) == 1:
        return None
    if any(math.prod(spec.shape) != 1 or not all(p.is_replicate() for p in spec.placements) for spec in call.operands):
        return None
    first = frozenset(call.mesh.mesh.flatten().tolist())
    other = next((s.mesh for s in call.operands if frozenset(s.mesh.mesh.flatten().tolist()) != first), None)
    if other is not None:
        raise RuntimeError(
            f"{call.op}: numbers on {call.mesh} and on {other}, which have other ranks; expected meshes over the same "
            "ranks: take the numbers out with full_tensor(), and bring them to all ranks"
        )
    whole = (Replicate(),) * call.mesh.ndim
    return Decision(tuple(tuple(spec.placements) for spec in call.operands), (whole,), local=call.op)
