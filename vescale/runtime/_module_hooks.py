"""The hooks of one module, which execute its instructions before and after its forward."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import map_tensors, no_torch_function, suspend_compiling
from vescale.ir import Annotate, Instruction, Redistribute, Wrap
from vescale.ops import convert, enter_local, wrap_global
from vescale.placements import at_dim, from_local, shard_dim
from vescale.plans import PlanError
from vescale.runtime._executors import Executor, executor_of
from vescale.runtime._implicit_site import placements_text
from vescale.runtime._module_calls import enter, leave, warn_of_compiler
from vescale.runtime._runtime import Runtime
from vescale.runtime._shared_conversion import convert_once

__all__ = ["ModuleHooks"]


class ModuleHooks:
    """Executes the instructions of a module; its methods are the hooks.

    ================  ==================================================================================================
    ``forward_pre``   places inputs; enters the module (the outermost one switches the function mode on); shows parameters
                      with a placement of their own for the forward
    ``forward_post``  places outputs; hides these parameters and leaves the module, also after an exception
    ================  ==================================================================================================
    """

    def __init__(self, runtime: Runtime, module: nn.Module, path: str, instructions: Sequence[Instruction]) -> None:
        self.runtime = runtime
        self.path = path
        self.is_root = path == ""
        self._inputs = [i for i in instructions if executor_of(i) is Executor.INPUT]
        self._parameters = [i for i in instructions if executor_of(i) is Executor.PARAMETER]
        self._outputs = [i for i in instructions if executor_of(i) is Executor.OUTPUT]
        self._positions = _positions(module) if self._inputs else {}
        self._handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    # Before

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        runtime, compiler = self.runtime, suspend_compiling()
        if self._inputs:
            # The mode is already on where this is not the outermost module.
            with no_torch_function():
                args, kwargs = self._place_inputs(args, kwargs)
        activation = enter(runtime, module, self.path, (*args, *kwargs.values()))
        if compiler is not None:
            activation.frames[-1].compiler = compiler
            warn_of_compiler(runtime, self.path)
        for instruction in self._parameters:
            self._show_parameter(module, instruction)
        return args, kwargs

    def _place_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for instruction in self._inputs:
            if instruction.index is None:  # all inputs that no other instruction names
                named = {self._find(i.index, args, kwargs) for i in self._inputs if i.index is not None}
                args = tuple(
                    value if ("args", n) in named else self._placed(instruction, value) for n, value in enumerate(args)
                )
                kwargs = {
                    key: value if ("kwargs", key) in named else self._placed(instruction, value)
                    for key, value in kwargs.items()
                }
                continue
            where, key = self._find(instruction.index, args, kwargs)
            if where is None:
                continue  # an optional input that this call leaves out
            if where == "args":
                assert isinstance(key, int)
                args = (*args[:key], self._placed(instruction, args[key]), *args[key + 1 :])
            else:
                kwargs = {**kwargs, str(key): self._placed(instruction, kwargs[str(key)])}
        return args, kwargs

    def _find(
        self, index: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str | None, int | str | None]:
        """The input in a call: ``("args", position)``, ``("kwargs", name)``, (None, None) if it is left out."""
        if isinstance(index, str):
            if index in kwargs:
                return "kwargs", index
            position = self._positions.get(index)
            return ("args", position) if position is not None and position < len(args) else (None, None)
        if index < len(args):
            return "args", index
        name = next((name for name, position in self._positions.items() if position == index), None)
        return ("kwargs", name) if name in kwargs else (None, None)

    # After

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        runtime = self.runtime
        try:
            if output is not None and self._outputs:
                with no_torch_function():
                    output = self._place_outputs(output)
            if output is not None and self.is_root:
                with no_torch_function():
                    output = map_tensors(self._finished, output)
        finally:
            self._hide_parameters(module)
            leave(runtime, module, output)
        return output

    def _place_outputs(self, output: Any) -> Any:
        for instruction in self._outputs:
            index = instruction.index
            if index is None:
                output = self._placed(instruction, output)
            elif isinstance(output, torch.Tensor):
                if index in (0, "0"):
                    output = self._placed(instruction, output)
            elif isinstance(index, int) and isinstance(output, tuple | list):
                items = [self._placed(instruction, v) if i == index else v for i, v in enumerate(output)]
                output = type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
            elif isinstance(output, dict):
                key = index if isinstance(index, str) else list(output)[index]
                if output.get(key) is not None:
                    output = _with_item(output, key, self._placed(instruction, output[key]))
        return output

    def _finished(self, x: torch.Tensor) -> torch.Tensor:
        """An output of the model: reduced if it is a Partial scalar (a loss), so that it is printed correctly."""
        if not isinstance(x, DTensor) or x.ndim or not any(p.is_partial() for p in x.placements):
            return x
        return convert(x, self.runtime.replicated, requester="scalar output")

    def _handed_out(self, x: torch.Tensor) -> torch.Tensor:
        """An output of the model that an entry names: the plain global tensor if it is Replicate on every axis."""
        whole = isinstance(x, DTensor) and tuple(x.placements) == self.runtime.replicated
        return enter_local(x) if whole else x  # type: ignore[arg-type]

    # Instructions

    def _placed(self, instruction: Instruction, value: Any) -> Any:
        placed = map_tensors(lambda x: self._place(instruction, x), value)
        if self.is_root and instruction.target == "<out>":
            return map_tensors(self._handed_out, placed)
        return placed

    def _place(self, instruction: Instruction, x: torch.Tensor) -> torch.Tensor:
        runtime, op = self.runtime, instruction.op
        requester = f"{self.path}.{instruction.target}" if self.path else instruction.target
        if isinstance(op, Wrap):
            if isinstance(x, DTensor):
                return x
            placements = _complete(op.placements, runtime.replicated)
            self._check(x, placements, instruction)
            if op.given == "local":
                return from_local(x, runtime.mesh, placements)
            return wrap_global(x, runtime.mesh, placements, requester)
        if isinstance(op, Annotate):
            if isinstance(x, DTensor):
                return x
            return from_local(x, runtime.mesh, _complete(op.placements, runtime.replicated))
        assert isinstance(op, Redistribute), op
        if not isinstance(x, DTensor):
            x = wrap_global(x, runtime.mesh, runtime.replicated, requester)
        self._check(x, op.dst, instruction)
        if op.src is not None:
            self._check_arrival(x, op.src, instruction)
        stages = (_front(stage, x.ndim) for stage in (op.dst, op.grad_src, op.grad_dst))
        target, grad_source, grad_target = stages
        assert target is not None
        change = convert_once if instruction.target == "<in>" else convert
        return change(x, target, grad_source=grad_source, grad_target=grad_target, requester=requester)

    def _show_parameter(self, module: nn.Module, instruction: Instruction) -> None:
        """Hide the parameter at rest behind one with the placements of the forward. Its gradient is passed as it arrives,
        for its bucket to reduce, unless the plan gives the placements of the gradient."""
        op, (owner, name) = instruction.op, _owner(module, instruction.target)
        assert isinstance(op, Redistribute)
        with no_torch_function():
            requester = f"{self.path}.{instruction.target}" if self.path else instruction.target
            shown = convert(
                getattr(owner, name),
                op.dst,
                grad_source=op.grad_src,
                grad_target=op.grad_dst,
                passes_gradient=op.grad_src is None and op.grad_dst is None,
                requester=requester,
            )
        owner.__dict__[name] = shown

    def _hide_parameters(self, module: nn.Module) -> None:
        for instruction in self._parameters:
            owner, name = _owner(module, instruction.target)
            owner.__dict__.pop(name, None)

    def _check(self, x: torch.Tensor, placements: Sequence[Placement | None], instruction: Instruction) -> None:
        for axis, placement in zip(self.runtime.axes, placements):
            dim = shard_dim(placement) if placement is not None else None
            if dim is not None and not -x.ndim <= dim < x.ndim:
                raise PlanError(
                    f"{self._target_text(instruction)} has shape {tuple(x.shape)}, and the plan shards its dim {dim} over "
                    f"{axis!r}; name the tensor that is meant (<in:name>, <out:0>), or use a dim below {x.ndim}",
                    instruction.source,
                )

    def _check_arrival(self, x: DTensor, source: Sequence[Placement | None], instruction: Instruction) -> None:
        expected = tuple(f if s is None else s for f, s in zip(x.placements, _front(source, x.ndim) or ()))
        if expected != tuple(x.placements):
            raise PlanError(
                f"{self._target_text(instruction)} of shape {tuple(x.shape)} arrives as "
                f"{placements_text(x.placements, self.runtime.axes)}, and the plan's redistribute expects "
                f"{placements_text(expected, self.runtime.axes)}; correct its src, or use shard, which takes what arrives",
                instruction.source,
            )

    def _target_text(self, instruction: Instruction) -> str:
        index = "" if instruction.index is None else f":{instruction.index}"
        target = instruction.target.replace(">", f"{index}>")
        return f"{self.path}.{target}" if self.path else target


def _positions(module: nn.Module) -> dict[str, int]:
    """Names of the forward's positional parameters."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return {parameter.name: index for index, parameter in enumerate(parameters) if parameter.kind in kinds}


def _owner(module: nn.Module, target: str) -> tuple[nn.Module, str]:
    """The module that owns the parameter ``target``, a name relative to ``module``, and its name there."""
    path, _, name = target.rpartition(".")
    return module.get_submodule(path), name


def _complete(placements: Sequence[Placement | None], default: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(d if p is None else p for p, d in zip(placements, default))


def _front(stage: Sequence[Placement | None] | None, ndim: int) -> tuple[Placement | None, ...] | None:
    """Placements with dims counted from the front."""
    if stage is None:
        return None
    return tuple(p if p is None or (dim := shard_dim(p)) is None or dim >= 0 else at_dim(p, dim + ndim) for p in stage)


def _with_item(output: Any, key: Any, value: Any) -> Any:
    if output[key] is value:
        return output
    return map_tensors(lambda x: value if x is output[key] else x, output)
