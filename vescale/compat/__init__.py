"""Every private PyTorch name that vescale uses, under a stable name, and everything that it changes in PyTorch."""

# ruff: noqa: E402, F403
from vescale.compat.needed_names import OBSERVATION
from vescale.compat.needs import require, self_check
from vescale.errors import UnsupportedTorchError

# Before anything imports a private name: all that the package does with torch comes by here.
self_check()

from vescale.compat.arrival_count import *
from vescale.compat.async_tensors import *
from vescale.compat.autograd import *
from vescale.compat.checkpoint_plans import CheckpointHooks
from vescale.compat.collective_kernels import group_description, on_completion
from vescale.compat.containers import *
from vescale.compat.dispatch import (
    has_empty_shards,
    no_torch_function,
    some_rank_holds_nothing,
    stock_dispatch,
    with_empty_shards,
    with_out_variants,
    with_torch_function,
)
from vescale.compat.dtensor import *
from vescale.compat.dtensor_methods import DTensorHooks, read_only, stock
from vescale.compat.fsdp2 import *
from vescale.compat.gradient_rows import *
from vescale.compat.ledger import *
from vescale.compat.meshes import *
from vescale.compat.model_hooks import (
    DispatchListener,
    ModelHooks,
    OpHandler,
    ask_mixed,
    tell_draw,
    tell_move,
    tell_moved_operand,
    tell_plain_value,
    tell_read,
    tell_write,
)
from vescale.compat.module_calls import *
from vescale.compat.native_dispatch import *
from vescale.compat.native_dispatch import intern_spec
from vescale.compat.native_static import native_static, native_tape
from vescale.compat.op_info import *
from vescale.compat.optimizers import note_writes
from vescale.compat.patches import *
from vescale.compat.patches import install, patch_states, require_native_static, uninstall
from vescale.compat.process_groups import *
from vescale.compat.sharding_caches import begin_world, clear_sharding_caches
from vescale.compat.tensor_subclasses import (
    FakeTensor,
    TorchDispatchMode,
    detached_below_autograd,
    tree_leaves,
    tree_map,
    without_modes,
)

__all__ = ["UnsupportedTorchError", "install", "patch_states", "self_check", "uninstall"]
