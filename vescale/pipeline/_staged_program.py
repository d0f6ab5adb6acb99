"""``StagedProgram``: what a program's pipeline is and does, before any process runs it."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from vescale.compat import map_tensors
from vescale.errors import PipelineBatchError, PipelineCutError, PipelineLossError, PipelineTraceError
from vescale.ir import (
    Checkpoint,
    Finding,
    Instruction,
    Local,
    PartialGradient,
    Precision,
    Program,
    Unit,
    UnitBucket,
    check,
    lower,
    predict_buckets,
    random_inputs,
    skeleton_of,
    stand_in_for_experts,
    unit_buckets,
)
from vescale.pipeline._balance import guessed_inputs
from vescale.pipeline._batches import Signature, inputs_of, microbatches_of, traced_pair
from vescale.pipeline._cut import Cut
from vescale.pipeline._gates import add_gates
from vescale.pipeline._headers import HeaderExchange
from vescale.pipeline._loss_path import check_loss
from vescale.pipeline._schedule import Action, Schedule, make_schedule, releases
from vescale.pipeline._trace import trace
from vescale.pipeline._traced import Trace
from vescale.plans import PipelineEntry, Plan, PlanError
from vescale.rng import host_draws_undone

# What of a pipeline can be checked before there is a batch: its cut and its loss, in a forward of guessed inputs.

_LENGTH = 16  # tokens


_OFF: contextvars.ContextVar[bool] = contextvars.ContextVar("_OFF", default=False)


@contextlib.contextmanager
def without_guesses() -> Iterator[None]:
    """A context in which plans are lowered without :func:`check_with_guesses`: of a plan that has passed it."""
    token = _OFF.set(True)
    try:
        yield
    finally:
        _OFF.reset(token)


def check_with_guesses(
    model: nn.Module, skeleton: nn.Module, cut: Cut, entry: PipelineEntry
) -> PipelineLossError | None:
    """Trace the gated ``skeleton`` of ``model`` with the first guess of inputs that its forward takes. Where it takes none,
    the first step is the first check.

    Raises PlanError for a forward that the cut does not fit, and for a loss that does not add up over micro-batches. What
    depends on the sizes of a batch is left to the steps. Returns what is wrong with an output that has no loss where the
    entry says, if that is not for the lack of labels.
    """
    if _OFF.get():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about guesses
        for guess in guessed_inputs(skeleton_of(model).to("meta"), 2 * entry.microbatches, _LENGTH):
            try:
                batch = random_inputs(guess, model, 0)
                with torch.enable_grad():
                    whole, part = traced_pair(skeleton, cut, entry, batch, microbatches_of(batch, entry)[0])
            except PipelineTraceError:
                raise
            except Exception:  # the forward does not take this guess
                continue
            if callable(entry.loss):
                return None
            try:
                check_loss(whole.output, entry)
            except PipelineLossError as problem:
                return problem if _has_labels(model, batch) else None
            with contextlib.suppress(PipelineBatchError):  # of the sizes that were guessed
                Signature(whole, part, lambda: HeaderExchange(""), entry)
            return None
    return None


def _has_labels(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether the forward would not return more if it were given more."""
    parameters = inspect.signature(model.forward).parameters.values()
    others = [p for p in parameters if p.name not in batch]
    return not others or any("label" in name or "target" in name for name in batch)


# What of a program concerns the stages of one rank.


