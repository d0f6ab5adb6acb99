"""``InterleavedShard``: every chunk of a packed dim is sharded, so that splitting the chunks stays local."""

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
