"""``Program``: what a plan does to a model, as an ordered tuple of frozen instructions, each with its operation."""

from __future__ import annotations

import enum
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any, Literal, get_args

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.errors import ProgramTextError
from vescale.ir._findings import merge_repeats
from vescale.placements import local_region
from vescale.plans import (
    ATTENTION_METHODS,
    AttentionMethod,
    CheckpointPolicy,
    MeshAxes,
    Source,
    checkpoint_budget,
    checkpoint_policy,
    dtype_name,
    float_dtype_of,
    mp_options,
    mp_policy_of,
    parse_placement,
    placement_text,
)

# What an instruction does: small frozen values with a text form.
#
# Placements are complete: one for each axis of the mesh, in mesh order. ``None`` on an axis means "as it arrives": the plan
# says nothing there and nothing is changed.


# One placement for each mesh axis; None where the plan leaves the axis as it is.
Stage = tuple[Placement | None, ...]


def stage_text(stage: Sequence[Placement | None], axes: MeshAxes) -> str:
    """``dp=R,tp=S(0)``; axes left alone are left out, ``-`` when all are."""
    return ",".join(f"{axis}={placement_text(p)}" for axis, p in zip(axes, stage) if p is not None) or "-"


@dataclass(frozen=True)
class Place:
    """A parameter or buffer becomes a DTensor with these placements at rest; complete, no None.

    The same ragged cut on several axes is one over all their ranks (:mod:`vescale.ir._units`).
    """

    placements: Stage

    def text(self, axes: MeshAxes) -> str:
        return f"place({stage_text(self.placements, axes)})"


@dataclass(frozen=True)
class Wrap:
    """An input of the model becomes a DTensor with these placements; complete, no None.

    ``given``: a plain tensor is the ``global`` one, the same on every rank, and is cut here; or each rank's ``local`` part.
    """

    placements: Stage
    given: Literal["global", "local"] = "global"

    def text(self, axes: MeshAxes) -> str:
        return f"wrap({stage_text(self.placements, axes)}{',given=local' if self.given == 'local' else ''})"


@dataclass(frozen=True)
class Redistribute:
    """A tensor is redistributed to ``dst``, and its gradient to ``grad_dst`` in backward.

    ``src`` is the placement that the plan expects the tensor to have on arrival (checked at run time where it is not
    None). In backward, the gradient is first redistributed to ``grad_src``, if it is not None, and then to ``grad_dst``.
    If ``grad_dst`` is None, as a whole or on one axis, the boundary rule applies: the gradient gets the placement with
    which the tensor arrived, or Replicate if the tensor arrived Partial. On an axis where ``dst`` is None as well, the
    gradient is left unchanged. ``dst == src == Replicate`` has an effect: a Partial gradient is reduced here.

    Of a parameter or buffer (``target`` names it): at FORWARD_PRE ``src`` is its placement at rest and ``dst`` the one that
    the module computes with until its forward ends; the gradient goes back to ``src`` by the same rule.
    """

    dst: Stage
    src: Stage | None = None
    grad_src: Stage | None = None
    grad_dst: Stage | None = None

    def text(self, axes: MeshAxes) -> str:
        before = stage_text(self.src, axes) if self.src is not None else ""
        parts = [f"{before}->{stage_text(self.dst, axes)}"]
        if self.grad_src is not None or self.grad_dst is not None:
            ends = [stage_text(stage, axes) if stage is not None else "" for stage in (self.grad_src, self.grad_dst)]
            parts.append(f"grad:{ends[0]}->{ends[1]}")
        return f"redist({';'.join(parts)})"


@dataclass(frozen=True)
class Annotate:
    """A plain local tensor is labelled with these placements; nothing moves."""

    placements: Stage

    def text(self, axes: MeshAxes) -> str:
        return f"annotate({stage_text(self.placements, axes)})"


@dataclass(frozen=True)
class Factory:
    """Tensors made inside the module's forward get these placements; complete, no None."""

    placements: Stage

    def text(self, axes: MeshAxes) -> str:
        return f"factory({stage_text(self.placements, axes)})"


