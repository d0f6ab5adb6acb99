"""Ops that stay local on pending sums, parts of interleaved dims, and inputs that several modules share."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.ranks import RankPools, run_cases
from tests.runtime.compare import assert_same_step, pair
from tests.runtime.llama import counted, make_mesh
from vescale import parallelize
from vescale.ops import install
from vescale.placements import InterleavedShard, distribute_tensor, full_tensor
from vescale.plans import Plan
from vescale.runtime import ImplicitCommunicationWarning
from vescale.runtime._handlers import install_handlers

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def placed(x: torch.Tensor, mesh: Any, placement: Any) -> DTensor:
    """A sum is made of a different summand on each rank."""
    if placement != P:
        return distribute_tensor(x, mesh, [placement])
    return DTensor.from_local(x * (1.0 + mesh.get_local_rank()), mesh, [P])


def where(mesh: Any, condition: Any, x: Any, y: Any, shapes: Any, expected: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    operands = [placed(t > 0 if i == 0 else t, mesh, p) for i, (t, p) in enumerate(zip(tensors, (condition, x, y)))]
    with counted() as counts:
        found = torch.where(*operands)
    assert tuple(found.placements) == (expected,), found.placements
    assert not counts, counts
    torch.testing.assert_close(full_tensor(found), torch.where(*(full_tensor(o) for o in operands)))


def index_put(mesh: Any, values: Any, expected: Any, index_shape: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    table, indices = torch.zeros(6, 4), torch.randint(6, index_shape, generator=generator)
    rows = placed(torch.randn(4, 2, 4, generator=generator), mesh, values)
    whole, where = placed(table, mesh, R), placed(indices, mesh, R)
    with counted() as counts:
        found = whole.index_put([where], rows, accumulate=True)
    assert tuple(found.placements) == (expected,), found.placements
    assert not counts, counts
    torch.testing.assert_close(full_tensor(found), table.index_put([indices.expand(4, 2)], full_tensor(rows), True))


ACTIVATIONS: list[Any] = [F.gelu, F.relu, F.silu, torch.logit, torch.sigmoid, torch.tanh]
UNRULED: list[Any] = [F.elu, F.hardshrink, F.hardsigmoid, F.hardswish, F.hardtanh, F.leaky_relu, F.mish, F.softplus]
UNRULED += [F.softshrink]


def derivative(mesh: Any, function: Any, own: Any, grad: Any, moves: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(3, 5, generator=generator, dtype=torch.float64).requires_grad_()
    summand = torch.rand(3, 5, generator=generator, dtype=torch.float64)
    given = (
        DTensor.from_local(summand * (1 + mesh.get_rank()), mesh, grad, shape=(3, 5), stride=(5, 1))
        if P in grad
        else None
    )
    given = given if given is not None else distribute_tensor(summand, mesh, grad)
    placed_x = distribute_tensor(x.detach(), mesh, own).requires_grad_()
    with counted() as counts:
        (found,) = torch.autograd.grad(function(placed_x), placed_x, given)
    assert bool(counts) == moves, counts
    (expected,) = torch.autograd.grad(function(x), x, full_tensor(given))
    torch.testing.assert_close(full_tensor(found), expected)


def derivatives() -> int:
    install()
    install_handlers()
    one, two = make_mesh(tp=2), make_mesh(dp=1, tp=2)
    cases: list[Any] = [(one, f, [R], [P], False) for f in (*ACTIVATIONS, *UNRULED)]
    cases += [(one, f, [S1], [S1], False) for f in UNRULED] + [(one, F.softplus, [S1], [S0], True)]
    cases += [(two, F.silu, [S0, R], [S0, P], False), (one, F.silu, [S0], [P], True)]
    return run_cases(derivative, cases)


def transposed() -> None:
    """The gradient of a transposed activation, which lies in memory as the activation did not, is viewed."""
    install()
    install_handlers()
    mesh = make_mesh(tp=2)
    x = torch.rand(2, 3, 4, dtype=torch.float64)
    weights = torch.rand(2, 4, 3, dtype=torch.float64)
    for placement in (R, S0):
        grads = []
        for given in (x, distribute_tensor(x, mesh, [placement])):
            factors = weights if given is x else distribute_tensor(weights, mesh, [placement])
            leaf = given.reshape(6, 4).detach().requires_grad_()
            (F.softplus(leaf.view(2, 3, 4)).transpose(-1, -2) * factors).sum().backward()
            grads.append(leaf.grad)
        torch.testing.assert_close(full_tensor(grads[1]), grads[0])


def test_derivatives_of_transposed_activations(ranks: RankPools) -> None:
    ranks.run(transposed, world_size=2)


def test_derivatives_of_activations_keep_pending_sums(ranks: RankPools) -> None:
    assert set(ranks.run(derivatives, world_size=2)) == {8 + 9 + 9 + 1}


def linear_ops() -> int:
    install()
    install_handlers()
    mesh = make_mesh(tp=2)
    same, broadcast = [(4, 6)] * 3, [(1, 6), (4, 6), (6,)]
    cases: list[Any] = [
        (mesh, R, x, y, shapes, P) for (x, y), shapes in itertools.product([(P, R), (R, P), (P, P)], (same, broadcast))
    ]
    done = run_cases(where, cases)
    return done + run_cases(
        index_put, [(mesh, S0, P, (4, 2)), (mesh, P, P, (4, 2)), (mesh, Shard(2), S1, (4, 2)), (mesh, S1, P, (4, 2))]
    )


def test_where_and_index_put_stay_local(ranks: RankPools) -> None:
    assert set(ranks.run(linear_ops, world_size=2)) == {10}


class Packed(nn.Module):
    """Fused projections, each way of taking them apart; some pieces may go unused."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.fused, self.out, self.how = nn.Linear(8, 24), nn.Linear(8, 8), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fused(x)
        if self.how == "chunk":
            a, b, c = y.chunk(3, dim=-1)
        elif self.how == "sizes":
            a, b, c = torch.split(y, [8, 8, 8], dim=2)
        else:
            a, b, c = y.split(8, dim=-1)
        return self.out(a * b + (0 if self.how == "unused" else c))


