"""Plans as YAML: round trips, and every mistake with its line and column."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.placements import InterleavedShard, RaggedShard, StridedRaggedShard
from vescale.plans import Plan, PlanError, parse_placement, placement_text

AXES = {"dp": 2, "tp": 2}

LLAMA = r"""
version: 1
mesh: {dp: null, tp: null}
vars: {blk: 'model\.layers\.\d+'}
shard:
  <in:input_ids>: {dp: S(0)}
  model.embed_tokens.weight: {tp: S(0)}
  ${blk}.self_attn.<in:hidden_states>: {tp: R}
  ${blk}.self_attn.(q|k|v)_proj.weight: {tp: S(0)}
  ${blk}..*: {dp: {init: Ragged, run: R}}
  lm_head.weight: [{tp: S(0)}, {dp: "Ragged(units=(1, 3), block=128)", phase: init}]
redistribute:
  ${blk}.mlp.<in>: {src: {tp: S(1)}, dst: {tp: R}, grad_src: {tp: P}, grad_dst: {tp: S(1)}}
annotate: {norm.weight.grad: {tp: P}}
factory: {'.*': {dp: R, tp: R}}
local: {'${blk}.mlp.experts': {kind: experts, dispatch: mask, in: {tp: R}, out: {tp: P(sum)}}}
units: ['${blk}']
"""


def test_every_section_is_read() -> None:
    written = Plan(AXES)
    blk = r"model\.layers\.\d+"
    written.shard("<in:input_ids>", Shard(0), mesh="dp")
    written.shard("model.embed_tokens.weight", Shard(0), mesh="tp")
    written.shard(f"{blk}.self_attn.<in:hidden_states>", Replicate(), mesh="tp")
    written.shard(f"{blk}.self_attn.(q|k|v)_proj.weight", Shard(0), mesh="tp")
    written.shard(f"{blk}..*", RaggedShard(), mesh="dp", phase="init")
    written.shard(f"{blk}..*", Replicate(), mesh="dp", phase="run")
    written.shard("lm_head.weight", Shard(0), mesh="tp")
    written.shard("lm_head.weight", RaggedShard((0,), (1, 3), 128), mesh="dp", phase="init")
    written.redistribute(f"{blk}.mlp.<in>", Shard(1), Replicate(), grad_src=Partial(), grad_dst=Shard(1), mesh="tp")
    written.annotate("norm.weight.grad", Partial(), mesh="tp")
    written.factory(".*", {"dp": Replicate(), "tp": Replicate()})
    written.local(
        f"{blk}.mlp.experts", kind="experts", dispatch="mask", inputs={"tp": Replicate()}, outputs={"tp": Partial()}
    )
    written.unit(blk)
    assert Plan.from_yaml(LLAMA, AXES) == written
    assert Plan.from_yaml(written.to_yaml()) == written


def test_entries_know_line_and_column(tmp_path: Path) -> None:
    file = tmp_path / "llama.yaml"
    file.write_text(LLAMA)
    plan = Plan.from_yaml(file, AXES)
    assert str(plan.entries[1].source) == f"{file}:7:3"


def random_placement(source: random.Random) -> Placement:
    units = tuple(source.randint(0, 9) for _ in range(source.randint(1, 4)))
    return source.choice(
        [
            Replicate(),
            Shard(source.randint(-3, 3)),
            Partial(source.choice(["sum", "avg", "max", "min"])),
            InterleavedShard(source.randint(-2, 2), source.randint(1, 4)),
            RaggedShard(),
            RaggedShard(tuple(range(source.randint(0, 3)))),
            RaggedShard((0, 1), units),
            RaggedShard((0,), units, source.randint(1, 512)),
            StridedRaggedShard((0,), units, split_factor=source.randint(1, 8)),
        ]
    )


def test_placements_round_trip() -> None:
    source = random.Random(0)
    for _ in range(500):
        placement = random_placement(source)
        assert parse_placement(placement_text(placement)) == placement


@pytest.mark.parametrize("path", ["a.b", "on", "no", "null", "~", "0x1", "1.5", "2024-01-01", "it's", "a: b # c", ".*"])
def test_every_kind_of_entry_round_trips(path: str) -> None:
    """Also several entries of a path, and paths that YAML would take for something else than text."""
    plan = Plan({"dp": 2, "tp": 2})
    plan.shard(path, Shard(0), mesh="tp").shard(path, Replicate(), mesh="dp", phase="run")
    plan.annotate(path, Shard(0), mesh="tp").annotate(path, Replicate(), mesh="dp")
    plan.factory(path, Shard(0), mesh="tp").factory(path, Shard(1), mesh="dp")
    plan.local(path).local(path, kind="experts", dispatch="mask", inputs={"tp": Shard(0)}, outputs={"dp": Partial()})
    plan.unit(path).unit(path)
    plan.unit(
        path, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    )
    plan.unit(path, reshard_after_forward=2, offload_policy=CPUOffloadPolicy(pin_memory=False))
    plan.unit(path, mp_policy={"output_dtype": "float32"}, offload_policy={})
    boundary = f"{path}.<in>"
    plan.redistribute(boundary, Shard(1), Replicate(), grad_src=Partial(), grad_dst=Shard(1), mesh="tp")
    plan.redistribute(boundary, Shard(0), Replicate(), mesh="dp").shard(boundary, Shard(-1), mesh="dp", phase="bwd")
    assert Plan.from_yaml(plan.to_yaml()) == plan


def test_random_plans_round_trip() -> None:
    source = random.Random(1)
    names = [
        "a.weight",
        r"blk\.\d+\.w",
        "it's.w",
        "<in:x>",
        "a.<out>",
        "0.w",
        "a: b",
        "# x",
        "*.w".replace("*", ".*"),
        "a.w.grad",
    ]
    for _ in range(100):
        plan = Plan(AXES)
        for _ in range(source.randint(0, 8)):
            axes = source.sample(["dp", "tp"], source.randint(1, 2))
            plan.shard(
                source.choice(names),
                {axis: random_placement(source) for axis in axes},
                phase=source.choice(["init", "fwd", "bwd", "run", "all"]),
            )
        assert Plan.from_yaml(plan.to_yaml()) == plan, plan.to_yaml()


@pytest.mark.parametrize(
    "text",
    [
        "Q",
        "S",
        "S()",
        "S(a)",
        "S(0",
        "P(mean)",
        "Ragged(unit=(1,))",
        "R(1)",
        "Interleaved(0)",
        "Ragged((0, 1)",
        "StridedRagged((0,))",
        "S(0) S(1)",
        "",
        "Interleaved(0, 0)",
        "Ragged(block=0)",
    ],
)
def test_bad_placements_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|at least|not closed"):
        parse_placement(text)


MISTAKES = [
    ("shard:\n  a.weight: {tpp: R}\n", "2:14", "did you mean 'tp'"),
    ("shard:\n  a.weight: {tp: Q}\n", "2:", "'Q' is not a placement; expected R, S"),
    ("shard:\n  a.weight: {tp: S(0)}\n  a.weight: {tp: R}\n", "3:3", "first on line 2"),
    ("shrad:\n  a: {tp: R}\n", "1:1", "did you mean 'shard'"),
    ("shard: [\n", "2:1", "not YAML"),
    ("\tshard:\n", "1:1", "indent with spaces"),
    ("shard:\n  '(a': {tp: R}\n", "2:3", "not a valid regular expression"),
    ("shard:\n  a.<inn:x>: {tp: R}\n", "2:3", "not an input or output"),
    ("shard:\n a: {tp: !!python/object/apply:os.system [x]}\n", "2:10", "plans cannot contain tags"),
    ("vars: &x {a: b}\nshard: *x\n", "2:8", "plans cannot contain aliases"),
    ("shard:\n  ${blc}.w: {tp: R}\nvars: {blk: x}\n", "2:3", "did you mean 'blk'"),
    ("shard:\n  a: {tp: {int: R}}\n", "2:12", "did you mean 'init'"),
    ("shard:\n  a: {phase: init}\n", "2:3", "no axis is given"),
    ("shard:\n  a: {tp: {init: R}, phase: run}\n", "2:7", "keep one of the two"),
    ("- 1\n- 2\n", "1:1", "a plan is a mapping of sections"),
    ("shard:\n  a: {tp: S(0), phase: ini}\n", "2:17", "did you mean 'init'"),
    ("redistribute:\n  a.<in>: {src: {tp: R}}\n", "2:3", "lacks dst"),
    ("shard:\n  a: {tp: 'Ragged(unit=(1,2))'}\n", "2:7", "unknown argument 'unit'"),
    ("version: 2\nshard: {}\n", "1:1", "reads version 1"),
    ("shard:\n  a: R\n", "2:3", "expected a mapping"),
    ("units:\n  - {path: a, mp_policy: {param_dtype: int8}}\n", "2:27", "bfloat16"),
    ("units:\n  - {path: a, mp_policy: {dtype: bfloat16}}\n", "2:27", "dtype"),
    ("mesh: {pp: 2}\nshard: {}\n", "1:8", "rename the axis"),
]


@pytest.mark.parametrize(("text", "place", "message"), MISTAKES)
def test_mistakes_have_line_and_column(text: str, place: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_yaml(text, AXES)
    assert str(caught.value).startswith(f"<yaml>:{place}"), str(caught.value)
    assert message in str(caught.value)


def test_mesh_sizes_come_from_the_file_or_the_caller() -> None:
    assert Plan.from_yaml("mesh: {dp: 2, tp: 8}\nshard: {}\n").axes.sizes == (2, 8)
    assert Plan.from_yaml("mesh: {dp: 2, tp: 8}\nshard: {}\n", {"dp": 4, "tp": 1}).axes.sizes == (4, 1)
    with pytest.raises(PlanError, match="sizes of tp"):
        Plan.from_yaml("mesh: {dp: 2, tp: null}\nshard: {}\n")
    with pytest.raises(PlanError, match="mesh section"):
        Plan.from_yaml("shard: {}\nversion: 1\n")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read the plan"):
        Plan.from_yaml(tmp_path / "missing.yaml", AXES)
    with pytest.raises(PlanError, match="cannot read the plan"):
        Plan.from_yaml(tmp_path, AXES)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"UTF-8|not YAML"):
        Plan.from_yaml(binary, AXES)


def test_included_entries_come_first_with_their_own_lines(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "tp.yaml").write_text(
        "mesh: {dp: null, tp: 2}\ninclude: [norm.yaml]\nvars: {block: 'blk\\.\\d+', up: fc1}\n"
        "shard:\n  ${block}.${up}.weight: {tp: S(0)}\n"
    )
    (tmp_path / "parts" / "norm.yaml").write_text("shard:\n  ${block}.norm.weight: {tp: R}\n")
    (tmp_path / "plan.yaml").write_text(
        "include: [parts/tp.yaml]\nvars: {block: 'layers\\.\\d+'}\nmesh: {dp: 2, tp: 4}\nshard:\n  <in:x>: {dp: S(0)}\n"
    )
    plan = Plan.from_yaml(tmp_path / "plan.yaml")
    assert plan.axes.sizes == (2, 4)
    assert [str(entry.path) for entry in plan.entries] == [
        r"layers\.\d+.norm.weight",
        r"layers\.\d+.fc1.weight",
        "<in:x>",
    ]
    assert [str(entry.source) for entry in plan.entries] == [
        f"{tmp_path}/parts/norm.yaml:2:3",
        f"{tmp_path}/parts/tp.yaml:5:3",
        f"{tmp_path}/plan.yaml:5:3",
    ]
    assert Plan.from_yaml(plan.to_yaml(), {"dp": 2, "tp": 4}) == plan
    with pytest.raises(PlanError, match=r"plan.yaml:3:8: the plan is for axes dp, tp, but the mesh has tp"):
        Plan.from_yaml(tmp_path / "plan.yaml", {"tp": 4})


def test_the_mesh_may_be_that_of_an_included_plan(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("mesh: {tp: 2}\nshard: {a: {tp: R}}\n")
    (tmp_path / "plan.yaml").write_text("include: [base.yaml]\n")
    assert Plan.from_yaml(tmp_path / "plan.yaml").axes.sizes == (2,)
    (tmp_path / "base.yaml").write_text("mesh: {tp: null}\nshard: {a: {tp: R}}\n")
    with pytest.raises(PlanError, match=r"base.yaml:1:1: the plan does not contain the sizes of tp"):
        Plan.from_yaml(tmp_path / "plan.yaml")


def test_mistakes_of_included_plans_have_their_own_place(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("shard:\n  a: {tp: Q}\n")
    (tmp_path / "plan.yaml").write_text("include: [base.yaml]\n")
    with pytest.raises(PlanError, match=r"base.yaml:2:7: 'Q' is not a placement"):
        Plan.from_yaml(tmp_path / "plan.yaml", AXES)
    (tmp_path / "plan.yaml").write_text("include: base.yaml\n")
    with pytest.raises(PlanError, match=r"plan.yaml:1:1: .*expected a list"):
        Plan.from_yaml(tmp_path / "plan.yaml", AXES)


def test_an_include_needs_a_file() -> None:
    with pytest.raises(PlanError, match=r"<yaml>:2:4: include 'a.yaml': a plan that is passed as text has no folder"):
        Plan.from_yaml("include:\n - a.yaml\n", AXES)


def test_the_first_mistake_of_a_file_is_told() -> None:
    """Whatever the seed of hashes: the schema's own order is that of a set."""
    text = "shard:\n" + "".join(f"  p{index}: [{index}]\n" for index in range(50))
    with pytest.raises(PlanError, match=r"^<yaml>:2:8: 0 in shard.p0 is a number"):
        Plan.from_yaml(text, AXES)


@pytest.mark.parametrize("text", ["010", "1:30", "0x10", "1_000", "9" * 19])
def test_numbers_are_plain(text: str) -> None:
    with pytest.raises(PlanError, match=f"{text}.*is not a plain number"):
        Plan.from_yaml(f"mesh: {{dp: {text}}}\nshard: {{}}\n")


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    """Plans of one file are apart, though its text is parsed once."""
    file = tmp_path / "plan.yaml"
    file.write_text("shard: {a: {tp: S(0)}}\n")
    first, second = Plan.from_yaml(file, AXES), Plan.from_yaml(file, AXES)
    first.shard("b", Shard(1), mesh="tp")
    assert len(first.entries) == 2 and len(second.entries) == 1
    file.write_text("shard: {a: {tp: S(1)}}\n")
    assert Plan.from_yaml(file, AXES).to_yaml() != second.to_yaml()
