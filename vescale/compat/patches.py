"""Everything that vescale changes in PyTorch, as one table, and what puts it in place and takes it back.

Importing vescale changes nothing. The patches of a *part* are put in place together, when the part is first used:

==============  ==================================================================================
``placements``  the first placement that stock DTensor does not know (also :func:`fully_shard`)
``models``      :func:`vescale.parallelize`
``ops``         with the first of these two
``stages``      :func:`vescale.parallelize` of a plan with a pipeline
``random``      :func:`vescale.rng.enable`, which ``parallelize``, ``fully_shard`` and ``deferred_init`` call
``observation`` while collectives are observed (hang report, trace, ``verify``)
==============  ==================================================================================
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vescale.compat import (
    checkpoint_plans,
    dispatch,
    dtensor_methods,
    model_patches,
    optimizers,
    random_ops,
)
from vescale.compat.collective_kernels import register_collective_kernels
from vescale.compat.exact_matches import search_only_mismatches
from vescale.compat.gradients_of_stages import look_at_all_stages
from vescale.compat.meta_shapes import run_on_meta
from vescale.compat.missing_helpers import warn_of_missing_helpers
from vescale.compat.moved_local_tensors import wrap_redistribute_local
from vescale.compat.native_dispatch import install_native_dispatch
from vescale.compat.needed_names import CHECKPOINTS, EXACT_MATCHES, OBSERVATION
from vescale.compat.needs import lacking, self_check
from vescale.compat.patching import HOOKS, Changes, rebind, undo
from vescale.compat.sharding_caches import clear_sharding_caches

__all__ = [
    "PATCHES",
    "Patch",
    "extend_dtensor",
    "install",
    "install_part",
    "is_installed",
    "patch_states",
    "uninstall",
    "uninstall_part",
]


@dataclass(frozen=True)
class Patch:
    """One change to PyTorch.

    Attributes:
        target: what is changed.
        replacement: what it does then.
        reason: why PyTorch without it will not do.
        part: with which part it is installed.
        apply: ``(changes, hooks of the part)`` makes the change by way of ``changes``, which can take it back exactly.
        issue: PyTorch's issue or pull request about what is missing, open or closed, or "none".
        torch: the versions that need it, as far as they are known.
        feature: the optional feature that it belongs to; "" for patches that nothing works without.
    """

    target: str
    replacement: str
    reason: str
    part: str
    apply: Callable[[Changes, Any], None]
    issue: str = "none"
    torch: str = ">=2.11"
    feature: str = ""


_DTENSOR = "torch.distributed.tensor.DTensor"
_DISPATCHER = f"{_DTENSOR}._op_dispatcher"
_CUSTOM = "stock DTensor refuses placements that it does not know"

# fmt: off
PATCHES: tuple[Patch, ...] = (
    Patch(f"{_DISPATCHER}._propagate_op_sharding_dispatch_slow_path",
          "op handlers of models and rules of vescale's placements, then PyTorch's decision",
          "ops without a rule, with a wrong one, or on placements that DTensor does not know", "ops",
          dispatch.take_over_undecided_ops, issue="pytorch#169320"),
    Patch(f"{_DISPATCHER}._custom_op_handlers: argmax, argmin, as_strided, convolution and its backward; "
          "GradScaler's search for inf",
          "the same, then PyTorch's handler; inf in any gradient on any rank",
          "PyTorch handles these before it asks for a decision; it reduces over the axes of the first gradient", "ops",
          dispatch.take_over_handled_ops),
    Patch("kernels of aten ops at the Python dispatch key; of linear, matmul, layer_norm, "
          "rms_norm and losses that compare sizes above autograd",
          "C++ runs ops on DTensors that take the local tensors as they are",
          "PyTorch runs Python for every op, 10 to 50 us", "ops", install_native_dispatch),
    Patch(f"{_DTENSOR}.redistribute, full_tensor, from_local; torch.distributed.tensor._api._ToTorchTensor.backward",
          "convert vescale's placements, and the gradient of to_local()", _CUSTOM, "placements",
          dtensor_methods.wrap_conversions, issue="pytorch#169320"),
    Patch(f"{_DTENSOR}.__setitem__, data", "raises where the write would be lost; data are placed, and taken",
          "an item of a gathered tensor is a copy; `p.data = x` changes the shape and no number",
          "placements", dtensor_methods.wrap_set_item, issue="pytorch#139735"),
    Patch("torch.distributed.tensor._redistribute.redistribute_local_tensor, wherever it is imported",
          "moves vescale's placements, and turns a shard into a summand", _CUSTOM, "placements",
          wrap_redistribute_local, issue="pytorch#169320"),
    Patch("torch.distributed.tensor.distribute_tensor, wherever it is imported", "accepts vescale's placements", _CUSTOM,
          "placements", dtensor_methods.wrap_distribute_tensor, issue="pytorch#169320"),
    Patch(f"{_DTENSOR}.__create_write_items__, __create_chunk_list__, __get_tensor_shard__",
          "the blocks of vescale's placements",
          "PyTorch saves one block a rank and skips placements that it does not know", "placements",
          checkpoint_plans.wrap_protocol, issue="pytorch#169320"),
    Patch("torch.distributed.checkpoint: _create_default_metadata_only_plan, create_default_local_load_plan, "
          "prepare_global_plan of the file and Hugging Face writers",
          "plans with these blocks, a check of what is loaded, and an error where blocks would be lost",
          "PyTorch plans one block a rank; a safetensors file keeps one block of each tensor, silently", "placements",
          checkpoint_plans.wrap_plans, issue="pytorch#169320", feature=CHECKPOINTS),
    Patch("torch.distributed._state_dict_utils: _distribute_tensors, _broadcast_state_dict, _distribute_state_dict",
          "cut full tensors for vescale's placements", _CUSTOM, "placements", checkpoint_plans.wrap_full_state_dicts,
          issue="pytorch#169320", feature=CHECKPOINTS),
    Patch(f"{_DTENSOR}.__deepcopy__, __reduce_ex__, storage, _typed_storage, is_shared",
          "copy and pickle DTensors whose local tensor is inside of a larger storage; tell who saves a part",
          "PyTorch raises 'invalid python storage'; torch.save writes one rank's part, silently", "placements",
          dtensor_methods.wrap_copying),
    Patch("torch.distributed.tensor: _sharding_prop._expand_single_dim_strategy_to_mesh, _ops.utils.is_tensor_shardable, "
          "expand_to_full_mesh_op_strategy, _ops._math_ops._infer_reduction_dims, _decompositions.DecompShardingStrategy."
          "_get_candidate_placements, _ops.single_dim_strategy._get_neighbor_placements",
          "is asked for few combinations, in the order of its preference; shards may be empty where vescale "
          "decides; no dims are all dims; candidates have one order",
          "PyTorch searches for 0.7 s for one op on three axes, gathers a batch of 1 over 2 ranks, and takes the result "
          "of a rank's part for that of x.sum(dim=()); the order of its sets differs between ranks", "ops",
          search_only_mismatches,
          issue="pytorch#175999", feature=EXACT_MATCHES),
    Patch("torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached",
          "finds shapes with meta kernels; that of grouped_mm takes float32 and float16, too",
          "PyTorch makes a FakeTensorMode for each op and shape, 0.5 to 1.5 ms; refuses experts that run in float32", "ops",
          run_on_meta),
    Patch(f"{_DISPATCHER}.redistribute_local_args",
          "reports implicit communication, then PyTorch's own (whose warning of "
          "gloo's missing all-to-all is logged by the first rank alone)",
          "PyTorch moves operands without telling anybody", "models", model_patches.observe_redistributions,
          issue="pytorch#166593"),
    Patch(f"torch.distributed.tensor._dispatch.get_active_debug_mode; {_DTENSOR}.to_local, full_tensor, redistribute; "
          "torch.autograd._engine_run_backward",
          "while gathered copies are viewed, writes to them reach their originals, and reads see writes to these; ranks "
          "compare reads, and the losses that a backward begins from",
          "x[0].zero_() of a tensor sharded over dim 0 is lost; no hook of a graph tells its losses", "models",
          model_patches.observe_writes,
          issue="pytorch#147570"),
    Patch(f"{_DISPATCHER}._try_replicate_spec_for_scalar_tensor; _custom_op_handlers: losses, index_put, fill_ and "
          "some gradients",
          "inside of a model, a plain tensor among DTensors is the same on every rank",
          "PyTorch refuses plain tensors that are not scalars, in some ops before it asks for a decision", "models",
          model_patches.accept_plain_operands, issue="pytorch#115297"),
    Patch("torch.nn.modules.module: register_module_module_registration_hook, register_module_parameter_registration_hook; "
          "torch.utils.swap_tensors; torch.export: export, draft_export; torch.jit.trace",
          "tells of modules and parameters that are added to a model; refuses others in the place of its own, and exports",
          "PEFT takes the shape of an adapter from the local part of its base layer's weight; plain parameters that come "
          "later are not reduced; PyTorch does not say why it cannot swap one that hooks hold, or trace a model's parts",
          "models",
          model_patches.observe_registrations),
    Patch(f"{_DTENSOR}.__format__, tolist, numpy, __array__; methods and attributes of torch._C.TensorBase",
          'f"{loss:.3f}"; the whole value; the others run without the mode of a model\'s forward, where it does nothing',
          "PyTorch refuses the first ones; it calls the mode for each method and each attribute that is read, 1 to 3 us",
          "models", dtensor_methods.give_values),
    Patch("torch.utils.checkpoint: _checkpoint_without_reentrant_generator, CheckpointFunction.forward, backward",
          "recompute a function in the module whose forward checkpointed it",
          "a recomputation runs outside of the model's forward", "models",
          model_patches.wrap_checkpointed_functions),
    Patch(f"{_DISPATCHER}._custom_op_handlers: random ops, item(); kernels of them at Python and PythonTLSSnapshot",
          "one device's random numbers (fills by C++ kernels, if built); the value of the whole tensor",
          "PyTorch draws by local index, and reads the local share of a pending sum", "random",
          random_ops.wrap_random_ops, issue="pytorch#168058, pytorch#166638"),
    Patch(f"{_DISPATCHER}.sharding_propagator.op_to_schema_info: empty_like",
          "decisions are cached under memory_format, too", "PyTorch forgets memory_format after the first call", "random",
          random_ops.key_by_memory_format),
    Patch("torch.distributed.tensor._api._dtensor_init_helper, torch.nn.init: initializers that do not only draw",
          "one device's values of DTensors", "PyTorch draws by local index, and computes on local shares", "random",
          random_ops.wrap_initial_values, issue="pytorch#168058"),
    Patch("torch.optim: Adadelta, Adagrad, Adam, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD: _init_group and functions",
          "run on the local tensors of DTensors with equal placements",
          "PyTorch dispatches each op, 2 to 10 times the step on local tensors, and keeps a spec a parameter and step",
          "ops", optimizers.run_on_local_tensors, issue="pytorch#188174"),
    Patch("torch.nn.utils.clip_grad._get_total_norm, wherever it is imported; torch.amp.GradScaler._unscale_grads_",
          "the norm, and overflows, over all stages of a model", "PyTorch takes this rank's gradients for all", "stages",
          look_at_all_stages),
    Patch("kernels of the c10d operators at BackendSelect", "tell observers of a collective, then call the backend's",
          "PyTorch has no hook for collectives of C++ and Python alike", "observation", register_collective_kernels,
          issue="pytorch#186300", feature=OBSERVATION),
)
# fmt: on

# Parts that a program asks for by name; "ops" comes with the first two.
_ON_DTENSORS = ("placements", "models")
# Parts that no sharding decision depends on: they come and go while a model trains, and decisions take longer than a step.
_WITHOUT_DECISIONS = frozenset({"observation", "stages"})
_LOCK = threading.RLock()
_APPLIED: list[tuple[Patch, Changes]] = []
# Hooks of the parts that the last uninstall() removed.
_REMOVED: dict[str, Any] = {}
# The package whose install() provides the hooks of "placements". It is named instead of imported, because it imports the
# placements, whose constructors call extend_dtensor(): a program that imports nothing but a placement gets the ops as well.
_PROVIDER = "vescale.ops"


def extend_dtensor() -> None:
    """Install the part ``placements``, once in a process.

    Raises UnsupportedTorchError when this torch lacks something that it builds on; nothing is changed then.
    """
    if "placements" not in HOOKS:
        importlib.import_module(_PROVIDER).install()


def install() -> None:
    """Install again what :func:`uninstall` removed; in a program that has installed nothing, the part ``placements``.

    Does nothing when that has been done. Raises UnsupportedTorchError when this torch lacks something that the patches
    build on; nothing is changed then.
    """
    with _LOCK:
        if _REMOVED:
            _install(dict(_REMOVED))
            _REMOVED.clear()
    if not HOOKS:
        extend_dtensor()


def install_part(part: str, hooks: Any) -> None:
    """Put the patches of a part in place, with what they run; does nothing when they are. All of them, or none."""
    with _LOCK:
        if part not in HOOKS:
            _install({part: hooks})
            _REMOVED.pop(part, None)


def _install(parts: dict[str, Any]) -> None:
    if not HOOKS or not parts.keys() <= _WITHOUT_DECISIONS:  # else it has been checked for what is installed
        self_check()
    new = {part: hooks for part, hooks in parts.items() if part not in HOOKS}
    if "ops" not in HOOKS and not new.keys().isdisjoint(_ON_DTENSORS):
        new["ops"] = None
    num_before = len(_APPLIED)
    HOOKS.update(new)
    try:
        for patch in PATCHES:
            if patch.part in new and not (patch.feature and lacking(patch.feature)):
                _APPLIED.append((patch, Changes()))
                patch.apply(_APPLIED[-1][1], new[patch.part])
        rebind(*[changes for _, changes in _APPLIED[num_before:]])
        if not new.keys() <= _WITHOUT_DECISIONS:
            clear_sharding_caches()  # of decisions that were made without these parts
    except BaseException:
        _take_back(_APPLIED[num_before:])
        for part in new:
            del HOOKS[part]
        raise
    warn_of_missing_helpers()


def uninstall() -> None:
    """Leave PyTorch as it was found: every attribute, table entry and kernel is the very object that it was.

    Parallelized models and DTensors with vescale's placements must not be used until they are installed again, by
    :func:`install` or by the next ``parallelize`` or placement. Does nothing when nothing is installed.
    """
    with _LOCK:
        _take_back(list(_APPLIED))
        _REMOVED.update((part, hooks) for part, hooks in HOOKS.items() if part != "ops")
        HOOKS.clear()


def uninstall_part(part: str) -> None:
    """Take the patches of one part back, for good."""
    with _LOCK:
        _take_back([applied for applied in _APPLIED if applied[0].part == part])
        HOOKS.pop(part, None)
        _REMOVED.pop(part, None)


def _take_back(applied: list[tuple[Patch, Changes]]) -> None:
    undo(*[changes for _, changes in applied])
    for each in applied:
        _APPLIED.remove(each)
    if not {patch.part for patch, _ in applied} <= _WITHOUT_DECISIONS:
        clear_sharding_caches()


def is_installed(part: str | None = None) -> bool:
    """Whether the part, or any, is installed."""
    return part in HOOKS if part is not None else bool(HOOKS)


def patch_states() -> tuple[tuple[Patch, str], ...]:
    """Each patch of the table with its state: ``installed``, ``not installed`` or ``unavailable: `` and what is missing."""
    installed = {id(patch) for patch, _ in _APPLIED}

    def state(patch: Patch) -> str:
        missing = lacking(patch.feature) if patch.feature else []
        if missing:
            return f"unavailable: torch lacks {', '.join(missing)}"
        return "installed" if id(patch) in installed else "not installed"

    return tuple((patch, state(patch)) for patch in PATCHES)
