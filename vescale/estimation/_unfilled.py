"""``UnfilledTensors``: the ops of a program make real tensors of the right sizes, and compute no floating-point numbers.

Memory that nobody writes to costs no pages, so that a rank's part of a model of any size runs on a small host. What programs
branch on, indices and masks, stays real where it follows from constants and inputs: small tensors are computed as long as
everything that they depend on is known. What depends on unknown numbers gets a stated value
(:mod:`vescale.estimation._unknown_values`).
"""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from vescale.compat import FakeTensor, TorchDispatchMode, tree_leaves, tree_map
from vescale.estimation._collectives import follow_collective
from vescale.estimation._memory_log import MemoryLog
from vescale.estimation._tensors_in import tensors_in
from vescale.estimation._unknown_values import Routing, unknown_scalar, unknown_values

__all__ = ["UnfilledTensors"]

_aten = torch.ops.aten
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_MOST_FLOATS, _MOST_INTEGERS = 1 << 18, 1 << 24  # elements of tensors that are computed
_READ = 1024  # elements of a tensor that a program may read without an op, as tolist() does
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_RESHAPES = ("set_", "resize_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "detach_")  # no values
_FILLS = ("zero_", "fill_", "copy_")
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
_NORESERVE = 0x4000
_RESULTS: dict[Any, Any] = {}  # of ops on the meta device, by op, arguments and what their tensors are
_MOST_RESULTS = 4096

Listener = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]


class _Kind(NamedTuple):
    """What an op's schema says: names and positions of the arguments that it writes to, and for each result the position of
    the argument that it is, or None."""

    is_view: bool
    writes: tuple[tuple[int, str], ...]
    results: tuple[int | None, ...]


@functools.lru_cache(maxsize=4096)
def _kind(op: Any) -> _Kind:
    schema = op._schema
    writes, by_alias = [], {}
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write:
            writes.append((position, argument.name))
            for name in info.before_set:
                by_alias[name] = position
    results: list[int | None] = []
    views = 0
    for result in schema.returns:
        info = result.alias_info
        results.append(
            next((by_alias[n] for n in info.before_set if n in by_alias), None) if info is not None else None
        )
        views += info is not None and not info.is_write
    return _Kind(bool(views) and not writes, tuple(writes), tuple(results))


