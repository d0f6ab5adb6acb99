"""Placements beyond stock DTensor's, on exact-type DTensors, and the index arithmetic of all placements."""

from vescale.placements._api import distribute_tensor, full_tensor, redistribute
from vescale.placements._custom import CustomPlacement
from vescale.placements._exchange import Exchange, Piece, plan_exchange, unpack
from vescale.placements._install import install
from vescale.placements._interleaved import InterleavedShard
from vescale.placements._kinds import at_dim, has_custom, ragged_axis, shard_dim, split_factor
from vescale.placements._local import from_local, to_local
from vescale.placements._move import move_local
from vescale.placements._normalize import normalize_placements
from vescale.placements._ops import register_rule, run_interleaved
from vescale.placements._ragged import RaggedShard, StridedRaggedShard
from vescale.placements._region import Box, Region, largest_shape, local_region
from vescale.placements._rules import Decision, OpCall
from vescale.placements._serialization import allow_safe_load
from vescale.placements._strict import PlacementFallbackError, PlacementFallbackWarning, strict_placements

__all__ = [
    "Box",
    "CustomPlacement",
    "Decision",
    "Exchange",
    "InterleavedShard",
    "OpCall",
    "Piece",
    "PlacementFallbackError",
    "PlacementFallbackWarning",
    "RaggedShard",
    "Region",
    "StridedRaggedShard",
    "at_dim",
    "distribute_tensor",
    "from_local",
    "full_tensor",
    "has_custom",
    "install",
    "largest_shape",
    "local_region",
    "move_local",
    "normalize_placements",
    "plan_exchange",
    "ragged_axis",
    "redistribute",
    "register_rule",
    "run_interleaved",
    "shard_dim",
    "split_factor",
    "strict_placements",
    "to_local",
    "unpack",
]

allow_safe_load()
