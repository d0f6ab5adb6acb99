"""``F.scaled_dot_product_attention`` on DTensors: one local kernel on each rank, split over batch and heads.

Along each mesh axis the work is split over one leading dim (batch or heads), where any operand is sharded so:

=========================  =============================================================================================
operand on a split axis    what is done
=========================  =============================================================================================
sharded on the split dim   its part is used
Replicate, size 1 there    used whole (a mask that all heads share); its gradient is Partial
Replicate                  this rank's part is cut from it; its gradient is Partial
k, v with fewer heads      the heads that this rank's query heads attend with; the gradient is Partial when k, v are
                           Replicate (fewer heads than ranks)
anything else              redistributed first: implicit communication
=========================  =============================================================================================
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import local_of, no_torch_function
from vescale.placements import local_region, shard_dim
from vescale.rng import drawing_part_of
from vescale.runtime._boundary import convert, enter_local, leave_local
from vescale.runtime._runtime import locate

if TYPE_CHECKING:
    from vescale.runtime._runtime import Runtime

__all__ = ["attention"]

_OP = "scaled_dot_product_attention"
_SIGNATURE = inspect.Signature(
    [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for name, default in (
            ("query", inspect.Parameter.empty),
            ("key", inspect.Parameter.empty),
            ("value", inspect.Parameter.empty),
            ("attn_mask", None),
            ("dropout_p", 0.0),
            ("is_causal", False),
            ("scale", None),
            ("enable_gqa", False),
        )
    ]
)


def attention(runtime: Runtime, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Scaled dot product attention; see the module's table. Shapes as in torch: ``(..., heads, length, head size)``.

    With dropout, each rank draws its part of the mask of one device; fused kernels, which draw by local index, are refused
    where the work is split.
    """
    call = _SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    options = call.arguments
    query, key, value, mask = (options.pop(name) for name in ("query", "key", "value", "attn_mask"))
    work = _Work.of(query, key, value, mask)
    q, k, v = (work.operand(x, name) for x, name in ((query, "query"), (key, "key"), (value, "value")))
    m = work.operand(mask, "attn_mask") if mask is not None else None
    options["enable_gqa"] = options["enable_gqa"] and q.ndim > 3 and q.shape[-3] != k.shape[-3]
    with no_torch_function():
        if options["dropout_p"] > 0 and any(split is not None for split in work.splits):
            weights = (*query.shape[:-1], key.shape[-2])
            with drawing_part_of(runtime.mesh, work.placements, weights) as draws:
                out = func(q, k, v, attn_mask=m, **options)
            if not draws.count:  # no queries here: the kernel skips the dropout
                draws.advance(lambda weights: F.dropout(weights, options["dropout_p"]), q.dtype, q.device)
        else:
            out = func(q, k, v, attn_mask=m, **options)
    return leave_local(out, runtime.mesh, work.placements, (*query.shape[:-1], value.shape[-1]), _OP)


@dataclass(frozen=True)
class _Work:
    """How the work is split.

    Attributes:
        shape: the query's.
        splits: for each mesh axis the leading dim, counted from the back, over which it splits the work; None: not.
        placements: of the query and of the result.
        mesh: the operands' mesh.
    """

    shape: tuple[int, ...]
    splits: tuple[int | None, ...]
    placements: tuple[Placement, ...]
    mesh: DeviceMesh

    @classmethod
    def of(cls, query: DTensor, *others: DTensor | None) -> _Work:
        """The query decides where it is sharded; else the first operand that is."""
        splits: list[int | None] = []
        placements: list[Placement] = []
        for axis, own in enumerate(query.placements):
            split = next((d for x in (query, *others) if (d := _leading_shard(x, axis)) is not None), None)
            splits.append(split)
            if split is None:
                placements.append(Replicate())
            else:
                sharded_so = shard_dim(own) == query.ndim + split
                placements.append(own if sharded_so else Shard(query.ndim + split))
        return cls(tuple(query.shape), tuple(splits), tuple(placements), query.device_mesh)

    def operand(self, x: DTensor, name: str) -> torch.Tensor:
        """This rank's part of an operand; redistributes it where it lies otherwise than the split can use."""
        wanted: list[Placement] = []
        grads: list[Placement] = []
        for split, own, working in zip(self.splits, x.placements, self.placements):
            if split is None:
                wanted.append(Replicate())
                grads.append(Replicate())
            elif self._usable(x, split, own, working):
                wanted.append(own)
                grads.append(own)
            else:  # used whole, or cut here: the ranks' gradients add up
                wanted.append(Replicate())
                grads.append(Partial())
        if tuple(x.placements) != tuple(wanted):
            where = locate()
            if where is not None:
                where.runtime.implicit(where, _OP, name, local_of(x), x.placements, wanted)
            x = convert(x, wanted, who=f"implicit: {_OP}")
        local = enter_local(x, grads)
        for split in {split for split in self.splits if split is not None and _size(x, split) > 1}:
            axes = [axis for axis, other in enumerate(self.splits) if other == split]
            if x.shape[split] == self.shape[split] and all(wanted[axis] == self.placements[axis] for axis in axes):
                continue
            with no_torch_function():
                local = self._cut(local, x, split)
        return local

    def _usable(self, x: DTensor, split: int, own: Placement, working: Placement) -> bool:
        """Whether an operand sharded as ``own`` has on each rank what the rank's queries meet."""
        if shard_dim(own) != x.ndim + split or type(own) is not type(working):
            return False
        if x.shape[split] == self.shape[split]:
            return own == working or x.ndim != len(self.shape)
        axes = [axis for axis, other in enumerate(self.splits) if other == split]
        return len(axes) == 1 and x.shape[split] % self.mesh.size(axes[0]) == 0

    def _cut(self, local: torch.Tensor, x: DTensor, split: int) -> torch.Tensor:
        """What this rank's queries meet along a split dim: a run of it, or one key/value head for each query head where
        the heads of a rank share theirs unevenly."""
        start, stop = self._held(self.shape, self.placements, split)
        group = self.shape[split] // x.shape[split]  # query heads that share a key/value head
        held, _ = self._held(tuple(x.shape), tuple(x.placements), split)
        first, last = start // group, max(stop - 1, start) // group + 1
        if last - first > 1 and (start % group or stop % group):
            heads = [head // group - held for head in range(start, stop)]
            return local.index_select(split, torch.tensor(heads, device=local.device))
        length = last - first if stop > start else 0
        return local if length == local.shape[split] else local.narrow(split, first - held, length)

    def _held(self, shape: tuple[int, ...], placements: tuple[Placement, ...], split: int) -> tuple[int, int]:
        """The global indices along a dim that this rank holds."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None  # ranks outside the mesh run no forward
        region = local_region(shape, placements, tuple(self.mesh.shape), coordinate)
        ranges = region.intervals[len(shape) + split]
        if len(ranges) > 1:
            raise NotImplementedError(
                f"{_OP}: dim {len(shape) + split} of {shape} is cut into several runs by {placements}, which operands "
                "placed otherwise cannot follow; place query, key, value and mask alike"
            )
        return (ranges[0][0], ranges[-1][1]) if ranges else (0, 0)


def _leading_shard(x: DTensor | None, axis: int) -> int | None:
    """The leading dim, counted from the back, that an operand is sharded on along a mesh axis."""
    if x is None:
        return None
    dim = shard_dim(x.placements[axis])
    return dim - x.ndim if dim is not None and dim - x.ndim < -2 and x.shape[dim] > 1 else None


def _size(x: DTensor, split: int) -> int:
    return x.shape[split] if -split <= x.ndim else 1
