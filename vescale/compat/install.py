"""The one place that changes PyTorch: DTensor's entry points learn about placements they do not know.

Every wrapper's first act is to look for a custom placement and, finding none, to call the original unchanged. What
happens otherwise is given by :class:`DTensorHooks`, which ``vescale.ops`` fills: this module knows where to hook,
not what to do there.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Set
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _api as tensor_api
from torch.distributed.tensor import _dispatch as tensor_dispatch
from torch.distributed.tensor import _redistribute as tensor_redistribute

from vescale.compat.checkpoint import CheckpointHooks, wrap_checkpoint
from vescale.compat.copying import wrap_copying
from vescale.compat.dispatch import wrap_dispatch
from vescale.compat.exact_matches import install_exact_matches
from vescale.compat.needs import self_check

__all__ = ["DTensorHooks", "install", "is_installed", "stock"]


@dataclass(frozen=True)
class DTensorHooks:
    """What runs instead of stock DTensor once a custom placement is involved.

    ``has_custom(placements)`` decides: whether the type of one is in ``custom_types``, a set that may grow. The others have
    the signatures of what they replace (``set_item`` gets the original first), except
    ``local_gradient(grad, spec, grad_placements)``, the DTensor that ``to_local``'s backward gives for the gradient of the
    local tensor of a DTensor with ``spec``, and ``run_op(op, args, kwargs, schema)``, which runs an op or gives the
    sharding decision that the dispatcher caches.
    """

    has_custom: Callable[..., bool]
    custom_types: Set[type]
    redistribute: Callable[..., Any]
    redistribute_local: Callable[..., Any]
    local_gradient: Callable[..., Any]
    full_tensor: Callable[..., Any]
    from_local: Callable[..., Any]
    distribute_tensor: Callable[..., Any]
    checkpoint: CheckpointHooks
    run_op: Callable[..., Any]
    set_item: Callable[..., None]


_LOCK = threading.Lock()
_INSTALLED: list[DTensorHooks] = []


def _copy_of(function: Any) -> Any:
    twin = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    functools.update_wrapper(twin, function)
    twin.__kwdefaults__ = function.__kwdefaults__
    del twin.__wrapped__  # type: ignore[attr-defined]
    return twin


# The originals, whether or not install() has run.
_STOCK = SimpleNamespace(
    redistribute=DTensor.redistribute,
    full_tensor=DTensor.full_tensor,
    from_local=DTensor.from_local,
    distribute_tensor=_copy_of(tensor_api.distribute_tensor),
    redistribute_local_tensor=tensor_redistribute.redistribute_local_tensor,
)


def stock() -> Any:
    """PyTorch's own ``redistribute``, ``full_tensor``, ``from_local`` and ``distribute_tensor``."""
    return _STOCK


def is_installed() -> bool:
    return bool(_INSTALLED)


def install(hooks: DTensorHooks) -> None:
    """Put the wrappers in place, once in a process; later calls do nothing.

    Raises UnsupportedTorchError when this torch lacks something that the wrappers build on; nothing is changed then.
    """
    with _LOCK:
        if _INSTALLED:
            return
        self_check()
        _INSTALLED.append(hooks)
        _wrap_methods(hooks)
        _wrap_local_gradient(hooks)
        _wrap_redistribute_local(hooks)
        _wrap_distribute_tensor(hooks)
        wrap_checkpoint(hooks.has_custom, hooks.checkpoint)
        wrap_copying()
        wrap_dispatch(hooks.has_custom, hooks.run_op)
        install_exact_matches()


def _again(placements: Any) -> Any:
    """Placements that can be looked at and passed on, also when they come from a generator, as stock entry points allow."""
    return placements if placements is None or isinstance(placements, list | tuple) else tuple(placements)


