"""What vescale needs of torch's internals, as a table, and the check that the installed torch has it.

Every private name that this package imports or replaces is listed. Where vescale passes arguments by position or name, or
replaces a function, the parameters it relies on are listed too. A name that an optional feature needs costs only that
feature where it is missing.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

import torch

from vescale.errors import Coded

__all__ = [
    "CHECKPOINTS",
    "CUDA_KERNELS",
    "ESTIMATES",
    "EXACT_MATCHES",
    "NEEDS",
    "OBSERVATION",
    "OPTIONAL",
    "Need",
    "UnsupportedTorchError",
    "lacking",
    "require",
    "self_check",
]

# Optional features, as errors and `vescale env` name them.
CHECKPOINTS = "torch.distributed.checkpoint of DTensors with vescale's placements"
EXACT_MATCHES = "sharding decisions without a search (the first run of an op takes 0.7 s on three mesh axes without)"
OBSERVATION = "observing collectives (hang report, communication trace, verify)"
ESTIMATES = "estimates (vescale.estimate: ranks that do not exist)"
CUDA_KERNELS = "CUDA kernels compiled at run time (random numbers on a GPU are slower without)"


class UnsupportedTorchError(Coded, ImportError):
    """The installed torch lacks something that vescale builds on."""

    code = "VS1701"


@dataclass(frozen=True)
class Need:
    """One private name.

    Attributes:
        module: where it is.
        path: its name there; ``Class.method`` for members, ``a|b`` where either will do.
        parameters: parameters that it must have, in this order among its own.
        uses: names that its code must mention: what a function that is not replaced leaves for one that is.
        feature: the optional feature that needs it; "" if nothing works without it.
    """

    module: str
    path: str
    parameters: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    feature: str = ""


def _parsed(table: str, feature: str = "") -> tuple[Need, ...]:
    """The names of a table: ``module: name; name(parameters) uses name, name; ...``. Indented lines continue a line."""
    found = []
    for line in table.strip().replace("\n    ", " ").splitlines():
        module, _, names = line.partition(": ")
        for entry in names.split("; "):
            name, _, uses = entry.partition(" uses ")
            path, _, parameters = name.rstrip(")").partition("(")
            found.append(Need(module, path, _names(parameters), _names(uses), feature))
    return tuple(found)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(", ")) if text else ()


NEEDS = _parsed("""
torch: Tensor.register_post_accumulate_grad_hook(hook); _assert_async; _foreach_copy_; _foreach_mul_; _foreach_norm;
    _meta_registrations
torch._C: DisableTorchFunction; _current_autograd_node; _functorch.get_unwrapped;
    _functorch.is_functorch_wrapped_tensor; _functorch.peek_interpreter_stack; _current_graph_task_id;
    _disabled_torch_function_impl; DispatchKey.CompositeImplicitAutograd; _clear_DTensor_sharding_propagator_cache;
    _dispatch_get_all_op_names; _dispatch_has_kernel_for_dispatch_key; _storage_Use_Count; _will_engine_execute_node;
    _dynamo.eval_frame.set_eval_frame; _VariableFunctions._pack_padded_sequence;
    _VariableFunctions._pad_packed_sequence; _len_torch_dispatch_stack
torch._C._autograd: _get_sequence_nr; _unsafe_set_version_counter; _set_creation_meta; CreationMeta.DEFAULT
torch._C._distributed_c10d: _register_work
torch._guards: detect_fake_mode(inputs)
torch._ops: OpOverload
torch._subclasses.fake_tensor: DataDependentOutputException; DynamicOutputShapeException; FakeTensor
torch.amp.grad_scaler: GradScaler._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
torch.autograd: Variable._execution_engine; _engine_run_backward
torch.autograd.forward_ad: _current_level
torch.autograd.profiler: _is_profiler_enabled
torch.distributed: ProcessGroup._device_types; ProcessGroup._get_backend; _Work;
    all_gather_single|all_gather_into_tensor; reduce_scatter_single|reduce_scatter_tensor
