"""``RaggedShard`` and ``StridedRaggedShard``: contiguous runs of the flattened tensor, of any size on each rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Self

from vescale.errors import PlacementError
from vescale.placements._custom_placement import CustomPlacement


class RaggedShard(CustomPlacement):
    """Rank ``i`` of the axis owns a contiguous run of ``local_units[i]`` shares of the flattened tensor.

    The ragged placement is applied after every other placement of the tensor, whatever the axis order: it divides the
    row-major flattening of what the other axes leave to a rank. The local tensor is flat (1-D) and contiguous.

    ======================================  =============================  ==========================================
    form                                    one share is                   ``local_units`` must sum to
    ======================================  =============================  ==========================================
    ``RaggedShard((0,), units)``            some whole rows of dim 0       a divisor of ``shape[0]``
    ``RaggedShard((0, 1), units)``          some whole (0, 1) planes       a divisor of ``shape[0] * shape[1]``
    ``RaggedShard(all dims, units)``        some elements                  a divisor of ``numel``
    ``RaggedShard((), units)``              the whole tensor               1
    ``RaggedShard(units..., block=b)``      ``b`` consecutive elements     ``ceil(numel / b)``; the last may be short
    ``RaggedShard()``, without units        a row (or a block)             decided by :meth:`resolve`, balanced
    ======================================  =============================  ==========================================

    Shares are never divided. Shapes are those of the tensor that the other axes leave. Where another axis shards an
    inner dim (``Shard(dim > 0)``), a block grows to the least common multiple that never divides that dim, and units
    whose shares would divide it are refused. Where the other axes leave unequal local tensors, shares are those of the
    largest, and shorter local tensors are filled from the first rank on.

    Args:
        dims: the leading dims that are flattened and divided, ``(0, 1, ..., k)``.
        local_units: shares of each rank of the axis; zeros are fine, one rank may own everything. None: balanced, the
            layout planner or :meth:`resolve` decides.
        block: elements of the largest run that is never divided; None: the rows (planes, elements) of ``dims``.

    Raises:
        ValueError: dims that are not leading and consecutive, negative units, a block below 1.
    """

    dims: tuple[int, ...]
    local_units: tuple[int, ...] | None
    block: int | None
    _fields: tuple[str, ...] = ("dims", "local_units", "block")

    def __init__(
        self, dims: Sequence[int] = (0,), local_units: Sequence[int] | None = None, block: int | None = None
    ) -> None:
        self._freeze(*_validated(type(self).__name__, dims, local_units, block))

    def with_units(self, local_units: Sequence[int], block: int | None) -> Self:
        """The same placement with its units decided."""
        return type(self)(self.dims, tuple(local_units), block)

    def with_dims(self, dims: Sequence[int]) -> Self:
        """The same placement over other leading dims."""
        return type(self)(dims, self.local_units, self.block)

    def granule(self, shape: Sequence[int], inner_dims: Sequence[int] = ()) -> int:
        """Elements of the smallest run that is never divided between ranks: the block, or one row of ``dims``.

        ``shape`` is what the other axes leave to a rank, ``inner_dims`` the dims above 0 that they shard; the granule
        is the least common multiple that never divides those.
        """
        unit = self.block if self.block is not None else math.prod(shape[len(self.dims) :])
        uncut = math.prod(shape[min(inner_dims) :]) if inner_dims else 1
        return math.lcm(unit, uncut) if unit and uncut else 1

    def resolve(self, shape: Sequence[int], num_ranks: int, inner_dims: Sequence[int] = ()) -> Self:
        """This placement with units: balanced over ``num_ranks`` when it has none, checked against the shape otherwise.

        Raises ValueError when the units do not fit the axis or do not cover the tensor.
        """
        if self.local_units is not None:
            self._share(shape, num_ranks, inner_dims)
            return self
        granule = self.granule(shape, inner_dims)
        num_granules = -(-math.prod(shape) // granule)
        base, extra = divmod(num_granules, num_ranks)
        units = tuple(base + (rank < extra) for rank in range(num_ranks))
        rows = math.prod(shape[: len(self.dims)])
        by_rows = self.block is None and rows == num_granules and rows > 0
        return self.with_units(units, None if by_rows else granule)

    def run(
        self,
        shape: Sequence[int],
        largest_shape: Sequence[int],
        num_ranks: int,
        index: int,
        inner_dims: Sequence[int] = (),
    ) -> tuple[int, int]:
        """``(begin, end)`` elements that rank ``index`` owns of the flattening of a local tensor of ``shape``.

        ``largest_shape`` is the largest local shape at any coordinate of the other axes; it defines the shares.
        """
        if self.local_units is None:
            return self.resolve(largest_shape, num_ranks, inner_dims).run(
                shape, largest_shape, num_ranks, index, inner_dims
            )
        share = self._share(largest_shape, num_ranks, inner_dims)
        # Behind the first inner dim that another axis shards, local tensors may differ in length: count whole
        # slices there (a share never cuts one), so that all coordinates cut at the same index.
        numel = math.prod(shape)
        if inner_dims and numel:
            behind = min(inner_dims)
            share = share // math.prod(largest_shape[behind:]) * math.prod(shape[behind:])
        before = sum(self.local_units[:index])
        return min(before * share, numel), min((before + self.local_units[index]) * share, numel)

    def _share(self, shape: Sequence[int], num_ranks: int, inner_dims: Sequence[int]) -> int:
        """Elements of one share of a local tensor of ``shape``; raises ValueError when the units do not fit it."""
        units = self.local_units
        assert units is not None
        total = sum(units)
        if len(units) != num_ranks:
            raise PlacementError(
                f"{self!r} has {len(units)} local_units, but its mesh axis has {num_ranks} ranks; pass one unit count "
                "for each rank (0 for a rank that owns nothing)"
            )
        if len(self.dims) > len(shape) and tuple(shape):
            raise PlacementError(
                f"{self!r} flattens dims {self.dims}, but the tensor left by the other placements has shape "
                f"{tuple(shape)}; name at most {len(shape)} leading dims"
            )
        numel = math.prod(shape)
        if self.block is not None:
            granule = self.granule(shape, inner_dims)
            needed = -(-numel // granule)
            if total != needed:
                grown = (
                    f" (grown from {self.block} so that no inner sharded dim is divided)"
                    if granule != self.block
                    else ""
                )
                raise PlacementError(
                    f"{self!r} distributes {total} blocks, but a tensor of shape {tuple(shape)} ({numel} elements) has "
                    f"{needed} blocks of {granule} elements{grown}; make local_units sum to {needed}"
                )
            return granule
        rows = math.prod(shape[: len(self.dims)])
        if numel == 0:
            return 0
        if total == 0 or rows % total:
            raise PlacementError(
                f"{self!r}: local_units sum to {total}, which does not divide the {rows} rows of dims {self.dims} of a "
                f"tensor of shape {tuple(shape)}, so the units do not cover it; make them sum to {rows} or a divisor"
            )
        share = rows // total * math.prod(shape[len(self.dims) :])
        uncut = math.prod(shape[min(inner_dims) :]) if inner_dims else 1
        if share % uncut:
            raise PlacementError(
                f"{self!r} has shares of {share} elements, which divide dim {min(inner_dims)}, which another mesh "
                f"axis shards ({uncut} elements of the local tensor of shape {tuple(shape)} belong together); make "
                f"local_units sum to a divisor of {numel // uncut}, or pass block= to let the granule grow"
            )
        return share

    def __repr__(self) -> str:
        parts = [f"dims={self.dims}", f"local_units={_short(self.local_units)}"]
        return f"{type(self).__name__}({', '.join(parts + self._repr_tail())})"

    def _repr_tail(self) -> list[str]:
        return [] if self.block is None else [f"block={self.block}"]

    def __str__(self) -> str:
        units = "" if self.local_units is None else ":" + _short(self.local_units).replace(" ", "")
        dims = ",".join(map(str, self.dims))
        block = "" if self.block is None else f"/{self.block}"
        return f"{self._letter}({dims}{units}{block})"

    _letter = "Ragged"


class StridedRaggedShard(RaggedShard):
    """A ragged placement of a tensor that ``Shard(0)`` on a *later* mesh axis (TP, EP) also shards.

    The axis order ``(dp: ragged, tp: Shard(0))`` reads left to right, but the ragged placement is applied last: a rank
    of ``dp`` owns a run inside each tp rank's rows, so that its rows of the whole tensor are strided. ``split_factor``,
    the number of pieces that the later ``Shard(0)`` axes create, records that reordering. With ``Shard(0)`` on an
    *earlier* axis, plain :class:`RaggedShard` is sufficient.

    Args:
        dims, local_units, block: as of :class:`RaggedShard`.
    """

    split_factor: int
    _fields = ("dims", "local_units", "block", "split_factor")

    def __init__(
        self,
        dims: Sequence[int] = (0,),
        local_units: Sequence[int] | None = None,
        block: int | None = None,
        *,
        split_factor: int,
    ) -> None:
        if split_factor < 1:
            raise PlacementError(
                f"StridedRaggedShard: split_factor={split_factor}; pass the size of the later Shard(0) axis"
            )
        self._freeze(*_validated(type(self).__name__, dims, local_units, block), int(split_factor))

    def __reduce__(self) -> tuple[object, ...]:
        return rebuild_strided, self._key()

    def with_units(self, local_units: Sequence[int], block: int | None) -> Self:
        return type(self)(self.dims, tuple(local_units), block, split_factor=self.split_factor)

    def with_dims(self, dims: Sequence[int]) -> Self:
        return type(self)(dims, self.local_units, self.block, split_factor=self.split_factor)

    def _repr_tail(self) -> list[str]:
        return [*super()._repr_tail(), f"split_factor={self.split_factor}"]

    _letter = "StridedRagged"


def rebuild_strided(
    dims: tuple[int, ...], local_units: tuple[int, ...] | None, block: int | None, split_factor: int
) -> StridedRaggedShard:
    return StridedRaggedShard(dims, local_units, block, split_factor=split_factor)


def _validated(
    name: str, dims: Sequence[int], local_units: Sequence[int] | None, block: int | None
) -> tuple[tuple[int, ...], tuple[int, ...] | None, int | None]:
    dims = tuple(int(dim) for dim in dims)
    if dims != tuple(range(len(dims))):
        raise PlacementError(f"{name}: dims={dims} are not the leading dims in order; pass (0,), (0, 1), ..., or ()")
    if local_units is not None:
        local_units = tuple(int(units) for units in local_units)
        if any(units < 0 for units in local_units):
            raise PlacementError(
                f"{name}: local_units={_short(local_units)} has a negative entry; pass 0 or more for each rank"
            )
    if block is not None and int(block) < 1:
        raise PlacementError(f"{name}: block={block}; pass a block of at least one element")
    return dims, local_units, None if block is None else int(block)


def _short(units: Sequence[int] | None) -> str:
    """Units as text, equal neighbours run-length encoded when there are many."""
    if units is None or len(units) <= 16:
        return str(units)
    runs = [(value, len(list(group))) for value, group in itertools.groupby(units)]
    return "(" + ", ".join(f"{value}x{count}" if count > 1 else str(value) for value, count in runs) + ")"
