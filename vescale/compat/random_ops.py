"""Where random ops on DTensors, DTensor factories and initializers are intercepted; ``vescale.rng`` says what runs there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch._C import _dispatch_get_all_op_names
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _api as tensor_api
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import return_and_correct_aliasing

from vescale import csrc
from vescale.compat.dispatch import DISPATCHER, HANDLERS, handlers_of_dtensor
from vescale.compat.model_hooks import tell_draw, telling
from vescale.compat.native_dispatch import registered_kernels
from vescale.compat.patching import Changes

# (op, args, kwargs) with DTensors as they are; consulted by DTensor's dispatcher before its sharding rules.
Handler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class RandomHooks:
    """What runs instead of PyTorch's own.

    ``handlers``: random ops on DTensors. ``native_part(op name, overload name, arguments, dtensor)``: what the C++ kernels
    (``csrc/random_fills.cpp``) draw in their place, or None. ``exponents``: of the characteristic polynomial of the CPU
    generator. ``factory(init_op, size, dtype, requires_grad, mesh, placements)``:
    ``torch.distributed.tensor.rand`` and ``randn``. ``initializers``: name in ``torch.nn.init`` -> function that gets the
    original first; it must call it for tensors that are not its business.
    """

    handlers: Mapping[OpOverload, Handler]
    native_part: Callable[..., Any]
    exponents: Sequence[int]
    factory: Callable[..., Any]
    initializers: Mapping[str, Callable[..., Any]]


def wrap_random_ops(changes: Changes, hooks: RandomHooks) -> None:
    for op, handler in hooks.handlers.items():
        changes.entry(handlers_of_dtensor, op, telling(op, handler), HANDLERS)


def fill_natively(changes: Changes, hooks: RandomHooks) -> None:
    kernels = csrc.load_module("random_fills")
    if kernels is not None:
        slots = (DTensor.__dict__[name] for name in ("_spec", "_local_tensor"))
        kernels.install(DTensor, *slots, hooks.native_part, tell_draw, list(hooks.exponents))
        changes.on_undo(kernels.uninstall, functools.partial(registered_kernels, True))


def count_forward(change: int) -> None:
    """This thread has begun (1) or ended (-1) a forward of a model: what draws there is not told one by one."""
    kernels = _kernels()
    if kernels is not None:
        kernels.count_forward(change)


@functools.cache
def _kernels() -> ModuleType | None:
    """Decided once in a process: every forward of a model asks for it."""
    return csrc.load_module("random_fills")


def without_native_fills() -> None:
    """Random ops on DTensors run in Python from now on, in this process: the kernels in C++ do not know of micro-batches."""
    kernels = csrc.load_module("random_fills")
    if kernels is not None:
        kernels.uninstall()


def key_by_memory_format(changes: Changes, _: Any) -> None:
    """PyTorch caches where ``empty_like`` puts its result under the dtype only, and forgets ``memory_format``. Its rule is
    in the second table since 2.14."""
    op = torch.ops.aten.empty_like.default
    propagator = DTensor._op_dispatcher.sharding_propagator
    for name in ("op_to_schema_info", "op_to_schema_info_for_single_dim_strategy"):
        known = getattr(propagator, name, {}).get(op)
        if known is not None and "memory_format" not in (known.static_kwargkey or ()):
            keys = [*(known.static_kwargkey or ()), "memory_format"]
            table = functools.partial(getattr, propagator, name)
            changed = dataclasses.replace(known, static_kwargkey=keys)
            changes.entry(table, op, changed, f"{DISPATCHER}.sharding_propagator.{name}")


def wrap_initial_values(changes: Changes, hooks: RandomHooks) -> None:
    """Functions that make a random DTensor, and those that fill one."""
    original = tensor_api._dtensor_init_helper

    @changes.in_place_of(original)
    def init_helper(init_op: Any, size: Any, device_mesh: Any = None, placements: Any = None, **kwargs: Any) -> Any:
        if init_op not in (torch.rand, torch.randn):
            return original(init_op, size, device_mesh=device_mesh, placements=placements, **kwargs)
        mesh = device_mesh or tensor_api._mesh_resources.get_current_mesh()
        return hooks.factory(init_op, size, kwargs.get("dtype"), bool(kwargs.get("requires_grad")), mesh, placements)

    for name, initializer in hooks.initializers.items():
        if hasattr(torch.nn.init, name):
            stock = getattr(torch.nn.init, name)
            wrapper = functools.update_wrapper(functools.partial(initializer, stock), stock)
            changes.attribute(torch.nn.init, name, wrapper)


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


def _returns_tensors(op: OpOverload) -> bool:
    """Not so ``_fused_sdp_choice``, which has the tag of what it chooses."""
    return all(isinstance(one.type, torch.TensorType) for one in op._schema.returns)


def seeded_ops() -> list[OpOverload]:
    """Every overload of ATen that draws random numbers (``torch.Tag.nondeterministic_seeded``)."""
    names = {name[6:].partition(".")[0] for name in _dispatch_get_all_op_names() if name.startswith("aten::")}
    found = []
    for name in sorted(names):  # dir(torch.ops.aten) has only what somebody has used
        packet = getattr(torch.ops.aten, name)
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        found += [op for op in overloads if torch.Tag.nondeterministic_seeded in op.tags and _returns_tensors(op)]
    return found
