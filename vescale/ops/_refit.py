"""The ragged placement that describes, for another global shape, the runs that the ranks hold already."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec
from vescale.ops._call import Placements
from vescale.placements import (
    Interval,
    RaggedShard,
    Region,
    coordinates,
    local_region,
    normalize_placements,
    ragged_axis,
)


def regions(spec: DTensorSpec) -> list[Region]:
    """What every rank of the spec's mesh holds; the same list on every rank."""
    mesh_shape = tuple(spec.mesh.shape)
    return [local_region(spec.shape, spec.placements, mesh_shape, where) for where in coordinates(mesh_shape)]


def runs_of(spec: DTensorSpec) -> list[Interval]:
    """The run that every rank holds of the flattening that the ragged axis of the spec divides, by mesh coordinate."""
    return [region.flat for region in regions(spec) if region.flat is not None]


def refit_ragged(
    spec: DTensorSpec, shape: Sequence[int], others: Sequence[Placement], runs: Sequence[Interval]
) -> Placements | None:
    """Normalized placements of a tensor of ``shape`` of which the ranks of the spec's mesh hold ``runs``, in the row-major
    order of their coordinates.

    ``others`` are the placements on the other axes (its entry on the ragged axis is ignored). A candidate is taken only
    when it gives every rank of the mesh exactly its run; None when there is none.
    """
    axis = ragged_axis(spec.placements)
    assert axis is not None
    placement = spec.placements[axis]
    assert isinstance(placement, RaggedShard)
    mesh_shape = tuple(spec.mesh.shape)
    expected = list(runs)
    # Plain also where the spec has a StridedRaggedShard: normalization derives that from the other placements.
    plain = RaggedShard(placement.dims, placement.local_units, placement.block)
    for candidate in _candidates(plain, axis, shape, mesh_shape, expected):
        try:
            placements = normalize_placements((*others[:axis], candidate, *others[axis + 1 :]), shape, mesh_shape)
            found = [local_region(shape, placements, mesh_shape, where).flat for where in coordinates(mesh_shape)]
        except ValueError:  # units that do not fit the new shape
            continue
        if found == expected:
            return placements
    return None


def _candidates(
    placement: RaggedShard, axis: int, shape: Sequence[int], mesh_shape: tuple[int, ...], expected: list[Interval]
) -> Iterator[RaggedShard]:
    """The placement itself, then the same units as blocks, then one unit for each granule of the runs."""
    yield placement
    assert placement.local_units is not None
    first = [where for where in range(len(expected)) if _others_are_zero(where, axis, mesh_shape)]
    for dims in {placement.dims[: len(shape)], tuple(range(min(1, len(shape))))}:
        flattened = placement.with_dims(dims)
        yield flattened
        for units, where in zip(placement.local_units, first):
            begin, end = expected[where]
            if units and (end - begin) % units == 0 and end > begin:
                yield flattened.with_units(placement.local_units, (end - begin) // units)
                break
        granule = math.gcd(*(end - begin for begin, end in (expected[where] for where in first)))
        if granule:
            sizes = [(expected[where][1] - expected[where][0]) // granule for where in first]
            yield flattened.with_units(sizes, granule)
    if not math.prod(shape):
        yield RaggedShard()


def _others_are_zero(where: int, axis: int, mesh_shape: tuple[int, ...]) -> bool:
    """Whether the ``where``-th coordinate is 0 on every axis other than the ragged one."""
    coordinate = []
    for size in reversed(mesh_shape):
        where, index = divmod(where, size)
        coordinate.append(index)
    coordinate.reverse()
    return all(index == 0 for a, index in enumerate(coordinate) if a != axis)
