"""Micro-batches of a batch, and what is known of batches of the same shapes."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vescale.compat.tensor_subclasses import tree_flatten, tree_unflatten
from vescale.errors import PipelineBatchError, PipelineRowsError, PipelineWarning
from vescale.pipeline._backward_code import nodes_behind
from vescale.pipeline._batch_reads import Place
from vescale.pipeline._cut import Cut
from vescale.pipeline._headers import HeaderExchange
from vescale.pipeline._loss_path import output_at, try_loss
from vescale.pipeline._row_flow import EDITS, RowFlow, Rows, Substitute
from vescale.pipeline._row_states import RowState, cut_dim
from vescale.pipeline._trace import trace
from vescale.pipeline._traced import MEAN, NOTHING, Boundary, Origin, Trace
from vescale.plans import PipelineEntry, PlanError

_SHOWN = 3  # texts of a warning
MOST_BRANCHES = 16  # so many signatures that differ in what forwards read are kept


class Signature:
    """What is known of batches of one signature: traces, headers, the rows of random numbers, and how losses add up."""

    def __init__(self, whole: Trace, part: Trace, headers: Callable[[], HeaderExchange], entry: PipelineEntry) -> None:
        self.headers = headers()
        self.dims = _batch_dims(whole, part, entry)
        self.loss = _loss(whole, part, entry)
        self.writers: Mapping[str, int] = whole.row_ops.writers
        buffers = set(whole.row_ops.written_buffers.values()) - self.loss.alike
        self.of_rows = [*whole.of_rows, *(f"the forward writes to the buffer {name!r}" for name in sorted(buffers))]
        self.of_all: Signature | None = None  # of the loss of all rows
        if entry.microbatches > 1 and self.loss.rows is not None:
            self.of_all = Signature(whole, whole, headers, replace(entry, microbatches=1))
        self.trial: Any = None  # a RowTrial, until the first step has been compared with it
        self.settings: dict[tuple[str, str], Any] = {}  # of the model, with which the forward was traced
        self.whole = whole.without_values()
        self.part = replace(part.without_values(), boundaries=_reached(part, entry))
        self._ignores_values, self.num_microbatches = False, entry.microbatches
        self.ignores_sizes = False
        self._origins: dict[int, tuple[Mapping[Origin, int], Mapping[Origin, int]]] = {}
        self.drawn: set[int] = set()  # the stages whose random numbers have been compared with those of the trace

    def compute_loss_of_all(self, why: str, entry: PipelineEntry) -> None:
        """The loss is not what those of micro-batches add up to. Raises PlanError where its rows are not known."""
        if self.loss.rows is None:
            raise rows_error(why, entry)
        self.loss = replace(self.loss, whole=why)

    def origins(self, stage: int) -> tuple[Mapping[Origin, int], Mapping[Origin, int]]:
        """The numbers of what a stage receives, and of what it sends, beside the arguments of modules. (Of arguments, too,
        where they are read elsewhere: their stand-ins may be several.)"""
        found = self._origins.get(stage)
        if found is None:
            enters, leaves = (self.part.boundaries.get(n, NOTHING) for n in (stage, stage + 1))
            entering = _by_origin(enters, 0 if stage in self.part.outside else len(enters.leaves))
            found = self._origins[stage] = entering, _by_origin(leaves, len(leaves.leaves))
        return found

    def chooses(self, batch: Mapping[str, Any]) -> bool:
        """Whether masks and the like choose as much of this batch as of the traced one, where numbers come of that."""
        reads = self.whole.reads
        return self.ignores_sizes or not reads.sizes or reads.choose(batch) == reads.sizes

    def fits(self, batch: Mapping[str, Any]) -> bool:
        """Whether the forward of this batch reads what that of the traced one has read."""
        reads = self.whole.reads
        if self._ignores_values or not reads.branches:
            return True
        values = reads.compute(batch)
        return all(values[place] == value for place, value in reads.branches.items())

    def computes_as(self, other: Signature, batch: Mapping[str, Any]) -> bool:
        """Whether both are the same for a batch: what the forward takes from it, and how its losses add up."""
        if not (self.whole.looks_like(other.whole) and self.part.looks_like(other.part)):
            return False
        both: list[list[Any]]
        try:
            both = [
                [
                    (known.loss.weight, known.loss.of_labels, known.loss.rows, len(known.loss.substitutes)),
                    [s.value(batch) for s in known.loss.substitutes],
                    [term.count(batch) for term in known.whole.losses if term.is_known],
                    known.whole.reads.compute(batch) if known.whole.reads.values else {},
                ]
                for known in (self, other)
            ]
        except (RuntimeError, IndexError):  # of numbers that were sizes of the other batch
            return False
        values, others = (known.pop(1) for known in both)
        return both[0] == both[1] and all(map(torch.equal, values, others))

    def compare(self, others: Sequence[Signature]) -> None:
        """With those that differ in numbers alone (``mask.sum().item()``): where calls, shapes and random numbers are the
        same, none of them needs a trace of its own."""
        for other in others:
            pairs = [
                (self.whole.reads.branches.get(place), value) for place, value in other.whole.reads.branches.items()
            ]
            different = [type(a) is bool for a, b in pairs if a != b]
            if (
                different
                and not any(different)
                and self.whole.looks_like(other.whole)
                and self.part.looks_like(other.part)
            ):
                self._ignores_values = True

    def answers(self, batch: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> dict[Place, Any]:
        """What the forward of each micro-batch gets where it reads from the batch: what that of the whole batch reads.
        Empty where all read the same, and where a micro-batch reads less often, so that each reads for itself."""
        whole, part = self.whole.reads, self.part.reads
        if self.num_microbatches == 1 or not whole.values:
            return {}
        if whole.counts != part.counts or whole.values.keys() != part.values.keys():
            return {}
        values = whole.compute(batch)
        return values if any(part.compute(given) != values for given in parts) else {}


def _by_origin(boundary: Boundary, first: int) -> dict[Origin, int]:
    """The numbers, from ``first`` on, of what enters a stage."""
    return {origin: n for n, origins in enumerate(boundary.origins) if n >= first for origin in origins}


def warn_of_rows(found: Sequence[str], entry: PipelineEntry) -> None:
    """On the first rank, once for each text."""
    if dist.is_initialized() and dist.get_rank() == 0:
        more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        warnings.warn(
            f"pipeline: {'; '.join(found[:_SHOWN])}{more}: separately in each of {entry.microbatches} micro-batches, "
            "not once for the batch as on one device. Use a normalization of single rows (LayerNorm, GroupNorm), set "
            "batch normalization to evaluation mode, or use microbatches=1 with GPipe",
            PipelineWarning,
            stacklevel=2,
        )


def traced_pair(
    skeleton: nn.Module,
    cut: Cut,
    entry: PipelineEntry,
    batch: Mapping[str, Any],
    first: Mapping[str, Any],
    whole: Trace | None = None,
) -> tuple[Trace, Trace]:
    """Of a batch and its first rows, in whose forward reads give what they give in that of the batch.

    Args:
        whole: the first of them, if it is known.
    """

    def traced(
        given: Mapping[str, Any], answers: Mapping[Place, Any] | None = None, num_calls: int | None = None
    ) -> Trace:
        loss = functools.partial(try_loss, entry, batch=given) if callable(entry.loss) else None
        inputs, grad = inputs_of(skeleton, given, entry), torch.is_grad_enabled()
        beside = {name: value for name, value in given.items() if name not in inputs}
        return trace(
            skeleton,
            cut,
            inputs,
            entry.source,
            grad=grad,
            answers=answers,
            loss=loss,
            beside=beside,
            num_calls=num_calls,
        )

    known = traced(batch) if whole is None else whole

    def traced_part(num_calls: int | None = None) -> Trace:
        part = traced(first, known.reads.values, num_calls)
        if part.reads.counts != known.reads.counts and known.reads.values and num_calls is None:
            part = traced(first)
        return part

    try:
        try:
            part = traced_part()
        except Exception:  # of the loss, which may be that of all rows alone; an error of the modules is raised again
            part = traced_part(len(known.calls))
    except PlanError:
        raise
    except Exception as error:  # of the model's own code, which has run for the whole batch
        raise PipelineBatchError(
            f"pipeline: the forward runs with the batch, but not with one of its {entry.microbatches} micro-batches, "
            f"with which it raises {type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}; "
            "choose microbatches= so that rows that belong together stay together, or use microbatches=1 with GPipe",
            entry.source,
        ) from error
    return known, part


def inputs_of(model: nn.Module, batch: Mapping[str, Any], entry: PipelineEntry) -> dict[str, Any]:
    """What of a batch the model's forward is called with: all, or beside a callable loss, what it takes; the rest is the
    loss's."""
    if not callable(entry.loss):
        return dict(batch)
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(batch)
    return {name: value for name, value in batch.items() if name in parameters}


