"""Seconds of a step with the table of a measured host, and how such a table is made."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn
from torch.distributed.tensor import Shard

from tests.estimation.measure import CASES, estimated
from vescale import Plan
from vescale.comm import CommRecord
from vescale.errors import EstimateOptionError
from vescale.estimation import (
    HOST_KINDS,
    Curve,
    Device,
    OpCosts,
    calibrate,
    device_of,
    estimate,
    host_seconds,
    on_processors,
    record_seconds,
    references,
)
from vescale.estimation._calibrate import _Called, _fit, _Measured, measure_ops
from vescale.estimation._memory_log import RANDOM_SPANS, SKIPPED_OUTPUTS, OpCost
from vescale.estimation._rehearsal import rehearse
from vescale.estimation._step_time import StepTime, call_seconds
from vescale.plans import MeshAxes


def measured(**changes: Any) -> Device:
    points = ((1e3, 1e-5), (1e6, 1e-3))
    ops = {"mm": Curve(points), "clone": Curve(points)}
    collectives = {"all_reduce": Curve(((1e3, 1e-4, 5e-5), (1e6, 1e-2, 4e-3)))}
    return dataclasses.replace(device_of("cpu"), ops=ops, collectives=collectives, **changes)


def test_curves() -> None:
    curve = Curve(((10.0, 1.0), (20.0, 3.0)))
    assert [curve.at(size) for size in (1, 10, 15, 20, 40)] == [1.0, 1.0, 2.0, 3.0, 6.0]


def test_ops_of_a_measured_host() -> None:
    device = measured(flops={"float32": 100.0, "bfloat16": 400.0})
    product, copy, other = (OpCost("mm", 10**6, 5), OpCost("clone", 0, 10**3), OpCost("tril", 0, 10**6))
    assert call_seconds(product, torch.float32, device) == 1e-3
    assert call_seconds(product, torch.bfloat16, device) == 1e-3 / 4
    assert call_seconds(copy, torch.float32, device) == 1e-5
    assert call_seconds(other, torch.float32, device) == 1e-3, "an op that was not measured moves memory as a copy does"
    assert call_seconds(OpCost("convolution", 600, 5), torch.float32, device) >= 600 / 100.0


def test_collectives_of_a_measured_host() -> None:
    device, axes = measured(), MeshAxes.of({"dp": 64})
    assert record_seconds(CommRecord("all_reduce", 2, 1000, axes="dp"), device, axes) == 1e-4
    more = record_seconds(CommRecord("all_reduce", 4, 1000, axes="dp"), device, axes)
    assert more == pytest.approx(2e-4), "twice the rounds of the smallest one"
    assert record_seconds(CommRecord("all_reduce", 2, 1000, axes="dp"), on_processors(device), axes) == 5e-5
    far = dataclasses.replace(device, ranks_per_node=1)
    assert record_seconds(CommRecord("all_reduce", 2, 1000, axes="dp"), far, axes) != 1e-4, "between hosts: the table's"


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_what_a_host_hides(overlap: float) -> None:
    """Ops run on the host, whose own time comes on top; collectives of parameters run beside as far as it can."""
    found = estimated(CASES["dp"], steps=1, device=dataclasses.replace(device_of("cpu"), overlap=overlap))
    time = found.time
    busy, moved = time.compute + time.memory, sum(time.collectives.values())
    assert time.exposed == pytest.approx(moved - min(overlap * moved, busy))
    assert found.step_seconds == pytest.approx(time.device_seconds + time.host) and time.host > 0
    gpu = estimated(CASES["dp"], steps=1, device="h100-80g").time
    assert gpu.seconds == max(gpu.device_seconds, gpu.host)


def test_products_of_experts_have_operations() -> None:
    """A grouped product has those of its products one by one; PyTorch's table of operations does not know it."""
    left, right = torch.rand(48, 16), torch.rand(3, 16, 32)
    ends = torch.tensor([16, 16, 48], dtype=torch.int32)
    columns = torch.rand(48, 32)
    for args in ((left, right), (left.t().contiguous(), columns)):  # rows of experts; and the gradient of their weights
        with _Called() as mode:
            F.grouped_mm(*args, offs=ends)
        assert [key[5] for key in mode.costs.by_key if key[3] == "_grouped_mm"] == [2 * 48 * 16 * 32]


