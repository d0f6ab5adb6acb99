"""What ``AdamW8bit`` keeps for a parameter: which tensors, of what shapes and dtypes, and how they are cut."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import local_of, make_dtensor, make_spec
from vescale.errors import CutBlockError, OptimizerStateError
from vescale.optim._adamw8bit_update import compute_dtype
from vescale.optim._blocks import Blocks, UnevenBlocksError
from vescale.optim._dynamic_map import dynamic_map
from vescale.optim._flat_blocks import FlatBlocks
from vescale.optim._row_blocks import RowBlocks
from vescale.placements import RaggedShard, contiguous_stride, distribute_tensor, local_region

__all__ = [
    "OPTIONS_OF_STATES",
    "STATE_DTYPES",
    "StateTensor",
    "blocks_of",
    "check_blocks",
    "check_states",
    "has_master",
    "is_quantized",
    "state_tensors",
]

STATE_DTYPES = {"uint8": torch.uint8, "bfloat16": torch.bfloat16, "float32": torch.float32}
"""By the name under which a param group has it: torch's full state dicts refuse dtypes."""

OPTIONS_OF_STATES = ("block_size", "block", "min_numel", "state_dtype", "master_weights", "stochastic_rounding")
"""Of a group: they decide which states a parameter has."""

_LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class StateTensor:
    """One state of a parameter: global ``shape``, ``dtype``, the value that it starts with (None: the parameter's), and its
    placements on the parameter's mesh, None for a plain parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int | None
    placements: tuple[Placement, ...] | None

    def local_shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Of this rank's part."""
        if self.placements is None or not isinstance(parameter, DTensor):
            return self.shape
        mesh = parameter.device_mesh
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return (0,)
        return local_region(self.shape, self.placements, tuple(mesh.shape), tuple(coordinate)).local_shape

    def num_bytes(self, parameter: torch.Tensor) -> int:
        return math.prod(self.local_shape(parameter)) * self.dtype.itemsize

    def new(self, parameter: torch.Tensor) -> torch.Tensor:
        """The state before the first step: plain, or a DTensor on the parameter's mesh."""
        held = local_of(parameter) if isinstance(parameter, DTensor) else parameter.detach()
        if self.start is None:
            local = held.to(self.dtype, copy=True).contiguous()
        else:
            local = torch.full(self.local_shape(parameter), self.start, dtype=self.dtype, device=held.device)
        if self.placements is None or not isinstance(parameter, DTensor):
            return local
        stride = contiguous_stride(self.shape)
        return make_dtensor(local, make_spec(parameter.device_mesh, self.placements, self.shape, stride, self.dtype))

    def loaded(self, value: Any, parameter: torch.Tensor, what: str) -> torch.Tensor:
        """A copy of a saved state in this form: another cut is brought to this one (collectives), a plain tensor is cut by
        each rank.

        Raises ValueError for another shape or dtype.
        """
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != self.shape or value.dtype != self.dtype:
            found = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise OptimizerStateError(
                f"{what} of the state dict is {found}; this optimizer has {self.dtype} of shape {self.shape}. Make it with "
                "the block_size, block, min_numel and state_dtype of the one that was saved"
            )
        value = value.detach().to(parameter.device, copy=True)  # two optimizers must not write to one state
        if self.placements is None or not isinstance(parameter, DTensor):
            return value.full_tensor() if isinstance(value, DTensor) else value.contiguous()
        mesh = parameter.device_mesh
        if not isinstance(value, DTensor):
            return distribute_tensor(value, mesh, self.placements, src_data_rank=None)
        if tuple(value.placements) != self.placements:
            value = value.redistribute(mesh, self.placements)
        return value


def is_quantized(parameter: torch.Tensor, group: Mapping[str, Any]) -> bool:
    """By the global size, so that it is the same on every mesh."""
    return bool(group["state_dtype"] == "uint8" and parameter.numel() >= max(1, group["min_numel"]))


def has_master(parameter: torch.Tensor, group: Mapping[str, Any]) -> bool:
    wanted = group["master_weights"]
    return parameter.dtype in _LOW_PRECISION and (not group["stochastic_rounding"] if wanted is None else wanted)


def blocks_of(group: Mapping[str, Any]) -> Blocks:
    return FlatBlocks(group["block_size"]) if group["block"] is None else RowBlocks(*group["block"])


