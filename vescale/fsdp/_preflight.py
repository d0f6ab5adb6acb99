"""Have all ranks given the same parameters to ``fully_shard``? Asked through the store, before the first collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from vescale.buffer import BufferMismatchError
from vescale.comm import Consensus, ConsensusError, Description, compare_descriptions
from vescale.plans import PlanMismatchError

if TYPE_CHECKING:
    from vescale.fsdp._group import ParameterGroup

__all__ = ["ShardingMismatchError", "compare_groups", "compare_inputs"]


class ShardingMismatchError(PlanMismatchError, BufferMismatchError):
    """Ranks have given different parameters, or options, to ``fully_shard``."""


def compare_groups(model: str, groups: Sequence[ParameterGroup], along: dist.ProcessGroup) -> None:
    """Compare the groups that communicate ``along`` a process group, in their order. No collective.

    Raises ShardingMismatchError, the same on every rank of ``along``: what differs, and on which ranks.
    """
    if along.size() == 1:
        return
    buffers = [
        (f"{group.path or 'the root'}[{number}]", bucket.description)
        for group in groups
        for number, bucket in enumerate(group.buckets)
    ]
    parameters = [
        (parameter.name, f"{tuple(parameter.sharded.shape)} {str(parameter.sharded.dtype).removeprefix('torch.')}")
        for group in groups
        for parameter in group.parameters
    ]
    sections: Description = {
        "versions": [("torch", torch.__version__)],
        "parameters": parameters,
        "buffers": buffers,
    }
    consensus = Consensus(dist.get_process_group_ranks(along), f"fully_shard {along.group_name}")
    try:
        found = compare_descriptions(sections, consensus, lambda: f"the first forward of {model} after fully_shard")
    except ConsensusError as error:
        raise ShardingMismatchError(f"{error}; run the forward on every rank", error.ranks) from None
    if found is not None:
        raise ShardingMismatchError(
            f"ranks disagree about fully_shard of {model}: {found.text()}; every rank must build the same model with the "
            "same parameters, dtypes, requires_grad and sharding options, in the same order",
            found.ranks,
        )


def compare_inputs(path: str, outcome: str, inputs: Sequence[tuple[str, str]], along: dist.ProcessGroup) -> None:
    """Compare what tensor subclasses want to have gathered ``along`` a process group: whether their hooks have answered, and
    dtypes and shapes by parameter.

    Raises ShardingMismatchError, the same on every rank of ``along``: what differs, and on which ranks.
    """
    if along.size() == 1:
        return
    where = path or "the root"
    consensus = Consensus(dist.get_process_group_ranks(along), f"fsdp_pre_all_gather {along.group_name}")
    sections: Description = {"fsdp_pre_all_gather": [("", outcome)], "all-gather inputs": inputs}
    try:
        found = compare_descriptions(sections, consensus, lambda: f"the first gather of {where}")
    except ConsensusError as error:
        raise ShardingMismatchError(f"{error}; run the forward on every rank", error.ranks) from None
    if found is not None:
        raise ShardingMismatchError(
            f"ranks want to gather different tensors of {where}: {found.text()}; fsdp_pre_all_gather must return tensors of "
            "the same dtypes and shapes on every rank: pad what a rank with fewer rows, or none, returns",
            found.ranks,
        )
