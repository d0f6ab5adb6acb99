"""Matrix products, chunks, views and normalizations on interleaved DTensors equal one device."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import vescale
from tests.ops.layouts import assert_same, data, mesh_of, place, run_op
from tests.ranks import RankPools, run_cases
from vescale.comm import record_comms
from vescale.compat import StridedShard
from vescale.ops import strict_placements
from vescale.placements import InterleavedShard, RaggedShard

functional = torch.nn.functional
R = Replicate()


def interleaved(dim: int, num_chunks: int) -> InterleavedShard:
    return InterleavedShard(dim, num_chunks)


# name -> (op, operands as (shape, placement), placements of the results, or None where it does not matter)
LOCAL: dict[str, tuple[Callable[..., Any], list[tuple[tuple[int, ...], Placement]], Placement | None]] = {
    "linear": (functional.linear, [((5, 8), R), ((12, 8), interleaved(0, 3))], interleaved(1, 3)),
    "linear 3-D": (functional.linear, [((2, 5, 8), R), ((12, 8), interleaved(0, 3))], interleaved(2, 3)),
    "linear with bias": (
        functional.linear,
        [((5, 8), R), ((12, 8), interleaved(0, 3)), ((12,), interleaved(0, 3))],
        interleaved(1, 3),
    ),
    "linear, uneven": (functional.linear, [((5, 8), R), ((10, 8), interleaved(0, 2))], interleaved(1, 2)),
    "mm": (torch.mm, [((5, 8), R), ((8, 12), interleaved(1, 2))], interleaved(1, 2)),
    "mm rows": (torch.mm, [((12, 8), interleaved(0, 2)), ((8, 6), R)], interleaved(0, 2)),
    "bmm": (torch.bmm, [((2, 5, 8), R), ((2, 8, 12), interleaved(2, 3))], interleaved(2, 3)),
    "contraction": (torch.mm, [((5, 12), interleaved(1, 3)), ((12, 6), interleaved(0, 3))], None),
    "contraction, linear": (functional.linear, [((5, 12), interleaved(1, 2)), ((6, 12), interleaved(1, 2))], None),
    "embedding": (
        lambda table, index: functional.embedding(index.long().abs() % 6, table),
        [((6, 12), interleaved(1, 3)), ((4,), R)],
        interleaved(1, 3),
    ),
    "transpose": (lambda x: x.t(), [((12, 5), interleaved(0, 3))], interleaved(1, 3)),
    "permute": (lambda x: x.permute(2, 0, 1), [((2, 5, 12), interleaved(2, 3))], interleaved(0, 3)),
    "softmax": (lambda x: x.softmax(0), [((5, 12), interleaved(1, 3))], interleaved(1, 3)),
    "layer_norm": (lambda x: functional.layer_norm(x, (5,)), [((12, 5), interleaved(0, 3))], interleaved(0, 3)),
    "mean": (lambda x: x.mean(0), [((5, 12), interleaved(1, 3))], interleaved(0, 3)),
    "amax": (lambda x: x.amax(0, keepdim=True), [((5, 12), interleaved(1, 3))], interleaved(1, 3)),
    "select": (lambda x: x[1], [((5, 12), interleaved(1, 3))], interleaved(0, 3)),
    "slice": (lambda x: x[1:3], [((5, 12), interleaved(1, 3))], interleaved(1, 3)),
    "cat": (lambda x, y: torch.cat([x, y]), [((5, 12), interleaved(1, 3)), ((2, 12), interleaved(1, 3))], None),
    "bias": (lambda x, b: x + b, [((5, 12), interleaved(1, 3)), ((12,), interleaved(0, 3))], interleaved(1, 3)),
    "row scale": (lambda x, b: b * x, [((5, 12), interleaved(1, 3)), ((5, 1), R)], interleaved(1, 3)),
    "chunk": (lambda x: x.chunk(3, -1), [((5, 12), interleaved(1, 3))], Shard(1)),
    "chunk, uneven": (lambda x: x.chunk(2, 1), [((5, 10), interleaved(1, 2))], Shard(1)),
    "split in two": (lambda x: x.split([8, 4], 1), [((5, 12), interleaved(1, 3))], None),
    "slice a chunk": (lambda x: x[:, 4:8], [((5, 12), interleaved(1, 3))], Shard(1)),
    "narrow two chunks": (lambda x: x.narrow(1, 4, 8), [((5, 12), interleaved(1, 3))], interleaved(1, 2)),
    "view of chunks": (lambda x: x.view(5, 3, 4), [((5, 12), interleaved(1, 3))], Shard(2)),
    "view of heads": (lambda x: x.view(5, 3, 8, 2), [((5, 48), interleaved(1, 3))], Shard(2)),
    "view of inner dims": (lambda x: x.view(5, 12, 3, 2), [((5, 12, 6), interleaved(1, 3))], interleaved(1, 3)),
    "merged with a dim before": (lambda x: x.view(60, 6), [((5, 12, 6), interleaved(1, 3))], interleaved(0, 15)),
    "split from a dim before": (lambda x: x.view(5, 12, 6), [((60, 6), interleaved(0, 15))], interleaved(1, 3)),
    "expand": (lambda x: x.expand(5, 12, 7), [((5, 12, 1), interleaved(1, 3))], interleaved(1, 3)),
    "expand before": (lambda x: x.expand(3, 5, 12), [((5, 12), interleaved(1, 3))], interleaved(2, 3)),
    "gradient of slice": (
        lambda g: torch.ops.aten.slice_backward(g, [9, 12], 0, 2, 7, 1),
        [((5, 12), interleaved(1, 3))],
        interleaved(1, 3),
    ),
    "gradient of select": (
        lambda g: torch.ops.aten.select_backward(g, [9, 5, 12], 0, 4),
        [((5, 12), interleaved(1, 3))],
        interleaved(2, 3),
    ),
    "unsqueeze": (lambda x: x.unsqueeze(1), [((5, 12), interleaved(1, 3))], interleaved(2, 3)),
}

# Operands that hold other index sets than the first interleaved one: moved, never taken for the same.
MOVED: dict[str, tuple[Callable[..., Any], list[tuple[tuple[int, ...], Placement]]]] = {
    "contraction with Shard": (torch.mm, [((5, 12), interleaved(1, 3)), ((12, 6), Shard(0))]),
    "contraction of Shard": (torch.mm, [((5, 12), Shard(1)), ((12, 6), interleaved(0, 3))]),
    "contraction of other chunks": (torch.mm, [((5, 12), interleaved(1, 3)), ((12, 6), interleaved(0, 2))]),
    "add Shard": (torch.add, [((5, 12), interleaved(1, 3)), ((5, 12), Shard(1))]),
    "add other chunks": (torch.add, [((5, 12), interleaved(1, 3)), ((5, 12), interleaved(1, 2))]),
    "add Ragged": (torch.add, [((5, 12), interleaved(1, 3)), ((5, 12), RaggedShard())]),
    "bias of other chunks": (torch.add, [((5, 12), interleaved(1, 3)), ((12,), interleaved(0, 2))]),
    "bias Shard": (functional.linear, [((5, 8), R), ((12, 8), interleaved(0, 3)), ((12,), Shard(0))]),
    "cat other chunks": (lambda x, y: torch.cat([x, y]), [((5, 12), interleaved(1, 3)), ((5, 12), interleaved(1, 2))]),
    "where": (lambda x, y: torch.where(x > y, x, y), [((5, 12), interleaved(1, 3)), ((5, 12), Shard(0))]),
    "in place": (lambda x, y: x.clone().add_(y), [((5, 12), Shard(1)), ((5, 12), interleaved(1, 3))]),
    "in place other chunks": (
        lambda x, y: x.clone().mul_(y),
        [((5, 12), interleaved(1, 2)), ((12,), interleaved(0, 3))],
    ),
    "copy_": (lambda x, y: x.clone().copy_(y), [((5, 12), interleaved(1, 3)), ((5, 12), Shard(1))]),
}

# Ops that mix the indices of the interleaved dim: gathered, and reported.
GATHERED: dict[str, tuple[Callable[..., Any], list[tuple[tuple[int, ...], Placement]]]] = {
    "softmax": (lambda x: x.softmax(1), [((5, 12), interleaved(1, 3))]),
    "layer_norm": (lambda x: functional.layer_norm(x, (12,)), [((5, 12), interleaved(1, 3))]),
    "cumsum": (lambda x: x.cumsum(1), [((5, 12), interleaved(1, 3))]),
    "flip": (lambda x: x.flip(1), [((5, 12), interleaved(1, 3))]),
    "sort": (lambda x: x.sort(1), [((5, 12), interleaved(1, 3))]),
    "cut a chunk": (lambda x: x[:, 2:7], [((5, 12), interleaved(1, 3))]),
    "uneven split": (lambda x: x.split([5, 7], 1), [((5, 12), interleaved(1, 3))]),
    "select": (lambda x: x[:, 3], [((5, 12), interleaved(1, 3))]),
    "cat": (lambda x: torch.cat([x, x], 1), [((5, 12), interleaved(1, 3))]),
    "gradient of slice": (
        lambda g: torch.ops.aten.slice_backward(g, [5, 24], 1, 3, 15, 1),
        [((5, 12), interleaved(1, 3))],
    ),
    "view across": (lambda x: x.view(6, 10), [((5, 12), interleaved(1, 3))]),
    "argmax": (lambda x: x.argmax(1), [((5, 12), interleaved(1, 3))]),
    "mean": (lambda x: x.mean(1), [((5, 12), interleaved(1, 3))]),
    "norm": (lambda x: x.norm(dim=1), [((5, 12), interleaved(1, 3))]),
    "table": (lambda t, i: functional.embedding(i.long().abs() % 12, t), [((12, 5), interleaved(0, 3)), ((4,), R)]),
}


def operands(world: int, described: list[tuple[tuple[int, ...], Placement]]) -> tuple[list[Any], list[torch.Tensor]]:
    full = [data(seed, shape) for seed, (shape, _) in enumerate(described)]
    return [place(x, ((world,), (p,))) for x, (_, p) in zip(full, described)], full


def check_local(name: str, world: int) -> None:
    op, described, placement = LOCAL[name]
    ours, full = operands(world, described)
    with record_comms() as comms:
        result = run_op(op, *ours, fallback=False)
    assert not comms.records, comms.records
    expected = op(*full)
    for one in result if isinstance(result, tuple | list) else (result,):
        assert placement is None or world == 1 or one.placements == (placement,), one.placements
    assert_same(result, expected)


def check_moved(name: str, world: int) -> None:
    op, described = MOVED[name]
    ours, full = operands(world, described)
    assert_same(run_op(op, *ours, fallback=False), op(*full))


def check_gathered(name: str, world: int) -> None:
    op, described = GATHERED[name]
    ours, full = operands(world, described)
    assert_same(run_op(op, *ours, fallback=True), op(*full))
    if world > 1:
        with strict_placements(), pytest.raises(RuntimeError, match="has no rule for operand"):
            op(*operands(world, described)[0])


def check_backward(name: str, world: int) -> None:
    """Gradients of everything differentiable above."""
    op, described = {**{k: v[:2] for k, v in LOCAL.items()}, **MOVED}[name]
    ours, full = operands(world, described)
    gradients = []
    for tensors in (ours, full):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        result = op(*leaves)
        parts = result if isinstance(result, tuple | list) else [result]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sum((part * part).sum() for part in parts).backward()  # type: ignore[union-attr]
        gradients.append([leaf.grad for leaf in leaves])
    for actual, expected in zip(*gradients):
        assert (actual is None) == (expected is None)
        if actual is not None:
            assert_same(actual, expected)


def on_rank(world: int) -> int:
    return sum(
        run_cases(check, [(name, world) for name in table])
        for check, table in (
            (check_local, LOCAL),
            (check_moved, MOVED),
            (check_gathered, GATHERED),
            (check_backward, [*LOCAL, *MOVED]),
        )
    )


@pytest.mark.parametrize("world", [2, 4])
def test_interleaved_ops(ranks: RankPools, world: int) -> None:
    ranks.run(on_rank, world, world_size=world)


def attention(x: Any, qkv: Any, out: Any, heads: int, whole: Callable[[Any], Any]) -> Any:
    """Self-attention with a fused QKV projection; the chunks of the projection are q, k and v."""
    batch, length, hidden = x.shape
    q, k, v = functional.linear(x, qkv).chunk(3, -1)
    q, k, v = (t.view(batch, length, heads, hidden // heads).transpose(1, 2) for t in (q, k, v))
    scores = (q @ k.transpose(-1, -2)).softmax(-1)
    mixed = (scores @ v).transpose(1, 2).reshape(batch, length, hidden)
    return whole(functional.linear(mixed, out))


def on_rank_attention() -> None:
    """Tensor parallel attention: the fused projection is interleaved, nothing is communicated before its sum."""
    full = [data(0, (2, 5, 8)), data(1, (24, 8)), data(2, (8, 8))]
    mesh = mesh_of((2,))
    placements = [R, interleaved(0, 3), Shard(1)]
    ours = [place(x, ((2,), (p,))).requires_grad_() for x, p in zip(full, placements)]
    theirs = [x.clone().requires_grad_() for x in full]

    def reduced(y: DTensor) -> DTensor:
        assert y.placements[0].is_partial()
        return y.redistribute(mesh, [R])

    with record_comms() as comms, strict_placements():
        result = attention(*ours, 4, reduced)
    assert [r.op for r in comms.records] in ([], ["all_reduce"])  # the sum itself may be stock DTensor's
    expected = attention(*theirs, 4, lambda y: y)
    assert_same(result.detach(), expected.detach())
    result.square().mean().backward()
    expected.square().mean().backward()
    for one, other in zip(ours, theirs):
        assert one.grad is not None
        assert_same(one.grad, other.grad)


def test_attention_with_fused_projection(ranks: RankPools) -> None:
    ranks.run(on_rank_attention, world_size=2)


def on_rank_strided() -> None:
    """PyTorch's own ``_StridedShard``, which its views make, counts as interleaved next to ours."""
    mesh = mesh_of((2,))
    x = place(data(0, (5, 3, 4)), ((2,), (Shard(2),)))
    flat = x.view(5, 12)
    assert isinstance(flat.placements[0], StridedShard)
    weight = place(data(1, (12, 6)), ((2,), (interleaved(0, 3),)))
    with record_comms() as comms, strict_placements():
        product = flat @ weight
        total = place(data(2, (5, 12)), ((2,), (interleaved(1, 3),))) + flat
    assert_same(product, data(0, (5, 12)) @ data(1, (12, 6)))
    assert_same(total, data(2, (5, 12)) + data(0, (5, 12)))
    assert comms.count("all_to_all_v") <= 1
    assert mesh.ndim == 1


