"""DTensor's methods and functions: placements that stock DTensor does not know, values, formatting.

Each wrapper first looks for a custom placement and calls the original if there is none. What happens otherwise is given by
:class:`DTensorHooks`, which ``vescale.placements`` and ``vescale.ops`` fill in.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Set
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _api as tensor_api

from vescale.compat.autograd import num_function_modes
from vescale.compat.checkpoint_plans import CheckpointHooks
from vescale.compat.dtensor import is_in_kept_memory, keeps_memory, own_part
from vescale.compat.model_hooks import tell_handed_out, tell_plain_value
from vescale.compat.patching import HOOKS, Changes
from vescale.compat.sharding_caches import begin_world
from vescale.errors import ArgumentTypeError, PlacementError, SetDataError


@dataclass(frozen=True)
class DTensorHooks:
    """What runs instead of stock DTensor once a custom placement is involved.

    ``has_custom(placements)`` decides: whether the type of one is in ``custom_types``, a set that may grow. The others have
    the signatures of what they replace (``set_item`` gets the original first), except
    ``local_gradient(grad, spec, grad_placements)``, the DTensor that ``to_local``'s backward gives for the gradient of the
    local tensor of a DTensor with ``spec``, and ``run_op(op, args, kwargs, schema)``, which runs an op or gives the
    sharding decision that the dispatcher caches; ``keeps_operands(op, schema)`` gives the decision or None and runs nothing;
    ``has_user_rules(op)`` says whether decisions depend on all arguments; ``normalize(placements, shape, mesh)`` gives
    placements with what follows from shape and mesh filled in.
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
    keeps_operands: Callable[..., Any]
    set_item: Callable[..., None]
    has_user_rules: Callable[[Any], bool]
    normalize: Callable[..., Any]


# PyTorch's own, whether or not anything is installed.
_STOCK = SimpleNamespace(
    redistribute=DTensor.redistribute,
    full_tensor=DTensor.full_tensor,
    from_local=DTensor.from_local,
    distribute_tensor=tensor_api.distribute_tensor,
)


def stock() -> Any:
    """PyTorch's own ``redistribute``, ``full_tensor``, ``from_local`` and ``distribute_tensor``."""
    return _STOCK


def _again(placements: Any) -> Any:
    """Placements that can be looked at and passed on, also when they come from a generator, as stock entry points allow."""
    return placements if placements is None or isinstance(placements, list | tuple) else tuple(placements)


def wrap_conversions(changes: Changes, hooks: DTensorHooks) -> None:
    changes.attribute(DTensor, "redistribute", _redistribute(hooks))
    changes.attribute(DTensor, "full_tensor", _full_tensor(hooks))
    changes.attribute(tensor_api.Redistribute, "apply", staticmethod(_apply_redistribute(hooks)))
    changes.attribute(tensor_api._FromTorchTensor, "apply", staticmethod(_apply_from_local(hooks)))


