"""Inputs of which each rank gives its part (``given="local"``): a step takes the batch from all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import record
from vescale.errors import PipelineBatchError
from vescale.ir import Instruction, Program, Wrap
from vescale.placements import contiguous_stride, from_local, local_region, shard_dim


@dataclass(frozen=True)
class LocalInputs:
    """What a program says of the model's inputs: the placements of each input's parts, by name; None: of all others."""

    placements: Mapping[str | None, tuple[Placement, ...]]
    others: frozenset[str]
    mesh: DeviceMesh

    @classmethod
    def taken_out(cls, program: Program, mesh: DeviceMesh) -> tuple[LocalInputs, Program]:
        """And the program for whole inputs."""
        found: dict[str | None, tuple[Placement, ...]] = {}
        others: set[str] = set()
        kept: list[Instruction] = []
        for instruction in program:
            op = instruction.op
            if instruction.path == "" and isinstance(op, Wrap):
                name = None if instruction.index is None else str(instruction.index)
                if op.given == "local":
                    found[name] = op.placements  # type: ignore[assignment]
                    instruction = replace(instruction, op=replace(op, given="global"))
                elif name is not None:
                    others.add(name)
            kept.append(instruction)
        return cls(found, frozenset(others), mesh), Program(program.axes, tuple(kept))

    def whole(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The global batch. DTensors, too, become whole tensors.

        Communication: sizes, an all-reduce of a few numbers for each axis over which parts are cut, and whether they fit;
        and an all-gather of each part.

        Raises PlanError, on every rank of a stage, for parts that the placements cut of no tensor.
        """
        parts = {
            name: value
            for name, value in batch.items()
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.ndim and self._of(name)
        }
        found = dict(batch)
        if parts:
            shapes = self._shapes(parts)
            for name, value in parts.items():
                placed = from_local(
                    value.to(self.mesh.device_type),
                    self.mesh,
                    self._of(name) or (),
                    shape=shapes[name],
                    stride=contiguous_stride(shapes[name]),
                )
                found[name] = placed
        with torch.no_grad():
            return {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in found.items()}

    def _of(self, name: str) -> tuple[Placement, ...] | None:
        return self.placements.get(name) or (None if name in self.others else self.placements.get(None))

    def _shapes(self, parts: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
        sizes = {name: torch.tensor(part.shape, device=self.mesh.device_type) for name, part in parts.items()}
        cut = sorted({axis for name in parts for axis, _ in self._cuts(name)})
        wrong = torch.zeros((), dtype=torch.int64, device=self.mesh.device_type)
        for axis in cut:
            sums = torch.cat(list(sizes.values()))
            self._sum(sums, axis)
            for name, total in zip(parts, sums.split([part.ndim for part in parts.values()])):
                for dim in range(len(total)):
                    if (axis, dim) in self._cuts(name):
                        sizes[name][dim] = total[dim]
                    else:
                        wrong += total[dim] != sizes[name][dim] * self.mesh.size(axis)
        shapes = {name: tuple(size.tolist()) for name, size in sizes.items()}
        coordinate = self.mesh.get_coordinate() or ()
        for name, part in parts.items():
            region = local_region(shapes[name], self._of(name) or (), tuple(self.mesh.shape), coordinate)
            wrong += tuple(region.local_shape) != tuple(part.shape)
        for axis in cut:
            self._sum(wrong, axis)
        if wrong:
            shown = ", ".join(f"{name} {tuple(part.shape)} of {shapes[name]}" for name, part in parts.items())
            raise PipelineBatchError(
                'pipeline: the parts that ranks pass (given="local") are not those of one batch; this rank passes '
                f"{shown}. Pass the rows that torch.chunk assigns to each rank (as ShardedBatchSampler does)"
            )
        return shapes

    def _cuts(self, name: str) -> Sequence[tuple[int, int]]:
        found = [(axis, shard_dim(p)) for axis, p in enumerate(self._of(name) or ()) if self.mesh.size(axis) > 1]
        return [(axis, dim) for axis, dim in found if dim is not None]

    def _sum(self, numbers: torch.Tensor, axis: int) -> None:
        group = self.mesh.get_group(axis)
        with record("all_reduce", group.size(), numbers.nbytes, requester="pipeline: sizes of parts", group=group):
            dist.all_reduce(numbers, group=group)
