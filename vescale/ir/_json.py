"""Programs as JSON text and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.placement_types import Placement

from vescale.errors import ProgramTextError
from vescale.ir._instruction import Hook, Instruction
from vescale.ir._operations import (
    Annotate,
    Attention,
    Checkpoint,
    Factory,
    Local,
    Op,
    Place,
    Precision,
    Redistribute,
    Stage,
    Unit,
    Wrap,
)
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

__all__ = ["instructions_from_json", "instructions_to_json"]

_VERSION = 1
_KINDS: dict[str, type[Op]] = {
    "place": Place,
    "wrap": Wrap,
    "redistribute": Redistribute,
    "annotate": Annotate,
    "factory": Factory,
    "attention": Attention,
    "local": Local,
    "unit": Unit,
    "precision": Precision,
    "checkpoint": Checkpoint,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
# Fields of instructions that hold one placement for each axis.
_STAGES = {"placements", "src", "dst", "grad_src", "grad_dst", "inputs", "outputs"}


def instructions_to_json(axes: MeshAxes, instructions: Sequence[Instruction]) -> str:
    """See :meth:`vescale.ir.Program.to_json`."""
    lines = [json.dumps(_instruction(i, axes), separators=(", ", ": ")) for i in instructions]
    mesh = json.dumps(dict(zip(axes.names, axes.sizes)))
    body = ",\n".join(f"    {line}" for line in lines)
    return f'{{\n  "version": {_VERSION},\n  "mesh": {mesh},\n  "instructions": [\n{body}\n  ]\n}}\n'


def instructions_from_json(text: str) -> tuple[MeshAxes, tuple[Instruction, ...]]:
    """See :meth:`vescale.ir.Program.from_json`."""
    try:
        data = json.loads(text)
        if data["version"] != _VERSION:
            raise ProgramTextError(f"version {data['version']!r}; this release reads version {_VERSION}")
        axes = MeshAxes.of({str(name): size for name, size in data["mesh"].items()})
        return axes, tuple(_read_instruction(item, axes) for item in data["instructions"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        detail = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ProgramTextError(f"not a program: {detail}; expected the text of Program.to_json()") from None


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
    data: dict[str, Any] = {"name": _NAMES[type(op)]}
    for field in fields(op):
        value = getattr(op, field.name)
        if isinstance(value, MixedPrecisionPolicy):
            data[field.name] = mp_options(value)
        elif isinstance(value, torch.dtype):
            data[field.name] = dtype_name(value)
        elif isinstance(value, CheckpointPolicy):
            data[field.name] = value.form()
        elif value is not None:
            data[field.name] = _stage(value, axes) if field.name in _STAGES else value
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
            raise ProgramTextError(f"offload_pinned is {values['offload_pinned']!r}, not true or false")
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
            raise ProgramTextError(f"{method!r} is no method of attention")
    return tuple(data.get(axis) for axis in axes)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ProgramTextError(f"{value!r} is not text")
    return value


def _texts(values: Any) -> tuple[str, ...]:
    if isinstance(values, str):
        raise ProgramTextError(f"{values!r} is no list")
    return tuple(_text(value) for value in values)


def _index(value: Any) -> int | str | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | str)):
        raise ProgramTextError(f"index {value!r} is neither a position nor a name")
    return value
