"""``PipelineEntry``: how a model is cut into stages, and in which order they run."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vescale.errors import EntryError, PlanError, Source, did_you_mean
from vescale.plans._mesh_axes import MeshAxes
from vescale.plans._path import Path, Target

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