def packed(how: str) -> None:
    def entries(plan: Plan) -> None:
        plan.shard("fused.<in>", R, mesh="tp")
        plan.shard("fused.weight", InterleavedShard(0, 3), mesh="tp")
        plan.shard("fused.bias", InterleavedShard(0, 3), mesh="tp")
        plan.shard("out.weight", S1, mesh="tp")
        plan.shard("out.<out>", R, mesh="tp")

    reference, model = pair(lambda: Packed(how), entries, {"tp": 2})
    x = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert_same_step(reference, model, x)


def pieces() -> int:
    return run_cases(packed, [("chunk",), ("sizes",), ("split",), ("unused",)])


def test_pieces_of_an_interleaved_dim_stay_local(ranks: RankPools) -> None:
    assert set(ranks.run(pieces, world_size=2)) == {4}


class Shared(nn.Module):
    """Three projections of one tensor; ``written``: between them it is scaled in place."""

    def __init__(self, written: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.written = written

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.first(x)
        if self.written:
            x.mul_(3.0)
        return a + self.second(x).relu() * self.third(x)


def shared(written: bool, target: Any, num_forward: int, num_backward: int) -> None:
    def entries(plan: Plan) -> None:
        plan.shard("<in:x>", target, mesh="tp")
        plan.shard("(first|second|third).<in>", R, mesh="tp")
        plan.shard("(first|second|third).weight", S0, mesh="tp")

    reference, model = pair(lambda: Shared(written), entries, {"tp": 2})
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if written:
        with torch.no_grad():
            torch.testing.assert_close(full_tensor(model(x.clone())), reference(x.clone()))
        return
    assert_same_step(reference, model, x.clone().requires_grad_())
    given = x.clone().requires_grad_()
    with counted() as counts:
        y = model(given).square().mean()
    assert sum(counts.values()) == num_forward, counts
    with counted() as counts:
        y.backward()
    assert sum(counts.values()) == num_backward, counts


def sharing() -> int:
    # the gradient of a sharded input is reduce-scattered, and gathered again for the plain tensor of the caller
    return run_cases(shared, [(False, R, 0, 1), (False, S0, 1, 2), (True, R, 0, 0)])


def test_modules_share_a_converted_input(ranks: RankPools) -> None:
    """One all-gather for three projections, one reduction of their gradients; none is stale."""
    assert set(ranks.run(sharing, world_size=2)) == {3}


def numbers() -> None:
    """PyTorch's cache of decisions takes a number for a 0-dim tensor, which one rank adds to a pending sum."""
    mesh = make_mesh(tp=2)
    torch.manual_seed(0)
    reference = nn.Linear(6, 6, bias=False).double()
    steps: list[Any] = [
        lambda y: y.add_(torch.tensor(0.5, dtype=torch.float64)),
        lambda y: y.add_(0.25),
        lambda y: y.sub_(torch.tensor(0.5, dtype=torch.float64), alpha=0.3),
        lambda y: y.sub_(0.75, alpha=0.3),
        lambda y: torch.add(y, torch.tensor(0.5, dtype=torch.float64), alpha=0.1),
        lambda y: torch.add(y, 0.75, alpha=0.1),
        lambda y: torch.sub(y, 0.75, alpha=0.1),
        lambda y: torch.sub(y, torch.tensor(0.5, dtype=torch.float64), alpha=0.1),
    ]

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.step = reference, steps[0]

        def forward(self, x: torch.Tensor) -> Any:
            return self.step(self.linear(x))

    one = Steps()
    model: Any = copy.deepcopy(one)
    parallelize(model, Plan(mesh).shard("linear.weight", S1))
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ImplicitCommunicationWarning)
        for one.step in steps:
            model.step = one.step
            torch.testing.assert_close(full_tensor(model(x)), one(x))


def test_numbers_beside_tensors_without_dims(ranks: RankPools) -> None:
    ranks.run(numbers, world_size=2)


def losses_of_own_rows() -> None:
    """Of outputs whose rows are cut: sums of local rows are right; a mean of local rows counts once for each rank."""
    mesh, x = make_mesh(dp=2), torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    one = nn.Linear(6, 3)
    with torch.no_grad():
        one.weight.copy_(torch.linspace(-1, 1, 18).view(3, 6))
        one.bias.zero_()
    rows = {0: 3, 1: 2}[mesh.get_local_rank()]
    losses: list[tuple[int, int, Any]] = [  # rows of all ranks, how often the loss counts, the loss
        (5, 1, lambda out: out.square().mean()),
        (5, 1, lambda out: out.to_local().square().sum() / (5 * 3)),
        (5, 1, lambda out: out.to_local().square().mean() * rows / 5),
        (4, 1, lambda out: out.to_local().square().mean() / 2),
        (4, 2, lambda out: out.to_local().square().mean()),
    ]
    for rows_of_all, times, loss in losses:
        given = x[:rows_of_all]
        model, expected = (copy.deepcopy(one) for _ in range(2))
        parallelize(model, Plan(mesh).shard("<in>", S0, mesh="dp"))
        loss(model(given)).backward()
        expected(given).square().mean().backward()
        for own, other in zip(model.parameters(), expected.parameters()):
            torch.testing.assert_close(full_tensor(own.grad), times * other.grad)


def test_losses_of_own_rows(ranks: RankPools) -> None:
    ranks.run(losses_of_own_rows, world_size=2)
