"""Which results of ops a checkpointed forward saves, and where the recomputation finds them."""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from vescale.comm import KeptResults, KeptTensors, SideStream
from vescale.compat import (
    TorchDispatchMode,
    detached_below_autograd,
    make_dtensor,
    own_part,
    spec_of,
    storage_of,
    tensors_in,
    tree_map,
    written_tensors,
)
from vescale.ops import begin_anew
from vescale.plans import CheckpointPolicy, split_selector

# Where in the streams of torch's generators a forward draws its numbers.


class GeneratorStates:
    """The states of the default generators: of the CPU, and of the current device of another type.

    On CUDA a state is a seed and an offset, 16 bytes; on a CPU it is that of mt19937, 5 kB.
    """

    def __init__(self, device_type: str) -> None:
        self._module = getattr(torch, device_type) if device_type not in ("cpu", "meta") else None
        self._states = self._now()

    def _now(self) -> tuple[torch.Tensor, ...]:
        states = [torch.get_rng_state()]
        if self._module is not None and self._module.is_initialized():
            states.append(self._module.get_rng_state())
        return tuple(states)

    def have_moved(self) -> bool:
        """Whether something has been drawn since."""
        now = self._now()
        return len(now) != len(self._states) or any(not torch.equal(a, b) for a, b in zip(self._states, now))

    def restore(self) -> None:
        torch.set_rng_state(self._states[0])
        if len(self._states) > 1:
            assert self._module is not None
            self._module.set_rng_state(self._states[1])

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, what was drawn after these states is drawn again; afterwards the generators are as before."""
        before = self._now()
        self.restore()
        try:
            yield
        finally:
            torch.set_rng_state(before[0])
            if len(before) > 1:
                assert self._module is not None
                self._module.set_rng_state(before[1])


PRODUCTS = frozenset(
    [
        "aten.mm",
        "aten.addmm",
        "aten.bmm",
        "aten.baddbmm",
        "aten.linear",
        "aten._scaled_mm",
        "aten._grouped_mm",
        "aten._scaled_grouped_mm",
    ]
)
"""Of ``selective`` every second one of these is saved, ..."""
HEAVY = PRODUCTS | frozenset(["aten.convolution", "aten._convolution", "aten.topk", "aten.sort"])
"""... and the others, and attention, always."""
_ATTENTION = "aten._scaled_dot_product"


def op_name(op: Any) -> str:
    """``aten.mm`` of any overload of it."""
    name = str(op)
    return name.rpartition(".")[0] if name.count(".") > 1 else name


def saving_contexts(
    policy: CheckpointPolicy,
    path: str,
    kept: KeptResults,
    running: Callable[[], str],
    on_saved: Callable[[str, Any], None],
    device_type: str,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a forward and of its recomputation, for ``context_fn`` of :func:`torch.utils.checkpoint.checkpoint`.

    They differ from those of ``create_selective_checkpoint_contexts`` in three points. Results that are written to later
    (``x = linear(x); x.relu_()``) are computed again, which is an error there. Random ops whose results are saved leave the
    generators behind as the first time. Backwards may run twice (``retain_graph``).

    Args:
        kept: whose collectives, and the local steps around them, are no ops of the model.
        running: returns the path of the innermost running module.
        on_saved: gets the name of an op, and its result.
    """
    results: dict[tuple[Any, int], _Saved] = {}
    return _Saving(SavingRule(policy, path), kept, results, running, on_saved, device_type), _Restoring(kept, results)


