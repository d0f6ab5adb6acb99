"""What a step of a plan communicates, seen in a step of one rank that runs without numbers and without other ranks."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from vescale._parallelize import parallelize
from vescale.comm import CommRecord, record_comms
from vescale.compat.simulated_ranks import fake_world
from vescale.estimation._bucket_gradients import bucket_gradients
from vescale.estimation._memory_log import Instant, MemoryLog, tensors_in
from vescale.estimation._rehearsal import Rehearsal, apart, balanced_tokens, given
from vescale.estimation._skeleton import first_and_last_of, loss_of, skeleton_of, typical_runs
from vescale.estimation._unfilled import Routing, UnfilledTensors
from vescale.fsdp import values_are_of_no_interest
from vescale.ir import (
    PartialGradient,
    PredictedBucket,
    Program,
    Repeats,
    UnitBucket,
    lower,
    predict_buckets,
    repeats_of,
    unit_buckets,
)
from vescale.placements import RaggedShard
from vescale.plans import MeshAxes, Plan
from vescale.runtime import ImplicitCommunicationWarning, current_activation, locate

When = Literal["forward", "backward"]
Backward = Callable[[Any, Mapping[str, Any]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Collective:
    """One collective of one step.

    Attributes:
        path: the module, or the parameter's name.
        target: ``<in>``, ``<in:name>``, ``<out>``, or the parameter's or buffer's attribute; ``<unit>`` and ``<unit>.grad``
            of the parameters of a unit together; ``<experts>`` of a region; else what asks for it inside of the module.
        axis: the mesh axes of its group, joined with ``,``.
        num_bytes: bytes that a rank sends or receives from others, as the communication ledger counts (where it is not the
            same on all corners of the mesh, those of the busiest one).
    """

    path: str
    target: str
    when: When
    axis: str
    op: str
    num_bytes: int


@dataclass(frozen=True)
class Prediction:
    """What one step communicates.

    Attributes:
        collectives: of boundaries, parameters, units, and inside of modules.
        stopped: why the step ended early, when it did; what would follow is missing then.
        gradients: that are reduced in buckets, in about the order in which they get ready.
        buckets: in which they are reduced.
        axes: of the mesh, without that of a pipeline.
    """

    axes: MeshAxes
    collectives: tuple[Collective, ...]
    stopped: str | None = None
    gradients: tuple[PartialGradient, ...] = ()
    buckets: tuple[PredictedBucket, ...] = ()

    @property
    def made(self) -> tuple[Collective, ...]:
        """The collectives that are made: gradients in buckets."""
        return (*self.collectives, *(each for bucket in self.buckets for each in _of_bucket(bucket)))

    @property
    def one_by_one(self) -> tuple[Collective, ...]:
        """The same, with what it would be for each gradient by itself."""
        alone = (predict_buckets([gradient], self.axes) for gradient in self.gradients)
        return (*self.collectives, *(each for buckets in alone for bucket in buckets for each in _of_bucket(bucket)))


def _of_bucket(bucket: PredictedBucket) -> Iterator[Collective]:
    path, _, attribute = bucket.names[0].removesuffix(".grad").rpartition(".")
    for op, axes, num_bytes in bucket.collectives:
        yield Collective(path, f"{attribute}.grad", "backward", axes, op, num_bytes)


def predict(model: nn.Module, plan: Plan, inputs: Mapping[str, Any], program: Program | None = None) -> Prediction:
    """The collectives of one forward and backward of ``model(**inputs)`` under ``plan``.

    The engine's own code runs for the first rank and for the last one, and for the other corners of the mesh if these two
    differ (in the sizes of parts, or in a ring), on tensors that are not filled. Tokens are routed to all experts alike. Of
    equal blocks that follow each other, the first and the last run.

    Args:
        model: as before ``parallelize``, on any device; it is left as it is.
        plan: what ``parallelize`` would get. A pipeline's stages are seen together.
        inputs: global ones, by name; values of floating-point tensors are not used. The gradients taken are those of
            ``output.loss``, or of the mean of each output.
        program: ``lower(plan, model)``, where that is known already.

    Raises PlanError for a plan that does not fit the model.
    """
    if plan.pipeline_entry is not None:
        plan = plan.stage_plan()
    program = lower(plan, model) if program is None else program
    ranks = sorted({0, math.prod(program.axes.sizes) - 1})
    repeats = repeats_of(model)
    steps = _steps(model, plan, inputs, ranks, repeats)
    if repeats and any(step.stopped for step in steps):  # the forward, or the plan, names modules by number
        repeats = ()
        steps = _steps(model, plan, inputs, ranks, repeats)
    typical = typical_runs(repeats, steps[0].as_rehearsal())
    if typical != repeats:
        repeats = typical
        steps = _steps(model, plan, inputs, ranks, repeats)
    units = {bucket.path: bucket for bucket in unit_buckets(program, model)}
    by_rank = [list(_collectives(step, units, repeats)) for step in steps]
    found = by_rank[0]
    if any(other != found for other in by_rank[1:]):  # parts are not equal: some corner of the mesh has most
        corners = itertools.product(*(sorted({0, size - 1}) for size in program.axes.sizes))
        others = {int(np.ravel_multi_index(corner, program.axes.sizes)) for corner in corners} - set(ranks)
        more = _steps(model, plan, inputs, sorted(others), repeats)
        by_rank += [list(_collectives(step, units, repeats)) for step in more]
        calls = [replace(c, num_bytes=0) for c in found]
        alike = [own for own in by_rank if [replace(c, num_bytes=0) for c in own] == calls]
        found = [max(each, key=lambda c: c.num_bytes) for each in zip(*alike)]
    gradients = tuple(_gradients(steps[0], program, model, repeats))
    buckets = predict_buckets(gradients, program.axes)
    return Prediction(program.axes, tuple(found), steps[0].stopped, gradients, buckets)


def forward_reports(model: nn.Module, plan: Plan, inputs: Mapping[str, Any], loss: Any = None) -> tuple[str, ...]:
    """What a forward and backward of rank 0 communicate without an entry: a text for each entry that would place the
    operands, layers merged. Of equal blocks that follow each other, the first and the last run.

    Args:
        model: as before ``parallelize``, on any device; it is left as it is.
        inputs: of its forward, by name; values of floating-point tensors are not used.
        loss: ``(output, inputs)`` to the number of which gradients are taken; default: ``output.loss``, or the mean.

    Raises what ``parallelize`` and the forward raise: code that branches on values may not run without them.
    """
    if plan.pipeline_entry is not None:  # stages run the same ops; the model as a whole shows them all
        plan = plan.stage_plan()
    repeats = repeats_of(model)
    copied = first_and_last_of(model, repeats)
    loss = loss or loss_of

    def losses(output: Any, batch: Mapping[str, Any]) -> list[torch.Tensor]:
        return [loss(output, batch)]

    try:
        return _Step().run(copied, plan, 0, inputs, losses).reports
    except Exception:  # not lost: the forward may name modules by number, and raises again with all of them
        if not repeats:
            raise
        return _Step().run(skeleton_of(model), plan, 0, inputs, losses).reports


class _Step:
    """What was seen of one step of one rank.

    Attributes:
        records: collectives, each with the path of the module that ran, and whether backward did.
        reports: texts of implicit communication.
    """

    def __init__(self) -> None:
        self.records: list[tuple[CommRecord, str, When]] = []
        self.reports: tuple[str, ...] = ()
        self.in_buckets: list[Any] = []
        self.stopped: str | None = None
        self._when: When = "forward"

    def append(self, record: CommRecord) -> None:
        """A ledger's list of records."""
        running = current_activation()
        found = locate() if running is None else None
        path = str(running.frames[-1].path) if running is not None and running.frames else found.path if found else ""
        self.records.append((record, path, self._when))

    def run(self, model: nn.Module, plan: Plan, rank: int, inputs: Mapping[str, Any], losses: Backward) -> _Step:
        """``model`` is on the meta device, and is used up."""
        mode = UnfilledTensors(MemoryLog(lambda: Instant(0, "forward", None)), Routing(), lambda *_: None)
        with (
            fake_world(math.prod(plan.axes.sizes), rank),
            apart(),
            warnings.catch_warnings(record=True) as caught,
            balanced_tokens(Routing()),
        ):
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", ImplicitCommunicationWarning)
            parallelize(model, plan if plan.mesh is None else plan.without_mesh())
            with mode:
                with values_are_of_no_interest():
                    model.to_empty(device="cpu")
                batch = {name: _given(mode, value) for name, value in inputs.items()}
                with record_comms() as ledger:
                    ledger.records = self  # type: ignore[assignment]
                    found = losses(model(**batch), batch)
                    self._when = "backward"
                    if found:
                        torch.autograd.backward(found)
                self.in_buckets = bucket_gradients(model)
        texts = (each.message for each in caught)
        self.reports = tuple(str(text) for text in texts if isinstance(text, ImplicitCommunicationWarning))
        return self

    def as_rehearsal(self) -> Rehearsal:
        log = MemoryLog(lambda: Instant(0, "forward", None))
        return Rehearsal(log, 1, collectives=[r for r, _, _ in self.records], in_buckets=self.in_buckets)


