"""Checks of what is registered in the modules: parameters may have been replaced, tied, removed or added."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from vescale.compat import in_transform, is_replicated
from vescale.errors import FullyShardError, StrayParameterError, TransformError, UnsupportedParameterError, kind_of
from vescale.fsdp._parameter import ManagedParameter, Slot, managed_by
from vescale.gradients import ModuleTree


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


class StrayParameters:
    """Parameters below ``root`` that were registered after ``fully_shard``: they belong to no group, and were not ignored on
    purpose. The tree is searched when it has changed; parameters that were found may be unfrozen later."""

    def __init__(self, root: nn.Module, parameters: Iterable[ManagedParameter], ignored: Iterable[Slot]) -> None:
        slots = [*(slot for parameter in parameters for slot in parameter.slots), *ignored]
        self._root, self._known = root, {(id(slot.module), slot.name) for slot in slots}
        self._tree: ModuleTree | None = None
        self._found: dict[str, nn.Parameter] = {}

    def refuse(self) -> None:
        """Raises StrayParameterError for those that are trained."""
        if self._tree is None or self._tree.has_changed():
            self._tree, self._found = ModuleTree(self._root), dict(self._search())
        names = [name for name, parameter in self._found.items() if parameter.requires_grad]
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise StrayParameterError(
                f"{', '.join(map(repr, names[:4]))}{more} of {type(self._root).__name__.removeprefix('FSDP')}: trainable "
                "parameters that were registered after fully_shard, which nothing reduces, so that ranks drift apart. Add "
                "or replace modules and parameters before fully_shard, or pass the new module to fully_shard before the "
                "next forward; if the program itself reduces their gradients, register them before, and pass them in "
                "ignored_params"
            )

    def _search(self) -> Iterator[tuple[str, nn.Parameter]]:
        for path, module in self._root.named_modules():
            if is_replicated(module):
                continue
            for name, parameter in module._parameters.items():
                if parameter is not None and (id(module), name) not in self._known and managed_by(parameter) is None:
                    yield f"{path}.{name}" if path else name, parameter