def program_of_stages(model: nn.Module, program: Program, cut: Cut, own: frozenset[int]) -> Program:
    """The instructions for the stages ``own``; ``model`` is the whole one."""
    foreign = tuple(f"{path}." for path, stages in cut.bound.items() if not stages & own)
    by_id = {id(p): name for name, p in model.named_parameters()}
    first = {name: by_id[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    tensors = {name for name, known in first.items() if cut.owners[known] & own}
    buffers = [name for name, _ in model.named_buffers(remove_duplicate=False)]
    tensors |= {name for name in buffers if not (foreign and name.startswith(foreign))}
    found: list[Instruction] = []
    for instruction in program:
        path = instruction.path
        if isinstance(instruction.op, Unit):
            found += _units(instruction, instruction.op, cut, tensors, first)
            continue
        is_state = not instruction.target.startswith("<")
        name = f"{path}.{instruction.target}" if path else instruction.target
        if is_state and name not in tensors:
            # A tied tensor may be placed under a name of another stage: its own stage has it under the same name.
            continue
        if not is_state and foreign and f"{path}.".startswith(foreign):
            continue
        found.append(instruction)
    return Program(program.axes, tuple(found))


def _units(
    instruction: Instruction, unit: Unit, cut: Cut, tensors: set[str], first: dict[str, str]
) -> Iterator[Instruction]:
    """The unit's parameters that are in ``tensors``. Of a module in which a stage ends, the model gathers them: a forward
    that ends inside of the module does not reach the hook behind it. Each tied parameter is a unit of its own, so that all
    ranks that have it cut it alike."""
    path = instruction.path
    moves = path != "" and path in cut.containers
    names = [f"{path}.{n}" if path else n for n in unit.names]
    names = [name for name in names if name in tensors]
    alone = [name for name in names if len(cut.owners[first[name]]) > 1]
    together = [name for name in names if name not in alone]
    for part in (together, *([name] for name in alone)):
        if part:
            where = "" if moves else path
            relative = tuple(name.removeprefix(f"{where}.") if where else name for name in part)
            yield replace(instruction, path=where, op=replace(unit, names=relative))


def refuse_torn(program: Program, cut: Cut) -> None:
    """Raise PlanError for an entry that needs the whole call of a module in which a stage begins."""
    for instruction in program:
        if instruction.path not in cut.containers:
            continue
        op, prefix = instruction.op, f"{instruction.path}." if instruction.path else ""
        inside = [split for split in cut.splits if split.startswith(prefix)]
        what = {Checkpoint: "checkpoint", Local: "local"}.get(type(op))
        if what is None and isinstance(op, Unit) and instruction.path and op.mp_policy is not None:
            what = "unit with mp_policy="
        if what is not None:
            raise PipelineCutError(
                f"pipeline: a stage begins before {inside[0]!r}, inside of {instruction.path or 'the model'!r}, which "
                f"has a {what} entry: its call would begin in one stage and end in another; name the modules inside "
                "it instead, such as its blocks",
                instruction.source,
            )


# ``TracedDtypes``: the dtypes of a plan's precision entries and units, in a model that is only traced.


class TracedDtypes:
    """Casts the inputs and outputs of a skeleton's modules, by hooks, as the runtime does; and parameters, while
    :meth:`computing` is entered.

    Args:
        program: of all stages.
    """

    def __init__(self, skeleton: nn.Module, program: Program) -> None:
        self._of_parameters: dict[str, torch.dtype] = {}
        for instruction in program:
            op, path = instruction.op, instruction.path
            if isinstance(op, Precision) and instruction.target == "<self>":
                self._hook(skeleton.get_submodule(path), op.param, op.output)
            elif isinstance(op, Precision) and op.param is not None:
                self._of_parameters.setdefault(_full(path, instruction.target), op.param)
            elif isinstance(op, Unit) and op.mp_policy is not None:
                policy = op.mp_policy
                casts = policy.param_dtype if policy.cast_forward_inputs else None
                self._hook(skeleton.get_submodule(path), casts, policy.output_dtype)
                if policy.param_dtype is not None:
                    self._of_parameters |= {_full(path, name): policy.param_dtype for name in op.names}

    @staticmethod
    def _hook(module: nn.Module, inputs: torch.dtype | None, outputs: torch.dtype | None) -> None:
        if inputs is not None:
            module.register_forward_pre_hook(
                lambda _, args, kwargs: (_cast(inputs, args), _cast(inputs, kwargs)), with_kwargs=True
            )
        if outputs is not None:
            module.register_forward_hook(lambda _, args, output: _cast(outputs, output))

    @contextlib.contextmanager
    def computing(self, skeleton: nn.Module) -> Iterator[None]:
        """Inside, parameters have the dtypes in which they compute; tied ones stay tied."""
        cast: dict[int, nn.Parameter] = {}
        for name, dtype in self._of_parameters.items():
            parameter = skeleton.get_parameter(name)
            if parameter.dtype != dtype:
                cast.setdefault(id(parameter), nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad))
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for module in skeleton.modules():
                for attribute, own in list(module._parameters.items()):
                    if own is not None and id(own) in cast:
                        replaced.append((module, attribute, own))
                        module._parameters[attribute] = cast[id(own)]
            yield
        finally:
            for module, attribute, own in replaced:
                module._parameters[attribute] = own


def _cast(dtype: torch.dtype, value: Any) -> Any:
    return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, value)