def _steps(
    model: nn.Module, plan: Plan, inputs: Mapping[str, Any], ranks: Iterable[int], repeats: tuple[Repeats, ...]
) -> list[_Step]:
    found = []
    for rank in ranks:
        step = _Step()
        found.append(step)
        try:
            step.run(first_and_last_of(model, repeats), plan, rank, inputs, _losses)
        except Exception as error:  # not lost: whatever a model does without numbers is told as what stopped the step
            text = str(error).splitlines()[0] if str(error) else "no message"
            step.stopped = f"{type(error).__name__}: {text}"
    return found


def _losses(output: Any, batch: Mapping[str, Any]) -> list[torch.Tensor]:
    own = getattr(output, "loss", None)
    outputs = [own] if isinstance(own, torch.Tensor) else [x for x in tensors_in(output) if x.is_floating_point()]
    return [x.float().mean() for x in outputs if x.requires_grad]


def _given(mode: UnfilledTensors, value: Any) -> Any:
    """An input with memory: indices are zeros."""
    if not isinstance(value, torch.Tensor):
        return value
    whole = torch.zeros_like(value, device="cpu") if value.is_meta else value
    return given(mode, whole).requires_grad_(value.requires_grad)


def _collectives(step: _Step, units: Mapping[str, UnitBucket], repeats: Sequence[Repeats]) -> Iterator[Collective]:
    """Those of a block that stands for others are of each of these."""
    for record, inside, when in step.records:
        if record.num_ranks == 1 or record.requester.startswith("bucket "):
            continue
        op = record.op.removesuffix("_v")
        path, target = _place(record.requester, inside, units, op)
        run = next((run for run in repeats if run.holds(path)), None)
        for other in run.paths() if run is not None else [path]:
            at = other + path.removeprefix(run.stand_in) if run is not None else path
            yield Collective(at, target, when, record.axes, op, record.bytes)


