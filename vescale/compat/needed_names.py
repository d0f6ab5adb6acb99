"""The private names of torch that vescale uses, which :mod:`vescale.compat.needs` looks for in the installed one.

A line is ``module: entry; entry; ...``, and indented lines continue it. An entry is a name in the module, ``Class.member``
for members, ``a|b`` where either will do. What follows the name must hold, too:

* ``(parameters)``: the function has these, in this order among its own; vescale passes them, or replaces the function;
* ``uses a, b``: its code mentions these, what a function that is not replaced leaves for one that is;
* ``locals a, b``: its frame has these local variables, which vescale reads.

tests/compat/test_needed_names.py compares the tables with the source: a name that is used is listed, and nothing else is.
"""

from __future__ import annotations

# Optional features, as errors and `vescale env` name them.
ATTENTION_KERNELS = "attention kernels of some devices and versions (their ops are not met without)"
BATCHED_GRADIENTS = "batches of gradients of DTensors (torch.autograd.grad(..., is_grads_batched=True))"
CHECKPOINTS = "torch.distributed.checkpoint of DTensors with vescale's placements"
COMPILED_CODE = "compiled code of DTensors in the caches of torch.compile (it is compiled anew without)"
COMPILED_GRADIENTS = "compiling a forward of sharded parameters that have gradients (torch.compile fails without)"
COUNTED_HOLDERS = "gradients that are taken without a copy (they are copied without)"
CUDA_KERNELS = "CUDA kernels compiled at run time (random numbers on a GPU are slower without)"
ESTIMATES = "estimates (vescale.estimate: ranks that do not exist)"
EXACT_MATCHES = "sharding decisions without a search (the first run of an op takes 0.7 s on three mesh axes without)"
GROUPED_PRODUCTS = "grouped_mm of float32 and float16 on tensors without values (experts run in bfloat16 alone without)"
OBSERVATION = "observing collectives (hang report, communication trace, verify)"
PIPELINES = "pipelines (schedules of torch.distributed.pipelining)"

