"""Layouts: what specs of one rank, dtype, mesh and placements have in common, whatever the sizes.

Specs that C++ compares by address are *interned* here: of equal ones, one is kept. Each belongs to a layout, so that
decisions can be looked up without sizes (:mod:`vescale.compat.closed_forms`).
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from vescale.compat.sharding_caches import INTERNED_SPECS, LAYOUT_OF_SPEC, LAYOUTS, make_room

_PLAIN = frozenset([Replicate, Shard, Partial])
_NUMBERS = itertools.count()


class Layout:
    """A mesh with placements on its axes.

    Attributes:
        number: its own, also among layouts that have been forgotten.
        pattern: the placements, and the order of shards as in specs.
        decides: what a decision depends on: of the mesh, only its shape and this rank's place, not its ranks and groups.
        spec: one of this layout, of any sizes.
        is_plain: whether all placements are exactly Replicate, Shard or Partial, in the order of the axes.
        cuts: of each axis that shards: the dim, the axis' size, and this rank's coordinate.
        shards: of each dim that is sharded: the dim, and in how many parts.
    """

    __slots__ = ("cuts", "decides", "is_plain", "number", "pattern", "shards", "spec")

    def __init__(self, spec: DTensorSpec) -> None:
        self.spec = spec
        self.pattern = _pattern(spec)
        self.number = next(_NUMBERS)
        self.is_plain = all(type(p) in _PLAIN for p in spec.placements) and spec.shard_order == (
            DTensorSpec.compute_default_shard_order(spec.placements)
        )
        cuts, shards = [], dict[int, int]()
        coordinate = spec.mesh.get_coordinate()
        if self.is_plain and coordinate is not None:
            for axis, p in enumerate(spec.placements):
                if isinstance(p, Shard):
                    cuts.append((p.dim, spec.mesh.size(axis), coordinate[axis]))
                    shards[p.dim] = shards.get(p.dim, 1) * spec.mesh.size(axis)
        self.cuts, self.shards = tuple(cuts), tuple(shards.items())
        self.decides: Hashable = self.pattern, spec.mesh.device_type, tuple(spec.mesh.shape), coordinate

    def on_mesh(self, mesh: DeviceMesh) -> Layout:
        """The same placements on a mesh of the same shape."""
        if mesh is self.spec.mesh:
            return self
        key = (id(mesh), *self.pattern)
        found = LAYOUTS.get(key)
        if found is None:
            placements, is_order, order = self.pattern
            spec = DTensorSpec(mesh, placements, shard_order=order, use_strided_shard_as_shard_order=is_order)
            found = LAYOUTS.setdefault(key, Layout(spec))
        return found

    def with_meta(self, meta: TensorMeta) -> DTensorSpec:
        """The interned spec of these sizes, made without the checks of a new one."""
        key = (self.number, meta.dtype, meta.shape, meta.stride)
        known = INTERNED_SPECS.get(key)
        if known is None:
            known = object.__new__(DTensorSpec)
            vars(known).update(vars(self.spec), tensor_meta=meta, _hash=None)
            known = _keep(key, known, self)
        return known


def layout_of(spec: DTensorSpec) -> Layout:
    interned = LAYOUT_OF_SPEC.get(id(spec))
    if interned is not None:
        known: Layout = interned[1]
        return known
    key = (id(spec.mesh), *_pattern(spec))
    found = LAYOUTS.get(key)
    return LAYOUTS.setdefault(key, Layout(spec)) if found is None else found


def _pattern(spec: DTensorSpec) -> tuple[Any, ...]:
    return spec.placements, spec.use_strided_shard_as_shard_order, spec.shard_order


def intern(spec: DTensorSpec) -> DTensorSpec:
    """The spec that stands for all equal ones of the same mesh object; its sizes are known."""
    meta = spec.tensor_meta
    assert meta is not None
    layout = layout_of(spec)
    key = (layout.number, meta.dtype, meta.shape, meta.stride)
    known = INTERNED_SPECS.get(key)
    return _keep(key, spec, layout) if known is None else known


def _keep(key: tuple[Any, ...], spec: DTensorSpec, layout: Layout) -> DTensorSpec:
    make_room(INTERNED_SPECS)
    kept = INTERNED_SPECS.setdefault(key, spec)
    if layout.is_plain:  # PyTorch changes others: whether strides stand for an order
        LAYOUT_OF_SPEC[id(kept)] = (kept, layout)
    return kept


def local_sizes(layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """This rank's sizes of a tensor of plain placements."""
    local = list(sizes)
    for dim, num_parts, coordinate in layout.cuts:
        part = -(-local[dim] // num_parts)
        local[dim] = max(0, min(part, local[dim] - coordinate * part))
    return tuple(local)
