"""What of a call's sizes decides where PyTorch places its operands and results, by op.

Functions here are registered as ``sizes`` of :class:`vescale.ops.OpEntry`. They get the arguments of a call, with specs in
place of DTensors and :class:`TensorMeta` in place of plain numbers, on plain placements (Replicate, Shard, Partial), and
return whatever their op's rule in PyTorch reads of sizes and other arguments, or None if they cannot tell. The placements,
the dtypes and numbers of dims of the operands, and whether each sharded dim has an element for each rank, are compared
anyway.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from vescale.compat import DTensorSpec, Layout, TensorMeta
from vescale.ops._registry import entries, register, register_aten

_aten = torch.ops.aten


def _others(args: Any) -> Hashable:
    """All arguments that are no tensors, with their types: 1 and True decide differently."""
    return tuple(
        None if isinstance(x, DTensorSpec | TensorMeta) else _others(x) if isinstance(x, list | tuple) else (type(x), x)
        for x in args
    )


def _meta(x: Any) -> Any:
    """What is known of a tensor."""
    return x.tensor_meta if isinstance(x, DTensorSpec) else x


def no_sizes(
    args: tuple[Any, ...], kwargs: dict[str, Any], layout_of: Callable[[DTensorSpec], Layout]
) -> Hashable | None:
    """Sizes do not decide; all other arguments may."""
    return _others(args), tuple(kwargs), _others(kwargs.values())


def elementwise(
    args: tuple[Any, ...], kwargs: dict[str, Any], layout_of: Callable[[DTensorSpec], Layout]
) -> Hashable | None:
    """Which dims of which operands are broadcast."""
    shapes = [_meta(x).shape for x in args if isinstance(x, DTensorSpec | TensorMeta)]
    if any(isinstance(x, DTensorSpec | TensorMeta) for x in kwargs.values()) or any(
        isinstance(x, list | tuple) for x in args if not isinstance(x, DTensorSpec | TensorMeta)
    ):
        return None
    first, broadcast = shapes[0], None
    if any(shape != first for shape in shapes):
        common = torch.broadcast_shapes(*shapes)
        broadcast = tuple(
            tuple(size == wanted for size, wanted in zip(reversed(shape), reversed(common))) for shape in shapes
        )
    return broadcast, _others(args), tuple(kwargs), _others(kwargs.values())


def matmul(
    args: tuple[Any, ...], kwargs: dict[str, Any], layout_of: Callable[[DTensorSpec], Layout]
) -> Hashable | None:
    """Which dims have size 1: a bias is broadcast there."""
    shapes = [_meta(x).shape for x in args if isinstance(x, DTensorSpec)]
    return (
        tuple(tuple(size == 1 for size in shape) for shape in shapes),
        _others(args),
        tuple(kwargs),
        _others(kwargs.values()),
    )


def mean(args: tuple[Any, ...], kwargs: dict[str, Any], layout_of: Callable[[DTensorSpec], Layout]) -> Hashable | None:
    """Whether shards are equal: the mean of means is the mean only then."""
    sizes = args[0].tensor_meta.shape
    even = tuple(dim < len(sizes) and sizes[dim] % parts == 0 for dim, parts in layout_of(args[0]).shards)
    return even, no_sizes(args, kwargs, layout_of)


def along(args: tuple[Any, ...], kwargs: dict[str, Any], layout_of: Callable[[DTensorSpec], Layout]) -> Hashable | None:
    """``(x, where, dim)``: only the dim; its parts are counted by the results. PyTorch's rule refuses empty dims."""
    return None if kwargs or 0 in args[0].tensor_meta.shape else ("dim", args[2] if len(args) > 2 else 0)


def select(
    args: tuple[Any, ...], kwargs: dict[str, Any], layout_of: Callable[[DTensorSpec], Layout]
) -> Hashable | None:
    """``(x, dim, index)``, ``(x, dim)``: only the dim."""
    return None if kwargs else ("dim", args[1] if len(args) > 1 else 0)


def piece(args: tuple[Any, ...], kwargs: dict[str, Any], layout_of: Callable[[DTensorSpec], Layout]) -> Hashable | None:
    """``slice(x, dim, start, end, step)``: the dim, and all of it where it is sharded."""
    dim = args[1] if len(args) > 1 else 0
    if kwargs or any(
        dim % max(1, len(args[0].tensor_meta.shape)) == sharded for sharded, _ in layout_of(args[0]).shards
    ):
        return None
    return ("dim", dim)


def piece_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], layout_of: Callable[[DTensorSpec], Layout]
) -> Hashable | None:
    """``slice_backward(gradient, sizes, dim, start, end, step)``: the dim."""
    return None if kwargs else ("dim", args[2], len(args[1]))


def pad(args: tuple[Any, ...], kwargs: dict[str, Any], layout_of: Callable[[DTensorSpec], Layout]) -> Hashable | None:
    """``constant_pad_nd(x, pad, value)``: which sides are padded, and with zeros or not."""
    return tuple(size == 0 for size in args[1]), _others(args[2:]), _others(kwargs.values())


