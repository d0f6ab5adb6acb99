"""Entries written in Python: what they become, and what is refused, with the calling line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from vescale.ir import lower
from vescale.placements import RaggedShard
from vescale.plans import ALL, BWD, FWD, INIT, RUN, MeshAxes, Phase, Plan, PlanError, ShardEntry, Target

AXES = {"dp": 2, "tp": 4}


def test_phases_compose() -> None:
    assert RUN == FWD | BWD
    assert ALL == INIT | RUN
    assert FWD in RUN and INIT not in RUN


def test_axes_come_in_mesh_order() -> None:
    plan = Plan(AXES).shard("a.weight", {"tp": Shard(0), "dp": Replicate()})
    entry = plan.entries[0]
    assert isinstance(entry, ShardEntry)
    assert entry.placements == (("dp", Replicate()), ("tp", Shard(0)))
    assert entry.phase == ALL and entry.given == "global"


def test_forms_of_naming_axes_agree() -> None:
    by_name = Plan(AXES).shard("w", Shard(0), mesh="tp", phase=INIT)
    by_dict = Plan(AXES).shard("w", {"tp": Shard(0)}, phase="init")
    by_list = Plan(AXES).shard("w", [Shard(0)], mesh=["tp"], phase=Phase.INIT)
    assert by_name == by_dict == by_list
    assert Plan({"tp": 2}).shard("w", Shard(0)).entries[0] == Plan({"tp": 2}).shard("w", Shard(0), mesh="tp").entries[0]


def test_plans_are_compared_by_entries_and_axes() -> None:
    first = Plan(AXES).shard("a", Shard(0), mesh="tp").factory(".*", Replicate(), mesh="tp")
    other_order = Plan(AXES).factory(".*", Replicate(), mesh="tp").shard("a", Shard(0), mesh="tp")
    assert first == other_order  # entries never override each other: their order has no meaning
    two = Plan(AXES).shard("a", Shard(0), mesh="tp").shard("b", Shard(0), mesh="tp")
    swapped = Plan(AXES).shard("b", Shard(0), mesh="tp").shard("a", Shard(0), mesh="tp")
    assert two == swapped != first
    assert Plan({"dp": 2, "tp": 2}) != Plan(AXES)


def test_entries_know_their_line() -> None:
    plan = Plan(AXES)
    plan.shard("w", Shard(0), mesh="tp")
    source = plan.entries[0].source
    assert source is not None and FilePath(source.file).name == "test_plan.py"
    line = FilePath(__file__).read_text().splitlines()[source.line - 1]
    assert 'plan.shard("w"' in line


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda p: p.shard("w", Shard(0), mesh="t"), r"no axis 't' \(axes: dp, tp\); did you mean 'tp'\?"),
        (lambda p: p.shard("w", Shard(0)), "which of the axes dp, tp"),
        (lambda p: p.shard("w", [Shard(0)], mesh=("dp", "tp")), "1 placements for the 2 axes"),
        (lambda p: p.shard("w", "S(0)", mesh="tp"), "not a placement"),
        (lambda p: p.shard("w", {"tp": Shard(0)}, mesh="tp"), "remove axis="),
        (lambda p: p.shard("w", {}), "pass at least one axis"),
        (
            lambda p: p.shard("w", Shard(0), mesh=()),
            r"axis=\(\) is not the name of an axis; pass axis='dp', or several",
        ),
        (lambda p: p.shard("w", [Shard(0), Shard(0)], mesh=("tp", "tp")), "repeat"),
        (lambda p: p.shard("", Shard(0), mesh="tp"), "path is empty"),
        (lambda p: p.shard("(w", Shard(0), mesh="tp"), "not a valid regular expression"),
        (lambda p: p.shard("a.<in", Shard(0), mesh="tp"), "not an input or output"),
        (lambda p: p.shard("a.<inn>", Shard(0), mesh="tp"), "not an input or output"),
        (lambda p: p.shard("<in>.a", Shard(0), mesh="tp"), "not an input or output"),
        (lambda p: p.shard("w", Shard(0), mesh="tp", phase="forward"), "not one of init, fwd, bwd, run, all"),
        (lambda p: p.shard("w", Shard(0), mesh="tp", given="local"), "only inputs of the model itself"),
        (
            lambda p: p.redistribute("w", Shard(0), Replicate(), mesh="tp"),
            "the entry is for a module's inputs or outputs",
        ),
        (lambda p: p.redistribute("a.<in>", {"tp": Shard(0)}, {"dp": Replicate()}), "same axes in both"),
        (lambda p: p.factory("a.<in>", Replicate(), mesh="tp"), "takes a module path"),
        (lambda p: p.local("a", kind="expert"), "use 'experts'"),
        (lambda p: p.local("a", dispatch="mask"), "needs kind='experts'"),
    ],
)
def test_mistakes_are_refused_with_the_calling_line(write: Callable[[Plan], object], message: str) -> None:
    plan = Plan(AXES)
    with pytest.raises(PlanError, match=message) as caught:
        write(plan)
    assert str(caught.value).startswith(__file__)
    assert plan.entries == ()


@pytest.mark.parametrize(
    ("mesh", "message"),
    [({"dp": 0}, "at least one rank"), ({"d p": 2}, "not an identifier")],
)
def test_meshes_are_checked(mesh: dict[str, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(mesh)


def test_mesh_axes_from_text() -> None:
    assert MeshAxes.parse("dp=2, tp=4") == MeshAxes(("dp", "tp"), (2, 4))
    for text in ("dp", "dp=x", "dp=2,dp=2", ""):
        with pytest.raises(ValueError, match="dp"):
            MeshAxes.parse(text)


@pytest.mark.parametrize(
    ("text", "pattern", "target", "key"),
    [
        ("a.weight", "a.weight", Target.STATE, None),
        (r"blk\.\d+\.weight.grad", r"blk\.\d+\.weight", Target.GRAD, None),
        (r"norm\.weight\.grad", r"norm\.weight", Target.GRAD, None),
        ("a.<in>", "a", Target.IN, None),
        ("a.<in:x>", "a", Target.IN, "x"),
        ("a.<out:0>", "a", Target.OUT, 0),
        ("<in:input_ids>", "", Target.IN, "input_ids"),
        ("(?P<layer>a|b).weight", "(?P<layer>a|b).weight", Target.STATE, None),
    ],
)
def test_paths(text: str, pattern: str, target: Target, key: str | int | None) -> None:
    path = Plan({"tp": 2}).shard(text, Replicate()).entries[0].path
    assert (path.pattern, path.target, path.key, path.text) == (pattern, target, key, text)


def test_paths_match_whole_names() -> None:
    path = Plan({"tp": 2}).shard(r"layers.\d+.weight", Replicate()).entries[0].path
    assert path.matches("layers.12.weight")
    assert not path.matches("model.layers.12.weight")
    assert not path.matches("layers.12.weight_scale")


def test_placements_are_kept_as_given() -> None:
    ragged = RaggedShard((0,), (1, 3), 8)
    plan = Plan({"dp": 2}).shard("w", ragged, phase=INIT).shard("x.<out>", Partial("avg"))
    assert plan.entries[0].placements == (("dp", ragged),)  # type: ignore[union-attr]
    assert plan.entries[1].placements == (("dp", Partial("avg")),)  # type: ignore[union-attr]


def test_the_dot_before_an_input_may_be_escaped() -> None:
    plain, escaped = (Plan({"tp": 2}).shard(path, Replicate()) for path in (r"a\.b.<out>", r"a\.b\.<out>"))
    assert [e.path.pattern for e in plain.entries] == [e.path.pattern for e in escaped.entries] == [r"a\.b"]


def test_several_inputs_in_one_path() -> None:
    """Also of a forward that takes any keyword, where a name that it does not know is no mistake."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor, mask: Any = None, **more: Any) -> torch.Tensor:
            return self.layer(ids) - labels

    with torch.device("meta"):
        model = Net()
    one_by_one = Plan({"dp": 2}).shard("<in:ids>", Shard(0)).shard("<in:labels>", Shard(0))
    together = Plan({"dp": 2}).shard("<in:(ids|labels)>", Shard(0))
    assert lower(together, model).to_text() == lower(one_by_one, model).to_text()
    assert Plan.from_yaml(together.to_yaml(), {"dp": 2}) == together
    with pytest.raises(
        PlanError, match=r"<in:\(idz\|labelz\)>' on .* matches none of the inputs that the forward names \(ids, "
    ):
        lower(Plan({"dp": 2}).shard("<in:(idz|labelz)>", Shard(0)), model)
    for bad in ("<in:(ids|labels>", "<in:id.*>", "<in:[il].+>"):
        with pytest.raises(PlanError, match="is neither a name nor several"):
            Plan({"dp": 2}).shard(bad, Shard(0))
    with pytest.raises(PlanError, match="outputs are named one by one"):
        Plan({"dp": 2}).shard("<out:(loss|logits)>", Shard(0))


