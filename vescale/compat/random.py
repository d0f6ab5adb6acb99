"""Where random ops on DTensors, DTensor factories and three initializers are intercepted, and nothing else.

:func:`attach` puts the given functions in place, :func:`detach` takes them out again and leaves PyTorch as it was found.
The functions come from ``vescale.rng``: this module knows where to hook, not what to do there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _api as tensor_api
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from vescale.compat.dispatcher import telling

__all__ = [
    "Handler",
    "RandomHooks",
    "WrapperTensor",
    "attach",
    "attached",
    "call_stock",
    "correct_inplace_view",
    "detach",
    "has_composite_kernel",
    "is_symbolic",
    "seeded_ops",
    "tree_leaves",
    "tree_map_only",
]

# (op, args, kwargs) with DTensors as they are; consulted by DTensor's dispatcher before its sharding rules.
Handler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class RandomHooks:
    """What runs instead of PyTorch's own.

    ``handlers``: random ops on DTensors. ``factory(init_op, size, dtype, requires_grad, mesh, placements)``:
    ``torch.distributed.tensor.rand`` and ``randn``. ``initializers``: name in ``torch.nn.init`` -> function that gets the
    original first; it must call it for tensors that are not its business.
    """

    handlers: Mapping[OpOverload, Handler]
    factory: Callable[..., Any]
    initializers: Mapping[str, Callable[..., Any]]


_UNDO: list[Callable[[], None]] = []
_ABSENT = object()


def _handlers() -> dict[OpOverload, Any]:
    """The dispatcher's table; asked for each time, for context parallelism puts another dict in its place."""
    table: Any = DTensor._op_dispatcher._custom_op_handlers
    return table


def attach(hooks: RandomHooks) -> None:
    """Put the hooks in place; does nothing when hooks are in place already."""
    if _UNDO:
        return
    handlers = _handlers()
    for op, handler in hooks.handlers.items():
        _UNDO.append(functools.partial(_restore_handler, op, handlers.get(op, _ABSENT)))
        handlers[op] = telling(op, handler)
    _replace(tensor_api, "_dtensor_init_helper", functools.partial(_init_helper, hooks.factory))
    for name, initializer in hooks.initializers.items():
        if hasattr(torch.nn.init, name):
            original = getattr(torch.nn.init, name)
            wrapper = functools.update_wrapper(functools.partial(initializer, original), original)
            _replace(torch.nn.init, name, wrapper)


def detach() -> None:
    """Take the hooks out; does nothing when none are in place."""
    while _UNDO:
        _UNDO.pop()()


def attached() -> bool:
    return bool(_UNDO)


def _replace(module: Any, name: str, value: Any) -> None:
    _UNDO.append(functools.partial(setattr, module, name, getattr(module, name)))
    setattr(module, name, value)


def _restore_handler(op: OpOverload, previous: Any) -> None:
    handlers = _handlers()
    if previous is _ABSENT:
        handlers.pop(op, None)
    else:
        handlers[op] = previous


_ORIGINAL_INIT_HELPER = tensor_api._dtensor_init_helper


def _init_helper(
    factory: Callable[..., Any], init_op: Any, size: Any, device_mesh: Any = None, placements: Any = None, **kwargs: Any
) -> Any:
    if init_op not in (torch.rand, torch.randn):
        return _ORIGINAL_INIT_HELPER(init_op, size, device_mesh=device_mesh, placements=placements, **kwargs)
    mesh = device_mesh or tensor_api._mesh_resources.get_current_mesh()
    return factory(init_op, size, kwargs.get("dtype"), bool(kwargs.get("requires_grad")), mesh, placements)


def call_stock(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op by DTensor's own rules, from within its handler."""
    handlers = _handlers()
    handler = handlers.pop(op, None)
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[op] = handler


def is_symbolic(local: torch.Tensor) -> bool:
    """Whether a local tensor holds no numbers: meta, fake, or under a tracer. Nothing is drawn for such."""
    return local.is_meta or isinstance(local, FakeTensor) or is_compiling() or get_proxy_mode() is not None


def correct_inplace_view(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], local: torch.Tensor, spec: Any
) -> Any:
    """Give the DTensor ``args[0]`` the local tensor and spec that an in-place view op leaves it with."""
    dtensor = args[0]
    dtensor._local_tensor = local
    dtensor._spec = spec
    return return_and_correct_aliasing(op, args, kwargs, dtensor)


def has_composite_kernel(op: OpOverload) -> bool:
    """Whether the op is made of others: a handler would only see it in inference mode, and must let it decompose."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), torch._C.DispatchKey.CompositeImplicitAutograd)


class WrapperTensor(torch.Tensor):
    """Base of tensors without storage of their own, whose subclass says in ``__torch_dispatch__`` what each op does."""

    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl

    @classmethod
    def with_looks_of(cls, tensor: torch.Tensor) -> Self:
        wrapper: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            device=tensor.device,
        )
        return wrapper


def seeded_ops() -> list[OpOverload]:
    """Every overload of ATen that draws random numbers (``torch.Tag.nondeterministic_seeded``)."""
    found = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            overloads = [getattr(packet, overload) for overload in packet.overloads()]
            found += [op for op in overloads if torch.Tag.nondeterministic_seeded in op.tags]
    return found
