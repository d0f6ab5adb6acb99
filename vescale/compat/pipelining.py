"""What ``torch.distributed.pipelining`` has no public name for: schedules from text, and their dry run."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler
from torch.distributed.pipelining import schedules
from torch.nn.utils import clip_grad

from vescale.compat.ledger import note
from vescale.compat.needed_names import PIPELINES
from vescale.compat.needs import require
from vescale.compat.patching import Changes

require(PIPELINES)  # this module is no part of what vescale imports at first


def schedule_class(name: str) -> Any:
    return schedules.get_schedule_class(name)


def schedule_from_text(text: str, stages: list[Any], num_microbatches: int, loss: Callable[..., Any] | None) -> Any:
    """A schedule that runs the actions of ``text``: CSV, a line for each rank, computations only."""
    made = schedules._PipelineScheduleRuntime(stages, num_microbatches, loss_fn=loss, scale_grads=False)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "schedule.csv"
        file.write_text(text)
        made._load_csv(str(file), format="compute_only")
    return made


def schedule_order(schedule: Any) -> dict[int, list[Any]]:
    """The computations of each rank of a schedule with several stages, None where it waits."""
    kinds = (schedules.REDUCE_GRAD,)
    return {
        rank: [a for a in actions if a is None or a.computation_type not in kinds]
        for rank, actions in schedule.pipeline_order.items()
    }


def schedule_with_comms(
    order: Mapping[int, Sequence[Any]], stage_to_rank: Callable[[int], int], num_stages: int
) -> Any:
    """The order with sends and receives added. Raises AssertionError or RuntimeError where they cannot be."""
    compute = {rank: [a for a in actions if a is not None] for rank, actions in order.items()}
    return schedules._add_send_recv(compute, stage_to_rank=stage_to_rank, num_stages=num_stages)


def dry_run(with_comms: Mapping[int, Sequence[Any]], stage_to_rank: Callable[[int], int], num_stages: int) -> Any:
    """Run a schedule with communication on paper. Raises ValueError or AssertionError for a deadlock."""
    flat = {rank: [one for a in actions for one in a.sub_actions or (a,)] for rank, actions in with_comms.items()}
    return schedules._simulate_comms_compute(flat, stage_to_rank, num_stages)


def agree_on_sizes(stage: Any) -> None:
    """Before the first step, stages ask each other whether all know the sizes of their messages. ``stage`` takes it that the
    others do, because they do not exist."""
    note("compat.pipelining:instance", stage)
    stage._warmup_backward_result = lambda received_result=None: torch.ones(1, dtype=torch.int32)


# The patches of what PyTorch computes of all gradients, for models of which each rank has a part of the parameters.


class OverStages(Protocol):
    """What runs in place of PyTorch's norm, and after its search for inf."""

    def concern(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Whether other ranks have gradients of the same model that this rank has no part of."""

    total_norm: Callable[..., torch.Tensor]

    def share_overflow(self, parameters: Sequence[torch.Tensor], flags: Sequence[torch.Tensor]) -> bool:
        """Set ``flags``, which are 1 where this rank's gradients overflow, to 1 if those of any stage do. Returns whether a
        parameter is one of a model in stages."""


def take_norms(changes: Changes, hooks: OverStages) -> None:
    """``clip_grad_norm_`` calls this function, whoever has imported it before."""
    original = clip_grad._get_total_norm

    @functools.wraps(original)
    def _get_total_norm(tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        return (hooks.total_norm if hooks.concern(listed) else original)(listed, *args, **kwargs)

    changes.function(original, _get_total_norm)


def share_overflows(changes: Changes, hooks: OverStages) -> None:
    """``step`` and ``unscale_`` of ``GradScaler`` call this method, for optimizers that scale by themselves, too."""
    original = GradScaler._unscale_grads_

    @functools.wraps(original)
    def _unscale_grads_(
        self: GradScaler, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found = original(self, optimizer, inv_scale, found_inf, allow_fp16)
        flags = found or {found_inf.device: found_inf}  # a stage without gradients has no flags
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return flags if hooks.share_overflow(parameters, list(flags.values())) else found

    changes.attribute(GradScaler, "_unscale_grads_", _unscale_grads_)


def take_no_parameters(changes: Changes, hooks: OverStages) -> None:
    """What requires gradients of a model may all be in other stages; a list of it is empty then, on some ranks alone."""
    original: Any = torch.optim.Optimizer.__init__

    @functools.wraps(original)
    def __init__(self: torch.optim.Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        if not isinstance(params, torch.Tensor):
            params = list(params)
            if not params and hooks.concern([]):
                params = [{"params": []}]
        original(self, params, defaults)

    changes.attribute(torch.optim.Optimizer, "__init__", __init__)
