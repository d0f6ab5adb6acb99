"""Everything that vescale changes in PyTorch while a part is installed, by purpose.

A group says why; :class:`vescale.compat.patching.Changes` keeps the name of each single thing that the group has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.torch_version import TorchVersion

from vescale.compat import (
    checkpoint_plans,
    dispatch,
    dtensor_methods,
    model_patches,
    optimizers,
    random_ops,
)
from vescale.compat import (
    dtensor_patches as dtensor_copies,
)
from vescale.compat.collective_kernels import register_collective_kernels
from vescale.compat.dispatch import let_shards_be_empty
from vescale.compat.dtensor_patches import (
    copy_pending_gradients,
    keep_order_of_strides,
    pad_other_dims,
    pass_methods,
    reduce_all_where_none_is_named,
    scatter_along_whole_dims,
    search_in_one_order,
    share_overflows,
    take_no_parameters,
    take_norms,
    take_over_unscaling,
    wrap_redistribute_local,
)
from vescale.compat.exact_matches import search_only_mismatches
from vescale.compat.grouped_products import take_more_dtypes
from vescale.compat.meta_shapes import run_on_meta
from vescale.compat.native_dispatch import install_native_dispatch
from vescale.compat.needed_names import CHECKPOINTS, COMPILED_CODE, COMPILED_GRADIENTS, EXACT_MATCHES, OBSERVATION
from vescale.compat.patching import Changes


@dataclass(frozen=True)
class Patch:
    """A group of changes to PyTorch with one purpose.

    Attributes:
        purpose: what the changes do.
        reason: why PyTorch without them will not do.
        part: with which part they are installed.
        apply: ``(changes, hooks of the part)`` makes them by way of ``changes``, which can take them back exactly.
        issue: PyTorch's issue or pull request about what is missing, open or closed; "to be filed" for a fault of PyTorch
            that has none; "none" where PyTorch promises nothing else.
        torch: the versions that need them: from a minor release on, without a known end, or before one.
        feature: the optional feature that they belong to; "" for patches that nothing works without.
    """

    purpose: str
    reason: str
    part: str
    apply: Callable[[Changes, Any], None]
    issue: str = "none"
    torch: str = ">=2.11"
    feature: str = ""

    @property
    def is_needed(self) -> bool:
        """Whether the installed torch is among the versions that need it."""
        return not self.torch.startswith("<") or TorchVersion(torch.__version__) < self.torch[1:]

    @property
    def owner(self) -> str:
        """The module that makes the changes."""
        return self.apply.__module__


_CUSTOM = "stock DTensor refuses placements that it does not know"
_PLACEMENTS = "pytorch#169320"
_FILE = "to be filed"

# fmt: off
_PATCHES: tuple[Patch, ...] = (
    Patch("distribute_tensor accepts vescale's placements", _CUSTOM, "entry",
          dtensor_methods.wrap_distribute_tensor, _PLACEMENTS),
    Patch("undecided ops: handlers of models and rules of vescale's placements, then PyTorch's decision",
          "ops without a rule, with a wrong one, or on placements that DTensor does not know", "ops",
          dispatch.take_over_undecided_ops, _PLACEMENTS),
    Patch("ops that PyTorch has a handler for: the same, then PyTorch's handler",
          "PyTorch handles these before it asks for a decision", "ops", dispatch.take_over_handled_ops, _PLACEMENTS),
    Patch("GradScaler finds inf in any gradient on any rank", "PyTorch reduces over the axes of the first gradient", "ops",
          take_over_unscaling, _FILE),
    Patch("C++ kernels run ops on DTensors that take the local tensors as they are, and linear, matmul, norms and losses as "
          "one op", "PyTorch runs Python for every op, 10 to 50 us", "ops", install_native_dispatch),
    Patch("conversions accept vescale's placements", _CUSTOM, "placements", dtensor_methods.wrap_conversions, _PLACEMENTS),
    Patch("an error where distribute_tensor was looked up too early", "PyTorch's says that the placements are not supported",
          "placements", dtensor_methods.refuse_early_lookups, _PLACEMENTS),
    Patch("the gradient of to_local() has vescale's placements", _CUSTOM, "placements", dtensor_methods.wrap_local_gradient,
          _PLACEMENTS),
    Patch("assignments to items raise where the write would be lost", "an item of a gathered tensor is a copy", "placements",
          dtensor_methods.wrap_set_item, "pytorch#139735"),
    Patch("`x.data = y` places y, and takes it", "PyTorch changes the shape and no number", "placements",
          dtensor_methods.wrap_data, _FILE),
    Patch("the key of compiled code has the sizes of local tensors", "ranks, and parts of equal tensors, get code that was "
          "compiled for other sizes from the cache, and write outside of their memory", "placements",
          dtensor_methods.key_compiled_code, _FILE, feature=COMPILED_CODE),
    Patch("redistribute_local_tensor moves vescale's placements, and turns a shard into a summand", _CUSTOM, "placements",
          wrap_redistribute_local, _PLACEMENTS),
    Patch("checkpoints have the blocks of vescale's placements",
          "PyTorch saves one block a rank and skips placements that it does not know", "placements",
          checkpoint_plans.wrap_protocol, _PLACEMENTS),
    Patch("plans of checkpoints have these blocks, and what is loaded is checked", "PyTorch plans one block a rank",
          "placements", checkpoint_plans.wrap_plans, _PLACEMENTS, feature=CHECKPOINTS),
    Patch("an error where a safetensors file would lose blocks", "the file keeps one block of each tensor, silently",
          "placements", checkpoint_plans.refuse_lossy_safetensors, _FILE, feature=CHECKPOINTS),
    Patch("state dicts: full tensors are cut for vescale's placements", _CUSTOM, "placements",
          checkpoint_plans.wrap_full_state_dicts, _PLACEMENTS, feature=CHECKPOINTS),
    Patch("DTensors in a larger storage are copied and pickled, parameters without gradients; a warning says who saves a "
          "part", "PyTorch raises 'invalid python storage', copies gradients, and saves one rank's part, silently",
          "placements", dtensor_copies.wrap_copying, _FILE),
    Patch("storages of DTensors are refused with the edit", "a DTensor has no memory of its own, and the process crashes",
          "placements", dtensor_copies.refuse_storages, _FILE),
    Patch("the combination of placements that moves nothing is looked up, then searched for with less work",
          "PyTorch searches for 0.7 s for one op on three axes", "ops", search_only_mismatches, "pytorch#175999",
          feature=EXACT_MATCHES),
    Patch("shards may be empty where vescale decides", "PyTorch gathers a batch of 1 over 2 ranks", "ops",
          let_shards_be_empty, _FILE, feature=EXACT_MATCHES),
    Patch("no dims are all dims", "PyTorch takes the result of a rank's part for that of x.sum(dim=())", "ops",
          reduce_all_where_none_is_named, _FILE, feature=EXACT_MATCHES),
    Patch("padding keeps what shards other dims", "PyTorch gathers, and fails on meshes of several axes", "ops",
          pad_other_dims, torch="<2.12"),
    Patch("the strides of a local tensor are dense", "PyTorch divides by the ranks, and elements overlap", "ops",
          keep_order_of_strides, torch="<2.12"),
    Patch("scatter keeps what shards other dims", "PyTorch gathers: gradients of topk in routers", "ops",
          scatter_along_whole_dims, torch="<2.13"),
    Patch("a copy of a pending gradient is pending", "PyTorch reduces it, on the ranks that have it", "ops",
          copy_pending_gradients, torch="<2.13"),
    Patch("candidate placements have one order", "the order of PyTorch's sets differs between ranks", "ops",
          search_in_one_order, _FILE, feature=EXACT_MATCHES),
    Patch("shapes of results are found with meta kernels",
          "PyTorch makes a FakeTensorMode for each op and shape, 0.5 to 1.5 ms", "ops", run_on_meta),
    Patch("the meta kernel of grouped_mm takes float32 and float16, too", "PyTorch refuses what its kernels take", "ops",
          take_more_dtypes, _FILE),
    Patch("the first rank alone logs that gloo has no all-to-all", "PyTorch logs it once a process",
          "models", model_patches.log_once_a_job),
    Patch("implicit communication is reported", "PyTorch moves operands without telling anybody", "models",
          model_patches.observe_redistributions, "pytorch#166593"),
    Patch("inside of a model, a plain tensor among DTensors is the same on every rank",
          "PyTorch refuses plain tensors that are not scalars, in some ops before it asks for a decision", "models",
          model_patches.accept_plain_operands, "pytorch#115297"),
    Patch("ranks compare the losses that a backward begins from", "no hook of a graph tells its losses", "models",
          model_patches.observe_backwards),
    Patch("`get_gradient_edge` and `register_multi_grad_hook` of gathered parameters raise",
          "graphs have other tensors in their places", "models", model_patches.tell_of_edges),
    Patch("the compiler takes parameters whose gradients are DTensors", "PyTorch asserts that both are of one class",
          "models", model_patches.compile_with_sharded_gradients, torch="<2.14", feature=COMPILED_GRADIENTS),
    Patch("while gathered copies are viewed, writes to them reach their originals, and reads see writes to these",
          "x[0].zero_() of a tensor sharded over dim 0 is lost", "models", model_patches.observe_writes, "pytorch#147570"),
    Patch("writes by way of `.data` of a gathered parameter are seen", "a version of its own: the write would be lost",
          "models", model_patches.note_data_views, _FILE),
    Patch("a parameter that hooks hold is not swapped", "PyTorch does not say why it cannot", "models",
          model_patches.refuse_swaps),
    Patch("autocast takes the meta device", "PyTorch refuses `torch.autocast(x.device.type)` of tensors without values",
          "models", model_patches.run_autocast_on_meta, _FILE),
    Patch("export and jit.trace of a model are refused with the reason", "PyTorch fails inside", "models",
          model_patches.tell_of_exports),
    Patch("modules and parameters that are added to a model are told", "PEFT takes the shape of an adapter from the local "
          "part of its base layer's weight; plain parameters that come later are not reduced", "models",
          model_patches.observe_registrations),
    Patch('f"{loss:.3f}"', "PyTorch refuses to format a DTensor", "models", dtensor_methods.format_scalars, _FILE),
    Patch("a tensor of a list of DTensors is refused with the edit", "PyTorch says that a number has no length", "models",
          dtensor_methods.explain_lists, _FILE),
    Patch("tolist() and numpy() give the whole value", "PyTorch refuses them", "models", dtensor_methods.read_whole_values),
    Patch("methods and attributes of DTensors run without the mode of a model's forward, where it does nothing",
          "PyTorch calls the mode for each, 1 to 3 us", "models", pass_methods),
    Patch("a checkpointed function is recomputed in the module whose forward checkpointed it",
          "a recomputation runs outside of the model's forward", "models", model_patches.wrap_checkpointed_functions),
    Patch("pad_sequence takes DTensors", "PyTorch writes them to a plain buffer", "models",
          model_patches.pad_dtensors, _FILE),
    Patch("a program's own code in a backward runs in the module whose forward made the node: functions, hooks",
          "what it makes would be no DTensors, unlike in the forward", "models", model_patches.run_backwards_in_modules),
    Patch("random ops draw one device's numbers; item() is the value of the whole tensor",
          "PyTorch draws by local index, and reads the local share of a pending sum", "random", random_ops.wrap_random_ops,
          "pytorch#168058, pytorch#166638"),
    Patch("C++ kernels fill with random numbers", "PyTorch runs Python for every op", "random", random_ops.fill_natively,
          "pytorch#168058"),
    Patch("decisions of empty_like are cached under memory_format, too", "PyTorch forgets it after the first call", "random",
          random_ops.key_by_memory_format, _FILE),
    Patch("rand, randn and initializers give DTensors one device's values",
          "PyTorch draws by local index, and computes on local shares", "random", random_ops.wrap_initial_values,
          "pytorch#168058"),
    Patch("optimizers run on the local tensors of DTensors with equal placements",
          "PyTorch dispatches each op, 2 to 10 times the step on local tensors, and keeps a spec a parameter and step",
          "ops", optimizers.run_on_local_tensors, "pytorch#188174"),
    Patch("clip_grad_norm_ takes the norm over all stages of a model", "PyTorch takes this rank's gradients for all",
          "stages", take_norms),
    Patch("an optimizer may have no parameters where a model is in stages", "PyTorch raises where all that a rank has is "
          "frozen, and other ranks wait", "stages", take_no_parameters),
    Patch("GradScaler sees overflows in all stages of a model", "PyTorch takes this rank's gradients for all", "stages",
          share_overflows),
    Patch("observers are told of each collective, then the backend's kernel is called",
          "PyTorch has no hook for collectives of C++ and Python alike", "observation", register_collective_kernels,
          "pytorch#186300", feature=OBSERVATION),
)
# fmt: on
PATCHES = tuple(patch for patch in _PATCHES if patch.is_needed)
