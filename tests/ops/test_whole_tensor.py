"""Functions of whole sharded tensors that take no dim, or one that counts from the end, no batch, fewer indices than rows,
parts of no element, or sums that are pending in two ways: values and gradients are those of one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from tests.ranks import RankPools
from vescale import Plan, init_mesh, parallelize

_INF = float("inf")
_NO_DIM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "amax": lambda x: x.amax(),
    "amax kept": lambda x: x.amax(dim=(), keepdim=True),
    "amin": lambda x: x.amin(dim=[]),
    "sum": lambda x: x.sum(dim=()),
    "mean kept": lambda x: x.mean(dim=[], keepdim=True),
    "logsumexp": lambda x: x.logsumexp(dim=(), keepdim=True),
    "nansum": lambda x: x.nansum(dim=[]),
    "nanmean": lambda x: x.nanmean(dim=()),
    "norm": lambda x: x.norm(dim=()),
    "inf norm": lambda x: torch.linalg.vector_norm(x, _INF),
    "-inf norm": lambda x: torch.linalg.vector_norm(x, -_INF),
    "count_nonzero": lambda x: x.count_nonzero(dim=()) * x.amin(),
    "any": lambda x: (x > 1).any(dim=()) * x,
    "argmax of a vector": lambda x: x[:, 0].argmax(dim=-1) * x,
}
_ALONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cumsum": lambda x: x.cumsum(-1),
    "cumsum of positions": lambda x: (x > 0).long().cumsum(-2) * x,
    "cumprod": lambda x: x.cumprod(-2),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "values of an index, used twice": lambda x: (y := x.gather(0, torch.zeros_like(x[:1]).long())) * y,
}
_PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda x: x.max(),
    "max of a dim": lambda x: x.max(0)[0],
    "amin of a dim": lambda x: x.amin(0),
    "aminmax": lambda x: x.aminmax()[0] * x.aminmax(dim=0)[1],
    "argmax": lambda x: x.argmax() * x,
    "argmin of a dim": lambda x: x.argmin(0) * x,
    "inf norm": lambda x: x.norm(_INF),
    "-inf norm of a dim": lambda x: torch.linalg.vector_norm(x, -_INF, dim=0),
    "foreach": lambda x: torch._foreach_norm([x, x], _INF)[1],
    "foreach max": lambda x: torch._foreach_max([x.abs(), x])[0] * x,
}

# Of channels, rows and columns: there is no batch dim.
_NO_BATCH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (3, None)),
    "adaptive_avg_pool2d of even parts": lambda x: F.adaptive_avg_pool2d(x, (2, 1)),
    "max_unpool2d": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=x.shape[-2:]),
    "max_unpool3d": lambda x: F.max_unpool3d(*F.max_pool3d(x[None], 2, return_indices=True), 2, output_size=x.shape),
}


class _Calls(nn.Module):
    """Its forward calls a function, so that the function runs inside of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, function: Callable[[], Any], x: torch.Tensor) -> Any:
        return function()


def _placed(x: torch.Tensor, mesh: Any, placement: Placement) -> DTensor:
    if isinstance(placement, Partial):  # exact: twice the value, and its negative
        times = (2 if mesh.get_rank() == 0 else -1) * (2 if placement.reduce_op == "avg" else 1)
        return DTensor.from_local(x * times, mesh, [placement], run_check=False)
    return distribute_tensor(x, mesh, [placement], src_data_rank=None)


def _whole(x: Any) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def _compare(
    name: str,
    function: Callable[..., torch.Tensor],
    values: list[torch.Tensor],
    placements: list[Placement],
    mesh: Any,
    *,
    outside: bool = True,
) -> None:
    warnings.simplefilter("ignore")
    model = parallelize(_Calls(), Plan(mesh))
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in values]
    result = function(*inputs)
    differentiable = [x for x in inputs if x.requires_grad]
    grads = torch.autograd.grad(result.square().sum(), differentiable, allow_unused=True)
    for inside in (False, True) if outside else (True,):
        what = f"{name} of {placements}, {'inside' if inside else 'outside'} of a model"
        own = [_placed(x, mesh, p).detach().requires_grad_(x.is_floating_point()) for x, p in zip(values, placements)]
        found = model(lambda own=own: function(*own), torch.ones(2)) if inside else function(*own)
        torch.testing.assert_close(_whole(found), result.detach(), msg=f"{what}: value")
        own_grads = torch.autograd.grad(found.square().sum(), [x for x in own if x.requires_grad], allow_unused=True)
        for x, wanted, grad in zip(differentiable, grads, own_grads):
            zero = torch.zeros_like(x)
            wanted, grad = (zero if g is None else _whole(g) for g in (wanted, grad))
            torch.testing.assert_close(grad, wanted, msg=f"{what}: gradient")


