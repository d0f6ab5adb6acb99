"""A program's own code in backwards: custom functions, hooks of gradients and of modules, saved tensors that are unpacked.

They make buffers, which are DTensors in a forward, and have to be in a backward, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

from tests.ranks import RankPools, run_cases
from tests.runtime.compare import assert_same_step, pair
from tests.runtime.zero import sharded_at_rest
from vescale import static  # noqa: F401  (a mode of parallelize)
from vescale.plans import Plan

Tensor = torch.Tensor


class Square(torch.autograd.Function):
    """A buffer that the gradient is added to."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        found += 2 * x * gradient
        return found


class SquareOnce(torch.autograd.Function):
    """A buffer that an op writes to; a mask by index; an inner graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.mul(x, x, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            torch.mul(*torch.autograd.grad((leaf * leaf).sum(), leaf), gradient, out=found)
        found[..., torch.arange(x.shape[-1])] *= torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
        return found


class Projection(torch.autograd.Function):
    """A product in tiles of rows and of outputs, as losses over chunks of a vocabulary."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        made = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
        tile = torch.empty((2, 3), dtype=x.dtype, device=x.device)
        for row, column in itertools.product(range(0, x.shape[0], 2), range(0, weight.shape[0], 3)):
            part = weight[column : column + 3]
            torch.mm(x[row : row + 2], part.t(), out=tile[:, : part.shape[0]])
            made[row : row + 2, column : column + 3] = tile[:, : part.shape[0]]
        return made, made.sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_sums: Tensor | None) -> tuple[Tensor, Tensor]:
        assert of_sums is None
        x, weight = ctx.saved_tensors
        of_x, of_weight = (
            torch.zeros(x.shape, dtype=x.dtype, device=x.device),
            torch.zeros(weight.shape, dtype=x.dtype, device=x.device),
        )
        for row, column in itertools.product(range(0, x.shape[0], 2), range(0, weight.shape[0], 3)):
            part = gradient[row : row + 2, column : column + 3]
            of_x[row : row + 2].addmm_(part, weight[column : column + 3])
            of_weight[column : column + 3].addmm_(part.t(), x[row : row + 2])
        return of_x, of_weight


CAPTURED = Square.apply  # before anything is installed


def doubled(gradient: Tensor) -> Tensor:
    found = torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    found += 2 * gradient
    return found


def doubled_in(module: nn.Module, of_inputs: Any, of_outputs: Any = None) -> Any:
    return (doubled(of_inputs[0]),)


def packed(model: Net, x: Tensor) -> Tensor:
    def unpack(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), unpack):
        return x.sin() * x


def hooked(model: Net, x: Tensor) -> Tensor:
    x = x.sin()
    x.register_hook(doubled)
    x.register_hook(
        lambda gradient: torch.ones(gradient.shape, dtype=gradient.dtype, device=gradient.device).mul_(gradient)
    )
    return x


def penalized(model: Net, x: Tensor) -> Tensor:
    made = Square.apply(x)
    return made + torch.autograd.grad(made.sum(), x, create_graph=True)[0]


def scaled(model: Net, x: Tensor) -> Tensor:
    model.scale += x.detach().abs().sum()  # a plain number
    return x / model.scale


KINDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a function": lambda model, x: Square.apply(x),
    "a function that was captured": lambda model, x: CAPTURED(x),
    "a function that is differentiated once": lambda model, x: SquareOnce.apply(x),
    "tiles": lambda model, x: Projection.apply(x, model.middle.weight)[0],
    "checkpointed": lambda model, x: checkpoint(Square.apply, x, use_reentrant=False),
    "checkpointed, reentrant": lambda model, x: checkpoint(Square.apply, x, use_reentrant=True),
    "a gradient in the forward": penalized,
    "hooks of a tensor": hooked,
    "a hook of a module": lambda model, x: model.hooked(x),
    "a hook of a module before it": lambda model, x: model.hooked_before(x),
    "saved tensors": packed,
    "a number that is written to": scaled,
}


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.scale = kind, torch.zeros((), dtype=torch.float64)
        self.up, self.middle, self.down = nn.Linear(4, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 6)
        self.hooked, self.hooked_before = nn.Tanh(), nn.Tanh()
        self.hooked.register_full_backward_hook(doubled_in)
        self.hooked_before.register_full_backward_pre_hook(doubled_in)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(KINDS[self.kind](self, self.up(x))))


def rows(plan: Plan) -> None:
    plan.shard("<in:x>", Shard(0), mesh="axis")


def columns(plan: Plan) -> None:
    plan.shard("up.<in>", Replicate(), mesh="axis").shard("up.(weight|bias)", Shard(0), mesh="axis")
    plan.shard("middle.weight", Shard(1), mesh="axis")


def zero(plan: Plan) -> None:
    rows(plan)
    sharded_at_rest(plan, axis="axis")


def same_step(kind: str, entries: Callable[[Plan], None]) -> None:
    reference, model = pair(lambda: Net(kind), entries, {"axis": 2}, strict=False)
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert_same_step(reference, model, x, max_implicit=100)


def test_code_in_backwards_runs_as_in_forwards(ranks: RankPools) -> None:
    cases = list(itertools.product(KINDS, (rows, columns, zero)))
    assert ranks.run(run_cases, same_step, cases, world_size=2) == [len(cases)] * 2