def expand(
    args: tuple[Any, ...], kwargs: dict[str, Any], layout_of: Callable[[DTensorSpec], Layout]
) -> Hashable | None:
    """Which dims are repeated."""
    sizes, wanted = args[0].tensor_meta.shape, args[1]
    if (
        kwargs
        or len(args) > 2
        or len(wanted) < len(sizes)
        or any(sizes[dim] == 1 for dim, _ in layout_of(args[0]).shards)
    ):
        return None
    kept = wanted[len(wanted) - len(sizes) :]
    return len(wanted), tuple(size in (-1, given) for size, given in zip(kept, sizes))


def together(
    args: tuple[Any, ...], kwargs: dict[str, Any], layout_of: Callable[[DTensorSpec], Layout]
) -> Hashable | None:
    """``cat(xs, dim)`` and ``stack(xs, dim)`` of operands that are placed alike: the dim."""
    specs = args[0]
    if kwargs or not all(isinstance(x, DTensorSpec) for x in specs):
        return None
    first = specs[0].placements
    if any(spec.placements != first for spec in specs):
        return None
    return ("dim", args[1] if len(args) > 1 else 0)


def view(args: tuple[Any, ...], kwargs: dict[str, Any], layout_of: Callable[[DTensorSpec], Layout]) -> Hashable | None:
    """Which dims are joined and split, and what of these is divisible by the numbers of parts."""
    layout = layout_of(args[0])
    if kwargs or len(args) != 2 or not isinstance(args[1], Sequence):  # a dtype
        return None
    if not layout.shards:
        return "not sharded"
    shards = dict(layout.shards)
    given, wanted = args[0].tensor_meta.shape, list(args[1])
    numel = math.prod(given)  # from_local keeps the sequence of sizes that it is given: perhaps no torch.Size
    if numel == 0:
        return None
    if -1 in wanted:
        known = -torch.Size(wanted).numel()
        if known <= 0 or numel % known:
            return None
        wanted[wanted.index(-1)] = numel // known
    if torch.Size(wanted).numel() != numel or min(wanted, default=1) < 1:
        return None
    groups = _groups(given, wanted)
    if groups is None:
        return None
    axes, num_cuts = [size for _, size, _ in layout.cuts], Counter(dim for dim, _, _ in layout.cuts)
    deciding: list[Hashable] = []
    for dims, targets in groups:
        ones = tuple(given[dim] == 1 for dim in dims), tuple(wanted[dim] == 1 for dim in targets)
        deciding.append((dims, targets, ones))
        if any(dim in shards for dim in dims) and (len(dims), len(targets)) != (1, 1):
            for dim in dims:
                if dim in shards:
                    # What replaces a cut into unequal parts may be described in any dim: all sizes decide.
                    deciding.append(-1 if given[dim] % shards[dim] == 0 else (tuple(given), tuple(wanted)))
                    if num_cuts[dim] > 1:  # PyTorch looks at one axis after the other, and may be put right
                        parts = shards[dim]
                        deciding.append(tuple(wanted[target] % parts == 0 or wanted[target] for target in targets))
            deciding.append(tuple(wanted[dim] % size == 0 for dim in targets for size in axes))
    return tuple(deciding)


def _groups(given: Sequence[int], wanted: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]] | None:
    """Dims and the dims that are made of them, as PyTorch groups them (``view_groups``); None if they do not fit."""
    found = []
    i = j = 0
    while i < len(given) or j < len(wanted):
        dims, targets = [], []
        size, target = 1, 1
        if i < len(given):
            size = given[i]
            dims.append(i)
            i += 1
        if j < len(wanted):
            target = wanted[j]
            targets.append(j)
            j += 1
        if size == 1 and target != 1:
            j -= 1
            targets = []
        elif size != 1 and target == 1:
            i -= 1
            dims = []
        else:
            while size != target:
                if i < len(given) and (j >= len(wanted) or target % size == 0 or target > size):
                    size *= given[i]
                    dims.append(i)
                    i += 1
                elif j < len(wanted):
                    target *= wanted[j]
                    targets.append(j)
                    j += 1
                else:
                    return None
        found.append((tuple(dims), tuple(targets)))
    return found


def _register() -> None:
    for names, function in (
        (
            "clone contiguous detach alias zero_ zeros_like ones_like full_like empty_like t transpose permute unsqueeze",
            no_sizes,
        ),
        (
            "_to_copy sum amax amin nansum _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data",
            no_sizes,
        ),
        ("native_layer_norm native_layer_norm_backward embedding embedding_dense_backward", no_sizes),
        ("mm bmm addmm baddbmm", matmul),
        ("mean", mean),
        ("split split_with_sizes", along),
        ("select unbind", select),
        ("slice", piece),
        ("slice_backward", piece_backward),
        ("constant_pad_nd", pad),
        ("expand", expand),
        ("cat stack", together),
        ("view _unsafe_view", view),
    ):
        register_aten(names, sizes=function)
    register(_aten.fill_.Scalar, sizes=no_sizes)


_register()


@functools.cache
def sizes_of(op: Any) -> Callable[..., Hashable | None] | None:
    """The function for an overload, or None."""
    for key in (op, op.overloadpacket):
        entry = entries().get(key)
        if entry is not None and entry.sizes is not None:
            return entry.sizes
    return elementwise if torch.Tag.pointwise in op.tags else None
