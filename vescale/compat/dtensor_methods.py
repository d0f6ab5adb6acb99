"""DTensor's methods and functions: placements that stock DTensor does not know, formatting, copies.

Each wrapper first looks for a custom placement and calls the original if there is none. What happens otherwise is given by
:class:`DTensorHooks`, which ``vescale.placements`` and ``vescale.ops`` fill in.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Set
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _api as tensor_api

from vescale.compat.checkpoint_plans import CheckpointHooks
from vescale.compat.dtensor import keeps_memory, local_of, make_dtensor, spec_of
from vescale.compat.model_hooks import tell_plain_value
from vescale.compat.passed_functions import pass_methods
from vescale.compat.patching import Changes
from vescale.compat.sharding_caches import begin_world
from vescale.errors import DTensorStorageError, SavedPartWarning, SetDataError

__all__ = [
    "DTensorHooks",
    "give_values",
    "stock",
    "wrap_conversions",
    "wrap_copying",
    "wrap_distribute_tensor",
    "wrap_set_item",
]


@dataclass(frozen=True)
class DTensorHooks:
    """What runs instead of stock DTensor once a custom placement is involved.

    ``has_custom(placements)`` decides: whether the type of one is in ``custom_types``, a set that may grow. The others have
    the signatures of what they replace (``set_item`` gets the original first), except
    ``local_gradient(grad, spec, grad_placements)``, the DTensor that ``to_local``'s backward gives for the gradient of the
    local tensor of a DTensor with ``spec``, and ``run_op(op, args, kwargs, schema)``, which runs an op or gives the
    sharding decision that the dispatcher caches; ``keeps_operands(op, schema)`` gives the decision or None and runs nothing;
    ``sizes_of(op)`` gives a function for :mod:`vescale.compat.closed_forms`, or None.
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
    sizes_of: Callable[[Any], Any]


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
    changes.attribute(DTensor, "from_local", staticmethod(_from_local(hooks)))
    _wrap_local_gradient(changes, hooks)


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


