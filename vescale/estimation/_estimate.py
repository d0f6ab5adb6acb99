"""``estimate``: memory of every rank, and seconds, of a training step, before anything runs."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from vescale.buffer import Layout, plan_layout
from vescale.compat.attention_kernels import attention_by, host_has_attention_kernel
from vescale.errors import ArgumentError, ArgumentTypeError, UnsupportedRandomOpError, kind_of
from vescale.estimation._compare import Comparison, compare
from vescale.estimation._devices import Device, device_of
from vescale.estimation._memory_timeline import timeline_of
from vescale.estimation._rank_states import RankMemory, SeenRank, memory_of_ranks, rank_states, uneven_axes
from vescale.estimation._rehearsal import Rehearsal, rehearse
from vescale.estimation._skeleton import first_and_last_of, loss_of, make_batch, skeleton_of, typical_runs
from vescale.estimation._stages import first_microbatch, one_rank_plan, plan_of_cut, step_of_stages
from vescale.estimation._step_time import StepTime, seconds_of_stages, step_time
from vescale.estimation._unfilled import Routing
from vescale.ir import Local, Program, Repeats, UnitBucket, lower, repeats_of, unit_buckets
from vescale.plans import MeshAxes, Plan, did_you_mean

if TYPE_CHECKING:
    from vescale.pipeline import Schedule


# Optimizers by name.


def _adamw8bit(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from vescale.optim import AdamW8bit

    return AdamW8bit(parameters)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "adamw-for-loop": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters),
    "adamw8bit": _adamw8bit,
}


def make_optimizer(optimizer: Any) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None:
    """Raises ValueError for an unknown name, TypeError for what cannot be called."""
    if optimizer is None or optimizer == "none":
        return None
    if isinstance(optimizer, str):
        if optimizer.lower() not in OPTIMIZERS:
            raise ArgumentError(
                f"optimizer {optimizer!r} is not one of "
                f"{', '.join(OPTIMIZERS)}{did_you_mean(optimizer, tuple(OPTIMIZERS))}"
            )
        return OPTIMIZERS[optimizer.lower()]
    if not callable(optimizer):
        raise ArgumentTypeError(f"optimizer is {kind_of(optimizer)}; pass a name, or a function of the parameters")
    return optimizer


# Attention of a GPU, on a host whose kernels do not take the same calls.

_aten = torch.ops.aten


def attention_of_gpu() -> contextlib.AbstractContextManager[None]:
    """Inside, where the host would multiply queries and keys as matrices (values with fewer numbers than keys), the operator
    of a GPU's kernel runs, which keeps one number for each query and head. It must run without values."""
    return attention_by(_attend)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    options = {"scale": scale, "enable_gqa": enable_gqa}
    if not query.ndim == key.ndim == value.ndim == 4 or query.is_meta:
        return None
    try:
        if host_has_attention_kernel(query, key, value, attn_mask, dropout_p, is_causal, **options):
            return None
    except UnsupportedRandomOpError:  # a part of one device's dropout is drawn, which kernels cannot
        return None
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    mask = attn_mask
    if mask is not None:
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
        mask = mask.expand(*query.shape[:3], key.shape[2])
    found = _aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )
    attended: torch.Tensor = found[0]
    return attended


# What of a rank's parameters is padding, and which blocks would leave less.

_NOTED = 0.1
"""The share of a rank's parameters from which on padding is worth a note."""


def padding_note(program: Program, model: nn.Module, padding: int, parameters: int) -> str | None:
    """A sentence with the entry that leaves least padding; None where there is little of it.

    Args:
        program: of the plan; ``model``: its shapes.
        padding: bytes of a rank; ``parameters``: with it.
    """
    if padding <= _NOTED * parameters:
        return None
    begin = (
        f"of {parameters:,} bytes of a rank's parameters, {padding:,} are padding, because blocks that must not be "
        "divided do not fill the ranks evenly"
    )
    buckets = [one for one in unit_buckets(program, model) if not one.parts]
    worst = max(buckets, key=lambda one: one.padding_elements * one.dtype.itemsize, default=None)
    found = _with_rows(worst, model) if worst is not None else None
    if worst is None or found is None:
        return f"{begin}: use fewer ranks, or shard over a part of them (hybrid sharding)"
    layout, blocks = found
    axes = ", ".join(f"{axis}: Ragged(block={{}})" for axis in worst.shard)
    edits = "; ".join(f"{_pattern(names)}: {{{axes.format(size)}}}" for size, names in blocks.items())
    total = sum(layout.numels)
    before, after = (size / total - 1 for size in (worst.buffer_size, layout.shard_size * worst.num_ranks))
    return (
        f"{begin}. Smaller blocks, {edits} at init instead of the present entries, leave {after:.1%} padding in the "
        f"unit {worst.path!r}, which has {before:.1%}"
    )


