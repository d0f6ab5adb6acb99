"""``load_state_dict`` that keeps the dtypes and cuts of states: torch's casts those of floating-point parameters."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from vescale.optim._matrix_blocks import MatrixGrid
from vescale.placements import (
    RaggedShard,
    distribute_tensor,
    is_sharded,
    largest_shape,
    local_region,
    ragged_axis,
    shard_dim,
)


def options_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options in the ``locals()`` of an optimizer's constructor, which so are listed once, in its signature."""
    return {name: value for name, value in given.items() if name not in ("self", "params", "__class__")}


class ExactStates(Optimizer):
    """An optimizer whose states are loaded as :meth:`loaded_state` says, instead of cast to the parameter's dtype.

    Hooks of ``load_state_dict`` run as in torch's: pre-hooks before, and post-hooks after the states are there.

    Attributes:
        knows_stages: whether a step on the parameters of a pipeline's stage is that of one device, whatever it couples.
    """

    knows_stages = True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, with states as :meth:`loaded_state` returns them; parameters without a saved state keep theirs.

        After an error the optimizer is as it was."""
        aside: dict[str, Any] = {}
        before, state, groups = dict(self.state), self.state, self.param_groups

        def set_aside(_: Optimizer, found: dict[str, Any]) -> dict[str, Any]:
            aside.update(found)
            return {**found, "state": {}}

        def put_back(_: Optimizer) -> None:
            for group, own in zip(self.param_groups, groups):  # saved by an optimizer with fewer options
                for option, value in own.items():
                    group.setdefault(option, value)
            saved = chain.from_iterable(group["params"] for group in aside["param_groups"])
            params_here = chain.from_iterable(group["params"] for group in self.param_groups)
            params = dict(zip(saved, params_here, strict=True))
            loaded = {
                params[key]: self.loaded_state(params[key], state, before.get(params[key], {}))
                for key, state in aside["state"].items()
                if key in params
            }
            self.state.update(before | loaded)

        # Ours is the last pre-hook, behind those that replace the dict, and the first post-hook.
        hooks: list[Any] = [
            self.register_load_state_dict_pre_hook(set_aside),
            self.register_load_state_dict_post_hook(put_back, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            self.state, self.param_groups = state, groups
            raise
        finally:
            for hook in hooks:
                hook.remove()

    def adopt_parameters(self, replaced: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Go on with new parameters in the places of those that ``parallelize`` or ``fully_shard`` has replaced.

        Args:
            replaced: the new parameter by the one that it replaces.

        States become those of the new parameters as :meth:`loaded_state` says: whole tensors are cut without communication.
        After an error the optimizer is as it was.
        """
        before = dict(self.state)
        lists = [(group["params"], list(group["params"])) for group in self.param_groups]
        try:
            for members, old in lists:
                members[:] = [replaced.get(parameter, parameter) for parameter in old]
            saved = {replaced[old]: self.state.pop(old) for old in replaced if old in self.state}
            self._take_replaced(replaced)
            for parameter, state in saved.items():
                self.state[parameter] = self.loaded_state(parameter, state, self.state.get(parameter, {}))
        except BaseException:
            for members, old in lists:
                members[:] = old
            self.state.clear()
            self.state.update(before)
            raise

    def _take_replaced(self, replaced: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Plan, and make states for, new parameters that are in the groups already."""
        raise NotImplementedError

    def loaded_state(self, parameter: torch.Tensor, state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """The state of ``parameter`` from a saved one: copies in the dtypes that were saved, placed like its ``own`` state.

        Whole tensors are cut without communication; DTensors that are placed otherwise are redistributed, on all ranks.
        """
        return {
            key: _placed(value.detach(), own.get(key)) if isinstance(value, torch.Tensor) else value
            for key, value in state.items()
        }


def _placed(value: torch.Tensor, like: Any) -> torch.Tensor:
    if not isinstance(like, torch.Tensor):
        return value.clone()
    if not isinstance(like, DTensor):
        return value.to(like.device, copy=True)
    if not isinstance(value, DTensor):
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return (
        value.redistribute(placements=like.placements).clone()
        if value.device_mesh == like.device_mesh
        else value.clone()
    )


# Which ranks hold parts of a parameter's matrices: index arithmetic over placements, the same on all ranks.

Coordinate = tuple[int, ...]


@dataclass(frozen=True)
class Holding:
    """Where the parts of one matrix are.

    Attributes:
        fixed: for each mesh axis the only coordinate at which there are parts; None where there are at several, and on
            axes that replicate.
        is_kept: the placements never cut such a matrix (its block is whole matrices), so that each has one owner by
            layout.
    """

    fixed: tuple[int | None, ...]
    is_kept: bool


def shard_axes(placements: Sequence[Placement], mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """Axes whose ranks hold different parts."""
    return tuple(axis for axis, p in enumerate(placements) if is_sharded(p) and mesh_shape[axis] > 1)


def replica_axes(placements: Sequence[Placement], mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """Axes whose ranks hold the same."""
    return tuple(axis for axis, p in enumerate(placements) if not is_sharded(p) and mesh_shape[axis] > 1)


@functools.lru_cache(maxsize=16384)
def holdings(grid: MatrixGrid, placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]) -> tuple[Holding, ...]:
    """One for each of ``grid.boxes``. Pure; looks at the ranks that hold something only."""
    axes = shard_axes(placements, mesh_shape)
    boxes = grid.boxes
    number = {box.offset: index for index, box in enumerate(boxes)}
    found: list[list[int | None] | None] = [None] * len(boxes)
    for coordinate in _holding_coordinates(placements, mesh_shape, axes):
        region = local_region(grid.shape, placements, mesh_shape, coordinate)
        for block in {number[o] for box in region.boxes for o in _offsets(grid, box.offset, box.sizes)}:
            known = found[block]
            if known is None:
                found[block] = list(coordinate)
            else:
                for axis in axes:
                    if known[axis] != coordinate[axis]:
                        known[axis] = None
    replicas = replica_axes(placements, mesh_shape)
    kept = _keeps(grid, placements, mesh_shape)
    result = []
    for box, known in zip(boxes, found):
        assert known is not None, "a matrix that no rank holds"
        for axis in replicas:
            known[axis] = None
        whole = all(known[axis] is not None for axis in axes)
        result.append(Holding(tuple(known), whole and kept(math.prod(box.sizes))))
    return tuple(result)


def _holding_coordinates(
    placements: Sequence[Placement], mesh_shape: Sequence[int], axes: Sequence[int]
) -> Iterator[Coordinate]:
    """Coordinates on the axes that shard, the others at 0; without those to which a ragged cut gives nothing."""
    choices: list[Sequence[int]] = []
    for axis, placement in enumerate(placements):
        indices: Sequence[int] = range(mesh_shape[axis]) if axis in axes else (0,)
        if isinstance(placement, RaggedShard) and placement.local_units is not None and axis in axes:
            indices = [index for index in indices if placement.local_units[index]]
        choices.append(indices)
    return itertools.product(*choices)


def _offsets(grid: MatrixGrid, offset: Sequence[int], sizes: Sequence[int]) -> Iterator[Coordinate]:
    """Offsets of the blocks that meet the box at ``offset``."""
    ranges = []
    for borders, start, size in zip(grid.cuts, offset, sizes):
        first = bisect.bisect_right(borders, start) - 1
        last = bisect.bisect_left(borders, start + size)
        ranges.append(borders[first:last])
    return itertools.product(*ranges)


def _keeps(grid: MatrixGrid, placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]) -> Callable[[int], bool]:
    """Whether a ragged cut was asked for whose blocks are whole matrices of so many elements. Whole rows of a stack, which
    is what a ragged cut without a block gives to one rank, are not asked for."""
    axis = ragged_axis(placements)
    if axis is None:
        return lambda numel: False
    placement = placements[axis]
    assert isinstance(placement, RaggedShard)
    if placement.block is None:
        return lambda numel: not placement.dims
    left = largest_shape(grid.shape, placements, mesh_shape)
    inner = [dim for p in placements if (dim := shard_dim(p)) is not None and dim > 0]
    granule, total = placement.granule(left, inner), math.prod(left)
    return lambda numel: granule % numel == 0 or granule >= total