def test_attention_of_a_host_has_operations() -> None:
    query = torch.rand(2, 4, 32, 16)
    with _Called() as mode:
        F.scaled_dot_product_attention(query, query, query)
    assert max(key[5] for key in mode.costs.by_key) == 2 * 2 * 2 * 4 * 32 * 32 * 16


def test_random_numbers_of_other_ranks_are_stepped_over() -> None:
    """A rank draws its own elements only, also where those of others are between them; a GPU's generator is set."""
    plan = Plan({"tp": 4}).shard("<in:input>", {"tp": Shard(1)})
    for on_gpu in (False, True):
        with torch.device("meta"):
            model = nn.Sequential(nn.Dropout(0.25), nn.Linear(1024, 4))
        seen = rehearse(model, plan, plan.axes, 1, {"input": torch.ones(6, 8, 1024)}, None, _total, has_host=on_gpu)
        draws = {key[3]: key[6] for key in seen.costs.by_key if key[3] in ("bernoulli_", SKIPPED_OUTPUTS, RANDOM_SPANS)}
        # Two outputs of 4 bytes for an element; each of the six rows is a span.
        others = {} if on_gpu else {SKIPPED_OUTPUTS: 4 * 2 * 6 * 6 * 1024, RANDOM_SPANS: 6}
        assert draws == {"bernoulli_": 4 * 6 * 2 * 1024, **others}
    device = dataclasses.replace(measured(), ops={"bernoulli_": Curve(((1e3, 1e-5), (1e6, 1e-3)))})
    assert call_seconds(OpCost("bernoulli_", 0, 250), torch.bool, device) == 1e-5, "an element takes what it takes"


def _total(output: Any, _: Any) -> torch.Tensor:
    total: torch.Tensor = output.sum()
    return total


def test_ops_are_measured_as_estimates_count_them() -> None:
    """Names and sizes of the table are those that an estimate asks for; larger calls take no less."""
    found = measure_ops(samples=1)
    costs = OpCosts()
    assert {
        "mm",
        "add",
        "silu_backward",
        "_softmax",
        "index_put",
        "_grouped_mm",
        "addcdiv_",
        "topk",
        SKIPPED_OUTPUTS,
        RANDOM_SPANS,
    } <= found.keys() and not costs.by_key
    assert 2.0 * 32 * 64 * 64 in [size for size, _ in found["mm"]]
    for points in found.values():
        assert [size for size, _ in points] == sorted({size for size, _ in points})
        assert [seconds for _, seconds in points] == sorted(seconds for _, seconds in points)


_HOST = {"forward": 2e-5, "backward": 5e-6, "optimizer": 1e-6, "recompute": 4e-5, "saving": 7e-5, "unit": 1e-3}
_HOST["crossing"] = 6e-5
_COUNTS = {"forward": 80, "backward": 200, "optimizer": 300}


@functools.cache
def _time_of(case: str) -> StepTime:
    return estimated(CASES[case], steps=1).time


def _step_of(scale: float, slower: float = 1.3, **counts: int) -> _Measured:
    """A step whose ops take ``slower`` times as long as in a loop, on a host that takes :data:`_HOST`."""
    phases = {"forward": 1e-3 * scale, "backward": 2e-3 * scale, "recompute": 1e-3 * scale, "optimizer": 5e-4}
    counts = {**dict.fromkeys(_HOST, 0), **_COUNTS, **counts}
    planned = dataclasses.replace(_time_of("dp"), exposed=3e-4, phases=phases, on_dtensors=counts)
    host = {kind: _HOST[kind] * count for kind, count in counts.items()}
    forward = slower * phases["forward"] + sum(host[kind] for kind in ("forward", "saving", "crossing"))
    backward = slower * (phases["backward"] + phases["recompute"]) + host["backward"] + host["recompute"] + host["unit"]
    return _Measured(planned, forward, backward + 3e-4, slower * phases["optimizer"] + host["optimizer"])


