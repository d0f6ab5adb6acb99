"""``PlanEntries``: the methods that write entries, each checked on its own; ``PipelineEntry``, of which a plan has one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor.placement_types import Placement

from vescale.errors import EntryError, PlanError, Source, calling_line, did_you_mean
from vescale.plans._entries import (
    ALL,
    ATTENTION_METHODS,
    AnnotateEntry,
    AttentionEntry,
    AttentionMethod,
    AxisPlacements,
    CheckpointEntry,
    CheckpointPolicy,
    Entry,
    FactoryEntry,
    LocalEntry,
    Path,
    Phase,
    PrecisionEntry,
    RedistributeEntry,
    ShardEntry,
    Target,
    UnitEntry,
    checkpoint_budget,
    checkpoint_policy,
    float_dtype_of,
    mp_policy_of,
    parse_phase,
    pins_memory,
)
from vescale.plans._mesh_axes import MeshAxes

# ``PipelineEntry``: how a model is cut into stages, and in which order they run.


# The names of torch.distributed.pipelining, and short forms of theirs.
PIPELINE_SCHEDULES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
_SHORT = {"zbv": "ZBVZeroBubble", "zb1p": "InterleavedZeroBubble"}
_REDUCE = ("step", "microbatch")
_ROWS = ("batch", "microbatch")


@dataclass(frozen=True)
class PipelineEntry:
    """The one pipeline of a plan.

    Attributes:
        mesh: the axis of the mesh whose ranks run different stages.
        split_before: paths of the modules before which a stage begins.
        stages: for each stage, paths of modules that belong to it.
        balance: ``"cost"``: stages are chosen so that the slowest one is fast. Exactly one of these three is given.
        schedule: a name of ``torch.distributed.pipelining``, or the schedule itself as CSV text, one rank a line.
        microbatches: into how many equal parts the batch is cut.
        loss: a path into the model's output, ``"out.loss"``, or ``f(out, batch) -> (sum, count)``.
        reduce: gradients are reduced once a step, or after every micro-batch's backward.
        rows: what a forward computes across rows is of those of the batch, or of each micro-batch by itself.
        stages_per_rank: with ``balance``; None: what the schedule needs.
        costs: with ``balance``: (module path, cost) of blocks, and of what is around them; None: costs are estimated.
        memory_gib: with ``balance``: the most that parameters, gradients and two states of an optimizer may take on a rank,
            before other axes cut them.
        microbatch_shape: with ``memory_gib``: rows and tokens of a micro-batch; what forwards hold for backward counts, too.
    """

    mesh: str
    split_before: tuple[Path, ...] = ()
    stages: tuple[tuple[Path, ...], ...] = ()
    balance: str | None = None
    schedule: str = "1F1B"
    microbatches: int = 8
    loss: str | Callable[[Any, Mapping[str, Any]], tuple[Any, Any]] = "out.loss"
    reduce: str = "step"
    rows: str = "batch"
    stages_per_rank: int | None = None
    costs: tuple[tuple[Path, float], ...] | None = None
    memory_gib: float | None = None
    microbatch_shape: tuple[int, int] | None = None
    source: Source | None = field(default=None, compare=False)

    @property
    def schedule_is_text(self) -> bool:
        return is_schedule_text(self.schedule)

    def text(self) -> str:
        """The same on every rank; for comparisons of plans."""
        loss = self.loss if isinstance(self.loss, str) else getattr(self.loss, "__qualname__", type(self.loss).__name__)
        cut: object = (
            [str(path) for path in self.split_before] or [[str(p) for p in s] for s in self.stages] or self.balance
        )
        return (
            f"mesh={self.mesh}, cut={cut}, schedule={self.schedule}, microbatches={self.microbatches}, loss={loss}, "
            f"reduce={self.reduce}, rows={self.rows}, stages_per_rank={self.stages_per_rank}, "
            f"costs={None if self.costs is None else [(str(path), cost) for path, cost in self.costs]}, "
            f"memory_gib={self.memory_gib}, microbatch_shape={self.microbatch_shape}"
        )


def is_schedule_text(schedule: str) -> bool:
    return "," in schedule or "\n" in schedule


def pipeline_entry(
    axes: MeshAxes,
    *,
    split_before: Sequence[str] | None,
    stages: Sequence[Sequence[str]] | None,
    balance: str | None,
    mesh: str,
    schedule: str,
    microbatches: int,
    loss: Any,
    reduce: str,
    rows: str,
    stages_per_rank: int | None,
    costs: Mapping[str, float] | None,
    memory_gib: float | None,
    microbatch_shape: Sequence[int] | None,
    source: Source | None,
) -> PipelineEntry:
    """A checked entry. Raises PlanError."""

    def refuse(problem: str) -> PlanError:
        return EntryError(f"pipeline: {problem}", source)

    given = [n for n, v in (("split_before", split_before), ("stages", stages), ("balance", balance)) if v is not None]
    if len(given) != 1:
        raise refuse(
            f"{' and '.join(given) or 'nothing'} determines the stages; pass exactly one of split_before=[paths], "
            'stages=[[paths], ...] and balance="cost"'
        )
    if (split_before is not None and not split_before) or (stages is not None and not stages):
        raise refuse(f"{given[0]}=[] names no module; name one for each stage except the first")
    if mesh not in axes:
        raise refuse(f"no axis {mesh!r}; the axes are {axes}{did_you_mean(mesh, axes)}")
    if balance not in (None, "cost"):
        raise refuse(f'balance={balance!r}; use "cost"')
    if reduce not in _REDUCE:
        raise refuse(f"reduce={reduce!r}; use 'step' or 'microbatch'{did_you_mean(str(reduce), _REDUCE)}")
    if rows not in _ROWS:
        raise refuse(f"rows={rows!r}; use 'batch' or 'microbatch'{did_you_mean(str(rows), _ROWS)}")
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise refuse(f"microbatches={microbatches!r}; use a number of at least 1")
    if stages_per_rank is not None and (not isinstance(stages_per_rank, int) or stages_per_rank < 1 or balance is None):
        raise refuse(f"stages_per_rank={stages_per_rank!r}; use a number of at least 1, together with balance=")
    if memory_gib is not None and (
        isinstance(memory_gib, bool) or not isinstance(memory_gib, int | float) or not memory_gib > 0 or balance is None
    ):
        raise refuse(f"memory_gib={memory_gib!r}; use a positive number, together with balance=")
    if microbatch_shape is not None and (
        isinstance(microbatch_shape, str)
        or len(microbatch_shape) != 2
        or not all(isinstance(n, int) and n > 0 for n in microbatch_shape)
        or memory_gib is None
    ):
        raise refuse(f"microbatch_shape={microbatch_shape!r}; use [rows, tokens], together with memory_gib=")
    if costs is not None and balance is None:
        raise refuse('costs= needs balance="cost"; pass both, or remove costs=')
    if not callable(loss) and not (isinstance(loss, str) and loss.split(".")[0] == "out"):
        raise refuse(
            f"loss={loss!r}; use a path that begins with the output, such as 'out.loss' or 'out', or a callable"
        )
    if callable(loss) and not _takes_two(loss):
        raise refuse(
            f"loss={getattr(loss, '__qualname__', loss)}{inspect.signature(loss)} cannot be called with (out, batch): "
            "the model's output and the micro-batch's dict; define it with both parameters, and return (sum, count)"
        )
    return PipelineEntry(
        mesh,
        tuple(_module(path, refuse) for path in _texts(split_before, "split_before", refuse)),
        tuple(tuple(_module(path, refuse) for path in _texts(stage, "stages", refuse)) for stage in stages or ()),
        balance,
        _schedule(schedule, refuse),
        microbatches,
        loss,
        reduce,
        rows,
        stages_per_rank,
        None if costs is None else _costs(costs, refuse),
        memory_gib,
        None if microbatch_shape is None else (microbatch_shape[0], microbatch_shape[1]),
        source,
    )


def _costs(costs: Any, refuse: Callable[[str], PlanError]) -> tuple[tuple[Path, float], ...]:
    if not isinstance(costs, Mapping) or not costs:
        raise refuse(f"costs={costs!r}; use {{module path: cost}}, such as what vescale.pipeline.measure_costs returns")
    for path, cost in costs.items():
        if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost < float("inf"):
            raise refuse(f"costs: {path!r} costs {cost!r}; use a non-negative number, in any unit")
    return tuple((_module(path, refuse), float(costs[path])) for path in _texts(list(costs), "costs", refuse))


def _texts(paths: Any, name: str, refuse: Callable[[str], PlanError]) -> Sequence[str]:
    if paths is None:
        return ()
    if isinstance(paths, str) or not all(isinstance(path, str) for path in paths):
        raise refuse(f"{name}={paths!r}; use a list of paths{' for each stage' if name == 'stages' else ''}")
    return tuple(paths)


def _module(text: str, refuse: Callable[[str], PlanError]) -> Path:
    try:
        path = Path.parse(text)
    except ValueError as error:
        raise refuse(str(error)) from None
    if path.target is not Target.STATE:
        raise refuse(f"{text!r} takes a module path; remove <...> and .grad")
    return path


def _schedule(schedule: Any, refuse: Callable[[str], PlanError]) -> str:
    if not isinstance(schedule, str):
        raise refuse(f"schedule={schedule!r}; use a name ({', '.join(PIPELINE_SCHEDULES)}), or CSV text")
    if is_schedule_text(schedule):
        return schedule
    names = {name.lower(): name for name in PIPELINE_SCHEDULES} | _SHORT
    if schedule.lower() not in names:
        raise refuse(
            f"schedule={schedule!r} is none of "
            f"{', '.join(PIPELINE_SCHEDULES)}{did_you_mean(schedule, PIPELINE_SCHEDULES)}; or pass the actions of "
            "each rank as CSV text, one line per rank"
        )
    return names[schedule.lower()]


def with_pipeline(plan: Any, entry: PipelineEntry | None) -> Any:
    """A plan of the entries of ``plan``, with the pipeline of ``entry`` or with none. Raises PlanError for an axis that
    ``plan`` does not have."""
    if entry is not None and entry.mesh not in plan.axes:
        raise EntryError(f"pipeline names axis {entry.mesh!r}, but the axes are {plan.axes}", entry.source)
    found = copy.copy(plan)
    found._pipeline = entry
    return found


def _takes_two(loss: Callable[..., Any]) -> bool:
    try:
        inspect.signature(loss).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # it has no signature to look at
        pass
    return True


# One placement for the axis named by axis=, one for each axis named there (or of the mesh), or {axis: placement}.
PlacementSpec = Placement | Sequence[Placement] | Mapping[str, Placement]


def _one_of(mesh: Any, axis: Any, source: Source) -> Any:
    """``axis=`` and ``mesh=`` are two names of one argument."""
    if mesh is not None and axis is not None:
        raise EntryError(f"axis={axis!r} and mesh={mesh!r} mean the same; pass one of them", source)
    return mesh if axis is None else axis


class PlanEntries:
    """An ordered list of entries over the axes of a mesh: what :class:`vescale.Plan` consists of.

    Each method checks the path, axes and placements of an entry and adds it. All raise PlanError with the line of the call.
    """

    def __init__(
        self, mesh: DeviceMesh | Mapping[str, int] | MeshAxes, *, inputs: Literal["global", "local"] = "global"
    ) -> None:
        try:
            self._axes = MeshAxes.of(mesh)
        except ValueError as error:
            raise EntryError(str(error), calling_line()) from None
        if inputs not in ("global", "local"):
            raise EntryError(f"inputs={inputs!r}; use 'global' or 'local'", calling_line())
        self._mesh = mesh if isinstance(mesh, DeviceMesh) else None
        self._inputs = inputs
        self._entries: list[Entry] = []
        self._pipeline: PipelineEntry | None = None

    @property
    def axes(self) -> MeshAxes:
        """Names and sizes of the axes of the mesh."""
        return self._axes

    @property
    def mesh(self) -> DeviceMesh | None:
        """The DeviceMesh the plan was written for, or None for a plan over names and sizes."""
        return self._mesh

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries that ``shard`` has added, in their order."""
        return tuple(self._entries)

    @property
    def pipeline_entry(self) -> PipelineEntry | None:
        """How the model is split into stages, or None."""
        return self._pipeline

    def shard(
        self,
        path: str,
        placement: PlacementSpec,
        mesh: str | Sequence[str] | None = None,
        phase: Phase | str = ALL,
        *,
        axis: str | Sequence[str] | None = None,
        given: Literal["global", "local"] | None = None,
        source: Source | None = None,
    ) -> Self:
        """Adds an entry for the placement of the tensors that ``path`` names, and returns the plan.

        Args:
            path: a regular expression for modules, a dot, and a tensor (docs/plans.md, Paths).
            placement: one placement for ``axis``; a list with one for each axis of the mesh, as DTensor takes it; or
                ``{axis: placement}``.
            mesh: the same as ``axis``.
            phase: when it holds; see :class:`Phase`.
            axis: the axis, or axes, of the placement, by name; not needed on a mesh of one axis.
            given: for inputs of the model, whether ordinary tensors are ``"global"`` or this rank's part (``"local"``); by
                default as the plan's ``inputs``.
            source: where the entry was written; by default the calling line.
        """
        source = source or calling_line()
        parsed, mesh = self._path(path, source), _one_of(mesh, axis, source)
        is_input = parsed.target is Target.IN and parsed.pattern == ""
        if given is None:
            given = self._inputs if is_input else "global"
        if given not in ("global", "local"):
            raise EntryError(f"given={given!r}; use 'global' or 'local'", source)
        if given == "local" and not is_input:
            raise EntryError(
                f"given='local' on {path!r}: only inputs of the model itself, <in:name>, come from the caller; remove "
                "given=",
                source,
            )
        placements = self._placements(placement, mesh, source)
        return self._add(ShardEntry(parsed, placements, self._phase(phase, source), given, source))

    def redistribute(
        self,
        path: str,
        src: PlacementSpec,
        dst: PlacementSpec,
        *,
        grad_src: PlacementSpec | None = None,
        grad_dst: PlacementSpec | None = None,
        mesh: str | Sequence[str] | None = None,
        axis: str | Sequence[str] | None = None,
        source: Source | None = None,
    ) -> Self:
        """At the boundary ``path`` (``<in>`` or ``<out>``), bring a tensor from ``src`` to ``dst``, and its gradient from
        ``grad_src`` to ``grad_dst``; see :class:`RedistributeEntry`."""
        source = source or calling_line()
        parsed, mesh = self._boundary(path, "redistribute", source), _one_of(mesh, axis, source)
        before, after = self._placements(src, mesh, source), self._placements(dst, mesh, source)
        if [axis for axis, _ in before] != [axis for axis, _ in after]:
            raise EntryError(
                f"redistribute {path!r}: src names axes {[a for a, _ in before]} and dst {[a for a, _ in after]}; name "
                "the same axes in both",
                source,
            )
        gradients = [None if g is None else self._placements(g, mesh, source) for g in (grad_src, grad_dst)]
        return self._add(RedistributeEntry(parsed, before, after, gradients[0], gradients[1], source))

    def annotate(
        self,
        path: str,
        placement: PlacementSpec,
        mesh: str | Sequence[str] | None = None,
        *,
        axis: str | Sequence[str] | None = None,
        source: Source | None = None,
    ) -> Self:
        """Declare the ``placement`` that the local tensor ``path`` has already; nothing moves."""
        source = source or calling_line()
        mesh = _one_of(mesh, axis, source)
        return self._add(AnnotateEntry(self._path(path, source), self._placements(placement, mesh, source), source))

    def factory(
        self,
        path: str,
        placement: PlacementSpec,
        mesh: str | Sequence[str] | None = None,
        *,
        axis: str | Sequence[str] | None = None,
        source: Source | None = None,
    ) -> Self:
        """Give ``placement`` to tensors that are made inside the forward of the modules that ``path`` matches."""
        source = source or calling_line()
        parsed, mesh = self._module(path, "factory", source), _one_of(mesh, axis, source)
        return self._add(FactoryEntry(parsed, self._placements(placement, mesh, source), source))

    def attention(
        self,
        path: str,
        method: AttentionMethod | Mapping[str, AttentionMethod],
        mesh: str | Sequence[str] | None = None,
        *,
        axis: str | Sequence[str] | None = None,
        source: Source | None = None,
    ) -> Self:
        """Choose the method of attention in the modules that ``path`` matches, on axes that shard its *sequence* (context
        parallelism); see :class:`AttentionEntry`. Axes that shard the batch or heads need no method.

        ==============  ==========================================================================  ====================
        method          communication in forward (backward: the same in the other direction)        restriction
        ==============  ==========================================================================  ====================
        ``all_gather``  one all-gather of keys and values: ``2 (n-1)/n`` of their size              any number of heads
        ``ring``        keys and values, a block at a time: ``(n-1)/n`` of their size (backward:    any number of heads,
                        ``2 - 1/n`` of it), or less, because masked blocks are not sent             the longest sequences
        ``ulysses``     an all-to-all each of q, k, v and the result: ``(n-1)/n**2`` of their size  heads that n divides
        ==============  ==========================================================================  ====================

        ``method`` may be a mapping from axis to method; otherwise it holds for the axes of ``mesh``.
        """
        source = source or calling_line()
        parsed, mesh = self._module(path, "attention", source), _one_of(mesh, axis, source)
        given = dict(self._pairs(method, mesh, source))
        for axis, name in given.items():
            if axis not in self._axes:
                raise EntryError(
                    f"attention {path!r}: no axis {axis!r}; the axes are {self._axes}{did_you_mean(axis, self._axes)}",
                    source,
                )
            if name not in ATTENTION_METHODS:
                raise EntryError(
                    f"attention {path!r}: {name!r} on {axis} is not a method; use one of {', '.join(ATTENTION_METHODS)}"
                    f"{did_you_mean(str(name), ATTENTION_METHODS)}",
                    source,
                )
        methods = tuple((axis, given[axis]) for axis in self._axes if axis in given)
        return self._add(AttentionEntry(parsed, methods, source))

    def local(
        self,
        path: str,
        *,
        kind: str | None = None,
        dispatch: str | None = None,
        inputs: Mapping[str, Placement] | None = None,
        outputs: Mapping[str, Placement] | None = None,
        source: Source | None = None,
    ) -> Self:
        """Run the modules that ``path`` matches on plain local tensors: ``kind="experts"`` (``dispatch``: ``"mask"`` or
        ``"all_to_all"``), or any, with the placements of its ``inputs`` and ``outputs``; see :class:`LocalEntry`."""
        source = source or calling_line()
        parsed = self._module(path, "local", source)
        if dispatch is not None and dispatch not in ("mask", "all_to_all"):
            raise EntryError(f"local {path!r}: dispatch={dispatch!r}; use 'mask' or 'all_to_all'", source)
        if kind is not None and kind != "experts":
            raise EntryError(f"local {path!r}: kind={kind!r}; use 'experts', or remove it", source)
        if dispatch is not None and kind != "experts":
            raise EntryError(f"local {path!r}: dispatch= needs kind='experts'; pass it, too", source)
        borders = [self._placements(border, None, source) if border else () for border in (inputs, outputs)]
        return self._add(LocalEntry(parsed, kind, dispatch, borders[0], borders[1], source))

    def unit(
        self,
        path: str,
        *,
        reshard_after_forward: bool | int | None = None,
        reshard_after_backward: bool | None = None,
        mp_policy: MixedPrecisionPolicy | Mapping[str, Any] | None = None,
        offload_policy: OffloadPolicy | Mapping[str, Any] | None = None,
        source: Source | None = None,
    ) -> Self:
        """Gather and reduce the parameters of each module that ``path`` matches together: those that rest ragged over one
        axis or several, and run replicated there. ``""`` is the model itself, for what no smaller unit holds.

        Without unit entries the model's repeated blocks are units, and the model itself. An entry takes the place of the
        blocks inside the modules that it names.

        ==========  =========================  =====================================================================
        stage       written                    parameters are whole
        ==========  =========================  =====================================================================
        ZeRO-3      (nothing)                  while the unit's forward runs, and again while its backward does
        ZeRO-2      reshard_after_forward      from the unit's forward to the end of its backward
                    =False
        ZeRO-1      both False                 from the first forward of a step to the end of the backward that
                                               reduces gradients, through all that accumulate (``no_sync``)
        ==========  =========================  =====================================================================

        Args:
            reshard_after_forward: True, False, or how many consecutive ranks keep a piece each between forward and
                backward. None: True, but False for the model itself, whose backward follows its forward.
            reshard_after_backward: False keeps parameters gathered between backwards that only accumulate. None: True.
            mp_policy: PyTorch's ``MixedPrecisionPolicy``, or its arguments, dtypes by name: parameters are gathered in
                ``param_dtype``, to which floating inputs of the module are cast; gradients are reduced in
                ``reduce_dtype``. Modules around and inside need separate entries.
            offload_policy: ``CPUOffloadPolicy``, or ``{"pin_memory": bool}``: parameters, gradients and optimizer state
                are in host memory, and are copied to the device to be gathered.
        """
        source = source or calling_line()
        keep = reshard_after_forward
        if not (keep is None or isinstance(keep, bool) or (isinstance(keep, int) and keep >= 1)):
            raise EntryError(
                f"unit {path!r}: reshard_after_forward={keep!r}; use True, False, or a number of ranks "
                "that divides those of the axis",
                source,
            )
        if reshard_after_backward is not None and not isinstance(reshard_after_backward, bool):
            raise EntryError(
                f"unit {path!r}: reshard_after_backward={reshard_after_backward!r}; use True or False", source
            )
        try:
            precision, pinned = mp_policy_of(mp_policy), pins_memory(offload_policy)
        except ValueError as error:
            raise EntryError(f"unit {path!r}: {error}", source) from error
        parsed = self._module(path, "unit", source)
        return self._add(UnitEntry(parsed, keep, reshard_after_backward, precision, pinned, source))

    def add(self, entry: Entry) -> Self:
        """Add ``entry`` of another plan, with its source. Raises PlanError for an axis that this plan does not have."""
        for stage in (value for value in vars(entry).values() if isinstance(value, tuple)):
            for axis, _ in stage:
                if axis not in self._axes:
                    raise EntryError(f"'{entry.path}' names axis {axis!r}, but the axes are {self._axes}", entry.source)
        return self._add(entry)

    def without_mesh(self) -> Self:
        """The same entries over names and sizes alone."""
        plan = copy.copy(self)
        plan._mesh = None
        return plan

    def stage_plan(self) -> Self:
        """The entries without the pipeline, over the other axes (``replica=1`` where there are none): the plan of a stage.

        Raises PlanError for an entry that names the pipeline's axis.
        """
        assert self._pipeline is not None
        sizes = {name: size for name, size in zip(self._axes.names, self._axes.sizes) if name != self._pipeline.mesh}
        plan = type(self)(sizes or {"replica": 1})
        for entry in self._entries:
            plan.add(entry)
        return plan

    # Validation

    def _add(self, entry: Entry) -> Self:
        self._entries.append(entry)
        return self

    def _path(self, text: str, source: Source) -> Path:
        try:
            return Path.parse(text)
        except ValueError as error:
            raise EntryError(str(error), source) from None

    def _boundary(self, text: str, what: str, source: Source) -> Path:
        path = self._path(text, source)
        if path.target not in (Target.IN, Target.OUT):
            raise EntryError(
                f"{what} {text!r} names a parameter, but the entry is for a module's inputs or outputs; write "
                "module.<in> or module.<out>",
                source,
            )
        return path

    def _module(self, text: str, what: str, source: Source) -> Path:
        path = self._path(text, source) if text else Path("", "", Target.STATE)
        if path.target is not Target.STATE:
            raise EntryError(f"{what} {text!r} takes a module path; remove <...> and .grad", source)
        return path

    def _phase(self, phase: Phase | str, source: Source) -> Phase:
        try:
            return parse_phase(phase) if isinstance(phase, str) else Phase(phase)
        except ValueError as error:
            raise EntryError(str(error), source) from None

    def _placements(self, spec: PlacementSpec, mesh: str | Sequence[str] | None, source: Source) -> AxisPlacements:
        """Placements in the order of the mesh's axes."""
        pairs = list(self._pairs(spec, mesh, source))
        try:
            order = [self._axes.index(axis) for axis, _ in pairs]
        except ValueError as error:
            raise EntryError(str(error), source) from None
        for axis, placement in pairs:
            if not isinstance(placement, Placement):
                raise EntryError(
                    f"{placement!r} on axis {axis!r} is not a placement; use Replicate(), Shard(dim), Partial(op), "
                    "RaggedShard(...), InterleavedShard(dim, chunks)",
                    source,
                )
        if len(set(order)) != len(order):
            raise EntryError(f"axes {[axis for axis, _ in pairs]} repeat; name each axis once", source)
        return tuple(pair for _, pair in sorted(zip(order, pairs), key=lambda item: item[0]))

    def _pairs(self, spec: Any, mesh: str | Sequence[str] | None, source: Source) -> Iterator[tuple[str, Any]]:
        if isinstance(spec, Mapping):
            if mesh is not None:
                raise EntryError(
                    f"axis={mesh!r} together with {dict(spec)!r}, which already names its axes; remove axis=", source
                )
            if not spec:
                raise EntryError("no placement is given; pass at least one axis and its placement", source)
            yield from spec.items()
            return
        if mesh is None and isinstance(spec, list | tuple):
            mesh = self._axes.names  # as DTensor takes placements: one for each axis of the mesh
        if mesh is None:
            if len(self._axes.names) != 1:
                raise EntryError(
                    f"which of the axes {', '.join(self._axes.names)} is {spec!r} for? pass axis=, or {{axis: placement}}",
                    source,
                )
            mesh = self._axes.names[0]
        if isinstance(mesh, str):
            yield mesh, spec
            return
        if not isinstance(mesh, Sequence) or not mesh or not all(isinstance(axis, str) for axis in mesh):
            raise EntryError(
                f"axis={mesh!r} is not the name of an axis; pass axis={self._axes.names[0]!r}, or several", source
            )
        placements = [spec] * len(mesh) if isinstance(spec, Placement | str) else list(spec)
        if len(placements) != len(mesh):
            raise EntryError(
                f"{len(placements)} placements for the {len(mesh)} axes {tuple(mesh)}; pass one for each", source
            )
        yield from zip(mesh, placements)

    # Value semantics

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlanEntries):
            return NotImplemented
        mine, theirs = (self._axes, self._pipeline, self._by_path()), (other._axes, other._pipeline, other._by_path())
        return mine == theirs

    __hash__ = None  # type: ignore[assignment]

    def _by_path(self) -> list[Entry]:
        """Entries by kind and path. Their order has no other meaning, because entries never override each other."""
        return sorted(self._entries, key=lambda entry: (type(entry).__name__, entry.path.text))

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._axes}; {len(self._entries)} entries)"

    # Entries that say how modules compute, and not where tensors are.

    def precision(
        self,
        path: str,
        *,
        param: torch.dtype | str | None = None,
        reduce: torch.dtype | str | None = None,
        output: torch.dtype | str | None = None,
        source: Source | None = None,
    ) -> Self:
        """Compute in other dtypes in the modules that ``path`` matches, and in all modules inside them (an inner entry
        takes precedence); ``""`` is the model itself. See :class:`PrecisionEntry`; dtypes may be names such as
        ``"bfloat16"``.

        Args:
            param: parameters are cast to it while their module runs.
            reduce: gradients are reduced in it. None: in ``param``.
            output: floating outputs are cast to it.
        """
        source = source or calling_line()
        given = {"param": param, "reduce": reduce, "output": output}
        try:
            dtypes = {name: float_dtype_of(name, value) for name, value in given.items()}
        except ValueError as error:
            raise EntryError(f"precision {path!r}: {error}", source) from None
        if not any(dtypes.values()):
            raise EntryError(f"precision {path!r} has no dtype; pass param=, reduce= or output=", source)
        return self._add(PrecisionEntry(self._module(path, "precision", source), **dtypes, source=source))

    def checkpoint(
        self,
        path: str,
        policy: str | Mapping[str, Any] | CheckpointPolicy = "full",
        budget_gib: float | None = None,
        *,
        source: Source | None = None,
    ) -> Self:
        """Compute the forward of the modules that ``path`` matches again in backward, instead of saving what it computes.

        ``policy``: ``"full"``, ``"selective"``, ``"offload"``, or ``{"save": [ops], "every": n, "recompute_communication":
        bool}``; see :class:`CheckpointPolicy`. ``budget_gib``: see :class:`CheckpointEntry`.
        """
        source = source or calling_line()
        try:
            chosen = checkpoint_policy(policy)
            budget = checkpoint_budget(budget_gib, chosen)
        except ValueError as error:
            raise EntryError(f"checkpoint {path!r}: {error}", source) from error
        parsed = self._module(path, "checkpoint", source)
        return self._add(CheckpointEntry(parsed, chosen, budget, source))