class UnfilledTensors(TorchDispatchMode):
    """See the module.

    Args:
        log: learns of all memory.
        routing: how tokens choose experts.
        listener: called with each op on plain tensors, its arguments and result.
        on_dtensor: called for each op on DTensors, whose ops on plain tensors come afterwards.
    """

    leaves_meta_alone = True  # so that shapes of DTensors' results are found without fake tensors
    allows_composites = True  # their backward saves, and gathers again, what it does in a run

    def __init__(
        self,
        log: MemoryLog,
        routing: Routing,
        listener: Listener | None = None,
        on_dtensor: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.log, self.routing, self._listener, self._on_dtensor = log, routing, listener, on_dtensor
        self._unknown: set[int] = set()  # numbers of storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(t not in _PLAIN for t in types):
            # Shapes are propagated on fake tensors; other subclasses run ops on tensors that they hold, which come here.
            if any(issubclass(t, FakeTensor) for t in types):
                return func(*args, **kwargs)
            if self._on_dtensor is not None:
                self._on_dtensor()
            return NotImplemented
        tensors = tensors_in(args, kwargs)
        if any(x.is_meta for x in tensors) or str(kwargs.get("device", "")) == "meta":
            result = self._of_meta(func, args, kwargs)
            for x in tensors_in(result):
                if not x.is_meta and x.is_floating_point():  # memory for a parameter that had none
                    self.forget(x)
            return result
        result = self._run(func, args, kwargs, tensors)
        for x in tensors_in(result):
            if not isinstance(x, FakeTensor):
                self.log.see(x.untyped_storage())
        if self._listener is not None:
            self._listener(func, args, kwargs, result)
        return result

    @staticmethod
    def _of_meta(func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except RuntimeError:  # more than the host has
            if str(kwargs.get("device")) != "cpu":
                raise
            return tree_map(_reserved, func(*args, **{**kwargs, "device": "meta"}))

    # What is known

    def forget(self, tensor: torch.Tensor) -> None:
        """Its values are unknown."""
        self._unknown.add(self.log.see(tensor.untyped_storage()))

    def learn(self, tensor: torch.Tensor) -> None:
        """Its values are known."""
        self._unknown.discard(self.log.see(tensor.untyped_storage()))

    def is_known(self, tensor: torch.Tensor) -> bool:
        return self.log.see(tensor.untyped_storage()) not in self._unknown

    # Ops

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        kind, name = _kind(func), func.overloadpacket.__name__
        known = all(map(self.is_known, tensors))
        if func.namespace in _COLLECTIVES:
            return follow_collective(self, func, args, kwargs, tensors)
        if kind.is_view or name in _RESHAPES:
            return func(*args, **kwargs)
        if name in _EMPTY:
            return self._empty(func, args, kwargs)
        if known and self._is_small(func, args, kwargs, tensors):
            result = func(*args, **kwargs)
            if name in _FILLS:
                self.learn(args[0])
            return result
        is_whole = name in _FILLS and self._replaces(args[0]) and (name != "copy_" or self.is_known(args[1]))
        if is_whole and args[0].numel() <= self._most(args[0].dtype):
            self.learn(args[0])
            return func(*args, **kwargs)
        return self._skip(func, args, kwargs, kind)

    @staticmethod
    def _most(dtype: torch.dtype) -> int:
        return _MOST_FLOATS if dtype.is_floating_point or dtype.is_complex else _MOST_INTEGERS

    @staticmethod
    def _replaces(x: torch.Tensor) -> bool:
        """Whether a tensor is all that its storage holds."""
        return x.is_contiguous() and x.numel() * x.element_size() == x.untyped_storage().nbytes()

    def _is_small(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> bool:
        if any(x.numel() > self._most(x.dtype) for x in tensors):
            return False
        if tensors and math.prod(max(x.numel(), 1) for x in tensors) <= _MOST_FLOATS:
            return True
        try:
            found = self._on_meta(func, args, kwargs)[0]
        except Exception:  # the sizes depend on values, which are known
            return True
        return all(x.numel() <= self._most(x.dtype) for x in tree_leaves(found) if isinstance(x, torch.Tensor))

    def _empty(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        try:
            result: torch.Tensor = func(*args, **kwargs)
        except RuntimeError:  # more than the host has
            result = _reserved(self._on_meta(func, args, kwargs)[0])
        if result.dtype.is_floating_point or result.dtype.is_complex or result.dtype is torch.uint8:
            self.forget(result)
        elif result.numel() <= _MOST_INTEGERS:
            result.zero_()
        else:
            self.forget(result)
        return result

    def _skip(self, func: Any, args: Any, kwargs: Any, kind: _Kind) -> Any:
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            return unknown_scalar(args[0].dtype)
        if name == "equal":
            return True
        for position, keyword in kind.writes:
            written = args[position] if position < len(args) else kwargs.get(keyword)
            for x in tree_leaves(written):
                if isinstance(x, torch.Tensor) and x.dtype.is_floating_point:
                    self.forget(x)
        positions = [p for p in kind.results if p is not None]
        if kind.writes and len(positions) == len(kind.results):
            given = [args[p] if p < len(args) else kwargs[func._schema.arguments[p].name] for p in positions]
            return None if not given else given[0] if len(given) == 1 else tuple(given)
        try:
            result, sources = self._on_meta(func, args, kwargs)
        except (NotImplementedError, RuntimeError, TypeError):
            return self._compute(func, args, kwargs)
        leaves = iter(range(1 << 20))
        made: dict[int, torch.Tensor] = {}

        def make(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            position = next(leaves)
            if id(x) not in made:
                made[id(x)] = self._make(func, args, x, position, sources)
            return made[id(x)]

        return tree_map(make, result)

    def _make(
        self, func: Any, args: Any, like: torch.Tensor, position: int, sources: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        source = sources.get(like.untyped_storage()._cdata)
        if source is not None:
            return (
                source
                if like.shape == source.shape and like.stride() == source.stride()
                else source.as_strided(like.shape, like.stride(), source.storage_offset() + like.storage_offset())
            )
        if not (like.dtype.is_floating_point or like.dtype.is_complex) and like.numel() <= _MOST_INTEGERS:
            return unknown_values(func, args, like, position, self.routing)
        found = _reserved(like)
        if found.numel() <= _READ:
            found.zero_()
        self.forget(found)
        return found

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op that does not run without values, on whatever is in memory."""
        result = func(*args, **kwargs)
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.dtype.is_floating_point:
                self.forget(x)
        return result

    def _on_meta(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, dict[int, torch.Tensor]]:
        """The result on the meta device, and by storage the arguments that it may be."""
        key = _described((func, args, kwargs))
        known = _RESULTS.get(key) if _is_hashable(key) else None
        if known is not None:
            return known, {}
        sources: dict[int, torch.Tensor] = {}

        def to_meta(x: Any) -> Any:
            if isinstance(x, torch.Generator):
                return None
            if not isinstance(x, torch.Tensor):
                return x
            found = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            sources[found.untyped_storage()._cdata] = x
            keep.append(found)
            return found

        keep: list[torch.Tensor] = []
        depends_on_sizes = func.overloadpacket not in (_aten.index, _aten._unsafe_index)
        if func.overloadpacket in (_aten.index, _aten._unsafe_index):
            args = (args[0], list(self._numbered(args[1])), *args[2:])
        elif func.overloadpacket is _aten.masked_select:
            number = int(args[1].expand(torch.broadcast_shapes(args[0].shape, args[1].shape)).sum())
            return torch.empty(number, dtype=args[0].dtype, device="meta"), {}
        args, kwargs = tree_map(to_meta, (args, kwargs))
        if "device" in kwargs or (not keep and any(a.name == "device" for a in func._schema.arguments)):
            kwargs = {**kwargs, "device": torch.device("meta")}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        result = func(*args, **kwargs)
        is_new = not any(x.untyped_storage()._cdata in sources for x in tensors_in(result))
        if is_new and depends_on_sizes and _is_hashable(key):
            if len(_RESULTS) >= _MOST_RESULTS:
                _RESULTS.clear()
            _RESULTS[key] = result
        return result, sources

    def _numbered(self, indices: Any) -> Iterator[Any]:
        """Masks as the indices where they are true."""
        for x in indices:
            if isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8):
                yield from x.nonzero().unbind(1)
            else:
                yield x


def _described(value: Any) -> Any:
    """What the sizes of an op's results depend on."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(map(_described, value))
    if isinstance(value, dict):
        return tuple((name, _described(x)) for name, x in value.items())
    return (type(value), None if isinstance(value, torch.Generator) else value)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _reserved(like: torch.Tensor) -> torch.Tensor:
    """Memory that has not been written to, for a tensor like one on the meta device."""
    try:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    except RuntimeError:  # more than the host has: addresses alone
        numel = 1 + sum((size - 1) * step for size, step in zip(like.shape, like.stride()))
        space = mmap.mmap(-1, numel * like.element_size(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        return torch.frombuffer(space, dtype=like.dtype).as_strided(like.shape, like.stride())
