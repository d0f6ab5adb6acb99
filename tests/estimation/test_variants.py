"""``--what-if``: changes hold together, in any order, and keep what the plan says of units; mistakes are told from choices
that a plan does not take. Device tables that cannot be read are mistakes, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from vescale import Plan, RaggedShard
from vescale.errors import EstimateOptionError
from vescale.estimation import Estimate, device_of, estimate, what_if, zero_table
from vescale.plans import UnitEntry


class Net(nn.Module):
    """All parameters are in blocks: the model itself gathers none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x.square().mean()


def plan_of(mesh: dict[str, int]) -> Plan:
    plan = Plan(mesh).shard("<in:x>", {"dp": Shard(0)})
    plan.shard(".*", {"dp": RaggedShard()}, phase="init").shard(".*", {"dp": Replicate()}, phase="run")
    return plan


def found_of(plan: Plan, **options: Any) -> Estimate:
    return estimate(Net(), plan, batch={"x": (8, 16)}, device="h100-80g", steps=2, **options)


def units_of(estimate: Estimate) -> dict[str, tuple[Any, Any, Any]]:
    return {
        entry.path.text: (entry.reshard_after_forward, entry.mp_policy, entry.offload_pinned)
        for entry in estimate.given["plan"].entries
        if isinstance(entry, UnitEntry)
    }


def test_changes_hold_together_in_any_order() -> None:
    found = found_of(plan_of({"dp": 4}))
    both = what_if(found, "stage=2,offload=true")
    assert {**what_if(found, "offload=true,stage=2"), "what_if": ""} == {**both, "what_if": ""}
    assert both["unsharded"] == what_if(found, "stage=2")["unsharded"] > what_if(found, "offload=true")["unsharded"]
    assert both["parameters"] < found.peak.categories["parameters"]


def test_units_of_the_plan_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of({"dp": 4}).unit(r"blocks\.0", offload_policy={"pin_memory": True})
    plan.unit(r"blocks\.1", mp_policy={"param_dtype": "bfloat16"})
    found = found_of(plan)
    seen: list[Estimate] = []
    again = Estimate.again
    monkeypatch.setattr(Estimate, "again", lambda self, **given: seen.append(again(self, **given)) or seen[-1])
    policy = next(e.mp_policy for e in plan.entries if isinstance(e, UnitEntry) and e.mp_policy is not None)
    own = {r"blocks\.0": (False, None, True), r"blocks\.1": (False, policy, None)}
    others = dict.fromkeys((r"blocks\.2", r"blocks\.3"), (False, None, None))
    what_if(found, "stage=2")
    assert units_of(seen[-1]) == own | others
    what_if(found, "stage=3")
    assert units_of(seen[-1]) == {path: (None, *rest) for path, (_, *rest) in own.items()}
    what_if(found, "offload=false")
    assert units_of(seen[-1]) == {r"blocks\.0": (None, None, None), r"blocks\.1": (None, policy, None)}
    what_if(found, "offload=true")
    assert [one[2] for one in units_of(seen[-1]).values()] == [True, False, False, False]
    assert [row["stage"] for row in zero_table(found)] == ["0", "1", "2", "3", "HSDP 2x2"]
    assert units_of(seen[-1]).keys() == own.keys(), "replicas are of the plan's own units"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("precision=int7", "floating-point dtype"),
        ("precision=int8", "floating-point dtype"),
        ("mesh=dp", "write axes and sizes as dp:4"),
        ("mesh=dp:0", "write axes and sizes as dp:4"),
        ("load=-1", "a multiple of the mean"),
        ("load=nan", "a multiple of the mean"),
        ("batch=0", "write an integer"),
        ("batch=8,batch=16", "given twice"),
        ("device=zzz", "no table of a device 'zzz'"),
    ],
)
def test_a_change_that_cannot_be_read_is_a_mistake(text: str, problem: str) -> None:
    with pytest.raises(EstimateOptionError, match=problem):
        what_if(found_of(plan_of({"dp": 2}), optimizer="sgd"), text)


def test_a_choice_that_the_plan_does_not_take_is_a_row() -> None:
    assert "axis 'dp'" in what_if(found_of(plan_of({"dp": 2})), "mesh=tp:4")["error"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("a: [1,\n b: {", "not readable as YAML"),
        ("\tx: 1", "not readable as YAML"),
        (b"\x00\xff\xfe", "not readable as YAML"),
        ("hello", "expected a mapping"),
        ({3: 4}, "unknown key 3"),
        ({"name": 3}, "name is 3"),
        ({"flops": {}}, "flops is"),
        ({"flops": {"float32": 0}}, "flops is"),
        ({"memory_bytes": -1}, "memory_bytes is -1"),
        ({"memory_bytes": "80e9"}, "memory_bytes is '80e9'"),
        ({"ranks_per_node": 2.5}, "write an integer"),
        ({"bandwidth": float("inf")}, "bandwidth is inf"),
        ({"efficiency": [[0, 0.5]]}, "efficiency is"),
        ({"outside_bytes": {"context": -1}}, "outside_bytes is"),
    ],
)
def test_tables_that_cannot_be_read(change: Any, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    if isinstance(change, dict):
        shipped = Path(device_of.__globals__["_FOLDER"]) / "h100-80g.yaml"
        change = yaml.safe_dump({**yaml.safe_load(shipped.read_text()), **change})
    file.write_bytes(change if isinstance(change, bytes) else change.encode())
    with pytest.raises(EstimateOptionError, match=problem):
        device_of(str(file))
