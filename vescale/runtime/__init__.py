"""A lowered plan becomes DTensor parameters and hooks, and the model runs on the mesh."""

from vescale.runtime._activation import Activation, Frame, current_activation, is_recomputed, locate, module_of_node
from vescale.runtime._checkpointed_forward import CheckpointedForward, recomputed_modules
from vescale.runtime._foreign_tools import refuse_wrapped
from vescale.runtime._handlers import install_handlers
from vescale.runtime._implicit_site import (
    ImplicitCommunicationError,
    ImplicitCommunicationWarning,
    one_placement_text,
)
from vescale.runtime._init_mesh import init_mesh, shard_batch
from vescale.runtime._install import (
    ModuleTables,
    finish_gradients,
    gradient_reducer,
    implicit_communication,
    install,
    no_sync,
    run_eagerly,
)
from vescale.runtime._local_region import ExpertRegion, LocalRegion, TokenExchange
from vescale.runtime._missing_values import MissingValues, MissingValuesWarning
from vescale.runtime._module_calls import resumed, switch_on, warn_of_compiler
from vescale.runtime._op_saving import SavingRule, observe_offloaded
from vescale.runtime._placing import Placing, Stages, write_back
from vescale.runtime._plan_units import kept_gathered, reduce_units, unit_groups
from vescale.runtime._preflight import preflight
from vescale.runtime._runtime import Runtime
from vescale.runtime._saved_report import report

__all__ = [
    "ImplicitCommunicationError",
    "ImplicitCommunicationWarning",
    "MissingValuesWarning",
    "finish_gradients",
    "gradient_reducer",
    "implicit_communication",
    "init_mesh",
    "no_sync",
    "preflight",
    "report",
    "shard_batch",
]
