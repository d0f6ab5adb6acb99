"""The names of a model: its modules, parameters and buffers, with ties, and the inputs of each ``forward``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

# Names without wrappers: a plan for a model also reaches it inside of PEFT's classes. PEFT puts a model at
# ``base_model.model``, or, with methods that adapt prompts, at ``base_model``, and replaces the modules that it adapts:
# ``q_proj`` becomes a module that holds the old one as ``q_proj.base_layer`` beside ``q_proj.lora_A.default``, or as
# ``lm_head.original_module`` beside
# ``lm_head.modules_to_save.default``. For a plan, ``q_proj.weight`` is then the weight of the base layer,
# ``q_proj.<out>`` the output of the whole module, and ``lm_head.weight`` both weights.


def unwrapped(
    modules: Mapping[str, nn.Module], module_names: Mapping[str, str], names: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Names without wrappers -> first names (``names``: every name -> its first one), where they are not names already.

    ``modules``: by first name; ``module_names``: every name of a module -> its first one.
    """
    base = modules.get(module_names.get("base_model", ""))
    has_root = base is not None and hasattr(modules[""], "peft_config")
    root = "base_model.model" if base is not None and _is_adapted(base) else "base_model"
    found: dict[str, list[str]] = {}
    if not has_root and not any(map(_is_adapted, modules.values())):
        return {}
    for name, first in names.items():
        short = name
        if has_root and (name == root or name.startswith(f"{root}.")):
            short = name[len(root) + 1 :]
        short = ".".join(_plain_parts(short, name, modules, module_names))
        if short not in names and short:
            found.setdefault(short, []).append(first)
    return {short: tuple(dict.fromkeys(firsts)) for short, firsts in found.items()}


def _plain_parts(
    short: str, name: str, modules: Mapping[str, nn.Module], module_names: Mapping[str, str]
) -> Iterable[str]:
    """The parts of a dotted name, without those that a wrapper has put in: the last module keeps its own."""
    offset = name.count(".") + 1 - (short.count(".") + 1 if short else 0)
    parts = name.split(".")
    position = offset
    while position < len(parts):
        around = module_names.get(".".join(parts[:position]))
        adapted = modules.get(around) if around is not None else None
        if adapted is not None and position < len(parts) - 1:
            if parts[position] in ("base_layer", "original_module") and _is_adapted(adapted):
                position += 1
                continue
            if parts[position] == "modules_to_save" and _is_adapted(adapted) and position < len(parts) - 2:
                position += 2
                continue
        yield parts[position]
        position += 1


def _is_adapted(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "peft"


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
            (:mod:`vescale.ir._model_index`) -> first names. Plans may use them; the program does not.
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