@dataclass(frozen=True)
class Attention:
    """How attention inside the module's forward works along axes over which the sequence is cut; None: the plan gives no
    method."""

    methods: tuple[AttentionMethod | None, ...]

    def text(self, axes: MeshAxes) -> str:
        parts = (f"{axis}={method}" for axis, method in zip(axes, self.methods) if method is not None)
        return f"attention({','.join(parts)})"


@dataclass(frozen=True)
class Local:
    """The module's forward runs on local tensors; its borders are brought to these placements.

    Of experts: over which axes whole ones are spread, and how many there are; along which axes each of them is cut; biases
    (names relative to the module) that only the first rank of those adds, because the results of the ranks are summed.
    """

    kind: str | None
    dispatch: str | None
    inputs: Stage
    outputs: Stage
    experts: tuple[str, ...] = ()
    num_experts: int = 0
    features: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()

    def text(self, axes: MeshAxes) -> str:
        names = [f"{name}={value}" for name, value in (("kind", self.kind), ("dispatch", self.dispatch)) if value]
        names += [f"experts={self.num_experts} over {','.join(self.experts)}"] if self.experts else []
        names += [f"features over {','.join(self.features)}"] if self.features else []
        names += [f"added once: {','.join(self.biases)}"] if self.biases else []
        names += [f"in={stage_text(self.inputs, axes)}", f"out={stage_text(self.outputs, axes)}"]
        return f"local({';'.join(names)})"


@dataclass(frozen=True)
class Unit:
    """Parameters (``names``, relative to the module) that rest sharded over the axes ``shard`` and are replicated there
    while the module computes: gathered together before its forward and its backward, their gradients reduced together.

    Several axes of ``shard``, in the order of the mesh, shard once over all their ranks (:mod:`vescale.ir._units`).
    ``replicate``: axes of replicas, over which those gradients are summed, too. ``reshard_after_forward``,
    ``reshard_after_backward``: see :meth:`vescale.Plan.unit`; None of the former is the default of the module's position.
    ``mp_policy``, ``offload_pinned``: see :class:`vescale.plans.UnitEntry`.
    """

    names: tuple[str, ...]
    shard: tuple[str, ...]
    replicate: tuple[str, ...] = ()
    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool = True
    mp_policy: MixedPrecisionPolicy | None = None
    offload_pinned: bool | None = None

    def text(self, axes: MeshAxes) -> str:
        parts = [f"shard={','.join(self.shard)}"]
        parts += [f"replicate={','.join(self.replicate)}"] if self.replicate else []
        parts += [] if self.reshard_after_forward is None else [f"reshard_after_forward={self.reshard_after_forward}"]
        parts += [] if self.reshard_after_backward else ["reshard_after_backward=False"]
        parts += [f"{name}={value}" for name, value in mp_options(self.mp_policy).items()]
        parts += [] if self.offload_pinned is None else [f"offload={'pinned' if self.offload_pinned else 'pageable'}"]
        return f"unit({';'.join([*parts, ','.join(self.names)])})"


