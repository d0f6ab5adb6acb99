"""Checks that all ranks have planned the same buffers, before the first collective."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist

from vescale.comm import all_gather_into
from vescale.errors import BufferMismatchError


def check_same_buffers(
    described: Mapping[str, str], group: dist.ProcessGroup, device: torch.device | str = "cpu"
) -> None:
    """Compare what each rank is about to communicate, with two small all-gathers.

    Args:
        described: for each buffer, by a readable name, all that must be equal: layout digest, dtypes, tensors. In the order
            in which they will be communicated.
        group: the ranks that will take part.

    Raises:
        BufferMismatchError: on every rank of the group, naming the first buffer that differs.
    """
    num_ranks = group.size()
    if num_ranks == 1:
        return
    numbers = [len(described), _number("\n".join(f"{name} {text}" for name, text in described.items()))]
    rows = _gathered(numbers, group, device)
    if all(row == rows[0] for row in rows):
        return
    most = max(row[0] for row in rows)  # ranks may have different numbers of buffers; all see the same rows
    own = [_number(f"{name} {text}") for name, text in described.items()]
    rows = _gathered(own + [0] * (most - len(own)), group, device)
    first = next(i for i in range(most) if any(row[i] != rows[0][i] for row in rows))
    ranks = dist.get_process_group_ranks(group)
    differing = [rank for rank, row in zip(ranks, rows, strict=True) if row[first] != rows[0][first]]
    names = list(described)
    what = f"buffer {names[first]!r} ({described[names[first]]})" if first < len(names) else f"buffer number {first}"
    raise BufferMismatchError(
        f"ranks {differing} and rank {ranks[0]} disagree on {what}; every rank must build the same model with the same "
        "parameters, dtypes, requires_grad and sharding options, in the same order"
    )


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def _gathered(numbers: list[int], group: dist.ProcessGroup, device: torch.device | str) -> list[list[int]]:
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    out = own.new_empty(group.size() * len(numbers))
    all_gather_into(out, own, group, requester="comparison of the ranks' buffers").wait()
    return out.view(group.size(), -1).tolist()
