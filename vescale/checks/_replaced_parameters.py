"""Parameters that ``parallelize`` or ``fully_shard`` has replaced, and that somebody still holds.

An optimizer made before steps such parameters without an effect: they have no gradients any more, so that it does nothing,
silently. So a replaced parameter that is still referenced gets a class of its own, whose ``__torch_function__`` raises where
an optimizer, clipping or an average would go on with it. Nothing of PyTorch is changed, and all other tensors are as they
were.

=====================================  =====================================================================
of a replaced parameter               what happens
=====================================  =====================================================================
its values are read                   as before, the values when it was replaced; raises when the model has been trained
                                       since, or has loaded others: on one device they would have changed
``grad`` is read (``step``, clipping)  raises ReplacedParameterError
its values are written                 raises, for the model would not see it
it is averaged (``lerp_`` into others) raises
it meets the model's tensors           raises where gradients are recorded: its own would reach nobody
``zero_grad()``                       nothing: there is no gradient
=====================================  =====================================================================

A parameter that does not require a gradient, that has got one since, or that another module has registered is in use:
nothing raises then.
"""

from __future__ import annotations

import copy
import functools
import gc
import sys
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from vescale.compat import bytes_of, has_hooks, living_items, no_torch_function, note, own_part
from vescale.errors import (
    ArgumentTypeError,
    Coded,
    ParallelizeError,
    ParameterHookError,
    UnsupportedParameterError,
    kind_of,
)
from vescale.placements import distribute_tensor

# Names of parameters in the models that ``parallelize`` or ``fully_shard`` was given, for those who have tensors alone.

_NAMES: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[str, str]]] = weakref.WeakKeyDictionary()


def note_name(owner: nn.Module, attribute: str, name: str, model: str) -> None:
    """``name``: of the parameter that ``owner`` registers as ``attribute``, in a model of the class ``model``. Where modules
    are given one by one, the last one around it counts."""
    _NAMES.setdefault(owner, {})[attribute] = name, model


def known_names(parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, tuple[str, str]]:
    """(name, class of the model that it is in) of those that are registered where a name is known."""
    wanted = {id(parameter): parameter for parameter in parameters}
    found: dict[torch.Tensor, tuple[str, str]] = {}
    for owner, attributes in living_items(_NAMES):
        for attribute, named in list(attributes.items()):
            parameter = wanted.get(id(owner._parameters.get(attribute)))
            if parameter is not None:
                found.setdefault(parameter, named)
    return found


_ATTRIBUTE = "_vescale_replacement"
_GET_GRAD = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_WRITES = frozenset(
    ("add_", "addcdiv_", "addcmul_", "copy_", "div_", "fill_", "lerp_", "mul_", "normal_", "sub_", "zero_")
)
_AVERAGES = frozenset(["lerp_", "_foreach_lerp_"])
_SAMPLES = 64
_VALUES = frozenset(["__array__", "item", "numpy", "tolist"])


class ReplacedParameterError(Coded, RuntimeError, code="VS0223"):
    """A parameter is used that ``parallelize`` or ``fully_shard`` has replaced; ``name``: of the parameter."""

    def __init__(self, problem: str, name: str) -> None:
        super().__init__(problem)
        self.name = name


@dataclass
class Replacement:
    """What became of a parameter.

    Attributes:
        name: in the model; model: the model's class; by: the function that replaced it. Where modules are given one by one,
            the last one around it counts.
        grad: what the parameter had as its gradient when it was replaced.
    """

    name: str
    model: str
    by: str
    grad: torch.Tensor | None
    _module: weakref.ref[nn.Module]
    _attribute: str

    def __post_init__(self) -> None:
        first = self.successor
        self._first, self._state = id(first), _state(first)  # a weak reference would be in the way of swap_tensors

    @property
    def successor(self) -> nn.Parameter | None:
        """The parameter that is registered in its place now; None: the model is gone."""
        module = self._module()
        return module._parameters.get(self._attribute) if module is not None else None

    @property
    def is_outdated(self) -> bool:
        """Whether the parameter in its place has been written to since."""
        now = self.successor
        if now is None or id(now) != self._first:
            return False
        (version, some), (first_version, first) = _state(now), self._state
        return version != first_version or not torch.equal(some, first)

    def error(self, use: str) -> ReplacedParameterError:
        also = f"; or pass an optimizer that was created before, {self.by}(..., optimizer=optimizer)"
        also = also if self.by.isidentifier() else ""
        return ReplacedParameterError(
            f"{use} parameter {self.name!r} of {self.model} as it was before {self.by}, which has replaced it: the "
            f"model is not affected. Expected the parameters after {self.by}: call {self.by} first, then create "
            f"optimizers and averages from model.parameters(), and clip those{also}",
            self.name,
        )


def replacement_of(parameter: object) -> Replacement | None:
    """None: the parameter has not been replaced, or is in use nevertheless."""
    found = getattr(parameter, "__dict__", {}).get(_ATTRIBUTE)
    return found if isinstance(found, Replacement) else None


