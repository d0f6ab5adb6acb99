"""``search``: meshes and plans for a model on a number of devices, ranked by the seconds of a step."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vescale.compat.devices import running_accelerator
from vescale.errors import ArgumentTypeError, EstimateOptionError
from vescale.estimation import (
    Device,
    device_of,
    estimate,
    first_and_last_of,
    make_batch,
    repeats_of,
    skeleton_of,
    unit_paths,
    without_collections,
    zero_units,
)
from vescale.ir import Finding, check
from vescale.pipeline import check_stages
from vescale.plan_search._choice import Choice, Model, PlanSource, plan_of, plan_sources
from vescale.plan_search._figures import Figures, Setting, figures_of, optimizer_cost, schedule_of, staged_figures
from vescale.plan_search._profile import Profile, profile_of
from vescale.plans import LocalEntry, Plan, PlanError

# Which choices a search looks at, and those that the numbers of ranks, rows, blocks and experts rule out.


CHECKPOINTS = ("none", "selective", "full")
_CONTEXT_RANKS = 8  # the most that a search looks at
_CONTEXT_PIECES = 8  # runs of the sequence for each rank, in the plans of the zoo
_ROUNDS = (1, 2, 4, 8)  # micro-batches for each stage
_STAGES = 16  # the most that a search looks at; half of it with two on each rank


@dataclass(frozen=True)
class Rejected:
    """A choice that is not proposed, or a group of them, with the reason.

    Attributes:
        what: the choice as plain data, or the part of it that rules it out.
        rule: ``mesh``, ``batch``, ``plan``, ``memory``, ``slower`` or ``lint``.
        reason: the reason, as a sentence.
        needed_bytes: what it needs on a device, if that is more than the device has; otherwise None.
    """

    what: dict[str, Any]
    rule: str
    reason: str
    needed_bytes: int | None = None


@dataclass(frozen=True)
class Family:
    """Choices with the same cuts of tensors, without checkpointing."""

    source: PlanSource
    tp: int
    cp: int
    ep: int
    choices: tuple[Choice, ...]


def families(
    devices: int,
    rows: int,
    length: int | None,
    model: Model,
    sources: tuple[PlanSource, ...],
    ranks_per_node: int,
    no_stages: str | None,
) -> Iterator[Family | Rejected]:
    """Those of a number of devices, each with the choices that its numbers allow.

    Args:
        devices: all of them are used.
        rows: of the batch; ``length``: of a row, where the batch has sequences.
        model: its blocks and experts.
        sources: of plans: the first with parts of sequences between the parts of layers, the second without.
        ranks_per_node: the most ranks of ``tp``.
        no_stages: why the model cannot be cut into stages; None: it can.
    """
    if no_stages is not None and devices > 1:
        yield Rejected({"mesh": {"pp": "2 or more"}}, "plan", no_stages)
    for tp in _divisors(devices):
        if tp > ranks_per_node:
            reason = f"tensor parallelism stays within a host, and a host has {ranks_per_node} devices"
            yield Rejected({"mesh": {"tp": tp}}, "mesh", reason)
            continue
        for source in sources if tp > 1 else sources[:1]:
            for cp in _divisors(devices // tp):
                why = _context(source, cp, length)
                if why is not None:
                    yield Rejected({"mesh": {"cp": cp, "tp": tp}, "source": source.name}, "mesh", why)
                    continue
                for ep in _divisors(devices // tp // cp) if model.experts and cp == 1 else (1,):
                    if ep > 1 and (model.num_experts % (ep * tp) or ep > model.num_experts):
                        reason = f"{model.num_experts} experts are not a multiple of {ep * tp} ranks"
                        yield Rejected({"mesh": {"ep": ep, "tp": tp}}, "mesh", reason)
                        continue
                    found: list[Choice] = []
                    for one in _of_mesh(source, devices // tp // cp // ep, rows, model, tp, cp, ep, no_stages is None):
                        if isinstance(one, Rejected):
                            yield one
                        else:
                            found.append(one)
                    if found:
                        yield Family(source, tp, cp, ep, tuple(found))


def _context(source: PlanSource, cp: int, length: int | None) -> str | None:
    if cp == 1:
        return None
    if source.context is None:
        return f"the source {source.name} has no plan that shards the sequence in attention"
    if length is None or length % (_CONTEXT_PIECES * cp):
        return (
            f"the sequence of {length} is not a multiple of {_CONTEXT_PIECES * cp}: {_CONTEXT_PIECES} runs for each "
            "rank"
        )
    if cp > _CONTEXT_RANKS:
        return f"search tries at most {_CONTEXT_RANKS} ranks of context parallelism"
    return None


def _of_mesh(
    source: PlanSource, rest: int, rows: int, model: Model, tp: int, cp: int, ep: int, has_stages: bool
) -> Iterator[Choice | Rejected]:
    """Stages, and ranks of data, of ``rest`` ranks."""
    for pp in _divisors(rest):
        data = rest // pp
        mesh = Choice(source, pp=pp, dp=data, cp=cp, ep=ep, tp=tp)
        if pp > 1 and not has_stages:
            continue
        if pp > min(model.num_blocks, _STAGES) and pp > 1:
            reason = f"{model.num_blocks} blocks are fewer than {pp} stages"
            if pp <= model.num_blocks:
                reason = f"search tries at most {_STAGES} stages"
            yield Rejected({"mesh": {"pp": pp, "cp": cp, "ep": ep, "tp": tp}}, "mesh", reason)
            continue
        if rows % (data * ep):
            reason = f"a batch of {rows} rows is not a multiple of {data * ep} ranks of data"
            yield Rejected(mesh.describe(), "batch", reason)
            continue
        if pp == 1:
            yield from _with_zero(mesh)
            continue
        own = rows // (data * ep)
        counts = [pp * n for n in _ROUNDS if own % (pp * n) == 0]
        if not counts:
            reason = f"{own} rows of a rank cannot be split into at least {pp} micro-batches, one for each stage"
            yield Rejected(mesh.describe(), "batch", reason)
        for schedule in ("1F1B", "Interleaved1F1B"):
            per_rank = 2 if schedule.startswith("Interleaved") else 1
            if pp * per_rank > min(model.num_blocks, _STAGES):
                continue
            for count in counts:
                try:
                    schedule_of(schedule, pp, per_rank, count)
                except PlanError as error:
                    yield Rejected({**mesh.describe(), "schedule": schedule}, "mesh", str(error))
                    continue
                for zero in (0, 3) if data > 1 else (0,):
                    yield Choice(source, pp, 1, data, cp, ep, tp, zero, "none", schedule, count)


def _with_zero(mesh: Choice) -> Iterator[Choice]:
    data = mesh.dp
    for zero in range(4) if data > 1 else (0,):
        yield Choice(mesh.source, dp=data, cp=mesh.cp, ep=mesh.ep, tp=mesh.tp, zero=zero)
    for part in _divisors(data):
        if 1 < part < data:
            yield Choice(mesh.source, replicas=data // part, dp=part, cp=mesh.cp, ep=mesh.ep, tp=mesh.tp, zero=3)


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)


# Calls of one function in processes of their own, on hosts with several cores.

_MOST = 4
_CALL: list[Callable[[Any], Any]] = []
_ITEMS: list[Any] = []


def each(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """``function`` of each item, in order; results are pickled.

    The processes are forks of this one, which has loaded the model: only where nothing else runs in it (threads, a process
    group, a GPU's context), else the calls are made here, one after the other.
    """
    number = min(len(items), number_of_processes())
    if number < 2:
        yield from map(function, items)
        return
    _CALL[:], _ITEMS[:] = [function], items
    try:
        with ProcessPoolExecutor(number, multiprocessing.get_context("fork"), initializer=_begin) as pool:
            yield from pool.map(_call, range(len(items)))
    finally:
        _CALL.clear()
        _ITEMS.clear()


def number_of_processes() -> int:
    """How many calls :func:`each` makes at once."""
    is_alone = threading.active_count() == 1 and not dist.is_initialized() and running_accelerator() is None
    if not is_alone or "fork" not in multiprocessing.get_all_start_methods():
        return 1
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, _MOST)


def _begin() -> None:
    torch.set_num_threads(1)  # threads of the parent are not there


def _call(number: int) -> Any:
    return _CALL[0](_ITEMS[number])


# What a search has found.


@dataclass(frozen=True)
class Proposal:
    """A plan that fits.

    Attributes:
        choice: the mesh, the stage of ZeRO, checkpointing and pipeline stages.
        figures: memory and time of a step.
    """

    choice: Choice
    figures: Figures
    _model: Model = field(repr=False)
    _precision: str | None = field(default=None, repr=False)

    def plan(self) -> Plan:
        """Return a new plan, to print, edit, write (``to_yaml()``) or pass to :func:`vescale.parallelize`."""
        return plan_of(self.choice, self._model, self._precision)

    def to_json(self) -> dict[str, Any]:
        """The choice and its figures as plain data."""
        return {
            **self.choice.describe(),
            "step_seconds": self.figures.step_seconds,
            "terms": dict(self.figures.terms),
            "peak_bytes": self.figures.peak_bytes,
            "needed_bytes": self.figures.needed_bytes,
            "exact": self.figures.is_exact,
        }


@dataclass(frozen=True)
class Search:
    """What :func:`vescale.search` returns.

    Attributes:
        devices: the number of devices.
        device: their kind, as a table of memory and speeds.
        rows: the number of rows of the global batch.
        tokens: the number of tokens of the global batch.
        proposals: the plans that fit, the fastest first.
        rejected: everything else that was looked at, with the reason.
        seconds: how long the search took.
        margin: the share of memory that is kept for fragmentation.
    """

    devices: int
    device: Device
    rows: int
    tokens: int
    proposals: tuple[Proposal, ...]
    rejected: tuple[Rejected, ...]
    seconds: float
    margin: float = 0.0

    @property
    def best(self) -> Proposal | None:
        """The fastest proposal; None where nothing fits."""
        return self.proposals[0] if self.proposals else None

    @property
    def fits(self) -> bool:
        """Whether any plan fits."""
        return bool(self.proposals)

    def reasons(self) -> dict[str, int]:
        """The number of rejected choices for each rule, the most frequent rule first."""
        return dict(Counter(one.rule for one in self.rejected).most_common())

    def advice(self) -> list[str]:
        """If nothing fits, sentences about how much memory is missing and what would help; otherwise an empty list."""
        if self.proposals:
            return []
        missing = [one for one in self.rejected if one.needed_bytes is not None]
        if not missing:
            rules = ", ".join(f"{count} for {rule}" for rule, count in self.reasons().items())
            return [
                f"no mesh of {self.devices} devices works for this model and batch (rejected: {rules}); pass a number "
                "of devices that divides the rows of the batch, or a batch with more divisors"
            ]
        least = min(missing, key=lambda one: one.needed_bytes or 0)
        needed, memory = (1 + self.margin) * (least.needed_bytes or 0), self.device.memory_bytes or 0
        found = [
            f"nothing fits: the smallest choice needs {needed / 2**30:.2f} GiB on a device{_with(self.margin)}, "
            f"{(needed - memory) / 2**30:.2f} GiB more than {self.device.name} has: {_text(least.what)}"
        ]
        helps = ["more devices", "devices with more memory"]
        if self.rows > 1:
            helps.append("fewer rows in the batch, or shorter ones")
        helps += ["an optimizer with smaller states (adamw8bit)", "parameters in bfloat16"]
        return [*found, f"what would help: {', '.join(helps)}"]

    def to_json(self) -> dict[str, Any]:
        """The whole result as plain data, as ``vescale search --json`` prints it."""
        return {
            "devices": self.devices,
            "device": self.device.name,
            "memory_bytes": self.device.memory_bytes,
            "rows": self.rows,
            "seconds": self.seconds,
            "fits": self.fits,
            "proposals": [
                {
                    **one.to_json(),
                    "tokens_per_second": self.tokens / one.figures.step_seconds if one.figures.step_seconds else 0.0,
                }
                for one in self.proposals
            ],
            "rejected": [
                {**one.what, "rule": one.rule, "reason": one.reason, "needed_bytes": one.needed_bytes}
                for one in self.rejected
            ],
            "advice": self.advice(),
        }


def _text(what: dict[str, Any]) -> str:
    mesh = ",".join(f"{axis}={size}" for axis, size in what["mesh"].items())
    return f"{mesh}, ZeRO-{what['zero']}, checkpointing {what['checkpoint']}"


_NAMES = {"none": "without checkpointing", "selective": "with selective checkpointing"}


def search(
    model: nn.Module,
    *,
    devices: int,
    batch: Mapping[str, Any],
    device: str | Device = "h100-80g",
    optimizer: Any = "adamw",
    precision: str | None = None,
    load: float | list[float] = 1.0,
    loss: Callable[[Any, Mapping[str, Any]], torch.Tensor] | None = None,
    exact: int = 3,
    margin: float = 0.08,
    progress: Callable[[str], None] | None = None,
) -> Search:
    """Meshes and plans for ``model`` on ``devices`` devices that fit their memory, the fastest step first.

    Plans come from the zoo, from the model itself (``tp_plan``), or from :func:`vescale.new_plan`; with them go the stage
    of ZeRO or hybrid sharding, activation checkpointing, parts of sequences between layers and in attention, ranks of
    experts, and pipeline stages. One step is run without numbers for each way of cutting tensors, with the first and the
    last of equal blocks; memory and seconds of the choices beyond are computed from it, and the fastest plans are
    estimated by :func:`vescale.estimate`. No ranks, and no devices, are needed.

    Args:
        model: on the meta device, deferred or real; not parallelized, and not changed.
        devices: how many; every mesh uses all of them.
        batch: the global batch, by name of the forward's inputs: tensors, shapes, or other arguments.
        device: a name of a table (``h100-80g``, ...), a YAML file, or a table.
        optimizer: as for :func:`vescale.estimate`.
        precision: a dtype to compute in, for all plans (``bfloat16``); gradients are reduced in float32. None: the model's.
        load: of experts, as for :func:`vescale.estimate`.
        loss: of the model's output and the batch; by default ``output.loss``, or the mean of the first output.
        exact: the number of fastest plans that are estimated individually, in addition to the fastest of each kind (the
            same ``tp``, ``cp`` and ``ep``). Figures of others of a kind are scaled as the estimate differs from their
            closed form.
        margin: the share of a plan's memory that is added for fragmentation, which estimates do not include.
        progress: called with a line for each part of the work.

    Raises:
        EstimateOptionError: a number of devices that is none, or a forward that fails with this batch on one device.
        TypeError, ValueError: a batch that does not fit, an unknown optimizer or device.
    """
    began = time.perf_counter()
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise EstimateOptionError(f"search: devices is {devices!r}; pass at least 1")
    if exact < 0:
        raise EstimateOptionError(f"search: exact is {exact}; pass 0 or more")
    if not 0 <= margin < 1:
        raise EstimateOptionError(f"search: margin is {margin}; pass a share, such as 0.08")
    table = device_of(device)
    with without_collections():  # they take a seventh of a search
        looked = Looked(
            model, devices, batch, table, optimizer, precision, load, loss, progress or _no_progress, margin
        )
        looked.evaluate()
        looked.estimate_first(exact)
    seconds = time.perf_counter() - began
    proposals = tuple(Proposal(c, f, looked.facts, precision) for c, f in looked.ranked())
    return Search(devices, table, looked.rows, looked.tokens, proposals, tuple(looked.rejected), seconds, margin)


def _no_progress(text: str) -> None:
    """No progress is shown."""


@dataclass
class Looked:
    """What has been looked at."""

    model: nn.Module
    devices: int
    batch: Mapping[str, Any]
    table: Device
    optimizer: Any = "adamw"
    precision: str | None = None
    load: Any = 1.0
    loss: Any = None
    progress: Callable[[str], None] = _no_progress
    margin: float = 0.0
    found: dict[Choice, Figures] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    scales: dict[Any, float] = field(default_factory=dict)
    """By kind of choice: the seconds of an estimate, relative to those of the closed form."""

    def __post_init__(self) -> None:
        self.skeleton = skeleton_of(self.model)
        self.repeats = repeats_of(self.skeleton)
        self.reduced = first_and_last_of(self.skeleton, self.repeats)
        self.inputs = make_batch(self.skeleton, self.batch, with_labels=self.loss is None)
        self.rows, self.length, self.tokens = _sizes(self.inputs)
        self.progress("reading the model")
        self.sources = plan_sources(self.skeleton, self.reduced, self._resized(self.rows))
        self.facts = self._facts()
        dtype = next((p.dtype for p in self.skeleton.parameters()), torch.float32)
        self.setting = Setting(self.table, optimizer_cost(self.optimizer, dtype))
        if self.precision is not None:
            gathered = _dtype(self.precision).itemsize / dtype.itemsize
            self.setting = replace(self.setting, gathered=gathered, reduced=4 / dtype.itemsize)

    def _facts(self) -> Model:
        blocks = unit_paths(self.skeleton)
        num_blocks = max((len(one.names) for one in self.repeats), default=0)
        try:
            plan = self.sources[0].make({"dp": 1, "tp": 1})
        except PlanError as error:
            raise EstimateOptionError(f"search: there is no plan to start from: {error}") from error
        paths = [e.path.text for e in plan.entries if isinstance(e, LocalEntry) and e.kind == "experts"]
        sizes = {
            f"{path}.{name}": parameter.shape[0]
            for path, module in self.reduced.named_modules()
            if paths and any(_matches(pattern, path) for pattern in paths)
            for name, parameter in module.named_parameters(recurse=False)
        }
        experts = tuple(rf"{path}\.\w+" for path in paths) if sizes else ()
        return Model(
            blocks, zero_units(self.skeleton), num_blocks, experts, tuple(sizes), max(sizes.values(), default=0)
        )

    def _no_stages(self) -> str | None:
        if len([one for one in self.repeats if len(one.names) > 1]) != 1 or len(self.facts.blocks) != 1:
            return "pipeline stages are proposed for models with one list of equal blocks, four or more"
        if getattr(self.model, "config", None) is None or "labels" not in self.inputs:
            return "pipeline stages are proposed for models whose output has a loss"
        return None

    def _resized(self, rows: int) -> dict[str, Any]:
        """The batch with another number of rows, without values."""
        return {
            name: torch.empty(
                rows if x.shape[:1] == (self.rows,) else x.shape[0], *x.shape[1:], dtype=x.dtype, device="meta"
            )
            if isinstance(x, torch.Tensor) and x.ndim
            else x
            for name, x in self.inputs.items()
        }

    # Closed forms

    def evaluate(self) -> None:
        sizes = (self.devices, self.rows, self.length, self.facts, self.sources, self.table.ranks_per_node)
        every = list(families(*sizes, self._no_stages()))
        self.rejected += [one for one in every if isinstance(one, Rejected)]
        own = [one for one in every if isinstance(one, Family)]
        first = [one for one in own if one.cp == 1 and one.source is self.sources[0]]
        self._evaluate_all(first)
        whole = {(choice.tp, choice.ep) for choice in self.found}
        second = [one for one in own if one.cp == 1 and one.source is not self.sources[0]]
        reason = "the same mesh with sequence parallelism fits, sends as many bytes, and needs less memory"
        self._reject([one for one in second if (one.tp, one.ep) in whole], reason)
        self._evaluate_all([one for one in second if (one.tp, one.ep) not in whole])
        context = [one for one in own if one.cp > 1]
        if self.found:
            self._reject(context, "plans without context parallelism fit, and communicate less")
        else:
            self._evaluate_all(context)

    def _reject(self, some: list[Family], reason: str) -> None:
        self.rejected += [Rejected(choice.describe(), "slower", reason) for one in some for choice in one.choices]

    def _evaluate_all(self, some: list[Family]) -> None:
        for family, (found, rejected) in zip(some, each(self._evaluate, some)):
            self.progress(f"ran steps of tp={family.tp}, cp={family.cp}, ep={family.ep} ({family.source.name})")
            self.found.update({replace(family.choices[n], checkpoint=policy): f for n, policy, f in found})
            self.rejected += rejected

    def _evaluate(self, family: Family) -> tuple[list[tuple[int, str, Figures]], list[Rejected]]:
        """What fits, by number of the choice and policy, and what does not."""
        found: list[tuple[int, str, Figures]] = []
        rejected: list[Rejected] = []
        left = list(enumerate(family.choices))
        for checkpoint in CHECKPOINTS if self.facts.blocks else CHECKPOINTS[:1]:
            own = [(n, replace(choice, checkpoint=checkpoint)) for n, choice in left]
            if not own:
                break
            try:
                profile = self._profile(own[0][1])
            except PlanError as error:
                first = str(error).splitlines()
                reason = first[1].strip() if len(first) > 1 else first[0]
                rejected += [Rejected(choice.describe(), "plan", reason) for _, choice in own]
                continue
            left = []
            for number, choice in own:
                figures = self._figures(profile, choice)
                if not self._fits(figures):
                    rejected.append(self._too_large(choice, figures))
                    left.append((number, choice))
                    continue
                found.append((number, checkpoint, figures))
                reason = f"fits {_NAMES.get(checkpoint, '')}, which computes less"
                for heavier in CHECKPOINTS[CHECKPOINTS.index(checkpoint) + 1 :]:
                    rejected.append(Rejected(replace(choice, checkpoint=heavier).describe(), "slower", reason))
        return found, rejected

    def _profile(self, choice: Choice) -> Profile:
        cell = choice.cell(self.rows)
        rows = self.rows // (cell.dp * cell.ep)
        if cell.cp > 1:  # decisions about sequences in pieces take longer with every rank of the mesh
            cell = replace(cell, dp=min(cell.dp, 2))
        plan = plan_of(cell, self.facts, self.precision)
        findings = self._findings(plan)
        if findings:
            raise PlanError(str(findings[0]))
        try:
            return profile_of(
                self.reduced,
                plan,
                self._resized(rows * cell.dp * cell.ep),
                rows,
                self.repeats,
                self.facts.units,
                device=self.table,
                load=self.load,
                loss=self.loss,
            )
        except PlanError:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if cell.tp * cell.cp * cell.ep > 1:
                raise PlanError(f"a step on this mesh cannot be run: {problem}") from error
            raise EstimateOptionError(f"search: the model does not run with this batch: {problem}") from error

    def _findings(self, plan: Plan) -> Sequence[Finding]:
        """Of a plan without stages."""
        findings = check(plan, self.reduced)
        return check(plan, self.skeleton) if findings else findings  # an entry may be for a block that was left out

    def figures(self, choice: Choice) -> Figures:
        """In closed form. Raises PlanError where the choice's plan does not fit the model."""
        return self._figures(self._profile(choice), choice)

    def _figures(self, profile: Profile, choice: Choice) -> Figures:
        rows = self.rows // choice.batch_ranks
        if choice.pp > 1:
            return staged_figures(profile, choice, rows // choice.microbatches, self.setting)
        return figures_of(profile, choice, rows, self.setting)

    def _fits(self, figures: Figures) -> bool:
        memory = self.table.memory_bytes
        return memory is None or (1 + self.margin) * figures.needed_bytes <= memory

    def _too_large(self, choice: Choice, figures: Figures) -> Rejected:
        needed = (1 + self.margin) * figures.needed_bytes
        more = (needed - (self.table.memory_bytes or 0)) / 2**30
        reason = f"needs {needed / 2**30:.2f} GiB{_with(self.margin)}, {more:.2f} GiB more than the device has"
        return Rejected(choice.describe(), "memory", reason, figures.needed_bytes)

    # Estimates

    def ranked(self) -> list[tuple[Choice, Figures]]:
        """The fastest first; of equally fast ones the one that needs less memory, then the simpler one."""

        def order(item: tuple[Choice, Figures]) -> Any:
            choice, figures = item
            return (round(figures.step_seconds, 6), figures.needed_bytes, choice.pp, choice.zero, str(choice))

        return sorted(((choice, self._scaled(choice, figures)) for choice, figures in self.found.items()), key=order)

    def _scaled(self, choice: Choice, figures: Figures) -> Figures:
        scale = 1.0 if figures.is_exact else self.scales.get(_kind(choice), 1.0)
        terms = {name: scale * seconds for name, seconds in figures.terms.items()}
        return replace(figures, terms=terms, step_seconds=scale * figures.step_seconds)

    def estimate_first(self, count: int) -> None:
        """The fastest plans, until so many of them stay the fastest with their estimates; and the fastest one without
        stages of each kind."""
        tried: set[Choice] = set()
        most = 4 * count + len({_kind(choice) for choice in self.found}) if count else 0
        while len(tried) < most:
            ranked = self.ranked()
            kinds = {_kind(one[0]): one for one in reversed(ranked) if one[0].pp == 1}
            first = [*ranked[:count], *[one for one in ranked if one[0].pp == 1][:1]]
            first += [one for kind, one in kinds.items() if kind not in self.scales and one[0] not in tried]
            left = [c for c, f in dict(first).items() if not f.is_exact and c not in tried]
            if not left:
                return
            idle = -len(left) % number_of_processes()  # the next ones cost no time
            more = [c for c, f in ranked if c.pp == 1 and not f.is_exact and c not in tried and c not in left]
            left += more[:idle]
            tried.update(left)
            self.progress(f"estimating {left[0]}" + (f" and {len(left) - 1} others" if len(left) > 1 else ""))
            for choice, found in zip(left, each(self._estimate, left)):
                if isinstance(found, Rejected):
                    del self.found[choice]
                    self.rejected.append(found)
                elif found is not None:
                    closed, self.found[choice] = self.found[choice], found
                    if closed.step_seconds:
                        self.scales.setdefault(_kind(choice), found.step_seconds / closed.step_seconds)

    def _shortened(self, choice: Choice) -> nn.Module:
        """The model with two blocks for each stage: a check of stages traces all of them, and they are equal."""
        kept = 2 * choice.pp * choice.stages_per_rank
        runs = (replace(one, names=one.names[kept - 2 :]) for one in self.repeats)
        found = first_and_last_of(self.skeleton, tuple(one for one in runs if len(one.names) > 2))
        for path in {one.path for one in self.repeats}:
            found.set_submodule(path, nn.ModuleList(found.get_submodule(path).children()))  # numbered from 0
        return found

    def _estimate(self, choice: Choice) -> Figures | Rejected | None:
        """None: of stages, whose figures stay those of the closed form."""
        plan = plan_of(choice, self.facts, self.precision)
        findings = self._findings(plan) if choice.pp == 1 else check_stages(plan, self._shortened(choice))
        if findings:
            return Rejected(choice.describe(), "lint", str(findings[0]))
        if choice.pp > 1:
            return None
        known = estimate(
            self.skeleton,
            plan,
            batch=self.inputs,
            optimizer=self.optimizer,
            device=self.table,
            steps=2,
            loss=self.loss,
            load=self.load,
        )
        names = ("compute", "memory", "exposed", "bubble", "host")
        terms = {name: max(0.0, float(getattr(known.time, name))) for name in names}
        figures = Figures(known.peak_bytes, known.needed_bytes, terms, known.step_seconds, True)
        return figures if self._fits(figures) else self._too_large(choice, figures)


def _kind(choice: Choice) -> tuple[Any, ...]:
    """Choices whose ops are the same, but for stages, ZeRO and checkpointing."""
    return (choice.tp, choice.cp, choice.ep, choice.source.sequence)


def _with(margin: float) -> str:
    return f" with {margin:.0%} for fragmentation" if margin else ""


def _matches(pattern: str, path: str) -> bool:
    import regex

    return regex.fullmatch(pattern, path) is not None


def _sizes(inputs: Mapping[str, Any]) -> tuple[int, int | None, int]:
    """Rows, length of a row where it is a sequence of tokens, and tokens of all (rows where there are none)."""
    ids = inputs.get("input_ids")
    first = (
        ids
        if isinstance(ids, torch.Tensor)
        else next((x for x in inputs.values() if isinstance(x, torch.Tensor)), None)
    )
    if first is None or not first.ndim:
        raise EstimateOptionError(
            "search: the batch has no tensor with rows in dim 0; pass shapes, such as input_ids=(8, 4096)"
        )
    if first.is_floating_point() or first.ndim < 2:
        return first.shape[0], None, first.shape[0]
    return first.shape[0], first.shape[1], first.numel()


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ArgumentTypeError(f"precision {name!r} is not a dtype; write bfloat16, float16 or float32")
    return found