def state_tensors(parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, StateTensor]:
    """By key, ``step`` left out. Pure; the same keys, shapes and placements on every rank."""
    shape = tuple(parameter.shape)
    cut = tuple(parameter.placements) if isinstance(parameter, DTensor) else None
    found: dict[str, StateTensor] = {}
    if is_quantized(parameter, group):
        blocks = blocks_of(group)
        grid_cut = None
        if cut is not None and isinstance(parameter, DTensor):
            grid_cut = blocks.grid_placements(shape, cut, tuple(parameter.device_mesh.shape))
        found["exp_avg"] = StateTensor(shape, torch.uint8, dynamic_map(True).zero_code, cut)
        found["exp_avg_sq"] = StateTensor(shape, torch.uint8, dynamic_map(False).zero_code, cut)
        found["exp_avg_max"] = StateTensor(blocks.grid(shape), torch.float32, 0, grid_cut)
        found["exp_avg_sq_max"] = StateTensor(blocks.grid(shape), torch.float32, 0, grid_cut)
    else:
        is_small = parameter.numel() < group["min_numel"] or group["state_dtype"] == "uint8"
        dtype = compute_dtype(parameter.dtype) if is_small else STATE_DTYPES[group["state_dtype"]]
        found["exp_avg"] = found["exp_avg_sq"] = StateTensor(shape, dtype, 0, cut)
    if has_master(parameter, group):
        found["master"] = StateTensor(shape, torch.float32, None, cut)
    return found


def check_states(name: str, parameter: torch.Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raises OptimizerStateError for states that are not those which the group's options describe."""
    for key, wanted in state_tensors(parameter, group).items():
        value = state.get(key)
        if isinstance(value, torch.Tensor) and value.dtype == wanted.dtype:
            held = local_of(value) if isinstance(value, DTensor) else value
            if tuple(value.shape) == wanted.shape and tuple(held.shape) == wanted.local_shape(parameter):
                continue
        found = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise OptimizerStateError(
            f"the state {key!r} of parameter {name} is {found}, and the options of its group describe {wanted.dtype} of "
            f"shape {wanted.shape}. States keep the form in which they were made: leave block_size, block, min_numel, "
            "state_dtype and master_weights of a group as they are, or make a new optimizer with other ones"
        )


def check_blocks(name: str, parameter: torch.Tensor, group: Mapping[str, Any]) -> None:
    """Raises ValueError, the same on every rank, if a boundary between ranks cuts a block of the parameter."""
    if not isinstance(parameter, DTensor) or not is_quantized(parameter, group):
        return
    shape, mesh, placements = tuple(parameter.shape), parameter.device_mesh, tuple(parameter.placements)
    if any(placement.is_partial() for placement in placements):
        raise CutBlockError(f"parameter {name} is a pending reduction {placements}; redistribute it first")
    blocks, mesh_shape = blocks_of(group), tuple(mesh.shape)
    cut = blocks.first_cut(shape, placements, mesh_shape)
    if cut is None:
        try:
            blocks.grid_placements(shape, placements, mesh_shape)
        except UnevenBlocksError as error:
            raise CutBlockError(f"parameter {name}: {error}") from error
        return
    rank = int(mesh.mesh[cut.coordinate])
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    raise CutBlockError(
        f"parameter {name} of shape {shape} is placed as {placements}: the part of rank {rank} ends inside of block "
        f"{cut.block} ({cut.elements}) of {blocks}, which are quantized together and must not be cut. "
        + how_to_fix(name, shape, placements, mesh_shape, names, blocks)
    )


def how_to_fix(
    name: str,
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    axis_names: Sequence[str],
    blocks: Blocks,
) -> str:
    """The edits that keep blocks whole."""
    count = f"{math.prod(shape):,}"
    others = [Replicate() if isinstance(p, RaggedShard) else p for p in placements]
    if len(others) > 1 and blocks.first_cut(shape, others, mesh_shape) is not None:
        # The axes that cut while the module computes: a layout at rest changes nothing about that.
        cuts = ", ".join(f"{p} on {axis_names[axis]!r}" for axis, p in enumerate(others) if not p.is_replicate())
        size = next((n for n in (128, 64, 32, 16, 8) if _is_whole(FlatBlocks(n), shape, others, mesh_shape)), None)
        finer = f"Give it a param group with block_size={size}, of which none is cut" if size else "Cut another dim"
        return f"{cuts} makes such parts. {finer}, or one with a min_numel above its {count} elements"
    axes = [axis for axis, p in enumerate(placements) if isinstance(p, RaggedShard)]
    axes += [axis for axis, p in enumerate(placements) if not p.is_replicate()]
    granule = blocks.granule(shape)
    policy, arguments = f"Elements({granule})", f"block_size={granule}"
    if isinstance(blocks, RowBlocks):
        policy, arguments = f"Rows({blocks.rows})", f"block=({blocks.rows}, {blocks.columns})"
    return (
        f"With fully_shard, pass orig_param_policy=vescale.optim.adamw8bit_layout({arguments}), or a GranularityTable with "
        f"({name!r}, {policy}); in a plan, write plan.shard({name!r}, RaggedShard(block={granule}), "
        f"mesh={axis_names[axes[0]]!r}, phase=INIT). Otherwise choose smaller blocks, or a min_numel above the parameter's "
        f"{count} elements"
    )


def _is_whole(blocks: Blocks, shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]) -> bool:
    return blocks.first_cut(shape, placements, mesh_shape) is None
