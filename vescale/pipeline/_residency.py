"""Which stages of a rank have their parameters gathered (ZeRO units), and until when."""

from __future__ import annotations

from collections.abc import Sequence

from vescale.pipeline._schedule import Action

__all__ = ["MAX_RESIDENT", "releases"]

MAX_RESIDENT = 3


def releases(actions: Sequence[Action], max_resident: int = MAX_RESIDENT) -> dict[Action, tuple[int, ...]]:
    """For actions of one rank, the stages whose parameters are let go before them: those that are not among the next
    ``max_resident`` stages that compute. A stage is gathered again by its next action. (What the runtime of
    ``torch.distributed.pipelining`` does with ``UNSHARD`` and ``RESHARD``.) A stage stays between the halves of a backward.
    """
    resident: list[int] = []
    halved: list[int] = []  # the stages of backwards whose second half is still to come
    found = {}
    for position, action in enumerate(actions):
        soon: list[int] = []
        for later in actions[position:]:
            if later.stage not in soon:
                soon.append(later.stage)
                if len(soon) == max_resident:
                    break
        gone = tuple(stage for stage in resident if stage not in soon and stage not in halved)
        if gone:
            found[action] = gone
        resident = [stage for stage in resident if stage not in gone]
        if action.kind == "I":
            halved.append(action.stage)
        elif action.kind == "W":
            halved.remove(action.stage)
        if action.stage not in resident:
            resident.append(action.stage)
    return found
