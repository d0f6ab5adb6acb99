"""A recorded step as a value and as a file: it runs in other processes, or does not fit, with a reason."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.ranks import RankPools
from tests.static.models import compare, mesh_of, tp_plan
from tests.static.test_forward import Decorated, Twice, Wrapped
from tests.static.test_forward import batch as batch_of
from vescale import Plan, parallelize
from vescale.cli import main
from vescale.errors import StaticRecordError
from vescale.placements import RaggedShard
from vescale.plans import INIT, RUN
from vescale.static import RecordedProgram, program, report

pytestmark = pytest.mark.helper("dispatch")


def batch(rows: int = 4, seed: int = 1) -> torch.Tensor:
    return batch_of(rows, seed=seed)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield mesh_of()
    dist.destroy_process_group()


def built(model: Callable[[], nn.Module], plan: Plan, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return parallelize(model(), plan, mode="static", **options)


def recorded(
    model: Callable[[], nn.Module], plan: Plan, x: torch.Tensor | None = None
) -> tuple[nn.Module, RecordedProgram]:
    made = built(model, plan)
    made(batch() if x is None else x).square().mean().backward()
    return made, program(made)


# Models of the tests across processes


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, 2).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.heads(project(x)) for project in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Dropped(Wrapped):
    """Random numbers, a module that runs in eager mode, and one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)
        self.counting = Counting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.counting(self.drop(self.mlp(x)))


class Counting(nn.Module):
    """It writes to an attribute, so that it stays in eager mode."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return x * 2


def attention_plan(mesh: DeviceMesh) -> Plan:
    plan = Plan(mesh)
    plan.shard(r"(q|k|v).(weight|bias)", Shard(0)).shard(r"o.weight", Shard(1)).shard(r"o.<out>", Replicate())
    return plan


def rows_plan(mesh: DeviceMesh) -> Plan:
    """Rows that two ranks do not share evenly."""
    return tp_plan(mesh).shard("<in>", Shard(0))


def unit_plan(mesh: DeviceMesh) -> Plan:
    """Parameters at rest in parts, over ranks that have other rows (ZeRO-3)."""
    plan = Plan(mesh).shard("<in>", Shard(0))
    plan.shard(".*", RaggedShard(), phase=INIT).shard(".*", Replicate(), phase=RUN)
    return plan.unit("mlp", reshard_after_forward=True)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[DeviceMesh], Plan]]] = {
    "twice": (Twice, tp_plan),
    "decorated": (Decorated, tp_plan),
    "attention": (Attention, attention_plan),
    "dropout": (Dropped, tp_plan),
    "checkpointed": (Twice, lambda mesh: tp_plan(mesh).checkpoint("mlp", "full")),
    "units": (Twice, unit_plan),
}


def run_records(folder: str) -> dict[str, Any]:
    found = {}
    for name, (model, plan) in CASES.items():
        torch.manual_seed(0)
        eager = parallelize(model(), plan(mesh_of()))
        static = built(model, plan(mesh_of()), record=f"{folder}/{name}.yaml")
        for step in range(3):
            compare((eager, static), batch(rows=2 + 2 * step, seed=step), seed=step)
        found[name] = report(static)
    return found


def uneven_sizes(folder: str) -> list[Any]:
    """A record is of one rank where sizes are uneven: each reads its own, and then the other's."""
    _, mine = recorded(Twice, rows_plan(mesh_of()), batch(rows=3))
    mine.to_yaml(f"{folder}/{dist.get_rank()}.yaml")
    dist.barrier()
    found = []
    for rank in (dist.get_rank(), 1 - dist.get_rank()):
        torch.manual_seed(0)
        eager = parallelize(Twice(), rows_plan(mesh_of()))
        static = built(Twice, rows_plan(mesh_of()), record=f"{folder}/{rank}.yaml")
        for step in range(3):
            compare((eager, static), batch(rows=3, seed=step), seed=step)
        found.append(report(static))
    return found


