"""What a program does with outputs in ``torch.inference_mode()``: views of them, reads and writes, against one device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tests.ranks import RankPools, run_cases
from tests.runtime.compare import pair
from tests.whole import whole
from vescale import static  # noqa: F401  (a mode of parallelize)
from vescale.plans import Plan

USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "rows": lambda y: (y[0], y[1:3], y[-1]),
    "iterated": list,
    "detached": lambda y: y.detach(),
    "views": lambda y: (
        y.view(-1),
        y.t(),
        y.T,
        y.flatten(),
        y.reshape(3, 12),
        y.unflatten(1, (2, 3)),
        y[None].squeeze(0),
    ),
    "parts": lambda y: (*y.chunk(3), *y.split(2), *y.tensor_split(4), *y.unbind(1), y.narrow(0, 1, 3), y.select(1, 2)),
    "expanded": lambda y: (y[:1].expand_as(y), torch.broadcast_to(y, (2, 6, 6)), *torch.broadcast_tensors(y, y[0])),
    "diagonal": lambda y: (y.diagonal(), y.unfold(0, 2, 2), y.movedim(0, 1), torch.atleast_3d(y)),
    "written by rows": lambda y: [row.mul_(index) for index, row in enumerate(y)],
    "written by views": lambda y: (y.view(-1).add_(1), y.t()[0].zero_(), y),
    "assigned": lambda y: [y.__setitem__(0, 2.0), y.__setitem__((slice(1, 3), 1), 3.0), y],
    "views of what is made here": lambda y: ((y * 2)[1:][0].view(2, 3), *(y + 1).chunk(2)),
    "functions": lambda y: (torch.nn.functional.linear(y, y[:2]), y @ y.t(), y.softmax(-1), y.std(0), y.topk(2).values),
    "numbers": lambda y: torch.tensor([y.sum().item(), y[0, 0].item(), *(row.max().item() for row in y)]),
}


def leaves(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [x for x in value if x is not None]


def rows(plan: Plan) -> None:
    plan.shard("<in:input>", Shard(0), mesh="axis")


def columns(plan: Plan) -> None:
    plan.shard("0.(weight|bias)", Shard(0), mesh="axis").shard("2.(weight|bias)", Shard(0), mesh="axis")
    plan.shard("(0|2).<in>", Replicate(), mesh="axis")


def same_use(use: str, entries: Callable[[Plan], None]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))

    reference, model = pair(build, entries, {"axis": 2}, strict=False)
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, found = leaves(USES[use](reference(x))), leaves(USES[use](model(x)))
        torch.testing.assert_close([whole(one) for one in found], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close([whole(one) for one in found], expected, rtol=1e-12, atol=1e-12)  # and outside


def test_uses_of_outputs(ranks: RankPools) -> None:
    cases = list(itertools.product(USES, (rows, columns)))
    assert ranks.run(run_cases, same_use, cases, world_size=2) == [len(cases)] * 2
