"""Seconds of a step with the table of a measured host, and how such a table is made."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

from tests.estimation.measure import CASES, estimated
from vescale.comm import CommRecord
from vescale.errors import DeviceTableError
from vescale.estimation import Curve, Device, OpCosts, calibrate, device_of, on_processors, record_seconds
from vescale.estimation._calibrate import _fit
from vescale.estimation._measured_ops import _Called, measure_ops
from vescale.estimation._op_costs import OpCost
from vescale.estimation._step_time import call_seconds
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
    } <= found.keys() and not costs.by_key
    assert 2.0 * 32 * 64 * 64 in [size for size, _ in found["mm"]]
    for points in found.values():
        assert [size for size, _ in points] == sorted({size for size, _ in points})
        assert [seconds for _, seconds in points] == sorted(seconds for _, seconds in points)


def test_slower_ops_and_the_host_are_told_apart() -> None:
    slower, seconds = _fit((0.001, 100, 1.3 * 0.001 + 100 * 2e-5), (0.05, 150, 1.3 * 0.05 + 150 * 2e-5))
    assert (slower, seconds) == (pytest.approx(1.3), pytest.approx(2e-5))
    assert _fit((0.001, 100, 0.0), (0.05, 150, 0.0)) == (1.0, 1e-7), "never faster than in a loop"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"ops": {"mm": [[1, 2, 3, 4]]}}, "ops is"),
        ({"ops": [1]}, "ops is"),
        ({"collectives": {"all_reduce": []}}, "collectives is"),
        ({"overlap": -1}, "overlap is"),
        ({"overlaps": 1}, "unknown key 'overlaps'.*overlap"),
    ],
)
def test_wrong_tables(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    file = Path(device_of.__globals__["_FOLDER"]) / "cpu.yaml"
    data = yaml.safe_load(file.read_text())
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({**data, **change}))
    with pytest.raises(DeviceTableError, match=problem):
        device_of(str(tmp_path / "a.yaml"))


@pytest.mark.slow
def test_calibration(tmp_path: Path) -> None:
    """Ranks measure ops and collectives; the table is an ordinary one."""
    file = tmp_path / "here.yaml"
    table = calibrate(file, "cpu", samples=1)
    assert device_of(str(file)) == table
    assert {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send"} == table.collectives.keys()
    assert 0 <= table.overlap <= 1 and table.measured_ranks == 2 and table.dtensor_seconds < 1e-2
    assert "assumption" not in " ".join(table.sources[key] for key in ("ops", "collectives", "overlap", "node_latency"))
    found = estimated(CASES["tp"], steps=1, device=table)
    assert 0 < found.step_seconds < 60
    with pytest.raises(ValueError, match="ranks is 1"):
        calibrate(file, "cpu", ranks=1)