def test_strided_shard_of_pytorch(ranks: RankPools) -> None:
    ranks.run(on_rank_strided, world_size=2)


def check_two_axes(left: tuple[Placement, ...], right: tuple[Placement, ...]) -> None:
    """A product whose operands are interleaved and sharded over both axes of a mesh."""
    mesh = (2, 2)
    x, w = data(0, (8, 12)), data(1, (12, 10))
    ours = place(x, (mesh, left)), place(w, (mesh, right))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(ours[0] @ ours[1], x @ w)
        assert_same(ours[0] + 1, x + 1)
        assert_same(ours[0].chunk(3, 1), x.chunk(3, 1))
        if Shard(1) not in left:  # stock views refuse to cut 3 chunks over 2 ranks
            assert_same(ours[0].view(8, 3, 4), x.view(8, 3, 4))
        assert_same(ours[1].sum(), w.sum())


def on_rank_pending() -> None:
    """What is whole along an axis is one more contribution to a sum that is pending there: nothing is reduced for it."""
    mesh = (2, 2)
    cut, pending = (interleaved(1, 3), R), (interleaved(1, 3), Partial())
    x, y = data(0, (5, 12)), data(1, (5, 12))
    rank = torch.distributed.get_rank()
    whole = place(x, (mesh, cut))
    part = place(y, (mesh, cut)).to_local() * (3.0 if rank % 2 else -2.0)  # these add up to y
    summand = DTensor.from_local(part, whole.device_mesh, pending)
    with record_comms() as comms, strict_placements():
        found = [whole + summand, summand - whole, torch.add(whole, summand, alpha=2), summand.clone().add_(whole)]
    assert not comms.records and all(tuple(x.placements) == pending for x in found)
    for own, expected in zip(found, (x + y, y - x, x + 2 * y, y + x)):
        assert_same(own, expected)
    with record_comms() as comms:
        written = whole.clone().add_(summand)  # which stays as it lies, and so the sum is reduced
    assert comms.count("all_reduce") == 1 and tuple(written.placements) == cut
    assert_same(written, x + y)
    column = place(data(2, (5, 1)), (mesh, (R, R)))
    assert_same(summand + column, y + data(2, (5, 1)))  # one that is broadcast would count on every rank


