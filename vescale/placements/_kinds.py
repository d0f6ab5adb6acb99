"""What kind of placement one mesh axis has: the questions the rest of the package asks, answered in one place."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import StridedShard
from vescale.placements._custom import has_custom
from vescale.placements._interleaved import InterleavedShard
from vescale.placements._ragged import RaggedShard

__all__ = ["at_dim", "has_custom", "is_replicated", "is_sharded", "ragged_axis", "shard_dim", "split_factor"]


def shard_dim(placement: Placement) -> int | None:
    """The tensor dim that a shard-like placement (``Shard``, ``_StridedShard``, ``InterleavedShard``) cuts, or None."""
    if isinstance(placement, Shard | StridedShard | InterleavedShard):
        return int(placement.dim)
    return None


def at_dim(placement: Placement, dim: int) -> Placement:
    """A shard-like placement with the same cut of another dim (of the same tensor seen otherwise, or of a result)."""
    if isinstance(placement, StridedShard):
        return StridedShard(dim, split_factor=placement.split_factor)
    if isinstance(placement, InterleavedShard):
        return InterleavedShard(dim, placement.num_chunks)
    return Shard(dim)


def split_factor(placement: Placement) -> int:
    """Into how many pieces a shard-like placement cuts its dim before each piece is chunked over the ranks."""
    if isinstance(placement, InterleavedShard):
        return placement.num_chunks
    return int(placement.split_factor) if isinstance(placement, StridedShard) else 1


def ragged_axis(placements: Sequence[Placement]) -> int | None:
    """The mesh axis with a ragged placement, or None. Raises ValueError when there are several."""
    axes = [axis for axis, placement in enumerate(placements) if isinstance(placement, RaggedShard)]
    if len(axes) > 1:
        raise ValueError(
            f"ragged placements on mesh axes {axes} of {tuple(placements)}: the ragged cut comes last, so only one "
            "axis can have it; flatten the axes into one (mesh[names]._flatten()), or use Shard or Replicate on the others"
        )
    return axes[0] if axes else None


def is_sharded(placement: Placement) -> bool:
    """Whether ranks along the axis hold different elements."""
    return isinstance(placement, RaggedShard) or shard_dim(placement) is not None


def is_replicated(placement: Placement) -> bool:
    return bool(placement.is_replicate())