def test_slower_ops_and_what_the_host_takes_are_told_apart() -> None:
    others = {"recompute": _step_of(0, recompute=90), "saving": _step_of(0, saving=160, forward=20)}
    others |= {kind: _step_of(0, **{kind: 9}) for kind in ("unit", "crossing")}
    slower, host = _fit(_step_of(0), _step_of(20), **others)
    assert slower == pytest.approx(1.3) and host == pytest.approx(_HOST)
    slower, _ = _fit(_step_of(0, 0.5), _step_of(20, 0.5), **others)
    assert slower == 1.0, "never faster than in a loop"


def test_the_host_takes_time_for_ops_on_dtensors_by_what_they_are_for() -> None:
    """A block that is computed again adds its ops, dearer ones where results are saved; units add their collectives."""
    plain, full, saving = (_time_of(name).on_dtensors for name in ("zero3", "zero3 full", "zero3 selective"))
    assert plain["unit"] == full["unit"] > 4 and plain["forward"] > 50
    assert full["recompute"] > 50 and not {"recompute", "saving"} & plain.keys() and "saving" not in full
    assert saving["saving"] > 100 and saving["forward"] < plain["forward"] and "recompute" not in saving
    device = dataclasses.replace(device_of("cpu"), dtensor_seconds=_HOST)
    alike = dataclasses.replace(device, dtensor_seconds=4e-5)
    launched = device.launch_seconds(10)
    assert launched == pytest.approx(10 * device.op_seconds)
    ops = {"forward": 3, "saving": 2, "unit": 1}
    assert host_seconds(device, 10, ops, 2) == pytest.approx(launched + 3 * 2e-5 + 2 * 7e-5 + 1e-3)
    assert host_seconds(device, 10, ops, 1) == launched, "one rank has no DTensors"
    assert host_seconds(alike, 10, ops, 2) == pytest.approx(launched + 5 * 4e-5), "of every op, nothing of units"


def test_the_host_takes_time_for_local_regions() -> None:
    """A reference has what it shows; two regions of four tensors in each of two blocks."""
    for one in references(2):
        found = estimate(one.model(), one.plan(), batch={"x": one.shape}, steps=1).time.on_dtensors
        assert found.get("crossing") == (2 * 2 * 4 if one.shows == "crossing" else None)
        assert one.shows is None or found[one.shows] > 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"ops": {"mm": [[1, 2, 3, 4]]}}, "ops is"),
        ({"ops": [1]}, "ops is"),
        ({"collectives": {"all_reduce": []}}, "collectives is"),
        ({"overlap": -1}, "overlap is"),
        ({"dtensor_seconds": {"backward": 1e-5}}, "dtensor_seconds is"),
        ({"dtensor_seconds": {"forward": 1e-5, "units": 1e-5}}, "dtensor_seconds is"),
        ({"dtensor_seconds": 0}, "dtensor_seconds is"),
        ({"overlaps": 1}, "unknown key 'overlaps'.*overlap"),
    ],
)
def test_wrong_tables(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    file = Path(device_of.__globals__["_FOLDER"]) / "cpu.yaml"
    data = yaml.safe_load(file.read_text())
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({**data, **change}))
    with pytest.raises(EstimateOptionError, match=problem):
        device_of(str(tmp_path / "a.yaml"))


@pytest.mark.slow
def test_calibration(tmp_path: Path) -> None:
    """Ranks measure ops and collectives; the table is an ordinary one."""
    file = tmp_path / "here.yaml"
    table = calibrate(file, "cpu", samples=1)
    assert device_of(str(file)) == table
    assert {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send"} == table.collectives.keys()
    assert 0 <= table.overlap <= 1 and table.measured_ranks == 2
    assert isinstance(table.dtensor_seconds, dict) and table.dtensor_seconds.keys() == set(HOST_KINDS)
    assert max(table.dtensor_seconds.values()) < 1e-1
    assert "assumption" not in " ".join(table.sources[key] for key in ("ops", "collectives", "overlap", "node_latency"))
    found = estimated(CASES["tp"], steps=1, device=table)
    assert 0 < found.step_seconds < 60
    with pytest.raises(ValueError, match="ranks is 1"):
        calibrate(file, "cpu", ranks=1)
