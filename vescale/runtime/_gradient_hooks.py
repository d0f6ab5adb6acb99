"""Which parameters have a gradient hook: all that need one, also those of a copy of the model, and those unfrozen later."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.ir import Annotate, Batch, Hook, Instruction, Program, Redistribute
from vescale.runtime._gradients import label_gradient, reduce_gradient

__all__ = ["GradientHooks", "full_name", "single_instructions"]


class GradientHooks:
    """Puts a hook on each parameter that requires a gradient, once.

    ``copy.deepcopy`` copies parameters without their hooks, and a frozen tensor cannot have one, so that the slots of the
    model are looked through before each of its forwards.
    """

    def __init__(self, instructions: Mapping[str, Instruction]) -> None:
        self._instructions = instructions
        self._slots: list[tuple[nn.Module, str, str]] = []
        self._hooked: dict[int, weakref.ref[torch.Tensor]] = {}

    @classmethod
    def of(cls, program: Program) -> GradientHooks:
        return cls({full_name(i): i for i in single_instructions(program) if i.hook is Hook.BACKWARD})

    def of_copy(self) -> GradientHooks:
        """For a copy of the model, of which nothing is known yet."""
        return GradientHooks(self._instructions)

    def adopt(self, module: nn.Module, path: str) -> None:
        """Look after the parameters of ``module``, called ``path`` in the model; tied ones under their first name."""
        prefix = f"{path}." if path else ""
        for name, _ in module.named_parameters():
            owner, _, attribute = name.rpartition(".")
            self._slots.append((module.get_submodule(owner), attribute, prefix + name))

    def attach(self) -> None:
        for owner, attribute, name in self._slots:
            parameter = owner._parameters.get(attribute)
            if parameter is None or not parameter.requires_grad:
                continue
            known = self._hooked.get(id(parameter))
            if known is None or known() is not parameter:
                self._hooked[id(parameter)] = weakref.ref(parameter)
                if isinstance(parameter, DTensor):
                    _hook(parameter, name, self._instructions.get(name))


def _hook(parameter: DTensor, name: str, instruction: Instruction | None) -> None:
    if instruction is None:
        reduce_gradient(parameter, name)
    elif isinstance(instruction.op, Redistribute):
        reduce_gradient(parameter, name, instruction.op.dst)
    else:
        assert isinstance(instruction.op, Annotate)
        label_gradient(parameter, instruction.op.placements)


def single_instructions(program: Program) -> Iterator[Instruction]:
    """The instructions, with batches taken apart: every part is a collective of its own here."""
    for instruction in program:
        if isinstance(instruction.op, Batch):
            for target, index, op in instruction.op.parts:
                yield replace(instruction, target=target, index=index, op=op)
        else:
            yield instruction


def full_name(instruction: Instruction) -> str:
    return f"{instruction.path}.{instruction.target}" if instruction.path else instruction.target
