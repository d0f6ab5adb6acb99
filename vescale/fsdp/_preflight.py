"""Comparisons between ranks, through the store and before the first collective: have all of them built the same groups?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from vescale.agreement import Description, Round, compare_descriptions
from vescale.errors import ConsensusError, ShardingMismatchError

Rows = Sequence[tuple[str, str]]


def compare_groups(model: str, parameters: Rows, buffers: Rows, numbers: Rows, along: dist.ProcessGroup) -> None:
    """Compare the groups that communicate ``along`` a process group: descriptions of their parameters and buffers, by name
    and in their order, and the numbers that they were made with. No collective.

    Raises ShardingMismatchError, the same on every rank of ``along``: what differs, and on which ranks.
    """
    sections = {
        "versions": [("torch", torch.__version__)],
        "parameters": parameters,
        "buffers": buffers,
        "calls of fully_shard": numbers,
    }
    _compare(
        sections,
        "fully_shard",
        along,
        f"the first forward of {model} after fully_shard",
        f"ranks disagree about fully_shard of {model}",
        "every rank must build the same model with the same parameters, dtypes, requires_grad and sharding options, in the "
        "same order",
    )


def compare_inputs(path: str, outcome: str, inputs: Rows, along: dist.ProcessGroup) -> None:
    """Compare what tensor subclasses want to have gathered ``along`` a process group: whether their hooks have answered, and
    dtypes and shapes by parameter.

    Raises ShardingMismatchError, the same on every rank of ``along``: what differs, and on which ranks.
    """
    where = path or "the root"
    _compare(
        {"fsdp_pre_all_gather": [("", outcome)], "all-gather inputs": inputs},
        "fsdp_pre_all_gather",
        along,
        f"the first gather of {where}",
        f"ranks would gather different tensors of {where}",
        "fsdp_pre_all_gather must return tensors of the same dtypes and shapes on every rank: pad what a rank with fewer "
        "rows, or none, returns",
    )


def _compare(
    sections: Description, name: str, along: dist.ProcessGroup, moment: str, problem: str, advice: str
) -> None:
    if along.size() == 1:
        return
    consensus = Round(dist.get_process_group_ranks(along), f"{name} {along.group_name}")
    try:
        found = compare_descriptions(sections, consensus, lambda: moment)
    except ConsensusError as error:
        raise ShardingMismatchError(
            f"{error}; run the forward on every rank, and pass the same mesh to fully_shard on all of them", error.ranks
        ) from None
    if found is not None:
        raise ShardingMismatchError(f"{problem}: {found.text()}; {advice}", found.ranks)
