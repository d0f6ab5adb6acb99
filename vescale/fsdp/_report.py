"""What ``fully_shard`` made of a model: layout, padding, memory and bytes of each group."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from torch import nn

from vescale.fsdp._bucket import Bucket
from vescale.fsdp._group import ParameterGroup
from vescale.fsdp._state import state_of

_FORMAT, _VERSION = "vescale.fsdp.report", 1


@dataclass(frozen=True)
class GroupReport:
    """One bucket of one group: parameters of one dtype and ``requires_grad`` that are moved by one collective.

    Bytes are of this rank. ``resting_bytes`` are always there; ``peak_bytes`` come on top while the group runs backward:
    gathered parameters, unreduced gradients (unless in place) and the reduced piece. Then gradients are where parameters
    were, and the exchange on gloo needs no more than that. Of tensor subclasses ``whole_bytes`` is what their hooks have
    gathered; until the first gather it is taken to be that of plain tensors.
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
    num_all_gathers: int
    """In a forward and backward: 2 when the group is resharded in between."""
    gradients_in_place: bool = False
    """They take the memory of the gathered parameters."""

    @property
    def padding_ratio(self) -> float:
        """Padding by the size of the tensors."""
        return self.padding_elements / self.num_elements if self.num_elements else 0.0

    @property
    def padding_bytes(self) -> int:
        """This rank's even share of the padding."""
        total = self.num_elements + self.padding_elements
        return self.resting_bytes * self.padding_elements // total if total else 0

    @property
    def step_bytes(self) -> int:
        return self.num_all_gathers * self.all_gather_bytes + self.reduce_scatter_bytes

    @property
    def peak_bytes(self) -> int:
        reduced = self.gradient_bytes // self.num_ranks
        return self.whole_bytes + (0 if self.gradients_in_place else self.gradient_bytes) + reduced


class Report(tuple[GroupReport, ...]):
    """The buckets of all groups of a model, outer groups first; ``str()`` is a table for people."""

    @property
    def buckets(self) -> tuple[GroupReport, ...]:
        return tuple(self)

    @property
    def resting_bytes(self) -> int:
        """Of all shards on this rank, padding included."""
        return sum(one.resting_bytes for one in self)

    @property
    def padding_bytes(self) -> int:
        """The padding in :attr:`resting_bytes`, evenly shared by the ranks."""
        return sum(one.padding_bytes for one in self)

    @property
    def step_bytes(self) -> int:
        """What this rank receives and sends in one forward and backward, without the sum over replicas."""
        return sum(one.step_bytes for one in self)

    def to_json(self) -> str:
        """One JSON object: ``format``, ``version``, the totals, and ``buckets`` with the fields of each."""
        totals = {name: getattr(self, name) for name in ("resting_bytes", "padding_bytes", "step_bytes")}
        buckets = [dataclasses.asdict(one) | {"peak_bytes": one.peak_bytes} for one in self]
        return json.dumps({"format": _FORMAT, "version": _VERSION, **totals, "buckets": buckets})

    def __str__(self) -> str:
        """Sizes in MiB: ``rest`` is always there, ``peak`` comes on top, ``gather`` and ``reduce`` are of one collective."""
        header = ("group", "params", "dtype", "grad", "elements", "padding", "rest", "peak", "gather", "reduce")
        rows = [header, *(_row(one) for one in self)]
        elements = sum(one.num_elements for one in self)
        padding = sum(one.padding_elements for one in self)
        total = ("total", "", "", "", f"{elements:,}", _percent(padding, elements), _mib(self.resting_bytes))
        rows.append((*total, "", "", ""))
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = [
            f"{row[0]:<{widths[0]}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:]))
            for row in rows
        ]
        return "\n".join([*lines, f"communicated by a rank in a step: {_mib(self.step_bytes)} MiB"])


def report(module: nn.Module) -> Report:
    """Every bucket of every group in the tree of ``module``. No communication."""
    found, seen = [], set()
    for path, one in module.named_modules():
        state = state_of(one)
        if state is None or id(state) in seen:
            continue
        seen.add(id(state))
        found += [_bucket_report(path, group, bucket) for group in state.groups for bucket in group.buckets]
    return Report(found)


def _bucket_report(path: str, group: ParameterGroup, bucket: Bucket) -> GroupReport:
    layout, ranks = bucket.layout.exchanged.layout, group.axes.shard_size
    whole = bucket.gathered_bytes
    gradients = layout.buffer_size * bucket.reduce_dtype.itemsize if bucket.requires_grad else 0
    return GroupReport(
        path=path,
        parameters=tuple(p.name for p in bucket.parameters),
        dtype=str(bucket.dtype).removeprefix("torch."),
        requires_grad=bucket.requires_grad,
        num_ranks=ranks,
        num_replicas=group.axes.num_replicas,
        num_elements=sum(bucket.layout.whole.layout.numels),
        padding_elements=bucket.at_rest.padding_elements,
        digest=layout.digest,
        resting_bytes=bucket.at_rest.num_bytes,
        whole_bytes=whole,
        gradient_bytes=gradients,
        all_gather_bytes=whole // ranks * (ranks - 1),
        reduce_scatter_bytes=gradients // ranks * (ranks - 1),
        num_all_gathers=1 if group.reshard_after_forward is False else 2,
        gradients_in_place=group.options.in_place and bucket.compute_dtype == bucket.reduce_dtype,
    )


def _row(one: GroupReport) -> tuple[str, ...]:
    return (
        one.path or "(root)",
        f"{len(one.parameters)}",
        one.dtype,
        "yes" if one.requires_grad else "no",
        f"{one.num_elements:,}",
        _percent(one.padding_elements, one.num_elements),
        _mib(one.resting_bytes),
        _mib(one.peak_bytes),
        _mib(one.all_gather_bytes),
        _mib(one.reduce_scatter_bytes),
    )


def _percent(part: int, whole: int) -> str:
    return f"{part / whole if whole else 0:.2%}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f}"
