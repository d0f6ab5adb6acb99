"""Variable-size collectives against what one process computes, and the ledger against what reaches the backend."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.placements.on_ranks import make_mesh, sample
from tests.ranks import RankPools
from tests.simulate import simulate
from vescale.comm import (
    MAX_PADDING,
    _collectives,
    all_gather_v,
    all_reduce,
    all_to_all_v,
    axis_group,
    record_comms,
    reduce_scatter_v,
)
from vescale.placements import InterleavedShard, RaggedShard, distribute_tensor, redistribute

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8)
MOVED_ONLY = (torch.bool, torch.complex64, torch.float8_e4m3fn)
SIZES = {
    "even": (4, 4, 4, 4),
    "padded": (5, 5, 4, 5),
    "one short": (3, 3, 3, 1),
    "one owner": (0, 9, 0, 0),
    "two owners": (7, 0, 0, 2),
    "skewed": (1, 12, 3, 1),
    "zeros": (0, 5, 5, 5),
    "nothing": (0, 0, 0, 0),
}


def group_of(num_ranks: int) -> tuple[dist.ProcessGroup, int]:
    found = axis_group(make_mesh(tuple(range(num_ranks))), (0,))
    return found.group, found.index


def gather(sizes: tuple[int, ...]) -> None:
    group, rank = group_of(len(sizes))
    for dtype in (*DTYPES, *MOVED_ONLY):
        pieces = [sample((n,), torch.float32, seed).to(dtype) for seed, n in enumerate(sizes)]
        expected = torch.cat([piece.view(torch.uint8) for piece in pieces])
        with record_comms() as ledger:
            out = all_gather_v(pieces[rank], sizes, group).wait()
            buffer = torch.empty(sum(sizes), dtype=dtype)
            pending = all_gather_v(pieces[rank], sizes, group, out=buffer)
        assert pending.wait() is buffer and pending.wait() is buffer
        for result in (out, buffer):
            assert result.dtype == dtype and torch.equal(result.view(torch.uint8), expected)
        if sum(sizes) == 0:
            assert ledger.count() == 0
            continue
        record = ledger.records[0]
        assert ledger.count() == 2 and record.op == "all_gather_v" and record.num_ranks == len(sizes)
        assert record.bytes - record.padding_bytes == (sum(sizes) - sizes[rank]) * dtype.itemsize
        assert record.padding_bytes <= MAX_PADDING * sum(sizes) * dtype.itemsize


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_all_gather_v(ranks: RankPools, sizes: tuple[int, ...]) -> None:
    ranks.run(gather, sizes, world_size=4)


def one_device(pieces: list[torch.Tensor], op: str) -> torch.Tensor:
    """In pairs of pairs of ranks, half precision in rank order and float32, as documented."""
    combine = {"product": torch.mul, "max": torch.maximum, "min": torch.minimum}.get(op, torch.add)
    if pieces[0].dtype in (torch.float16, torch.bfloat16):
        result = functools.reduce(combine, [piece.float() for piece in pieces])
    else:
        level = [piece.clone() for piece in pieces]
        while len(level) > 1:
            level = [functools.reduce(combine, level[n : n + 2]) for n in range(0, len(level), 2)]
        result = level[0]
    return (result / len(pieces) if op == "avg" else result).to(pieces[0].dtype)


def reduce_pieces(sizes: tuple[int, ...]) -> None:
    group, rank = group_of(len(sizes))
    total, start = sum(sizes), sum(sizes[:rank])
    for dtype in (*DTYPES, torch.bool, torch.complex64):
        for op in ("sum", "avg", "max", "min", "product"):
            if (op == "avg" and not (dtype.is_floating_point or dtype.is_complex)) or (
                dtype.is_complex and op in ("max", "min")
            ):
                continue
            # Thirds: the order of additions shows.
            sends = [sample((total,), torch.float32, seed).div(3).to(dtype) for seed in range(len(sizes))]
            whole = one_device(sends, op)
            with record_comms() as ledger:
                out = reduce_scatter_v(sends[rank].clone(), sizes, op, group).wait()
            assert out.dtype == dtype and torch.equal(out, whole[start : start + sizes[rank]]), (dtype, op)
            buffer = torch.empty(sizes[rank], dtype=dtype)
            assert reduce_scatter_v(sends[rank].clone(), sizes, op, group, out=buffer).wait() is buffer
            assert torch.equal(buffer, out)
            if total:
                assert [r.bytes for r in ledger.records] == [(total - sizes[rank]) * dtype.itemsize]
            else:
                assert ledger.count() == 0


@pytest.mark.parametrize(
    "sizes", [SIZES[name] for name in ("even", "one owner", "skewed", "zeros", "nothing")], ids=str
)
def test_reduce_scatter_v(ranks: RankPools, sizes: tuple[int, ...]) -> None:
    ranks.run(reduce_pieces, sizes, world_size=4)


def half_precision_adds_in_float32() -> None:
    group, rank = group_of(4)
    # 256 + 1 + 1 + 1 is 256 when every step rounds to bfloat16, and 259 (rounded to 260) in float32.
    send = torch.full((4,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    for result in (reduce_scatter_v(send, (1, 1, 1, 1), "sum", group).wait(), all_reduce(send, "sum", group).wait()):
        assert bool((result == 260).all()), result


def test_half_precision_adds_in_float32(ranks: RankPools) -> None:
    ranks.run(half_precision_adds_in_float32, world_size=4)


def reduce_whole(num_ranks: int) -> None:
    group, rank = group_of(num_ranks)
    for shape in ((5, 3), (1,), (), (0, 3)):
        for dtype in (*DTYPES, torch.bool, torch.complex64):
            for op in ("sum", "max", "avg"):
                if (op == "max" and dtype.is_complex) or (op == "avg" and not dtype.is_floating_point):
                    continue
                locals_ = [sample(shape, torch.float32, seed).to(dtype) for seed in range(num_ranks)]
                before = locals_[rank].clone()
                with record_comms() as ledger:
                    out = all_reduce(locals_[rank], op, group).wait()
                assert torch.equal(locals_[rank], before), "the input is not changed"
                torch.testing.assert_close(out, one_device(locals_, op))
                bound = 2 * (num_ranks - 1) * before.numel() / num_ranks + 2 * num_ranks
                assert ledger.bytes() <= bound * dtype.itemsize
    strided = sample((4, 6), torch.float32, rank)[:, ::2]
    total = all_reduce(strided, "sum", group).wait()
    expected = one_device([sample((4, 6), torch.float32, r)[:, ::2] for r in range(num_ranks)], "sum")
    torch.testing.assert_close(total, expected)  # gloo adds in an order of its own


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_all_reduce(ranks: RankPools, num_ranks: int) -> None:
    ranks.run(reduce_whole, num_ranks, world_size=num_ranks)


def exchange() -> None:
    group, rank = group_of(4)
    table = [[0, 3, 1, 0], [2, 2, 0, 5], [0, 0, 0, 0], [1, 0, 4, 1]]  # table[i][j]: elements from i to j
    for dtype in (*DTYPES, *MOVED_ONLY):
        sends = [
            [sample((n,), torch.float32, 10 * sender + receiver).to(dtype) for receiver, n in enumerate(row)]
            for sender, row in enumerate(table)
        ]
        receive_sizes = [table[i][rank] for i in range(4)]
        with record_comms() as ledger:
            out = all_to_all_v(torch.cat(sends[rank]), table[rank], receive_sizes, group, requester="the test").wait()
        expected = torch.cat([sends[i][rank].view(torch.uint8) for i in range(4)])
        assert torch.equal(out.view(torch.uint8), expected)
        (record,) = ledger.records
        assert record.bytes == (sum(receive_sizes) - receive_sizes[rank]) * dtype.itemsize
        assert record.requester == "the test" and record.num_ranks == 4


def test_all_to_all_v(ranks: RankPools) -> None:
    ranks.run(exchange, world_size=4)


def nccl_branches(sizes: tuple[int, ...]) -> None:
    """The list forms that NCCL runs as one group, on a backend that has them; only the choice is faked."""
    _, rank = group_of(len(sizes))
    group = axis_group(make_mesh(tuple(range(len(sizes)))), (0,)).group
    for dtype in (torch.float32, torch.float64):
        pieces = [sample((n,), dtype, seed) for seed, n in enumerate(sizes)]
        assert torch.equal(all_gather_v(pieces[rank], sizes, group).wait(), torch.cat(pieces))
        sends = [sample((sum(sizes),), dtype, seed) for seed in range(len(sizes))]
        start = sum(sizes[:rank])
        for op in ("sum", "avg"):
            out = reduce_scatter_v(sends[rank].clone(), sizes, op, group).wait()
            torch.testing.assert_close(out, one_device(sends, op)[start : start + sizes[rank]])
            torch.testing.assert_close(all_reduce(sends[rank], op, group).wait(), one_device(sends, op))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_nccl_branches(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    monkeypatch.setattr(_collectives, "is_nccl", lambda tensor, group: True)
    simulate(nccl_branches, 4, sizes)


class LateWork:
    """A work object as on a device: nothing has happened before somebody waits for it."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start: Callable[[], Any] | None = start

    def wait(self) -> bool:
        start, self._start = self._start, None
        if start is not None:
            start()
        return True

    def is_completed(self) -> bool:
        return self._start is None