@dataclass(frozen=True)
class Precision:
    """Dtypes; None: as it is.

    Of a module (target ``<self>``): its floating inputs are cast to ``param``, its floating outputs to ``output``. Of a
    parameter (``target`` names it): it is cast to ``param`` while the module computes, and its gradient is reduced in
    ``reduce``.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None

    def text(self, axes: MeshAxes) -> str:
        dtypes = {"param": self.param, "reduce": self.reduce, "output": self.output}
        return f"precision({','.join(f'{name}={dtype_name(d)}' for name, d in dtypes.items() if d is not None)})"


@dataclass(frozen=True)
class Checkpoint:
    """What the module's forward computes is computed again in backward, but for what ``policy`` saves.

    Paths in ``policy.save`` are those of single modules, relative to this one. ``budget_gib``: what all modules with this
    ``budget`` (the number of the entry in the plan) may save together.
    """

    policy: CheckpointPolicy
    budget_gib: float | None = None
    budget: int = 0

    def text(self, axes: MeshAxes) -> str:
        limit = "" if self.budget_gib is None else f";budget={self.budget_gib:g} GiB of entry {self.budget}"
        return f"checkpoint({self.policy.text()}{limit})"


Op = Place | Wrap | Redistribute | Annotate | Factory | Attention | Local | Unit | Precision | Checkpoint


def part_sizes(size: int, *num_ranks: int) -> tuple[int, ...]:
    """Of a dim that ``Shard`` cuts along axes with ``num_ranks``: what each rank has."""
    cuts = (Shard(0),) * len(num_ranks)
    coordinates = itertools.product(*map(range, num_ranks))
    return tuple(local_region((size,), cuts, num_ranks, at).local_shape[0] for at in coordinates)


# ``Instruction``: one step that the runtime executes, at one hook of one module.


class Hook(enum.Enum):
    """When an instruction runs, relative to the module it names; in the order of a training step."""

    INIT = "init"  # parallelize(): parameters and buffers are placed
    FORWARD_PRE = "forward_pre"  # before the forward, on inputs and on parameters (unshard)
    FORWARD = "forward"  # around the forward: factory and local regions
    FORWARD_POST = "forward_post"  # after it, on outputs
    BACKWARD = "backward"  # on a parameter's gradient


@dataclass(frozen=True)
class Instruction:
    """``path.hook:target:index:op``, for example ``model.layers.0.mlp.forward_pre:<in>:0:redist(->tp=R)``.

    Attributes:
        path: the module's name in the model, ``""`` for the model itself. A module with several names has instructions
            under the first only.
        hook: when it runs.
        target: ``<in>``, ``<out>``, or the name of a parameter or buffer relative to the module; ``<self>`` for regions
            and units. A tensor with several names (tied weights) is placed once, under the first.
        index: which input or output: its name in the signature of ``forward``, however it is passed, or its position
            where the signature has no name for it. None: where there is a choice, every one that no other instruction of
            the same path, hook and target names.
        op: what is done.
        source: the plan's line that asked for it; not part of the instruction's identity.
    """

    path: str
    hook: Hook
    target: str
    index: int | str | None
    op: Op
    source: Source | None = field(default=None, compare=False)

    def text(self, axes: MeshAxes) -> str:
        place = f"{self.path}.{self.hook.value}" if self.path else self.hook.value
        return f"{place}:{self.target}:{'*' if self.index is None else self.index}:{self.op.text(axes)}"


# What two programs do differently.

_Place = tuple[str, Hook, str, int | str | None]


@dataclass(frozen=True)
class Change:
    """An instruction that only one program has (the other is None), or that does something else at the same place."""

    before: Instruction | None
    after: Instruction | None

    @property
    def path(self) -> str:
        found = self.before or self.after
        assert found is not None
        return found.path


@dataclass(frozen=True)
class ProgramDiff:
    """False when the programs are equal. ``str()`` gives lines that begin with ``-``, ``+`` or ``~`` (before => after),
    repeated layers merged."""

    axes_before: MeshAxes
    axes_after: MeshAxes
    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.changes) or self.axes_before != self.axes_after

    def __str__(self) -> str:
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        if self.axes_before != self.axes_after:
            yield f"~ mesh {self.axes_before} => {self.axes_after}"
        for path, (sign, rest), _ in merge_repeats(
            (change.path, self._sign_and_rest(change)) for change in self.changes
        ):
            yield f"{sign} {path}{rest}"

    def _sign_and_rest(self, change: Change) -> tuple[str, str]:
        before = change.before.text(self.axes_before)[len(change.path) :] if change.before is not None else ""
        after = change.after.text(self.axes_after)[len(change.path) :] if change.after is not None else ""
        if change.before is None or change.after is None:
            return ("+", after) if change.before is None else ("-", before)
        return "~", f"{before} => {change.after.op.text(self.axes_after)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the mesh of each side when they differ, and every change, layers not merged."""
        data: dict[str, Any] = {"equal": not self, "changes": []}
        if self.axes_before != self.axes_after:
            data["mesh"] = {"before": str(self.axes_before), "after": str(self.axes_after)}
        for change in self.changes:
            data["changes"].append(
                {
                    "before": change.before.text(self.axes_before) if change.before is not None else None,
                    "after": change.after.text(self.axes_after) if change.after is not None else None,
                }
            )
        return data


