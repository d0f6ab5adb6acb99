"""``MemoryLog``: which memory is allocated and freed, in the order of a run; ``OpCosts``: what its ops cost."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Those in lists, tuples and dicts, too, in order. Ops have no other containers, and this is called for every op."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            if value:
                found += tensors_in(*value)
        elif isinstance(value, dict) and value:
            found += tensors_in(*value.values())
    return found


class Instant(NamedTuple):
    """When memory comes or goes.

    Attributes:
        step: number of the training step.
        phase: ``start``, ``forward``, ``loss``, ``recompute``, ``backward`` or ``optimizer``; of a pipeline also
            ``communication``, between passes, and ``weights``, the second half of a backward that is split.
        module: the path of the module whose op runs; None: of none.
        stage, microbatch: of a pipeline, whose forward or backward runs.
    """

    step: int
    phase: str
    module: str | None
    stage: int | None = None
    microbatch: int | None = None

    @property
    def run(self) -> tuple[int, int | None, int | None]:
        """The same for a forward and its backward."""
        return self.step, self.stage, self.microbatch


@dataclass
class Block:
    """One block of memory, from its allocation until it is freed.

    Attributes:
        num_bytes: its size.
        storage: number of the storage, the same for each allocation of one storage.
        begin, end: numbers of instants; ``end`` is None while it is there.
        is_communicated: a collective has read or written it.
    """

    num_bytes: int
    storage: int
    begin: int
    end: int | None = None
    is_communicated: bool = False


@dataclass
class MemoryLog:
    """All blocks of a run. ``place`` tells where the run is.

    Attributes:
        blocks: in the order of their allocation.
        instants: one for each allocation and each time that memory is freed.
        on_host: numbers of storages that a device would have in the host's memory.
    """

    place: Callable[[], Instant]
    blocks: list[Block] = field(default_factory=list)
    instants: list[Instant] = field(default_factory=list)
    on_host: set[int] = field(default_factory=set)
    is_closed: bool = False
    """Whether the run is over: what is freed then has been there to its end."""
    _alive: dict[int, Block] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=dict)
    _references: dict[int, weakref.ref[torch.UntypedStorage]] = field(default_factory=dict)
    _ranges: dict[int, tuple[int, int]] = field(
        default_factory=dict
    )  # addresses of memory that other storages may share
    _count: int = 0

    def mark(self) -> int:
        """A new instant."""
        self.instants.append(self.place())
        return len(self.instants) - 1

    def see(self, storage: torch.UntypedStorage) -> int:
        """Take a storage into account, if it is new; its number. A storage inside of another's memory has that one's."""
        key = storage._cdata
        number = self._numbers.get(key)
        if number is None:
            number = self._owner(storage)
            is_part = number is not None
            if number is None:
                number, self._count = self._count, self._count + 1
            self._numbers[key] = number
            self._references[key] = weakref.ref(storage, lambda _, n=number: self._gone(key, n, is_part))  # type: ignore[misc]
            if (
                not is_part and storage.nbytes() and storage.device.type != "meta"
            ):  # shapes are propagated without memory
                self._allocate(number, storage.nbytes())
        return number

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """A storage that several others may share has been allocated, or freed."""
        number = self.see(storage)
        block = self._alive.get(number)
        if block is None or block.num_bytes != num_bytes:
            self._free(number)
            if num_bytes:
                self._allocate(number, num_bytes)
        if num_bytes:
            self._ranges[number] = (storage.data_ptr(), storage.data_ptr() + num_bytes)

    def communicated(self, storages: Iterable[torch.UntypedStorage]) -> None:
        for storage in storages:
            block = self._alive.get(self.see(storage))
            if block is not None:
                block.is_communicated = True

    def _owner(self, storage: torch.UntypedStorage) -> int | None:
        if not self._ranges or not storage.nbytes() or storage.device.type == "meta":
            return None
        try:
            begin = storage.data_ptr()
        except RuntimeError:  # of a fake tensor
            return None
        return next((number for number, (first, last) in self._ranges.items() if first <= begin < last), None)

    def _allocate(self, number: int, num_bytes: int) -> None:
        block = self._alive[number] = Block(num_bytes, number, self.mark())
        self.blocks.append(block)

    def _free(self, number: int) -> None:
        self._ranges.pop(number, None)
        block = self._alive.pop(number, None)
        if block is not None and not self.is_closed:
            block.end = self.mark()

    def _gone(self, key: int, number: int, is_part: bool) -> None:
        self._numbers.pop(key, None)
        self._references.pop(key, None)
        if not is_part:
            self._free(number)


# What the ops of a step compute and move: floating-point operations and bytes of memory, by module.


OpKey = tuple[str, str | None, int | None, str, torch.dtype, int, int]
"""(phase, module, stage, op, dtype, flops, bytes)."""

SKIPPED_OUTPUTS = "skipped random outputs"
"""Stands for an op where a host's generator steps over the random numbers of other ranks, 4 bytes each."""

