"""Parameters that got no gradient on some ranks: did they get one anywhere?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist

from vescale.comm import all_reduce_
from vescale.fsdp._reduction import Reduction

__all__ = ["settle_unused"]


def settle_unused(reductions: Sequence[Reduction]) -> None:
    """After a backward: parameters that this rank did not use (an expert without tokens, a branch not taken) get the
    gradient of the ranks that did; those that no rank used keep ``grad`` as it is, None for a fresh one.

    One all-reduce of a byte for each parameter and backward, over the ranks of the groups; every rank takes part, and only
    ranks with unused parameters wait for it. Reductions were started in the same order on all of them.
    """
    together: dict[dist.ProcessGroup, list[Reduction]] = defaultdict(list)
    for reduction in reductions:
        if not reduction.options.unused_as_zero:
            along = reduction.bucket.axes.data_parallel
            if along.size > 1:
                together[along.group].append(reduction)
            else:
                reduction.settle([0] * len(reduction.received))
    for group, members in together.items():
        flags = [flag for reduction in members for flag in reduction.received]
        device = members[0].bucket.unreduced.buffer.device
        used = torch.tensor(flags, dtype=torch.uint8, device=device)
        pending = all_reduce_(used, "max", group, requester="which parameters got a gradient")
        if all(flags) and device.type != "cpu":
            continue  # nobody here needs the answer, and the device need not be waited for
        answer = pending.wait().tolist()
        start = 0
        for reduction in members:
            stop = start + len(reduction.received)
            reduction.settle(answer[start:stop])
            start = stop