def test_whole_operands_join_pending_sums(ranks: RankPools) -> None:
    ranks.run(on_rank_pending, world_size=4)


def on_rank_two_axes() -> int:
    lefts: list[tuple[Placement, ...]] = [
        (R, interleaved(1, 3)),
        (Shard(0), interleaved(1, 3)),
        (interleaved(0, 2), Shard(1)),
        (interleaved(1, 3), Shard(1)),
        (Shard(1), interleaved(1, 3)),
        (interleaved(0, 2), interleaved(1, 3)),
    ]
    rights: list[tuple[Placement, ...]] = [
        (R, interleaved(0, 3)),
        (R, Shard(0)),
        (Shard(0), R),
        (interleaved(0, 3), Shard(0)),
        (interleaved(1, 2), interleaved(0, 2)),
    ]
    return run_cases(check_two_axes, list(itertools.product(lefts, rights)))


def test_interleaved_on_two_axes(ranks: RankPools) -> None:
    ranks.run(on_rank_two_axes, world_size=4)


class FusedHeads(torch.nn.Module):
    """Queries, keys and values of one projection, told apart by a view of five dims."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(rows, length, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        heads = functional.scaled_dot_product_attention(q, k, v)
        return self.out(heads.transpose(1, 2).reshape(rows, length, 16))


def on_rank_fused(sizes: tuple[int, int]) -> None:
    x = data(0, (7, 5, 16))
    torch.manual_seed(0)
    one = FusedHeads()
    one(x).square().mean().backward()
    torch.manual_seed(0)
    plan = vescale.Plan(vescale.init_mesh(f"dp={sizes[0]},tp={sizes[1]}"))
    plan.shard("<in:x>", Shard(0), mesh="dp").shard("qkv.(weight|bias)", interleaved(0, 3), mesh="tp")
    plan.shard("qkv.<in>", R, mesh="tp").shard("out.weight", Shard(1), mesh="tp").shard("out.<out>", R, mesh="tp")
    plan.shard("<out>", R, mesh=("dp", "tp"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = vescale.parallelize(FusedHeads(), plan, strict=True)
        model(x).square().mean().backward()
    for (name, parameter), expected in zip(model.named_parameters(), one.parameters(), strict=True):
        assert parameter.grad is not None and expected.grad is not None
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)])
def test_a_plan_with_fused_heads_on_axes_of_one_rank(ranks: RankPools, sizes: tuple[int, int]) -> None:
    ranks.run(on_rank_fused, sizes, world_size=sizes[0] * sizes[1])
