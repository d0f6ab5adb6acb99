"""Tensors that autograd saves, in host memory until backward needs them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from vescale.comm import SideStream
from vescale.compat import make_dtensor, own_part, spec_of, storage_of

_OBSERVERS: list[Callable[[torch.UntypedStorage], None]] = []

_MIN_BYTES = 1024
"""Smaller tensors stay where they are: a copy costs more than their memory is worth."""


_ALIGNMENT = 64  # bytes


@contextlib.contextmanager
def observe_offloaded(observer: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Inside, ``observer`` is called with the memory of each copy on the host, and copies come back as early as on a
    device, also on a CPU."""
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)


def _empty_like(of: torch.Tensor, shift: int, device: torch.device, *, pin_memory: bool = False) -> torch.Tensor:
    """With the strides of ``of``, also where it is a part of a larger tensor, and ``shift`` elements behind where memory is
    aligned: matrix products round otherwise for other strides and alignments."""
    memory = torch.empty(_reach(of) + shift, dtype=of.dtype, device=device, pin_memory=pin_memory)
    return memory.as_strided(of.size(), of.stride(), shift)


def _reach(of: torch.Tensor) -> int:
    """The number of elements from the first to the last in memory."""
    return 1 + sum((n - 1) * s for n, s in zip(of.size(), of.stride())) if of.numel() else 0


def _each_once(of: torch.Tensor) -> torch.Tensor:
    """The elements in memory, each once, of a tensor that was expanded or has windows that overlap."""
    for dim, stride in enumerate(of.stride()):
        of = of.narrow(dim, 0, min(1, of.size(dim))) if stride == 0 else of
    reach = 0
    for stride, size in sorted(zip(of.stride(), of.size())):
        if size > 1 and stride <= reach:
            return of.as_strided((_reach(of),), (1,))
        reach += (size - 1) * stride
    return of


class _OnHost:
    """One tensor. ``copy`` is its memory on the host, and ``back`` on the device again while backward needs it."""

    def __init__(self, local: torch.Tensor, stream: Any) -> None:
        self.device, self._done = local.device, None
        on_device = local.device.type != "cpu"
        self._shift = local.data_ptr() % _ALIGNMENT // local.element_size()
        copy = _empty_like(local, self._shift, torch.device("cpu"), pin_memory=on_device)
        self.copy = copy
        for observer in tuple(_OBSERVERS):
            observer(copy.untyped_storage())
        self._back: torch.Tensor | None = None
        if not on_device:
            _each_once(copy).copy_(_each_once(local))
            return
        module = torch.get_device_module(local.device.type)
        stream.wait_stream(module.current_stream(local.device))
        with module.stream(stream):
            _each_once(copy).copy_(_each_once(local), non_blocking=True)
            self._done = stream.record_event()
        local.record_stream(stream)  # its memory is not reused before it has been read

    def prefetch(self, stream: Any) -> None:
        """Start to copy it back; on a CPU nothing is gained by that."""
        if self._back is not None:
            return
        if self.device.type == "cpu":
            if _OBSERVERS:
                self._back = self._copied()
            return
        # Behind the copy to the host, on the same stream.
        with torch.get_device_module(self.device.type).stream(stream):
            self._back = _empty_like(self.copy, self._shift, self.device)
            _each_once(self._back).copy_(_each_once(self.copy), non_blocking=True)
            self._done = stream.record_event()

    def load(self, stream: Any) -> torch.Tensor:
        if self.device.type == "cpu":
            found, self._back = self._back, None
            return found if found is not None else self._copied()
        self.prefetch(stream)
        back, self._back = self._back, None
        assert back is not None and self._done is not None
        current = torch.get_device_module(self.device.type).current_stream(self.device)
        current.wait_event(self._done)
        back.record_stream(current)
        return back

    def _copied(self) -> torch.Tensor:
        copied = _empty_like(self.copy, self._shift, self.device)
        _each_once(copied).copy_(_each_once(self.copy))
        return copied


class OffloadedForward:
    """Copies what a module's forward saves to the host while it runs, and back when its backward begins.

    On an accelerator copies run on a stream of their own, from and to pinned memory; when backward reaches a forward, what
    that has saved starts to come back, and what the forward before it has saved. Parameters and buffers of the module stay
    where they are. What ``load`` returns is equal bit by bit, so that nothing is computed again.

    Args:
        before: the forward that ran before this one, if any.
        on_copy: gets each copy.
    """

    def __init__(
        self,
        module: nn.Module,
        before: OffloadedForward | None,
        on_copy: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        self._module = module
        self._before = weakref.ref(before) if before is not None else None
        self._on_copy = on_copy
        self._kept: list[weakref.ref[_OnHost]] = []
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, int, weakref.ref[_OnHost]]] = {}
        self._own: dict[int, bool] = {}
        self._stream: Any = None
        self._is_loading = False

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, self._unpack)

    def end(self) -> None:
        """The forward has ended: what is needed to recognize tensors that are saved twice goes."""
        self._known.clear()
        self._own.clear()
        del self._module

    def prefetch(self) -> None:
        for reference in self._kept:
            on_host = reference()
            if on_host is not None:
                on_host.prefetch(self._stream)

    def _pack(self, tensor: torch.Tensor) -> Any:
        local = own_part(tensor)
        storage = storage_of(local)
        is_large = local.numel() * local.element_size() >= _MIN_BYTES
        if storage is None or local.is_meta or not is_large or self._is_own(storage):
            return tensor
        on_host = self._on_host(local, storage)
        return on_host, spec_of(tensor) if isinstance(tensor, DTensor) else None, self

    def _on_host(self, local: torch.Tensor, storage: torch.UntypedStorage) -> _OnHost:
        key = (storage._cdata, local.storage_offset(), tuple(local.size()), local.stride(), local.dtype)
        found = self._known.get(key)
        if found is not None:
            memory, version, reference = found
            known = reference()
            if known is not None and not memory.expired() and version == local._version:
                return known
        if self._stream is None and local.device.type != "cpu":
            self._stream = SideStream(local.device, "offload", urgent=False).stream
        with torch.no_grad():
            made = _OnHost(local.detach(), self._stream)
        self._known[key] = StorageWeakRef(storage), local._version, weakref.ref(made)
        self._kept.append(weakref.ref(made))
        self._on_copy(local, made.copy)
        return made

    def _is_own(self, storage: torch.UntypedStorage) -> bool:
        """Whether a parameter or buffer of the module has this memory, as its forward sees them now."""
        known = self._own.get(storage._cdata)
        if known is None:
            for module in self._module.modules():
                names = (*module._parameters, *module._buffers)
                for name in names:
                    tensor = getattr(module, name)
                    own = storage_of(tensor) if isinstance(tensor, torch.Tensor) else None
                    if own is not None:
                        self._own[own._cdata] = True
            known = self._own.get(storage._cdata, False)
        return known

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        on_host, spec, _ = packed
        if (self._stream is not None or _OBSERVERS) and not self._is_loading:
            self._is_loading = True
            self.prefetch()
            before = self._before() if self._before is not None else None
            if before is not None:
                before.prefetch()
        with torch.no_grad():
            local = on_host.load(self._stream)
        return local if spec is None else make_dtensor(local, spec)
