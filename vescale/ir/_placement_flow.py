"""How placements flow through ops between two planned boundaries, if that is certain; unknown otherwise.

These rules leave no choice: replicated operands give a replicated result; elementwise ops keep a common placement; the
results of ``linear`` and ``embedding`` follow from their weights; views move a dim. If DTensor has a choice, the result
is unknown, and so is all that follows from it up to the next planned placement.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self, TypeGuard

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from vescale.comm import gathered_size
from vescale.compat.grouped_products import taking_more_dtypes
from vescale.ir._operations import part_sizes
from vescale.ops import is_elementwise as is_elementwise_op
from vescale.ops import normalizes_locally
from vescale.placements import InterleavedShard, at_dim, shard_dim
from vescale.plans import MeshAxes

# A placement on one axis; None: unknown.
AxisPlacement = Placement | None

# (arguments, result) -> placement of the result on one axis of `size` ranks, by the placements of the tensor arguments.
Rule = Callable[["Flow"], AxisPlacement]


@dataclass(frozen=True)
class Flow:
    """One call of an op, seen on one axis.

    Attributes:
        placements: the placement of each tensor argument, in order.
        tensors: the tensor arguments.
        result: what the op returned.
        args, kwargs: all its arguments.
        size: ranks on the axis.
    """

    placements: Sequence[AxisPlacement]
    tensors: Sequence[torch.Tensor]
    result: torch.Tensor
    args: Sequence[Any]
    kwargs: dict[str, Any]
    size: int


def rule_for(name: str, flow: Flow) -> AxisPlacement:
    """The placement of the result of the op called ``name``, or None."""
    if all(isinstance(placement, Replicate) for placement in flow.placements):
        return Replicate()
    if None in flow.placements:
        return None
    rule = _RULES.get(name.strip("_"))
    return rule(flow) if rule else _elementwise(flow) if is_elementwise(name) else _moved(name, flow)


# The strides of a tensor of which every view shows where its dims are.
_STRIDES = (15485863, 15485867, 15485917, 15485927, 15485933, 15485941, 15485959, 15485989, 15485993, 15486013)


def source_dims(name: str, x: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, int]:
    """Dims of ``x`` -> the dims of the results that run over the same elements in the same order, or over some of them:
    for a method or an attribute of tensors that gives views. Those that are gone, or joined with others, are left out."""
    function = getattr(torch.Tensor, name, None)
    if function is None or x.ndim > len(_STRIDES):
        return {}
    probe = torch.empty_strided(x.shape, _STRIDES[: x.ndim], dtype=x.dtype, device="meta")
    try:
        found = function(probe, *args, **kwargs) if callable(function) else function.__get__(probe)
    except (
        RuntimeError,
        TypeError,
        IndexError,
    ):  # not lost: a view of these strides is none, as for sizes that are joined
        return {}
    first = next(tensors_of(found), None)
    if first is None or first._base is not probe:
        return {}
    # Of two dims with the same stride, the first is one of size 1 that was put in front.
    return {_STRIDES.index(stride): dim for dim, stride in enumerate(first.stride()) if stride in _STRIDES[: x.ndim]}


@functools.cache
def is_elementwise(name: str) -> bool:
    """Whether each element of the result depends on the operands' elements at the same place only: by the registry's family
    of elementwise ops, for the ATen op of the torch function ``name``."""
    base = name.strip("_")
    if name.startswith("__") and base[0] in "ri":  # y + x and x += y
        base = base[1:]
    packet = getattr(torch.ops.aten, {"truediv": "div"}.get(base, base), None)
    overloads = packet.overloads() if packet is not None and hasattr(packet, "overloads") else ()
    if "dim" in overloads:  # max and min: of two tensors, or a reduction
        return False
    return base in _COPIES or any(is_elementwise_op(getattr(packet, overload)) for overload in overloads)


def sums_gradient_first(name: str, flow: Flow, cuts: Sequence[int | None], num_ranks: Sequence[int]) -> bool:
    """Whether the backward of an op sums what is pending in the gradient of its result before it uses it, so that the
    gradients of its operands are whole where the result is. ``cuts``: the dim of its first operand that each axis cuts."""
    if name not in _NORMS or not flow.tensors or not (shape := _normalized_shape(flow)):
        return False
    x = flow.tensors[0]
    return normalizes_locally(x.shape, x.ndim - len(shape), cuts, num_ranks)


def _linear(flow: Flow) -> AxisPlacement:
    x, weight = flow.placements[:2]
    last = flow.tensors[0].ndim - 1
    if _cuts(weight, 0):
        return Shard(last) if isinstance(x, Replicate) else None
    if _cuts(weight, 1):
        return Partial() if _cuts(x, last) or isinstance(x, Replicate) else None
    if isinstance(weight, Replicate) and _is_cut(x) and shard_dim(x) != last:
        return x
    return None


def _embedding(flow: Flow) -> AxisPlacement:
    indices, weight = flow.placements[:2]
    if isinstance(indices, Replicate):
        if _cuts(weight, 0):
            return Partial()  # indices of other ranks' rows give zero here
        return Shard(flow.result.ndim - 1) if _cuts(weight, 1) else None
    return indices if isinstance(weight, Replicate) else None


def _elementwise(flow: Flow) -> AxisPlacement:
    """The common placement; replicated and one-element operands follow it."""
    found: set[Placement] = set()
    for placement, tensor in zip(flow.placements, flow.tensors):
        if tensor.ndim == 0 and isinstance(placement, Replicate):
            continue
        dim = shard_dim(placement) if placement is not None else None
        if dim is not None:
            if not _is_cut(placement) or tensor.shape[dim] != flow.result.shape[dim - tensor.ndim]:
                return None
            found.add(at_dim(placement, flow.result.ndim + dim - tensor.ndim))
        elif placement is not None:
            found.add(placement)
    shards = found - {Replicate()}
    only = next(iter(shards)) if len(shards) == 1 else None
    return only if _is_cut(only) else None


def _sum_like(flow: Flow) -> AxisPlacement:
    """Addition also keeps Partial, where every operand is."""
    if all(isinstance(placement, Partial) and placement == flow.placements[0] for placement in flow.placements):
        return flow.placements[0]
    return _elementwise(flow)


def _along_dims(flow: Flow) -> AxisPlacement:
    """Reductions, softmax and normalization: kept on a dim that they do not go along."""
    x, tensor = flow.placements[0], flow.tensors[0]
    if any(not isinstance(placement, Replicate) for placement in flow.placements[1:]) or not _is_cut(x):
        return None
    if flow.result.ndim != tensor.ndim:
        return None
    dims = flow.kwargs.get("dim", flow.args[1] if len(flow.args) > 1 else None)
    dims = (dims,) if isinstance(dims, int) else dims
    if not isinstance(dims, tuple | list) or not all(isinstance(dim, int) for dim in dims):
        return None
    return None if x.dim in {dim % tensor.ndim for dim in dims} else x


def _normalize(flow: Flow) -> AxisPlacement:
    """``layer_norm`` and ``rms_norm`` go along the last dims; their weights are replicated."""
    x, tensor = flow.placements[0], flow.tensors[0]
    shape = _normalized_shape(flow)
    if (
        any(not isinstance(placement, Replicate) for placement in flow.placements[1:])
        or not _is_cut(x)
        or shape is None
    ):
        return None
    return x if x.dim < tensor.ndim - len(shape) else None


def _normalized_shape(flow: Flow) -> Sequence[int] | None:
    shape = flow.kwargs.get("normalized_shape", flow.args[1] if len(flow.args) > 1 else None)
    return (shape,) if isinstance(shape, int) else shape


def _view(flow: Flow) -> AxisPlacement:
    """A cut dim that opens a group of dims stays cut when the group is merged or split, if its new dim divides evenly, or is
    as long as before."""
    x, tensor = flow.placements[0], flow.tensors[0]
    if not _is_cut(x):
        return None
    before = math.prod(tensor.shape[: x.dim])
    for dim in range(flow.result.ndim):
        size = flow.result.shape[dim]
        if math.prod(flow.result.shape[:dim]) == before and size > 1:
            divides = type(x) is Shard and size % flow.size == 0 and tensor.shape[x.dim] % flow.size == 0
            return at_dim(x, dim) if divides or size == tensor.shape[x.dim] else None
    return None


def _moved(name: str, flow: Flow) -> AxisPlacement:
    """A cut dim that a view takes whole stays cut."""
    x, tensor = flow.placements[0], flow.tensors[0]
    if not _is_cut(x) or any(not isinstance(placement, Replicate) for placement in flow.placements[1:]):
        return None
    dim = source_dims(name, tensor, flow.args[1:], flow.kwargs).get(x.dim)
    return at_dim(x, dim) if dim is not None and flow.result.shape[dim] == tensor.shape[x.dim] else None


def indexed_dims(index: Any, ndim: int) -> Iterator[tuple[int, Any, int]]:
    """(dim, what is taken of it, the result's dim) of ``x[index]`` with numbers, slices, None and ``...``; nothing for other
    indices."""
    index = index if isinstance(index, tuple) else (index,)
    if not all(item is None or item is ... or isinstance(item, int | slice) for item in index):
        return
    rest = [slice(None)] * (ndim - sum(item is not None and item is not ... for item in index))
    at = index.index(...) if ... in index else len(index)
    before = after = 0
    for item in (*index[:at], *rest, *index[at + 1 :]):
        if item is not None:
            yield before, item, after
        before, after = before + (item is not None), after + (not isinstance(item, int))


def _concatenated(flow: Flow) -> AxisPlacement:
    """Along another dim. ``cat`` leaves vectors without elements out: what a key-value cache holds at first."""
    kept = [(p, tensor) for p, tensor in zip(flow.placements, flow.tensors) if tensor.shape != (0,)]
    x, tensor = kept[0] if kept else (None, flow.result)
    if not _is_cut(x) or any(placement != x for placement, _ in kept) or flow.result.ndim != tensor.ndim:
        return None
    return x if flow.result.shape[x.dim] == tensor.shape[x.dim] else None


def _matmul(flow: Flow) -> AxisPlacement:
    """Products of matrices, of which each rank has a part of both batches."""
    x, tensor = flow.placements[0], flow.tensors[0]
    if not _is_cut(x) or any(placement != x for placement in flow.placements):
        return None
    return x if all(each.ndim == tensor.ndim for each in flow.tensors) and x.dim < tensor.ndim - 2 else None


def _addmm(flow: Flow) -> AxisPlacement:
    """Rows of the first matrix, or columns of the second one with their bias, give those of the result."""
    bias, x, weight = flow.placements[:3]
    if _is_cut(x) and x.dim == 0:
        return x if isinstance(bias, Replicate) and isinstance(weight, Replicate) else None
    if not isinstance(x, Replicate) or not _is_cut(weight) or weight.dim == 0 or flow.tensors[0].ndim > 1:
        return None
    return weight if bias == at_dim(weight, 0) else None


def _attention(flow: Flow) -> AxisPlacement:
    """Attention over a part of the batch or of the heads: the query's, whether keys and values are cut alike or whole. Over
    a part of the sequence: the query's, whatever is exchanged for it."""
    query, *others = flow.placements[:3]
    if shard_dim(query) == flow.tensors[0].ndim - 2:  # type: ignore[arg-type]
        return query
    if type(query) is not Shard or query.dim > 1:
        return None
    return query if all(placement == query or isinstance(placement, Replicate) for placement in others) else None


# Convolutions and batch normalizations, by the same tables as in :mod:`vescale.ops`.

_PLAIN, _TRANSPOSED = ("conv1d", "conv2d", "conv3d"), ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_CONVOLUTIONS = (*_PLAIN, *_TRANSPOSED)
BATCH_NORM = F.batch_norm.__name__
BATCH_NORM_SIGNATURE = inspect.signature(F.batch_norm)


def _num_groups(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    return int(kwargs.get("groups", args[6] if len(args) > 6 else 1))  # the seventh, of both kinds


def _convolution(output_dim: int, flow: Flow) -> AxisPlacement:
    """Over a part of the batch, of the output channels (which the weight has in ``output_dim``), of the groups, or of the
    channels that are summed over."""
    x, weight, *bias = flow.placements
    whole = isinstance(x, Replicate)
    if x == Shard(0):
        return x if all(isinstance(placement, Replicate) for placement in (weight, *bias)) else None
    if (num_groups := _num_groups(flow.args, flow.kwargs)) > 1:
        fits = (x == Shard(1) and weight in (Shard(0), Replicate())) or (whole and weight == Shard(0))
        return Shard(1) if fits and num_groups % flow.size == 0 and _fit(bias) else None
    if weight == Shard(output_dim):
        return Shard(1) if whole and _fit(bias) else None
    if weight == Shard(1 - output_dim) and (whole or x == Shard(1)):
        return Partial() if all(isinstance(placement, Replicate) for placement in bias) else None
    return None


def _fit(bias: Sequence[AxisPlacement]) -> bool:
    """Whether a bias is sharded like the channels, or is replicated and can be sharded."""
    return all(placement in (Shard(0), Replicate()) for placement in bias)


def _batch_norm(flow: Flow) -> AxisPlacement:
    """As the input: over a part of what statistics are made of, or of the channels."""
    x, *others = flow.placements
    if len(flow.args) > len(BATCH_NORM_SIGNATURE.parameters):
        return None
    if x == Shard(1):
        return x if _fit(others) else None
    return x if shard_dim(x) is not None and all(isinstance(placement, Replicate) for placement in others) else None  # type: ignore[arg-type]


def cuts_operand(name: str, flow: Flow, placement: AxisPlacement, position: int) -> bool:
    """Whether an op with such a result takes this rank's channels of a replicated operand; its gradient is then sharded."""
    if placement != Shard(1) or name not in (*_CONVOLUTIONS, BATCH_NORM):
        return False
    grouped = name in _CONVOLUTIONS and position < 2 and _num_groups(flow.args, flow.kwargs) > 1
    return grouped or flow.tensors[position].ndim == 1


def _is_cut(placement: AxisPlacement) -> TypeGuard[Shard | InterleavedShard]:
    """In contiguous parts, or in interleaved pieces."""
    return type(placement) in (Shard, InterleavedShard)


def _cuts(placement: AxisPlacement, dim: int) -> bool:
    return type(placement) is Shard and placement.dim == dim


# Elementwise functions without an ATen op of their name, and random ones.
_COPIES = frozenset(("dropout", "type_as", "contiguous", "float", "to", "half", "bfloat16", "double", "view_as"))
_NORMS = ("layer_norm", "rms_norm")
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "radd", "iadd", "sub", "isub"), _sum_like),
    **dict.fromkeys(("mean", "sum", "softmax", "var"), _along_dims),
    **dict.fromkeys(_NORMS, _normalize),
    **dict.fromkeys(("view", "reshape", "flatten"), _view),
    **dict.fromkeys(("matmul", "bmm"), _matmul),
    "addmm": _addmm,
    "cat": _concatenated,
    "linear": _linear,
    "embedding": _embedding,
    F.scaled_dot_product_attention.__name__: _attention,
    **dict.fromkeys(_PLAIN, functools.partial(_convolution, 0)),
    **dict.fromkeys(_TRANSPOSED, functools.partial(_convolution, 1)),
    BATCH_NORM: _batch_norm,
}


