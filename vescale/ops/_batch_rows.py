"""Local calls of functions whose rows are independent: sharded rows in, replicated parameters, sharded rows out.

``rows`` says for each mesh axis whether it shards the rows. Operands with other placements are gathered, which is implicit
communication.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.ops._conversion import bring_with_gradient, enter_local, leave_local
from vescale.placements import shard_dim


def sharded_rows(x: DTensor, batch_dim: int) -> list[bool]:
    """The axes along which ranks hold different rows of ``x``."""
    return [shard_dim(p) == batch_dim and p.is_shard() for p in x.placements]


def local_rows(x: DTensor, rows: Sequence[bool], dim: int, name: str, operand: str) -> torch.Tensor:
    """This rank's rows of ``x``, along dim ``dim``."""
    return enter_local(bring_with_gradient(x, _placements(rows, dim), name, operand))


def local_parameter(parameter: DTensor, rows: Sequence[bool], name: str) -> torch.Tensor:
    """The whole parameter, whose gradient is the sum of the gradients of all rows."""
    whole = bring_with_gradient(parameter, (Replicate(),) * parameter.device_mesh.ndim, name, "weight")
    return enter_local(whole, [Partial() if sharded else Replicate() for sharded in rows])


def rows_from_local(
    local: torch.Tensor, dim: int, num_rows: int, mesh: DeviceMesh, rows: Sequence[bool], name: str
) -> DTensor:
    """The result of all ranks, of ``num_rows`` rows along ``dim``."""
    shape = [num_rows if d == dim else size for d, size in enumerate(local.shape)]
    return leave_local(local, mesh, _placements(rows, dim), shape, name)


def _placements(rows: Sequence[bool], dim: int) -> tuple[Placement, ...]:
    return tuple(Shard(dim) if sharded else Replicate() for sharded in rows)
