"""The tensor- and expert-parallel styles of Hugging Face transformers, as placements.

Transformers' styles pass local tensors from module to module and correct gradients by hand. Ours are DTensors, so that
placements suffice, and styles that only correct gradients have no entries.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.placements import InterleavedShard

__all__ = ["STYLES", "Style"]


@dataclass(frozen=True)
class Style:
    """A style, on one mesh axis.

    Attributes:
        cut: the dim of the module's own parameters that is sharded, counted from the back; None: they stay whole.
        front: count ``cut`` from the front instead (the dim of experts).
        vectors: whether parameters of one dim are sharded, too (biases along an output dim).
        pieces: the number of packed pieces in the dim (gate and up), each of which is sharded.
        inputs, outputs: the placements of the module's inputs and outputs; None: as they arrive.
        experts: the module runs as an expert region; its output is summed.
        whole_experts: if a module inside of an expert region has this style, the region's experts stay whole.
    """

    cut: int | None = None
    front: bool = False
    vectors: bool = False
    pieces: int = 1
    inputs: Placement | None = None
    outputs: Placement | None = None
    experts: bool = False
    whole_experts: bool = False

    def placement(self, num_dims: int) -> Placement | None:
        """The placement of a parameter with this number of dims; None: whole."""
        if self.cut is None or num_dims == 0:
            return None
        if self.front:
            return Shard(self.cut)
        if num_dims == 1:
            if not self.vectors:
                return None
            return Shard(0) if self.pieces == 1 else InterleavedShard(0, self.pieces)
        dim = num_dims + self.cut
        return Shard(dim) if self.pieces == 1 else InterleavedShard(dim, self.pieces)


_COLUMNS = Style(cut=-2, vectors=True, inputs=Replicate())
_GATHERED_COLUMNS = Style(cut=-2, vectors=True, inputs=Replicate(), outputs=Replicate())
_ROWS = Style(cut=-1, inputs=Shard(-1), outputs=Replicate())
_NOTHING = Style()

STYLES: dict[str, Style] = {
    "colwise": _COLUMNS,
    "colwise_gather_output": _GATHERED_COLUMNS,
    "colwise_rep": _GATHERED_COLUMNS,
    "rowwise": _ROWS,
    # These two get a whole input, which is sharded here.
    "rowwise_split_input": _ROWS,
    "rowwise_rep": _ROWS,
    "packed_colwise": Style(cut=-2, vectors=True, pieces=2, inputs=Replicate()),
    "packed_rowwise": Style(cut=-1, pieces=2),
    "embedding_rowwise": Style(cut=-2, outputs=Replicate()),
    "embedding_colwise": Style(cut=-1, outputs=Replicate()),
    "sequence_parallel": Style(inputs=Shard(1)),
    "all_reduce": Style(outputs=Replicate()),
    "moe_tp_experts": Style(inputs=Replicate(), outputs=Replicate(), experts=True),
    # It divides the contribution of a replicated expert to a sum over ranks.
    "moe_identity_expert": Style(whole_experts=True),
    "grouped_gemm": Style(cut=0, front=True, vectors=True),
    "ep_dispatch_experts": Style(inputs=Replicate(), outputs=Replicate(), experts=True),
    # DTensor itself knows that these gradients are Partial, and what is local.
    "replicate": _NOTHING,
    "replicated_with_grad_allreduce": _NOTHING,
    "mla_kv_a_proj": _NOTHING,
    "local_params": _NOTHING,
}
