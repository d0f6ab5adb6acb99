"""``Casts``: the dtypes that a module computes in, by the plan's precision entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vescale.compat import map_tensors
from vescale.ir import Instruction, Precision


class Casts:
    """What the instructions of one module say of dtypes. Autograd casts gradients back.

    Attributes:
        param: the dtype of floating inputs; None: as they come.
        output: of floating outputs.
        parameters: parameters (names relative to the module) and their dtypes while it computes.
    """

    def __init__(self, instructions: Iterable[Instruction]) -> None:
        self.param: torch.dtype | None = None
        self.output: torch.dtype | None = None
        self.parameters: dict[str, torch.dtype] = {}
        for instruction in instructions:
            op = instruction.op
            if not isinstance(op, Precision):
                continue
            if instruction.target == "<self>":
                self.param, self.output = op.param, op.output
            elif op.param is not None:
                self.parameters[instruction.target] = op.param

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (args, kwargs) if self.param is None else (_cast(self.param, args), _cast(self.param, kwargs))

    def outputs(self, output: Any) -> Any:
        return output if self.output is None else _cast(self.output, output)

    def parameter(self, owner: nn.Module, name: str, target: str) -> Any:
        """The parameter of ``owner``, called ``target`` here, in its dtype for the forward."""
        tensor, dtype = getattr(owner, name), self.parameters.get(target)
        return tensor if dtype is None or tensor is None else tensor.to(dtype)


def reduce_dtypes(instructions: Mapping[str, Sequence[Instruction]]) -> dict[str, torch.dtype]:
    """Full name of each parameter with a dtype for the reduction of its gradient -> that dtype."""
    found: dict[str, torch.dtype] = {}
    for path, own in instructions.items():
        for instruction in own:
            op = instruction.op
            if isinstance(op, Precision) and instruction.target != "<self>" and op.reduce is not None:
                name = f"{path}.{instruction.target}" if path else instruction.target
                found.setdefault(name, op.reduce)
    return found


def _cast(dtype: torch.dtype, value: Any) -> Any:
    return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, value)
