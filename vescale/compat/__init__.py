"""Every private PyTorch name that vescale uses, under a stable name, and the one ``install()``."""

from vescale.compat.needs import UnsupportedTorchError, self_check

try:
    from vescale.compat.autograd import (
        TELLS_HOLDERS,
        are_unheld,
        at_end_of_backward,
        in_backward,
        is_captured,
        num_storage_users,
        queue_after_backward,
        run_post_accumulate_hooks,
        set_versions,
    )
    from vescale.compat.c10d_ops import CollectiveKernels, group_description, on_completion
    from vescale.compat.checkpoint import CheckpointHooks
    from vescale.compat.checkpointing import install_checkpointing
    from vescale.compat.collectives import (
        AsyncCollectiveTensor,
        all_gather_single,
        as_async_tensor,
        backend_memory_pool,
        is_traced,
        reduce_scatter_single,
        traced_all_to_all,
    )
    from vescale.compat.containers import map_tensors, tensors_in
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
        tell_move,
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
        root_mesh,
        set_local,
        spec_of,
    )
    from vescale.compat.foreach import (
        foreach_add_,
        foreach_copy_,
        foreach_mul_,
        foreach_norm,
        foreach_scale_,
        has_foreach,
    )
    from vescale.compat.groups import make_group
    from vescale.compat.hook_gate import HookGate
    from vescale.compat.install import DTensorHooks, install, stock
    from vescale.compat.meshes import concatenate_meshes, flatten_mesh
    from vescale.compat.store import default_store, default_timeout, is_alone, own_connection
except (ImportError, AttributeError):
    self_check()  # an error that names all that this torch lacks, instead of the first
    raise

__all__ = [
    "TELLS_HOLDERS",
    "AsyncCollectiveTensor",
    "CheckpointHooks",
    "CollectiveKernels",
    "DTensorHooks",
    "DTensorSpec",
    "DispatchListener",
    "HookGate",
    "MaskPartial",
    "OpSchema",
    "OutputSharding",
    "StridedShard",
    "TensorMeta",
    "UnsupportedTorchError",
    "all_gather_single",
    "are_unheld",
    "as_async_tensor",
    "at_end_of_backward",
    "backend_memory_pool",
    "clear_sharding_cache",
    "concatenate_meshes",
    "current_autograd_node",
    "current_mesh",
    "decompose",
    "default_store",
    "default_timeout",
    "flatten_mesh",
    "foreach_add_",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "foreach_scale_",
    "group_description",
    "has_foreach",
    "has_results",
    "in_backward",
    "install",
    "install_checkpointing",
    "install_dispatch",
    "is_alone",
    "is_captured",
    "is_traced",
    "is_view",
    "local_of",
    "make_dtensor",
    "make_group",
    "make_spec",
    "map_tensors",
    "native_sharding",
    "no_torch_function",
    "node_sequence",
    "num_storage_users",
    "observe_redistribution",
    "on_completion",
    "output_meta",
    "own_connection",
    "partial_partition",
    "partial_reduce",
    "queue_after_backward",
    "rank_in_mesh",
    "reduce_scatter_single",
    "root_mesh",
    "run_post_accumulate_hooks",
    "schema_arguments",
    "self_check",
    "sequence_number",
    "set_local",
    "set_versions",
    "spec_of",
    "static_keywords",
    "stock",
    "stock_dispatch",
    "tell_move",
    "tensors_in",
    "traced_all_to_all",
    "with_aliasing",
    "without_modes",
]
