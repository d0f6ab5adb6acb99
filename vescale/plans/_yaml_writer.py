""":class:`Plan` to YAML text, for people to edit, which reads back equal."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal

import regex
import yaml

from vescale.errors import YamlPlanError
from vescale.plans._entries import (
    ALL,
    AnnotateEntry,
    AttentionEntry,
    AxisPlacements,
    CheckpointEntry,
    FactoryEntry,
    LocalEntry,
    PrecisionEntry,
    RedistributeEntry,
    ShardEntry,
    UnitEntry,
    dtype_name,
    mp_options,
    phase_text,
)
from vescale.plans._placement_text import placement_text
from vescale.plans._plan_entries import PipelineEntry, PlanEntries

_PLAIN = regex.compile(r"[A-Za-z0-9_<($.\\][A-Za-z0-9_.\\<>()|${}:+*?]*(?<!:)")
# The repeated layers of a model at the beginning of a path.
_LAYERS = regex.compile(r"([A-Za-z0-9_.]+\.\\d\+)\.")
_MIN_USES = 3  # of a variable
_COMMENT_WIDTH = 78


def plan_text(plan: PlanEntries, comments: Mapping[str, str] | None = None, head: Sequence[str] = ()) -> str:
    """See :meth:`Plan.to_yaml`. ``comments``: by path, of the first entry that has it; ``head``: lines before the plan."""
    sizes = ", ".join(f"{name}: {size}" for name, size in zip(plan.axes.names, plan.axes.sizes))
    variables = _variables(plan)
    lines = [line for text in head for line in _comment(text, "")]
    lines += ["version: 1", f"mesh: {{{sizes}}}"]
    lines += ["vars: " + _braces(f"{name}: {_quoted(text)}" for text, name in variables.items())] if variables else []
    kinds: dict[str, dict[str, list[str]]] = {}
    units = []
    for entry in plan.entries:
        if isinstance(entry, UnitEntry):
            units.append(f"  - {_unit(entry)}")
            continue
        section, value = _section_value(entry)
        kinds.setdefault(section, {}).setdefault(_with_variables(entry.path.text, variables), []).append(value)
    for section in ("shard", "redistribute", "annotate", "factory", "attention", "local", "precision", "checkpoint"):
        if section in kinds:
            written = {_with_variables(path, variables): text for path, text in (comments or {}).items()}
            lines += [f"{section}:", *_section(kinds[section], written if section == "shard" else {})]
    if units:
        lines += ["units:", *units]
    if plan.pipeline_entry is not None:
        lines.append(f"pipeline: {_pipeline(plan.pipeline_entry)}")
    return "\n".join(lines) + "\n"


def _variables(plan: PlanEntries) -> dict[str, str]:
    """Common beginnings of paths that become variables, and their names: ``layer`` if there is one."""
    uses: dict[str, int] = {}
    for entry in plan.entries:
        match = None if isinstance(entry, UnitEntry) else _LAYERS.match(entry.path.text)
        if match is not None:
            uses[match[1]] = uses.get(match[1], 0) + 1
    often = [text for text, number in uses.items() if number >= _MIN_USES]
    if len(often) == 1:
        return {often[0]: "layer"}
    names = [text.removesuffix(r".\d+").replace(".", "_") for text in often]
    return dict(zip(often, names)) if len(set(names)) == len(names) else {}


def _with_variables(path: str, variables: dict[str, str]) -> str:
    match = _LAYERS.match(path)
    name = variables.get(match[1]) if match is not None else None
    return f"${{{name}}}{path[match.end(1) :]}" if match is not None and name is not None else path


def _comment(text: str, indent: str) -> list[str]:
    width = _COMMENT_WIDTH - len(indent)
    return [f"{indent}# {line}" for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)]


def _section(values: dict[str, list[str]], comments: Mapping[str, str]) -> Iterable[str]:
    for path, items in values.items():
        yield from _comment(comments.get(path, ""), "  ")
        if len(items) == 1:
            yield f"  {_scalar(path)}: {items[0]}"
        else:
            yield f"  {_scalar(path)}:"
            yield from (f"    - {item}" for item in items)


def _section_value(
    entry: ShardEntry
    | RedistributeEntry
    | AnnotateEntry
    | FactoryEntry
    | AttentionEntry
    | LocalEntry
    | PrecisionEntry
    | CheckpointEntry,
) -> tuple[str, str]:
    if isinstance(entry, ShardEntry):
        options = [] if entry.phase == ALL else [f"phase: {phase_text(entry.phase)}"]
        options += ["given: local"] if entry.given == "local" else []
        return "shard", _axes(entry.placements, options)
    if isinstance(entry, RedistributeEntry):
        sides = {"src": entry.src, "dst": entry.dst, "grad_src": entry.grad_src, "grad_dst": entry.grad_dst}
        return "redistribute", _braces(f"{side}: {_axes(axes)}" for side, axes in sides.items() if axes is not None)
    if isinstance(entry, AnnotateEntry):
        return "annotate", _axes(entry.placements)
    if isinstance(entry, FactoryEntry):
        return "factory", _axes(entry.placements)
    if isinstance(entry, AttentionEntry):
        return "attention", _braces(f"{axis}: {method}" for axis, method in entry.methods)
    if isinstance(entry, PrecisionEntry):
        dtypes = {"param": entry.param, "reduce": entry.reduce, "output": entry.output}
        return "precision", _braces(f"{name}: {dtype_name(d)}" for name, d in dtypes.items() if d is not None)
    if isinstance(entry, CheckpointEntry):
        return "checkpoint", _checkpoint(entry)
    parts = [f"{name}: {value}" for name, value in (("kind", entry.kind), ("dispatch", entry.dispatch)) if value]
    parts += [f"{name}: {_axes(axes)}" for name, axes in (("in", entry.inputs), ("out", entry.outputs)) if axes]
    return "local", _braces(parts)


def _unit(entry: UnitEntry) -> str:
    named = {
        "reshard_after_forward": entry.reshard_after_forward,
        "reshard_after_backward": entry.reshard_after_backward,
    }
    options = [f"{name}: {json.dumps(value)}" for name, value in named.items() if value is not None]
    if entry.mp_policy is not None:
        values = mp_options(entry.mp_policy).items()
        options.append("mp_policy: " + _braces(f"{name}: {json.dumps(value)}" for name, value in values))
    if entry.offload_pinned is not None:
        options.append(f"offload_policy: {{pin_memory: {json.dumps(entry.offload_pinned)}}}")
    path = _scalar(entry.path.text)
    return _braces([f"path: {json.dumps(entry.path.text)}", *options]) if options else path


def _pipeline(entry: PipelineEntry) -> str:
    if not isinstance(entry.loss, str):
        raise YamlPlanError("pipeline: a callable loss cannot be written as YAML; use a path such as 'out.loss'")
    cut: dict[str, object] = {
        "split_before": [path.text for path in entry.split_before],
        "stages": [[path.text for path in stage] for stage in entry.stages],
        "balance": entry.balance,
        "stages_per_rank": entry.stages_per_rank,
    }
    named = {name: value for name, value in cut.items() if value} | {
        name: getattr(entry, name) for name in ("mesh", "schedule", "microbatches", "loss", "reduce")
    }
    if entry.rows != "batch":
        named["rows"] = entry.rows
    parts = [f"{name}: {json.dumps(value)}" for name, value in named.items()]
    if entry.memory_gib is not None:
        parts.append(f"memory_gib: {Decimal(repr(entry.memory_gib)):f}")  # without an exponent
    if entry.microbatch_shape is not None:
        parts.append(f"microbatch_shape: {list(entry.microbatch_shape)}")
    if entry.costs is not None:
        costs = (f"{_scalar(path.text)}: {Decimal(repr(cost)):f}" for path, cost in entry.costs)
        parts.append(f"costs: {_braces(costs)}")
    return _braces(parts)


def _checkpoint(entry: CheckpointEntry) -> str:
    form = entry.policy.form()
    if isinstance(form, str) and entry.budget_gib is None:
        return form
    options = {"save": form} if isinstance(form, str) else form
    parts = [f"{name}: {json.dumps(value)}" for name, value in options.items()]
    if entry.budget_gib is not None:
        parts.append(f"budget_gib: {Decimal(repr(entry.budget_gib)):f}")  # without an exponent
    return _braces(parts)


def _axes(placements: AxisPlacements, options: Iterable[str] = ()) -> str:
    return _braces([*(f"{axis}: {_flow(placement_text(p))}" for axis, p in placements), *options])


def _braces(parts: Iterable[str]) -> str:
    return "{" + ", ".join(parts) + "}"


def _flow(text: str) -> str:
    """A placement inside braces: quoted where its commas would end it."""
    return f'"{text}"' if "," in text else text


def _scalar(text: str) -> str:
    """A path as a YAML key: plain where it is safe, else in single quotes, where backslashes stand for themselves."""
    if _PLAIN.fullmatch(text) and not text[0].isdigit() and _is_text(text):
        return text
    return _quoted(text)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'" if "\n" not in text else json.dumps(text)


def _is_text(text: str) -> bool:
    """Whether YAML reads the plain scalar as text: not ``on``, ``no``, ``null``."""
    tag = yaml.SafeLoader("").resolve(yaml.ScalarNode, text, (True, False))
    return bool(tag == "tag:yaml.org,2002:str")
