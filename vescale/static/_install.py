"""Giving a parallelized model its static mode."""

from __future__ import annotations

import os

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.compat import note, require_native_static
from vescale.errors import NotParallelizedError
from vescale.ir import Program
from vescale.runtime import Runtime
from vescale.static._forward import StaticForward
from vescale.static._record_loading import check_program, program_of
from vescale.static._recorded_program import RecordedProgram


class StaticMode:
    """What ``parallelize(mode="static")`` does.

    Args:
        record: None: the first step is recorded.
    """

    def __init__(self, record: RecordedProgram | str | os.PathLike[str] | None) -> None:
        self._record = None if record is None else program_of(record)

    def check(self, program: Program, mesh: DeviceMesh | None) -> None:
        """Raises StaticHelpersError without the C++ helpers, StaticRecordError for a record that does not fit the plan or
        the mesh."""
        require_native_static()
        if self._record is not None:
            check_program(self._record, program, mesh)

    def install(self, runtime: Runtime, model: nn.Module) -> None:
        runtime.runs_alike = False
        steps = self._record.steps if self._record is not None else ()
        note("static._install:instance", model)
        model.__dict__["forward"] = StaticForward(runtime, model, model.__dict__.get("forward"), steps)


def static_forward(model: nn.Module) -> StaticForward:
    """The static forward of a model. Raises KeyError for others."""
    forward = model.__dict__.get("forward")
    if not isinstance(forward, StaticForward):
        raise NotParallelizedError(
            f"this {type(model).__name__} does not run in static mode; parallelize it with mode='static'"
        )
    return forward
