"""What vescale changes outside of the table of patches: objects of programs, the process, and PyTorch's registries.

Each row is one kind of change of one module. A test reads the package for such changes and compares them with these rows.
:func:`note` keeps the names of what has been changed in this process, and no object.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from vescale.compat.patching import name_of


class OtherChange(NamedTuple):
    """One row.

    Attributes:
        target: what is changed.
        reason: what for.
        until: when it is taken back.
    """

    target: str
    reason: str
    until: str


_MODEL = "with the model"
_CALL = "at the end of the call"
_END = "with the process"
_OWN = "a mark of vescale's own, which nothing else reads"

# By module and kind: "class", "code", "instance" (an attribute of an object that others made), "process", "torch".
_ROWS: dict[str, tuple[str, str, str]] = {
    "agreement._heartbeat:process": ("atexit", "a difference of the last step is printed", _END),
    "comm._ledger:process": ("atexit", "threads of gloo release tensors before the interpreter ends", _END),
    "checkpoint._saving:process": ("os.register_at_fork", "a forked process leaves the lock to its parent", _END),
    "checkpoint._hf_load:instance": (
        "_weight_conversions of a transformers model; _is_hf_initialized of tensors",
        "it saves as it was loaded; transformers initializes no loaded ones",
        _MODEL,
    ),
    "checkpoint._simulated:instance": ("functions of vescale.checkpoint", "a simulation writes no files", _CALL),
    "checks._start:torch": ("hooks before steps of all optimizers", "ranks compare hyperparameters", _END),
    "checks._replaced_parameters:class": ("parameters that left a model", "using them raises", "when they are back"),
    "checks._replaced_parameters:instance": ("parameters that left a model", _OWN, "when they are back"),
    "cli._inputs:process": ("sys.modules", "the user's file is a module", _END),
    "cli._main:process": ("garbage collection", "the command ends before it is worth it", _END),
    "comm._local_ranks:process": ("SIGINT, threads of torch, in processes for ranks", "the parent handles Ctrl-C", _END),
    "compat.attention_kernels:torch": (
        "kernel aten::scaled_dot_product_attention @ AutogradCPU", "estimates attend as another device does", _CALL),
    "compat.autograd:process": (
        "the frame evaluation of torch.compile on a thread", "the library's own Python is not compiled", _CALL),
    "compat.dtensor:instance": ("DTensors that keep their memory", _OWN, "with the DTensor"),
    "compat.dtensor_methods:instance": ("DTensors whose data are assigned", _OWN, "with the DTensor"),
    "compat.simulated_ranks:torch": (
        "distributed_c10d._world, sys.excepthook; process groups, stores, devices, files, DistributedDataParallel",
        "a rank of ranks that do not exist, beside the process's own; a script runs as one rank of many",
        _CALL,
    ),
    "compat.fsdp2:instance": (
        "FSDP2's state, registry and marks of modules; stage_backward_input and _weight of torch's pipeline stages",
        "PyTorch takes modules for its own, or refuses them, and differentiates what was gathered", _MODEL),
    "compat.grouped_products:torch": (
        "torch._meta_registrations._meta_grouped_mm_common", "models are walked before anything is installed", _CALL),
    "compat.native_dispatch:torch": (
        "C++ hooks of parameters", "hooks that would do nothing are skipped", "when the gradients' hooks are removed"),
    "compat.module_calls:instance": (
        "_compiled_call_impl of modules of a model", "a call runs the hooks without nn.Module's Python", _MODEL),
    "compat.native_dispatch:instance": (
        "__torch_function__ of the mode of vescale's forwards; storages that .data of a DTensor has given out",
        "C++ calls it where it does something; writes to them are counted", _MODEL),
    "compat.pipelining:instance": (
        "_warmup_backward_result of a simulated stage", "the other stages do not exist", _MODEL),
    "debug._breakpoint:process": ("SIGTERM and others", "a session ends with its ranks", "when the breakpoint is left"),
    "debug._watchdog:process": ("sys.excepthook, atexit", "the hang report tells how a rank ended", "when it is closed"),
    "estimation._calibrate:process": ("threads of torch", "one core is measured", _CALL),
    "estimation._rehearsal:process": ("garbage collection", "it looks at all modules again and again", _CALL),
    "estimation._stages:instance": ("functions of vescale's runner of a pipeline", "phases are told apart", _MODEL),
    "fsdp._api:class": ("modules given to fully_shard", "they get FSDPModule's methods", _MODEL),
    "fsdp._api:instance": ("parameters given to fully_shard", _OWN, _MODEL),
    "fsdp._api:torch": ("parameters of a tensor subclass", "they are swapped for ones on the mesh's device", "never"),
    "fsdp._bucket:instance": ("gathered parameters", _OWN, "with the parameter"),
    "fsdp._module:instance": (
        "forward of nn.Linear in a unit; methods given to register_fsdp_forward_method",
        "the gradient is computed into the bucket; they gather parameters first",
        "on request",
    ),
    "fsdp._parameter:instance": ("parameters of modules in a unit", "gathered while the unit computes", "at its end"),
    "fsdp._state:instance": ("modules given to fully_shard", _OWN, _MODEL),
    "gradients._arrival_hooks:instance": ("parameters whose gradients are reduced", _OWN, "with the reducer"),
    "gradients._complete_gradient:instance": ("gradients that are complete", _OWN, "with the gradient"),
    "gradients._hooked_parameters:instance": ("parameters whose gradients are reduced", _OWN, "with the reducer"),
    "agreement._watch:process": (
        "atexit, faulthandler.dump_traceback_later(exit=True)",
        "a rank that would wait forever ends, and learns that others have ended", _END),
    "gradients._sharded_reduction:instance": (
        "gradients that are not reduced yet", _OWN, "when they are reduced, or cleared"),
    "gradients._pipeline_shares:instance": ("models in stages", _OWN, _MODEL),
    "ir._expert_sharding:instance": ("forward of experts on the meta device", "their shapes are what is asked for", _CALL),
    "ops._boundary_copies:instance": ("storages of copies at boundaries", _OWN, "with the storage"),
    "ops._view_copies:instance": ("storages of gathered copies", _OWN, "with the storage"),
    "optim._clip:torch": (
        "torch.optim's hooks before steps", "optimizers that need all parameters are refused for models in stages", "never"),
    "pipeline._gates:class": ("modules that stages share or skip", "a rank runs its own stages", _MODEL),
    "pipeline._gates:instance": ("modules that stages share or skip", _OWN, _MODEL),
    "pipeline._install:class": ("a model in stages", "it gets step() and evaluate()", _MODEL),
    "pipeline._install:instance": ("forward, parameters of other stages", "forward is refused, the others hidden", _MODEL),
    "pipeline._staged_program:instance": ("the skeleton of a model in stages, which is vescale's", _OWN, _MODEL),
    "placements._checkpoint:torch": (
        "torch.serialization's safe globals", "torch.load(weights_only=True) builds vescale's placements", _END),
    "plan_search._search:process": ("threads of torch, in processes for a search", "they share the cores", _END),
    "rng._materialize:instance": ("attributes that hold deferred tensors", "they hold real ones", "never"),
    "runtime._checkpointed_forward:instance": (
        "forward of checkpointed modules; their parameters in a forward", "they are recomputed as placed", _MODEL),
    "runtime._foreign_tools:instance": (
        "what DistributedDataParallel, distribute_module and torch.jit ask modules for", "they are refused", _MODEL),
    "runtime._local_region:instance": (
        "forward, parameters of modules of a local entry; numbers of experts",
        "they are local; a rank runs its own experts, or a module with fewer ones",
        "with the call; forward: with the model",
    ),
    "runtime._module_hooks:instance": (
        "parameters of modules in a forward; lazy_initialization of layers of transformers' caches",
        "placed as the plan says", "with the call, or the cache"),
    "runtime._install:class": ("modules of a model that parallelize could not change", "they are as before", "never"),
    "runtime._runtime:instance": (
        "modules of a model; its methods (generate, _apply, ...)", "they know of their model and its mesh", _MODEL),
    "runtime._shared_memory:instance": (
        "storages of inputs and results of recomputed modules, and those that a program has been given", _OWN,
        "with the storage"),
    "runtime._adapters:instance": ("state_dict of a model in save_pretrained", "it gives whole values", _CALL),
    "simulation._rank:process": (
        "environment, arguments, signals, threads, in processes for ranks", "a script runs as one rank of many", _END),
    "simulation._rank:torch": (
        "hooks of all modules and optimizers, in processes for ranks", "memory is counted by phase", _END),
    "static._forward:instance": (
        "_compiled_call_impl of modules, in a step; forward of a model in static mode",
        "the step is recorded; it runs the tape of one", _MODEL),
}  # fmt: skip

OTHER_CHANGES: dict[str, OtherChange] = {key: OtherChange(*row) for key, row in _ROWS.items()}
_NOTED: dict[str, set[str]] = {}


def note(change: str, *targets: Any) -> None:
    """Write down that a change of :data:`OTHER_CHANGES` was made: to the objects or names ``targets``."""
    assert change in OTHER_CHANGES, change
    names = (target if isinstance(target, str) else name_of(target) for target in targets)
    _NOTED.setdefault(change, set()).update(names)


def noted() -> dict[str, tuple[str, ...]]:
    """By change, the names of what was changed in this process since it began; classes stand for their instances."""
    return {change: tuple(sorted(names)) for change, names in sorted(_NOTED.items())}