def on_rank_no_dim() -> None:
    mesh = init_mesh("tp=2")
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name, function in (_NO_DIM | _ALONG).items():
        for placement in (Shard(0), Shard(1), Partial()):
            _compare(name, function, [x], [placement], mesh)


def on_rank_no_batch() -> None:
    mesh = init_mesh("tp=2")
    x = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name, function in _NO_BATCH.items():
        for placement in (Shard(0), Shard(1), Shard(2), Partial()):
            _compare(name, function, [x], [placement], mesh)


def on_rank_parts() -> None:
    mesh = init_mesh("dp=4")
    for rows in (5, 1):  # parts of 2, 2, 1 and 0 rows, and of 1, 0, 0, 0
        x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
        for name, function in _PARTS.items():
            _compare(name, function, [x], [Shard(0)], mesh)


def on_rank_indices() -> None:
    mesh = init_mesh("tp=2")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10, 5, generator=generator, dtype=torch.float64)
    for shape, dim in (((5, 5), -1), ((10, 2), 0), ((2, 3), 0)):
        index = torch.randint(min(shape), shape, generator=generator)
        source = torch.randn(shape, generator=generator, dtype=torch.float64)
        larger = torch.randn(shape[0] + 1, shape[1] + 1, generator=generator, dtype=torch.float64)
        functions: dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor]] = {
            "gather": (lambda a, i, _, dim=dim: a.gather(dim, i), source),
            "scatter_add": (lambda a, i, b, dim=dim: a.scatter_add(dim, i, b), source),
            "scatter_add of a part": (lambda a, i, b, dim=dim: a.scatter_add(dim, i, b.detach()), larger),
            "scatter_reduce": (lambda a, i, b, dim=dim: a.scatter_reduce(dim, i, b, "mean"), source),
        }
        for name, (function, other) in functions.items():
            for placements in (
                [Shard(0), Replicate(), Shard(0)],
                [Shard(1), Shard(0), Replicate()],
                [Partial(), Replicate(), Shard(0)],
                [Replicate(), Shard(1), Shard(1)],
            ):
                _compare(name, function, [x, index, other], placements, mesh)


def on_rank_pending() -> None:
    mesh = init_mesh("tp=2")
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "cat": lambda a, b: torch.cat([a, b]),
        "dstack": lambda a, b: torch.dstack([a, b]),
        "add_": lambda a, b: a.clone().add_(b),
        "copy_": lambda a, b: a.clone().copy_(b),
    }
    for name, function in functions.items():
        for kinds in (("sum", "avg"), ("avg", "sum")):
            _compare(name, function, [x, 3 * x], [Partial(kind) for kind in kinds], mesh)
    empty = torch.empty(0, dtype=torch.float32)  # ignored, as a cache that is split and joined between forwards starts
    for place in (Replicate(), Shard(0)):
        _compare("cat of an empty one", lambda e, a: torch.cat([e, a, a], 1), [empty, x], [place, Shard(1)], mesh)
    _compare("cat of one", lambda e, a: torch.cat([a.float(), e.double()]), [empty, x], [Replicate(), Shard(0)], mesh)
    matrix, tolerance = (
        torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
        torch.tensor(0.4),
    )
    for placements in (
        [Replicate(), Replicate()],
        [Replicate(), Partial()],
        [Partial(), Partial()],
        [Shard(0), Partial()],
    ):
        pinv = lambda a, rtol: torch.linalg.pinv(a, rtol=rtol.detach())  # noqa: E731
        _compare("pinv", pinv, [matrix, tolerance.double()], placements, mesh, outside=False)


@pytest.mark.parametrize("on_rank", [on_rank_no_dim, on_rank_no_batch, on_rank_indices, on_rank_pending])
def test_equal_to_one_device(ranks: RankPools, on_rank: Callable[[], None]) -> None:
    ranks.run(on_rank, world_size=2)


def test_ranks_without_elements(ranks: RankPools) -> None:
    ranks.run(on_rank_parts, world_size=4)