# Collectives that a tensor's moves between placements cause: at a boundary, and of a parameter while it runs.

When = Literal["forward", "backward"]


@dataclass(frozen=True)
class Collective:
    """One predicted collective of one step.

    Attributes:
        path: the module, or the parameter's name.
        target: ``<in>``, ``<in:name>``, ``<out>``, ``weight`` (a gather) or ``weight.grad`` (a gradient's reduction);
            ``<unit>`` and ``<unit>.grad`` of the parameters of a unit together; ``<experts>``, and ``<attention>`` of a
            sequence that is cut and ``<statistics>`` of a batch that is, of what a region or a call does inside.
        op: None where a collective depends on what is unknown until run.
        num_bytes: bytes that each rank sends or receives from others, as the communication ledger counts (where it is not
            the same on all, those of the busiest); None: unknown.
    """

    path: str
    target: str
    when: When
    axis: str
    op: str | None
    num_bytes: int | None


@dataclass
class _Uses:
    """How the gradient of a replicated tensor comes back on one axis, by what its copies were used for."""

    partial: bool = False
    unknown: bool = False


@dataclass
class Move:
    """A boundary crossing on one axis, or a parameter while it runs."""

    path: str
    target: str
    axis: str
    src: AxisPlacement
    dst: AxisPlacement
    num_bytes: int | None  # of the whole tensor along this axis: what all ranks of the axis hold together
    is_parameter: bool
    has_gradient: bool
    shape: tuple[int, ...] = ()  # of a boundary's tensor
    uses: _Uses = field(default_factory=_Uses)