class LateCollectives:
    """Stands for ``torch.distributed``: collectives take what NCCL takes, and run when they are waited for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("all_gather", "reduce_scatter", "all_to_all_single", "all_reduce", "broadcast"):
            return self.late(name, getattr(dist, name))
        return getattr(dist, name)

    def late(self, name: str, function: Callable[..., Any]) -> Callable[..., LateWork]:
        def call(*arguments: Any, async_op: bool, group: Any, **options: Any) -> LateWork:
            tensors = [t for a in arguments for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
            assert tensors and async_op, "nobody may wait on the host before the result is asked for"
            assert all(tensor.is_contiguous() for tensor in tensors)
            assert len({tensor.dtype for tensor in tensors}) == 1
            self.calls.append(name)
            return LateWork(lambda: function(*arguments, group=group, **options))

        return call


def results_of_late_work(sizes: tuple[int, ...]) -> None:
    nccl_branches(sizes)
    group, rank = group_of(len(sizes))
    total, start = sum(sizes), sum(sizes[:rank])
    pieces = [sample((n,), torch.float32, seed) for seed, n in enumerate(sizes)]
    wide = [sample((total,), torch.float32, seed) for seed in range(len(sizes))]
    started = [
        all_gather_v(pieces[rank], sizes, group),
        reduce_scatter_v(wide[rank], sizes, "sum", group),
        all_reduce(wide[rank], "max", group),
        all_to_all_v(wide[rank], sizes, [sizes[rank]] * len(sizes), group),
    ]
    assert total == 0 or not any(pending.is_completed() for pending in started)
    gathered, reduced, whole, exchanged = [pending.wait() for pending in started]
    assert torch.equal(gathered, torch.cat(pieces)) and torch.equal(whole, one_device(wide, "max"))
    assert torch.equal(reduced, one_device(wide, "sum")[start : start + sizes[rank]])
    assert torch.equal(exchanged, torch.cat([w[start : start + sizes[rank]] for w in wide]))
    assert all(pending.is_completed() for pending in started)


@pytest.mark.parametrize("name", ["even", "padded", "one owner", "skewed", "zeros", "nothing"])
def test_nccl_branches_with_late_work(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Streams: several collectives in flight, results only once they are waited for; the forms that NCCL is given."""
    late = LateCollectives()
    monkeypatch.setattr(_collectives, "is_nccl", lambda tensor, group: True)
    monkeypatch.setattr(_collectives, "dist", late)
    for single in ("all_gather_single", "reduce_scatter_single"):
        monkeypatch.setattr(_collectives, single, late.late(single, getattr(_collectives, single)))
    simulate(results_of_late_work, 4, SIZES[name])
    forms = set(late.calls) - {"all_reduce", "all_to_all_single"}
    assert (
        forms
        == {
            "even": {"all_gather_single", "reduce_scatter_single"},
            "padded": {"all_gather_single", "reduce_scatter"},
            "one owner": {"all_gather", "reduce_scatter"},
            "skewed": {"all_gather", "reduce_scatter"},
            "zeros": {"all_gather", "reduce_scatter"},
            "nothing": set(),
        }[name]
    )


