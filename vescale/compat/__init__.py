"""Every private PyTorch name that vescale uses, under a stable name, and the one ``install()``."""

from vescale.compat.dtensor import (
    DTensorSpec,
    MaskPartial,
    StridedShard,
    TensorMeta,
    local_of,
    make_dtensor,
    make_spec,
    partial_partition,
    partial_reduce,
    rank_in_mesh,
    spec_of,
)

__all__ = [
    "DTensorSpec",
    "MaskPartial",
    "StridedShard",
    "TensorMeta",
    "local_of",
    "make_dtensor",
    "make_spec",
    "partial_partition",
    "partial_reduce",
    "rank_in_mesh",
    "spec_of",
]
