"""Cuts that compute and are uneven: vocabularies, MLPs and sequences that the ranks do not divide, against one device."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from tests.device import device_type
from tests.ranks import RankPools, run_cases
from tests.runtime.zero import sharded_at_rest
from tests.whole import whole, whole_tensors
from vescale import Plan, parallelize
from vescale.comm import record_comms
from vescale.runtime import implicit_communication

R, S0, S1 = Replicate(), Shard(0), Shard(1)
VOCABULARY, WIDTH, HIDDEN = 11, 6, 10


class Language(nn.Module):
    def __init__(self, *, tied: bool, smoothing: float, reduction: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.smoothing, self.reduction = smoothing, reduction

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.embed(ids))).flatten(0, 1)
        found = F.cross_entropy(
            logits, labels.flatten(), label_smoothing=self.smoothing, reduction=self.reduction, ignore_index=-100
        )
        return found if self.reduction != "none" else found.square().sum()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return (x + self.down(self.drop(F.silu(self.gate(y)) * self.up(y)))).square().mean()


def vocabulary(mesh: DeviceMesh, *, sequence: bool) -> Plan:
    plan = Plan(mesh).shard("(embed|head).weight", S0, mesh="tp")
    return plan.shard("embed.<out>", S1 if sequence else R, mesh="tp").shard("head.<in>", R, mesh="tp")


def gated(mesh: DeviceMesh, *, sequence: bool) -> Plan:
    plan = Plan(mesh).shard("(gate|up).(weight|bias)", S0, mesh="tp").shard("down.weight", S1, mesh="tp")
    plan.shard("<in>", S1 if sequence else R, mesh="tp")
    plan.shard("norm.<out>", R, mesh="tp")
    return plan.shard("down.<out>", S1 if sequence else R, mesh="tp")


def same_step(
    model: nn.Module, make_plan: Callable[[DeviceMesh], Plan], inputs: tuple[torch.Tensor, ...], moved: int
) -> None:
    """Strict mode, gradients within 1e-12, and no more than ``moved`` bytes received with what moves, without padding beyond
    a row a rank."""
    size = torch.distributed.get_world_size()
    one = copy.deepcopy(model)
    parallelize(model, make_plan(init_device_mesh(device_type(), (size,), mesh_dim_names=("tp",))), strict=True)
    torch.manual_seed(5)
    inputs = tuple(x.to(device_type()) for x in inputs)
    expected = one(*inputs)
    expected.backward()
    torch.manual_seed(5)
    with record_comms() as ledger:
        found = model(*inputs)
        found.backward()
    assert abs(whole(found.detach()) - expected) <= 1e-12 * abs(expected)
    gradients = whole_tensors({name: p.grad for name, p in model.named_parameters()})
    for name, parameter in one.named_parameters():
        assert (gradients[name] - parameter.grad).abs().max() <= 1e-12 * parameter.grad.abs().max(), name
    assert not implicit_communication(model)
    assert ledger.bytes() <= moved, (ledger.bytes(), [(r.op, r.requester, r.bytes) for r in ledger.records])


IDS = torch.randint(0, VOCABULARY, (4, 5), generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(0, VOCABULARY, (4, 5), generator=torch.Generator().manual_seed(2))
IGNORED = LABELS.masked_fill(torch.arange(20).view(4, 5) % 5 > torch.arange(4)[:, None], -100)


def language(tied: bool, smoothing: float, reduction: str, ignored: bool, sequence: bool) -> None:
    torch.manual_seed(0)
    model = Language(tied=tied, smoothing=smoothing, reduction=reduction).double()
    size = torch.distributed.get_world_size()
    hidden = (
        8 * 4 * (-(-5 // size) * size) * WIDTH
    )  # all tokens' states, a row of the sequence more for each rank at most
    statistics = 8 * 20 * 6
    moved = 2 * (size - 1) / size * (2 * hidden + statistics + 8 * 4 * WIDTH) + 8 * size
    same_step(
        model, lambda mesh: vocabulary(mesh, sequence=sequence), (IDS, IGNORED if ignored else LABELS), int(moved)
    )


LANGUAGE = [
    (True, 0.0, "mean", False, False),
    (True, 0.0, "mean", True, False),
    (True, 0.1, "mean", True, False),
    (False, 0.1, "mean", False, False),
    (False, 0.0, "sum", True, False),
    (False, 0.0, "none", True, False),
    (False, 0.0, "mean", True, True),
]


def vocabularies() -> int:
    return run_cases(language, LANGUAGE)


@pytest.mark.parametrize("size", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_vocabularies(ranks: RankPools, size: int) -> None:
    ranks.run(vocabularies, world_size=size)


def mlp(sequence: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 5, WIDTH, dtype=torch.float64)
    size = torch.distributed.get_world_size()
    hidden = 8 * 4 * (-(-5 // size) * size) * WIDTH
    moved = int(2 * (size - 1) / size * (2 * hidden + 8 * (3 * WIDTH + 1)))
    same_step(Gated().double(), lambda mesh: gated(mesh, sequence=sequence), (x,), moved)


def mlps() -> int:
    return run_cases(mlp, [(False,), (True,)])


@pytest.mark.parametrize("size", [3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_width_of_10(ranks: RankPools, size: int) -> None:
    """Of four ranks the last has one of ten features; of eight, three have none."""
    ranks.run(mlps, world_size=size)


def with_units() -> None:
    """Rows that tp cuts unevenly, in parts over dp at rest."""
    torch.manual_seed(0)
    model = Language(tied=False, smoothing=0.0, reduction="mean").double()
    one = copy.deepcopy(model)
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    plan = vocabulary(mesh, sequence=False).shard("<in>", S0, mesh="dp")
    parallelize(model, sharded_at_rest(plan), strict=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (one, model)]
    for _ in range(3):
        for m, optimizer in zip((one, model), optimizers):
            optimizer.zero_grad()
            m(IDS.to(device_type()), LABELS.to(device_type())).backward()
            optimizer.step()
    found = whole_tensors(dict(model.named_parameters()))
    for name, parameter in one.named_parameters():
        assert (found[name] - parameter).abs().max() <= 1e-11, name


def test_sharded_at_rest(ranks: RankPools) -> None:
    ranks.run(with_units, world_size=4)
