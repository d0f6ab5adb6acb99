"""``InterleavedShard`` and ``FlattenedShard``: shards of which a rank holds several pieces of a dim."""

from __future__ import annotations

from vescale.errors import PlacementError
from vescale.placements._custom_placement import CustomPlacement


class InterleavedShard(CustomPlacement):
    """Tensor dim ``dim`` is ``num_chunks`` chunks side by side (fused QKV, packed gate/up), each sharded over the axis.

    Rank ``i`` holds the i-th ``torch.chunk`` of every chunk, concatenated in chunk order: for ``dim`` of size 12,
    3 chunks and 2 ranks, rank 0 holds indices 0 1 | 4 5 | 8 9 and rank 1 holds 2 3 | 6 7 | 10 11. Sizes need not
    divide: chunks and their parts follow ``torch.chunk``, trailing ones may be empty. ``split``/``chunk`` along the
    chunks needs no communication and gives ``Shard(dim)``. ``InterleavedShard(dim, 1)`` holds what ``Shard(dim)`` does.

    Raises:
        ValueError: ``num_chunks`` below 1.
    """

    dim: int
    num_chunks: int
    _fields = ("dim", "num_chunks")

    def __init__(self, dim: int, num_chunks: int) -> None:
        if num_chunks < 1:
            raise PlacementError(
                f"InterleavedShard({dim}, {num_chunks}): a dim needs at least one chunk; pass num_chunks >= 1"
            )
        self._freeze(int(dim), int(num_chunks))

    def __repr__(self) -> str:
        return f"InterleavedShard(dim={self.dim}, num_chunks={self.num_chunks})"

    def __str__(self) -> str:
        return f"I({self.dim}, {self.num_chunks})"


class FlattenedShard(CustomPlacement):
    """Tensor dim ``dim`` is the row-major flattening of dims of sizes ``(outer, size, inner)``, of which the ranks have
    sharded the middle one as ``Shard`` does (``torch.chunk``; trailing parts may be short or empty).

    Views create it if the ranks do not divide ``size``: a batch of 5 sentences of 7 tokens over 2 ranks is, as tokens,
    ``FlattenedShard(0, 5, 7)``: 21 tokens and 14, which no ``Shard`` of 35 describes. For a sharded sequence, it is
    ``FlattenedShard(0, 7, 1)``: tokens 0 to 3 of each sentence, and tokens 4 to 6. The inverse view has ``Shard``
    again; neither communicates. ``outer`` follows from the size of the dim.

    Which indices a rank holds does not depend on the placements of other axes: if two axes shard one dim, a rank
    holds what both leave to it.

    Raises:
        ValueError: ``size`` or ``inner`` below 1.
    """

    dim: int
    size: int
    inner: int
    _fields = ("dim", "size", "inner")

    def __init__(self, dim: int, size: int, inner: int) -> None:
        if size < 1 or inner < 1:
            raise PlacementError(f"FlattenedShard({dim}, {size}, {inner}): sizes of flattened dims must be at least 1")
        self._freeze(int(dim), int(size), int(inner))

    def __repr__(self) -> str:
        return f"FlattenedShard(dim={self.dim}, size={self.size}, inner={self.inner})"

    def __str__(self) -> str:
        return f"F({self.dim}, {self.size}, {self.inner})"
