"""What ``fully_shard`` made of a model: layout, padding, memory and bytes of each group."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from vescale.fsdp._bucket import Bucket
from vescale.fsdp._group import ParameterGroup
from vescale.fsdp._state import state_of

__all__ = ["GroupReport", "format_report", "report"]


@dataclass(frozen=True)
class GroupReport:
    """One bucket of one group: parameters of one dtype and ``requires_grad`` that are moved by one collective.

    Bytes are of this rank. ``resting_bytes`` are always there; ``peak_bytes`` come on top while the group runs backward:
    gathered parameters, unreduced gradients and the reduced piece (on gloo the exchange needs ``gradient_bytes`` again).
    """

    path: str
    parameters: tuple[str, ...]
    dtype: str
    requires_grad: bool
    num_ranks: int
    num_replicas: int
    num_elements: int
    padding_elements: int
    digest: str
    resting_bytes: int
    whole_bytes: int
    gradient_bytes: int
    all_gather_bytes: int
    reduce_scatter_bytes: int

    @property
    def padding_ratio(self) -> float:
        """Padding by the size of the tensors."""
        return self.padding_elements / self.num_elements if self.num_elements else 0.0

    @property
    def peak_bytes(self) -> int:
        reduced = self.gradient_bytes // self.num_ranks
        return self.whole_bytes + self.gradient_bytes + reduced


def report(module: nn.Module) -> list[GroupReport]:
    """Every bucket of every group in the tree of ``module``, outer groups first. No communication."""
    found, seen = [], set()
    for path, one in module.named_modules():
        state = state_of(one)
        if state is None or id(state) in seen:
            continue
        seen.add(id(state))
        found += [_bucket_report(path, group, bucket) for group in state.groups for bucket in group.buckets]
    return found


def _bucket_report(path: str, group: ParameterGroup, bucket: Bucket) -> GroupReport:
    layout, ranks = bucket.shards.group.layout, group.axes.shard_size
    elements = sum(bucket.group.layout.numels)
    whole = layout.buffer_size * bucket.compute_dtype.itemsize
    gradients = layout.buffer_size * bucket.reduce_dtype.itemsize if bucket.requires_grad else 0
    return GroupReport(
        path=path,
        parameters=tuple(p.name for p in bucket.parameters),
        dtype=str(bucket.dtype).removeprefix("torch."),
        requires_grad=bucket.requires_grad,
        num_ranks=ranks,
        num_replicas=group.axes.num_replicas,
        num_elements=elements,
        padding_elements=layout.buffer_size - elements,
        digest=layout.digest,
        resting_bytes=bucket.shards.num_bytes,
        whole_bytes=whole,
        gradient_bytes=gradients,
        all_gather_bytes=whole // ranks * (ranks - 1),
        reduce_scatter_bytes=gradients // ranks * (ranks - 1),
    )


def format_report(reports: list[GroupReport]) -> str:
    """A table for people; sizes in MiB."""
    columns = ("params", "dtype", "grad", "elements", "padding", "rest", "peak", "gather")
    widths = (6, 9, 5, 13, 8, 9, 9, 9)
    rows = [
        (
            f"{len(one.parameters)}",
            one.dtype,
            "yes" if one.requires_grad else "no",
            f"{one.num_elements:,}",
            f"{one.padding_ratio:.2%}",
            _mib(one.resting_bytes),
            _mib(one.peak_bytes),
            _mib(one.all_gather_bytes),
        )
        for one in reports
    ]
    names = ["group", *((one.path or "(root)")[-28:] for one in reports)]
    lines = [
        f"{name:<28} " + " ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for name, row in zip(names, [columns, *rows], strict=True)
    ]
    return "\n".join(lines)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f}"
