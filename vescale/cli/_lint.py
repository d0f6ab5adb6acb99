"""``vescale lint``: errors and warnings about a plan for a model, before anything runs."""

from __future__ import annotations

import argparse
import functools
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import regex

from vescale.cli._console import new_console, print_json, working
from vescale.cli._inputs import (
    MODEL_HELP,
    PLAN_HELP,
    add_inputs,
    add_json,
    add_mesh,
    inputs_of,
    load_model,
    load_plan,
    parse_mesh,
)
from vescale.cli._main import UsageError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.tensor.placement_types import Placement

    from vescale.ir import Finding
    from vescale.optim import Blocks
    from vescale.plans import Plan


_ROWS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help=PLAN_HELP)
    parser.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    add_mesh(parser)
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="RULE", help="omit the warnings of a rule; may be repeated"
    )
    add_optimizer(parser)
    parser.add_argument(
        "--fix",
        action="store_true",
        help="write entries for implicit communication into PLAN (a file): those that keep the plan valid and reduce "
        "its implicit communication",
    )
    add_inputs(parser, None, 128, "default: 8, or more, so that all ranks get the same number of rows")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """0: nothing found; 1: findings."""
    with working("loading torch"):
        from vescale.errors import EntryError
        from vescale.estimation import forward_reports
        from vescale.ir import Finding
        from vescale.plans import PlanError

    model, mesh = load_model(args.model), parse_mesh(args.mesh)
    rule = parse_optimizer(args.optimizer)
    file = Path(args.plan)
    if args.fix and not file.is_file():
        raise UsageError(
            f"--fix writes into a file, but {args.plan!r} is not one; `vescale zoo {args.plan}` prints a plan"
        )
    fixed: list[str] = []
    note = ""
    try:
        plan = load_plan(args.plan, mesh)
        if args.batch is None:
            args.batch = _rows(plan)
        inputs = inputs_of(model, args)
        with working("tracing the forward"):
            found = _check(plan, model, inputs)
            if inputs and not any(finding.severity == "error" for finding in found):
                look = functools.partial(forward_reports, model, inputs=inputs)
                try:
                    if args.fix:
                        fixed = fix_plan(file, lambda path: load_plan(str(path), mesh), look)
                        plan = load_plan(args.plan, mesh)
                        found = _check(plan, model, inputs)
                    found = (*found, *(Finding("warning", "implicit", text, None, ()) for text in look(plan)))
                except EntryError as error:
                    found = (*found, Finding("error", "unused-output", error.problem, error.source, ()))
                except Exception as error:  # code that reads values, or that takes other inputs
                    message = (str(error).splitlines() or ["no message"])[0]
                    note = f"implicit communication was not checked: {type(error).__name__}: {message}"
        if rule is not None and not any(finding.severity == "error" for finding in found):
            found = (*block_findings(plan, model, rule), *found)
    except PlanError as error:  # the plan cannot even be read
        found = (Finding("error", "plan", error.problem, error.source, ()),)
    findings = [f for f in found if f.severity == "error" or f.rule not in args.ignore]
    if args.json:
        data: dict[str, Any] = {"plan": args.plan, "model": args.model}
        data["findings"] = [_as_dict(finding) for finding in findings]
        print_json({**data, **({"fixed": fixed} if args.fix else {}), **({"note": note} if note else {})})
    else:
        _print(findings, fixed, note)
    return 1 if findings else 0


def _check(plan: Plan, model: nn.Module, inputs: dict[str, Any]) -> tuple[Finding, ...]:
    if plan.pipeline_entry is None:
        from vescale.ir import check

        return check(plan, model, inputs)
    from vescale.pipeline import check_stages

    return check_stages(plan, model, inputs)


def _rows(plan: Plan) -> int:
    """At least 8, the same for each of the ranks that cut the batch: uneven rows communicate where even ones do not."""
    ranks = 1
    if any(_ROWS % size for size in plan.axes.sizes) or math.prod(plan.axes.sizes) > _ROWS:
        from vescale.estimation import batch_axes

        ranks = math.prod(map(plan.axes.size, batch_axes(plan)))
    return ranks * math.ceil(_ROWS / ranks)


def _as_dict(finding: Finding) -> dict[str, Any]:
    data: dict[str, Any] = {"severity": finding.severity, "rule": finding.rule, "problem": finding.problem}
    if finding.source is not None:
        data |= {"file": finding.source.file, "line": finding.source.line, "column": finding.source.column}
    return {**data, "names": list(finding.names)}


