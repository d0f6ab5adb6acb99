"""``UnfilledTensors``: the ops of a program make real tensors of the right sizes, and compute no floating-point numbers.

Memory that nobody writes to costs no pages, so that a rank's part of a model of any size runs on a small host. What programs
branch on, indices and masks, stays real where it follows from constants and inputs: small tensors are computed as long as
everything that they depend on is known. What depends on unknown numbers gets a stated value
(:mod:`vescale.estimation._unfilled`).
"""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from vescale.compat import FakeTensor, TorchDispatchMode, tree_leaves, tree_map
from vescale.estimation._memory_log import MemoryLog, tensors_in

# Collectives among ranks that do not exist: every other rank has what this one has.


class _Values(Protocol):
    log: Any

    def is_known(self, tensor: torch.Tensor) -> bool: ...
    def learn(self, tensor: torch.Tensor) -> None: ...
    def forget(self, tensor: torch.Tensor) -> None: ...


def follow_collective(values: _Values, op: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
    """Call a collective, which does nothing on the ``fake`` backend, and give its outputs what ranks with equal data would
    get; unknown values, where they are moved, stay unknown."""
    name = op.overloadpacket.__name__
    values.log.communicated(x.untyped_storage() for x in tensors if x.numel())
    given = _inputs(name, args)  # one without elements says nothing about what the others send
    known = any(x.numel() for x in given) and all(values.is_known(x) for x in given)
    result = op(*args, **kwargs) if known or op.namespace != "c10d" else _call_empty(op, args, kwargs)
    outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)] or _outputs(name, args)
    for x in outputs:
        if not known:
            values.forget(x)
        else:
            values.learn(x)
    if known:
        _fill(name, args, outputs)
    return result