def microbatches_of(batch: Mapping[str, Any], entry: PipelineEntry, count: int = 1) -> list[dict[str, Any]]:
    """The micro-batches of a batch: equal parts of each tensor along dim 0, also of those in lists, tuples and dicts.
    With ``count``, so many of them together.

    Tensors without dims, tensors of one row beside others of several, and other values go to every micro-batch as they
    are. Raises PlanError for sizes that cannot be cut.
    """
    m = entry.microbatches
    leaves, tree = tree_flatten(dict(batch))
    rows = [value.shape[0] if isinstance(value, torch.Tensor) and value.ndim else None for value in leaves]
    size = max((n for n in rows if n is not None), default=0)
    if not size or any(n not in (None, 1, size) for n in rows):
        names = [name for name, value in batch.items() for _ in tree_flatten(value)[0]]
        shown = {name: n for name, n in zip(names, rows) if n is not None}
        raise PipelineBatchError(
            f"pipeline: the batch has {'no rows' if not size else f'tensors of different sizes in dim 0: {shown}'}; "
            "pass tensors to .step() that all have the batch in dim 0",
            entry.source,
        )
    if size % m:
        raise PipelineBatchError(
            f"pipeline: a batch of {size} rows cannot be split into {m} equal micro-batches; pass a multiple of {m} "
            "rows, or change microbatches=",
            entry.source,
        )
    cut = [v.split(size // m * count) if n == size else [v] * m for v, n in zip(leaves, rows)]
    return [tree_unflatten(list(part), tree) for part in zip(*cut)]


def _batch_dims(whole: Trace, part: Trace, entry: PipelineEntry) -> dict[tuple[int, ...], int | None]:
    """For each shape that is drawn in a micro-batch, its dim that is cut. Raises PlanError where that is ambiguous."""
    m = entry.microbatches
    if part.is_cut_short:
        whole = replace(whole, draws=whole.draws[: len(part.draws)])
    if [d.op for d in whole.draws] != [d.op for d in part.draws]:
        raise PipelineBatchError(
            f"pipeline: the forward draws {len(whole.draws)} times for the whole batch, but {len(part.draws)} times "
            "for a micro-batch, so that its random numbers cannot match one device; draw the same number of times "
            "for both",
            entry.source,
        )
    found: dict[tuple[int, ...], int | None] = {}
    for big, small in zip(whole.draws, part.draws):
        dim = cut_dim(big.shape, small.shape, m)
        if dim is None and big.shape != small.shape:
            raise PipelineBatchError(
                f"pipeline: {small.op.name} draws for a tensor of shape {big.shape} of the batch, and {small.shape} "
                f"of a micro-batch, which is not one of {m} parts of it along a dim, so that its random numbers "
                "cannot match one device; draw for a tensor that has the batch in one dim",
                entry.source,
            )
        if found.setdefault(small.shape, dim) != dim:
            raise PipelineBatchError(
                f"pipeline: tensors of shape {small.shape} are drawn of which some depend on the batch and others do "
                "not; change the shape of one of them",
                entry.source,
            )
    return found


@dataclass(frozen=True)
class _Loss:
    """How micro-batches compute the loss of a batch.

    Attributes:
        weight: what their losses are multiplied by, to add up to that of the batch, where a mean over labels is divided by
            the average number of labels in a micro-batch.
        of_labels: it is made of means over labels alone, which are divided by the number of labels in the batch: one
            rounding, as on one device.
        substitutes: what they take from the whole batch.
        whole: why it is computed once of all rows, on the last stage; empty if it is not.
        rows: of what the last stage computes it of, as of :meth:`RowFlow.rows_for_loss`.
        needs_modules: those of the last stage write to what they get: the loss cannot be computed without them.
        alike: the buffers to which each micro-batch writes what the batch does: it finds them as they were before the step.
    """

    weight: float = 1.0
    of_labels: bool = False
    substitutes: Sequence[Substitute] = ()
    whole: str = ""
    rows: Mapping[int, Sequence[Rows | None]] | None = None
    needs_modules: bool = False
    alike: frozenset[str] = frozenset()

    def why_slow(self) -> str:
        return (
            f"pipeline: {self.whole}: the last stage computes it once, from the rows of all micro-batches, and each "
            "step runs every forward twice, first without gradients. The numbers are those of one device. To save "
            "that time, compute what needs all rows before .step(); or, if each micro-batch may use its own rows, "
            "pass rows='microbatch' to plan.pipeline(...)"
        )


def _loss(whole: Trace, part: Trace, entry: PipelineEntry) -> _Loss:
    """Raises PlanError where modules would have to run with rows of several micro-batches."""
    count, last = entry.microbatches, max(whole.boundaries, default=0)
    if count == 1:
        return _Loss()
    each_by_itself = entry.rows == "microbatch"
    read = set(whole.reads.values.values()) if whole.reads.counts != part.reads.counts else ()
    flow = RowFlow(
        whole.row_ops, part.row_ops, count, whole.replay, (whole.means, part.means), read, each_by_itself=each_by_itself
    )
    needs, why_not = flow.of_calls()
    state = _state_of_loss(flow, whole, part, entry)
    why = _why_no_sum(state, whole, part, entry)
    if not why and state is not None:
        needs |= state.needs
    alike: frozenset[str] = frozenset()
    if not each_by_itself:
        alike, of_buffers = flow.buffers_written_alike()
        needs |= of_buffers
    buffer = "" if each_by_itself else whole.row_ops.buffer_that_counts(_loss_in(whole, entry), alike)
    if buffer:
        raise rows_error(
            f"the forward writes to the buffer {buffer!r}, and computes its loss with it: on one device once for the batch",
            entry,
        )
    if each_by_itself:  # if it is no sum, the average, as of gradient accumulation
        if why or state is None:
            return _Loss(1 / count)
        return _Loss(state.weight, state.of_labels, [flow.substitutes[n] for n in needs])
    rows = None if why_not else flow.rows_for_loss(whole.calls, last)
    substitutes = [flow.substitutes[n] for n in needs]
    if not why:
        weight, of_labels = (state.weight, state.of_labels) if state is not None else (1.0, False)
        return _Loss(weight, of_labels, substitutes, "", rows, last in whole.row_ops.writing, alike)
    if rows is None or whole.boundaries.keys() != part.boundaries.keys() or len(whole.calls) != len(part.calls):
        raise rows_error(f"{why_not or why}", entry)
    return _Loss(1.0, False, substitutes, why, rows, alike=alike)


def _reached(trace: Trace, entry: PipelineEntry) -> dict[int, Boundary]:
    """The boundaries, with what is detached behind them: its gradient is none, not zero."""
    loss = None if trace.is_cut_short else _loss_in(trace, entry)
    nodes = set[Any]()
    if not nodes_behind([loss], nodes):
        return trace.boundaries
    found = {}
    for stage, boundary in trace.boundaries.items():
        tensors = enumerate(trace.row_ops.entering[stage])
        detached = frozenset(n for n, x in tensors if x.grad_fn is not None and x.grad_fn not in nodes)
        requires_grad = tuple(grad and n not in detached for n, grad in enumerate(boundary.requires_grad))
        found[stage] = replace(boundary, requires_grad=requires_grad, detached=detached)
    return found


def rows_error(why: str, entry: PipelineEntry) -> PipelineRowsError:
    return PipelineRowsError(
        f"pipeline: {why}, but each of {entry.microbatches} micro-batches has only a part of the batch's rows. {EDITS}",
        entry.source,
    )


def _why_no_sum(state: RowState | None, whole: Trace, part: Trace, entry: PipelineEntry) -> str:
    """Why the loss is not what those of micro-batches add up to; empty if it is. A callable's is left to the trial."""
    if part.is_cut_short:
        return "the loss cannot be computed from a micro-batch"
    if not callable(entry.loss) and any(term.reduction == MEAN and not term.is_known for term in whole.losses):
        return "the loss is a mean over labels that the model computes from its parameters"
    if state is not None and state.kind == "mixed":
        return f"the loss depends on rows of several micro-batches: {state.why}"
    if not callable(entry.loss) and (state is None or state.kind != "sum"):
        return "the loss is not a sum or mean over rows of values that depend on a single row"
    return ""


def _state_of_loss(flow: RowFlow, whole: Trace, part: Trace, entry: PipelineEntry) -> RowState | None:
    if part.is_cut_short:
        return None
    big, small = (_loss_in(trace, entry) for trace in (whole, part))
    return None if big is None or small is None else flow.of(big, small)


def _loss_in(trace: Trace, entry: PipelineEntry) -> Any:
    return trace.total if callable(entry.loss) else output_at(trace.output, entry.loss, entry.source)


def like(value: Any) -> str:
    """A text that is the same for values that a trace does not tell apart."""
    if isinstance(value, list | tuple | dict):
        leaves, tree = tree_flatten(value)
        return f"{tree} {[like(leaf) for leaf in leaves]}"
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    return f"{type(value).__name__} {value!r}"[:200]
