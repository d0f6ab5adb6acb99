"""Ops on interleaved operands that treat the indices of the interleaved dim alike.

PyTorch's strategies know ``Shard(dim)`` but not ``InterleavedShard(dim, n)``. For ops that do the same thing to every
index of a dim (matrix products, softmax over another dim, transposes, ...) it does not matter *which* indices a rank holds,
only that all operands and results hold the same ones. So every interleaved operand is replaced with ``Shard(dim)``, PyTorch
decides, and the decision is translated back: on a mesh axis where an interleaved operand kept its ``Shard(dim)``, every
shard of the decision means the index set of the first such operand. Operands that hold other indices are moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec, MaskPartial, StridedShard, has_empty_shards, with_empty_shards
from vescale.ops._call import Decision, OpCall, Placements, names, with_placements
from vescale.ops._registry import register_family
from vescale.ops.elementwise import is_elementwise
from vescale.placements import FlattenedShard, InterleavedShard, at_dim, ragged_axis, split_factor

# Ops for which the indices of a dim that PyTorch leaves sharded are independent, by name. An op that mixes or renumbers
# indices does not belong here, unless PyTorch unshards the dim along which it does (slice, cat, softmax).
_INDEPENDENT = names(
    "mm addmm bmm baddbmm mv addmv dot embedding embedding_dense_backward t transpose permute select slice split "
    "split_with_sizes cat stack _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data logsumexp "
    "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward "
    "topk sort gather scatter scatter_ scatter_add value_selecting_reduction_backward unsqueeze squeeze expand"
)
# The same, but only over other dims than the interleaved one: their local results depend on how many indices a rank has.
_REDUCTIONS = names("mean prod amax amin max min any all var std var_mean std_mean linalg_vector_norm norm")
_SUMS = names("sum histc")


def treats_indices_alike(op: Any) -> bool:
    """Whether PyTorch's own strategy for the op is known to leave dims sharded only where it does not matter which indices
    a rank holds. Other strategies may be wrong there: that of a cumulative sum along -1 of ``Shard(1)`` is."""
    return op.overloadpacket.__name__ in _INDEPENDENT | _REDUCTIONS | _SUMS or is_elementwise(op)


def interleaved_rule(call: OpCall) -> Decision | None:
    """PyTorch's decision for plain shards, translated back. None where it depends on which indices a shard holds."""
    if any(ragged_axis(spec.placements) is not None for spec in call.operands):
        return None
    if call.name in _REDUCTIONS or call.name in _SUMS:
        call.try_out()
    plain = [tuple(map(_plain_shard, spec.placements)) for spec in call.operands]
    native = _native(call, plain)
    if native is None or native.use_val_from_redistribute_schema:
        return None
    wanted = list(plain)
    if native.redistribute_schema is not None:
        if native.redistribute_schema.op != call.op:
            return None
        moved = OpCall(call.op, native.redistribute_schema.args_schema, call.kwargs)
        if len(moved.operands) != len(call.operands):
            return None
        wanted = [spec.placements for spec in moved.operands]
    outputs = _outputs(native.output_spec)
    if any(isinstance(placement, MaskPartial) for out in outputs for placement in out or ()):
        return None  # computed from the offsets of a plain shard
    for axis in range(call.mesh.ndim):
        leader = _leader(call, axis, plain, wanted)
        if leader is None:
            continue
        if call.name in _REDUCTIONS and any(out is not None and out[axis].is_partial() for out in outputs):
            return None
        wanted = [_translated(placements, axis, leader) for placements in wanted]
        outputs = [None if out is None else _translated(out, axis, leader) for out in outputs]
    inputs = [
        _own_where_equal(spec.placements, placements) for spec, placements in zip(call.operands, wanted, strict=True)
    ]
    return Decision(tuple(inputs), None if native.output_spec is None else tuple(outputs))


_NOT_PLAIN = (InterleavedShard, FlattenedShard, StridedShard)


def _plain_shard(placement: Placement) -> Placement:
    return Shard(placement.dim) if isinstance(placement, _NOT_PLAIN) else placement


def _native(call: OpCall, placements: Sequence[Placements]) -> Any:
    """PyTorch's decision; where ranks hold nothing of a dim, that for larger dims."""
    if any(has_empty_shards(spec) for spec in map(with_placements, call.operands, placements)):
        with with_empty_shards():
            found = call.native(placements)
        shares = call.name in _REDUCTIONS and any(
            placement.is_partial() for out in _outputs(found and found.output_spec) for placement in out or ()
        )
        if found is not None and not shares:
            return found
    return call.native(placements)


def _outputs(specs: object) -> list[Placements | None]:
    if isinstance(specs, DTensorSpec):
        return [specs.placements]
    if isinstance(specs, Sequence):
        return [spec.placements if isinstance(spec, DTensorSpec) else None for spec in specs]
    return []


def _leader(call: OpCall, axis: int, plain: Sequence[Placements], wanted: Sequence[Placements]) -> Placement | None:
    """The placement whose index set the axis has: that of the tensor that is written to, else that of the first interleaved
    operand that PyTorch leaves as it is. None when the axis has no interleaved operand left."""
    kept = [
        index
        for index, (before, after) in enumerate(zip(plain, wanted))
        if isinstance(before[axis], Shard) and before[axis] == after[axis]
    ]
    interleaved = [index for index in kept if call.operands[index].placements[axis] != plain[index][axis]]
    written = [index for index in kept if index in call.mutated]
    if not interleaved:
        return None
    return call.operands[(written or interleaved)[0]].placements[axis]


def _translated(placements: Placements, axis: int, leader: Placement) -> Placements:
    """The placements with a shard on the axis as one with the leader's indices."""
    own = placements[axis]
    if not isinstance(own, Shard):
        return placements
    if isinstance(leader, FlattenedShard):
        translated = at_dim(leader, own.dim)
    elif split_factor(leader) > 1:
        translated = InterleavedShard(own.dim, split_factor(leader))
    else:
        return placements
    return (*placements[:axis], translated, *placements[axis + 1 :])


def _own_where_equal(own: Placements, wanted: Placements) -> Placements:
    """``wanted``, with the operand's own ``_StridedShard`` where it means the same as an ``InterleavedShard``."""
    return tuple(
        before
        if isinstance(before, StridedShard)
        and isinstance(after, InterleavedShard)
        and (before.dim, split_factor(before)) == (after.dim, after.num_chunks)
        else after
        for before, after in zip(own, wanted)
    )


register_family("interleaved", covers=treats_indices_alike, rule=interleaved_rule)
