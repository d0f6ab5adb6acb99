"""Losses over sharded rows and classes against one device: every reduction, weights, smoothing, ignored labels."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import vescale.placements
from tests.device import on_cpu
from tests.ranks import RankPools, run_cases
from tests.runtime.llama import counted, make_mesh
from vescale import parallelize
from vescale.comm import record_comms
from vescale.placements import RaggedShard
from vescale.plans import Plan
from vescale.runtime import implicit_communication

PLACEMENTS = [
    (Shard(0), Shard(1)),
    (Replicate(), Shard(1)),
    (Shard(1), Replicate()),
    (Shard(0), Shard(0)),
    (Shard(1), Shard(1)),
    (Shard(0), Replicate()),
]


def logits_and_labels(rows: int, classes: int, *more: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(rows, classes, *more, dtype=torch.float64, generator=generator) * 3
    labels = torch.randint(classes, (rows, *more), generator=generator)
    labels[: rows // 2] = -100  # the first ranks of the batch have hardly any label
    labels[0] = 1
    return logits, labels


def same(mesh: Any, loss: Any, logits: torch.Tensor, placements: Any) -> None:
    expected_in = logits.clone().requires_grad_()
    expected = loss(expected_in)
    expected.sum().backward()
    found_in = distribute_tensor(logits, mesh, placements, src_data_rank=None).requires_grad_()
    found = loss(found_in)
    assert found.ndim != 0 or all(p.is_replicate() for p in found.placements), found.placements
    torch.testing.assert_close(found.full_tensor(), expected)
    found.sum().backward()
    assert found_in.grad.placements == tuple(placements)
    torch.testing.assert_close(found_in.grad.full_tensor(), expected_in.grad)


def losses(rows: int, classes: int) -> int:
    mesh = make_mesh(dp=2, tp=2)
    parallelize(nn.Linear(2, 2), Plan(mesh))  # what installs the handlers
    logits, labels = logits_and_labels(rows, classes)
    weight = torch.rand(classes, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cases = [
        (mesh, lambda x, o=options: F.cross_entropy(x, labels, **o), logits, placements)
        for placements, reduction, w in itertools.product(PLACEMENTS, ("mean", "sum", "none"), (None, weight))
        for options in [{"reduction": reduction, "weight": w}]
    ]
    cases += [(mesh, lambda x: F.log_softmax(x, 1), logits, p) for p in PLACEMENTS]
    cases += [
        (mesh, lambda x: F.nll_loss(F.log_softmax(x, 1), labels.clamp(0), ignore_index=1), logits, p)
        for p in PLACEMENTS
    ]
    deep, deep_labels = logits_and_labels(4, 6, 3, 2)
    cases += [
        (mesh, lambda x, r=r: F.cross_entropy(x, deep_labels, reduction=r), deep, p)
        for p in [(Shard(0), Shard(1)), (Shard(2), Shard(1)), (Shard(0), Shard(3))]
        for r in ("mean", "none")
    ]
    return run_cases(same, cases)


def test_losses(ranks: RankPools) -> None:
    assert set(ranks.run(losses, 8, 6)) == {54}


def same_ragged(mesh: Any, loss: Any, logits: torch.Tensor, placements: Any) -> None:
    expected_in = logits.clone().requires_grad_()
    expected = loss(expected_in)
    expected.sum().backward()
    found_in = vescale.placements.distribute_tensor(logits, mesh, placements).requires_grad_()
    found = loss(found_in)
    torch.testing.assert_close(found.full_tensor(), expected)
    found.sum().backward()
    torch.testing.assert_close(found_in.grad.full_tensor(), expected_in.grad)


def ragged_losses() -> int:
    mesh = make_mesh(dp=2, tp=2)
    parallelize(nn.Linear(2, 2), Plan(mesh))
    logits, labels = logits_and_labels(7, 6)
    by_elements = RaggedShard((0, 1), local_units=(10, 32))  # the first rank's part ends inside of a row
    return run_cases(
        same_ragged,
        [
            (mesh, loss, logits, placements)
            for loss in (
                lambda x: F.log_softmax(x, 1),
                lambda x: F.cross_entropy(x, labels),
                lambda x: F.cross_entropy(x, labels, reduction="none"),
            )
            for placements in [
                (RaggedShard(), Shard(1)),
                (Shard(1), RaggedShard()),
                (RaggedShard(), Shard(0)),
                (Replicate(), RaggedShard()),
                (by_elements, Replicate()),
            ]
        ],
    )


def test_losses_of_ragged_scores(ranks: RankPools) -> None:
    """Their rows are gathered along the ragged axis only."""
    assert set(ranks.run(ragged_losses)) == {15}


def test_losses_of_uneven_shards(ranks: RankPools) -> None:
    ranks.run(losses, 5, 7)


def test_losses_with_empty_shards(ranks: RankPools) -> None:
    ranks.run(losses, 3, 2)


class Head(nn.Module):
    """A loss inside a model, with the labels among its inputs."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.loss = nn.CrossEntropyLoss(**options)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.linear(x)
        return self.loss(logits.view(-1, 6), labels.view(-1))


