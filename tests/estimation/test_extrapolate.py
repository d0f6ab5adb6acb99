"""A step at a larger scale from a run at a small one: a run on a device whose table is wrong, by known factors."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.estimation.test_estimate import CONFIG as SMALL
from vescale import plan_zoo
from vescale.estimation import Device, Estimate, device_of, estimate, extrapolate

TABLE = device_of("h100-80g")
# What runs: half of the table's speed of compute, a third of its links'.
TRUE = dataclasses.replace(
    TABLE,
    flops={name: rate / 2 for name, rate in TABLE.flops.items()},
    bandwidth=TABLE.bandwidth / 2,
    node_bandwidth=TABLE.node_bandwidth / 3,
    node_latency=TABLE.node_latency * 3,
    network_bandwidth=TABLE.network_bandwidth / 3,
    network_latency=TABLE.network_latency * 3,
)


CONFIG = {**SMALL, "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 64, "num_hidden_layers": 2}


def at(mesh: dict[str, int], device: Device) -> Estimate:
    return _at(mesh["dp"], mesh["tp"], device is TRUE)


@functools.cache
def _at(dp: int, tp: int, is_true: bool) -> Estimate:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    plan, device = plan_zoo.load("llama", {"dp": dp, "tp": tp}), TRUE if is_true else TABLE
    return estimate(model, plan, batch={"input_ids": (8 * dp, 64)}, steps=1, device=device)


def run_of(true: Estimate, folder: Path, steps: int = 3) -> dict[str, Any]:
    """Files of a run that takes what ``true`` says: what compute hides begins with it, the rest comes after it."""
    time, trace, ops, start = true.time, [], [], 0.0
    busy = time.compute + time.memory
    for _ in range(steps):
        begin = start + busy + time.exposed - sum(time.collectives.values())
        for name, seconds in time.collectives.items():
            axis, op = name.split(" ")
            event = {"ph": "X", "cat": op, "name": op, "pid": 0, "ts": begin * 1e6, "dur": seconds * 1e6}
            trace.append({**event, "args": {"axis": axis, "bytes": 1}})
            begin += seconds
        ops.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": start * 1e6, "dur": busy * 1e6})
        ops.append({"ph": "X", "cat": "cpu_op", "name": "c10d::allreduce_", "ts": start * 1e6, "dur": 9e9})
        start += busy + time.exposed
    files = {"trace": folder / "trace.json", "profile": folder / "profile.json"}
    files["trace"].write_text(json.dumps({"traceEvents": trace}))
    files["profile"].write_text(json.dumps({"traceEvents": ops}))
    return {**files, "steps": steps, "step_seconds": start / steps}


@pytest.mark.parametrize("large", [{"dp": 1, "tp": 4}, {"dp": 64, "tp": 2}], ids=str)
def test_what_the_table_has_wrong_cancels(large: dict[str, int], tmp_path: Path) -> None:
    small = {"dp": 1, "tp": 2} if large["dp"] == 1 else {"dp": 16, "tp": 2}
    truth = at(large, TRUE)
    found = extrapolate(at(small, TABLE), at(large, TABLE), **run_of(at(small, TRUE), tmp_path))
    terms = {term.name: term for term in found.terms}
    assert terms["compute"].seconds == pytest.approx(truth.time.compute + truth.time.memory, rel=1e-6)
    for term in found.collectives:
        assert term.seconds == pytest.approx(truth.time.collectives[term.name], rel=1e-6), term
    assert all(term.assumption for term in (*found.terms, *found.collectives))
    seconds = sum(term.seconds for name, term in terms.items() if name != "host")
    assert seconds == pytest.approx(truth.time.device_seconds, rel=0.05)
    wrong = at(large, TABLE).time.device_seconds
    assert abs(wrong / truth.time.device_seconds - 1) > 0.4
    assert json.dumps(found.to_json()) and "at scale" in str(found)


def test_axes_that_were_not_measured(tmp_path: Path) -> None:
    """Their collectives are the table's, and say so; more ranks than a node has are named."""
    small, large = at({"dp": 1, "tp": 2}, TABLE), at({"dp": 64, "tp": 8}, TABLE)
    files = run_of(small, tmp_path)
    found = extrapolate(small, large, **files)
    data = next(term for term in found.collectives if term.name.startswith("dp "))
    assert data.measured is None and "not in the measured run" in data.assumption
    wide = extrapolate(small, at({"dp": 1, "tp": 16}, TABLE), **files)
    assert any("several nodes" in term.assumption for term in wide.collectives)
    files["profile"] = None
    assert extrapolate(small, large, **files).step_seconds > 0


def test_refusals(tmp_path: Path) -> None:
    small = at({"dp": 1, "tp": 2}, TABLE)
    files = run_of(small, tmp_path)
    with pytest.raises(ValueError, match="of the device that was measured"):
        extrapolate(small, at({"dp": 2, "tp": 2}, TRUE), **files)
    with pytest.raises(ValueError, match="time of a step is not known"):
        extrapolate(small, small, files["trace"])
    files["trace"].write_text("{}")
    with pytest.raises(ValueError, match="is no trace"):
        extrapolate(small, small, **files)