class SavingRule:
    """Says which calls of ops are saved. It is asked in the forward only: the recomputation looks up what was saved."""

    def __init__(self, policy: CheckpointPolicy, path: str) -> None:
        self._policy = policy
        self._calls: Counter[Any] = Counter()
        self._modules: dict[str, set[str | None]] = defaultdict(set)  # of an op; None: all of them
        for text in policy.save:
            where, op = split_selector(text)
            self._modules[_family(op)].add(None if where is None else f"{path}.{where}")

    def saves(self, op: Any, running: Callable[[], str]) -> bool:
        name = op_name(op)
        if self._policy.kind == "selective":
            return is_heavy(name) and (name not in PRODUCTS or self._counts(name))
        return self._is_named(name, str(op), running) and self._counts(name)

    def _counts(self, name: str) -> bool:
        self._calls[name] += 1
        return (self._calls[name] - 1) % self._policy.every == 0

    def _is_named(self, name: str, overload: str, running: Callable[[], str]) -> bool:
        modules = self._modules.get(_family(name), set()) | self._modules.get(overload, set())
        if not modules or None in modules:
            return bool(modules)
        path = running()
        return any(module is not None and (path == module or path.startswith(f"{module}.")) for module in modules)


def is_heavy(name: str) -> bool:
    """Whether ``selective`` saves results of the op, all or every second one."""
    return name in HEAVY or _family(name) == _ATTENTION


def _family(op: str) -> str:
    """Kernels of attention are one op: which of them runs depends on the device."""
    return _ATTENTION if op.partition(".")[2].lstrip("_").startswith("scaled_dot_product") else op


class _Saved:
    """The result of an op, and where it left the generators if it is a random one."""

    def __init__(self, result: Any, states: GeneratorStates | None) -> None:
        self._result = tree_map(_alias, result)
        self.tensors = KeptTensors(list(tensors_in(self._result)))
        self.states = states

    def result(self) -> Any:
        for tensor in self.tensors.tensors:
            begin_anew(tensor)
        return tree_map(_alias, self._result)


def _alias(x: Any) -> Any:
    """The same memory with the same version, apart from the graph that the result gets."""
    return detached_below_autograd(x) if isinstance(x, torch.Tensor) else x


class Counting(TorchDispatchMode, ABC):
    """A dispatch mode that numbers the calls of each op of the model."""

    def __init__(self, kept: KeptResults, results: dict[tuple[Any, int], _Saved]) -> None:
        super().__init__()
        self._kept, self._results = kept, results
        self._calls: Counter[Any] = Counter()

    def __enter__(self) -> Any:
        self._calls.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._kept.is_communicating or func in _UNCOUNTED:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            result = func(*args, **kwargs)
            for tensor in written_tensors(func, args, kwargs):
                self._kept.note_write(tensor)
            return result
        key = func, self._calls[func]
        self._calls[func] += 1
        return self.run(key, args, kwargs)

    @abstractmethod
    def run(self, key: tuple[Any, int], args: Any, kwargs: Any) -> Any:
        """Run or answer call number ``key[1]`` of the op ``key[0]``."""


# Checkpointing itself calls it, and not as often in the recomputation.
_UNCOUNTED = frozenset((torch.ops.aten.detach.default,))


class _Saving(Counting):
    def __init__(
        self,
        rule: SavingRule,
        kept: KeptResults,
        results: dict[tuple[Any, int], _Saved],
        running: Callable[[], str],
        on_saved: Callable[[str, Any], None],
        device_type: str,
    ) -> None:
        super().__init__(kept, results)
        self._rule, self._running, self._on_saved = rule, running, on_saved
        self._device_type = device_type

    def run(self, key: tuple[Any, int], args: Any, kwargs: Any) -> Any:
        func = key[0]
        result = func(*args, **kwargs)
        if self._rule.saves(func, self._running):
            draws = torch.Tag.nondeterministic_seeded in func.tags
            self._results[key] = saved = _Saved(result, GeneratorStates(self._device_type) if draws else None)
            self._kept.hold(saved.tensors)
            self._on_saved(op_name(func), result)
        return result


class _Restoring(Counting):
    def run(self, key: tuple[Any, int], args: Any, kwargs: Any) -> Any:
        saved = self._results.get(key)
        if saved is None or not saved.tensors.is_unwritten:
            return key[0](*args, **kwargs)
        if saved.states is not None:
            saved.states.restore()
        return saved.result()


# Tensors that autograd saves, in host memory until backward needs them.


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