def _wrap_methods(hooks: DTensorHooks) -> None:
    stock_redistribute, stock_from_local = _STOCK.redistribute, _STOCK.from_local
    has_custom, custom_types = hooks.has_custom, hooks.custom_types

    @functools.wraps(_STOCK.redistribute)
    def redistribute(self: Any, device_mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        if type(placements) is list or type(placements) is tuple:  # the loops are has_custom, whose calls would show
            for placement in self._spec.placements:
                if type(placement) in custom_types:
                    break
            else:
                for placement in placements:
                    if type(placement) in custom_types:
                        break
                else:
                    return stock_redistribute(self, device_mesh, placements, **options)
        placements = _again(placements)
        if placements is None or not (has_custom(self._spec.placements) or has_custom(placements)):
            return stock_redistribute(self, device_mesh, placements, **options)
        return hooks.redistribute(self, device_mesh, placements, **options)

    @functools.wraps(_STOCK.full_tensor)
    def full_tensor(self: Any, *, grad_placements: Any = None) -> Any:
        if not (has_custom(self._spec.placements) or (grad_placements and has_custom(grad_placements))):
            return _STOCK.full_tensor(self, grad_placements=grad_placements)
        return hooks.full_tensor(self, grad_placements=grad_placements)

    @functools.wraps(_STOCK.from_local)
    def from_local(local_tensor: Any, device_mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        if not options and type(placements) is list:  # most calls
            for placement in placements:
                if type(placement) in custom_types:
                    break
            else:
                return stock_from_local(local_tensor, device_mesh, placements)
        placements = _again(placements)
        gradient = _again(options.get("grad_placements"))
        if "grad_placements" in options:  # before 2.12 there is none
            options["grad_placements"] = gradient
        if not ((placements and has_custom(placements)) or (gradient and has_custom(gradient))):
            return stock_from_local(local_tensor, device_mesh, placements, **options)
        return hooks.from_local(local_tensor, device_mesh, placements, **options)

    set_item = DTensor.__setitem__

    @functools.wraps(set_item)
    def __setitem__(self: Any, index: Any, value: Any) -> None:
        if not has_custom(self._spec.placements):
            return set_item(self, index, value)
        return hooks.set_item(set_item, self, index, value)

    DTensor.__setitem__ = __setitem__  # type: ignore[method-assign]
    DTensor.redistribute = redistribute  # type: ignore[method-assign]
    DTensor.full_tensor = full_tensor  # type: ignore[method-assign]
    DTensor.from_local = staticmethod(from_local)  # type: ignore[method-assign]


def _wrap_local_gradient(hooks: DTensorHooks) -> None:
    """``to_local`` itself does what it should for every placement, and is too cheap to be wrapped; only its backward
    asks what the placements mean."""
    original, has_custom = tensor_api._ToTorchTensor.backward, hooks.has_custom

    @functools.wraps(original)
    def backward(ctx: Any, grad_output: Any) -> Any:
        spec, wanted = ctx.dtensor_spec, ctx.grad_placements
        if grad_output is None or not (has_custom(spec.placements) or (wanted and has_custom(wanted))):
            return original(ctx, grad_output)
        return hooks.local_gradient(grad_output, spec, wanted), None

    tensor_api._ToTorchTensor.backward = staticmethod(backward)  # type: ignore[method-assign]


def _wrap_redistribute_local(hooks: DTensorHooks) -> None:
    original, custom_types = _STOCK.redistribute_local_tensor, hooks.custom_types

    @functools.wraps(original)
    def redistribute_local_tensor(local_tensor: Any, current_spec: Any, target_spec: Any, **options: Any) -> Any:
        for placement in current_spec.placements:
            if type(placement) in custom_types:
                break
        else:
            for placement in target_spec.placements:
                if type(placement) in custom_types:
                    break
            else:
                try:
                    return original(local_tensor, current_spec, target_spec, **options)
                except RuntimeError:
                    # PyTorch does not turn a shard into a summand, which adding one to a pending gradient asks for: the
                    # gradients of two microbatches may be placed differently.
                    if not _becomes_summand(current_spec.placements, target_spec.placements):
                        raise
        return hooks.redistribute_local(
            local_tensor, current_spec, target_spec, async_op=options.get("async_op", False)
        )

    for module in (tensor_redistribute, tensor_dispatch, tensor_api):  # each has bound the name
        setattr(module, "redistribute_local_tensor", redistribute_local_tensor)  # noqa: B010


def _becomes_summand(source: Any, target: Any) -> bool:
    return any(before.is_shard() and after.is_partial() for before, after in zip(source, target))


def _wrap_distribute_tensor(hooks: DTensorHooks) -> None:
    """The function itself gets other code, and not its module another function: whoever imported it before has it, too."""
    original = _STOCK.distribute_tensor

    def entry(tensor: Any, device_mesh: Any, placements: Any, src_data_rank: int | None) -> Any:
        placements = _again(placements)
        if not placements or not hooks.has_custom(placements):
            return original(tensor, device_mesh, placements, src_data_rank=src_data_rank)
        return hooks.distribute_tensor(tensor, device_mesh, placements, src_data_rank=src_data_rank)

    tensor_api._vescale_distribute_tensor = entry  # type: ignore[attr-defined]
    tensor_api.distribute_tensor.__code__ = _distribute_tensor.__code__


def _distribute_tensor(
    tensor: Any, device_mesh: Any = None, placements: Any = None, *, src_data_rank: int | None = 0
) -> Any:
    """Its code runs in the namespace, and with the defaults, of PyTorch's module."""
    return _vescale_distribute_tensor(tensor, device_mesh, placements, src_data_rank)  # type: ignore[name-defined]  # noqa: F821
