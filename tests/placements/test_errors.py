"""Bad placements are the same error on every rank before any communication, and the error says what to do."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, _StridedShard

from tests.placements.on_ranks import make_mesh
from tests.ranks import RankPools
from vescale.comm import record_comms
from vescale.placements import (
    InterleavedShard,
    RaggedShard,
    StridedRaggedShard,
    distribute_tensor,
    from_local,
    local_region,
    normalize_placements,
    redistribute,
    to_local,
)

# (placements, tensor shape, mesh shape, what the message says)
MISFITS: list[tuple[tuple[Any, ...], tuple[int, ...], tuple[int, ...], str]] = [
    (
        (RaggedShard((0,), (2, 2, 2)),),
        (6, 2),
        (4,),
        "3 local_units, but its mesh axis has 4 ranks; pass one unit count",
    ),
    (
        (RaggedShard((0,), (1, 1, 1, 1)),),
        (6, 2),
        (4,),
        "sum to 4, which does not divide the 6 rows .* make them sum to 6",
    ),
    ((RaggedShard((0,), (0, 0, 0, 0)),), (6, 2), (4,), "sum to 0, which does not divide .* make them sum to 6"),
    ((RaggedShard((0, 1), (5, 0)),), (6, 2), (2,), r"divide the 12 rows of dims \(0, 1\).* make them sum to 12"),
    ((RaggedShard((), (1, 1)),), (6, 2), (2,), "sum to 2, which does not divide the 1 rows"),
    ((RaggedShard((0,), (1, 1), block=5),), (6, 2), (2,), "distributes 2 blocks, but .* has 3 blocks of 5 .* sum to 3"),
    ((RaggedShard((0,), (9, 3), block=2), Shard(1)), (6, 4), (2, 2), "sum to 6"),
    (
        (RaggedShard((0,), (2, 2), block=3), Shard(1)),
        (6, 4),
        (2, 2),
        r"blocks of 6 elements \(grown from 3 .* sum to 2",
    ),
    (
        (RaggedShard((0, 1), (9, 3)), Shard(1)),
        (6, 4),
        (2, 2),
        r"divide dim 1.* sum to a divisor of 6, or pass block=",
    ),
    ((RaggedShard((0, 1, 2), (1, 1)),), (6, 2), (2,), r"flattens dims \(0, 1, 2\), .* name at most 2 leading dims"),
    (
        (RaggedShard(), RaggedShard()),
        (6, 2),
        (2, 2),
        r"mesh axes \[0, 1\].* only one axis can have it; flatten the axes",
    ),
    ((RaggedShard(),), (6, 2), (2, 2), "1 placements .* for a mesh of 2 axes .* one placement for each axis"),
    (
        (InterleavedShard(2, 2),),
        (6, 2),
        (2,),
        r"names tensor dim 2, but the tensor has shape \(6, 2\); use a dim in \[-2",
    ),
    ((InterleavedShard(-3, 2),), (6, 2), (2,), "names tensor dim -3"),
    ((InterleavedShard(0, 2),), (), (2,), r"names tensor dim 0, but the tensor has shape \(\)"),
    ((RaggedShard(), Shard(2)), (6, 2), (2, 2), "names tensor dim 2"),
    ((StridedRaggedShard(split_factor=2), Replicate()), (6, 2), (2, 2), "cut dim 0 into 1 pieces .* write RaggedShard"),
    ((StridedRaggedShard(split_factor=3), Shard(0)), (6, 2), (2, 2), "into 2 pieces .* write split_factor=2"),
    ((Shard(0), StridedRaggedShard(split_factor=2)), (6, 2), (2, 2), "write RaggedShard"),
    ((RaggedShard(), Partial("max"), Partial("sum")), (6, 2), (2, 2, 2), r"mix pending reductions \['max', 'sum'\]"),
]


@pytest.mark.parametrize(("placements", "shape", "mesh_shape", "message"), MISFITS)
def test_misfits(placements: Any, shape: tuple[int, ...], mesh_shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        normalize_placements(placements, shape, mesh_shape)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RaggedShard((1,), (1, 1)), r"dims=\(1,\) are not the leading dims"),
        (lambda: RaggedShard((1, 0)), "are not the leading dims"),
        (lambda: RaggedShard((0,), (1, -1)), "has a negative entry"),
        (lambda: RaggedShard(block=0), "pass a block of at least one element"),
        (lambda: StridedRaggedShard(split_factor=0), "split_factor=0"),
        (lambda: InterleavedShard(0, 0), "num_chunks >= 1"),
    ],
)
def test_impossible_placements(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_regions_check_dims_and_units_at_every_coordinate() -> None:
    for coordinate in ((0,), (3,)):
        with pytest.raises(ValueError, match="names tensor dim 2"):
            local_region((6, 2), (Shard(2),), (4,), coordinate)
        with pytest.raises(ValueError, match="local_units sum to 5"):
            local_region((6, 2), (RaggedShard((0,), (0, 0, 4, 1)),), (4,), coordinate)


def test_placements_are_values() -> None:
    same = [
        (RaggedShard((0,), (1, 2)), RaggedShard([0], [1, 2])),
        (StridedRaggedShard((0,), (1, 2), split_factor=2), StridedRaggedShard((0,), [1, 2], None, split_factor=2)),
        (InterleavedShard(0, 3), InterleavedShard(dim=0, num_chunks=3)),
    ]
    for a, b in same:
        assert a == b and hash(a) == hash(b) and copy.deepcopy(a) is a
        assert pickle.loads(pickle.dumps(a)) == a and type(pickle.loads(pickle.dumps(a))) is type(a)
        assert not (a.is_shard() or a.is_shard(0) or a.is_replicate() or a.is_partial())
        assert not isinstance(a, Shard | _StridedShard | Replicate | Partial)
        with pytest.raises(AttributeError, match="is frozen"):
            a.dim = 1
        assert eval(repr(a)) == a
    different = [RaggedShard((0,), (1, 2)), RaggedShard((0,), (2, 1)), RaggedShard((0, 1), (1, 2)), RaggedShard()]
    different += [
        RaggedShard((0,), (1, 2), 4),
        StridedRaggedShard((0,), (1, 2), split_factor=2),
        InterleavedShard(0, 1),
    ]
    assert len(set(different)) == len(different)
    assert RaggedShard((0,), (1, 2)) != StridedRaggedShard((0,), (1, 2), split_factor=1)
    assert InterleavedShard(0, 1) != Shard(0) and Shard(0) != InterleavedShard(0, 1)
    assert "0x500" in repr(RaggedShard((0,), (0,) * 500)), "a thousand ranks do not fill the screen"


def refuse_on_every_rank(mesh_ranks: Any) -> list[str]:
    """The messages of this rank; nothing may be communicated and nothing may hang."""
    mesh = make_mesh(mesh_ranks)
    inside = mesh.get_coordinate() is not None
    whole = torch.arange(12.0).reshape(6, 2)
    units = (2, 3, 0, 1)
    good = RaggedShard((0,), units)
    part = torch.zeros(units[mesh.get_coordinate()[0]] * 2) if inside else torch.zeros(0)
    placed = from_local(part, mesh, (good,), shape=(6, 2))
    pending = from_local(whole, mesh, (Partial("sum"),), shape=(6, 2), stride=(2, 1))
    counts = from_local(whole.long(), mesh, (Partial("avg"),), shape=(6, 2), stride=(2, 1))
    turned = from_local(whole.cfloat(), mesh, (Partial("max"),), shape=(6, 2), stride=(2, 1))
    bad = RaggedShard((0,), (1, 1, 1, 1))
    attempts = [
        (lambda: distribute_tensor(whole, mesh, (bad,)), "does not divide"),
        (lambda: distribute_tensor(whole, mesh, (RaggedShard((0,), (3, 3)),)), "pass one unit count"),
        (lambda: distribute_tensor(whole, mesh, (good, Replicate())), "one placement for each axis"),
        (lambda: distribute_tensor(whole, mesh, (InterleavedShard(2, 2),)), "names tensor dim 2"),
        (lambda: distribute_tensor(placed, mesh, (InterleavedShard(0, 2),)), "call redistribute"),
        (lambda: redistribute(placed, placements=(bad,)), "does not divide"),
        (lambda: redistribute(placed), "needs placements="),
        (lambda: redistribute(placed, placements=(Shard(5),)), "names tensor dim 5"),
        (lambda: redistribute(pending, placements=(Partial("max"),)), "redistribute to Replicate"),
        (lambda: redistribute(counts, placements=(good,)), "avg of torch.int64 .* floating-point dtype first"),
        (lambda: redistribute(turned, placements=(good,)), "max of torch.complex64"),
        (lambda: redistribute(placed, make_mesh((0, 1)), (Replicate(),)), "use full_tensor"),
        (lambda: from_local(part, mesh, (good,)), "pass shape="),
        (lambda: from_local(part, mesh, (good,), shape=(5, 2)), "does not divide"),
        (lambda: from_local(whole, mesh, (Replicate(),), shape=(6, 2), grad_placements=(good,)), "other elements to"),
        (lambda: to_local(placed, grad_placements=(Partial(),)), "has its shape; keep the sharded axes"),
        (lambda: placed.full_tensor(grad_placements=(good,)), "full_tensor: grad_placements"),
        (lambda: distribute_tensor((whole.requires_grad_() * 2), mesh, (good,)), "takes a leaf tensor"),
    ]
    make_mesh((0, 1))
    messages = []
    with record_comms() as ledger:
        for attempt, expected in attempts:
            with pytest.raises((ValueError, RuntimeError, NotImplementedError)) as caught:
                attempt()
            assert re.search(expected, str(caught.value), re.DOTALL), str(caught.value)
            messages.append(str(caught.value))
    assert ledger.count() == 0
    if inside and mesh.get_coordinate()[0] == 3:  # only this rank's part is wrong, and only this rank can see it
        with pytest.raises(
            ValueError, match=r"local tensor of shape \(2,\) at mesh coordinate \(3,\), .* has shape \(7,\)"
        ):
            from_local(torch.zeros(7), mesh, (good,), shape=(6, 2))
    if inside:  # as many elements as the expected first dim, and another shape
        with pytest.raises(ValueError, match=r"local tensor of shape \(2, 1\) .* given has shape \(1, 2\)"):
            from_local(torch.zeros(1, 2), mesh, (InterleavedShard(0, 1),), shape=(8, 1))
        wrong = torch.zeros(7) if mesh.get_coordinate()[0] == 3 else part
        with pytest.raises(ValueError, match=r"at mesh coordinate \(3,\)"):
            from_local(wrong, mesh, (good,), shape=(6, 2), run_check=True)
        from_local(part, mesh, (good,), shape=(6, 2), run_check=True)
    dist.barrier()
    return messages


def run_checks() -> None:
    """``from_local(run_check=True)``: one rank's mistake, and ranks that differ, are errors on every rank."""
    mesh, rank = make_mesh((0, 1, 2, 3)), dist.get_rank()
    units = (2, 3, 0, 1)
    good, part = RaggedShard((0,), units), torch.zeros(units[rank] * 2)

    def pick(odd: Any, other: Any) -> Any:
        return odd if rank == 2 else other

    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"placements": pick((RaggedShard((0,), (1, 1, 1, 1)),), (good,))}, r"^rank 2: .*does not divide the 6 rows"),
        ({"placements": pick((RaggedShard((0,), (3, 3)),), (good,))}, r"^rank 2: .*one unit count"),
        ({"local": pick(torch.zeros(7), part)}, r"^rank 2: .*coordinate \(2,\), but the one given has shape \(7,\)"),
        ({"shape": pick((5, 2), (6, 2))}, "^rank 2: .*does not divide the 5 rows"),
        ({"shape": pick(None, (6, 2))}, "^rank 2: .*pass shape="),
        (
            {"local": torch.zeros(units[rank] * 2, dtype=pick(torch.float64, torch.float32))},
            "the arguments differ between ranks.*rank 2: .*64",
        ),
        ({"grad_placements": pick((Replicate(),), None)}, "^rank 2: .*other elements to"),
        (
            {"local": torch.zeros(0), "shape": (pick(1, 2) - 1, 0)},
            r"the arguments differ between ranks.*rank 2: shape \(0, 0\)",
        ),
    ]
    for mistake, message in mistakes:
        options = {"placements": (good,), "local": part, "shape": (6, 2)} | mistake
        if options["shape"] and 0 in options["shape"]:
            options["placements"] = (RaggedShard(),)
        local, placements = options.pop("local"), options.pop("placements")
        with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
            from_local(local, mesh, placements, run_check=True, **options)
    assert from_local(part, mesh, (good,), shape=(6, 2), run_check=True).placements == (good,)
    with pytest.raises(RuntimeError, match="plain tensor, but got a DTensor"):
        from_local(distribute_tensor(torch.zeros(6, 2), mesh, (good,)), mesh, (good,), shape=(6, 2))
    # As in stock from_local, the first rank's values are those of its replicas.
    grid = make_mesh(((3, 1), (2, 0)))
    row, column = grid.get_coordinate()
    local = torch.full((2 + 2 * row * 2,), float(10 * row + column), requires_grad=True)
    placed = from_local(local, grid, (RaggedShard((0,), (1, 3)), Replicate()), shape=(4, 2), run_check=True)
    assert torch.equal(placed.to_local(), torch.full((2 + 4 * row,), 10.0 * row))
    placed.sum().backward()
    assert torch.equal(local.grad, torch.ones_like(local))


def test_run_check(ranks: RankPools) -> None:
    ranks.run(run_checks, world_size=4)


@pytest.mark.parametrize(("mesh_ranks", "world_size"), [((0, 1, 2, 3), 4), ((6, 1, 3, 2), 8)])
def test_every_rank_raises(ranks: RankPools, mesh_ranks: Any, world_size: int) -> None:
    messages = ranks.run(refuse_on_every_rank, mesh_ranks, world_size=world_size)
    assert all(message == messages[0] for message in messages)