def test_local_inputs() -> None:
    plan = (
        Plan({"dp": 2}).shard("<in:ids>", Shard(0)).shard("layer.<in:input>", Shard(0)).shard("layer.weight", Shard(0))
    )
    assert plan.local_inputs() is plan
    assert [getattr(entry, "given", None) for entry in plan.entries] == ["local", "global", "global"]
    assert plan == Plan({"dp": 2}).shard("<in:ids>", Shard(0), given="local").shard("layer.<in:input>", Shard(0)).shard(
        "layer.weight", Shard(0)
    )
    with pytest.raises(PlanError, match="no entry places an input of the model"):
        Plan({"dp": 2}).shard("layer.<in:input>", Shard(0)).local_inputs()


def test_axes_and_lists_of_placements_are_written_as_users_do() -> None:
    """``axis=`` and ``mesh=`` are one argument; a list has a placement for each axis of the mesh."""
    mesh = {"dp": 2, "tp": 2}
    one = Plan(mesh, inputs="local").shard("<in:x>", Shard(0), axis="dp").shard("w", [Replicate(), Shard(1)])
    one.shard("a.<in:x>", Shard(0), axis="dp").attention("b", "ring", axis="tp").annotate(
        "c.grad", Partial(), axis="dp"
    )
    two = Plan(mesh).shard("<in:x>", Shard(0), mesh="dp", given="local")
    two.shard("w", {"dp": Replicate(), "tp": Shard(1)}).shard("a.<in:x>", Shard(0), mesh="dp")
    two.attention("b", "ring", mesh="tp").annotate("c.grad", Partial(), mesh="dp")
    assert one == two
    assert Plan({"pp": 2}).pipeline(split_before=["a"], axis="pp") == Plan({"pp": 2}).pipeline(split_before=["a"])
    with pytest.raises(PlanError, match="mean the same; pass one"):
        one.shard("w", Shard(0), mesh="dp", axis="dp")
    with pytest.raises(PlanError, match="1 placements for the 2 axes"):
        one.shard("w", [Shard(0)])
    with pytest.raises(PlanError, match="inputs='mine'"):
        Plan(mesh, inputs="mine")  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_writes_the_entries_of_a_stage(stage: Literal[1, 2, 3]) -> None:
    mesh = {"fsdp": 2, "ep": 2}
    short = Plan(mesh).zero(stage, axis=("fsdp", "ep"), path="layers.*", units=[r"layers\.\d+", ""])
    long = Plan(mesh).shard("layers.*", RaggedShard(), mesh=("fsdp", "ep"), phase=INIT)
    long.shard("layers.*", Replicate(), mesh=("fsdp", "ep"), phase=RUN)
    for path in (r"layers\.\d+", ""):
        keep = {3: None, 2: False, 1: False}[stage]
        long.unit(path, reshard_after_forward=keep, reshard_after_backward=False if stage == 1 else None)
    assert short == long


def test_stages_that_zero_cannot_write() -> None:
    for stage, text in ((2, "name the model's blocks, as in units="), (4, "use 1, 2 or 3")):
        with pytest.raises(PlanError, match=text):
            Plan({"dp": 2}).zero(stage)  # type: ignore[arg-type]