REQUIRED_NAMES = """
torch: Tensor._backward_hooks; Tensor._base; Tensor._cdata; Tensor._is_zerotensor; Tensor._make_subclass;
    Tensor._is_view; Tensor._make_wrapper_subclass; Tensor._post_accumulate_grad_hooks; Tensor._typed_storage;
    Tensor._version; Tensor.register_post_accumulate_grad_hook(hook); UntypedStorage._cdata; _assert_async; _foreach_copy_;
    _foreach_mul_; _foreach_norm; _fused_sdp_choice; _meta_registrations; _ops; _tensor;
    ops._c10d_functional; ops.aten._adaptive_avg_pool2d_backward.default;
    ops.aten._amp_foreach_non_finite_check_and_unscale_.default; ops.aten._convolution; ops.aten._ctc_loss;
    ops.aten._foreach_lerp_;
    ops.aten._foreach_max.default; ops.aten._foreach_norm.Scalar; ops.aten._foreach_powsum.Scalar;
    ops.aten._fused_dropout.default; ops.aten._has_same_storage_numel.default; ops.aten._is_all_true.default;
    ops.aten._is_any_true.default; ops.aten._linalg_det.default;
    ops.aten._linalg_slogdet.default; ops.aten._local_scalar_dense.default; ops.aten._log_softmax.default;
    ops.aten._log_softmax_backward_data.default; ops.aten._sample_dirichlet; ops.aten._softmax.default;
    ops.aten._softmax_backward_data.default; ops.aten._standard_gamma; ops.aten._to_copy.default;
    ops.aten._unique; ops.aten._unique2; ops.aten._unsafe_index; ops.aten._unsafe_view.default; ops.c10d._allgather_base_;
    ops.c10d._reduce_scatter_base_
torch._C: Argument.alias_info; Argument.default_value; Argument.has_default_value; Argument.is_out; Argument.kwarg_only;
    Argument.name;
    Argument.type; DisableTorchFunction; DisableTorchFunctionSubclass; DispatchKey.ADInplaceOrView;
    DispatchKey.CPU; DispatchKey.CompositeExplicitAutograd;
    DispatchKey.CompositeExplicitAutogradNonFunctional; DispatchKey.CompositeImplicitAutograd; DispatchKey.Meta;
    FunctionSchema._is_view_op; FunctionSchema.arguments;
    FunctionSchema.is_mutable; FunctionSchema.name; FunctionSchema.overload_name; FunctionSchema.returns; TensorBase;
    _AliasInfo.before_set; _AliasInfo.is_write; _EnableTorchFunction; _FunctionBase._sequence_nr;
    _SetExcludeDispatchKeyGuard; _VariableFunctions._pack_padded_sequence; _VariableFunctions._pad_packed_sequence;
    _clear_DTensor_sharding_propagator_cache; _current_autograd_node; _current_graph_task_id;
    _disabled_torch_function_impl; _dispatch_dump; _dispatch_get_all_op_names;
    _dispatch_has_kernel_for_dispatch_key; _get_obj_in_tls; _is_key_in_tls; _stash_obj_in_tls;
    _dynamo.eval_frame.set_eval_frame; _functorch.get_unwrapped; _functorch.is_functorch_wrapped_tensor;
    _functorch.peek_interpreter_stack; _len_torch_dispatch_stack; _len_torch_function_stack; _storage_Use_Count;
    _jit_get_all_schemas; _will_engine_execute_node
torch._C._autograd: CreationMeta.DEFAULT; _get_creation_meta; _get_sequence_nr; _set_creation_meta;
    _top_saved_tensors_default_hooks;
    _unsafe_set_version_counter
torch._C._distributed_c10d: Backend.Options._timeout; Backend.mem_allocator; _register_work
torch._guards: detect_fake_mode(inputs)
torch._ops: OpOverload._overloadname; OpOverload._schema; OpOverload.decompose; OpOverload.namespace;
    OpOverload.overloadpacket; OpOverload.redispatch; OpOverload.tags
torch._subclasses.fake_tensor: DataDependentOutputException; DynamicOutputShapeException; FakeTensor
torch.amp.grad_scaler: GradScaler._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
torch.autograd: Variable._execution_engine.queue_callback; _engine_run_backward
torch.autograd.graph: _get_grad_fn_or_grad_acc
torch.autograd.function: BackwardCFunction.apply uses _forward_cls
torch.autograd.forward_ad: _current_level
torch.autograd.profiler: _is_profiler_enabled
torch.distributed: ProcessGroup._device_types; ProcessGroup._get_backend; _Work;
    all_gather_single|all_gather_into_tensor; reduce_scatter_single|reduce_scatter_tensor
torch.distributed._composable.contract: STATE_KEY; REGISTRY_KEY; RegistryItem
torch.distributed._functional_collectives: all_to_all_single(self, output_split_sizes, input_split_sizes, group);
    wait_tensor(tensor); AsyncCollectiveTensor(elem)
torch.distributed.device_mesh: DeviceMesh._concatenate(device_mesh_list); DeviceMesh.__init__(_init_backend);
    _mesh_resources.get_current_mesh; DeviceMesh._get_root_mesh
torch.distributed.distributed_c10d: _get_default_group; _get_default_timeout; _world.pg_map; _world.pg_group_ranks;
    _new_process_group_helper(group_size, group_rank, global_ranks_in_group, backend, store, group_name, timeout,
    device_id, group_desc)
torch.distributed.fsdp: fully_shard.__wrapped__; FSDPModule._get_fsdp_state; FSDPModule._set_unshard_async_op
torch.distributed.fsdp._fully_shard._fsdp_common: _is_composable_with_fsdp(module)
torch.distributed.fsdp._fully_shard._fully_shard: fully_shard uses _is_fsdp_managed_module, _fsdp_use_orig_params
torch.distributed.tensor: DTensor._local_tensor; DTensor._spec; DTensor.redistribute(device_mesh, placements, async_op,
    forward_dtype, backward_dtype); DTensor.to_local(grad_placements) uses _ToTorchTensor;
    DTensor.from_local(local_tensor, device_mesh, placements, run_check, shape, stride);
    DTensor._op_dispatcher._custom_op_handlers; DTensor._op_dispatcher._random_ops;
    DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_non_cached(op_schema);
    DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs;
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info;
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info_for_single_dim_strategy;
    DTensor._op_dispatcher.sharding_propagator.op_to_shape_and_stride_idx;
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear;
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached(op_schema);
    DTensor._op_dispatcher.unwrap_to_op_info(op_call, args, kwargs);
    DTensor._op_dispatcher._propagate_op_sharding_dispatch_slow_path(op_call, args, kwargs, op_info, try_cache);
    DTensor._op_dispatcher.redistribute_local_args(op_info, suggested_input_schema, use_val_from_redistribute_schema);
    DTensor._op_dispatcher._try_replicate_spec_for_scalar_tensor(op_call, tensor_arg, compute_mesh);
    DTensor._op_dispatcher._dispatch_fast_path_python_tail(op_call, args, kwargs, compute_mesh, output_sharding,
    local_results, participating, is_inplace_op, is_out_variant_op) uses get_active_debug_mode locals args, kwargs,
    op_call, participating, is_inplace_op, is_out_variant_op;
    DTensor._op_dispatcher._dispatch_get_local_results_slow_path(op_call, args, op_info);
    DTensor._op_dispatcher.wrap(res, spec); DTensor.full_tensor(grad_placements); DTensor.__create_write_items__(fqn);
    DTensor.__create_chunk_list__; DTensor.__get_tensor_shard__(index)
torch.distributed.tensor._api: _FromTorchTensor.apply; Redistribute.apply; assert_no_mixed_partial_types;
    redistribute_local_tensor(local_tensor, current_spec, target_spec, async_op);
    distribute_tensor(tensor, device_mesh, placements, src_data_rank); _FromTorchTensor; _ToTorchTensor.forward uses
    dtensor_spec, grad_placements; _ToTorchTensor.backward(ctx, grad_output); _dtensor_init_helper;
    _mesh_resources.get_current_mesh; distribute_module uses _distribute_module_applied
torch.distributed.tensor._dispatch: redistribute_local_tensor(local_tensor, current_spec, target_spec, async_op);
    get_active_debug_mode; pytree.tree_leaves
torch.distributed.tensor._dtensor_spec: DTensorSpec(mesh, placements, tensor_meta); DTensorSpec._hash;
    DTensorSpec._maybe_convert_StridedShard_to_shard_order(placements, mesh);
    DTensorSpec.compute_default_shard_order(placements); DTensorSpec.device_mesh; DTensorSpec.is_replicated;
    DTensorSpec.is_sharded; DTensorSpec.mesh; DTensorSpec.ndim; DTensorSpec.placements; DTensorSpec.shape;
    DTensorSpec.shard_order; DTensorSpec.stride; DTensorSpec.tensor_meta; DTensorSpec.use_strided_shard_as_shard_order;
    TensorMeta(shape, stride, dtype)
torch.distributed.tensor._op_schema: OpInfo.args_tree_spec; OpInfo.compute_mesh; OpInfo.flat_args_schema;
    OpInfo.local_args; OpInfo.output_sharding; OpInfo.schema; OpSchema(op, args_schema, kwargs_schema, schema_info);
    OpSchema.args_schema; OpSchema.args_strategy; OpSchema.get_mesh_from_args(validate); OpSchema.is_inplace_op;
    OpSchema.is_out_variant_op;
    OpSchema.kwargs_schema; OpSchema.kwargs_strategy; OpSchema.op; OpSchema.schema_info; OpStrategy(strategies);
    OutputSharding(output_spec, redistribute_schema, needs_redistribute, use_val_from_redistribute_schema);
    OutputSharding.needs_redistribute;
    OutputSharding.output_spec; OutputSharding.redistribute_schema; OutputSharding.use_val_from_redistribute_schema;
    RuntimeSchemaInfo.needs_pytree; RuntimeSchemaInfo.static_argnum; RuntimeSchemaInfo.static_kwargkey
torch.distributed.tensor._redistribute: _gen_transform_infos.cache_clear; clear_redistribute_planner_cache;
    redistribute_local_tensor(local_tensor, current_spec, target_spec, async_op)
torch.distributed.tensor._sharding_prop: ShardingPropagator._adjust_shape_and_stride_args;
    ShardingPropagator._propagate_tensor_meta_non_cached(op_schema)
torch.distributed.tensor._utils: ExplicitRedistributionContext._local;
    ExplicitRedistributionContext.observe_redistribution(src_spec, dst_spec) uses _active
torch.distributed.tensor.placement_types: _MaskPartial; _StridedShard.split_factor; Partial._reduce_value(tensor, mesh,
    mesh_dim)
torch.nn: Module._apply; Module._backward_hooks; Module._backward_pre_hooks; Module._buffers; Module._call_impl;
    Module._compiled_call_impl; Module._forward_hooks; Module._forward_hooks_always_called;
    Module._forward_hooks_with_kwargs; Module._forward_pre_hooks; Module._modules; Module._non_persistent_buffers_set;
    Module._parameters
torch.nn.init: _no_grad_trunc_normal_
torch.nn.modules.module: _global_backward_hooks; _global_backward_pre_hooks; _global_forward_hooks;
    _global_forward_hooks_with_kwargs; _global_forward_pre_hooks
torch.nn.parallel: DistributedDataParallel.__init__ uses _ddp_params_and_buffers_to_ignore
torch.nn.parameter: Parameter.__new__ uses _is_param
torch.nn.utils.clip_grad: _get_total_norm(tensors, norm_type, error_if_nonfinite, foreach)
torch.optim: Adadelta._init_group; Adagrad._init_group; Adam._init_group; Adamax._init_group; ASGD._init_group;
    NAdam._init_group; RAdam._init_group; RMSprop._init_group; Rprop._init_group; SGD._init_group; Adagrad.__init__ uses
    _need_device_dtype_check_for_fused
torch.optim.optimizer: _global_optimizer_pre_hooks
torch.overrides: _get_current_function_mode_stack; _pop_mode; _push_mode; TorchFunctionMode
torch.utils._device: DeviceContext
torch.utils._foreach_utils: _get_foreach_kernels_supported_devices()
torch.utils._python_dispatch: TorchDispatchMode; _disable_current_modes; _get_current_dispatch_mode_stack; _pop_mode();
    _push_mode(mode);
    return_and_correct_aliasing(func, args, kwargs, out)
torch.utils._pytree: tree_flatten(tree); tree_leaves(tree); tree_map(func, tree); tree_map_only; tree_unflatten(leaves,
    treespec)
torch.utils.checkpoint: _checkpoint_without_reentrant_generator_impl|_checkpoint_without_reentrant_generator(fn);
    CheckpointFunction.forward(ctx, run_function);
    CheckpointFunction.backward(ctx); _StopRecomputationError;
    _CheckpointFrame.check_recomputed_tensors_match(gid);
    _CheckpointFrame.get_inputs|_CheckpointFrame.check_recomputed_tensors_match;
    _CheckpointFrame.recompute_fn
"""