torch.distributed._composable.contract: STATE_KEY; REGISTRY_KEY; RegistryItem
torch.distributed.fsdp._fully_shard._fsdp_common: _is_composable_with_fsdp(module)
torch.distributed._functional_collectives: all_to_all_single(self, output_split_sizes, input_split_sizes, group);
    wait_tensor(tensor); AsyncCollectiveTensor
torch.distributed.device_mesh: DeviceMesh._concatenate(device_mesh_list); DeviceMesh.__init__(_init_backend);
    _mesh_resources.get_current_mesh; DeviceMesh._get_root_mesh
torch.distributed.distributed_c10d: _get_default_group; _get_default_timeout; _world.pg_map;
    _new_process_group_helper(group_size, group_rank, global_ranks_in_group, backend, store, group_name, timeout,
    device_id, group_desc)
torch.distributed.fsdp: fully_shard.__wrapped__; FSDPModule._get_fsdp_state
torch.distributed.tensor: DTensor.redistribute(device_mesh, placements, async_op, forward_dtype, backward_dtype);
    DTensor.to_local(grad_placements) uses _ToTorchTensor; DTensor.from_local(local_tensor, device_mesh, placements,
    run_check, shape, stride); DTensor._op_dispatcher.sharding_propagator; DTensor._op_dispatcher._custom_op_handlers;
    DTensor._op_dispatcher.unwrap_to_op_info(op_call, args, kwargs);
    DTensor._op_dispatcher._propagate_op_sharding_dispatch_slow_path(op_call, args, kwargs, op_info, try_cache);
    DTensor._op_dispatcher.redistribute_local_args(op_info, suggested_input_schema, use_val_from_redistribute_schema);
    DTensor._op_dispatcher._try_replicate_spec_for_scalar_tensor(op_call, tensor_arg, compute_mesh);
    DTensor._op_dispatcher._dispatch_fast_path_python_tail(op_call, args, kwargs, compute_mesh, output_sharding,
    local_results, participating, is_inplace_op, is_out_variant_op) uses get_active_debug_mode;
    DTensor._op_dispatcher._dispatch_get_local_results_slow_path(op_call, args, op_info);
    DTensor._op_dispatcher.wrap(res, spec); DTensor.full_tensor(grad_placements); DTensor.__create_write_items__(fqn);
    DTensor.__create_chunk_list__; DTensor.__get_tensor_shard__(index)
torch.distributed.tensor._api: redistribute_local_tensor(local_tensor, current_spec, target_spec, async_op);
    distribute_tensor(tensor, device_mesh, placements, src_data_rank); _ToTorchTensor.forward uses dtensor_spec,
    grad_placements; _ToTorchTensor.backward(ctx, grad_output); _dtensor_init_helper; _mesh_resources.get_current_mesh;
    assert_no_mixed_partial_types; Redistribute.apply; _FromTorchTensor.apply
torch.distributed.tensor._dispatch: redistribute_local_tensor(local_tensor, current_spec, target_spec, async_op);
    get_active_debug_mode; pytree.tree_leaves
torch.distributed.tensor._dtensor_spec: DTensorSpec(mesh, placements, tensor_meta);
    DTensorSpec.compute_default_shard_order(placements); TensorMeta(shape, stride, dtype)
torch.distributed.tensor._op_schema: OpSchema(op, args_schema, kwargs_schema, schema_info); OpSpec;
    OutputSharding(output_spec, redistribute_schema, use_val_from_redistribute_schema);
    OpStrategy; RuntimeSchemaInfo(static_argnum, static_kwargkey, needs_pytree)
torch.distributed.tensor._redistribute: _gen_transform_infos; clear_redistribute_planner_cache;
    redistribute_local_tensor(local_tensor, current_spec, target_spec, async_op)
torch.distributed.tensor._sharding_prop: ShardingPropagator.propagate_op_sharding_non_cached(op_schema);
    ShardingPropagator._propagate_tensor_meta_non_cached(op_schema)