def _from_local(hooks: DTensorHooks) -> Callable[..., Any]:
    original, has_custom = _STOCK.from_local, hooks.has_custom

    @functools.wraps(original)
    def from_local(local_tensor: Any, device_mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        placements = _again(placements)
        gradient = _again(options.get("grad_placements"))
        if "grad_placements" in options:  # before 2.12 there is none
            options["grad_placements"] = gradient
        if not ((placements and has_custom(placements)) or (gradient and has_custom(gradient))):
            return original(local_tensor, device_mesh, placements, **options)
        return hooks.from_local(local_tensor, device_mesh, placements, **options)

    return from_local


def wrap_set_item(changes: Changes, hooks: DTensorHooks) -> None:
    original = DTensor.__setitem__

    @functools.wraps(original)
    def __setitem__(self: Any, index: Any, value: Any) -> None:
        if not hooks.has_custom(self._spec.placements):
            return original(self, index, value)
        return hooks.set_item(original, self, index, value)

    changes.attribute(DTensor, "__setitem__", __setitem__)
    changes.attribute(DTensor, "data", property(_data, functools.partial(_set_data, hooks)))


def _data(self: Any) -> Any:
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
    is_part = keeps_memory(self)
    is_plain = not isinstance(value, DTensor)
    if (is_plain or is_part) and (value.shape != self.shape or (is_part and value.dtype != self.dtype)):
        raise SetDataError(
            f"data of shape {tuple(value.shape)} and {value.dtype} for a DTensor of shape {tuple(self.shape)} and "
            f"{self.dtype} placed as {tuple(self.placements)}; expected "
            + (
                "the same, because it is a part of the buffer of its unit"
                if is_part
                else "the global tensor, the same on every rank, or a DTensor"
            )
        )
    if isinstance(value, DTensor) and value.device_mesh != self.device_mesh:
        raise SetDataError(f"data on {value.device_mesh} for a DTensor on {self.device_mesh}; expected the same mesh")
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


def _is_own_memory(dtensor: Any, value: Any) -> bool:
    """Whether ``value`` is what ``dtensor.data`` was before. The same on every rank, also one that holds nothing."""
    assigned = dtensor.__dict__.get("_num_assigned", 0)
    source, then = value.__dict__.get("_memory_of", (None, 0))
    if source is None or source() is not dtensor:
        dtensor.__dict__["_num_assigned"] = assigned + 1
        return False
    if assigned != then:
        raise SetDataError(
            f"data for a DTensor of shape {tuple(dtensor.shape)} that are its own memory, to which other data have been "
            "assigned since: it is a part of the buffer of its unit, and stays there. Keep a copy: "
            "backup = parameter.data.clone()"
        )
    return True


def _wrap_local_gradient(changes: Changes, hooks: DTensorHooks) -> None:
    """``to_local`` itself does what it should for every placement, and is too cheap to be wrapped; only its backward
    asks what the placements mean."""
    original, has_custom = tensor_api._ToTorchTensor.backward, hooks.has_custom

    @functools.wraps(original)
    def backward(ctx: Any, grad_output: Any) -> Any:
        spec, wanted = ctx.dtensor_spec, ctx.grad_placements
        if grad_output is None or not (has_custom(spec.placements) or (wanted and has_custom(wanted))):
            return original(ctx, grad_output)
        return hooks.local_gradient(grad_output, spec, wanted), None

    changes.attribute(tensor_api._ToTorchTensor, "backward", staticmethod(backward))


def wrap_distribute_tensor(changes: Changes, hooks: DTensorHooks) -> None:
    original = _STOCK.distribute_tensor

    @functools.wraps(original)
    def distribute_tensor(
        tensor: Any, device_mesh: Any = None, placements: Any = None, *, src_data_rank: int | None = 0
    ) -> Any:
        begin_world()
        placements = _again(placements)
        if not placements or not hooks.has_custom(placements):
            return original(tensor, device_mesh, placements, src_data_rank=src_data_rank)
        return hooks.distribute_tensor(tensor, device_mesh, placements, src_data_rank=src_data_rank)

    changes.function(original, distribute_tensor)


def give_values(changes: Changes, hooks: Any) -> None:
    """What DTensors do in models' forwards and around them."""
    _format_scalars(changes)
    _read_whole_values(changes)
    pass_methods(changes)


def _format_scalars(changes: Changes) -> None:
    def __format__(self: DTensor, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else repr(self) if not spec else self, spec)

    if "__format__" not in vars(DTensor):
        changes.attribute(DTensor, "__format__", __format__)


def _read_whole_values(changes: Changes) -> None:
    """``tolist``, ``numpy`` and ``numpy.asarray`` of a DTensor: the whole value, which all ranks read together."""

    def reading(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        @functools.wraps(original)
        def read(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch._C._len_torch_function_stack() or not isinstance(self, DTensor):
                return original(self, *args, **kwargs)  # a model's mode answers
            return original(self.full_tensor(), *args, **kwargs)

        return read

    for name in ("tolist", "numpy", "__array__"):
        if name not in vars(DTensor):
            changes.attribute(DTensor, name, reading(name))


def wrap_copying(changes: Changes, _: Any) -> None:
    """``Tensor.__deepcopy__`` and ``Tensor.__reduce_ex__`` (``torch/_tensor.py``, 2.13) recognize a tensor without memory of
    its own by its address 0. A DTensor's is its local tensor's offset: if it is not 0, they fail ("invalid python storage").
    """
    deepcopy, reduce = DTensor.__deepcopy__, DTensor.__reduce_ex__

    @functools.wraps(deepcopy)
    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) in memo or not self.is_leaf or not _is_inside(self):
            return deepcopy(self, memo)
        aligned = _aligned(self)
        aligned.grad = self.grad
        copied = memo[id(self)] = deepcopy(aligned, memo)
        del memo[id(aligned)]  # which another object may get
        return copied

    @functools.wraps(reduce)
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        if protocol == _OF_TORCH_SAVE:
            _warn_of_part(self)
        return reduce(_aligned(self) if _is_inside(self) else self, protocol)

    def is_shared(self: Any) -> bool:
        return local_of(self).is_shared()

    def refusing(advice: str) -> Callable[..., NoReturn]:
        def refused(self: Any) -> NoReturn:
            raise DTensorStorageError(
                f"storage() of a DTensor of shape {tuple(self.shape)} placed as {tuple(self.placements)}: it has no memory "
                f"of its own, and to_local() is this rank's part. {advice}"
            )

        return refused

    for method in (__deepcopy__, __reduce_ex__, is_shared):
        changes.attribute(DTensor, method.__name__, method)
    for name, advice in _NO_MEMORY.items():
        changes.attribute(DTensor, name, refusing(advice))


_NO_MEMORY = {
    "storage": "To write a file (safetensors), give it whole tensors, x.full_tensor() on all ranks, or save with "
    "vescale.checkpoint.save, and export (`vescale ckpt export`)",
    # Of share_memory(), where the process would crash, and of FullyShardedDataParallel, which frees what it has flattened.
    "_typed_storage": "Its memory can neither be shared between processes nor freed: call share_memory_() of x.to_local(); "
    "and leave FullyShardedDataParallel out, for the parameters are distributed already",
}
_OF_TORCH_SAVE = 2
"""torch.save's protocol; copies, queues and process groups pickle with newer ones."""
_WARNED: list[bool] = []


def _warn_of_part(x: Any) -> None:
    """Of the first DTensor in this process of which other ranks have parts, too."""
    spec = spec_of(x)
    cut = [a for a, p in enumerate(spec.placements) if not p.is_replicate() and spec.mesh.size(a) > 1]
    if _WARNED or not cut or local_of(x).is_meta:
        return
    _WARNED.append(True)
    warnings.warn(
        SavedPartWarning(
            f"torch.save writes this rank's part {tuple(local_of(x).shape)} of a DTensor of shape {tuple(x.shape)} placed "
            f"as {spec.placements}, not the whole tensor: the file can be loaded on this rank of an equal mesh only. Save "
            "the model on all ranks with vescale.checkpoint.save (any mesh loads it), or the whole values: `state = {name: "
            'x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in model.state_dict().items()}` on all ranks, '
            "then torch.save(state, ...) on one"
        ),
        stacklevel=3,
    )


def _is_inside(x: Any) -> bool:
    local = local_of(x)
    return type(x) is DTensor and type(local) is torch.Tensor and local.storage_offset() > 0 and not local.is_meta


def _aligned(x: Any) -> DTensor:
    """``x`` over the same memory, seen as a storage of its own, for ``copy.copy`` shares it."""
    local = local_of(x).detach()
    last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride())) if local.numel() else -1
    begin, itemsize = local.storage_offset(), local.itemsize
    storage = local.untyped_storage()[begin * itemsize : (begin + last + 1) * itemsize]
    local = local.new_empty(0).set_(storage, 0, local.shape, local.stride())
    twin = make_dtensor(local, spec_of(x), requires_grad=x.requires_grad)
    twin.__dict__.update(x.__dict__)
    return twin