def _place(requester: str, inside: str, units: Mapping[str, UnitBucket], op: str) -> tuple[str, str]:
    """The path and the target of a collective; ``inside``: the module that ran."""
    who, _, rest = requester.partition(": ")
    boundary = re.fullmatch(r"(?:(.*)\.)?(<(?:in|out)\b[^>]*>)", who)
    if boundary is not None:
        return boundary[1] or "", boundary[2]
    if who.startswith("experts "):
        return who.removeprefix("experts "), "<experts>"
    if not rest and who in units:
        return who, "<unit>" if op == "all_gather" else "<unit>.grad"
    if rest and who.rpartition(".")[0] == inside and inside:
        return inside, who.rpartition(".")[2]
    return inside, f"<{who}: {rest.partition(': ')[0]}>" if who in ("implicit", "statistic") and rest else f"<{who}>"


def _gradients(
    step: _Step, program: Program, model: nn.Module, repeats: Sequence[Repeats]
) -> Iterator[PartialGradient]:
    """In the reverse of the model's order."""
    reduced = {record.requester for record, _, _ in step.records}
    seen = {one.name: one for one in step.in_buckets if one.bucket in reduced}
    for name, _ in reversed(list(model.named_parameters())):
        one = seen.get(name)
        for run in repeats if one is None else ():
            path = next((path for path in run.paths() if name.startswith(f"{path}.")), None)
            if path is not None:
                one = seen.get(run.stand_in + name.removeprefix(path))
        if one is None:
            continue
        numel = one.numel
        if any(isinstance(placement, RaggedShard) for placement in one.placements):  # pieces differ: their mean
            numels = one.numels(program.axes)
            numel = int(numels.sum()) // numels.size
        yield PartialGradient(f"{name}.grad", one.over, numel * one.dtype.itemsize, one.dtype, one.scattered_over)