torch.distributed.tensor._utils: ExplicitRedistributionContext._local;
    ExplicitRedistributionContext.observe_redistribution(src_spec, dst_spec)
torch.distributed.tensor.placement_types: _MaskPartial; _StridedShard; Partial._reduce_value(tensor, mesh, mesh_dim)
torch.nn.utils.clip_grad: _get_total_norm(tensors, norm_type, error_if_nonfinite, foreach)
torch.overrides: _get_current_function_mode_stack; TorchFunctionMode
torch.utils._device: DeviceContext
torch.utils._python_dispatch: TorchDispatchMode; _disable_current_modes; _get_current_dispatch_mode_stack;
    return_and_correct_aliasing(func, args, kwargs, out)
torch.utils._pytree: tree_flatten(tree); tree_leaves(tree); tree_map(func, tree); tree_map_only;
    tree_unflatten(leaves, treespec)
torch.utils.checkpoint: _checkpoint_without_reentrant_generator(fn); CheckpointFunction.forward(ctx, run_function);
    CheckpointFunction.backward(ctx); _StopRecomputationError
""")

OPTIONAL = (
    *_parsed(
        """
torch._C._distributed_c10d: _unregister_process_group; FakeWork.wait
torch.distributed.distributed_c10d: _World; _world
torch.testing._internal.distributed.fake_pg: FakeStore
""",
        ESTIMATES,
    ),
    *_parsed(
        """
torch.distributed.tensor._sharding_prop: _expand_single_dim_strategy_to_mesh(mesh, op_schema, output_tensor_meta)
torch.distributed.tensor._ops.single_dim_strategy: _PreparedSingleDimStrategy.try_propagate
torch.distributed.tensor._ops.utils: is_tensor_shardable(shape, spec)
torch.distributed.tensor._collective_utils: redistribute_cost(current_spec, target_spec)
torch.distributed.tensor._ops._math_ops: _infer_reduction_dims(dims_arg, ndim)
torch.distributed.tensor._decompositions: DecompShardingStrategy._get_candidate_placements(op_schema)
torch.distributed.tensor._ops.single_dim_strategy: _get_neighbor_placements(allowed_sharding, allowed_partial, current)
""",
        EXACT_MATCHES,
    ),
    *_parsed(
        """
torch.distributed._state_dict_utils: _distribute_tensors(local_state_dict, keys, device, pg)
torch.distributed.checkpoint.default_planner: _create_default_metadata_only_plan(state_dict);
    create_default_local_load_plan(state_dict, metadata, strict)
torch.distributed.checkpoint.filesystem: _FileSystemWriter.prepare_global_plan(plans)
torch.distributed.checkpoint.planner_helpers: _create_default_metadata_only_plan(state_dict)
torch.distributed.checkpoint.state_dict: _broadcast_state_dict(full_state_dict, local_state_dict);
    _distribute_state_dict(full_state_dict, local_state_dict)
""",
        CHECKPOINTS,
    ),
    *_parsed(
        """
torch: library.Library._destroy
torch._C: _dispatch_keyset_full_after
torch.distributed: _Work.unbox
""",
        OBSERVATION,
    ),
    *_parsed(
        """
torch.cuda._utils: _cuda_load_module; _get_gpu_rtc_library|_get_nvrtc_library
""",
        CUDA_KERNELS,
    ),
)


def lacking(feature: str) -> list[str]:
    """What an optional feature needs and this torch does not have."""
    return [found for need in OPTIONAL if need.feature == feature and (found := _lack(need)) is not None]


def require(feature: str) -> None:
    """Raise UnsupportedTorchError, which names what is missing, where this torch has not all that the feature needs."""
    missing = lacking(feature)
    if missing:
        lines = "\n  ".join(missing)
        raise UnsupportedTorchError(
            f"torch {torch.__version__} lacks what vescale needs for {feature}:\n  {lines}\nexpected: the internals of "
            "torch 2.13; do without the feature, or install a torch version that has them"
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
