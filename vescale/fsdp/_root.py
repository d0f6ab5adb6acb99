"""``check_root``: what is checked once, when the first forward has told which module is the root."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from vescale.fsdp._group import ParameterGroup
from vescale.fsdp._parameter import Slot
from vescale.fsdp._preflight import compare_groups
from vescale.fsdp._registered import check_distinct, refuse_transforms, warn_of_strays
from vescale.fsdp._unfilled import check_filled

__all__ = ["check_root"]


def check_root(root: nn.Module, groups: Sequence[ParameterGroup], ignored: Sequence[Slot] | None) -> None:
    """Give the parameters of ``groups``, which are all below ``root``, their names, and compare them with the other ranks.

    ``ignored``: parameters that belong to no group on purpose; None: parameters outside of groups are not checked.

    Raises ValueError for parameters that were tied after ``fully_shard``, MissingValuesError for memory without values,
    ShardingMismatchError where ranks differ, and TransformError.
    """
    refuse_transforms("")
    check_filled(root)
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    parameters = [parameter for group in groups for parameter in group.parameters]
    for parameter in parameters:
        parameter.name = parameter.contribution.name = names.get(id(parameter.sharded), parameter.name)
    check_distinct(parameters)
    if ignored is not None:
        warn_of_strays(root, parameters, ignored)
    along: dict[Any, list[ParameterGroup]] = {}
    for group in groups:
        along.setdefault(group.axes.data_parallel.group, []).append(group)
    for process_group, members in along.items():
        described = [
            (parameter.name, f"{tuple(parameter.sharded.shape)} {str(parameter.sharded.dtype).removeprefix('torch.')}")
            for group in members
            for parameter in group.parameters
        ]
        buffers = [
            (f"{group.path or 'the root'}[{number}]", bucket.description)
            for group in members
            for number, bucket in enumerate(group.buckets)
        ]
        numbers = [(group.path or "the root", str(group.memory.number)) for group in members]
        compare_groups(type(root).__name__, described, buffers, numbers, process_group)