OPTIONAL_NAMES = {
    ESTIMATES: """
torch: ops.aten._safe_softmax; ops.aten._scaled_dot_product_efficient_attention;
    ops.aten._scaled_dot_product_flash_attention_for_cpu; ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
torch._C._distributed_c10d: _unregister_process_group; FakeWork.wait; Work._source_rank
torch.distributed.distributed_c10d: _World.group_count; _World.pg_backend_config; _World.pg_group_ranks; _World.pg_map;
    _World.pg_names; _World.pg_to_tag; _World.tags_to_pg; _world
torch.nn.parallel: DistributedDataParallel._register_builtin_comm_hook
torch.testing._internal.distributed: fake_pg
torch.testing._internal.distributed.fake_pg: FakeStore
""",
    EXACT_MATCHES: """
torch.distributed.device_mesh: DeviceMesh._is_current_rank_part_of_mesh
torch.distributed.tensor._collective_utils: redistribute_cost(current_spec, target_spec)
torch.distributed.tensor._decompositions: DecompShardingStrategy._get_candidate_placements(op_schema)
torch.distributed.tensor._op_schema: OpSpec.output_spec; OpSpec.output_specs; OpStrategy.strategies
torch.distributed.tensor._ops._math_ops: _infer_reduction_dims(dims_arg, ndim)
torch.distributed.tensor._ops.single_dim_strategy: _SingleDimStrategyInfo.func;
    _get_neighbor_placements(allowed_sharding, allowed_partial, current)
torch.distributed.tensor._ops.utils: expand_to_full_mesh_op_strategy(mesh, op_schema, single_mesh_dim_strategies) uses
    itertools; is_tensor_shardable(shape, spec)
torch.distributed.tensor._sharding_prop: _expand_single_dim_strategy_to_mesh(mesh, op_schema, output_tensor_meta)
""",
    CHECKPOINTS: """
torch.distributed._state_dict_utils: _distribute_tensors(local_state_dict, keys, device, pg)
torch.distributed.checkpoint.default_planner: _create_default_metadata_only_plan(state_dict);
    create_default_local_load_plan(state_dict, metadata, strict)
torch.distributed.checkpoint.filesystem: _FileSystemWriter.prepare_global_plan(plans);
    _FileSystemWriter.serialization_format
torch.distributed.checkpoint.planner_helpers: _create_default_metadata_only_plan(state_dict)
torch.distributed.checkpoint.state_dict: _broadcast_state_dict(full_state_dict, local_state_dict);
    _distribute_state_dict(full_state_dict, local_state_dict)
""",
    BATCHED_GRADIENTS: """
torch: _add_batch_dim; _remove_batch_dim
torch._C: _vmapmode_decrement_nesting; _vmapmode_increment_nesting
""",
    COMPILED_CODE: """
torch.distributed.tensor: DTensor._stable_hash_for_caching
""",
    COMPILED_GRADIENTS: """
torch._subclasses.meta_utils: _grad_context_compatible(symbolic_context, grad_desc)
""",
    COUNTED_HOLDERS: """
torch: Tensor._use_count
""",
    GROUPED_PRODUCTS: """
torch._meta_registrations: _meta_grouped_mm_common; _create_grouped_mm_output_tensor
""",
    OBSERVATION: """
torch: library.Library._destroy
torch._C: _dispatch_keyset_full_after
torch.distributed: _Work.unbox
""",
    PIPELINES: """
torch.distributed.pipelining.schedules: _Action.computation_type; _Action.microbatch_index; _Action.stage_index;
    _Action.sub_actions; PipelineScheduleMulti.__init__(stages, n_microbatches, loss_fn, scale_grads);
    _PipelineScheduleRuntime._load_csv; _PipelineScheduleRuntime.pipeline_order; _add_send_recv(compute_actions,
    stage_to_rank, num_stages); _simulate_comms_compute
torch.distributed.pipelining.stage: _PipelineStageBase._warmup_backward_result|_PipelineStageBase
""",
    CUDA_KERNELS: """
torch.cuda._utils: _cuda_load_module; _get_gpu_rtc_library|_get_nvrtc_library; _get_gpu_runtime_library
""",
    ATTENTION_KERNELS: """
torch: ops.aten._grouped_mm; ops.aten._scaled_grouped_mm; ops.aten._scaled_mm;
    ops.aten._scaled_dot_product_cudnn_attention; ops.aten._scaled_dot_product_efficient_attention;
    ops.aten._scaled_dot_product_flash_attention; ops.aten._scaled_dot_product_flash_attention_for_cpu;
    ops.aten._scaled_dot_product_fused_attention_overrideable
""",
}