def _call_empty(op: Any, args: Any, kwargs: Any) -> Any:
    """The call on tensors without elements, with the tensors in its result: the backend copies inputs to outputs, which
    would write to memory that nothing else touches."""
    stand_ins: list[tuple[torch.Tensor, torch.Tensor]] = []

    def empty(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        stand_ins.append((x.new_empty(0), x))
        return stand_ins[-1][0]

    def full(x: Any) -> Any:
        return next((own for stand_in, own in stand_ins if stand_in is x), x)

    # Numbers in lists are sizes of the ranks' parts.
    args = [[] if isinstance(a, list) and a and all(type(n) is int for n in a) else tree_map(empty, a) for a in args]
    return tree_map(full, op(*args, **{name: tree_map(empty, value) for name, value in kwargs.items()}))


def _inputs(name: str, args: Any) -> list[torch.Tensor]:
    given = [[x for x in tree_leaves(a) if isinstance(x, torch.Tensor)] for a in args]
    given = [found for found in given if found]
    if not given:
        return []
    return given[-1] if len(given) > 1 else given[0]


def _outputs(name: str, args: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(args[:1]) if isinstance(x, torch.Tensor)]


def _fill(name: str, args: Any, outputs: list[torch.Tensor]) -> None:
    """Outputs of a collective on known values, among ranks that have the same. A rank that gathers for another one has
    none."""
    inputs = _inputs(name, args)
    if len(inputs) != 1 or not outputs or inputs[0] is outputs[0] or not inputs[0].numel():
        return
    source = inputs[0].reshape(-1)
    for target in outputs:
        if target.numel() and target.dtype == source.dtype and target.is_contiguous():
            repeated = source.repeat(-(-target.numel() // source.numel()))
            target.view(-1).copy_(repeated[: target.numel()])


# Values for integers and booleans that would follow from floating-point numbers which are not computed.

_aten = torch.ops.aten
_CHOICES = 1 << 24  # elements of a table of random numbers
_TUNED, _ROUNDS = 4096, 10  # rows, and rounds, in which weights are found
_TRUE = ("eq", "le", "lt", "ne", "isfinite", "logical_or", "equal", "is_same_size")


@dataclass
class Routing:
    """How tokens choose experts.

    Attributes:
        factor: how many times as many tokens as the mean the experts of this rank get.
        histogram: relative numbers of tokens of all experts, in place of ``factor``.
        share: (index, count): this rank has the index-th of ``count`` equal parts of the experts.
        seed: of the choices, which are random.
    """

    factor: float = 1.0
    histogram: Sequence[float] | None = None
    share: tuple[int, int] = (0, 1)
    seed: int = 0
    _chosen: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def choose(self, num_rows: int, num_experts: int, num_choices: int) -> torch.Tensor:
        """Different experts for each row, of shape (rows, choices)."""
        key = num_rows, num_experts, num_choices
        if key not in self._chosen:
            self._chosen.clear()
            self._chosen[key] = self._choose(*key)
        return self._chosen[key]

    def _choose(self, num_rows: int, num_experts: int, num_choices: int) -> torch.Tensor:
        weights = self._weights(num_experts)
        if num_rows * num_experts <= _CHOICES:
            generator = torch.Generator().manual_seed(self.seed)
            keys = torch.rand(num_rows, num_experts, generator=generator).log_()
            if num_rows and num_choices < num_experts:
                weights = _reaching(weights, keys[:_TUNED], num_choices)
            return (keys / weights).topk(num_choices, dim=1, sorted=False).indices
        # Systematic sampling: evenly spaced points, moved from row to row.
        edges = (weights / weights.sum()).cumsum(0)
        start = torch.arange(num_rows, dtype=torch.float64).mul_(0.6180339887498949).frac_() / num_choices
        points = start[:, None] + torch.arange(num_choices, dtype=torch.float64) / num_choices
        return torch.searchsorted(edges, points).clamp_(max=num_experts - 1)

    def _weights(self, num_experts: int) -> torch.Tensor:
        if self.histogram is not None and len(self.histogram) == num_experts:
            return torch.tensor(self.histogram, dtype=torch.float64).clamp_(min=1e-9)
        weights = torch.ones(num_experts, dtype=torch.float64)
        index, count = self.share
        own = num_experts // count
        if count > 1 and 0 < own < num_experts:
            factor = min(self.factor, num_experts / own)
            weights[:] = max((num_experts - factor * own) / (num_experts - own), 1e-9)
            weights[index * own : (index + 1) * own] = factor
        return weights


def _reaching(wanted: torch.Tensor, keys: torch.Tensor, num_choices: int) -> torch.Tensor:
    """Weights with which experts get shares ``wanted`` of these rows, whose choices differ, and are random."""
    weights, num_experts = wanted.clone(), len(wanted)
    target = (wanted / wanted.sum() * len(keys) * num_choices).clamp_(max=len(keys))
    best, least = weights, float("inf")
    for _ in range(_ROUNDS):
        chosen = (keys / weights).topk(num_choices, dim=1, sorted=False).indices
        counts = torch.bincount(chosen.flatten(), minlength=num_experts)
        error = float((counts - target).abs().sum())
        if error < least:
            best, least = weights.clone(), error
        weights *= (target + 0.5) / (counts + 0.5)
    return best


def unknown_scalar(dtype: torch.dtype) -> bool | int | float:
    """What a program reads: a number that is finite and not zero, and no."""
    if dtype is torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 0


def unknown_values(op: Any, args: Sequence[Any], like: torch.Tensor, position: int, routing: Routing) -> torch.Tensor:
    """The values of an integer or boolean result, of the size and strides of ``like``, which is on the meta device.

    It is the ``position``-th result.
    """
    found = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    name = op.overloadpacket.__name__
    if name == "topk" and position == 1:
        dim = args[2] if len(args) > 2 else -1
        last = like.movedim(dim, -1)
        chosen = routing.choose(last.numel() // max(last.shape[-1], 1), args[0].shape[dim], last.shape[-1])
        found.movedim(dim, -1).copy_(chosen.view(last.shape))
    elif name in ("sort", "argsort") and like.ndim:
        dim = next((a for a in args[1:] if type(a) is int), -1)
        found.movedim(dim, -1).copy_(torch.arange(like.shape[dim], dtype=like.dtype))
    elif like.dtype is torch.bool:
        same = len(args) > 1 and args[0] is args[1]
        found.fill_(name != "ne" if same else name in _TRUE)
    else:
        found.zero_()
    return found


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