def _same(one: Instruction | None, other: Instruction | None, axes: MeshAxes, other_axes: MeshAxes) -> bool:
    """The same on the axes' names, whatever their sizes and order."""
    if one is None or other is None:
        return False
    return one.text(axes) == other.text(other_axes)


def _by_place(instructions: Sequence[Instruction]) -> dict[_Place, list[Instruction]]:
    places: dict[_Place, list[Instruction]] = {}
    for i in instructions:
        places.setdefault((i.path, i.hook, i.target, i.index), []).append(i)
    return places


# Programs as JSON text and back.

_VERSION = 1
_KINDS: dict[str, type[Op]] = {kind.__name__.lower(): kind for kind in get_args(Op)}
# Fields of instructions that hold one placement for each axis.
_STAGES = {"placements", "src", "dst", "grad_src", "grad_dst", "inputs", "outputs"}


def _instruction(instruction: Instruction, axes: MeshAxes) -> dict[str, Any]:
    data: dict[str, Any] = {"path": instruction.path, "hook": instruction.hook.value, "target": instruction.target}
    if instruction.index is not None:
        data["index"] = instruction.index
    data["op"] = _op(instruction.op, axes)
    if instruction.source is not None:
        source = instruction.source
        data["source"] = {"file": source.file, "line": source.line}
        if source.column is not None:
            data["source"]["column"] = source.column
    return data


def _op(op: Op, axes: MeshAxes) -> dict[str, Any]:
    data: dict[str, Any] = {"name": type(op).__name__.lower()}
    for own in fields(op):
        value = getattr(op, own.name)
        if isinstance(value, MixedPrecisionPolicy):
            data[own.name] = mp_options(value)
        elif isinstance(value, torch.dtype):
            data[own.name] = dtype_name(value)
        elif isinstance(value, CheckpointPolicy):
            data[own.name] = value.form()
        elif value is not None:
            data[own.name] = _stage(value, axes) if own.name in _STAGES else value
    if isinstance(op, Attention):
        data["methods"] = {axis: method for axis, method in zip(axes, op.methods) if method is not None}
    return data


def _stage(stage: Stage, axes: MeshAxes) -> dict[str, str]:
    return {axis: placement_text(placement) for axis, placement in zip(axes, stage) if placement is not None}


def _read_instruction(data: Mapping[str, Any], axes: MeshAxes) -> Instruction:
    source = data.get("source")
    return Instruction(
        _text(data["path"]),
        Hook(data["hook"]),
        _text(data["target"]),
        _index(data.get("index")),
        _read_op(data["op"], axes),
        Source(_text(source["file"]), int(source["line"]), source.get("column")) if source is not None else None,
    )


def _read_op(data: Mapping[str, Any], axes: MeshAxes) -> Op:
    name = data["name"]
    if name not in _KINDS:
        raise ProgramTextError(f"op {name!r} is none of {', '.join(_KINDS)}")
    kind: type[Any] = _KINDS[name]
    known = {field.name for field in fields(kind)}
    unknown = sorted(set(data) - known - {"name"})
    if unknown:
        raise ProgramTextError(f"a {name} has no {unknown[0]!r}")
    values: dict[str, Any] = {
        key: _read_stage(value, axes) if key in _STAGES else value for key, value in data.items() if key in known
    }
    if kind is Unit:
        for key in ("names", "shard", "replicate"):
            values[key] = _texts(values.get(key, ()))
        for axis in (*values["shard"], *values["replicate"]):
            axes.index(axis)
        if not values["shard"]:
            raise ProgramTextError("a unit that is sharded over no axis")
        values["mp_policy"] = mp_policy_of(values.get("mp_policy"))
        if not isinstance(values.get("offload_pinned"), bool | None):
            raise ProgramTextError(f"offload_pinned is {values['offload_pinned']!r}; expected true or false")
    if kind is Precision:
        values = {key: float_dtype_of(key, value) for key, value in values.items()}
    if kind is Attention:
        values["methods"] = _read_methods(data["methods"], axes)
    if kind is Checkpoint:
        values["policy"] = checkpoint_policy(data["policy"])
        values["budget_gib"] = checkpoint_budget(values.get("budget_gib"), values["policy"])
        if isinstance(values.get("budget"), bool) or not isinstance(values.get("budget", 0), int):
            raise ProgramTextError(f"budget is {values['budget']!r}, not the number of an entry")
    if kind is Local:
        values = {"kind": None, "dispatch": None, **values}
        for key in ("experts", "features", "biases"):
            values[key] = _texts(values.get(key, ()))
        for axis in (*values["experts"], *values["features"]):
            axes.index(axis)
    return kind(**values)