# Fields of torch's own records that vescale makes, copies, or decides by instead of torch, in all supported versions: a
# version may lack some. One that is not listed could decide something, so that a torch that has it is refused.
KNOWN_FIELDS = """
torch.distributed._functional_collectives: AsyncCollectiveTensor elem, completed
torch.distributed.distributed_c10d: _World _comms, _default_pg, _pg_coalesce_state, _pg_flight_recorder_hooks
torch.distributed.tensor: DTensor _local_tensor, _spec
torch.distributed.tensor._dispatch: OpDispatcher _custom_op_handlers, _random_ops, _squeeze_inplace_ops,
    sharding_propagator
torch.distributed.tensor._dtensor_spec: DTensorSpec mesh, placements, tensor_meta, shard_order,
    use_strided_shard_as_shard_order, _hash; TensorMeta shape, stride, dtype
torch.distributed.tensor._op_schema: OpInfo compute_mesh, schema, flat_args_schema, local_args, local_kwargs,
    args_tree_spec, output_sharding; OpSchema op, args_schema, kwargs_schema, schema_info, _comparison_key; OpSpec
    output_specs, input_specs, redistribute_cost; OpStrategy strategies; OutputSharding output_spec,
    redistribute_schema, needs_redistribute, use_val_from_redistribute_schema; RuntimeSchemaInfo static_argnum,
    static_kwargkey, needs_pytree
torch.distributed.tensor._ops.single_dim_strategy: _PreparedSingleDimStrategy allow_unbacked_sharding,
    allow_uneven_sharding, allowed_partial_per_input, allowed_sharding_per_input, element_mesh, expanded_strategies,
    full_mesh_strategy_filter, num_inputs, num_outputs, output_metas, remapped_different_mesh_args, strategy_lookup;
    _SingleDimStrategyInfo func, allow_unbacked_sharding, allow_uneven_sharding, different_mesh_args,
    full_mesh_strategy_filter
torch.distributed.tensor._sharding_prop: ShardingPropagator decomp_strategy, op_single_dim_strategy_funcs,
    op_strategy_funcs, op_to_rules, op_to_scalar_shape_adjuster, op_to_schema_info,
    op_to_schema_info_for_single_dim_strategy, op_to_shape_and_stride_idx, propagate_op_sharding,
    squeeze_op_to_dims_variant
torch.distributed.tensor.placement_types: _MaskPartial reduce_op, mask_buffer, offset_shape, offset_dim
"""

