"""Programs as text, JSON and differences; names of repeated layers."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.ir.models import build
from tests.ir.test_lower import mixed
from vescale.ir import (
    Annotate,
    Factory,
    Hook,
    Instruction,
    Local,
    Place,
    Program,
    Redistribute,
    Unit,
    Wrap,
    lower,
    merge_repeats,
)
from vescale.placements import InterleavedShard, RaggedShard
from vescale.plans import MeshAxes, Plan, Source

AXES = MeshAxes(("dp", "tp"), (2, 4))
R, S0, P = Replicate(), Shard(0), Partial()
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)

EVERY_OP = Program(
    AXES,
    (
        Instruction("", Hook.FORWARD_PRE, "<in>", "ids", Wrap((S0, R), "local"), Source("plan.yaml", 3, 5)),
        Instruction("", Hook.FORWARD, "<self>", None, Factory((R, S0)), Source("train.py", 7)),
        Instruction("a.0", Hook.INIT, "weight", None, Place((RaggedShard((0, 1), (1, 3), 8), InterleavedShard(0, 3)))),
        Instruction(
            "a.0", Hook.INIT, "<self>", None, Unit(("weight", "b.weight"), ("tp",), ("dp",), 2, False, MIXED, True)
        ),
        Instruction("a.0", Hook.INIT, "<self>", None, Unit(("bias",), ("dp", "tp"))),
        Instruction(
            "a.0", Hook.FORWARD_PRE, "<in>", 1, Redistribute((None, R), (None, S0), (P, None), (None, Shard(-1)))
        ),
        Instruction("a.0", Hook.FORWARD, "<self>", None, Local("experts", "mask", (R, None), (None, P))),
        Instruction("a.0", Hook.FORWARD, "<self>", None, Local(None, None, (None, None), (None, None))),
        Instruction("a.0", Hook.FORWARD_POST, "<out>", 0, Redistribute((R, R))),
        Instruction("a.0", Hook.BACKWARD, "weight", None, Annotate((None, P))),
    ),
)


def test_text() -> None:
    assert EVERY_OP.to_text() == (
        "forward_pre:<in>:ids:wrap(dp=S(0),tp=R,given=local)\n"
        "forward:<self>:*:factory(dp=R,tp=S(0))\n"
        "a.0.init:weight:*:place(dp=Ragged(dims=(0, 1), units=(1, 3), block=8),tp=Interleaved(0, 3))\n"
        "a.0.init:<self>:*:unit(shard=tp;replicate=dp;reshard_after_forward=2;reshard_after_backward=False;"
        "param_dtype=bfloat16;cast_forward_inputs=False;offload=pinned;weight,b.weight)\n"
        "a.0.init:<self>:*:unit(shard=dp,tp;bias)\n"
        "a.0.forward_pre:<in>:1:redist(tp=S(0)->tp=R;grad:dp=P(sum)->tp=S(-1))\n"
        "a.0.forward:<self>:*:local(kind=experts;dispatch=mask;in=dp=R;out=tp=P(sum))\n"
        "a.0.forward:<self>:*:local(in=-;out=-)\n"
        "a.0.forward_post:<out>:0:redist(->dp=R,tp=R)\n"
        "a.0.backward:weight:*:annotate(tp=P(sum))\n"
    )


def test_json_round_trip_keeps_every_part() -> None:
    back = Program.from_json(EVERY_OP.to_json())
    assert back == EVERY_OP
    assert [i.source for i in back] == [i.source for i in EVERY_OP]
    lowered = lower(mixed(), build("stack"))
    assert Program.from_json(lowered.to_json()) == lowered


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=9), "version 9; this release reads version 1"),
        (lambda d: d.pop("mesh"), "lacks 'mesh'"),
        (lambda d: d.update(mesh={"dp": 0}), "at least one rank"),
        (lambda d: d["instructions"][0].update(hook="before"), "'before' is not a valid Hook"),
        (lambda d: d["instructions"][0].update(index=True), "neither a position nor a name"),
        (lambda d: d["instructions"][0]["op"].update(name="exec"), "op 'exec' is none of place, wrap"),
        (lambda d: d["instructions"][0]["op"].update(placements={"tpp": "R"}), "no axis 'tpp'"),
        (lambda d: d["instructions"][0]["op"].update(placements={"tp": "Q"}), "'Q' is not a placement"),
        (lambda d: d["instructions"][0]["op"].update(more=1), "a wrap has no 'more'"),
        (lambda d: d["instructions"][0].update(path=3), "3 is not text"),
        (lambda d: d["instructions"][4]["op"].update(shard=["dp", "tpp"]), "no axis 'tpp'"),
        (lambda d: d["instructions"][4]["op"].update(shard=[]), "a unit that is sharded over no axis"),
        (lambda d: d["instructions"][4]["op"].update(shard="dp"), "'dp' is not a list"),
        (lambda d: d["instructions"][8]["op"].update(name="unit", names=[]), "a unit has no 'dst'"),
    ],
)
def test_bad_json_is_refused(change, message: str) -> None:  # type: ignore[no-untyped-def]
    data = json.loads(EVERY_OP.to_json())
    change(data)
    with pytest.raises(ValueError, match="not a program") as caught:
        Program.from_json(json.dumps(data))
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", "[" * 100_000])
def test_what_is_no_program_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a program"):
        Program.from_json(text)


def test_digest_follows_what_is_done() -> None:
    sourceless = replace(EVERY_OP, instructions=tuple(replace(i, source=None) for i in EVERY_OP))
    assert sourceless.digest() == EVERY_OP.digest()  # the same plan in another file
    assert replace(EVERY_OP, axes=MeshAxes(("dp", "tp"), (4, 2))).digest() != EVERY_OP.digest()
    assert replace(EVERY_OP, instructions=EVERY_OP.instructions[1:]).digest() != EVERY_OP.digest()


def program(mesh: dict[str, int], first: int, last: int) -> Program:
    plan = Plan(mesh).shard(f"layers.[{first}-{last}].fc1.weight", S0, mesh="tp")
    return lower(plan, build("stack"))


def test_equal_programs_do_not_differ() -> None:
    same = program({"tp": 2}, 0, 1).diff(program({"tp": 2}, 0, 1))
    assert not same and str(same) == "" and same.to_dict() == {"equal": True, "changes": []}


def test_differences_merge_layers() -> None:
    difference = program({"tp": 2}, 0, 1).diff(program({"tp": 2}, 0, 0))
    assert difference
    assert str(difference) == "~ layers.1.fc1.init:weight:*:place(tp=S(0)) => place(tp=R)\n"
    difference = program({"tp": 2}, 0, 0).diff(program({"tp": 2}, 0, 2))
    assert str(difference) == "~ layers.1-2.fc1.init:weight:*:place(tp=R) => place(tp=S(0))\n"
    assert len(difference.changes) == 2


def test_differences_of_meshes_and_of_instructions_only_one_has() -> None:
    before = program({"tp": 2}, 0, 1)
    assert str(before.diff(program({"tp": 4}, 0, 1))) == "~ mesh tp=2 => tp=4\n"
    shorter = replace(before, instructions=tuple(i for i in before if i.target != "bias"))
    assert str(before.diff(shorter)).splitlines()[0] == "- layers.0-2.fc1.init:bias:*:place(tp=R)"
    assert str(shorter.diff(before)).splitlines()[0] == "+ layers.0-2.fc1.init:bias:*:place(tp=R)"


def test_programs_of_different_meshes_are_compared_by_axis_names() -> None:
    one = Program(MeshAxes(("tp",), (2,)), (Instruction("a", Hook.FORWARD_PRE, "<in>", None, Redistribute((R,))),))
    two = Program(AXES, (Instruction("a", Hook.FORWARD_PRE, "<in>", None, Redistribute((None, R))),))
    assert one.diff(two).changes == ()


def test_order_matters_only_within_a_place() -> None:
    one, other = (Instruction("a", Hook.FORWARD_PRE, "<in>", k, Redistribute((R, None))) for k in ("x", "y"))
    assert not Program(AXES, (one, other)).diff(Program(AXES, (other, one)))
    again = replace(one, op=Redistribute((S0, None)))
    assert Program(AXES, (one, again)).diff(Program(AXES, (again, one)))


def test_repeated_layers() -> None:
    names = [f"m.layers.{i}.mlp.experts.{j}.w" for i in (0, 1, 2, 5) for j in range(3)] + ["m.norm.w", "m.layers.7.x"]
    merged = merge_repeats((name, None) for name in names)
    assert merged == [
        ("m.layers.0-2,5.mlp.experts.0-2.w", None, 12),
        ("m.norm.w", None, 1),
        ("m.layers.7.x", None, 1),
    ]
    assert merge_repeats([("a.0", "x"), ("a.1", "y"), ("a.2", "x")]) == [("a.0,2", "x", 2), ("a.1", "y", 1)]
    ragged = [("a.0.b.0", None), ("a.0.b.1", None), ("a.1.b.0", None)]  # no product of ranges: nothing is invented
    assert [name for name, _, _ in merge_repeats(ragged)] == ["a.0.b.0-1", "a.1.b.0"]


def test_merged_names_stand_for_exactly_the_names_that_were_given() -> None:
    source = random.Random(0)

    def expand(part: str) -> list[str]:
        if not part[0].isdigit():
            return [part]
        runs = [run.partition("-") for run in part.split(",")]
        return [str(n) for low, _, high in runs for n in range(int(low), int(high or low) + 1)]

    for _ in range(200):
        names = {f"a.{source.randint(0, 3)}.b.{source.randint(0, 3)}.{source.choice('xy')}" for _ in range(8)}
        expanded: list[str] = []
        for merged, _, count in merge_repeats((name, None) for name in sorted(names)):
            found = [""]
            for part in merged.split("."):
                found = [f"{head}.{tail}" for head in found for tail in expand(part)]
            assert len(found) == count
            expanded += [name[1:] for name in found]
        assert sorted(expanded) == sorted(names)


def test_text_with_layers_merged() -> None:
    text = program({"tp": 2}, 0, 2).to_text(merge_layers=True)
    assert "layers.0-2.fc1.init:weight:*:place(tp=S(0))\n" in text
    assert text.count("fc1.init:weight") == 1