class RegisteredParameters:
    """The parameters of modules before they are replaced; they may be freed meanwhile."""

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._slots: list[tuple[str, str, weakref.ref[nn.Module], str, weakref.ref[nn.Parameter]]] = []
        seen: set[int] = set()
        for root in modules:
            for path, module in root.named_modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None and id(parameter) not in seen:
                        seen.add(id(parameter))
                        self.add(f"{path}.{name}" if path else name, type(root).__name__, module, name)

    def add(self, name: str, model: str, module: nn.Module, attribute: str) -> None:
        """One more, which is registered as ``attribute`` of ``module``, and called ``name`` in a ``model``."""
        parameter: Any = module._parameters[attribute]
        self._slots.append((name, model, weakref.ref(module), attribute, weakref.ref(parameter)))

    def refuse_hooks(self, by: str, ignored: Collection[nn.Parameter] = ()) -> None:
        """Before ``by`` replaces all but those that are ``ignored``. Raises ParameterHookError for one whose gradient hooks
        would be lost, UnsupportedParameterError for one whose shape is not known yet."""
        for name, model, _, _, held in self._slots:
            parameter = held()
            if parameter is None or isinstance(parameter, DTensor) or parameter in ignored:
                continue
            if is_lazy(parameter):
                raise UnsupportedParameterError(
                    f"parameter {name!r} of {model} has no shape before the first forward (nn.LazyLinear and the like), and "
                    f"{by} places parameters by their shapes. Call the model once on one device before {by}: "
                    "model(example_input)"
                )
            if has_hooks(parameter):
                raise ParameterHookError(
                    f"parameter {name!r} of {model} has gradient hooks (register_hook, register_post_accumulate_grad_hook, "
                    f"an optimizer that steps in the backward), and {by} replaces the parameter, so that they would "
                    f"never run. Call {by} first, then register them on the parameters of the model that it returns"
                )

    def mark_replaced(self, by: str) -> None:
        """Give those that ``by`` has replaced, and that somebody still holds, their class."""
        for name, model, module, attribute, held in self._slots:
            parameter, owner = held(), module()
            if owner is None:
                continue
            note_name(owner, attribute, name, model)
            earlier = _REPLACED.get(owner, {}).get(attribute)
            if earlier is not None:
                earlier.name, earlier.model = name, model
            if parameter is None or owner._parameters.get(attribute) is parameter:
                continue
            if replacement_of(parameter) is None:
                grad = parameter.grad
                try:
                    parameter.__class__ = _replaced_class(type(parameter))
                except TypeError:  # a subclass with another layout
                    continue
                note("checks._replaced_parameters:class", type(parameter).__bases__[0])
                found = Replacement(name, model, by, grad, module, attribute)
                parameter.__dict__[_ATTRIBUTE] = found
                _REPLACED.setdefault(owner, {})[attribute] = found


_REPLACED: weakref.WeakKeyDictionary[nn.Module, dict[str, Replacement]] = weakref.WeakKeyDictionary()


@functools.cache
def _replaced_class(original: type) -> Any:
    members = {
        "__module__": original.__module__,
        "__torch_function__": classmethod(_torch_function),
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": _reduce,
    }
    return type(original)(f"Replaced{original.__name__}", (original,), members)