def pieces_with_gaps() -> None:
    """Flat pieces that are not contiguous: their elements move, not what lies between them."""
    group, rank = group_of(4)
    for dtype in (torch.float32, torch.bfloat16):
        wide = [sample((16,), torch.float32, seed).to(dtype) for seed in range(4)]
        for sizes in ((2, 2, 2, 2), (2, 2, 1, 2), (0, 5, 0, 0), (1, 5, 2, 0)):
            found = all_gather_v(wide[rank][: 2 * sizes[rank] : 2], sizes, group).wait()
            assert torch.equal(found, torch.cat([w[: 2 * n : 2] for w, n in zip(wide, sizes)])), sizes
        sends = [w[::2] for w in wide]
        found = all_to_all_v(sends[rank], (2, 2, 2, 2), (2, 2, 2, 2), group).wait()
        assert torch.equal(found, torch.cat([s[2 * rank : 2 * rank + 2] for s in sends]))
        found = reduce_scatter_v(sends[rank], (3, 0, 4, 1), "sum", group).wait()
        start = (0, 3, 3, 7)[rank]
        assert torch.equal(found, one_device(sends, "sum")[start : start + (3, 0, 4, 1)[rank]])
        assert torch.equal(all_reduce(sends[rank], "sum", group).wait(), one_device(sends, "sum"))


