"""Every private PyTorch name that vescale uses, under a stable name, and the one ``install()``."""

from vescale.compat.needs import UnsupportedTorchError, self_check

try:
    from vescale.compat.checkpoint import CheckpointHooks
    from vescale.compat.checkpointing import install_checkpointing
    from vescale.compat.collectives import (
        AsyncCollectiveTensor,
        all_gather_single,
        as_async_tensor,
        is_traced,
        reduce_scatter_single,
        traced_all_to_all,
    )
    from vescale.compat.deferred import without_modes
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
    from vescale.compat.dispatcher import (
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
except (ImportError, AttributeError):
    self_check()  # an error that names all that this torch lacks, instead of the first
    raise

__all__ = [
    "AsyncCollectiveTensor",
    "CheckpointHooks",
    "DTensorHooks",
    "DTensorSpec",
    "DispatchListener",
    "MaskPartial",
    "OpSchema",
    "OutputSharding",
    "StridedShard",
    "TensorMeta",
    "UnsupportedTorchError",
    "all_gather_single",
    "as_async_tensor",
    "clear_sharding_cache",
    "current_autograd_node",
    "current_mesh",
    "decompose",
    "has_results",
    "install",
    "install_checkpointing",
    "install_dispatch",
    "is_traced",
    "is_view",
    "local_of",
    "make_dtensor",
    "make_group",
    "make_spec",
    "native_sharding",
    "no_torch_function",
    "node_sequence",
    "observe_redistribution",
    "output_meta",
    "partial_partition",
    "partial_reduce",
    "rank_in_mesh",
    "reduce_scatter_single",
    "schema_arguments",
    "self_check",
    "sequence_number",
    "spec_of",
    "static_keywords",
    "stock",
    "stock_dispatch",
    "traced_all_to_all",
    "with_aliasing",
    "without_modes",
]
