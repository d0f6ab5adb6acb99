"""The entry that a report of implicit communication proposes is one that the plan does not have, and ends in no report."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import pytest
import regex
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale import Plan, parallelize
from vescale.compat.simulated_ranks import fake_world
from vescale.plans import parse_placement
from vescale.runtime import implicit_communication

R, S0, S1 = Replicate(), Shard(0), Shard(1)
_EDIT = regex.compile(r"write `(?P<path>[^`]+?): \{(?P<axis>\w+): (?P<placement>[^`]+)\}` in the plan's shard section")

USES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "x @ w.t()": lambda x, w: x @ w.t(),
    "x @ w.mT": lambda x, w: x @ w.mT,
    "linear": F.linear,
    "a copy": lambda x, w: x @ w.t().contiguous(),
    "einsum": lambda x, w: torch.einsum("bsi,oi->bso", x, w),
    "w @ x": lambda x, w: (w @ x.mT).mT,
    "a sum over a view": lambda x, w: x @ w.view(2, 2, 6).sum(0).t(),
    "a view with more dims": lambda x, w: torch.einsum("bsi,hki->bshk", x, w.view(2, 2, 6)).relu().flatten(2),
    "heads": lambda x, w: F.linear(x, w).unflatten(-1, (2, 2)).transpose(1, 2).softmax(-1).sum(1),
    "a row": lambda x, w: x + w[1],
    "a difference": lambda x, w: x[:, :1] - w.t().softmax(0).t(),
    "a norm": lambda x, w: F.layer_norm(x, (6,)) * w.softmax(-1).sum(0),
}


class Own(nn.Module):
    def __init__(self, use: str) -> None:
        super().__init__()
        self.use, self.weight = use, nn.Parameter(torch.randn(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return USES[self.use](x, self.weight)


class Net(nn.Module):
    def __init__(self, use: str) -> None:
        super().__init__()
        self.inner = Own(use)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


def reports(use: str, entries: dict[tuple[str, str], Placement]) -> list[str]:
    """The edits that one step is reported with."""
    plan = Plan({"dp": 2, "tp": 2})
    for (path, axis), placement in entries.items():
        plan.shard(path, placement, mesh=axis)
    model = parallelize(Net(use), plan)
    model(torch.randn(4, 4, 6)).pow(2).sum().backward()
    return [site.edit for site in implicit_communication(model)]


PLACED = [(x, w) for x, w in itertools.product((R, S0, S1, Shard(2)), (S0, S1))]


@pytest.mark.parametrize("use", USES)
def test_edits_end(use: str) -> None:
    for x, w in PLACED:
        entries: dict[tuple[str, str], Placement] = {
            ("<in:x>", "tp"): x,
            ("inner.weight", "tp"): w,
            ("<in:x>", "dp"): S0,
        }
        with fake_world(4, 0), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(8):
                edits = [found for edit in reports(use, entries) if (found := _EDIT.search(edit)) is not None]
                new = next((e for e in edits if str(entries.get((e["path"], e["axis"]))) != str(_of(e))), None)
                assert (new is None) == (not edits), f"{x}, {w}: asks for what is there: {edits}, {entries}"
                if new is None:
                    break
                entries[new["path"], new["axis"]] = _of(new)
            else:
                raise AssertionError(f"{x}, {w}: does not end: {entries}")


def _of(edit: regex.Match[str]) -> Placement:
    return parse_placement(edit["placement"])