def _full(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


@dataclass(frozen=True)
class StagedProgram:
    """A plan with a pipeline, and a model, as stages.

    Attributes:
        entry: the plan's.
        cut: the modules and parameters of each stage.
        schedule: what each rank along the pipeline's axis computes, in order.
        program: the instructions of all stages, on the mesh of one.
        skeleton: the model with parameters on the meta device.
        problem: why no step can find its loss; None where it may.
    """

    entry: PipelineEntry
    cut: Cut
    schedule: Schedule
    program: Program
    skeleton: nn.Module
    problem: PlanError | None = None

    @classmethod
    @host_draws_undone()
    def of(cls, plan: Plan, model: nn.Module, program: Program | None = None) -> StagedProgram:
        """Cut a model into the stages of a plan's pipeline.

        Args:
            program: ``lower(plan, model)``; None: lowered here.

        Raises PlanError for a pipeline that does not fit the model, the mesh or the program, also in a forward of guessed
        inputs, if there are any that the model takes.
        """
        entry = plan.pipeline_entry
        assert entry is not None
        program = lower(plan, model) if program is None else program
        num_ranks = plan.axes.size(entry.mesh)
        cut = Cut.of(model, entry, num_ranks, program)
        schedule = make_schedule(entry, num_ranks, cut.num_stages)
        refuse_torn(program, cut)
        skeleton = skeleton_of(model)
        for instruction in program:
            if isinstance(instruction.op, Local) and instruction.op.kind == "experts":
                stand_in_for_experts(skeleton.get_submodule(instruction.path))
        skeleton.__dict__["_pipeline_dtypes"] = TracedDtypes(skeleton, program)
        add_gates(skeleton, cut)
        problem = check_with_guesses(model, skeleton, cut, entry)
        return cls(entry, cut, schedule, program, skeleton, problem)

    def traced(self, batch: Mapping[str, Any]) -> Trace:
        """The forward of the first micro-batch of ``batch``. Raises PlanError for one that the stages do not fit."""
        part = self._inputs(batch)
        found = trace(self.skeleton, self.cut, part, self.entry.source, grad=True)
        check_loss(found.output, self.entry)
        return found

    def _inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Of the first micro-batch."""
        return inputs_of(self.skeleton, microbatches_of(batch, self.entry)[0], self.entry)

    def counts(self, batch: Mapping[str, Any], gradients: Sequence[PartialGradient]) -> dict[int, dict[str, int]]:
        """What one ``.step(**batch)`` communicates, for each stage, on each of its ranks.

        ``sends`` and ``receives``: messages of one tensor to and from stages on other ranks. ``gathers``: all-gathers of
        units. ``reductions``: reduce-scatters and all-reduces of gradients, those of tied parameters over stages among them.
        What several stages of a rank share counts for the first that does it. Collectives inside of stages' forward and
        backward (tensor parallelism, experts) do not count, nor the broadcast of the loss.

        Where the loss needs all rows, forwards count twice, if that is seen in a trace; the first step tries rows beside.

        Args:
            batch: tensors with values.
            gradients: of the whole model, that are reduced in buckets (``vescale.estimation.predict``).

        Raises PlanError for a batch that the stages do not fit.
        """
        with torch.enable_grad():
            parts = microbatches_of(batch, self.entry)
            whole, known = traced_pair(self.skeleton, self.cut, self.entry, batch, parts[0])
        check_loss(whole.output, self.entry)
        signature = Signature(whole, known, lambda: HeaderExchange(""), self.entry)
        runs = 2 if signature.loss.whole else 1
        found = {s: {"sends": 0, "receives": 0, "gathers": 0, "reductions": 0} for s in range(self.cut.num_stages)}
        for stage, messages in self.schedule.messages().items():
            for number, into, out in ((stage, "receives", "sends"), (stage + 1, "sends", "receives")):
                boundary = signature.part.boundaries.get(number)
                if boundary is not None:
                    found[stage][into] += runs * messages[f"forward_{into}"] * boundary.num_tensors
                    found[stage][out] += messages[f"backward_{out}"] * sum(boundary.requires_grad)
        for rank, actions in enumerate(self.schedule.actions):
            stages = self.schedule.stages_of(rank)
            forwards = [Action(stage, "F", mb) for mb in range(self.entry.microbatches) for stage in stages]
            self._count_units(rank, [forwards, actions][2 - runs :], found)
            self._count_reductions(rank, gradients, found)
        return found

    def _count_units(self, rank: int, runs: list[Sequence[Action]], found: dict[int, dict[str, int]]) -> None:
        own = frozenset(self.schedule.stages_of(rank))
        program = program_of_stages(self.skeleton, self.program, self.cut, own)
        units = [
            (unit_buckets_of(program, self.skeleton, i.path, i.op), i.op) for i in program if isinstance(i.op, Unit)
        ]
        asks = {
            b.path: True for buckets, unit in units for b in buckets if unit.reshard_after_forward not in (None, False)
        }
        buckets = [bucket for each, _ in units for bucket in each]
        gathered: set[int] = set()
        once = self.entry.reduce == "step"
        reduced: set[int] = set()
        ended: dict[int, set[int]] = {}
        resident: set[int] = set()
        for let_go, action in ((let_go, action) for run in runs for let_go in [releases(run)] for action in run):
            resident = (resident - set(let_go.get(action, ()))) | {action.stage}
            if action.kind in "BW":
                ended.setdefault(action.microbatch, set()).add(action.stage)
            for number, bucket in enumerate(buckets):
                stages = stages_of_unit(bucket.path, self.cut, own)
                if not stages & resident:
                    gathered.discard(number)
                if action.stage not in stages:
                    continue
                if action.kind != "W" and number not in gathered and bucket.num_ranks > 1:
                    found[action.stage]["gathers"] += 1
                    gathered.add(number)
                if bucket.path in asks:
                    gathered.discard(number)
                if once:
                    ends = action.kind in "BW" and action.stage == min(stages) and number not in reduced
                else:
                    ends = action.kind in "BW" and stages <= ended[action.microbatch]
                if ends and bucket.requires_grad:
                    reduced.add(number)
                    found[action.stage]["reductions"] += sum(
                        op in ("reduce_scatter", "all_reduce") for _, op, _, _ in bucket.collectives
                    )

    def _count_reductions(
        self, rank: int, gradients: Sequence[PartialGradient], found: dict[int, dict[str, int]]
    ) -> None:
        own = frozenset(self.schedule.stages_of(rank))
        mine = [gradient for gradient in gradients if self.cut.owners[gradient.name.removesuffix(".grad")] & own]
        for bucket in predict_buckets(mine, self.program.axes):
            stage = min(self.cut.owners[bucket.names[0].removesuffix(".grad")] & own)
            found[stage]["reductions"] += len(bucket.collectives)
        for name, stages in self.cut.owners.items():
            ranks = {self.schedule.rank_of[stage] for stage in stages}
            if len(ranks) > 1 and rank in ranks and self.skeleton.get_parameter(name).requires_grad:
                found[min(stages & own)]["reductions"] += 1


def check_stages(plan: Plan, model: nn.Module, inputs: Mapping[str, Any] | None = None) -> tuple[Finding, ...]:
    """What :func:`vescale.ir.check` finds in a plan; where that is no error, why the plan's pipeline does not fit the
    model."""
    found = check(plan, model, inputs)
    if plan.pipeline_entry is not None and not any(finding.severity == "error" for finding in found):
        try:
            StagedProgram.of(plan, model)
        except PlanError as error:
            return (Finding("error", "pipeline", error.problem, error.source, ()),)
    return found


def unit_buckets_of(program: Program, model: nn.Module, path: str, unit: Unit) -> tuple[UnitBucket, ...]:
    """The buffers of one unit of a program."""
    kept = tuple(i for i in program if not isinstance(i.op, Unit) or (i.path == path and i.op is unit))
    return unit_buckets(Program(program.axes, kept), model)


def stages_of_unit(path: str, cut: Cut, own: frozenset[int]) -> frozenset[int]:
    """The stages, of a rank's, during whose forward the unit of a module is gathered."""
    for around in (path, *_around(path)):
        if around in cut.bound:
            return cut.bound[around] & own
    return own


def _around(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]
