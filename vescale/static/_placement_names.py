"""Placements as text in a record: as plans write them, and ``Strided(dim, split)``, which plans do not have."""

from __future__ import annotations

import re

from torch.distributed.tensor.placement_types import Placement

from vescale.compat import StridedShard
from vescale.errors import PlacementTextError, StaticRecordError
from vescale.plans import parse_placement, placement_text

_STRIDED = re.compile(r"Strided\((-?\d{1,3}), (\d{1,9})\)")


def placement_name(placement: Placement) -> str:
    """Raises StaticRecordError for a placement that has no name."""
    if type(placement) is StridedShard:
        return f"Strided({placement.dim}, {placement.split_factor})"
    try:
        return placement_text(placement)
    except PlacementTextError as problem:
        raise StaticRecordError(
            f"{problem.args[0]}; this model cannot be written to a record, and runs in static mode as it does now"
        ) from None


def placement_named(text: str) -> Placement:
    """Raises StaticRecordError for a text that names none."""
    found = _STRIDED.fullmatch(text)
    if found is not None:
        return StridedShard(int(found[1]), split_factor=int(found[2]))
    try:
        return parse_placement(text)
    except PlacementTextError as problem:
        raise StaticRecordError(f"{problem.args[0]}; record the model again") from None
