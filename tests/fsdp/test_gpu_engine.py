"""The engine's part of the GPU benchmark, on the CPU: it passes, and what fails is in its table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import gpu_engine


def measured() -> dict[str, list[gpu_engine.Row]]:
    found: dict[str, list[gpu_engine.Row]] = {}
    for row in gpu_engine.measure(gpu_engine.Device("cpu"), ranks=4, rounds=1):
        found.setdefault(row.part, []).append(row)
    return found


def test_the_engine_passes() -> None:
    found = measured()
    assert [len(rows) for rows in found.values()] == [len(gpu_engine.SETTINGS)] * 4
    assert not [row for rows in found.values() for row in rows if row.wrong]
    assert all("time / FSDP2" in row.figures for row in found["peak, time"])
    assert torch.distributed.is_initialized() is False


def other_values(self: Any, *, output_tensor: torch.Tensor, **_: Any) -> None:
    output_tensor.fill_(float(torch.rand(())))


def not_a_number(self: Any, *, output_tensor: torch.Tensor, **_: Any) -> None:
    output_tensor.fill_(float("nan"))


def failing(self: Any, **_: Any) -> None:
    raise RuntimeError("the collective failed")


@pytest.mark.parametrize(
    ("what", "message"),
    [(other_values, "tensors differ"), (not_a_number, "not finite"), (failing, "collective failed")],
)
def test_what_fails_is_in_the_table(what: Callable[..., None], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_engine.Reduced, "__call__", what)
    rows = measured()["stream order"]
    assert all(message in row.wrong[0] for row in rows), rows
    assert message in gpu_engine.table(rows)