def move_collectives(move: Move, axes: MeshAxes) -> Iterator[Collective]:
    """The collectives of one move, forward and backward."""
    yield from _of_parameter(move, axes) if move.is_parameter else _of_boundary(move, axes)


def _of_parameter(move: Move, axes: MeshAxes) -> Iterator[Collective]:
    attribute = move.path.rpartition(".")[2]
    path = move.path.rpartition(".")[0]
    if move.src != move.dst:
        yield from _collective(path, attribute, "forward", move, _op(move.src, move.dst), axes)
    if not move.has_gradient or not isinstance(move.dst, Replicate):
        return
    op = "all_reduce" if isinstance(move.src, Replicate) else "reduce_scatter"
    if move.uses.partial:
        yield from _collective(path, f"{attribute}.grad", "backward", move, op, axes)
    elif move.uses.unknown:
        yield Collective(path, f"{attribute}.grad", "backward", move.axis, None, None)


def _of_boundary(move: Move, axes: MeshAxes) -> Iterator[Collective]:
    if move.src is None:
        yield Collective(move.path, move.target, "forward", move.axis, None, None)
        if move.has_gradient:
            yield Collective(move.path, move.target, "backward", move.axis, None, None)
        return
    yield from _crossing("forward", move, move.src, move.dst, axes)
    if not move.has_gradient:
        return
    # The boundary rule: a gradient goes back as the tensor came, whole where it came as a sum.
    back: Placement = Replicate() if isinstance(move.src, Partial) else move.src
    if not isinstance(move.dst, Replicate | Partial):
        yield from _crossing("backward", move, move.dst, back, axes)
    elif move.uses.partial:
        yield from _crossing("backward", move, Partial(), back, axes)
    elif move.uses.unknown:
        yield Collective(move.path, move.target, "backward", move.axis, None, None)