def _print(findings: list[Finding], fixed: list[str], note: str) -> None:
    from rich.text import Text

    console = new_console()
    for finding in findings:
        place = f"{finding.source}: " if finding.source is not None else ""
        style = "bold red" if finding.severity == "error" else "yellow"
        console.print(Text(place) + Text(f"{finding.severity}[{finding.rule}]", style) + Text(f": {finding.problem}"))
    for line in fixed:
        console.print(Text("written: ", "green") + Text(line))
    if note:
        console.print(note)
    errors = sum(finding.severity == "error" for finding in findings)
    if findings:
        console.print(f"{_count(errors, 'error')}, {_count(len(findings) - errors, 'warning')}")
    else:
        console.print(Text("no findings", "green"))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


# ``--optimizer``: the rule of block-wise optimizers, that no boundary between ranks may cut a block.


_FORM = "adamw8bit, adamw8bit:block_size=128,min_numel=4096 or adamw8bit:block=32x2048"


@dataclass(frozen=True)
class OptimizerRule:
    """The arguments of ``AdamW8bit`` that decide about blocks."""

    block_size: int = 256
    block: tuple[int, int] | None = None
    min_numel: int = 4096


def add_optimizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--optimizer",
        metavar="NAME",
        help=f"check that no rank boundary divides a block of a block-wise quantized optimizer: {_FORM}",
    )


def parse_optimizer(text: str | None) -> OptimizerRule | None:
    """Raises UsageError for a name or option that there is not."""
    if text is None:
        return None
    name, _, options = text.partition(":")
    found: dict[str, int | tuple[int, int]] = {}
    for option in options.split(",") if options else ():
        match = regex.fullmatch(r"(block_size|min_numel)=(\d+)|(block)=(\d+)x(\d+)", option.strip())
        if match is None or (match[2] == "0" and match[1] == "block_size") or "0" in (match[4], match[5]):
            raise UsageError(f"--optimizer {text!r}: {option!r} is not an option; write {_FORM}.")
        if match[1]:
            found[match[1]] = int(match[2])
        else:
            found["block"] = int(match[4]), int(match[5])
    if name != "adamw8bit":
        raise UsageError(f"--optimizer {text!r}: only adamw8bit has blocks; write {_FORM}.")
    return OptimizerRule(**found)  # type: ignore[arg-type]


def block_findings(plan: Plan, model: nn.Module, rule: OptimizerRule) -> tuple[Finding, ...]:
    """Errors (rule ``optimizer-block``) about trainable parameters whose cut at rest would cut a block; the same problem of
    several layers is one finding.

    Of a ragged placement without units, which the layout planner decides, the granule must be whole blocks.
    """
    from vescale.ir import Finding, Place, lower, name_list
    from vescale.optim import blocks_of

    blocks = blocks_of({"block_size": rule.block_size, "block": rule.block})
    program = lower(plan, model)
    parameters = dict(model.named_parameters())
    merged: dict[tuple[str, object], list[str]] = {}
    for instruction in program:
        name = ".".join(filter(None, (instruction.path, instruction.target)))
        parameter = parameters.get(name)
        if not isinstance(instruction.op, Place) or parameter is None or not parameter.requires_grad:
            continue
        if parameter.numel() < max(1, rule.min_numel):
            continue
        placements = [p for p in instruction.op.placements if p is not None]
        problem = _problem(blocks, tuple(parameter.shape), placements, program.axes.sizes, tuple(program.axes))
        if problem is not None:
            merged.setdefault((problem, instruction.source), []).append(name)
    return tuple(
        Finding("error", "optimizer-block", problem.replace("{names}", name_list(names)), source, tuple(names))  # type: ignore[arg-type]
        for (problem, source), names in merged.items()
    )


