"""Every private PyTorch name that vescale uses, under a stable name, and the one ``install()``."""

from vescale.compat.checkpoint import CheckpointHooks
from vescale.compat.collectives import AsyncCollectiveTensor, all_gather_single, as_async_tensor, reduce_scatter_single
from vescale.compat.dispatch import (
    OpSchema,
    OutputSharding,
    clear_sharding_cache,
    decompose,
    has_results,
    is_view,
    native_sharding,
    observe_redistribution,
    output_meta,
    schema_arguments,
    static_keywords,
    with_aliasing,
)
from vescale.compat.dtensor import (
    DTensorSpec,
    MaskPartial,
    StridedShard,
    TensorMeta,
    current_mesh,
    local_of,
    make_dtensor,
    make_spec,
    partial_partition,
    partial_reduce,
    rank_in_mesh,
    spec_of,
)
from vescale.compat.groups import make_group
from vescale.compat.install import DTensorHooks, install, stock
from vescale.compat.needs import UnsupportedTorchError, self_check

__all__ = [
    "AsyncCollectiveTensor",
    "CheckpointHooks",
    "DTensorHooks",
    "DTensorSpec",
    "MaskPartial",
    "OpSchema",
    "OutputSharding",
    "StridedShard",
    "TensorMeta",
    "UnsupportedTorchError",
    "all_gather_single",
    "as_async_tensor",
    "clear_sharding_cache",
    "current_mesh",
    "decompose",
    "has_results",
    "install",
    "is_view",
    "local_of",
    "make_dtensor",
    "make_group",
    "make_spec",
    "native_sharding",
    "observe_redistribution",
    "output_meta",
    "partial_partition",
    "partial_reduce",
    "rank_in_mesh",
    "reduce_scatter_single",
    "schema_arguments",
    "self_check",
    "spec_of",
    "static_keywords",
    "stock",
    "with_aliasing",
]
