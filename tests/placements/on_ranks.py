"""What the tests of this folder run on a rank: meshes kept between cases, tensors with known parts, comparisons."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.device import device_type
from tests.placements import oracle
from vescale.placements import from_local, normalize_placements

__all__ = ["Source", "local", "make_mesh", "reduced", "row_major_mesh", "sample"]


# By default group: simulated ranks share the process, and each has its own.
_MESHES: weakref.WeakKeyDictionary[Any, dict[Any, DeviceMesh]] = weakref.WeakKeyDictionary()


def make_mesh(ranks: tuple[Any, ...]) -> DeviceMesh:
    """The mesh over nested tuples of ranks; every rank of the world must ask for the same meshes in the same order."""
    known = _MESHES.setdefault(dist.group.WORLD, {})
    if ranks not in known:
        known[ranks] = DeviceMesh(device_type(), torch.tensor(ranks, device="cpu"))
    return known[ranks]


def row_major_mesh(mesh_shape: Sequence[int]) -> DeviceMesh:
    def nested(tensor: torch.Tensor) -> Any:
        return tuple(nested(row) for row in tensor) if tensor.ndim else int(tensor)

    return make_mesh(nested(torch.arange(math.prod(mesh_shape)).reshape(tuple(mesh_shape))))


def sample(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small integers: sums of a few are exact in every dtype, so results can be compared bit by bit."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 9, tuple(shape), generator=generator)
    if dtype.is_complex:
        return torch.complex(values.float(), torch.randint(-8, 9, tuple(shape), generator=generator).float()).to(dtype)
    return values > 0 if dtype == torch.bool else values.to(dtype)


def reduced(contributions: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of ranks' contributions on one device."""
    stacked = torch.stack(list(contributions))
    if op == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    if op == "avg":
        return stacked.mean(0)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def local(dtensor: DTensor) -> torch.Tensor:
    return dtensor._local_tensor


class Source:
    """A tensor of which this rank holds a part; on Partial axes every coordinate contributes values of its own."""

    def __init__(
        self, mesh: DeviceMesh, shape: Sequence[int], placements: Sequence[Any], dtype: torch.dtype, seed: int
    ) -> None:
        self.mesh, self.shape = mesh, tuple(shape)
        self.placements = placements = normalize_placements(placements, shape, mesh)
        partial_axes = [axis for axis, p in enumerate(placements) if p.is_partial()]
        choices = list(itertools.product(*(range(mesh.size(axis)) for axis in partial_axes)))
        contributions = {choice: sample(shape, dtype, seed * 1009 + n) for n, choice in enumerate(choices)}
        ops = {placements[axis].reduce_op for axis in partial_axes}
        self.logical = reduced(list(contributions.values()), ops.pop()) if ops else contributions[()]
        self.coordinate = mesh.get_coordinate()
        if self.coordinate is None:
            self.local = torch.empty(0, dtype=dtype)
        else:
            own = contributions[tuple(self.coordinate[axis] for axis in partial_axes)]
            self.local = self.expected(placements, own)

    def expected(self, placements: Sequence[Any], whole: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's part of the logical tensor under other placements."""
        if self.coordinate is None:
            return self.local
        whole = self.logical if whole is None else whole
        placements = normalize_placements(placements, self.shape, self.mesh)
        return oracle.local_tensor(whole, placements, tuple(self.mesh.shape), self.coordinate)

    def dtensor(self, **options: Any) -> DTensor:
        stride = torch.empty(self.shape, device="meta").stride()
        # What a rank outside the mesh passes does not matter, but stock from_local reads the shape of a scalar off it.
        part = self.local.clone() if self.coordinate is not None else self.local.new_zeros(self.shape)
        return from_local(part, self.mesh, self.placements, shape=self.shape, stride=stride, **options)

    def check(self, moved: torch.Tensor, placements: Sequence[Any], context: str) -> None:
        """``moved``, this rank's new local tensor, is the oracle's; pending reductions are done on one device first."""
        partial_axes = [axis for axis, p in enumerate(placements) if p.is_partial()]
        expected = self.expected(placements)
        assert moved.dtype == expected.dtype and moved.shape == expected.shape, (
            f"{context}: got {moved.dtype} {tuple(moved.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
        )
        if partial_axes:
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, (self.coordinate, moved))
            if self.coordinate is not None:
                others = [axis for axis in range(self.mesh.ndim) if axis not in partial_axes]
                mine = [
                    tensor
                    for coordinate, tensor in everyone
                    if coordinate is not None and all(coordinate[axis] == self.coordinate[axis] for axis in others)
                ]
                moved = reduced(mine, placements[partial_axes[0]].reduce_op)
        averaged = any(p.is_partial("avg") for p in (*placements, *self.placements))
        if averaged and expected.is_floating_point():
            tolerance = 1e-2 if expected.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(moved, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{context}: {m}")
        else:
            assert torch.equal(moved, expected), f"{context}:\n got {moved}\n expected {expected}"
