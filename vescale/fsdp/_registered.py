"""Checks of what is registered in the modules: parameters may have been replaced, tied, removed or added."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import nn

from vescale.compat import in_transform
from vescale.errors import FullyShardError, TransformError, UnsupportedParameterError, kind_of
from vescale.fsdp._parameter import ManagedParameter, Slot


def refuse_transforms(path: str) -> None:
    """Raises TransformError inside of a transform of torch.func, where nothing tells when gradients are complete."""
    if in_transform():
        what = repr(path) if path else "a module"
        raise TransformError(
            f"a transform of torch.func (grad, vjp, jvp, vmap, ...) runs {what} that fully_shard gathers, which such "
            "transforms do not support. Expected torch.autograd.grad(..., create_graph=True), jvp, vjp and hvp of "
            "torch.autograd.functional, or forward mode (torch.autograd.forward_ad)"
        )


def has_replaced(parameters: Iterable[ManagedParameter]) -> bool:
    """Whether something is registered in the place of a parameter that is neither of its two forms."""
    for parameter in parameters:
        sharded, unsharded = parameter.sharded, parameter.unsharded
        for module, name in parameter.slots:
            current = module._parameters.get(name)
            if current is None or (current is not sharded and current is not unsharded):
                return True
    return False


def replacement(parameter: ManagedParameter) -> nn.Parameter | None:
    """What is registered in the place of a parameter; None: one of its own forms.

    Raises:
        ValueError: it was removed, or replaced in some of the places of a tied one.
        NotImplementedError: the replacement is no parameter (``torch.func.functional_call``).
    """
    found = [module._parameters.get(name) for module, name in parameter.slots]
    own = [form for form in (parameter.sharded, parameter.unsharded) if form is not None]
    other = [value for value in found if not any(value is form for form in own)]
    if not other:
        return None
    names = ", ".join(f"{type(module).__name__}.{name}" for module, name in parameter.slots)
    what = f"parameter {parameter.name!r} of shape {parameter.global_shape} ({names})"
    if any(value is None for value in other):
        raise FullyShardError(
            f"{what} was removed after fully_shard, which gathers it with its group; expected the parameters that "
            "existed then: prune, parametrize and delete parameters before fully_shard"
        )
    if len(other) < len(found):
        raise FullyShardError(
            f"{what} was replaced in {len(other)} of its {len(found)} places after fully_shard; a tied parameter must "
            "stay tied: set the new parameter in all places, or untie it before fully_shard"
        )
    if not isinstance(other[0], nn.Parameter):
        raise UnsupportedParameterError(
            f"{kind_of(other[0])} is in place of {what}, as after torch.func.functional_call; fully_shard gathers "
            "nn.Parameters only. Write the values to the parameters, or call a module that is not sharded"
        )
    return other[0]


def check_distinct(parameters: Iterable[ManagedParameter]) -> None:
    """Raises ValueError where one tensor is registered in the places of two parameters: it was tied after fully_shard."""
    names: dict[int, str] = {}
    for parameter in parameters:
        module, name = parameter.slots[0]
        current = module._parameters.get(name)
        other = names.setdefault(id(current), parameter.name)
        if current is not None and other != parameter.name:
            raise FullyShardError(
                f"parameters {other!r} and {parameter.name!r} of shape {parameter.global_shape} were tied after "
                "fully_shard, which has allocated them separately; tie them before it, and pass the modules that "
                "share the weight in a single call, fully_shard([a, b])"
            )


def warn_of_strays(root: nn.Module, parameters: Iterable[ManagedParameter], ignored: Iterable[Slot]) -> None:
    """Warn of trainable parameters below ``root`` that belong to no group and were not ignored on purpose."""
    known = {(id(slot.module), slot.name) for parameter in parameters for slot in parameter.slots}
    known |= {(id(slot.module), slot.name) for slot in ignored}
    strays = [
        f"{path}.{name}" if path else name
        for path, module in root.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad and (id(module), name) not in known
    ]
    if strays:
        warnings.warn(
            f"{type(root).__name__} has trainable parameters that were added after fully_shard "
            f"({', '.join(strays[:5])}{' and more' if len(strays) > 5 else ''}): nothing reduces their gradients, so "
            "that ranks drift apart. Add them before fully_shard, or pass them in ignored_params if their gradients "
            "are reduced elsewhere",
            UserWarning,
            stacklevel=2,
        )