def in_model(shard_sequence: bool) -> None:
    """Classes over tp, rows over dp; or the sequence over tp, whose flattening is a strided shard."""
    x = torch.randn(4, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    labels = torch.randint(6, (4, 6), generator=torch.Generator().manual_seed(3))
    labels[:2, 1:] = -100
    weight = torch.linspace(1, 2, 6).double()
    reductions = [{"reduction": reduction} for reduction in ("mean", "sum", "none")]
    smoothed = [{"label_smoothing": 0.1, **more} for more in (*reductions, {"weight": weight})]
    smoothed.append({"label_smoothing": 0.3, "weight": weight, "reduction": "none"})
    for options in (*reductions, *smoothed, {"weight": weight}):
        torch.manual_seed(0)
        reference = Head(options).double()
        torch.manual_seed(0)
        model = Head(options).double()
        plan = Plan(make_mesh(dp=2, tp=2))
        plan.shard("<in:x>", Shard(0), mesh="dp").shard("<in:labels>", Shard(0), mesh="dp")
        if shard_sequence:
            plan.shard("<in:x>", Shard(1), mesh="tp").shard("<in:labels>", Shard(1), mesh="tp")
        else:
            plan.shard("linear.(weight|bias)", Shard(0), mesh="tp").shard("linear.<in>", Replicate(), mesh="tp")
        parallelize(model, plan)
        expected, found = reference(x, labels), model(x, labels)
        torch.testing.assert_close(found.full_tensor(), expected)
        expected.square().sum().backward()
        found.square().sum().backward()
        for own, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(own.grad.full_tensor(), other.grad)
        assert not implicit_communication(model), (options, implicit_communication(model))


@pytest.mark.parametrize("shard_sequence", [False, True])
def test_loss_inside_a_model(ranks: RankPools, shard_sequence: bool) -> None:
    ranks.run(in_model, shard_sequence)


def vocabulary_is_not_gathered() -> None:
    mesh = make_mesh(dp=1, tp=4)
    parallelize(nn.Linear(2, 2), Plan(mesh))
    logits, labels = logits_and_labels(16, 400)
    x = distribute_tensor(logits, mesh, [Shard(0), Shard(1)], src_data_rank=None).requires_grad_()
    with record_comms() as ledger, counted() as counts:
        F.cross_entropy(x, labels).backward()
    assert sum(counts.values()) == len(ledger.records) == 4
    assert max(record.bytes for record in ledger.records) <= 2 * 16 * 8


def test_vocabulary_is_not_gathered(ranks: RankPools) -> None:
    ranks.run(vocabulary_is_not_gathered)


@on_cpu()  # a kernel of a device asserts by itself, and its process is lost
def bad_labels() -> str:
    mesh = make_mesh(dp=2, tp=2)
    parallelize(nn.Linear(2, 2), Plan(mesh))
    logits, labels = logits_and_labels(8, 6)
    labels[7] = 6
    x = distribute_tensor(logits, mesh, [Shard(0), Shard(1)], src_data_rank=None)
    with pytest.raises(IndexError) as caught:
        F.cross_entropy(x, labels)
    return str(caught.value)


def test_labels_out_of_bounds(ranks: RankPools) -> None:
    """Every rank raises, also those that do not hold the label."""
    messages = ranks.run(bad_labels)
    assert len(set(messages)) == 1 and "1 labels are out of bounds" in messages[0]


_ = (DTensor, Partial)
