"""Every private PyTorch name that vescale uses, under a stable name, and the one ``install()``."""

from vescale.compat.checkpointing import install_checkpointing
from vescale.compat.collectives import AsyncCollectiveTensor, all_gather_single, as_async_tensor, reduce_scatter_single
from vescale.compat.dispatch import (
    DispatchListener,
    current_autograd_node,
    install_dispatch,
    no_torch_function,
    node_sequence,
    sequence_number,
    stock_dispatch,
)
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
    "DispatchListener",
    "MaskPartial",
    "StridedShard",
    "TensorMeta",
    "all_gather_single",
    "as_async_tensor",
    "current_autograd_node",
    "install",
    "install_checkpointing",
    "install_dispatch",
    "local_of",
    "make_dtensor",
    "make_spec",
    "no_torch_function",
    "node_sequence",
    "partial_partition",
    "partial_reduce",
    "rank_in_mesh",
    "reduce_scatter_single",
    "sequence_number",
    "spec_of",
    "stock",
    "stock_dispatch",
]
