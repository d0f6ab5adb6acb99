"""Ops along a dim that a stock ``Shard`` cuts, on tensors that another mesh axis places as ours: equal to one device.

Where such an op has no rule, PyTorch's own strategy goes on from the stock placements, and some of those are wrong: they
run a cumulative sum along ``-1`` on each rank's columns, for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.examples import daily_sample
from tests.ops.layouts import Layout, assert_same, data, mesh_of, place, run_op
from tests.ranks import RankPools, run_cases
from vescale.ops import PlacementFallbackWarning
from vescale.placements import InterleavedShard, RaggedShard

functional = torch.nn.functional


def index_like(x: Any, values: list[int]) -> Any:
    index = torch.tensor(values)
    if not isinstance(x, DTensor):
        return index
    return DTensor.from_local(index, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)


# Ops that run along one dim.
ALONG: dict[str, Callable[[Any, int], Any]] = {
    "cumsum": lambda x, dim: x.cumsum(dim),
    "cumprod": lambda x, dim: x.cumprod(dim),
    "cummax": lambda x, dim: x.cummax(dim),
    "cummin": lambda x, dim: x.cummin(dim),
    "logcumsumexp": lambda x, dim: x.logcumsumexp(dim),
    "cumulative_trapezoid": lambda x, dim: torch.cumulative_trapezoid(x, dim=dim),
    "trapezoid": lambda x, dim: torch.trapezoid(x, dim=dim),
    "sort": lambda x, dim: x.sort(dim),
    "sort descending": lambda x, dim: torch.sort(x, dim=dim, descending=True, stable=True),
    "argsort": lambda x, dim: x.argsort(dim),
    "topk": lambda x, dim: x.topk(2, dim),
    "kthvalue": lambda x, dim: x.kthvalue(2, dim),
    "median": lambda x, dim: x.median(dim),
    "nanmedian": lambda x, dim: x.nanmedian(dim),
    "mode": lambda x, dim: (x * 2).round().mode(dim),
    "flip": lambda x, dim: x.flip(dim),
    "roll": lambda x, dim: x.roll(1, dim),
    "diff": lambda x, dim: x.diff(dim=dim),
    "diff 2": lambda x, dim: x.diff(n=2, dim=dim),
    "gradient": lambda x, dim: torch.gradient(x, dim=dim)[0],
    "softmax": lambda x, dim: x.softmax(dim),
    "log_softmax": lambda x, dim: x.log_softmax(dim),
    "normalize": lambda x, dim: functional.normalize(x, dim=dim),
    "glu": lambda x, dim: functional.glu(x, dim),
    "logsumexp": lambda x, dim: x.logsumexp(dim),
    "logsumexp kept": lambda x, dim: x.logsumexp(dim, keepdim=True),
    "sum": lambda x, dim: x.sum(dim),
    "mean": lambda x, dim: x.mean(dim, keepdim=True),
    "prod": lambda x, dim: x.prod(dim),
    "max": lambda x, dim: x.max(dim),
    "min": lambda x, dim: x.min(dim),
    "amax": lambda x, dim: x.amax(dim),
    "aminmax": lambda x, dim: x.aminmax(dim=dim),
    "argmax": lambda x, dim: x.argmax(dim),
    "argmin": lambda x, dim: x.argmin(dim, keepdim=True),
    "std": lambda x, dim: x.std(dim),
    "var_mean": lambda x, dim: torch.var_mean(x, dim),
    "norm": lambda x, dim: torch.linalg.vector_norm(x, 3, dim=dim),
    "count_nonzero": lambda x, dim: (x > 0).count_nonzero(dim),
    "any": lambda x, dim: (x > 1).any(dim),
    "all": lambda x, dim: (x > -1).all(dim),
    "nansum": lambda x, dim: x.nansum(dim),
    "renorm": lambda x, dim: x.renorm(2, dim, 1.0),
    "select": lambda x, dim: x.select(dim, 1),
    "select last": lambda x, dim: x.select(dim, -1),
    "narrow": lambda x, dim: x.narrow(dim, 1, 3),
    "chunk": lambda x, dim: x.chunk(3, dim),
    "split": lambda x, dim: x.split([2, x.shape[dim] - 2], dim),
    "tensor_split": lambda x, dim: x.tensor_split(3, dim),
    "unbind": lambda x, dim: x.unbind(dim),
    "unfold": lambda x, dim: x.unfold(dim, 2, 1),
    "unflatten": lambda x, dim: x.unflatten(dim, (2, -1)),
    "cat": lambda x, dim: torch.cat([x, x * 2], dim),
    "stack": lambda x, dim: torch.stack([x, x * 2], dim),
    "index_select": lambda x, dim: x.index_select(dim, index_like(x, [2, 0, 3])),
    "index_add": lambda x, dim: x.index_add(dim, index_like(x, list(range(x.shape[dim]))[::-1]), x * 2),
    "index_copy": lambda x, dim: x.index_copy(dim, index_like(x, list(range(x.shape[dim]))[::-1]), x * 2),
    "index_fill": lambda x, dim: x.index_fill(dim, index_like(x, [2, 0]), 9.0),
    "gather": lambda x, dim: x.gather(dim, x.argsort(dim)),
    "take_along_dim": lambda x, dim: x.take_along_dim(x.argsort(dim), dim),
    "scatter": lambda x, dim: x.scatter(dim, x.argsort(dim), 5.0),
    "scatter_add": lambda x, dim: x.scatter_add(dim, x.argsort(dim), x),
    "scatter_reduce": lambda x, dim: x.scatter_reduce(dim, x.argsort(dim), x, "amax"),
    "slice_scatter": lambda x, dim: x.slice_scatter(x.narrow(dim, 0, 2) * 3, dim, 1, 3),
    "select_scatter": lambda x, dim: x.select_scatter(x.select(dim, 0) * 3, dim, 2),
    "repeat_interleave": lambda x, dim: x.repeat_interleave(2, dim),
    "movedim": lambda x, dim: x.movedim(dim, 0),
    "fft": lambda x, dim: torch.fft.fft(x, dim=dim).abs(),
    "searchsorted": lambda x, dim: torch.searchsorted(x.sort(dim=1).values, x),
    "cross_entropy": lambda x, dim: functional.cross_entropy(x, x.argmax(dim=1)),
    "nll": lambda x, dim: functional.nll_loss(x, x.argmax(dim=1)),
    "expand": lambda x, dim: x.unsqueeze(dim).expand(8, 8, 6) if dim == 0 else x.unsqueeze(0).expand(2, 8, 6),
}
# Ops that mix elements of the whole tensor.
WHOLE: dict[str, Callable[[Any], Any]] = {
    "msort": lambda x: x.msort(),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "repeat": lambda x: x.repeat(2, 3),
    "flatten": lambda x: x.flatten(),
    "view 3": lambda x: x.reshape(2, 4, 3, 2),
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(1),
    "diagonal": lambda x: x.diagonal(),
    "diag": lambda x: x.diag(),
    "trace": lambda x: x.trace(),
    "matmul": lambda x: x @ x.t(),
    "matmul t": lambda x: x.t() @ x,
    "mv": lambda x: x @ x[0],
    "addmm": lambda x: torch.addmm(x[:, :1], x, x.t()),
    "bmm": lambda x: torch.bmm(x.unsqueeze(0), x.t().unsqueeze(0)),
    "linear": lambda x: functional.linear(x, x, x[:, 0]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "outer": lambda x: torch.outer(x[:, 0], x[0]),
    "layer_norm": lambda x: functional.layer_norm(x, (6,)),
    "embedding": lambda x: functional.embedding((x[:, 0].abs() * 2).long().clamp(max=7), x),
    "pad": lambda x: functional.pad(x, (1, 2)),
    "pad circular": lambda x: functional.pad(x.unsqueeze(0), (1, 2), mode="circular"),
    "max_pool1d": lambda x: functional.max_pool1d(x.unsqueeze(0), 2),
    "avg_pool1d": lambda x: functional.avg_pool1d(x.unsqueeze(0), 3, 1),
    "conv1d": lambda x: functional.conv1d(x.unsqueeze(0), x.reshape(2, 8, 3)),
    "interpolate": lambda x: functional.interpolate(x.unsqueeze(0), scale_factor=2),
    "pixel_shuffle": lambda x: functional.pixel_shuffle(x.reshape(1, 4, 3, 4), 2),
    "bucketize": lambda x: torch.bucketize(x, x[0].sort().values),
    "histc": lambda x: x.histc(5),
    "index column": lambda x: x[:, index_like(x, [3, 1])],
    "take": lambda x: x.take(index_like(x, [3, 1, 40])),
    "index_put": lambda x: x.index_put((index_like(x, [3, 1]), index_like(x, [3, 1])), x[0, :2]),
    "cov": lambda x: x.cov(),
    "cross": lambda x: torch.linalg.cross(x[:, :3], x[:, 3:]),
    "channel": lambda x: functional.channel_shuffle(x.reshape(1, 4, 3, 4), 2),
    "group_norm": lambda x: functional.group_norm(x.unsqueeze(0), 2),
    "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "tensordot": lambda x: torch.tensordot(x, x, dims=([0], [0])),
    "addr": lambda x: torch.addr(x, x[:, 0], x[0]),
    "rot90": lambda x: x.rot90(1, (0, 1)),
    "roll": lambda x: x.roll(5),
}

# A stock axis next to one of ours, and the dims that the stock one cuts.
LAYOUTS: list[tuple[Layout, tuple[int, int]]] = [
    (((2, 2), (RaggedShard((0,), (3, 5)), Shard(1))), (1, -1)),
    (((2, 2), (Shard(1), InterleavedShard(0, 2))), (1, -1)),
    (((2, 2), (RaggedShard(), Shard(0))), (0, -2)),
    (((2, 2), (Shard(0), InterleavedShard(1, 3))), (0, -2)),
]


def check_along(name: str, layout: Layout, dim: int) -> None:
    assert_same(run_op(ALONG[name], place(data(), layout), dim, fallback=True), ALONG[name](data(), dim))


def check_whole(name: str, layout: Layout) -> None:
    assert_same(run_op(WHOLE[name], place(data(), layout), fallback=True), WHOLE[name](data()))


def on_rank_along() -> int:
    return run_cases(
        check_along, daily_sample((n, layout, dim) for n in ALONG for layout, dims in LAYOUTS for dim in dims)
    )


def on_rank_whole() -> int:
    return run_cases(check_whole, daily_sample((name, layout) for name in WHOLE for layout, _ in LAYOUTS))


def test_ops_along_a_dim_that_a_stock_axis_cuts(ranks: RankPools) -> None:
    ranks.run(on_rank_along, world_size=4)


def test_ops_on_whole_tensors_next_to_a_stock_axis(ranks: RankPools) -> None:
    ranks.run(on_rank_whole, world_size=4)


def on_rank_independent() -> None:
    """What PyTorch is known to do right on a shard keeps it: a matrix product gathers our axis only."""
    layout = LAYOUTS[0][0]
    x = place(data(), layout)
    with pytest.warns(PlacementFallbackWarning):
        product = place(data(1, (5, 8)), layout, [Replicate(), Replicate()]) @ x
    assert product.placements == (Replicate(), Shard(1))
    assert_same(product, data(1, (5, 8)) @ data())


def test_matrix_products_keep_the_other_axes(ranks: RankPools) -> None:
    ranks.run(on_rank_independent, world_size=4)


def on_rank_writes() -> None:
    """A stock tensor that such an op writes to keeps its placement; one of ours is refused."""
    mesh = mesh_of((2, 2))
    source = place(data(1), LAYOUTS[0][0])
    for placements in ([Replicate(), Shard(1)], [Shard(0), Shard(1)], [Shard(0), Replicate()], [Replicate()] * 2):
        for target_dim in (0, -1):
            target, expected = place(data(), LAYOUTS[0][0], placements), data()
            local = target.to_local()
            order = list(range(expected.shape[target_dim]))[::-1]
            run_op(lambda t, d=target_dim, o=order: t.index_add_(d, index_like(t, o), source), target, fallback=True)
            expected.index_add_(target_dim, torch.tensor(order), data(1))
            assert_same(target, expected)
            assert list(target.placements) == placements and target.to_local().data_ptr() == local.data_ptr()
            out = place(torch.zeros(8, 6), LAYOUTS[0][0], placements)
            run_op(lambda o, d=target_dim: torch.cumsum(source, d, out=o), out, fallback=True)
            assert_same(out, data(1).cumsum(target_dim))
            assert list(out.placements) == placements and mesh.size() == 4
    ours = source.clone()
    ours.cumsum_(-1)
    assert_same(ours, data(1).cumsum(-1))


def test_writes_to_stock_tensors_land(ranks: RankPools) -> None:
    ranks.run(on_rank_writes, world_size=4)


def on_rank_without_strategy() -> None:
    """Ops for which PyTorch has no strategy run on gathered operands, and say so."""
    for layout in (((4,), (RaggedShard((0,), (2, 0, 5, 1)),)), *(layout for layout, _ in LAYOUTS)):
        x = place(data(), layout)
        with pytest.warns(PlacementFallbackWarning):
            windows = x.unfold(0, 3, 2)
        assert all(placement.is_replicate() for placement in windows.placements)
        assert_same(windows, data().unfold(0, 3, 2))


def test_ops_without_a_strategy_are_gathered(ranks: RankPools) -> None:
    ranks.run(on_rank_without_strategy, world_size=4)
