"""vescale: train a single-device PyTorch model on any mesh of devices, with the numbers one device would give.

The public names are imported on first use: ``import vescale`` loads nothing heavy and changes nothing in torch.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from vescale._model_parts import MODEL_PARTS, PLACEMENT_PARTS
from vescale._version import __version__

# module -> the public names that it defines, or its own
_HOMES = {
    "vescale.placements": "InterleavedShard RaggedShard StridedRaggedShard",
    "vescale.buffer": "DBuffer Layout plan_layout",
    "vescale.debug": "breakpoint debug",
    "vescale.checkpoint": "checkpoint",
    "vescale.estimation": "estimate",
    "vescale.plan_search": "search",
    "vescale.rng": "ShardedBatchSampler deferred_init materialize rng",
    "vescale.optim": "optim",
    "vescale.static": "static",
    "vescale.gradients": "GradientReducer",
    "vescale._parallelize": "parallelize",
    "vescale.runtime": "implicit_communication init_mesh no_sync shard_batch report ImplicitCommunicationError "
    "ImplicitCommunicationWarning",
    "vescale.checks": "InputMismatchError StepMismatchError unchecked ReplacedParameterError",
    "vescale.plans": "ALL BWD FWD INIT RUN Phase Plan PlanError PlanMismatchError",
    "vescale.fsdp": "FSDPModule UnshardHandle fully_shard register_fsdp_forward_method share_comm_ctx",
    "vescale.ir": "Program lower new_plan",
    "vescale.plan_zoo": "plan_zoo",
}
_PUBLIC = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = ["__version__", *_PUBLIC]


if TYPE_CHECKING:  # the same names, for type checkers and editors
    # isort: off
    from vescale import (
        checkpoint as checkpoint,
        debug as debug,
        optim as optim,
        plan_zoo as plan_zoo,
        rng as rng,
        static as static,
    )
    from vescale._parallelize import parallelize as parallelize
    from vescale.buffer import DBuffer as DBuffer, Layout as Layout, plan_layout as plan_layout
    from vescale.checks import (
        InputMismatchError as InputMismatchError,
        ReplacedParameterError as ReplacedParameterError,
        StepMismatchError as StepMismatchError,
        unchecked as unchecked,
    )
    from vescale.debug import breakpoint as breakpoint
    from vescale.estimation import estimate as estimate
    from vescale.fsdp import (
        FSDPModule as FSDPModule,
        UnshardHandle as UnshardHandle,
        fully_shard as fully_shard,
        register_fsdp_forward_method as register_fsdp_forward_method,
        share_comm_ctx as share_comm_ctx,
    )
    from vescale.gradients import GradientReducer as GradientReducer
    from vescale.ir import Program as Program, lower as lower, new_plan as new_plan
    from vescale.placements import (
        InterleavedShard as InterleavedShard,
        RaggedShard as RaggedShard,
        StridedRaggedShard as StridedRaggedShard,
    )
    from vescale.plan_search import search as search
    from vescale.plans import (
        ALL as ALL,
        BWD as BWD,
        FWD as FWD,
        INIT as INIT,
        RUN as RUN,
        Phase as Phase,
        Plan as Plan,
        PlanError as PlanError,
        PlanMismatchError as PlanMismatchError,
    )
    from vescale.rng import (
        ShardedBatchSampler as ShardedBatchSampler,
        deferred_init as deferred_init,
        materialize as materialize,
    )
    from vescale.runtime import (
        ImplicitCommunicationError as ImplicitCommunicationError,
        ImplicitCommunicationWarning as ImplicitCommunicationWarning,
        implicit_communication as implicit_communication,
        init_mesh as init_mesh,
        no_sync as no_sync,
        report as report,
        shard_batch as shard_batch,
    )
    # isort: on
else:

    def __getattr__(name: str) -> Any:
        if name in _PUBLIC:
            module = importlib.import_module(_PUBLIC[name])
            value = module if module.__name__ == f"vescale.{name}" else getattr(module, name)
            globals()[name] = value
            return value
        raise AttributeError(f"module 'vescale' has no attribute {name!r}")


def _install_ops() -> None:
    from vescale.ops import install

    install()


def _install_handlers() -> None:
    from vescale.runtime import install_handlers

    install_handlers()


PLACEMENT_PARTS.append(_install_ops)
MODEL_PARTS.append(_install_handlers)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])


if os.environ.get("VESCALE_TIMEOUT"):  # asked for by who starts the program, who may not be able to change it
    from vescale.debug import start_from_environment as _start_hang_report

    _start_hang_report()
