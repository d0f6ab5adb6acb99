"""Which rank writes which tensor, decided by every rank for itself from what the ranks have agreed on once."""

from __future__ import annotations

import itertools
import json
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale.checkpoint._local_blocks import LocalBlocks
from vescale.checkpoint._replicas import assign, has_other_ranks
from vescale.checkpoint._snapshot import MODEL, RANDOM
from vescale.comm import Consensus

__all__ = ["Holders", "agree_on_holders", "owned", "shared_names"]

Holders = dict[str, tuple[int, ...] | None]
"""For each tensor the ranks that have it by this name; None: all of those that should."""


def shared_names(blocks: Mapping[str, LocalBlocks]) -> list[str]:
    """What this rank holds and others may hold as well: not its own random state."""
    return [name for name, entry in blocks.items() if entry.local is not None and not name.startswith(RANDOM + ".")]


def agree_on_holders(blocks: Mapping[str, LocalBlocks], consensus: Consensus) -> Holders:
    """One round through the store; each rank reads those of the others only where they differ."""
    own = sorted(shared_names(blocks))
    messages = consensus.exchange(
        zlib.compress(json.dumps(own).encode()), lambda: "ranks save a checkpoint; all of them have to call save()"
    )
    if len(set(messages)) == 1:
        return dict.fromkeys(own)
    holders = defaultdict(list)
    for rank, message in enumerate(messages):
        for name in json.loads(zlib.decompress(message)):
            holders[name].append(rank)
    return {name: tuple(ranks) for name, ranks in holders.items()}


def owned(blocks: Mapping[str, LocalBlocks], holders: Holders) -> set[str]:
    """The tensors whose blocks this rank writes. Each replica of a block is written by one rank, and all write about as many
    bytes. No communication.

    States of an optimizer that came after the agreement are taken to be where their parameters are; other tensors that
    came later are written by all ranks that have them. Of a tensor that is on several meshes (over the ranks of a
    submesh each, or tied over stages of a pipeline) the mesh with the smallest rank writes.

    Relies on ranks of one replica group having equal blocks.
    """
    if not has_other_ranks():
        return {name for name, entry in blocks.items() if entry.local is not None}
    rank, world = dist.get_rank(), dist.get_world_size()
    found = set()
    together: dict[tuple[DeviceMesh | None, tuple[int, ...], tuple[int, ...] | None], list[str]] = defaultdict(list)
    for name, entry in blocks.items():
        if entry.local is None:
            continue
        known = name if name in holders else _parameter_of(name)
        if known in holders:
            together[entry.mesh, entry.repeated, holders[known]].append(name)
        else:
            found.add(name)
    for (mesh, repeated, among), names in together.items():
        if mesh is not None and not (mesh.mesh == (min(among) if among else 0)).any():
            continue
        ranks = _replicas(mesh, repeated) if mesh is not None else range(world)
        having = [each for each in ranks if among is None or each in set(among)]
        owners = assign(((name, blocks[name].nbytes) for name in names), len(having))
        found |= {name for name in names if having[owners[name]] == rank}
    return found


def _parameter_of(name: str) -> str:
    """Of ``OPTIMIZER.state.PARAMETER.STATE``, the name of the parameter's tensor."""
    return f"{MODEL}.{name.partition('.state.')[2].rpartition('.')[0]}"


def _replicas(mesh: DeviceMesh, repeated: Sequence[int]) -> list[int]:
    """Global ranks that hold the same as this one, itself among them."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    choices = [range(mesh.size(axis)) if axis in repeated else (coordinate[axis],) for axis in range(mesh.ndim)]
    return [int(mesh.mesh[place]) for place in itertools.product(*choices)]