RANDOM_SPANS = "spans of random fills"
"""Stands for an op that fills a tensor from several ranges of the random number stream, on a host. Its bytes are the number
of ranges."""

RANDOM_FILLS = ("bernoulli_", "uniform_", "normal_", "exponential_", "random_")
"""Ops that take what their elements take, whatever the dtype."""

# So many outputs of a generator are jumped over in the same time.
_MOST_OUTPUTS = 1 << 23
# Memory is reserved, or given to a tensor: nothing is read or written.
_MOVES_NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_")


@dataclass
class OpCost:
    """Ops of one kind, dtype and size.

    Attributes:
        name: of the op.
        flops: floating-point operations of one call; 0 for ops that only move data.
        num_bytes: read and written by one call.
        num_calls: how often.
    """

    name: str
    flops: int
    num_bytes: int
    num_calls: int = 0

    @property
    def size(self) -> int:
        """What a measured table gives seconds for."""
        return self.flops or self.num_bytes


@dataclass
class OpCosts:
    """By (phase, module, stage, op, dtype, flops, bytes).

    Attributes:
        by_key: how often.
        on_dtensors: counts of what the host takes time for besides ops, by kind (:data:`vescale.estimation.HOST_KINDS`),
            phase, module and stage.
    """

    by_key: dict[OpKey, int] = field(default_factory=dict)
    on_dtensors: dict[tuple[str, str, str | None, int | None], int] = field(default_factory=dict)

    def add(self, place: Instant, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        if op.namespace != "aten" or op.overloadpacket.__name__ in _MOVES_NOTHING:
            return
        tensors = tensors_in(args, kwargs)
        results = tensors_in(result)
        if not results or (all(any(_same(x, y) for y in tensors) for x in results) and not op._schema.is_mutable):
            return  # a view
        largest = max((*tensors, *results), key=torch.Tensor.numel)
        flops = _flops(op, args, kwargs, result)
        moved = sum(x.numel() * x.element_size() for x in tensors) + sum(
            x.numel() * x.element_size() for x in results if not any(x is y for y in tensors)
        )
        key = (place.phase, place.module, place.stage, op.overloadpacket.__name__, largest.dtype, flops, moved)
        self.by_key[key] = self.by_key.get(key, 0) + 1

    def add_draw(self, place: Instant, name: str, local: torch.Tensor, skipped: int, num_spans: int) -> None:
        """A random fill of this rank's part of a tensor. ``skipped``: outputs of a host's generator that it steps over;
        ``num_spans``: how many ranges of outputs it takes."""
        for own, dtype, moved in (
            (name, local.dtype, local.numel() * local.element_size()),
            (SKIPPED_OUTPUTS, torch.float32, 4 * min(skipped, _MOST_OUTPUTS)),
            (RANDOM_SPANS, torch.float32, num_spans),
        ):
            if moved:
                key = (place.phase, place.module, place.stage, own, dtype, 0, moved)
                self.by_key[key] = self.by_key.get(key, 0) + 1

    def add_host(self, place: Instant, kind: str, times: int = 1) -> None:
        """Count what the host takes time for besides ops, by kind (:data:`vescale.estimation.HOST_KINDS`)."""
        key = kind, place.phase, place.module, place.stage
        self.on_dtensors[key] = self.on_dtensors.get(key, 0) + times

    def add_on_dtensors(self, place: Instant, is_saving: bool) -> None:
        """An op on DTensors; ``is_saving``: of a module whose checkpointing policy saves results of ops."""
        kind = {"loss": "forward", "weights": "backward"}.get(place.phase, place.phase)
        if is_saving and kind in ("forward", "recompute"):
            kind = "saving"
        self.add_host(place, kind)

    def __iter__(self) -> Iterator[tuple[tuple[str, str | None, int | None, torch.dtype], OpCost]]:
        for (phase, module, stage, name, dtype, flops, moved), calls in self.by_key.items():
            yield (phase, module, stage, dtype), OpCost(name, flops, moved, calls)


def size_of(key: OpKey) -> int:
    """Floating-point operations, or bytes of an op that has none."""
    return key[5] or key[6]


def _flops(op: Any, args: Any, kwargs: Any, result: Any) -> int:
    name = op.overloadpacket.__name__
    if name == "_scaled_dot_product_flash_attention_for_cpu":  # PyTorch counts kernels of GPUs only
        return int(sdpa_flop_count(*(x.shape for x in args[:3])))
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return int(sdpa_backward_flop_count(*(x.shape for x in args[:4])))
    if name == "_grouped_mm":  # experts; groups are rows of the first or columns of the second, or both have one each
        left, right = args[0].shape, args[1].shape
        return 2 * left[-2] * left[-1] * right[-1] * (left[0] if len(left) == len(right) == 3 else 1)
    count: Any = flop_registry.get(op.overloadpacket)
    return int(count(*args, **kwargs, out_val=result)) if count is not None else 0


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return math.prod(x.shape) == 0 or x.untyped_storage()._cdata == y.untyped_storage()._cdata
