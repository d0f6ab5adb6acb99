"""Grouped products on the meta device: what the kernels take, with results of their form, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import _meta_registrations, nn

from vescale.ir import FlowMode

ENDS = torch.tensor([2, 5, 5, 10], dtype=torch.int32)


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16, 24))
        self.head = nn.Linear(24, 8)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return self.head(F.grouped_mm(x, self.weight, offs=ends))


class _Result:
    """A follower that keeps what grouped products return."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def follow(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        if name.endswith("grouped_mm"):
            self.found.append(result)


def _walked(function: Any) -> Any:
    follower = _Result()
    with FlowMode(follower):
        function()
    return follower.found[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_results_have_the_form_of_the_kernels(dtype: torch.dtype, transposed: bool) -> None:
    x, weight = torch.randn(10, 16).to(dtype), torch.randn(4, 24, 16) if transposed else torch.randn(4, 16, 24)
    weight = weight.to(dtype).mT if transposed else weight.to(dtype)
    wanted = F.grouped_mm(x, weight, offs=ENDS)
    found = _walked(lambda: F.grouped_mm(x.to("meta"), weight.to("meta"), offs=ENDS.to("meta")))
    assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)


@pytest.mark.parametrize("width, dtype", [(16, torch.float64), (14, torch.float32)])
def test_what_the_kernels_refuse_is_refused(width: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(10, width, dtype=dtype), torch.randn(4, width, 24, dtype=dtype)
    with pytest.raises(RuntimeError):
        F.grouped_mm(x, weight, offs=ENDS)
    with pytest.raises(RuntimeError):
        _walked(lambda: F.grouped_mm(x.to("meta"), weight.to("meta"), offs=ENDS.to("meta")))


def test_walks_of_float32_experts_reach_the_output() -> None:
    before = _meta_registrations._meta_grouped_mm_common
    with torch.device("meta"):
        model, inputs = _Experts(), {"x": torch.randn(10, 16), "ends": ENDS.to("meta")}
    with FlowMode(_Result()):
        assert model(**inputs).shape == (10, 8)
    assert _meta_registrations._meta_grouped_mm_common is before
