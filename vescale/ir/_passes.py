"""Small passes over programs, each ``Program -> Program``: fewer instructions, the same placements and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from vescale.ir._ops import Annotate, Batch, Redistribute, Stage, Unit
from vescale.ir._program import Hook, Instruction, Program

__all__ = ["batch_redistributions", "drop_noops", "fuse_redistributions", "merge_duplicates", "optimize"]

_BOUNDARIES = ("<in>", "<out>")


def optimize(program: Program) -> Program:
    """All passes, in order."""
    passes: tuple[Callable[[Program], Program], ...] = (
        drop_noops,
        merge_duplicates,
        fuse_redistributions,
        batch_redistributions,
    )
    for each in passes:
        program = each(program)
    return program


def drop_noops(program: Program) -> Program:
    """Drop instructions that change nothing in the forward *and* nothing in the backward.

    A redistribution whose source equals its destination stays: it brings the gradient to its placement. The one that puts
    a parameter back after the forward has no gradient, so it goes when it moves nothing.
    """
    return replace(program, instructions=tuple(i for i in program.instructions if not _is_noop(i)))


def _is_noop(instruction: Instruction) -> bool:
    op = instruction.op
    if isinstance(op, Redistribute):
        puts_back = instruction.hook is Hook.FORWARD_POST and instruction.target not in _BOUNDARIES
        if puts_back and op.src == op.dst:
            return True
        stages = [stage for stage in (op.dst, op.grad_src, op.grad_dst) if stage is not None]
        return all(placement is None for stage in stages for placement in stage)
    if isinstance(op, Annotate):
        return all(placement is None for placement in op.placements)
    if isinstance(op, Unit):
        return not op.names
    return isinstance(op, Batch) and not op.parts


def merge_duplicates(program: Program) -> Program:
    """Keep one of equal instructions that follow each other at one place: doing it again changes nothing."""
    last: dict[tuple[str, Hook, str, int | str | None], Instruction] = {}
    kept = []
    for instruction in program.instructions:
        place = (instruction.path, instruction.hook, instruction.target, instruction.index)
        if last.get(place) != instruction:
            kept.append(instruction)
        last[place] = instruction
    return replace(program, instructions=tuple(kept))


def fuse_redistributions(program: Program) -> Program:
    """One redistribution for several of one place, where the boundary rule gives the same gradient."""
    fused: list[Instruction] = []
    last: dict[tuple[str, Hook, str, int | str | None], int] = {}  # place -> its last instruction in `fused`
    for instruction in program.instructions:
        place = (instruction.path, instruction.hook, instruction.target, instruction.index)
        position = last.get(place)
        if position is not None:
            earlier, later = fused[position].op, instruction.op
            if isinstance(earlier, Redistribute) and isinstance(later, Redistribute):
                both = _fused(earlier, later)
                if both is not None:
                    fused[position] = replace(fused[position], op=both)
                    continue
        last[place] = len(fused)
        fused.append(instruction)
    return replace(program, instructions=tuple(fused))


# (src, dst, grad_src, grad_dst) on one axis
_AxisMove = tuple[Placement | None, Placement | None, Placement | None, Placement | None]
_SILENT: _AxisMove = (None, None, None, None)


def _fused(first: Redistribute, second: Redistribute) -> Redistribute | None:
    """Axes that only one of the two names keep what it says; on a shared axis they must be a chain."""
    moves = [_fused_on_axis(*pair) for pair in zip(_by_axis(first), _by_axis(second))]
    chosen = [move for move in moves if move is not None]
    if len(chosen) != len(moves):
        return None
    src, dst, grad_src, grad_dst = (tuple(move[side] for move in chosen) for side in range(4))
    return Redistribute(dst, _stage_or_none(src), _stage_or_none(grad_src), _stage_or_none(grad_dst))


def _fused_on_axis(first: _AxisMove, second: _AxisMove) -> _AxisMove | None:
    if second == _SILENT:
        return first
    if first == _SILENT:
        return second
    (src, middle, *first_grads), (arrives, dst, *second_grads) = first, second
    if middle is None or dst is None or first_grads != [None, None] or second_grads != [None, None]:
        return None
    if isinstance(src, Partial) or isinstance(middle, Partial) or arrives not in (None, middle):
        return None
    return src, dst, None, None


def _by_axis(op: Redistribute) -> list[_AxisMove]:
    nothing: Stage = (None,) * len(op.dst)
    return list(zip(op.src or nothing, op.dst, op.grad_src or nothing, op.grad_dst or nothing))


def _stage_or_none(stage: Stage) -> Stage | None:
    return stage if any(placement is not None for placement in stage) else None


def batch_redistributions(program: Program) -> Program:
    """Put redistributions of one path and hook into one :class:`Batch`, at the place of the first of them.

    One joins an earlier batch only when nothing between the two works on the same tensors.
    """
    slots: list[list[Instruction]] = []  # each becomes one instruction
    open_slots: dict[tuple[str, Hook], int] = {}
    since: dict[
        tuple[str, Hook], list[Instruction]
    ] = {}  # what stands at that path and hook after the open batch began
    for instruction in program.instructions:
        site = (instruction.path, instruction.hook)
        if not isinstance(instruction.op, Redistribute):
            since.setdefault(site, []).append(instruction)
            slots.append([instruction])
        elif site in open_slots and not any(_overlap(instruction, earlier) for earlier in since[site]):
            slots[open_slots[site]].append(instruction)
            since[site].append(instruction)
        else:
            open_slots[site] = len(slots)
            since[site] = [instruction]
            slots.append([instruction])
    return replace(program, instructions=tuple(_batched(slot) for slot in slots))


def _overlap(one: Instruction, other: Instruction) -> bool:
    """Whether the order of the two can matter: the same tensor, or a region around it."""
    if "<self>" in (one.target, other.target):
        return True
    return (one.target, one.index) == (other.target, other.index)


def _batched(slot: list[Instruction]) -> Instruction:
    if len(slot) == 1:
        return slot[0]
    first = slot[0]
    parts = tuple((i.target, i.index, i.op) for i in slot if isinstance(i.op, Redistribute))
    return Instruction(first.path, first.hook, "<self>", None, Batch(parts), first.source)