def _with_rows(bucket: UnitBucket, model: nn.Module) -> tuple[Layout, dict[int, list[str]]] | None:
    """The layout with blocks of one row of the last dim, and the names of the parameters that get them, by block; None
    where that leaves at least half of the padding."""
    layout = bucket.layout
    shapes = {name: tuple(model.get_parameter(name).shape) for name in bucket.names}
    whole = layout.shard_size
    blocks = list(layout.blocks)
    changed: dict[int, list[str]] = {}
    for n, (name, block) in enumerate(zip(bucket.names, layout.blocks)):
        row = shapes[name][-1] if shapes[name] else 1
        # Blocks of a shard's size, or nearly, are what leaves gaps.
        if row < block and block % row == 0 and 8 * block > sum(layout.numels) // layout.num_shards:
            blocks[n] = row
            changed.setdefault(row, []).append(name)
    if not changed:
        return None
    found = plan_layout(
        layout.numels, blocks, layout.num_shards, layout.alignment, tensor_alignment=layout.tensor_alignment
    )
    total = sum(layout.numels)
    if 2 * (found.shard_size * found.num_shards - total) > whole * layout.num_shards - total:
        return None
    return found, changed


def _pattern(names: list[str]) -> str:
    """One path expression for some parameters: numbers of layers become ``\\d+``."""
    kinds = Counter(re.sub(r"(?<=\.)\d+(?=\.)", r"\\d+", name) for name in names)
    if len(kinds) == 1:
        return next(iter(kinds))
    parts = [kind.split(".") for kind in sorted(kinds)]
    shared = list(itertools.takewhile(lambda of: len(set(of)) == 1, zip(*parts)))
    ends = "|".join(".".join(own[len(shared) :]) for own in parts)
    return ".".join([*(of[0] for of in shared), f"({ends})"])


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Estimate:
    """What a plan needs; see :func:`estimate`.

    Attributes:
        program: the lowered program that was looked at.
        axes: of the plan's mesh, that of a pipeline among them.
        device: what it would run on.
        ranks: memory, one entry for ranks that need the same.
        outside: bytes that the device needs outside of PyTorch's allocator, by purpose.
        time: seconds of a step.
        notes: what was assumed.
        given: the arguments of :func:`estimate`.
        padding_bytes: of the parameters of a rank, padding of buffers.
        zero_table, what_if: rows of :mod:`vescale.estimation._variants`, where they were asked for.
    """

    program: Program
    axes: MeshAxes
    device: Device
    ranks: tuple[RankMemory, ...]
    outside: dict[str, int]
    time: StepTime
    notes: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict, repr=False)
    zero_table: tuple[dict[str, Any], ...] = ()
    what_if: tuple[dict[str, Any], ...] = ()
    padding_bytes: int = 0

    def again(self, **changes: Any) -> Estimate:
        """The estimate of the same arguments but for those in ``changes``."""
        return estimate(**{**self.given, **changes})

    @property
    def peak(self) -> RankMemory:
        """The ranks that need most."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that PyTorch's allocator holds on any rank, in the first step or a later one."""
        return max(self.peak.peak_bytes, self.peak.first_step_bytes)

    @property
    def peak_rank(self) -> int:
        """The first of the ranks that need most."""
        return self.peak.ranks[0]

    @property
    def needed_bytes(self) -> int:
        """With what is outside of PyTorch."""
        return self.peak_bytes + sum(self.outside.values())

    @property
    def step_seconds(self) -> float:
        """The estimated time of a step."""
        return self.time.seconds

    @property
    def fits(self) -> bool:
        """Whether ``needed_bytes`` are no more than the memory of the device; True for a device without a limit."""
        return self.device.memory_bytes is None or self.needed_bytes <= self.device.memory_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain data: numbers of bytes and seconds, names and lists."""
        return {
            "mesh": dict(zip(self.axes.names, self.axes.sizes)),
            "device": self.device.name,
            "memory_bytes": self.device.memory_bytes,
            "fits": self.fits,
            "peak_rank": self.peak_rank,
            "peak_bytes": self.peak_bytes,
            "needed_bytes": self.needed_bytes,
            "outside": self.outside,
            "ranks": [
                {
                    "rank": rank.ranks[0],
                    "ranks": list(rank.ranks),
                    "coordinates": rank.coordinates,
                    "peak_bytes": rank.peak_bytes,
                    "peak_at": rank.peak_at,
                    "first_step_bytes": rank.first_step_bytes,
                    "categories": rank.categories,
                    "maximum": rank.maximum,
                    "outside": self.outside,
                    "timeline": list(rank.timeline),
                }
                for rank in self.ranks
            ],
            "step_seconds": self.time.seconds,
            "terms": self.time.terms(),
            "notes": list(self.notes),
            "zero_table": list(self.zero_table),
            "what_if": list(self.what_if),
        }

    def compare(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Comparison:
        """The estimate beside what a run of this process has measured; see :func:`vescale.debug.compare_estimate`.

        Args:
            model: what ran.
            optimizer: whose states are counted. None: none are.
        """
        return compare(model, self, optimizer)


def estimate(
    model: nn.Module,
    plan: Plan,
    *,
    batch: Mapping[str, Any],
    optimizer: str | MakeOptimizer | None = "adamw",
    device: str | Device = "cpu",
    steps: int = 3,
    loss: Callable[[Any, Mapping[str, Any]], torch.Tensor] | None = None,
    load: float | list[float] = 1.0,
    rank: int | None = None,
    reduce_depth: bool = True,
) -> Estimate:
    """Memory of every rank and seconds of a step, by running the engine's own code for one rank without numbers.

    No ranks, and no devices, are needed, and nothing of the process changes: ``model`` is copied without its memory.
    Lists of equal modules are run with the first and the last of them only.

    Args:
        model: on the meta device, deferred or real; not parallelized.
        plan: what :func:`vescale.parallelize` would get.
        batch: by name of the forward's inputs, tensors of global shape (on the meta device without values), shapes,
            or other arguments.
        optimizer: a name (``adamw``, ``adam``, ``sgd``, ``adamw8bit``, ...), a function of the parameters, or None.
        device: a name of a table (``h100-80g``, ``cpu``, ...), or a table.
        steps: how many steps are run; the last one is the steady state.
        loss: of the model's output and the batch; by default ``output.loss``, for which models of transformers get labels
            where ``batch`` has none, or the mean of the first output.
        load: of experts: how many times the mean this rank's experts get, or relative numbers of tokens of all experts.
        rank: whose activations are measured; None: 0, or the one whose experts get most of a histogram. Parameters,
            gradients and optimizer states are those of every rank.
        reduce_depth: False runs every module.

    Raises:
        PlanError: everything that ``lower`` finds; a model that has been parallelized.
        TypeError, ValueError: a batch that does not fit, an unknown optimizer or device.
    """
    if steps < 1:
        raise ArgumentError(f"steps is {steps}; pass at least 1 (3 shows the steady state)")
    table = device_of(device)
    maker = make_optimizer(optimizer)
    inputs = make_batch(model, batch, with_labels=loss is None)
    skeleton = skeleton_of(model)
    if plan.mesh is not None:
        plan = plan.without_mesh()
    program = lower(plan, skeleton)
    axes, entry = plan.axes, plan.pipeline_entry
    staged: Any = None
    if entry is not None:
        from vescale.pipeline import StagedProgram

        staged = StagedProgram.of(plan, skeleton, program)
    asked = rank
    num_ranks = math.prod(axes.sizes)
    rank = _busiest(program, axes, load) if rank is None else rank
    if not 0 <= rank < num_ranks:
        raise ArgumentError(f"rank is {rank}; the mesh has ranks 0 to {num_ranks - 1}")
    places = np.unravel_index(rank, axes.sizes)
    by_axis = {name: int(c) for name, c in zip(axes.names, places)}
    inner = int(np.ravel_multi_index([by_axis.get(n, 0) for n in program.axes.names], program.axes.sizes))
    uneven = uneven_axes(program, inputs)
    run_plan, num_columns = plan, 1
    headers: dict[int, Any] = {}
    if entry is not None:
        num_columns = axes.size(entry.mesh)
        run_plan = plan_of_cut(plan, staged.cut.splits)

    def global_rank(column: int, own: int) -> int:
        if entry is None:
            return own
        found = dict(zip(program.axes.names, np.unravel_index(own, program.axes.sizes)))
        return int(np.ravel_multi_index([column if n == entry.mesh else found[n] for n in axes.names], axes.sizes))

    def run(repeats: tuple[Repeats, ...], own: int, column: int, into: dict[int, Any]) -> Rehearsal:
        def once(plan: Plan, number: int, batch: Any, maker: Any, num_steps: int) -> Rehearsal:
            return rehearse(
                first_and_last_of(skeleton, repeats),
                plan,
                plan.axes,
                number,
                batch,
                maker,
                loss or loss_of,
                num_steps=num_steps,
                routing=routing_of(program, load, own),
                repeats=repeats,
                headers=into if entry is not None else None,
                attention=attention_of_gpu() if table.is_gpu else None,
                has_host=table.is_gpu,
            )

        if entry is not None and not into:
            first = first_microbatch(inputs, entry.microbatches)
            once(one_rank_plan(run_plan, staged.cut.num_stages), own, first, None, 1)
        return once(run_plan, global_rank(column, own), inputs, maker, steps)

    begins = staged.cut.splits if entry is not None else ()
    repeats = repeats_of(skeleton, apart=begins) if reduce_depth else ()
    try:
        rehearsal = run(repeats, inner, 0, headers)
    except Exception:
        if not repeats:
            raise
        repeats, headers = (), {}  # the model's forward, or the plan, names modules by number
        rehearsal = run(repeats, inner, 0, headers)
    typical = typical_runs(repeats, rehearsal)
    if typical != repeats:
        repeats, headers = typical, {}
        rehearsal = run(repeats, inner, 0, headers)
    notes = []
    if repeats:
        notes.append(
            "equal modules were run as the first and the last of "
            + ", ".join(f"{len(r.names)} in {r.path}" for r in repeats)
        )
    memory: list[RankMemory] = []
    times: list[StepTime] = []
    passes: dict[tuple[int, str], float] = {}
    ran: list[int] = []
    on_host = 0
    padding = (0, 0)
    for column in range(num_columns):
        part = program
        if entry is not None:
            from vescale.pipeline import program_of_stages

            part = program_of_stages(skeleton, program, staged.cut, frozenset(staged.schedule.stages_of(column)))
        rehearsal = rehearsal if column == 0 else run(repeats, inner, column, headers)
        seen = [SeenRank(inner, rehearsal, timeline_of(rehearsal, repeats, table.rounding_bytes))]
        if uneven:  # the last ranks have fewer rows
            coordinate = np.unravel_index(inner, program.axes.sizes)
            last = [
                size - 1 if a in uneven else int(c)
                for a, size, c in zip(program.axes.names, program.axes.sizes, coordinate)
            ]
            other = int(np.ravel_multi_index(last, program.axes.sizes))
            if other != inner:
                again_ = run(repeats, other, column, {})
                seen.append(SeenRank(other, again_, timeline_of(again_, repeats, table.rounding_bytes)))
        ran += [global_rank(column, one.rank) for one in seen]
        on_host = max(on_host, *(int(one.timeline.on_host.max(initial=0)) for one in seen))
        states = rank_states(part, skeleton)
        padding = max(padding, (states.padding, int(states.parameters.max())))
        for one in memory_of_ranks(part, seen, uneven, repeats, states):
            ranks = tuple(sorted(global_rank(column, own) for own in one.ranks))
            where = dict(zip(axes.names, map(int, np.unravel_index(ranks[0], axes.sizes))))
            memory.append(replace(one, ranks=ranks, coordinates=where))
        times.append(step_time(rehearsal, repeats, table, axes, inputs, states.in_units))
        passes |= seconds_of_stages(rehearsal, repeats, table)
    time = times[0]
    if entry is not None:
        time = _with_bubble(times, passes, staged.schedule)
    numbers = f"rank {ran[0]} was" if len(ran) == 1 else f"ranks {' and '.join(map(str, ran))} were"
    notes.insert(0, f"{numbers} simulated for {steps} steps: the training code ran on tensors without values")
    if on_host:
        notes.append(
            f"{on_host / 2**30:.2f} GiB per rank are offloaded to host memory, at most; the time of copies to and "
            "from the host, and of an optimizer that runs there, is not included in the time of a step"
        )
    padded = padding_note(program, skeleton, *padding)
    if padded is not None:
        notes.append(padded)
    ranks_found = tuple(memory)
    outside = table.outside(axes)

    given = {
        "model": model,
        "plan": plan,
        "batch": batch,
        "optimizer": optimizer,
        "device": table,
        "steps": steps,
        "loss": loss,
        "load": load,
        "rank": asked,
        "reduce_depth": reduce_depth,
    }
    return Estimate(program, axes, table, ranks_found, outside, time, tuple(notes), given, padding_bytes=padding[0])


def _with_bubble(times: list[StepTime], passes: dict[tuple[int, str], float], schedule: Schedule) -> StepTime:
    """The time of the rank that is busiest, with what it waits for other stages."""
    slowest = max(range(len(times)), key=lambda n: times[n].device_seconds)
    counts = Counter((action.stage, action.kind) for actions in schedule.actions for action in actions)

    def seconds(stage: int, kind: str) -> float:
        if kind == "F":
            own = passes.get((stage, "F"), 0.0) / counts[stage, "F"]
        else:
            whole, halves = counts[stage, "B"], counts[stage, "W"]
            weights = passes.get((stage, "W"), 0.0) / max(halves, 1)
            inputs = (passes.get((stage, "B"), 0.0) - whole * weights) / max(whole + counts[stage, "I"], 1)
            own = {"B": inputs + weights, "I": inputs, "W": weights}[kind]
        return own if kind == "W" else own + exposed[schedule.rank_of[stage]]

    waits = [sum(action.kind != "W" for action in actions) for actions in schedule.actions]
    exposed = [time.exposed / number for time, number in zip(times, waits)]
    busy = sum(seconds(action.stage, action.kind) for action in schedule.actions[slowest])
    return replace(times[slowest], bubble=max(0.0, step_of_stages(schedule, seconds) - busy))


def routing_of(program: Program, load: float | list[float], rank: int) -> Routing:
    """How tokens choose among the experts of a rank; ``load`` as in :func:`estimate`."""
    sizes = dict(zip(program.axes.names, program.axes.sizes))
    experts = _expert_axes(program)
    coordinate = np.unravel_index(rank, program.axes.sizes)
    index, count = 0, 1
    for axis, own in zip(program.axes.names, coordinate):
        if axis in experts:
            index, count = index * sizes[axis] + int(own), count * sizes[axis]
    if isinstance(load, int | float):
        return Routing(factor=float(load), share=(index, count))
    return Routing(histogram=tuple(load), share=(index, count))


def _expert_axes(program: Program) -> tuple[str, ...]:
    return next((i.op.experts for i in program if isinstance(i.op, Local) and i.op.kind == "experts"), ())


def _busiest(program: Program, axes: MeshAxes, load: float | list[float]) -> int:
    """The first rank whose experts get most tokens."""
    own = [axis for axis in program.axes.names if axis in _expert_axes(program)]
    shape = [axes.size(axis) for axis in own]
    if isinstance(load, int | float) or not own or len(load) % math.prod(shape):
        return 0
    shares = np.asarray(load, dtype=np.float64).reshape(math.prod(shape), -1).sum(axis=1)
    found = dict(zip(own, np.unravel_index(int(shares.argmax()), shape)))
    return int(np.ravel_multi_index([int(found.get(name, 0)) for name in axes.names], axes.sizes))