def test_other_processes_run_a_record(ranks: RankPools, mesh: DeviceMesh, tmp_path: Path) -> None:
    """Two ranks, with collectives, run what one process has recorded without any: with the bits of eager mode from their
    first step on, and without recording."""
    for name, (model, plan) in CASES.items():
        recorded(model, plan(mesh))[1].to_yaml(tmp_path / f"{name}.yaml")
    for found in ranks.run(run_records, str(tmp_path), world_size=2):
        for name, one in found.items():
            assert (one.recordings, one.static_steps) == (0, 3), f"{name}: {one}"
        assert [fallback.path for fallback in found["dropout"].fallbacks] == ["counting"]


def test_uneven_sizes_are_of_one_rank(ranks: RankPools, tmp_path: Path) -> None:
    for own, other in ranks.run(uneven_sizes, str(tmp_path), world_size=2):
        assert (own.recordings, own.static_steps) == (0, 3), own
        assert other.recordings == 1 and "unevenly" in str(other), other


# The value


def test_a_program_tells_types_sites_and_communication(mesh: DeviceMesh) -> None:
    _, found = recorded(Twice, tp_plan(mesh))
    (step,) = found.steps
    (shape,) = (site for site in found.sites if site.site.function == "torch.Tensor.shape.__get__")
    source = Path(shape.file if Path(shape.file).exists() else Path(__file__).parent / "models.py").read_text()
    assert source.splitlines()[shape.line - 1][shape.column - 1 :].startswith("h.shape")
    assert (shape.path, shape.site.action, shape.site.factors) == ("mlp", "read_sizes", (1, 1, 2))
    (down,) = (site for site in found.sites if site.path == "mlp.down")
    assert down.site.action == "redistribute" and down.site.function == "torch.nn.functional.linear"
    assert [kind.kinds(found.axes)["tp"] for kind in down.site.inputs] == ["sharded", "sharded", "invariant"]
    assert [kind.kinds(found.axes)["tp"] for kind in down.site.outputs] == ["partial"]
    modules = {module.path: module for module in step.modules}
    (out,) = modules["mlp.down"].boundaries
    assert out.communication == ("all_reduce over tp",)
    before, after = out.tensors[0]
    assert before.placements == (Partial(),) and after.placements == (Replicate(),)
    (given,) = modules["mlp.up"].boundaries
    assert given.tensors[0][1].kinds(found.axes) == {"tp": "replicated"}  # its gradient is a sum over the ranks
    assert dict(step.grads)["mlp.up.weight"] == (Shard(0),)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.device = "cuda"  # type: ignore[misc]


@pytest.mark.parametrize("name", CASES)
def test_yaml_is_read_back_equal(mesh: DeviceMesh, name: str, tmp_path: Path) -> None:
    model, plan = CASES[name]
    _, found = recorded(model, plan(mesh))
    text = found.to_yaml(tmp_path / "record.yaml")
    assert RecordedProgram.from_yaml(tmp_path / "record.yaml") == RecordedProgram.from_yaml(text) == found
    again = built(model, plan(mesh), record=found)
    assert program(again) == found  # before it has run
    again(batch()).square().mean().backward()
    assert program(again) == found


def test_kinds_of_steps(mesh: DeviceMesh) -> None:
    """Gradient mode is another kind of step; a kind that the record does not have is recorded."""
    model, _ = recorded(Twice, tp_plan(mesh))
    with torch.no_grad():
        model(batch())
    found = program(model)
    assert len(found.steps) == 2
    again = built(Twice, tp_plan(mesh), record=found)
    with torch.no_grad():
        again(batch())
    again(batch()).square().mean().backward()
    assert (report(again).recordings, report(again).static_steps) == (0, 2)
    with torch.autocast("cpu", torch.bfloat16):
        again(batch()).square().mean().backward()
    assert report(again).recordings == 1


def test_a_copy_of_a_model_has_the_record(mesh: DeviceMesh) -> None:
    import copy

    _, found = recorded(Twice, tp_plan(mesh))
    again = copy.deepcopy(built(Twice, tp_plan(mesh), record=found))
    again(batch()).square().mean().backward()
    assert (report(again).recordings, report(again).static_steps) == (0, 1)


def test_no_step_was_recorded(mesh: DeviceMesh) -> None:
    model = built(Twice, tp_plan(mesh))
    with pytest.raises(StaticRecordError, match="no step of the model has been recorded"):
        program(model)
    model(batch()).square().mean().backward()
    model.flag = True
    with pytest.raises(StaticRecordError, match="attributes of the model have changed since it was recorded"):
        program(model)


