"""Placements beyond stock DTensor's, on exact-type DTensors, and the index arithmetic of all placements."""

from vescale.compat import extend_entry
from vescale.placements._checkpoint import allow_safe_load
from vescale.placements._custom_placement import CustomPlacement, has_custom
from vescale.placements._exchange_plan import Piece, plan_exchange, unpack
from vescale.placements._hooks import dtensor_hooks
from vescale.placements._local_conversion import distribute_tensor, from_local, to_local
from vescale.placements._native_moves import NativeMove, native_move
from vescale.placements._pieced_shards import FlattenedShard, InterleavedShard
from vescale.placements._placement_kinds import (
    at_dim,
    contiguous_stride,
    from_front,
    is_pending,
    is_sharded,
    moved_stride,
    ragged_axis,
    shard_dim,
    shift_dim,
    split_factor,
    stride_like,
    without_partials,
)
from vescale.placements._ragged import RaggedShard, StridedRaggedShard
from vescale.placements._redistribute import full_tensor, keeps_expanded, move_local, normalize_placements, redistribute
from vescale.placements._region import Box, Interval, Region, coordinates, largest_shape, local_region, own_region

__all__ = [
    "FlattenedShard",
    "InterleavedShard",
    "RaggedShard",
    "StridedRaggedShard",
    "distribute_tensor",
    "from_local",
    "full_tensor",
    "normalize_placements",
    "redistribute",
    "to_local",
]

extend_entry()
allow_safe_load()