def _problem(
    blocks: Blocks,
    shape: tuple[int, ...],
    placements: Sequence[Placement],
    sizes: tuple[int, ...],
    axes: tuple[str, ...],
) -> str | None:
    from torch.distributed.tensor import Replicate

    from vescale.ir import join_placements, ragged_positions
    from vescale.placements import RaggedShard, largest_shape, shard_dim

    others = [Replicate() if isinstance(p, RaggedShard) else p for p in placements]
    cut = blocks.first_cut(shape, others, sizes)
    if cut is not None:
        where = ", ".join(f"{p} on {axis}" for p, axis in zip(others, axes) if not p.is_replicate())
        return (
            f"{{names}} of shape {shape}: {where} divides block {cut.block} ({cut.elements}) of AdamW8bit's {blocks}; "
            "put these parameters into a param group with smaller blocks, or shard another dim"
        )
    positions = ragged_positions(placements)
    if not positions:
        return None
    joined, joined_sizes = join_placements(placements, sizes, positions)
    ragged = placements[positions[0]]
    assert isinstance(ragged, RaggedShard)
    held = largest_shape(shape, tuple(others), sizes)
    if ragged.local_units is not None:
        cut = blocks.first_cut(shape, joined, joined_sizes)
        if cut is None:
            return None
        found = f"block {cut.block} ({cut.elements})"
    else:
        granule = ragged.granule(held, [dim for p in others if (dim := shard_dim(p)) is not None and dim > 0])
        if granule % blocks.granule(held) == 0 or granule >= math.prod(held):
            return None
        found = f"shares of {granule} elements"
    where = ",".join(axes[position] for position in positions)
    return (
        f"{{names}} of shape {shape}: {ragged} on {where} may divide blocks of AdamW8bit ({blocks}): {found}; write "
        f"Ragged(block={blocks.granule(held)}) at rest (in Python RaggedShard(block={blocks.granule(held)}))"
    )


# ``--fix``: entries that make implicit communication explicit, written into the plan's file.


_EDIT = regex.compile(r"write `([^`]+?): \{(\w+): ([^`]+)\}` in the plan's shard section")
_SECTION = regex.compile(r"^shard:\s*(?:#.*)?$", regex.MULTILINE)


def fix_plan(file: Path, load: Callable[[Path], Plan], look: Callable[[Plan], Sequence[str]]) -> list[str]:
    """Write the entries that reports propose into ``file``, each one only if the plan is still valid with it, and has fewer
    reports than before. Returns the lines that were written.

    Args:
        load: the plan in a file.
        look: the reports of a plan; raises if the plan does not fit.
    """
    written: list[str] = []
    reports = list(look(load(file)))
    tried: set[tuple[str, str, str]] = set()
    while True:
        edits = [(found[1], found[2], found[3]) for report in reports if (found := _EDIT.search(report)) is not None]
        edit = next((each for each in edits if each not in tried), None)
        if edit is None:
            return written
        tried.add(edit)
        for text, line in _candidates(file, load(file), *edit):
            with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".yaml", delete=False) as new:
                new.write(text)
            path = Path(new.name)
            try:
                after = list(look(load(path)))
            except Exception:  # the entry does not fit: it is not written
                path.unlink()
                continue
            if len(after) < len(reports):
                os.chmod(path, file.stat().st_mode & 0o7777)
                path.replace(file)
                written.append(line)
                reports = after
                break
            path.unlink()


def _candidates(file: Path, plan: Plan, path: str, axis: str, placement: str) -> list[tuple[str, str]]:
    """(text of the file, changed line): an entry that says otherwise is changed, else one is added."""
    lines = file.read_text().splitlines(keepends=True)
    found = []
    for entry in plan.entries:
        source = entry.source
        if entry.path.text == path and source is not None and Path(source.file) == file and source.line <= len(lines):
            number = source.line - 1
            changed = regex.sub(rf"(\b{axis}:\s*)[^,}}\n]+", rf"\g<1>{placement}", lines[number], count=1)
            if changed != lines[number]:
                found.append(("".join([*lines[:number], changed, *lines[number + 1 :]]), changed.strip()))
    text = "".join(lines)
    quoted = "'" + path.replace("'", "''") + "'"
    key = path if regex.fullmatch(r"[\w<][\w.:<>()|\\+*-]*", path) else quoted
    entry_line = f"{key}: {{{axis}: {placement}}}"
    section = _SECTION.search(text)
    if section is None:
        if not regex.search(r"^shard:", text, regex.MULTILINE):  # else a mapping in one line
            found.append((text.rstrip("\n") + f"\nshard:\n  {entry_line}\n", entry_line))
        return found
    following = regex.compile(r"^([ \t]+)[^\s#]", regex.MULTILINE).search(text, section.end())
    indent = following[1] if following is not None else "  "
    end = section.end()
    found.append((f"{text[:end]}\n{indent}{entry_line}{text[end:]}", entry_line))
    return found