def _read_stage(data: Mapping[str, str], axes: MeshAxes) -> tuple[Placement | None, ...]:
    for axis in data:
        axes.index(axis)
    return tuple(parse_placement(data[axis]) if axis in data else None for axis in axes)


def _read_methods(data: Mapping[str, Any], axes: MeshAxes) -> tuple[AttentionMethod | None, ...]:
    for axis, method in data.items():
        axes.index(axis)
        if method not in ATTENTION_METHODS:
            raise ProgramTextError(f"{method!r} is not a method of attention")
    return tuple(data.get(axis) for axis in axes)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ProgramTextError(f"{value!r} is not text")
    return value


def _texts(values: Any) -> tuple[str, ...]:
    if isinstance(values, str):
        raise ProgramTextError(f"{values!r} is not a list")
    return tuple(_text(value) for value in values)


def _index(value: Any) -> int | str | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | str)):
        raise ProgramTextError(f"index {value!r} is neither a position nor a name")
    return value


@dataclass(frozen=True)
class Program:
    """The instructions of one model on one mesh; the same on every rank.

    Attributes:
        axes: the mesh's axis names and sizes.
        instructions: in module order, then hook order, then the order of the plan.
    """

    axes: MeshAxes
    instructions: tuple[Instruction, ...]

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    def __len__(self) -> int:
        return len(self.instructions)

    def to_text(self, *, merge_layers: bool = False) -> str:
        """One instruction a line; the same under every hash seed and on every rank.

        ``merge_layers`` writes the instructions that repeated layers share once, as ``model.layers.0-31.mlp...``.
        """
        if not merge_layers:
            return "".join(f"{instruction.text(self.axes)}\n" for instruction in self.instructions)
        merged = merge_repeats((i.path, i.text(self.axes)[len(i.path) :]) for i in self.instructions)
        return "".join(f"{path}{rest}\n" for path, rest, _ in merged)

    def to_json(self) -> str:
        """The program as JSON text, with the plan's lines; :meth:`from_json` reads it back equal."""
        lines = [json.dumps(_instruction(i, self.axes), separators=(", ", ": ")) for i in self.instructions]
        mesh = json.dumps(dict(zip(self.axes.names, self.axes.sizes)))
        body = ",\n".join(f"    {line}" for line in lines)
        return f'{{\n  "version": {_VERSION},\n  "mesh": {mesh},\n  "instructions": [\n{body}\n  ]\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> Program:
        """Raises ValueError saying what is wrong with the text. Nothing in it is executed.

        Args:
            text: what :meth:`to_json` returned.
        """
        try:
            data = json.loads(text)
            if data["version"] != _VERSION:
                raise ProgramTextError(f"version {data['version']!r}; this release reads version {_VERSION}")
            axes = MeshAxes.of({str(name): size for name, size in data["mesh"].items()})
            return cls(axes, tuple(_read_instruction(item, axes) for item in data["instructions"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            detail = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ProgramTextError(f"not a program: {detail}; expected the text of Program.to_json()") from None

    def diff(self, other: Program) -> ProgramDiff:
        """What ``other`` does differently; false when nothing, ``str()`` of it for people."""
        old, new = _by_place(self.instructions), _by_place(other.instructions)
        changes = []
        for place in dict.fromkeys((*old, *new)):  # the order of instructions matters only among those of one place
            pairs = list(zip_longest(old.get(place, ()), new.get(place, ())))
            changes += [Change(a, b) for a, b in pairs if not _same(a, b, self.axes, other.axes)]
        return ProgramDiff(self.axes, other.axes, tuple(changes))

    def digest(self) -> str:
        """SHA-256 of the mesh and the text: equal on two ranks exactly when they would do the same."""
        return hashlib.sha256(f"{self.axes}\n{self.to_text()}".encode()).hexdigest()
