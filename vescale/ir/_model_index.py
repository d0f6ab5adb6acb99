"""The names of a model: its modules, parameters and buffers, with ties, and the inputs of each ``forward``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from vescale.ir._wrapper_names import unwrapped

__all__ = ["ForwardInputs", "ModelIndex", "StateTensor", "enclosing"]


def enclosing(path: str) -> Iterator[str]:
    """A module and all modules that contain it, innermost first; ``""``, the model itself, is the last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


@dataclass(frozen=True)
class StateTensor:
    """A parameter or buffer.

    Attributes:
        names: every name in the model; tied ones follow the first, which is the one ``named_parameters()`` gives.
        shape: the global shape; None while a lazy module has not seen its first input.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...] | None
    dtype: torch.dtype
    is_parameter: bool

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class ForwardInputs:
    """What a ``forward`` takes: names by position, all names, and whether it also takes ``*args``, ``**kwargs``."""

    positional: tuple[str, ...]
    names: tuple[str, ...]
    more_positions: bool
    more_names: bool


class ModelIndex:
    """Modules and states by name, in the model's own order.

    Attributes:
        modules: every module under its first name; the model itself is ``""``.
        module_names: every name of a module -> its first one.
        states: parameters and buffers (also non-persistent ones) by their first name.
        state_names: every name of a parameter or buffer -> its first one.
        module_aliases, state_aliases: names that modules and states would have without the wrappers of an adapter library
            (:mod:`vescale.ir._wrapper_names`) -> first names. Plans may use them; the program does not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = {}
        self.module_names: dict[str, str] = {}
        first_name: dict[int, str] = {}
        names_of: dict[int, list[str]] = {}
        tensors: dict[int, tuple[torch.Tensor, bool]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self.module_names[path] = first_name.setdefault(id(module), path)
            self.modules.setdefault(self.module_names[path], module)
            for attribute, tensor, is_parameter in _own_tensors(module):
                names_of.setdefault(id(tensor), []).append(f"{path}.{attribute}" if path else attribute)
                tensors[id(tensor)] = (tensor, is_parameter)
        self.states: dict[str, StateTensor] = {}
        self.state_names: dict[str, str] = {}
        for key, (tensor, is_parameter) in tensors.items():
            names = tuple(names_of[key])
            shape = None if is_lazy(tensor) else tuple(tensor.shape)
            self.states[names[0]] = StateTensor(names, shape, tensor.dtype, is_parameter)
            self.state_names.update(dict.fromkeys(names, names[0]))
        self.module_aliases = unwrapped(self.modules, self.module_names, self.module_names)
        self.state_aliases = unwrapped(self.modules, self.module_names, self.state_names)
        self._inputs: dict[Callable[..., object], ForwardInputs] = {}

    def owner(self, name: str) -> tuple[str, str]:
        """(first name of the module, attribute) of a parameter or buffer name."""
        path, _, attribute = name.rpartition(".")
        return self.module_names[path], attribute

    def reader(self, name: str) -> tuple[str, str]:
        """(module, name relative to it) of the module in whose forward a parameter or buffer is used.

        That is its owner, but for ``nn.MultiheadAttention``, which reads the weight of its output projection and never
        calls it.
        """
        path, attribute = self.owner(name)
        parent, _, child = path.rpartition(".")
        if path and isinstance(self.modules[self.module_names[parent]], nn.MultiheadAttention):
            return self.module_names[parent], f"{child}.{attribute}"
        return path, attribute

    def is_called(self, path: str) -> bool:
        """Whether the module has a forward that runs: hooks on ``nn.ModuleList`` and the like never do."""
        module = self.modules[path]
        if type(module).forward is nn.Module.forward and "forward" not in vars(module):
            return False
        parent = path.rpartition(".")[0]
        return not (path and isinstance(self.modules[self.module_names[parent]], nn.MultiheadAttention))

    def inputs(self, path: str) -> ForwardInputs:
        """What the module's ``forward`` takes."""
        module = self.modules[path]
        forward = vars(module).get("forward") or type(module).forward
        if forward not in self._inputs:
            self._inputs[forward] = _forward_inputs(module.forward)
        return self._inputs[forward]


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        yield attribute, parameter, True
    for attribute, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        yield attribute, buffer, False


def _forward_inputs(forward: Callable[..., object]) -> ForwardInputs:
    kinds = inspect.Parameter
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):  # compiled and scripted forwards have none: any input may be one
        return ForwardInputs((), (), True, True)
    by_position = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    return ForwardInputs(
        tuple(p.name for p in parameters if p.kind in by_position),
        tuple(p.name for p in parameters if p.kind in (*by_position, kinds.KEYWORD_ONLY)),
        any(p.kind is kinds.VAR_POSITIONAL for p in parameters),
        any(p.kind is kinds.VAR_KEYWORD for p in parameters),
    )
