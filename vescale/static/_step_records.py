"""What a recorded step consists of: tensors, calls of torch functions, what entries of the plan place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement

from vescale.runtime import Placing
from vescale.static._observed_ops import LocalRun

Placements = tuple[Placement, ...]


@dataclass(eq=False)
class Value:
    """A DTensor that the forward computed, or was given.

    Attributes:
        name: of a parameter, buffer or input; "" for others.
        is_parameter: whether it is a parameter or a buffer.
        grads: placements of the gradients that arrived, each the sum over its uses.
        num_gradients: how many gradients were added.
        is_grad_moved: whether they arrived as parts where the tensor is whole, or the other way round.
    """

    name: str = ""
    is_parameter: bool = False
    grads: set[Placements] = field(default_factory=set)
    num_gradients: int = 0
    is_grad_moved: bool = False


@dataclass(eq=False)
class TensorRecord:
    """A tensor among the arguments or results of a call.

    Attributes:
        placements: None for a plain tensor, which is the same on every rank.
        shape, local_shape: global and of this rank; ``strides``: of the local tensor.
        value: None for a plain tensor.
        grads: placements of the gradients that this use of the value sent back; num_gradients: how many there are.
    """

    placements: Placements | None
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    value: Value | None
    grads: set[Placements] = field(default_factory=set)
    num_gradients: int = 0


@dataclass(eq=False)
class Call:
    """One call of a torch function.

    Attributes:
        module: path of the module that runs.
        changed: why the call is not that of the function on the local tensors; "" if it is.
        local_run: what the function did on the local tensors.
        moves_gradients: whether its backward moved tensors.
        has_gaps: whether the elements of an argument are not next to each other in memory.
        is_random: whether it drew random numbers.
        writes: whether it wrote to one of its arguments.
        communication: collectives that it started, as ``all_reduce over tp``.
        reads_other_unit: whether it got a parameter of a unit that was not running, and may have another form later.
        place: the file and line of the model's code.
    """

    module: str
    function: Any
    inputs: list[TensorRecord]
    outputs: list[TensorRecord] = field(default_factory=list)
    changed: str = ""
    local_run: LocalRun = LocalRun.DIFFERS
    moves_gradients: bool = False
    has_gaps: bool = False
    is_random: bool = False
    writes: bool = False
    communication: Sequence[str] = ()
    reads_other_unit: bool = False
    place: tuple[str, int] = ("", 0)


ModuleCall = tuple[list[TensorRecord], list[TensorRecord]]


@dataclass(eq=False)
class Boundary:
    """One tensor that an entry of the plan places at a module's boundary."""

    placing: Placing
    input: TensorRecord
    output: TensorRecord
    communication: Sequence[str] = ()
