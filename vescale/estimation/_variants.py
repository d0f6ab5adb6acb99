"""Other choices than the plan's: stages of ZeRO, checkpointing, precision, batch and mesh."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import regex
import torch
from torch import nn

from vescale.errors import (
    ArgumentError,
    ArgumentTypeError,
    Coded,
    EstimateError,
    EstimateOptionError,
    PlanValueError,
)
from vescale.estimation._estimate import Estimate
from vescale.placements import RaggedShard, shard_dim
from vescale.plans import (
    CheckpointEntry,
    MeshAxes,
    Plan,
    PrecisionEntry,
    ShardEntry,
    UnitEntry,
    float_dtype_of,
    with_pipeline,
)

WHAT_IF = (
    "batch=16, sequence=4096, stage=2 (of ZeRO), offload=true, checkpoint=full (selective, offload, none), "
    "precision=bfloat16, mesh=dp:4 (axes joined with +), optimizer=sgd, load=1.2, device=h200-141g"
)


_ORDER = ("mesh", "batch", "sequence", "stage", "checkpoint", "precision", "offload", "optimizer", "load", "device")
"""In which changes are made: stages of ZeRO are over the axes of the mesh, and what is offloaded is what they cut."""

_OF_USAGE = (ArgumentTypeError, ArgumentError, EstimateOptionError)

_YES, _NO = ("1", "true", "yes"), ("0", "false", "no")


def what_if(estimate: Estimate, text: str) -> dict[str, Any]:
    """``batch=16,stage=2``: one row of a table; ``error`` says why there is no such estimate.

    Raises ValueError for text of another form.
    """
    changes: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or not value:
            raise EstimateOptionError(f"what-if {part!r}: write NAME=VALUE, as {WHAT_IF}")
        name = "sequence" if name == "seq" else name
        if name in changes:
            raise EstimateOptionError(
                f"what-if {text!r}: {name} is given twice; write a separate --what-if for each value"
            )
        changes[name] = value
    return changed(estimate, changes, text)


def changed(estimate: Estimate, changes: Mapping[str, str], label: str) -> dict[str, Any]:
    """The row of an estimate with other choices."""
    given = dict(estimate.given)
    try:
        for name in sorted(changes, key=lambda name: _ORDER.index(name) if name in _ORDER else 0):
            _change(given, name, changes[name])
        other = estimate.again(**given)
    except Exception as error:
        if not _is_refusal(error):
            raise
        return {"what_if": label, "error": str(error)}
    return {"what_if": label, **row_of(other)}


def _is_refusal(error: Exception) -> bool:
    """Whether the plan, the model or the optimizer does not take a choice that is possible."""
    return isinstance(error, Coded) and not isinstance(error, _OF_USAGE)


def row_of(estimate: Estimate) -> dict[str, Any]:
    peak = estimate.peak
    sizes = {k: sum(v.values()) if isinstance(v, dict) else v for k, v in peak.categories.items()}
    return {
        "peak_bytes": estimate.peak_bytes,
        "needed_bytes": estimate.needed_bytes,
        "fits": estimate.fits,
        "step_seconds": estimate.step_seconds,
        "device_seconds": estimate.time.device_seconds,
        "host_seconds": estimate.time.host,
        **sizes,
    }


def _change(given: dict[str, Any], name: str, value: str) -> None:
    plan: Plan = given["plan"]
    if name in ("batch", "sequence"):
        number, dim = _number(name, value), 0 if name == "batch" else 1
        given["batch"] = {key: _resized(x, dim, number) for key, x in given["batch"].items()}
    elif name == "stage":
        if value not in ("0", "1", "2", "3"):
            raise EstimateOptionError(f"what-if stage={value}: write 0, 1, 2 or 3")
        given["plan"] = zero_plan(plan, batch_axes(plan), _number(name, value), _units_beside(plan, given["model"]))
    elif name == "checkpoint":
        given["plan"] = _checkpointed(plan, value, unit_paths(given["model"]))
    elif name == "offload":
        if value.lower() not in (*_YES, *_NO):
            raise EstimateOptionError(f"what-if offload={value}: write true or false")
        units = _units_beside(plan, given["model"])
        given["plan"] = _with_offload(plan, units) if value.lower() in _YES else _without_offload(plan)
    elif name == "precision":
        given["plan"] = _with_precision(plan, value)
    elif name == "mesh":
        given["plan"] = _on_mesh(plan, value)
    elif name == "load":
        load = math.nan
        with contextlib.suppress(ValueError):
            load = float(value)
        if not 0 < load < math.inf:
            raise EstimateOptionError(f"what-if load={value}: write a multiple of the mean, such as 1.2")
        given["load"] = load
    elif name in ("optimizer", "device"):
        given[name] = value
    else:
        raise EstimateOptionError(f"what-if {name!r}: write one of {WHAT_IF}")


def _number(name: str, value: str) -> int:
    if not value.isdecimal() or (name != "stage" and not int(value)):
        raise EstimateOptionError(f"what-if {name}={value}: write an integer")
    return int(value)


def _resized(x: Any, dim: int, size: int) -> Any:
    if isinstance(x, torch.Tensor) and x.ndim > dim:
        shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
        return torch.empty(shape, dtype=x.dtype, device="meta")
    if isinstance(x, tuple | list) and len(x) > dim and all(type(n) is int for n in x):
        return (*x[:dim], size, *x[dim + 1 :])
    return x


def batch_axes(plan: Plan) -> tuple[str, ...]:
    """Axes over which inputs of the model are cut along dim 0.

    Args:
        plan: whose inputs have shard entries.
    """
    found = {
        axis: None
        for entry in plan.entries
        if isinstance(entry, ShardEntry) and entry.path.text.startswith("<in")
        for axis, placement in entry.placements
        if shard_dim(placement) == 0
    }
    return tuple(axis for axis in plan.axes.names if axis in found)


def zero_plan(plan: Plan, axes: tuple[str, ...], stage: int, units: tuple[str, ...] = ()) -> Plan:
    """``plan`` with parameters, gradients and optimizer state at rest in parts over ``axes``; stage 0: whole. Entries that
    already cut parameters raggedly are left out, and those that make them whole while they run. The plan's own units stay,
    with their mixed precision and offload; ``units`` are modules beside them, as :func:`zero_units` gives them.

    Raises PlanError for a stage that there is not, and where no axis has several ranks.
    """
    if stage not in (0, 1, 2, 3):
        raise EstimateError(f"there is no stage {stage} of ZeRO; pass 0, 1, 2 or 3")
    own = [axis for axis in axes if plan.axes.size(axis) > 1]
    if stage and not own:
        raise EstimateError(
            "none of the axes over which the plan shards the batch has several ranks, so that parameters cannot be "
            "sharded"
        )
    found = _without(_without_ragged(plan), UnitEntry)
    if stage:
        found.zero(3, axis=own)
        forward, backward = (None, None) if stage == 3 else (False, None if stage == 2 else False)
        own_units = [entry for entry in plan.entries if isinstance(entry, UnitEntry)]
        for entry in own_units:
            found.add(replace(entry, reshard_after_forward=forward, reshard_after_backward=backward))
        named = {entry.path.text for entry in own_units}
        for path in units if stage < 3 else ():
            if path not in named:
                found.unit(path, reshard_after_forward=forward, reshard_after_backward=backward)
    return with_pipeline(found, plan.pipeline_entry)


def _without_ragged(plan: Plan) -> Plan:
    """Without the entries that cut parameters raggedly, and those that make them whole while they run."""
    ragged = {
        (entry.path.text, axis)
        for entry in plan.entries
        if isinstance(entry, ShardEntry)
        for axis, placement in entry.placements
        if isinstance(placement, RaggedShard)
    }
    found = Plan(plan.axes)
    for entry in plan.entries:
        if isinstance(entry, ShardEntry):
            left = tuple((axis, p) for axis, p in entry.placements if (entry.path.text, axis) not in ragged)
            if not left:
                continue
            entry = replace(entry, placements=left)
        found.add(entry)
    return with_pipeline(found, plan.pipeline_entry)


def zero_table(estimate: Estimate) -> list[dict[str, Any]]:
    """Stages 0 to 3, and for every divisor of the axis of the batch stage 3 over that many ranks with replicas (HSDP).

    Args:
        estimate: of a plan with ZeRO-3, or without ZeRO.
    """
    plan: Plan = estimate.given["plan"]
    rows = []
    for stage in range(4):
        rows.append({"stage": str(stage), **changed(estimate, {"stage": str(stage)}, f"stage={stage}")})
    data = [axis for axis in batch_axes(plan) if plan.axes.size(axis) > 1]
    if len(data) == 1:
        size = plan.axes.size(data[0])
        for part in (n for n in range(2, size) if size % n == 0):
            given = dict(estimate.given)
            try:
                given["plan"] = hybrid_plan(plan, data[0], part)
                row = row_of(estimate.again(**given))
            except Exception as error:
                if not _is_refusal(error):
                    raise
                row = {"error": str(error)}
            rows.append({"stage": f"HSDP {size // part}x{part}", **row})
    return [{key: value for key, value in row.items() if key != "what_if"} for row in rows]


def hybrid_plan(plan: Plan, axis: str, part: int) -> Plan:
    """Stage 3 of ZeRO over ``part`` neighbours on ``axis``, which becomes two axes: replicas, and those that share."""
    replicas = f"{axis}_replicas"
    names: list[str] = []
    sizes: list[int] = []
    for name, size in zip(plan.axes.names, plan.axes.sizes):
        names += [replicas, name] if name == axis else [name]
        sizes += [size // part, part] if name == axis else [size]
    found = Plan(dict(zip(names, sizes)))
    for entry in _without_ragged(plan).entries:
        if isinstance(entry, ShardEntry) and any(own == axis for own, _ in entry.placements):
            placements = tuple(
                pair
                for own, p in entry.placements
                for pair in (((replicas, p), (own, p)) if own == axis else ((own, p),))
            )
            entry = replace(entry, placements=placements)
        found.add(entry)
    return zero_plan(with_pipeline(found, plan.pipeline_entry), (axis,), 3)


def unit_paths(model: nn.Module) -> tuple[str, ...]:
    """Expressions for the repeated blocks of a model: the items of its outermost lists."""
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    return tuple(re.escape(path) + r"\.\d+" for path in outer)


def zero_units(model: nn.Module, held: Collection[str] = ()) -> tuple[str, ...]:
    """Expressions for the units that the engine makes of a model without unit entries: its repeated blocks, and the model
    itself if blocks do not hold all parameters. ``held``: modules that are units of the plan."""
    found = unit_paths(model)
    parameters = [name for name, _ in model.named_parameters()]
    blocks = {
        path: expression
        for path, _ in model.named_modules()
        for expression in found
        if re.fullmatch(expression, path) and any(name.startswith(f"{path}.") for name in parameters)
    }
    beside = [path for path in blocks if not any(_holds(one, path) for one in held)]
    names = dict.fromkeys(blocks[path] if len(beside) == len(blocks) else re.escape(path) for path in beside)
    rest = [name for name in parameters if not any(_holds(one, name) for one in (*blocks, *held))]
    return (*names, "") if rest else tuple(names)


def _units_beside(plan: Plan, model: nn.Module) -> tuple[str, ...]:
    own = [entry.path.pattern for entry in plan.entries if isinstance(entry, UnitEntry) and entry.path.text]
    paths = [path for path, _ in model.named_modules()] if own else []
    return zero_units(model, [path for path in paths if path and any(regex.fullmatch(one, path) for one in own)])


def _holds(path: str, name: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _checkpointed(plan: Plan, policy: str, units: tuple[str, ...]) -> Plan:
    if policy not in ("none", "full", "selective", "offload"):
        raise EstimateOptionError(f"what-if checkpoint={policy}: write none, full, selective or offload")
    found = _without(plan, CheckpointEntry)
    if policy == "none":
        return found
    if not units:
        raise EstimateError("the model has no list of blocks (nn.ModuleList) whose activations could be checkpointed")
    for path in units:
        found.checkpoint(path, policy)
    return found


def _with_precision(plan: Plan, dtype: str) -> Plan:
    try:
        float_dtype_of("", dtype)
    except PlanValueError:
        raise EstimateOptionError(
            f"what-if precision={dtype}: write a floating-point dtype, such as bfloat16 or float32"
        ) from None
    found = _without(plan, PrecisionEntry)
    return found.precision("", param=dtype, reduce="float32")


def _with_offload(plan: Plan, units: tuple[str, ...]) -> Plan:
    found = _without(plan, UnitEntry)
    own = [entry for entry in plan.entries if isinstance(entry, UnitEntry)]
    for entry in own:
        found.add(replace(entry, offload_pinned=bool(entry.offload_pinned)))
    named = {entry.path.text for entry in own}
    for path in units:
        if path not in named:
            found.unit(path, offload_policy={"pin_memory": False})
    return found


def _without_offload(plan: Plan) -> Plan:
    found = Plan(plan.axes)
    for entry in plan.entries:
        found.add(replace(entry, offload_pinned=None) if isinstance(entry, UnitEntry) else entry)
    return with_pipeline(found, plan.pipeline_entry)


def _on_mesh(plan: Plan, text: str) -> Plan:
    """``dp:4+tp:2``."""
    try:
        axes = MeshAxes.parse(text.replace(":", "=").replace("+", ","))
    except ValueError as error:
        raise EstimateOptionError(f"what-if mesh={text}: write axes and sizes as dp:4+tp:2 ({error})") from None
    found = Plan(axes)
    for entry in plan.entries:
        found.add(entry)
    return with_pipeline(found, plan.pipeline_entry)


def _without(plan: Plan, kind: type) -> Plan:
    found = Plan(plan.axes)
    for entry in plan.entries:
        if not isinstance(entry, kind):
            found.add(entry)
    return with_pipeline(found, plan.pipeline_entry)