# Names of C++ that torch does not document. The compiler checks them, and a helper is loaded by the torch that it was built
# for alone.
NATIVE_NAMES = """
at: _unsafe_view
at::_ops: broadcast_tensors::redispatch, cross_entropy_loss::redispatch, layer_norm::redispatch, linear::redispatch,
    matmul::redispatch, nll_loss_nd::redispatch, rms_norm::redispatch
at::detail: computeStorageNbytes, createCPUGenerator, getDefaultCPUGenerator, make_tensor
at::impl: MaybeSetTLSOnEntryGuard, PythonTorchFunctionTLS, PythonTorchFunctionTLS::get_disabled_state,
    PythonTorchFunctionTLS::set_disabled_state, TorchFunctionDisabledState, TorchFunctionDisabledState::ALL_DISABLED
c10::impl: ExcludeDispatchKeyGuard, TorchDispatchModeTLS, TorchDispatchModeTLS::any_modes_set,
    TorchDispatchModeTLS::stack_len, getGlobalPyInterpreter, tls_is_dispatch_key_excluded, tls_is_dispatch_key_included
torch::autograd: AccumulateGrad, AnomalyMode::is_enabled, Edge, FunctionPreHook, Node, PostAccumulateGradHook,
    SavedVariable, THPCppFunction, THPCppFunction_Check, ViewFunc, as_view, collect_next_edges, compute_requires_grad,
    functionToPyObject, get_current_graph_task_exec_info, get_current_graph_task_id, get_current_node, impl::hooks,
    impl::is_tensor_stealable, impl::post_acc_grad_hooks, impl::try_get_grad_accumulator, impl::version_counter,
    isDifferentiableType, isFwGradDefined, set_history, utils::clone_obey_contract, variable_list
torch::dynamo: autograd::CompiledNodeArgs, autograd::SwapSavedVariables
torch::jit: tracer::isTracing
THP: Dtype, Dtype_Check, Function, Variable, VariableClass, Variable_Check, Variable_CheckExact,
    Variable_Unpack, Variable_Wrap
"""