# What does not fit


def other_versions(found: RecordedProgram) -> RecordedProgram:
    return dataclasses.replace(found, versions=(found.versions[0], ("torch", "2.0.0"), found.versions[2]))


def test_records_that_do_not_fit_are_errors(mesh: DeviceMesh) -> None:
    _, found = recorded(Twice, tp_plan(mesh))
    refused: list[tuple[str, Any, dict[str, Any]]] = [
        ("made with torch 2.0.0", tp_plan(mesh), {"record": other_versions(found)}),
        ("another plan", rows_plan(mesh), {"record": found}),
        ("mode='static'", tp_plan(mesh), {"record": found, "mode": "eager"}),
        ("cannot read the record", tp_plan(mesh), {"record": "/nowhere/record.yaml"}),
        ("made on cuda", tp_plan(mesh), {"record": dataclasses.replace(found, device="cuda")}),
    ]
    for text, plan, options in refused:
        model = Twice()
        with pytest.raises(ValueError, match=text):
            parallelize(model, plan, **{"mode": "static", **options})
        assert type(model.mlp.up.weight.data) is torch.Tensor, "the model was changed"
    other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(StaticRecordError, match="of a mesh"):
        built(Twice, Plan(other).shard("mlp.up.weight", {"tp": Shard(0)}), record=found)