def _torch_function(cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    with no_torch_function():
        if func == _GET_GRAD:
            if sys._getframe(1).f_code.co_name != "zero_grad":
                _refuse(args[0], "something (such as an optimizer's step or clipping) reads the gradient of")
        else:
            name = getattr(func, "__name__", "")
            is_write = name in _WRITES or func == _SET_DATA or (name.startswith("_foreach_") and name.endswith("_"))
            if is_write:
                for written in _tensors(args[0]):
                    _refuse(written, "something writes to")
            if name in _AVERAGES:
                for read in _tensors(args[1:]):
                    _refuse(read, "something averages")
            operands = _tensors(list(args))
            if torch.is_grad_enabled() and any(isinstance(operand, DTensor) for operand in operands):
                for operand in operands:
                    _refuse(operand, "an op of the model's tensors takes")
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _VALUES or (_tensors(result) and not name.endswith("_like") and not name.startswith("new_")):
            for read in _tensors(list(args)):
                found = None if read is result else replacement_of(read)
                if found is not None and found.is_outdated and not read.is_meta:
                    _refuse(read, "something (such as an average) reads after the model has been trained")
        return result


def _state(parameter: torch.Tensor | None) -> tuple[int, torch.Tensor]:
    """How often a parameter has been written to, and some of its elements: fused optimizers write without counting."""
    if parameter is None or parameter.is_meta:
        return 0, torch.empty(0)
    with torch.no_grad():
        local = own_part(parameter)
        some = local.detach().reshape(-1)[:: local.numel() // _SAMPLES or 1].clone()
        return (0 if local.is_inference() else local._version), bytes_of(some)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


def _refuse(parameter: torch.Tensor, use: str) -> None:
    found = replacement_of(parameter)
    if found is None or not parameter.requires_grad:
        return
    if (parameter.grad is None or parameter.grad is found.grad) and not _is_registered(parameter):
        raise found.error(use)
    _release(parameter)


def _release(parameter: torch.Tensor) -> None:
    """Somebody uses it: it is an ordinary parameter again."""
    parameter.__dict__.pop(_ATTRIBUTE, None)
    parameter.__class__ = type(parameter).__bases__[0]


def _is_registered(parameter: torch.Tensor) -> bool:
    """Whether a module has it. A search of all objects, before an error."""
    for found in gc.get_referrers(parameter):
        if type(found) is dict and any(
            (isinstance(owner, nn.Module) and owner._parameters is found)
            or (type(owner) is dict and owner.get("_parameters") is found)
            for owner in gc.get_referrers(found)
        ):
            return True
    return False


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """A copy is an ordinary parameter."""
    if id(self) not in memo:
        with no_torch_function():
            memo[id(self)] = nn.Parameter(copy.deepcopy(self.detach(), memo), self.requires_grad)
    return memo[id(self)]


def _reduce(self: Any, protocol: Any) -> Any:
    with no_torch_function():
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


# Optimizers made before ``parallelize`` or ``fully_shard`` go on with the parameters that are there afterwards.

Optimizers = Optimizer | Iterable[Optimizer] | None


def listed_optimizers(optimizers: Optimizers, caller: str) -> list[Optimizer]:
    """Raises TypeError for what has no parameter groups."""
    if optimizers is None:
        return []
    found: list[Any] = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    for one in found:
        if not isinstance(getattr(one, "param_groups", None), list):
            raise ArgumentTypeError(
                f"{caller} got optimizer={type(one).__name__}; expected an optimizer with param_groups, or several in "
                "a list (of a scheduler, pass its .optimizer)"
            )
    return found


def check_optimizers(optimizers: Iterable[Optimizer], named: Iterable[tuple[str, nn.Parameter]], by: str) -> None:
    """Raises ValueError, before ``by`` replaces the parameters ``named``, for an optimizer with none of them, nor of those
    that were replaced before, and for states of other shapes, which cannot be cut."""
    known = {id(parameter): name for name, parameter in named}
    for optimizer in optimizers:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not any(id(p) in known or isinstance(p, DTensor) or replacement_of(p) is not None for p in held):
            raise ParallelizeError(
                f"{by} got {kind_of(optimizer)} that holds none of the model's parameters; pass the optimizer that "
                "was created from model.parameters(), or create one afterwards"
            )
        if hasattr(optimizer, "adopt_parameters"):
            continue
        for parameter in held:
            state = optimizer.state.get(parameter)
            if id(parameter) in known and isinstance(state, Mapping):
                for key, value in state.items():
                    if _is_cut(key, value) and value.shape != parameter.shape and value.ndim > 0:
                        raise ParallelizeError(
                            f"the optimizer's state {key!r} of {known[id(parameter)]!r} has shape "
                            f"{tuple(value.shape)}, and the parameter {tuple(parameter.shape)}: only states of the "
                            f"parameter's shape can be sharded; pass an optimizer that has not stepped to {by}, and "
                            "load its state afterwards (load_state_dict)"
                        )


def adopt_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Put the parameters of today in the groups of ``optimizers``, in place of those that were replaced.

    Groups, their lists and the optimizers stay the same objects, so that schedulers go on. States of replaced parameters
    are cut as the parameters are: tensors of a parameter's shape, which must be the same on every rank, get its
    placements; numbers and 0-dim tensors stay. No communication. An optimizer that knows better has a method
    ``adopt_parameters``, which is given the new parameter of each one that is replaced.
    """
    for optimizer in optimizers:
        successors: dict[Any, Any] = {}
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                replaced = replacement_of(parameter)
                new = replaced.successor if replaced is not None else None
                if new is None:
                    continue
                successors[parameter] = new
                if hasattr(optimizer, "adopt_parameters"):
                    continue
                group["params"][index] = new
                state = optimizer.state.pop(parameter, None)
                if state is not None:
                    optimizer.state[new] = _placed(state, parameter.shape, new)
        if hasattr(optimizer, "adopt_parameters"):
            optimizer.adopt_parameters(successors)


def _is_cut(key: Any, value: Any) -> bool:
    """Whether a value of a parameter's state is a tensor that is placed as the parameter is."""
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and key != "step"


def _placed(state: Any, shape: torch.Size, new: Any) -> Any:
    if not isinstance(state, Mapping) or not isinstance(new, DTensor):
        return state
    mesh, placements = new.device_mesh, tuple(new.placements)
    return {
        key: distribute_tensor(value.detach(), mesh, placements, src_data_rank=None)
        if _is_cut(key, value) and value.shape == shape
        else value
        for key, value in state.items()
    }