def _crossing(when: When, move: Move, src: AxisPlacement, dst: AxisPlacement, axes: MeshAxes) -> Iterator[Collective]:
    """Of a boundary's tensor, or its gradient, from ``src`` to ``dst``."""
    ranks = axes.size(move.axis)
    cuts = [move.shape[p.dim] for p in (src, dst) if type(p) is Shard]
    for found in _collective(move.path, move.target, when, move, _op(src, dst), axes):
        if move.num_bytes is None or all(size % ranks == 0 for size in cuts):
            yield found
        else:
            yield replace(found, num_bytes=move.num_bytes // math.prod(cuts) * _busiest(found.op, cuts, ranks))


def _busiest(op: str | None, cuts: Sequence[int], ranks: int) -> int:
    """How many elements the busiest rank receives, or sends in a reduce-scatter, of a tensor that has the dims ``cuts``
    only: the one that is put together or taken apart, or both in this order."""
    parts = [part_sizes(size, ranks) for size in cuts]
    if op == "all_to_all":
        return max((cuts[0] - before) * after for before, after in zip(*parts, strict=True))
    if op == "all_gather" and gathered_size(parts[0]) is not None:
        return (ranks - 1) * max(parts[0])
    return cuts[0] - min(parts[0])


def _op(src: AxisPlacement, dst: AxisPlacement) -> str | None:
    """The collective that brings ``src`` to ``dst``; ``""`` for none, None where that is unknown."""
    if src is None or dst is None:
        return None
    if src == dst or isinstance(src, Replicate) or isinstance(dst, Partial):
        return ""
    if isinstance(src, Partial):
        return "all_reduce" if isinstance(dst, Replicate) else "reduce_scatter"
    return "all_gather" if isinstance(dst, Replicate) else "all_to_all"


def _collective(path: str, target: str, when: When, move: Move, op: str | None, axes: MeshAxes) -> Iterator[Collective]:
    if op == "":
        return
    size = axes.size(move.axis)
    moved = None
    if op is not None and move.num_bytes is not None:
        moved = move.num_bytes * (size - 1) // size
        moved = {"all_reduce": 2 * moved, "all_to_all": moved // size}.get(op, moved)
    yield Collective(path, target, when, move.axis, op, moved)


# ``FlowMode``: calls a follower for each torch function of a model's forward on meta tensors.


class Follower(Protocol):
    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """After a torch function has returned."""


class FlowMode(TorchFunctionMode):
    """Calls the follower, and keeps real values beside meta tensors that are made from constants alone (positions,
    masks).

    Models branch on such values (`if mask.all():`), which meta tensors do not have.
    """

    def __init__(self, walk: Follower) -> None:
        super().__init__()
        self._walk = walk
        self._kernels = contextlib.ExitStack()
        self._values: WeakIdKeyDictionary = WeakIdKeyDictionary()  # meta tensor -> the same on the CPU

    def __enter__(self) -> Self:
        self._kernels.enter_context(taking_more_dtypes())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._kernels.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of an attribute, such as x.T
            name = getattr(func.__self__, "__name__", name)
        known = name not in _RANDOM and all(t in self._values for t in tensors_of((args, kwargs)))
        if name in _ASKS_VALUE and known:
            return func(*self._real(args), **self._real(kwargs))
        if name == "__contains__":  # models look for padding to warn of it
            return False
        result = func(*args, **kwargs)
        results = list(tensors_of(result)) or (list(tensors_of(args))[:1] if name == "__setitem__" else [])
        if results and known and all(t.device.type == "meta" and t.numel() <= _MAX_KNOWN for t in results):
            self._keep(func, args, kwargs, result)
        else:
            for tensor in results:
                self._values.pop(tensor, None)
        self._walk.follow(name, args, kwargs, result)
        return result

    def _keep(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "cpu"}
        elif not any(True for _ in tensors_of((args, kwargs))):
            return  # made on the default device, which may be anything; the model did not ask for it
        real = func(*self._real(args), **self._real(kwargs))
        for meta, value in zip(tensors_of(result), tensors_of(real)):
            if meta.shape == value.shape:
                self._values[meta] = value

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._values[value]
        if isinstance(value, dict):
            return {key: self._real(item) for key, item in value.items()}
        return type(value)(map(self._real, value)) if type(value) in (tuple, list) else value


# Calls that read a tensor's values into Python.
_ASKS_VALUE = {"__bool__", "__int__", "__float__", "__index__", "__contains__", "item", "tolist", "equal", "allclose"}
_RANDOM = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "normal", "bernoulli", "dropout", "empty"}
_MAX_KNOWN = 1 << 20  # elements


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Of nested containers, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)