BROKEN = {
    "not YAML": lambda text: text.replace("types:", "types: ["),
    "edited": lambda text: text.replace("factors: [1, 1, 2]", "factors: [1, 2, 1]", 1),
    "cut": lambda text: text[: len(text) // 2],
    "a tag": lambda text: text.replace("device: cpu", "device: !!python/object/apply:os.system [echo]"),
    "an alias": lambda text: text.replace("device: cpu", "device: &a cpu\nother: *a"),
    "another format": lambda text: text.replace("static_record: 1", "static_record: 2"),
    "a plan": lambda text: "mesh: {tp: 2}\nshard: {}\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_are_no_records(mesh: DeviceMesh, name: str) -> None:
    _, found = recorded(Twice, tp_plan(mesh))
    text = found.to_yaml()
    with pytest.raises(StaticRecordError):
        RecordedProgram.from_yaml(BROKEN[name](text))


def test_values_are_validated(mesh: DeviceMesh) -> None:
    _, found = recorded(Twice, tp_plan(mesh))
    site = found.sites[0].site
    for changes in ({"function": "os.system"}, {"function": "torch.load"}, {"action": "run"}, {"node": -1}):
        with pytest.raises(StaticRecordError):
            dataclasses.replace(site, **changes)
    (step,) = found.steps
    with pytest.raises(StaticRecordError, match="one step for each kind"):
        dataclasses.replace(found, steps=(step, step))
    kind = dataclasses.replace(step.inputs[0], placements=(Replicate(), Replicate()))
    with pytest.raises(StaticRecordError, match="one placement for each"):
        dataclasses.replace(found, steps=(dataclasses.replace(step, inputs=(kind,)),))


# Models that have changed: the step is recorded instead


SOURCE = """
import torch
from torch import nn

SCALE = 2.0

def shrink(x):
    return x / x.shape[-1]

def act(x):
    return torch.relu(x)

class Block(nn.Module):
    power = 1

    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.settings = {"act": torch.tanh}

    def forward(self, x):
        return self.down(self.settings["act"](act(shrink(self.up(x))))) * SCALE ** self.power
"""


def block_plan(mesh: DeviceMesh) -> Plan:
    plan = Plan(mesh)
    plan.shard("up.(weight|bias)", Shard(0)).shard("down.weight", Shard(1)).shard("down.<out>", Replicate())
    return plan


def loaded_module(folder: Path, text: str) -> Any:
    """A module of the file ``block.py``, as a new process would import it."""
    folder.mkdir()
    (folder / "block.py").write_text(text)
    spec = importlib.util.spec_from_file_location("block", folder / "block.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["block"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_globals(module: Any) -> None:
    module.act = torch.sigmoid


def of_a_class(module: Any) -> None:
    module.Block.forward = lambda self, x: self.down(self.up(x))


def of_a_function(module: Any) -> None:
    text = "def shrink(x):\n    return x / x.shape[-1] ** 2\n"
    (Path(module.__file__).parent / "other.py").write_text(text)
    spec = importlib.util.spec_from_file_location("other", Path(module.__file__).parent / "other.py")
    assert spec is not None and spec.loader is not None
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    module.shrink = other.shrink


CHANGES: dict[str, tuple[str, Callable[[Any], None] | None, Callable[[Any], None] | None]] = {
    "nothing": (SOURCE, None, None),
    "a function that is called": (SOURCE.replace("x / x.shape[-1]", "x / x.shape[-1] ** 2"), None, None),
    "a constant": (SOURCE.replace("SCALE = 2.0", "SCALE = 3.0"), None, None),
    "an attribute of the class": (SOURCE.replace("power = 1", "power = 3"), None, None),
    "a global function": (SOURCE, in_globals, None),
    "a function of another file": (SOURCE, of_a_function, None),
    "a method": (SOURCE, of_a_class, None),
    "a function in an attribute": (SOURCE, None, lambda model: model.settings.update(act=torch.sigmoid)),
    "a part": (SOURCE, None, lambda model: model.add_module("more", nn.Identity())),
    "training": (SOURCE, None, lambda model: model.eval()),
    "requires_grad": (SOURCE, None, lambda model: model.up.bias.requires_grad_(False)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_models_do_not_run_a_record(mesh: DeviceMesh, tmp_path: Path, name: str) -> None:
    text, change_module, change_model = CHANGES[name]
    module = loaded_module(tmp_path / "before", SOURCE)
    _, found = recorded(module.Block, block_plan(mesh))
    module = loaded_module(tmp_path / "after", text)
    if change_module is not None:
        change_module(module)
    models = []
    for options in ({}, {"mode": "static", "record": found}):
        torch.manual_seed(0)
        model = parallelize(module.Block(), block_plan(mesh), **options)
        if change_model is not None:
            change_model(model)
        models.append(model)
    for step in range(3):
        compare((models[0], models[1]), batch(seed=step))
    told = report(models[1])
    if name == "nothing":
        assert (told.recordings, told.static_steps) == (0, 3), told
    else:
        assert told.recordings == 1 and told.static_steps >= 1, told
        assert any(
            "the record does not fit" in one.reason or "was not recorded" in one.reason for one in told.fallbacks
        ), told


def test_explain_shows_sites_beside_source_lines(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = loaded_module(tmp_path / "block", SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path / "block"))
    _, found = recorded(module.Block, block_plan(mesh))
    (tmp_path / "plan.yaml").write_text(block_plan(mesh).to_yaml())
    file = tmp_path / "record.yaml"
    found.to_yaml(file)
    arguments = [
        "explain",
        str(tmp_path / "plan.yaml"),
        "--model",
        "block:Block",
        "--mesh",
        "tp=2",
        "--static",
        str(file),
    ]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    place = next(number for number, line in enumerate(lines) if "block.py:8:" in line)
    assert lines[place + 1].strip() == "return x / x.shape[-1]"
    assert lines[place + 1][lines[place + 2].index("^") :].startswith("x.shape")
    assert "torch.Tensor.shape returns global sizes (dim 2: 2 ranks)" in lines[place + 3]
    assert any("torch.nn.functional.linear runs on DTensors: (tp: sharded), " in line for line in lines)
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["line"] for row in rows if row["action"] == "read_sizes"] == [8]
    (tmp_path / "plan.yaml").write_text(block_plan(mesh).shard("<in>", Shard(0)).to_yaml())
    assert main(arguments) == 1
    assert "another plan" in capsys.readouterr().out


def test_every_placement_of_a_record_has_a_name() -> None:
    from vescale.compat import StridedShard
    from vescale.placements import InterleavedShard, RaggedShard
    from vescale.static._placement_names import placement_name, placement_named

    for placement in (Replicate(), Shard(1), Partial("max"), StridedShard(0, split_factor=3), InterleavedShard(0, 2)):
        assert placement_named(placement_name(placement)) == placement
    assert placement_named(placement_name(RaggedShard((0,), (1, 3)))) == RaggedShard((0,), (1, 3))
    for text in ("", "S", "Strided(0)", "Shard(0)", "__import__('os')"):
        with pytest.raises(StaticRecordError):
            placement_named(text)
