"""vescale: train a single-device PyTorch model on any mesh of devices, with the numbers one device would give.

The public names are imported on first use: ``import vescale`` loads nothing heavy and changes nothing in torch.
"""

import importlib
import os
from typing import Any

from vescale._model_parts import MODEL_PARTS, PLACEMENT_PARTS
from vescale._version import __version__

# public name -> module that defines it, or that it is
_PUBLIC: dict[str, str] = {
    "InterleavedShard": "vescale.placements",
    "RaggedShard": "vescale.placements",
    "StridedRaggedShard": "vescale.placements",
    "DBuffer": "vescale.buffer",
    "breakpoint": "vescale.debug",
    "checkpoint": "vescale.checkpoint",
    "debug": "vescale.debug",
    "estimate": "vescale.estimation",
    "search": "vescale.plan_search",
    "Layout": "vescale.buffer",
    "ShardedBatchSampler": "vescale.rng",
    "deferred_init": "vescale.rng",
    "materialize": "vescale.rng",
    "optim": "vescale.optim",
    "plan_layout": "vescale.buffer",
    "rng": "vescale.rng",
    "static": "vescale.static",
    "suggest_num_shards": "vescale.buffer",
    "GradientReducer": "vescale.gradients",
    "parallelize": "vescale._parallelize",
    "implicit_communication": "vescale.runtime",
    "init_mesh": "vescale.runtime",
    "no_sync": "vescale.runtime",
    "shard_batch": "vescale.runtime",
    "InputMismatchError": "vescale.checks",
    "StepMismatchError": "vescale.checks",
    "unchecked": "vescale.checks",
    "report": "vescale.runtime",
    "ImplicitCommunicationError": "vescale.runtime",
    "ImplicitCommunicationWarning": "vescale.runtime",
    "ALL": "vescale.plans",
    "BWD": "vescale.plans",
    "FWD": "vescale.plans",
    "INIT": "vescale.plans",
    "RUN": "vescale.plans",
    "Phase": "vescale.plans",
    "Plan": "vescale.plans",
    "PlanError": "vescale.plans",
    "PlanMismatchError": "vescale.plans",
    "ReplacedParameterError": "vescale.checks",
    "FSDPModule": "vescale.fsdp",
    "UnshardHandle": "vescale.fsdp",
    "fully_shard": "vescale.fsdp",
    "register_fsdp_forward_method": "vescale.fsdp",
    "share_comm_ctx": "vescale.fsdp",
    "Program": "vescale.ir",
    "VescalePlan": "vescale.plans",
    "lower": "vescale.ir",
    "new_plan": "vescale.ir",
    "plan_zoo": "vescale.plan_zoo",
}

__all__ = ["__version__", *_PUBLIC]


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
