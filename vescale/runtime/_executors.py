"""Which part of the runtime executes an instruction. Every instruction has exactly one executor."""

from __future__ import annotations

import enum

from vescale.errors import ParallelizeError, kind_of
from vescale.ir import (
    Annotate,
    Attention,
    Checkpoint,
    Factory,
    Hook,
    Instruction,
    Local,
    Op,
    Place,
    Precision,
    Redistribute,
    Unit,
    Wrap,
)


class Executor(enum.Enum):
    """A part of the runtime; the value is what it executes."""

    STATE = "placing parameters and buffers"  # vescale.runtime._tensor_placement
    UNIT = "gathering the parameters of a unit"  # vescale.runtime._plan_units
    INPUT = "placing inputs"  # vescale.runtime._module_hooks
    PARAMETER = "placing a parameter for the forward"  # vescale.runtime._module_hooks
    OUTPUT = "placing outputs"  # vescale.runtime._module_hooks
    GRADIENT = "placing gradients"  # vescale.runtime._gradient_hooks
    SETTING = "settings of a module"  # vescale.runtime._runtime
    PRECISION = "casting inputs, outputs and parameters"  # vescale.runtime._precision
    REGION = "running a module on local tensors"  # vescale.runtime._local_region
    CHECKPOINT = "recomputing a forward in backward"  # vescale.runtime._checkpointed_forward


# (hook, kind of target) -> ops -> executor. Kinds of target: "<in>", "<out>", "<self>"; "name" of a parameter or buffer.
_TABLE: dict[tuple[Hook, str], dict[type[Op], Executor]] = {
    (Hook.INIT, "name"): {Place: Executor.STATE, Annotate: Executor.STATE},
    (Hook.INIT, "<self>"): {Unit: Executor.UNIT},
    (Hook.FORWARD_PRE, "<in>"): dict.fromkeys((Wrap, Annotate, Redistribute), Executor.INPUT),
    (Hook.FORWARD_PRE, "name"): {Redistribute: Executor.PARAMETER, Precision: Executor.PRECISION},
    (Hook.FORWARD, "<self>"): {
        Factory: Executor.SETTING,
        Attention: Executor.SETTING,
        Local: Executor.REGION,
        Precision: Executor.PRECISION,
        Checkpoint: Executor.CHECKPOINT,
    },
    (Hook.FORWARD_POST, "<out>"): {Annotate: Executor.OUTPUT, Redistribute: Executor.OUTPUT},
    (Hook.BACKWARD, "name"): {Annotate: Executor.GRADIENT, Redistribute: Executor.GRADIENT},
}


def executor_of(instruction: Instruction) -> Executor:
    """The one executor of an instruction. Raises PlanError if there is none, which only programs of other makers have."""
    kind = instruction.target if instruction.target in ("<in>", "<out>", "<self>") else "name"
    found = _TABLE.get((instruction.hook, kind), {}).get(type(instruction.op))
    if found is None:
        raise ParallelizeError(
            f"nothing executes {kind_of(instruction.op)} of {instruction.target!r} at {instruction.hook.value!r} "
            f"(module {instruction.path!r}); create programs with vescale.lower",
            instruction.source,
        )
    return found
