"""``FlattenedShard``: what ``Shard`` becomes when the dim that it cuts unevenly is flattened with its neighbours."""

from __future__ import annotations

from vescale.errors import PlacementError
from vescale.placements._custom_placement import CustomPlacement


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
