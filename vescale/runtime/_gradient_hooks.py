"""Which parameters have their gradients reduced: all that need it, also those of a copy of the model, and those unfrozen
later."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.fsdp import ManagedParameter
from vescale.ir import Annotate, Batch, Hook, Instruction, Program, Redistribute
from vescale.runtime._gradients import GradientReducer, GradientRule, complete_captured
from vescale.runtime._units import accumulating, managed_parameters, states_in

__all__ = ["GradientHooks", "full_name", "single_instructions"]


class GradientHooks:
    """Gives each parameter that requires a gradient to the model's reducer, once.

    ``copy.deepcopy`` copies parameters without their hooks, and a frozen tensor cannot have one, so that the slots of the
    model are looked through before each of its forwards.

    Attributes:
        reducer: None on ranks outside the mesh, and before there is a parameter.
    """

    def __init__(self, instructions: Mapping[str, Instruction], mesh: DeviceMesh) -> None:
        self.reducer: GradientReducer | None = None
        self._instructions, self._mesh = instructions, mesh
        self._slots: list[tuple[nn.Module, str, str]] = []
        self._managed: dict[tuple[int, str], ManagedParameter] = {}
        self._modules: list[weakref.ref[nn.Module]] = []
        self._hooked: dict[int, weakref.ref[torch.Tensor]] = {}

    @classmethod
    def of(cls, program: Program, mesh: DeviceMesh) -> GradientHooks:
        return cls({full_name(i): i for i in single_instructions(program) if i.hook is Hook.BACKWARD}, mesh)

    def of_copy(self) -> GradientHooks:
        """For a copy of the model, of which nothing is known yet."""
        return GradientHooks(self._instructions, self._mesh)

    def adopt(self, module: nn.Module, path: str) -> None:
        """Look after the parameters of ``module``, called ``path`` in the model; tied ones under their first name."""
        self._modules.append(weakref.ref(module))
        self._managed.update(managed_parameters(module))
        for state in states_in(module):
            state.tree.on_backward = self._begin
        prefix = f"{path}." if path else ""
        for name, _ in module.named_parameters():
            owner, _, attribute = name.rpartition(".")
            self._slots.append((module.get_submodule(owner), attribute, prefix + name))

    def attach(self) -> None:
        """The same on every rank, and asked for by all of them."""
        new = []
        for owner, attribute, name in self._slots:
            parameter = owner._parameters.get(attribute)
            managed = self._managed.get((id(owner), attribute))
            if managed is not None:  # the engine reduces it over the axes of its unit
                parameter = managed.sharded if _is_replicated_elsewhere(managed) else None
            if parameter is None or not parameter.requires_grad:
                continue
            known = self._hooked.get(id(parameter))
            if known is None or known() is not parameter:
                self._hooked[id(parameter)] = weakref.ref(parameter)
                if isinstance(parameter, DTensor):
                    new.append((name, parameter, _rule(self._instructions.get(name))))
        if self._mesh.get_coordinate() is None:
            return
        if self.reducer is None:
            self.reducer = GradientReducer(nn.Module(), self._mesh)
            self.reducer.around_no_sync = self._accumulating
        self.reducer.recover()
        if new:
            self.reducer.add(new)
            for name, parameter, rule in new:
                complete_captured(parameter, name, rule)

    def _begin(self) -> None:
        """A backward has reached a unit."""
        if self.reducer is not None:
            self.reducer.begin()

    @contextlib.contextmanager
    def _accumulating(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module in self._modules:
                found = module()
                if found is not None:
                    stack.enter_context(accumulating(found))
            yield


def _is_replicated_elsewhere(parameter: ManagedParameter) -> bool:
    """Whether the gradient may be a sum along axes that are not its unit's."""
    axes, sharded = parameter.axes, parameter.sharded
    assert isinstance(sharded, DTensor)
    others = (a for a in range(axes.mesh.ndim) if a not in (axes.shard, *axes.replicate) and axes.mesh.size(a) > 1)
    return any(sharded.placements[axis].is_replicate() for axis in others)


def _rule(instruction: Instruction | None) -> GradientRule:
    """A gradient that the plan annotates is what it says on every rank, one that it redistributes goes there."""
    if instruction is None:
        return GradientRule()
    if isinstance(instruction.op, Redistribute):
        return GradientRule(target=instruction.op.dst)
    assert isinstance(instruction.op, Annotate)
    return GradientRule(source=instruction.op.placements)


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
