"""Every private PyTorch name that vescale uses, under a stable name, and the one ``install()``."""

from vescale.compat.collectives import AsyncCollectiveTensor, all_gather_single, as_async_tensor, reduce_scatter_single
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
from vescale.compat.install import DTensorHooks, install, stock

__all__ = [
    "AsyncCollectiveTensor",
    "DTensorHooks",
    "DTensorSpec",
    "MaskPartial",
    "StridedShard",
    "TensorMeta",
    "all_gather_single",
    "as_async_tensor",
    "install",
    "local_of",
    "make_dtensor",
    "make_spec",
    "partial_partition",
    "partial_reduce",
    "rank_in_mesh",
    "reduce_scatter_single",
    "spec_of",
    "stock",
]
