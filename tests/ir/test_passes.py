"""Passes on programs written by hand, and against a small interpreter of programs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tests.ir.models import llama
from vescale import lower, plan_zoo
from vescale.ir import (
    Annotate,
    Batch,
    Hook,
    Instruction,
    Op,
    Place,
    Program,
    Redistribute,
    Unit,
    batch_redistributions,
    drop_noops,
    fuse_redistributions,
    merge_duplicates,
    optimize,
)
from vescale.plans import MeshAxes

AXES = MeshAxes(("dp", "tp"), (2, 2))
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PRE, POST = Hook.FORWARD_PRE, Hook.FORWARD_POST


def at(op: Op, target: str = "<in>", index: int | str | None = None, hook: Hook = PRE, path: str = "m") -> Instruction:
    return Instruction(path, hook, target, index, op)


def program(*instructions: Instruction) -> Program:
    return Program(AXES, instructions)


def tp(dst: Placement | None, src: Placement | None = None) -> Redistribute:
    return Redistribute((None, dst), None if src is None else (None, src))


def dp(dst: Placement) -> Redistribute:
    return Redistribute((dst, None))


@pytest.mark.parametrize(
    "instruction",
    [
        at(tp(None)),
        at(Redistribute((None, None), (R, S0))),
        at(Annotate((None, None))),
        at(Unit((), ("dp",)), "<self>", hook=Hook.INIT),
        at(Batch(()), "<self>"),
        at(tp(S0, S0), "weight", hook=POST),
    ],
)
def test_noops_go(instruction: Instruction) -> None:
    other = at(Place((R, R)), "weight", hook=Hook.INIT)
    assert drop_noops(program(instruction, other)) == program(other)


@pytest.mark.parametrize(
    "instruction",
    [
        at(tp(R, R)),  # Megatron's f: the gradient may arrive Partial
        at(tp(S0, S0)),
        at(tp(R, R), "<out>", hook=POST),
        at(tp(S0, S0), "weight"),  # before the forward: the parameter's gradient comes back through it
        at(tp(R, S0), "weight", hook=POST),
        at(Redistribute((None, None), grad_dst=(None, R))),
        at(Place((R, R)), "weight", hook=Hook.INIT),
        at(Annotate((None, P))),
    ],
)
def test_what_has_an_effect_stays(instruction: Instruction) -> None:
    assert drop_noops(program(instruction)) == program(instruction)


def test_duplicates_merge_only_next_to_each_other_at_their_place() -> None:
    one, other, elsewhere = at(tp(R)), at(tp(S0)), at(tp(R), path="n")
    assert merge_duplicates(program(one, elsewhere, one)) == program(one, elsewhere)
    assert merge_duplicates(program(one, other, one)) == program(one, other, one)  # R, S, R is not R, S
    assert merge_duplicates(program(one, at(tp(R), index="x"))) == program(one, at(tp(R), index="x"))


def test_redistributions_of_different_axes_fuse() -> None:
    elsewhere = at(tp(R), path="n")
    moved = Redistribute((S0, R), (None, S1))
    assert fuse_redistributions(program(at(tp(R, S1)), elsewhere, at(dp(S0)))) == program(at(moved), elsewhere)
    grads = Redistribute((None, R), None, (None, P), (None, S0))
    assert fuse_redistributions(program(at(grads), at(dp(S0)))) == program(at(replace(grads, dst=(S0, R))))


def test_chains_fuse_to_their_ends() -> None:
    assert fuse_redistributions(program(at(tp(S1, S0)), at(tp(R, S1)))) == program(at(tp(R, S0)))
    assert fuse_redistributions(program(at(tp(S1)), at(tp(R)), at(tp(S0)))) == program(at(tp(S0)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (tp(S1, P), tp(R)),  # the boundary rule looks at what arrived
        (tp(P), tp(R)),
        (tp(S1), tp(R, S0)),  # no chain: the second expects what the first does not give
        (Redistribute((None, R), grad_dst=(None, S0)), tp(S1)),
        (tp(S1), Redistribute((None, R), grad_src=(None, S0))),
        (Redistribute((None, None), grad_dst=(None, S0)), tp(S1)),
    ],
)
def test_what_would_change_a_gradient_does_not_fuse(first: Redistribute, second: Redistribute) -> None:
    before = program(at(first), at(second))
    assert fuse_redistributions(before) == before


def test_other_instructions_of_a_place_keep_redistributions_apart() -> None:
    before = program(at(tp(S1)), at(Annotate((None, S0))), at(tp(R)))
    assert fuse_redistributions(before) == before


def test_redistributions_of_one_place_are_batched() -> None:
    query, key, later = at(tp(R), index="q"), at(tp(R), index="k"), at(tp(R), path="n")
    gather = at(dp(R), "weight")
    after = batch_redistributions(program(query, later, key, gather))
    parts = (("<in>", "q", tp(R)), ("<in>", "k", tp(R)), ("weight", None, dp(R)))
    assert after == program(at(Batch(parts), "<self>"), later)


def test_batches_do_not_reorder_what_belongs_together() -> None:
    x, y = at(tp(R), index="x"), at(tp(R), index="y")
    label = at(Annotate((None, S0)), index="y")
    assert batch_redistributions(program(x, label, y)) == program(x, label, y)
    assert batch_redistributions(program(x, at(tp(S0), index="x"))) == program(x, at(tp(S0), index="x"))
    assert batch_redistributions(program(x, at(tp(R), "<out>", hook=POST))).instructions[0] == x
    other = at(Annotate((None, S0)), index="z")
    both = at(Batch((("<in>", "x", tp(R)), ("<in>", "y", tp(R)))), "<self>")
    assert batch_redistributions(program(x, other, y)) == program(both, other)


def outcome(given: Program) -> dict[tuple[object, ...], Placement]:
    """Where each tensor is on each axis when all has run: the passes must not change it."""
    found: dict[tuple[object, ...], Placement] = {}
    for i in given:
        parts = i.op.parts if isinstance(i.op, Batch) else ((i.target, i.index, i.op),)
        for target, index, op in parts:
            stage = op.dst if isinstance(op, Redistribute) else op.placements if isinstance(op, Annotate) else ()
            for axis, placement in zip(AXES, stage):
                if placement is not None:
                    found[i.path, i.hook, target, index, axis] = placement
    return found


def test_random_programs_end_in_the_same_placements() -> None:
    source = random.Random(0)
    shorter = 0
    for _ in range(300):
        stages = [tuple(source.choice((None, R, S0, S1, P)) for _ in AXES) for _ in range(12)]
        ops = [Redistribute(stage) if source.random() < 0.8 else Annotate(stage) for stage in stages]
        before = program(
            *(at(op, source.choice(("<in>", "w")), source.choice((None, "x")), path=source.choice("mn")) for op in ops)
        )
        after = optimize(before)
        assert outcome(after) == outcome(before)
        assert optimize(after) == after
        shorter += len(after) < len(before)
    assert shorter > 250


def test_a_lowered_plan_is_optimal_but_for_batches() -> None:
    lowered = lower(plan_zoo.load("llama", {"dp": 2, "tp": 2}), llama(2))
    assert optimize(lowered) == lowered
