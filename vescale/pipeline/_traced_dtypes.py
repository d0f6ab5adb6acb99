"""``TracedDtypes``: the dtypes of a plan's precision entries and units, in a model that is only traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from vescale.compat import map_tensors
from vescale.ir import Precision, Program, Unit

__all__ = ["TracedDtypes"]


class TracedDtypes:
    """Casts the inputs and outputs of a skeleton's modules, by hooks, as the runtime does; and parameters, while
    :meth:`computing` is entered.

    Args:
        program: of all stages.
    """

    def __init__(self, skeleton: nn.Module, program: Program) -> None:
        self._of_parameters: dict[str, torch.dtype] = {}
        for instruction in program:
            op, path = instruction.op, instruction.path
            if isinstance(op, Precision) and instruction.target == "<self>":
                self._hook(skeleton.get_submodule(path), op.param, op.output)
            elif isinstance(op, Precision) and op.param is not None:
                self._of_parameters.setdefault(_full(path, instruction.target), op.param)
            elif isinstance(op, Unit) and op.mp_policy is not None:
                policy = op.mp_policy
                casts = policy.param_dtype if policy.cast_forward_inputs else None
                self._hook(skeleton.get_submodule(path), casts, policy.output_dtype)
                if policy.param_dtype is not None:
                    self._of_parameters |= {_full(path, name): policy.param_dtype for name in op.names}

    @staticmethod
    def _hook(module: nn.Module, inputs: torch.dtype | None, outputs: torch.dtype | None) -> None:
        if inputs is not None:
            module.register_forward_pre_hook(
                lambda _, args, kwargs: (_cast(inputs, args), _cast(inputs, kwargs)), with_kwargs=True
            )
        if outputs is not None:
            module.register_forward_hook(lambda _, args, output: _cast(outputs, output))

    @contextlib.contextmanager
    def computing(self, skeleton: nn.Module) -> Iterator[None]:
        """Inside, parameters have the dtypes in which they compute; tied ones stay tied."""
        cast: dict[int, nn.Parameter] = {}
        for name, dtype in self._of_parameters.items():
            parameter = skeleton.get_parameter(name)
            if parameter.dtype != dtype:
                cast.setdefault(id(parameter), nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad))
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for module in skeleton.modules():
                for attribute, own in list(module._parameters.items()):
                    if own is not None and id(own) in cast:
                        replaced.append((module, attribute, own))
                        module._parameters[attribute] = cast[id(own)]
            yield
        finally:
            for module, attribute, own in replaced:
                module._parameters[attribute] = own


def _cast(dtype: torch.dtype, value: Any) -> Any:
    return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, value)


def _full(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