def test_pieces_with_gaps(ranks: RankPools) -> None:
    ranks.run(pieces_with_gaps, world_size=4)


class BackendSpy(TorchDispatchMode):
    """Bytes that this rank receives from others, read off the arguments of c10d's own operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls.append((func.__name__.split(".")[0], self._received(func.__name__.split(".")[0], args)))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _received(name: str, args: Any) -> int:
        def size(tensor: torch.Tensor) -> int:
            return tensor.numel() * tensor.element_size()

        if name == "alltoall_base_":
            rank = dist.ProcessGroup.unbox(args[2]).rank()
            return (sum(args[3]) - args[3][rank]) * args[0].element_size()
        if name == "_allgather_base_":
            return size(args[0]) - size(args[1])
        if name == "broadcast_":
            return 0 if dist.ProcessGroup.unbox(args[1]).rank() == args[2] else size(args[0][0])
        assert name == "allreduce_", f"{name} was not expected"
        num_ranks = dist.ProcessGroup.unbox(args[1]).size()
        return math.ceil(2 * (num_ranks - 1) / num_ranks * size(args[0][0]))


def ledger_tells_the_truth() -> None:
    mesh = make_mesh((0, 1, 2, 3))
    rank = dist.get_rank()
    whole = sample((8, 6), torch.float32, 0)
    forms = (
        RaggedShard((0,), (2, 2, 2, 2)),
        RaggedShard((0,), (1, 0, 6, 1)),
        RaggedShard((0,), (0, 0, 8, 0)),
        RaggedShard((0, 1), (13, 12, 12, 11)),
        InterleavedShard(1, 2),
        torch.distributed.tensor.Replicate(),
        torch.distributed.tensor.Shard(1),
    )
    for source in forms:
        for target in forms:
            placed = distribute_tensor(whole, mesh, (source,), src_data_rank=None)
            with record_comms() as ledger, BackendSpy() as spy:
                if isinstance(source, RaggedShard | InterleavedShard) or isinstance(
                    target, RaggedShard | InterleavedShard
                ):
                    redistribute(placed, placements=(target,))
            assert ledger.bytes() == sum(received for _, received in spy.calls), f"{source} -> {target}: {spy.calls}"
            assert len(ledger.records) <= len(spy.calls) <= 2, f"{source} -> {target}: {spy.calls}"
            for record in ledger.records:
                assert record.requester == f"redistribute ({source}) -> ({target})"
    # reduce_scatter_v says what it sends; with gloo it receives every rank's contribution to its own piece.
    pending = torch.distributed.tensor.DTensor.from_local(whole * rank, mesh, [torch.distributed.tensor.Partial()])
    for target in forms[:5]:
        with record_comms() as ledger, BackendSpy() as spy:
            moved = redistribute(pending, placements=(target,))
        assert [name for name, _ in spy.calls] == ["alltoall_base_"]
        own = moved._local_tensor.numel()
        assert spy.calls[0][1] == 3 * own * 4 and ledger.bytes() == (48 - own) * 4


def test_ledger_against_the_backend(ranks: RankPools) -> None:
    ranks.run(ledger_tells_the_truth, world_size=4)


def test_ledgers_are_of_one_rank_and_nest() -> None:
    def body() -> list[int]:
        group, rank = group_of(4)
        with record_comms() as outer:
            all_reduce(torch.ones(3), "sum", group).wait()
            with record_comms() as inner:
                all_gather_v(torch.ones(rank), (0, 1, 2, 3), group).wait()
        all_reduce(torch.ones(3), "sum", group).wait()
        return [outer.count(), inner.count(), inner.bytes("all_gather_v"), inner.count("all_reduce")]

    counts = simulate(body, 4)
    assert [c[:2] for c in counts] == [[2, 1]] * 4
    assert [c[2] for c in counts] == [(6 - rank) * 4 for rank in range(4)] and counts[0][3] == 0
