"""What of a program concerns the stages of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from vescale.errors import PipelineCutError
from vescale.ir import Checkpoint, Instruction, Local, Program, Unit
from vescale.pipeline._cut import Cut

__all__ = ["program_of_stages", "refuse_torn"]


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
                f"pipeline: a stage begins before {inside[0]!r}, inside of {instruction.path or 'the model'!r}, which has a "
                f"{what} entry: its call would have to end in another stage than it begins; name the modules in it instead, "
                "such as its blocks",
                instruction.source,
            )
