"""What vescale needs of torch's internals, as a table, and the check that the installed torch has it.

Every private name that this package imports or replaces is listed. Where vescale passes arguments by position or name, or
replaces a function, the parameters it relies on are listed too.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["NEEDS", "OPTIONAL", "Need", "UnsupportedTorchError", "self_check"]


class UnsupportedTorchError(ImportError):
    """The installed torch lacks something that vescale builds on."""


@dataclass(frozen=True)
class Need:
    """One private name.

    Attributes:
        module: where it is.
        path: its name there; ``Class.method`` for members, ``a|b`` where either will do.
        parameters: parameters that it must have, in this order among its own.
        uses: names that its code must mention: what a function that is not replaced leaves for one that is.
        has_plain_code: it is a function of Python, and no closure, whose code can be exchanged for another's.
    """

    module: str
    path: str
    parameters: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    has_plain_code: bool = False


_TENSOR = "torch.distributed.tensor"
_CHECKPOINT = "torch.distributed.checkpoint"
_LOCAL = ("local_tensor", "current_spec", "target_spec", "async_op")

NEEDS: tuple[Need, ...] = (
    Need(f"{_TENSOR}._api", "redistribute_local_tensor", _LOCAL),
    Need(
        f"{_TENSOR}._api",
        "distribute_tensor",
        ("tensor", "device_mesh", "placements", "src_data_rank"),
        has_plain_code=True,
    ),
    Need(f"{_TENSOR}._dispatch", "redistribute_local_tensor", _LOCAL),
    Need(f"{_TENSOR}._redistribute", "redistribute_local_tensor", _LOCAL),
    Need(
        _TENSOR,
        "DTensor.redistribute",
        ("device_mesh", "placements", "async_op", "forward_dtype", "backward_dtype"),
    ),
    Need(_TENSOR, "DTensor.to_local", ("grad_placements",), uses=("_ToTorchTensor",)),
    Need(f"{_TENSOR}._api", "_ToTorchTensor.forward", uses=("dtensor_spec", "grad_placements")),
    Need(f"{_TENSOR}._api", "_ToTorchTensor.backward", ("ctx", "grad_output")),
    Need(
        _TENSOR,
        "DTensor.from_local",
        (
            "local_tensor",
            "device_mesh",
            "placements",
            "run_check",
            "shape",
            "stride",
        ),  # what more there is is passed on
    ),
    Need(_TENSOR, "DTensor._op_dispatcher.sharding_propagator"),
    Need(_TENSOR, "DTensor._op_dispatcher._custom_op_handlers"),
    Need(_TENSOR, "DTensor._op_dispatcher.unwrap_to_op_info", ("op_call", "args", "kwargs")),
    Need(
        _TENSOR,
        "DTensor._op_dispatcher._propagate_op_sharding_dispatch_slow_path",
        ("op_call", "args", "kwargs", "op_info", "try_cache"),
    ),
    Need(
        _TENSOR,
        "DTensor._op_dispatcher.redistribute_local_args",
        ("op_info", "suggested_input_schema", "use_val_from_redistribute_schema"),
    ),
    Need(
        _TENSOR,
        "DTensor._op_dispatcher._try_replicate_spec_for_scalar_tensor",
        ("op_call", "tensor_arg", "compute_mesh"),
    ),
    Need(
        _TENSOR,
        "DTensor._op_dispatcher._dispatch_fast_path_python_tail",
        (
            "op_call",
            "args",
            "kwargs",
            "compute_mesh",
            "output_sharding",
            "local_results",
            "participating",
            "is_inplace_op",
            "is_out_variant_op",
        ),
    ),
    Need(_TENSOR, "DTensor._op_dispatcher._dispatch_get_local_results_slow_path", ("op_call", "args", "op_info")),
    Need(_TENSOR, "DTensor._op_dispatcher.wrap", ("res", "spec")),
    Need("torch._subclasses.fake_tensor", "DataDependentOutputException"),
    Need("torch._subclasses.fake_tensor", "DynamicOutputShapeException"),
    Need("torch._subclasses.fake_tensor", "FakeTensor"),
    Need("torch._ops", "OpOverload"),
    Need("torch.utils._python_dispatch", "TorchDispatchMode"),
    Need("torch.utils._python_dispatch", "_disable_current_modes"),
    Need("torch.utils._pytree", "tree_flatten", ("tree",)),
    Need("torch.utils._pytree", "tree_leaves", ("tree",)),
    Need("torch.utils._pytree", "tree_map", ("func", "tree")),
    Need("torch.utils._pytree", "tree_map_only"),
    Need("torch._C", "DisableTorchFunction"),
    Need("torch._C", "_current_autograd_node"),
    Need("torch._C", "_functorch.peek_interpreter_stack"),
    Need("torch._C", "_current_graph_task_id"),
    Need("torch.autograd", "Variable._execution_engine"),
    Need("torch", "Tensor.register_post_accumulate_grad_hook", ("hook",)),
    Need("torch.distributed.device_mesh", "DeviceMesh._concatenate", ("device_mesh_list",)),
    Need("torch.distributed.device_mesh", "DeviceMesh.__init__", ("_init_backend",)),
    Need("torch._C._autograd", "_get_sequence_nr"),
    Need("torch._C._autograd", "_unsafe_set_version_counter"),
    Need("torch.utils.checkpoint", "_checkpoint_without_reentrant_generator", ("fn",)),
    Need("torch.utils.checkpoint", "CheckpointFunction.forward", ("ctx", "run_function")),
    Need(f"{_TENSOR}._sharding_prop", "ShardingPropagator.propagate_op_sharding_non_cached", ("op_schema",)),
    Need(f"{_TENSOR}._sharding_prop", "ShardingPropagator._propagate_tensor_meta_non_cached", ("op_schema",)),
    Need(f"{_TENSOR}._dtensor_spec", "DTensorSpec", ("mesh", "placements", "tensor_meta")),
    Need(f"{_TENSOR}._dtensor_spec", "TensorMeta", ("shape", "stride", "dtype")),
    Need(f"{_TENSOR}._op_schema", "OpSchema", ("op", "args_schema", "kwargs_schema", "schema_info")),
    Need(
        f"{_TENSOR}._op_schema",
        "OutputSharding",
        ("output_spec", "redistribute_schema", "use_val_from_redistribute_schema"),
    ),
    Need(f"{_TENSOR}._op_schema", "RuntimeSchemaInfo", ("static_argnum", "static_kwargkey", "needs_pytree")),
    Need(f"{_TENSOR}._utils", "ExplicitRedistributionContext._local"),
    Need(f"{_TENSOR}._utils", "ExplicitRedistributionContext.observe_redistribution", ("src_spec", "dst_spec")),
    Need(f"{_TENSOR}.placement_types", "_MaskPartial"),
    Need(f"{_TENSOR}.placement_types", "_StridedShard", ()),
    Need(f"{_TENSOR}.placement_types", "Partial._reduce_value", ("tensor", "mesh", "mesh_dim")),
    Need(f"{_TENSOR}.placement_types", "Partial._partition_value", ("tensor", "mesh", "mesh_dim")),
    Need(_TENSOR, "DTensor.full_tensor", ("grad_placements",)),
    Need(_TENSOR, "DTensor.__create_write_items__", ("fqn",)),
    Need(_TENSOR, "DTensor.__create_chunk_list__"),
    Need(_TENSOR, "DTensor.__get_tensor_shard__", ("index",)),
    Need(f"{_CHECKPOINT}.planner_helpers", "_create_default_metadata_only_plan", ("state_dict",)),
    Need(f"{_CHECKPOINT}.default_planner", "_create_default_metadata_only_plan", ("state_dict",)),
    Need(f"{_CHECKPOINT}.default_planner", "create_default_local_load_plan", ("state_dict", "metadata", "strict")),
    Need(f"{_CHECKPOINT}.filesystem", "_FileSystemWriter.prepare_global_plan", ("plans",)),
    Need(f"{_CHECKPOINT}.state_dict", "_broadcast_state_dict", ("full_state_dict", "local_state_dict")),
    Need(f"{_CHECKPOINT}.state_dict", "_distribute_state_dict", ("full_state_dict", "local_state_dict")),
    Need(
        "torch.distributed._state_dict_utils",
        "_distribute_tensors",
        ("local_state_dict", "keys", "device", "pg"),
    ),
    Need("torch.distributed.device_mesh", "_mesh_resources.get_current_mesh"),
    Need("torch.distributed.distributed_c10d", "_get_default_group"),
    Need("torch.distributed.distributed_c10d", "_get_default_timeout"),
    Need("torch.distributed", "ProcessGroup._device_types"),
    Need("torch.distributed", "ProcessGroup._get_backend"),
    Need("torch.distributed.distributed_c10d", "_world.pg_map"),
    Need(
        "torch.distributed.distributed_c10d",
        "_new_process_group_helper",
        (
            "group_size",
            "group_rank",
            "global_ranks_in_group",
            "backend",
            "store",
            "group_name",
            "timeout",
            "device_id",
            "group_desc",
        ),
    ),
    Need(f"{_TENSOR}._api", "_dtensor_init_helper"),
    Need(f"{_TENSOR}._api", "_mesh_resources.get_current_mesh"),
    Need("torch._C", "_disabled_torch_function_impl"),
    Need("torch.utils._python_dispatch", "return_and_correct_aliasing", ("func", "args", "kwargs", "out")),
    Need("torch._C", "DispatchKey.CompositeImplicitAutograd"),
    Need("torch._C", "_clear_DTensor_sharding_propagator_cache"),
    Need("torch._C", "_dispatch_has_kernel_for_dispatch_key"),
    Need("torch._C", "_storage_Use_Count"),
    Need("torch.autograd.profiler", "_is_profiler_enabled"),
    Need("torch._C", "_will_engine_execute_node"),
    Need("torch.distributed.device_mesh", "DeviceMesh._get_root_mesh"),
    Need("torch", "_foreach_add_"),
    Need("torch", "_foreach_copy_"),
    Need("torch", "_foreach_mul_"),
    Need("torch", "_foreach_norm"),
    Need("torch._C._distributed_c10d", "_register_work"),
    Need("torch._C._distributed_c10d", "Work.unbox"),
    Need("torch._C", "_dispatch_keyset_full_after"),
    Need("torch", "library.Library._destroy"),
    Need("torch._C", "_dynamo.eval_frame.set_eval_frame"),
    Need("torch._C", "_VariableFunctions._pack_padded_sequence"),
    Need("torch._C", "_VariableFunctions._pad_packed_sequence"),
    Need("torch._C", "_len_torch_dispatch_stack", ()),
    Need("torch._guards", "detect_fake_mode", ("inputs",)),
    Need(
        "torch.distributed._functional_collectives",
        "all_to_all_single",
        ("self", "output_split_sizes", "input_split_sizes", "group"),
    ),
    Need("torch.distributed._functional_collectives", "wait_tensor", ("tensor",)),
    Need("torch.distributed._functional_collectives", "AsyncCollectiveTensor"),
    Need("torch.distributed", "_Work"),
    Need("torch.distributed._composable.contract", "STATE_KEY"),
    Need("torch.distributed._composable.contract", "REGISTRY_KEY"),
    Need("torch.distributed._composable.contract", "RegistryItem"),
    Need("torch.distributed.fsdp", "fully_shard.__wrapped__"),
    Need("torch.distributed.fsdp", "FSDPModule._get_fsdp_state"),
    Need("torch.distributed", "all_gather_single|all_gather_into_tensor"),
    Need("torch.distributed", "reduce_scatter_single|reduce_scatter_tensor"),
)

# Where these are missing something is slower, and right all the same; whoever uses them falls back, and says so.
OPTIONAL: tuple[Need, ...] = (
    Need("torch.cuda._utils", "_cuda_load_module"),
    Need("torch.cuda._utils", "_get_gpu_rtc_library|_get_nvrtc_library"),
    Need(
        f"{_TENSOR}._sharding_prop", "_expand_single_dim_strategy_to_mesh", ("mesh", "op_schema", "output_tensor_meta")
    ),
    Need(f"{_TENSOR}._ops.single_dim_strategy", "_PreparedSingleDimStrategy.try_propagate"),
)


def self_check() -> None:
    """Verify that the installed torch has every name in :data:`NEEDS`, with the parameters relied on.

    Raises UnsupportedTorchError that names all that is missing. Communicates nothing and changes nothing.
    """
    missing = [found for need in NEEDS if (found := _lack(need)) is not None]
    if missing:
        lines = "\n  ".join(missing)
        raise UnsupportedTorchError(
            f"torch {torch.__version__} lacks what vescale builds on:\n  {lines}\nexpected: the internals of torch 2.13, "
            "on which vescale is tested; install a torch version that has them, or report this version"
        )


def _lack(need: Need) -> str | None:
    """What is wrong with one name, or None."""
    try:
        module = importlib.import_module(need.module)
    except ImportError:
        return f"module {need.module} (for {need.path})"
    name = f"{need.module}.{need.path}"
    found: Any = None
    for path in need.path.split("|"):
        found = _resolve(module, path)
        if found is not None:
            break
    if found is None:
        return name
    unused = [word for word in need.uses if word not in inspect.unwrap(found).__code__.co_names]
    if unused:
        return f"{name}: code that uses {', '.join(unused)}"
    if need.has_plain_code and (not inspect.isfunction(found) or found.__code__.co_freevars):
        return f"{name}: a plain function; it is {found!r}" + (" with a closure" if inspect.isfunction(found) else "")
    return _parameters_lacking(found, name, need.parameters)


def _resolve(found: Any, path: str) -> Any:
    for part in path.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found


def _parameters_lacking(function: Any, name: str, wanted: tuple[str, ...]) -> str | None:
    if not wanted:
        return None
    own = [parameter for parameter in inspect.signature(function).parameters if parameter in wanted]
    if tuple(own) == wanted:
        return None
    return f"{name}: parameters {', '.join(wanted)} in this order; it has {inspect.signature(function)}"