def _redistribute(hooks: DTensorHooks) -> Callable[..., Any]:
    original, is_stock = _STOCK.redistribute, hooks.custom_types.isdisjoint  # has_custom, whose calls would show

    @functools.wraps(original)
    def redistribute(self: Any, device_mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        if placements is not None and type(placements) is not tuple:
            placements = tuple(placements)
        if placements is None or (is_stock(map(type, self._spec.placements)) and is_stock(map(type, placements))):
            return original(self, device_mesh, placements, **options)
        return hooks.redistribute(self, device_mesh, placements, **options)

    return redistribute


def _full_tensor(hooks: DTensorHooks) -> Callable[..., Any]:
    original, is_stock = _STOCK.full_tensor, hooks.custom_types.isdisjoint

    @functools.wraps(original)
    def full_tensor(self: Any, *, grad_placements: Any = None) -> Any:
        if is_stock(map(type, self._spec.placements)) and is_stock(map(type, grad_placements or ())):
            return original(self, grad_placements=grad_placements)
        return hooks.full_tensor(self, grad_placements=grad_placements)

    return full_tensor


def _apply_redistribute(hooks: DTensorHooks) -> Callable[..., Any]:
    """Python has looked the method up before it evaluates the arguments, among which the first placement of a process may be
    constructed: PyTorch's own method comes here with it."""
    original, is_stock = tensor_api.Redistribute.apply, hooks.custom_types.isdisjoint

    def apply(dtensor: Any, device_mesh: Any, placements: Any, *options: Any) -> Any:
        if not is_stock(map(type, placements)):
            placements = hooks.normalize(placements, dtensor.shape, device_mesh)
        return original(dtensor, device_mesh, placements, *options)

    return apply


def _apply_from_local(hooks: DTensorHooks) -> Callable[..., Any]:
    """What ``DTensor.from_local`` calls at its end; the function itself may have been looked up before, as above."""
    original, has_custom = tensor_api._FromTorchTensor.apply, hooks.has_custom

    def apply(
        local: Any, mesh: Any, placements: Any, run_check: Any, shape: Any, stride: Any, *grad_placements: Any
    ) -> Any:
        begin_world()
        gradient = grad_placements[0] if grad_placements else None  # before 2.12 there is none
        if not (has_custom(placements) or (gradient and has_custom(gradient))):
            return original(local, mesh, placements, run_check, shape, stride, *grad_placements)
        options = {"run_check": run_check, "shape": shape, "stride": stride, "grad_placements": gradient}
        return hooks.from_local(local, mesh, placements, **options)

    return apply


def wrap_set_item(changes: Changes, hooks: DTensorHooks) -> None:
    original = DTensor.__setitem__

    @changes.method(DTensor, "__setitem__")
    def __setitem__(self: Any, index: Any, value: Any) -> None:
        if not hooks.has_custom(self._spec.placements):
            return original(self, index, value)
        return hooks.set_item(original, self, index, value)


def wrap_data(changes: Changes, hooks: DTensorHooks) -> None:
    changes.attribute(DTensor, "data", property(_data, functools.partial(_set_data, hooks)))


def _data(self: Any) -> Any:
    tell_handed_out(self)
    found = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
    if keeps_memory(self):
        found.__dict__["_memory_of"] = weakref.ref(self), self.__dict__.get("_num_assigned", 0)
    return found


def _set_data(hooks: DTensorHooks, self: Any, value: Any) -> None:
    """``p.data = value``: a DTensor, or a plain tensor, which is the global one, the same on every rank. PyTorch sets the
    shape, and leaves the numbers.

    As on one device the memory of ``value`` is taken where it is placed alike, so that what ``p.data`` was before keeps its
    numbers. What keeps its memory (:func:`keep_memory`) is written to.
    """
    own = self._local_tensor
    if not isinstance(value, torch.Tensor) or own.is_meta:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        return
    tell_handed_out(self)
    is_part = keeps_memory(self)
    is_plain = not isinstance(value, DTensor)
    if (is_plain or is_part) and (value.shape != self.shape or (is_part and value.dtype != self.dtype)):
        raise SetDataError(
            f"data of shape {tuple(value.shape)} and {value.dtype} for a DTensor of shape {tuple(self.shape)} and "
            f"{self.dtype} placed as {tuple(self.placements)}; expected "
            + (
                "the same, because it is part of the buffer of its unit"
                if is_part
                else "the global tensor, the same on every rank, or a DTensor"
            )
        )
    if isinstance(value, DTensor) and value.device_mesh != self.device_mesh:
        raise SetDataError(f"data on {value.device_mesh} for a DTensor on {self.device_mesh}; expected the same mesh")
    if is_part and _has_other_memory(self, value):
        raise SetDataError(
            f"the data of a DTensor of shape {tuple(self.shape)} are set to another parameter's own memory: both are parts "
            "of buffers of units, and stay there, where one device lets the two share memory. Give it a copy: "
            "parameter.data = other.data.clone(); to share the memory, tie them before: module.weight = other.weight"
        )
    if is_part and _is_own_memory(self, value):
        return
    with torch.no_grad(), torch._C.DisableTorchFunction():
        value = value.detach()
        if is_plain:
            tell_plain_value("data", "data", value, self.device_mesh)
            plain = value.to(own.device)
            value = hooks.distribute_tensor(plain, self.device_mesh, self.placements, src_data_rank=None)
        elif value.shape == self.shape and value.placements != self.placements:
            value = value.redistribute(placements=self.placements)
        if is_part:
            own.copy_(value._local_tensor)
            return
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._local_tensor = value._local_tensor.data
        if self._spec != value._spec:
            self._spec = value._spec


def _has_other_memory(dtensor: Any, value: Any) -> bool:
    """Whether ``value`` is, or is a view of, another one that keeps its memory. ``value.data`` says so on every rank, also
    on one that holds nothing."""
    if value is dtensor or keeps_memory(value):
        return value is not dtensor
    source = value.__dict__.get("_memory_of", (lambda: None, 0))[0]()
    if source is not None:
        return source is not dtensor
    local, own = own_part(value), dtensor._local_tensor
    return is_in_kept_memory(value) and (
        local.untyped_storage() is not own.untyped_storage() or local.storage_offset() != own.storage_offset()
    )


def _is_own_memory(dtensor: Any, value: Any) -> bool:
    """Whether ``value`` is what ``dtensor.data`` was before. The same on every rank, also one that holds nothing."""
    assigned = dtensor.__dict__.get("_num_assigned", 0)
    source, then = value.__dict__.get("_memory_of", (None, 0))
    if source is None or source() is not dtensor:
        dtensor.__dict__["_num_assigned"] = assigned + 1
        return False
    if assigned != then:
        raise SetDataError(
            f"the data of a DTensor of shape {tuple(dtensor.shape)} are restored from the parameter's own memory, "
            "which has been overwritten since: it is part of the buffer of its unit, and stays there. Keep a copy: "
            "backup = parameter.data.clone()"
        )
    return True


def wrap_local_gradient(changes: Changes, hooks: DTensorHooks) -> None:
    """``to_local`` itself does what it should for every placement, and is too cheap to be wrapped; only its backward
    asks what the placements mean."""
    original, has_custom = tensor_api._ToTorchTensor.backward, hooks.has_custom

    @changes.method(tensor_api._ToTorchTensor, "backward")
    def backward(ctx: Any, grad_output: Any) -> Any:
        spec, wanted = ctx.dtensor_spec, ctx.grad_placements
        if grad_output is None or not (has_custom(spec.placements) or (wanted and has_custom(wanted))):
            return original(ctx, grad_output)
        return hooks.local_gradient(grad_output, spec, wanted), None


def wrap_distribute_tensor(changes: Changes, _: Any) -> None:
    """Replace the function before there is a placement: one that is constructed among its arguments comes after Python has
    looked it up. The hooks are looked up when it is called."""
    original = _STOCK.distribute_tensor

    @changes.in_place_of(original)
    def distribute_tensor(
        tensor: Any, device_mesh: Any = None, placements: Any = None, *, src_data_rank: int | None = 0
    ) -> Any:
        hooks = HOOKS.get("placements")
        if hooks is None:
            return original(tensor, device_mesh, placements, src_data_rank=src_data_rank)
        begin_world()
        placements = _again(placements)
        if not placements or not hooks.has_custom(placements):
            return original(tensor, device_mesh, placements, src_data_rank=src_data_rank)
        return hooks.distribute_tensor(tensor, device_mesh, placements, src_data_rank=src_data_rank)


def refuse_early_lookups(changes: Changes, hooks: DTensorHooks) -> None:
    """Tell what to do where PyTorch's own ``distribute_tensor`` gets a placement that it does not know: a program that holds
    the function in a variable, or loads the placements among its arguments. It calls nothing that could answer for it."""
    original, code = tensor_api.assert_no_mixed_partial_types, _STOCK.distribute_tensor.__code__

    @changes.method(tensor_api, "assert_no_mixed_partial_types")
    def assert_no_mixed_partial_types(placements: Any) -> None:
        if hooks.has_custom(placements) and sys._getframe(1).f_code is code:
            raise PlacementError(
                f"distribute_tensor got {tuple(placements)}, but the function was imported before vescale's "
                "placements were loaded. Write `from vescale import RaggedShard` (the placement that you use) at the "
                "top of the script, before the function is imported; or call vescale.placements.distribute_tensor"
            )
        original(placements)


def key_compiled_code(changes: Changes, _: Any) -> None:
    """``torch.compile`` keeps code for the sizes of local tensors, which differ between ranks that share a cache, and
    between parts of equal tensors: its key has them, too."""
    original = DTensor._stable_hash_for_caching

    @changes.method(DTensor, "_stable_hash_for_caching")
    def _stable_hash_for_caching(self: Any) -> str:
        local = self._local_tensor
        return f"{original(self)} {tuple(local.shape)} {local.stride()}"


def format_scalars(changes: Changes, _: Any) -> None:
    def __format__(self: DTensor, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else repr(self) if not spec else self, spec)

    if "__format__" not in vars(DTensor):
        changes.attribute(DTensor, "__format__", __format__)


def read_only(x: DTensor, read: Any) -> Any:
    """What was read of ``x``; of an array, writes raise where it is a copy: they would be lost, which one device shows."""
    if hasattr(read, "setflags") and not all(placement.is_replicate() for placement in x.placements):
        read.setflags(write=False)
    return read


def explain_lists(changes: Changes, _: Any) -> None:
    """``torch.tensor([loss, other])`` asks for the length of what it does not know, and would read the memory."""
    original = torch.Tensor.__len__

    @functools.wraps(original)
    def __len__(self: Any) -> int:
        if not self.ndim:
            raise ArgumentTypeError(
                "len() of a 0-d tensor, a DTensor: of a list of them PyTorch makes no tensor. Expected their values, "
                "torch.tensor([x.item() for x in list]), or torch.stack(list)"
            )
        return original(self)

    changes.attribute(DTensor, "__len__", __len__)


def read_whole_values(changes: Changes, _: Any) -> None:
    """``tolist``, ``numpy`` and ``numpy.asarray`` of a DTensor: the whole value, which all ranks read together."""

    def reading(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        @functools.wraps(original)
        def read(self: Any, *args: Any, **kwargs: Any) -> Any:
            if num_function_modes() or not isinstance(self, DTensor):
                return original(self, *args, **kwargs)  # a model's mode answers
            return read_only(self, original(self.full_tensor(), *args, **kwargs))

        return read

    for name in ("tolist", "numpy", "__array__"):
        if name not in vars(DTensor):
            changes.attribute(DTensor, name, reading(name))
