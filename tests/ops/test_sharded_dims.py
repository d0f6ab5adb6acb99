"""Ops along a sharded dim (normalization, splitting, concatenation) against one device: even, uneven and empty shards."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tests.ranks import RankPools, run_cases
from tests.runtime.compare import assert_same_step, pair
from vescale.comm import record_comms
from vescale.plans import Plan
from vescale.runtime import implicit_communication

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)


class Norm(nn.Module):
    def __init__(self, kind: str, shape: tuple[int, ...], affine: bool, shifted: bool) -> None:
        super().__init__()
        made = nn.RMSNorm if kind == "rms" else nn.LayerNorm
        self.norm = made(shape, elementwise_affine=affine)
        for parameter in self.norm.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
        self.shift = nn.Parameter(torch.rand(shape)) if shifted else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x if self.shift is None else x + self.shift)


def loss(y: torch.Tensor) -> torch.Tensor:
    return (y * y.sin() + y).mean()


def normalize(
    kind: str, shape: tuple[int, ...], num_normalized: int, cut: Any, weight: Any, mesh: dict[str, int], reduced: int
) -> None:
    def entries(plan: Plan) -> None:
        plan.shard("<in:x>", cut)
        if weight is not None:
            plan.shard("norm.(weight|bias)", weight)

    normalized = shape[len(shape) - num_normalized :]
    shifted = 3 not in shape  # stock DTensor gathers what it adds when there are more ranks than indices
    reference, model = pair(lambda: Norm(kind, normalized, weight is not None, shifted), entries, mesh)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 1
    x.requires_grad_(not shifted)
    with record_comms() as ledger:
        assert_same_step(reference, model, x, loss=loss)
    asked = Counter(record.op for record in ledger.records if "norm: statistic" in record.requester)
    assert asked == Counter({"all_reduce": reduced} if reduced else {}), asked
    features = x.shape[-num_normalized:].numel() * x.element_size()
    gathers = [record for record in ledger.records if record.op == "all_gather_v" and shifted]
    assert all(record.bytes <= features for record in gathers), gathers  # gradients of weights
    if not shifted:
        (expected,) = torch.autograd.grad(loss(reference(x)), x)
        torch.testing.assert_close(x.grad, 2 * expected)  # of both models


def norms() -> int:
    tp, both = {"tp": 4}, {"dp": 2, "tp": 2}
    cases: list[Any] = []
    for kind, num in (("rms", 2), ("layer", 4)):  # a statistic, and its gradient
        for size in (8, 6, 3):  # even, uneven, and a rank without any
            cases.append((kind, (2, 5, size), 1, {"tp": S2}, {"tp": R}, tp, num))
        cases.append((kind, (2, 5, 8), 1, {"tp": S2}, {"tp": S0}, tp, num))
        cases.append((kind, (2, 5, 8), 1, {"tp": S2}, None, tp, num))
        cases.append((kind, (2, 5, 6), 2, {"tp": S1}, {"tp": R}, tp, num))
        cases.append((kind, (4, 5, 6), 1, {"dp": S0, "tp": S2}, {"tp": S0}, both, num))
        cases.append((kind, (4, 6, 6), 2, {"dp": S1, "tp": S2}, {"dp": S0, "tp": Shard(1)}, both, 2 * num))
        # rows: every rank has some, and one has none
        cases.append((kind, (2, 5, 8), 1, {"tp": S1}, {"tp": R}, tp, 0))
        cases.append((kind, (2, 3, 8), 1, {"tp": S1}, {"tp": R}, tp, 0))
        cases.append((kind, (1, 3, 8), 1, {"dp": S0, "tp": S1}, {"tp": R}, both, 0))
    return run_cases(normalize, cases)


def cut_weights() -> int:
    """Sharded weights are gathered where rows are sharded, which is implicit communication."""

    def case(kind: str, shape: tuple[int, ...]) -> None:
        def entries(plan: Plan) -> None:
            plan.shard("<in:x>", {"tp": S1})
            plan.shard("norm.(weight|bias)", {"tp": S0})

        reference, model = pair(lambda: Norm(kind, shape[-1:], True, False), entries, {"tp": 4}, strict=False)
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        assert_same_step(reference, model, x, loss=loss, max_implicit=99)
        assert implicit_communication(model)

    return run_cases(case, [(kind, shape) for kind in ("rms", "layer") for shape in ((2, 8, 8), (2, 3, 8))])


def test_cut_weights_of_rows(ranks: RankPools) -> None:
    assert set(ranks.run(cut_weights)) == {4}


def test_normalization_gathers_nothing(ranks: RankPools) -> None:
    assert set(ranks.run(norms)) == {22}


class Parts(nn.Module):
    """``split`` takes a fused projection apart, ``join`` puts two together; some parts may go unused."""

    def __init__(self, how: str, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, size), nn.Linear(8, size)
        self.out, self.how = nn.Linear(2 * size if how in ("join", "join itself") else size // 2, 8), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, z = self.first(x), self.second(x)
        half = y.shape[-1] // 2
        if self.how == "chunk":
            a, b = y.chunk(2, dim=-1)
        elif self.how == "split":
            a, b = y.split(half, dim=2)
        elif self.how == "sizes":
            a, b = torch.split(y, [half, half], -1)
        elif self.how == "unequal":
            a, b = torch.split(y, [half - 1, half + 1], -1)
            a, b = F.pad(a, (0, 1)), b[..., :half]
        elif self.how == "unused":
            a, b = y.chunk(2, dim=-1)[1], z.chunk(2, dim=-1)[0]
        elif self.how == "parts of a join":
            a, b = torch.cat([y, z], -1).chunk(2, -1)
            a, b = a[..., :half], b[..., :half]
        elif self.how == "join":
            return self.out(torch.cat((y, z), dim=-1).tanh())
        else:  # "join itself"
            return self.out(torch.cat((y, y), dim=-1).sin())
        return self.out(a.sin() * b)


def parts(how: str, size: int, weight: Any, mesh: dict[str, int]) -> None:
    def entries(plan: Plan) -> None:
        if "dp" in mesh:
            plan.shard("<in:x>", S0, mesh="dp")
        plan.shard("(first|second).<in>", R, mesh="tp")
        plan.shard("(first|second).<out>", S2, mesh="tp")  # uneven where the ranks do not divide it
        plan.shard("(first|second).weight", weight, mesh="tp")
        plan.shard("out.<out>", R, mesh="tp")

    reference, model = pair(lambda: Parts(how, size), entries, mesh, strict=False)
    x = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert_same_step(reference, model, x, max_implicit=20)


def taken_apart() -> int:
    kinds = ["chunk", "split", "sizes", "unequal", "unused", "parts of a join", "join", "join itself"]
    meshes = [{"tp": 4}, {"dp": 2, "tp": 2}]
    even = [(how, 16, S0, mesh) for how, mesh in itertools.product(kinds, meshes)]
    uneven = [(how, size, R, {"tp": 4}) for how, size in itertools.product(kinds, (6, 2))]
    return run_cases(parts, [*even, *uneven])


def test_parts_along_the_sharded_dim(ranks: RankPools) -> None:
    assert set(ranks.run(taken_apart)) == {32}
