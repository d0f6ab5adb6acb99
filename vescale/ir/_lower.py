"""``lower(plan, model)``: a plan and a model to a :class:`Program`. Pure; the model may be on the meta device."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Partial, Replicate

from vescale.compat import TorchDispatchMode
from vescale.compat.meta_shapes import result_on_meta
from vescale.errors import ArgumentTypeError, kind_of
from vescale.ir._expert_sharding import ExpertCut, find_expert_cuts, lint_experts
from vescale.ir._findings import Finding, Findings, LoweringError
from vescale.ir._followed_forward import FlowMode
from vescale.ir._forward_state import state_unchanged
from vescale.ir._model_copy import skeleton_of
from vescale.ir._model_index import ModelIndex, enclosing
from vescale.ir._packed_weights import lint_packed
from vescale.ir._placement_checks import axes_named, check_boundaries, check_replicas, check_states
from vescale.ir._program import (
    Annotate,
    Attention,
    Checkpoint,
    Factory,
    Hook,
    Instruction,
    Local,
    Place,
    Precision,
    Program,
    Redistribute,
    Stage,
    Unit,
    Wrap,
)
from vescale.ir._resolve import Matcher, PlannedAxes, PlannedBoundary, PlannedState, Resolution, resolve, shown_name
from vescale.ir._units import GatheredUnit, find_units, precision_of
from vescale.placements import RaggedShard, shard_dim
from vescale.plans import CheckpointEntry, Path, Plan, PlanError, PrecisionEntry, Source, did_you_mean, split_selector

# The modules whose forward is computed again in backward, and whether what their entries name exists.


# The ops that each module of a model runs, found by a forward on meta tensors.

_BATCH, _LENGTH = 2, 16
_ATTENTION = "_scaled_dot_product"


class MetaOps:
    """Runs a copy of the model on the meta device when it is first asked; where that fails, single modules of the copy.

    The model itself does not run, and keeps its counters and caches. Of one that cannot be copied nothing is known. Inputs
    are made up: token ids for ``input_ids``, else one tensor that fits the first layer.
    """

    def __init__(self, index: ModelIndex) -> None:
        self._index = index
        self._copied: nn.Module | None = None
        self._found: dict[str, Counter[str] | None] = {}
        self._whole: Mapping[str, Counter[str]] | None = None
        self._has_run = False

    def below(self, path: str) -> Counter[str] | None:
        """(op with overload -> number of calls) in the forward of a module and those inside; None: not known."""
        if not self._has_run:
            self._has_run = True
            with contextlib.suppress(Exception):  # whatever the model's classes raise
                self._copied = skeleton_of(self._index.model).to("meta")
                self._whole = _ops_of(self._copied, "")
        if self._whole is not None and any(_is_in(other, path) for other in self._whole):
            return _sum(self._whole, path)
        if path not in self._found:
            alone = None if self._copied is None else _ops_of(self._copied.get_submodule(path), path)
            self._found[path] = None if alone is None else _sum(alone, path)
        return self._found[path]

    def runs(self, path: str, op: str) -> bool:
        """Whether a forward of the module runs the op (``aten.mm``, ``aten.mm.default``); True where it is not known."""
        found = self.below(path)
        if found is None:
            return True
        if _is_attention(op):  # which kernel runs depends on the device
            return any(map(_is_attention, found))
        return any(name == op or name.rpartition(".")[0] == op for name in found)


def _is_attention(op: str) -> bool:
    return op.partition(".")[2].lstrip("_").startswith(_ATTENTION.lstrip("_"))


def _is_in(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _sum(by_module: Mapping[str, Counter[str]], path: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for module, ops in by_module.items():
        if _is_in(module, path):
            total += ops
    return total


def _ops_of(module: nn.Module, path: str) -> Mapping[str, Counter[str]] | None:
    """By the innermost module that runs; None if no forward succeeds."""
    for inputs in _made_up_inputs(module):
        counter = _Counter(path)
        with (
            contextlib.suppress(Exception),
            state_unchanged(module),  # globals, and random numbers of the host
            counter.hooks(module),
            FlowMode(counter),
            torch.no_grad(),
        ):
            with counter:
                module(**inputs)
            return counter.ops
    return None


class _Counter(TorchDispatchMode):
    """Counts ops by the running module; also attention, by its function, whatever it is made of on meta tensors."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.ops: dict[str, Counter[str]] = {}
        self._path, self._running = path, [path]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note(str(func))
        return result_on_meta(func, args, kwargs or {})

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if name == "scaled_dot_product_attention":
            self._note(f"aten.{name}.default")

    def _note(self, name: str) -> None:
        self.ops.setdefault(self._running[-1], Counter())[name] += 1

    @contextlib.contextmanager
    def hooks(self, root: nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, module in root.named_modules():
                path = ".".join(part for part in (self._path, name) if part)
                stack.enter_context(module.register_forward_pre_hook(lambda *_, p=path: self._running.append(p)))
                leave = module.register_forward_hook(lambda *_: self._running.pop() and None, always_call=True)
                stack.enter_context(leave)
            yield


def _made_up_inputs(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Keyword arguments that the module's forward may take."""
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return
    with torch.device("meta"):
        if "input_ids" in parameters:
            tokens = torch.empty(_BATCH, _LENGTH, dtype=torch.int64)
            given = {name: tokens for name in ("input_ids", "decoder_input_ids") if name in parameters}
            yield {**given, "use_cache": False} if "use_cache" in parameters else given
        needed = [
            name
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        if len(needed) == 1:
            for x in _first_inputs(module):
                yield {needed[0]: x}


def _first_inputs(module: nn.Module) -> Iterator[torch.Tensor]:
    """What the first layers of a module take, which may be what the module takes."""
    for layer in module.modules():
        own = next(layer.parameters(recurse=False), None)
        dtype = own.dtype if own is not None else None
        if isinstance(layer, nn.Embedding):
            yield torch.empty(_BATCH, _LENGTH, dtype=torch.int64)
        elif isinstance(layer, nn.Linear):
            yield torch.empty(_BATCH, _LENGTH, layer.in_features, dtype=dtype)
            yield torch.empty(_BATCH, layer.in_features, dtype=dtype)
        elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            yield torch.empty(_BATCH, layer.in_channels, *[32] * len(layer.kernel_size), dtype=dtype)
        elif own is not None and own.ndim == 1:  # a norm
            yield torch.empty(_BATCH, _LENGTH, own.shape[0], dtype=dtype)


def find_checkpoints(
    plan: Plan, resolution: Resolution, index: ModelIndex, findings: Findings
) -> Mapping[str, Checkpoint]:
    """By module. Findings: entries inside of each other, on the model itself, or inside of local regions; selectors and ops
    that match nothing."""
    found: dict[str, Checkpoint] = {}
    numbers = {id(entry): number for number, entry in enumerate(plan.entries)}
    checker = _Selectors(index, findings)
    for path, entry in resolution.checkpoints.items():
        if _is_allowed(path, entry, resolution, findings):
            save = tuple(checker.resolved(path, entry))
            policy = replace(entry.policy, save=save)
            number = numbers[id(entry)] if entry.budget_gib is not None else 0
            found[path] = Checkpoint(policy, entry.budget_gib, number)
    checker.report()
    return found


def _is_allowed(path: str, entry: CheckpointEntry, resolution: Resolution, findings: Findings) -> bool:
    if path == "":
        findings.error(
            "checkpoint-root",
            f"checkpoint '{entry.path}' names the model itself: its whole forward would be recomputed at once, which "
            "needs as much memory as saving it; name its blocks, as in "
            r"'layers.\d+'",
            entry.source,
        )
        return False
    for outer in list(enclosing(path))[1:]:
        around = resolution.checkpoints.get(outer)
        if around is not None and outer != "":
            findings.error(
                "checkpoint-nested",
                f"{{names}}: checkpoint '{entry.path}' is inside '{outer}', which checkpoint '{around.path}' "
                f"({around.source}) already recomputes as a whole; keep one of the two",
                entry.source,
                path,
            )
            return False
        if outer in resolution.locals:
            findings.error(
                "checkpoint-local",
                f"{{names}}: checkpoint '{entry.path}' is inside the local region '{outer}' "
                f"({resolution.locals[outer].source}); name the module of the region, or one that contains it",
                entry.source,
                path,
            )
            return False
    return True


class _Selectors:
    """Resolves what is in ``save``, each text once."""

    def __init__(self, index: ModelIndex, findings: Findings) -> None:
        self.index, self.findings = index, findings
        self._matcher = Matcher(index, findings)
        self._ops: MetaOps | None = None
        self._modules: dict[tuple[int, str], tuple[str, ...]] = {}
        self._used: Counter[tuple[int, str]] = Counter()
        self._entries: dict[int, CheckpointEntry] = {}

    def resolved(self, path: str, entry: CheckpointEntry) -> Iterator[str]:
        """The selectors for the module at ``path``, with relative paths of single modules."""
        self._entries[id(entry)] = entry
        for text in entry.policy.save:
            where, op = split_selector(text)
            if not self._exists(op, entry):
                continue
            if where is None:
                self._used[id(entry), text] += self._is_run(path, op)
                yield op
                continue
            for module in self._matching(where, entry):
                if module == path or module.startswith(f"{path}."):
                    self._used[id(entry), text] += self._is_run(module, op)
                    relative = module.removeprefix(path).removeprefix(".")
                    yield f"{relative} :: {op}" if relative else op

    def report(self) -> None:
        """Findings for selectors that match nothing."""
        for (key, text), number in self._used.items():
            entry = self._entries[key]
            if not number:
                self.findings.error("no-match", self._problem(text, entry), entry.source)
        for entry in self._entries.values():
            for text in entry.policy.save:
                where, op = split_selector(text)
                is_unused = (id(entry), text) not in self._used and self._exists(op, None)
                if where is not None and is_unused and self._modules.get((id(entry), where)):
                    problem = (
                        f"checkpoint '{entry.path}': no module that '{where}' matches is inside a module that the "
                        "entry names; write paths from the model's root, as in the entry itself"
                    )
                    self.findings.error("no-match", problem, entry.source)

    def _problem(self, text: str, entry: CheckpointEntry) -> str:
        where, op = split_selector(text)
        if where is not None:
            modules = self._modules[id(entry), where]
        else:
            modules = self._matcher.modules(entry.path, "checkpoint", entry.source)
        seen: Counter[str] = Counter()
        for module in modules:
            seen.update(self._meta_ops().below(module) or {})
        shown = ", ".join(name for name, _ in seen.most_common(12)) or "none"
        return (
            f"checkpoint '{entry.path}': no op of a forward on meta tensors is {text!r}; expected one of {shown}"
            f"{did_you_mean(op, seen)}"
        )

    def _matching(self, where: str, entry: CheckpointEntry) -> tuple[str, ...]:
        key = (id(entry), where)
        if key not in self._modules:
            self._modules[key] = self._matcher.modules(Path.parse(where), f"checkpoint '{entry.path}'", entry.source)
        return self._modules[key]

    def _exists(self, op: str, entry: CheckpointEntry | None) -> bool:
        namespace, name, *overload = op.split(".")
        try:
            packet = getattr(getattr(torch.ops, namespace), name)
            known = not overload or overload[0] in packet.overloads()
        except (AttributeError, RuntimeError):
            known = False
        if not known and entry is not None:
            names = [f"{namespace}.{other}" for other in dir(getattr(torch.ops, namespace))]
            self.findings.error(
                "no-match",
                f"checkpoint '{entry.path}': there is no op {op!r}{did_you_mean(op, names)}; name ops as in "
                "torch.ops: 'aten.mm' or 'aten.mm.default'",
                entry.source,
            )
        if known and entry is not None:
            overloads = [getattr(packet, name) for name in overload or packet.overloads()]
            if all(one._schema.is_mutable for one in overloads):
                self.findings.error(
                    "checkpoint-write",
                    f"checkpoint '{entry.path}': {op!r} writes to its argument, so that its result cannot be saved "
                    "separately; name the op that creates what is written to, or a later one",
                    entry.source,
                )
                return False
        return known

    def _is_run(self, path: str, op: str) -> bool:
        """Whether the forward of a module runs the op; True where that cannot be found out."""
        return self._meta_ops().runs(path, op)

    def _meta_ops(self) -> MetaOps:
        if self._ops is None:
            self._ops = MetaOps(self.index)
        return self._ops


# Warnings: plans that run, and probably not as meant.


def lint(plan: Plan, resolution: Resolution, index: ModelIndex, findings: Findings) -> None:
    """Add warnings."""
    _unused_axes(plan, findings)
    _redundant_entries(plan, resolution, index, findings)
    _ragged_while_running(plan, resolution, index, findings)
    _partial_outputs(plan, resolution, index, findings)
    _same_batch(plan, resolution, findings)


def _unused_axes(plan: Plan, findings: Findings) -> None:
    named = {axis for entry in plan.entries for axis in axes_named(entry)}
    for axis in plan.axes:
        if axis not in named and plan.axes.size(axis) > 1:
            findings.warning(
                "unused-axis",
                f"no entry names axis '{axis}': its {plan.axes.size(axis)} ranks hold and compute the same; for "
                f"replicas that share a batch (hybrid sharding), shard the inputs over it: '<in>': {{{axis}: S(0)}}",
                None,
            )


def _redundant_entries(plan: Plan, resolution: Resolution, index: ModelIndex, findings: Findings) -> None:
    used = {id(choice.entry) for planned in _all_roles(resolution) for choice in planned.items().values()}
    used |= {id(entry) for methods in resolution.attention.values() for _, entry in methods.values()}
    used |= {id(entry) for entry in (*resolution.locals.values(), *resolution.units.values())}
    used |= {id(entry) for entry in (*resolution.checkpoints.values(), *resolution.precisions.values())}
    for entry in plan.entries:
        states = [index.states.get(name) for name in resolution.matches.get(id(entry), ())]
        tied = any(state is not None and len(state.names) > 1 for state in states)  # it matters for untied models
        if id(entry) not in used and not tied:
            findings.warning(
                "redundant",
                f"'{entry.path}' is redundant: earlier entries say the same of the same tensors; remove it",
                entry.source,
            )


def _all_roles(resolution: Resolution) -> Iterator[PlannedAxes]:
    for state in resolution.states.values():
        yield from (state.init, state.forward, state.backward, state.annotated, state.grad, state.grad_annotated)
    for boundary in resolution.boundaries.values():
        yield from (boundary.dst, boundary.src, boundary.grad_src, boundary.grad_dst, boundary.annotated)
    yield from resolution.factories.values()


def _ragged_while_running(plan: Plan, resolution: Resolution, index: ModelIndex, findings: Findings) -> None:
    for name, planned in resolution.states.items():
        for axis, placement in zip(plan.axes, planned.running(plan.axes)):
            choice = planned.running_at(axis)
            if isinstance(placement, RaggedShard) and choice is not None:
                findings.warning(
                    "ragged-running",
                    f"{{names}} on axis '{axis}' is ragged while the module computes, which few ops support; add its "
                    f"placement during computation, usually '{choice.entry.path}': {{{axis}: {{init: Ragged, run: "
                    "R}}",
                    choice.entry.source,
                    shown_name(index.states[name]),
                )


def _partial_outputs(plan: Plan, resolution: Resolution, index: ModelIndex, findings: Findings) -> None:
    """A weight cut along the dim that is summed over leaves a sum on every rank; who adds them should be in the plan.

    Of the modules that share a tied weight some may only hold it, and never run: one that is settled is enough.
    """
    for name, planned in resolution.states.items():
        owners = [index.owner(tied) for tied in index.states[name].names]
        summed = {path: _summed_dim(index.modules[path]) for path, attribute in owners if attribute == "weight"}
        for axis, placement in zip(plan.axes, planned.running(plan.axes)):
            dim = shard_dim(placement)
            paths = [path for path, of_module in summed.items() if dim is not None and of_module == dim]
            if not paths or any(_is_settled(path, axis, resolution) for path in paths):
                continue
            choice = planned.running_at(axis)
            findings.warning(
                "partial-output",
                "{names} is sharded along the dim that is summed over, so that the output is a partial sum on "
                f"'{axis}', and no <out> entry of its module or one around it says how to reduce it; add <out>: "
                f"{{{axis}: R}}, or S(dim)",
                choice.entry.source if choice is not None else None,
                shown_name(index.states[name]),
            )
    for (path, side, _), boundary in resolution.boundaries.items():
        if path == "" and side == "<out>":
            for axis, choice in boundary.dst.items().items():
                if isinstance(choice.placement, Partial):
                    findings.warning(
                        "partial-output",
                        f"'{choice.entry.path}' leaves the model's output as a partial sum on '{axis}'; write R, or "
                        "S(dim)",
                        choice.entry.source,
                    )


def _summed_dim(module: nn.Module) -> int | None:
    if isinstance(module, nn.Linear):
        return 1
    # An embedding whose rows are cut finds some indices on this rank only: zero elsewhere, to be summed.
    return 0 if isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D" else None


def _is_settled(path: str, axis: str, resolution: Resolution) -> bool:
    """Whether an ``<out>`` entry, or a local region, at the module or around it covers the axis."""
    around = list(enclosing(path))
    if any(module in resolution.locals for module in around):
        return True
    return any(
        module in around and side == "<out>" and planned.dst.get(axis) is not None
        for (module, side, _), planned in resolution.boundaries.items()
    )


def _same_batch(plan: Plan, resolution: Resolution, findings: Findings) -> None:
    """Parameters that are gathered over an axis to compute, and nothing that they compute with is cut over it: neither a
    batch nor, between modules, a sequence."""
    for position, axis in enumerate(plan.axes):
        gathered = [
            choice
            for planned in resolution.states.values()
            if (choice := planned.init.get(axis)) is not None
            and not isinstance(choice.placement, Replicate)
            and isinstance(planned.running(plan.axes)[position], Replicate)
        ]
        cut = any(
            (s := planned.dst.get(axis) or planned.src.get(axis)) and shard_dim(s.placement) is not None
            for planned in resolution.boundaries.values()
        )
        if gathered and not cut and plan.axes.size(axis) > 1:
            findings.warning(
                "same-batch",
                f"parameters are gathered over '{axis}' to compute, but no input of the model is sharded over it: its "
                f"{plan.axes.size(axis)} ranks compute the same batch; add '<in>': {{{axis}: S(0)}}, or name the "
                "inputs",
                gathered[0].entry.source,
            )


def lower(plan: Plan, model: nn.Module) -> Program:
    """What ``plan`` does to ``model``, as instructions.

    A pure function: it reads names, shapes and signatures only, changes nothing, communicates nothing, and gives the same
    program on every rank. What it emits, in module order:

    - for every parameter and buffer a :class:`Place`, Replicate on axes that no entry names;
    - for parameters that are sharded over one axis at rest and replicated on it during computation, a :class:`Unit` at
    the module
      around whose forward and backward they are gathered: the plan's units, else the model's repeated blocks;
    - for one with other placements while its module computes, a :class:`Redistribute` before that forward;
    - for inputs of the model a :class:`Wrap`, Replicate on axes that no entry names;
    - for inputs and outputs of modules a :class:`Redistribute`, also where nothing moves in the forward: the gradient may
      arrive Partial, and is reduced there;
    - regions (:class:`Factory`, :class:`Attention`, :class:`Local`, :class:`Checkpoint`), :class:`Unit`, and
      :class:`Annotate`.

    Of a plan with a pipeline, the instructions are those of all stages, on the mesh of one; :mod:`vescale.pipeline` cuts
    them.

    Ops that a ``checkpoint`` entry names are looked for in a forward on meta tensors, which runs the model's code.

    Raises:
        LoweringError: a :class:`PlanError` with every mistake: paths that match nothing, entries that disagree, dims out
            of range, uneven shards, shard boundaries inside attention heads, inputs that no forward takes. Nothing has
            been communicated then.
    """
    index = _index(plan, model)
    if plan.pipeline_entry is not None:
        plan = plan.stage_plan()
    findings = Findings()
    analysis = _analyze(plan, index, findings)
    errors = [finding for finding in findings.collect() if finding.severity == "error"]
    if errors:
        raise LoweringError(errors)
    return Program(plan.axes, tuple(_instructions(analysis, index, plan)))


def check(plan: Plan, model: nn.Module, inputs: Mapping[str, Any] | None = None) -> tuple[Finding, ...]:
    """All errors that :func:`lower` raises for ``plan`` and ``model``, then warnings.

    With ``inputs``, and a model on the meta device, its forward is traced, too, for dims that it splits.
    """
    index = _index(plan, model)
    if plan.pipeline_entry is not None:
        plan = plan.stage_plan()
    findings = Findings()
    try:
        analysis = _analyze(plan, index, findings)
    except PlanError as error:
        findings.error("hostile", error.problem, error.source)
        return findings.collect()
    if not findings.has_errors:  # warnings would follow from the errors
        lint(plan, analysis.resolution, index, findings)
        lint_experts(plan.axes, analysis.resolution, analysis.expert_cuts, index, findings)
        if inputs:
            lint_packed(plan, analysis.resolution, index, inputs, findings)
    return findings.collect()


def _index(plan: Plan, model: nn.Module) -> ModelIndex:
    if not isinstance(plan, Plan):
        raise ArgumentTypeError(f"plan is {kind_of(plan)}; pass a vescale.Plan (Plan.from_yaml reads a file)")
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model is {kind_of(model)}; pass a torch.nn.Module")
    return ModelIndex(model)


@dataclass(frozen=True)
class _Analysis:
    """What a plan means for one model: ``expert_cuts`` by region of experts, ``checkpoints`` by module."""

    resolution: Resolution
    expert_cuts: Mapping[str, ExpertCut]
    units: tuple[GatheredUnit, ...]
    checkpoints: Mapping[str, Checkpoint]


def _analyze(plan: Plan, index: ModelIndex, findings: Findings) -> _Analysis:
    resolution = resolve(plan, index, findings)
    check_states(resolution, index, plan.axes, findings)
    check_boundaries(resolution, findings)
    expert_cuts = find_expert_cuts(resolution, index, plan.axes, findings)
    units = find_units(resolution, index, plan.axes, findings)
    check_replicas(plan, units, findings)
    return _Analysis(resolution, expert_cuts, units, find_checkpoints(plan, resolution, index, findings))


def _instructions(analysis: _Analysis, index: ModelIndex, plan: Plan) -> Iterator[Instruction]:
    """In module order, then hook order; then states before boundaries, each in the order of the model or plan."""
    emitter = _Emitter(analysis, index, plan)
    found = list(emitter.all())
    modules = {path: number for number, path in enumerate(index.modules)}
    hooks = {hook: number for number, hook in enumerate(Hook)}
    found.sort(key=lambda instruction: (modules[instruction.path], hooks[instruction.hook]))  # stable
    return iter(found)


class _Emitter:
    def __init__(self, analysis: _Analysis, index: ModelIndex, plan: Plan) -> None:
        self.resolution, self.index, self.axes = analysis.resolution, index, plan.axes
        self.units, self.expert_cuts, self.checkpoints = analysis.units, analysis.expert_cuts, analysis.checkpoints

    def all(self) -> Iterator[Instruction]:
        gathered = {name for unit in self.units for name in unit.names}
        for name, planned in self.resolution.states.items():
            yield from self._state(name, planned, name in gathered)
        yield from self._units()
        yield from self._model_inputs()
        for (path, side, key), boundary in self.resolution.boundaries.items():
            if (path, side) != ("", "<in>"):
                hook = Hook.FORWARD_PRE if side == "<in>" else Hook.FORWARD_POST
                yield from self._boundary(path, hook, side, key, boundary)
        yield from self._regions()

    # Parameters and buffers

    def _state(self, name: str, planned: PlannedState, gathered: bool) -> Iterator[Instruction]:
        path, attribute = self.index.owner(name)
        resting, running = planned.init.complete(self.axes), planned.running(self.axes)
        if planned.annotated:
            label = Annotate(planned.annotated.complete(self.axes))
            yield Instruction(path, Hook.INIT, attribute, None, label, _source(planned.annotated))
        else:
            yield Instruction(path, Hook.INIT, attribute, None, Place(resting), _source(planned.init))
            if not gathered:
                yield from self._casts(name)
            if running != resting and not gathered:
                there = Redistribute(running, resting)
                for reader, relative in self._readers(name):
                    yield Instruction(reader, Hook.FORWARD_PRE, relative, None, there, _source(planned.forward))
        if planned.grad_annotated:
            label = Annotate(planned.grad_annotated.stage(self.axes))
            yield Instruction(path, Hook.BACKWARD, attribute, None, label, _source(planned.grad_annotated))
        if planned.grad:
            move = Redistribute(planned.grad.stage(self.axes))
            yield Instruction(path, Hook.BACKWARD, attribute, None, move, _source(planned.grad))

    def _casts(self, name: str) -> Iterator[Instruction]:
        """In which dtype each module that reads a parameter has it; units gather theirs in it."""
        state = self.index.states[name]
        if not state.is_parameter or not state.dtype.is_floating_point:
            return
        for reader, relative in self._readers(name):
            entry = precision_of(reader, self.resolution, self.index)
            if entry is not None and (entry.param is not None or entry.reduce is not None):
                cast = Precision(entry.param, entry.reduce or entry.param)
                yield Instruction(reader, Hook.FORWARD_PRE, relative, None, cast, entry.source)

    def _readers(self, name: str) -> list[tuple[str, str]]:
        """(module, relative name) of each module that reads the tensor."""
        return list(dict.fromkeys(self.index.reader(alias) for alias in self.index.states[name].names))

    def _units(self) -> Iterator[Instruction]:
        for unit in self.units:
            prefix = f"{unit.path}." if unit.path else ""
            # A tied weight may hang elsewhere under its first name.
            names = tuple(
                next(n for n in self.index.states[name].names if n.startswith(prefix)).removeprefix(prefix)
                for name in unit.names
            )
            entry = unit.entry
            op = Unit(names, unit.shard, unit.replicate, mp_policy=_policy(unit.precision))
            if entry is not None:
                op = replace(
                    op,
                    reshard_after_forward=entry.reshard_after_forward,
                    reshard_after_backward=entry.reshard_after_backward is not False,
                    mp_policy=entry.mp_policy or op.mp_policy,
                    offload_pinned=entry.offload_pinned,
                )
            yield Instruction(unit.path, Hook.INIT, "<self>", None, op, entry.source if entry is not None else None)

    # Inputs and outputs

    def _model_inputs(self) -> Iterator[Instruction]:
        unnamed = ("", "<in>", None)
        planned = {key: w for key, w in self.resolution.boundaries.items() if key[:2] == ("", "<in>")}
        planned.setdefault(unnamed, PlannedBoundary())
        for (path, side, key), boundary in planned.items():
            entry = self.resolution.given.get((path, side, key))
            given = entry.given if entry is not None else "global"
            arriving = boundary.src or boundary.annotated or boundary.dst
            wrap = Wrap(arriving.complete(self.axes), given)
            yield Instruction("", Hook.FORWARD_PRE, "<in>", key, wrap, _boundary_source(boundary))
            if arriving is not boundary.dst or boundary.grad_src or boundary.grad_dst:
                moves = PlannedBoundary(boundary.dst, boundary.src, boundary.grad_src, boundary.grad_dst)
                moves.entries = boundary.entries
                yield from self._boundary("", Hook.FORWARD_PRE, "<in>", key, moves)

    def _boundary(
        self, path: str, hook: Hook, side: str, key: int | str | None, planned: PlannedBoundary
    ) -> Iterator[Instruction]:
        source = _boundary_source(planned)
        if planned.annotated:
            yield Instruction(path, hook, side, key, Annotate(planned.annotated.stage(self.axes)), source)
        if planned.dst or planned.grad_src or planned.grad_dst:
            src, grad_src, grad_dst = (
                role.stage(self.axes) if role else None for role in (planned.src, planned.grad_src, planned.grad_dst)
            )
            yield Instruction(
                path, hook, side, key, Redistribute(planned.dst.stage(self.axes), src, grad_src, grad_dst), source
            )

    # Regions

    def _regions(self) -> Iterator[Instruction]:
        """A factory region covers what the forward calls; one is emitted only where it differs from the one around it."""
        placed: dict[str, Stage] = {}
        for path in self.index.modules:
            around: Stage = placed[self.index.module_names[path.rpartition(".")[0]]] if path else ()
            planned = self.resolution.factories.get(path)
            own = planned.stage(self.axes) if planned is not None else (None,) * len(self.axes.names)
            outer = around or (Replicate(),) * len(own)
            placed[path] = tuple(mine if mine is not None else theirs for mine, theirs in zip(own, outer))
            if placed[path] != around:
                source = _source(planned) if planned is not None else None
                yield Instruction(path, Hook.FORWARD, "<self>", None, Factory(placed[path]), source)
        for path, by_axis in self.resolution.attention.items():
            methods = tuple(by_axis[axis][0] if axis in by_axis else None for axis in self.axes)
            source = next((entry.source for _, entry in by_axis.values()), None)
            yield Instruction(path, Hook.FORWARD, "<self>", None, Attention(methods), source)
        for path, precision in self.resolution.precisions.items():
            if precision.param is not None or precision.output is not None:
                casts = Precision(precision.param, None, precision.output)
                yield Instruction(path, Hook.FORWARD, "<self>", None, casts, precision.source)
        for path, entry in self.resolution.locals.items():
            inputs, outputs = dict(entry.inputs), dict(entry.outputs)
            cut = self.expert_cuts.get(path, ExpertCut())
            region = Local(
                entry.kind,
                entry.dispatch,
                tuple(inputs.get(axis) for axis in self.axes),
                tuple(outputs.get(axis) for axis in self.axes),
                cut.experts,
                cut.num_experts,
                cut.features,
                cut.biases,
            )
            yield Instruction(path, Hook.FORWARD, "<self>", None, region, entry.source)
        for path, checkpoint in self.checkpoints.items():
            source = self.resolution.checkpoints[path].source
            yield Instruction(path, Hook.FORWARD, "<self>", None, checkpoint, source)


def _policy(entry: PrecisionEntry | None) -> MixedPrecisionPolicy | None:
    """Of a unit; the modules of the entry cast their inputs and outputs themselves."""
    if entry is None or (entry.param is None and entry.reduce is None):
        return None
    return MixedPrecisionPolicy(entry.param, entry.reduce or entry.param, cast_forward_inputs=False)


def _source(planned: PlannedAxes) -> Source | None:
    return next((choice.entry.source for choice in planned.items().values()), None)


def _boundary_source(planned: PlannedBoundary) -> Source | None:
    return planned.entries[0].source if planned.entries else None
