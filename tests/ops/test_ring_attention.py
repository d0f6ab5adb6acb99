"""Ring attention: what is sent, what a rank holds meanwhile, and the predictions of both."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device import device_type
from tests.ops.attend import Attend
from tests.ranks import RankPools
from tests.runtime.llama import batch, make_llama, make_mesh, tensor_parallel
from tests.runtime.test_predictions import Totals, totals
from vescale import parallelize
from vescale.comm import Observer, Operation, observe, record_comms
from vescale.estimation import predict
from vescale.ops import RingSchedule, meetings
from vescale.placements import InterleavedShard, local_region
from vescale.plans import Plan, Target

# The schedule


def runs(length: int, num_ranks: int, num_pieces: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    placement = Shard(0) if num_pieces == 1 else InterleavedShard(0, num_pieces)
    found = []
    for rank in range(num_ranks):
        (intervals,) = local_region((length,), (placement,), (num_ranks,), (rank,)).intervals
        found.append(tuple((run[0], run[-1]) for run in intervals if run[0] < run[-1]))
    return tuple(found)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_meetings_are_the_mask(num_ranks: int, causal: bool) -> None:
    """Every row attends to each of its keys once, for any distribution of positions."""
    cuts = [
        (length, pieces)
        for length in (1, 3, 8, 12)
        for pieces in (1, 2)
        if pieces == 1 or not length % (pieces * num_ranks)
    ]
    for of_rows, of_keys in itertools.product(cuts, cuts):
        rows, keys = runs(of_rows[0], num_ranks, of_rows[1]), runs(of_keys[0], num_ranks, of_keys[1])
        schedule = RingSchedule(rows, keys, causal)
        for rank, owner in itertools.product(range(num_ranks), range(num_ranks)):
            positions = [[p for run in side for p in range(*run)] for side in (rows[rank], keys[owner])]
            met = [[0] * len(positions[1]) for _ in positions[0]]
            for meeting in meetings(rows[rank], keys[owner], causal):
                for i, j in itertools.product(range(*meeting.rows), range(*meeting.keys)):
                    below = j - meeting.keys[0] <= i - meeting.rows[0]
                    met[i][j] += not meeting.is_causal or below
            expected = [[int(not causal or key <= row) for key in positions[1]] for row in positions[0]]
            assert met == expected
            assert schedule.needs(rank, owner) == any(map(any, expected))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_blocks_reach_all_that_need_them_and_come_returned(num_ranks: int, causal: bool) -> None:
    for length, num_keys in itertools.product((1, 5, 16, 17), repeat=2):
        schedule = RingSchedule(runs(length, num_ranks, 1), runs(num_keys, num_ranks, 1), causal)
        holders = {rank: {rank} for rank in range(num_ranks)}  # of each block
        added: dict[int, set[int]] = {rank: set() for rank in range(num_ranks)}  # ranks whose gradients came along
        returned: dict[int, set[int]] = {}
        carried = {rank: {rank} for rank in range(num_ranks)}
        for step in range(schedule.num_steps):
            if step:
                for source, target, owner in schedule.forward_moves(step):
                    assert schedule.held(source, step - 1) == owner == schedule.held(target, step)
                    holders[owner].add(target)
            carried = {
                rank: added[owner] | {rank}
                for rank in range(num_ranks)
                if (owner := schedule.held(rank, step)) is not None
            }
            for rank in carried:
                owner = schedule.held(rank, step)
                assert owner is not None
                added[owner] = carried[rank]
                if schedule.last_steps[owner] == step:
                    returned[owner] = carried[rank]
            for source, target, owner in schedule.gradient_moves(step):
                assert schedule.held(source, step) == owner
                assert target == (owner if step == schedule.last_steps[owner] else (source + 1) % num_ranks)
        for owner in range(num_ranks):
            needed = {rank for rank in range(num_ranks) if schedule.needs(rank, owner)}
            assert needed <= holders[owner]
            if schedule.length(owner):
                assert needed <= returned[owner]


def test_what_is_masked_for_all_further_on_does_not_travel() -> None:
    contiguous = RingSchedule(runs(16, 4, 1), runs(16, 4, 1), True)
    assert [len(list(contiguous.forward_moves(step))) for step in range(1, 4)] == [3, 2, 1]
    balanced = RingSchedule(runs(16, 4, 2), runs(16, 4, 2), True)
    assert [len(list(balanced.forward_moves(step))) for step in range(1, 4)] == [4, 4, 4]


# Memory


class LargestTensors(TorchDispatchMode):
    """The most bytes that tensors made inside take together, and the largest of them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor) and type(x) is torch.Tensor:
                storage = x.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._known:
                    self._known.add(key)
                    self.now += size
                    self.largest, self.peak = max(self.largest, size), max(self.peak, self.now)
                    weakref.finalize(storage, self._freed, key, size)
        return result

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def peaks(method: str, num_keys: int) -> tuple[int, int]:
    """(peak of all, largest tensor) in bytes, of a step in which 4 queries of each rank attend to many sharded keys."""
    mesh = make_mesh(cp=torch.distributed.get_world_size())
    model = Attend({})
    plan = Plan(mesh).shard("<in:q>", Shard(2), mesh="cp")
    for name in ("k", "v"):
        plan.shard(f"<in:{name}>", Shard(2), mesh="cp", given="local")
    parallelize(model, plan.attention("", method, mesh="cp"), strict=True)  # type: ignore[arg-type]
    q = torch.randn(1, 2, 4 * mesh.size(), 4, dtype=torch.float64)
    k, v = (torch.randn(1, 2, num_keys // mesh.size(), 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gc.collect()
    with LargestTensors() as seen:
        model(q, k, v).square().sum().backward()
    assert k.grad is not None
    return seen.peak, seen.largest


def all_peaks() -> dict[tuple[str, int], tuple[int, int]]:
    return {(method, n): peaks(method, n) for method in ("ring", "all_gather") for n in (4096, 8192)}


def test_a_rank_holds_blocks_and_not_the_sequence(ranks: RankPools) -> None:
    by_world = {n: ranks.run(all_peaks, world_size=n) for n in (2, 4)}
    for found in by_world[4]:
        a_block = 2 * 8192 // 4 * (4 + 4) * 8  # keys and values of a rank
        assert found["all_gather", 8192][1] >= 4 * a_block
        assert found["ring", 8192][1] <= a_block * 1.01
        assert found["ring", 8192][0] < found["all_gather", 8192][0] * 0.75, found
    for two, four in zip(by_world[2], by_world[4]):  # the same block with twice as many ranks, and keys
        assert four["ring", 8192][1] == two["ring", 4096][1]
        assert four["ring", 8192][0] <= two["ring", 4096][0] * 1.2, (two, four)


# Predictions


def with_sequence(mesh: Any, method: str, rows: Any) -> Plan:
    plan = Plan(mesh)
    if "tp" in mesh.mesh_dim_names:
        for entry in tensor_parallel(make_mesh(dp=2, tp=2)).entries:
            if entry.path.target is not Target.IN or entry.path.pattern:
                plan.add(entry)
    plan.shard("<in:input_ids>", rows, mesh="cp")
    if "dp" in mesh.mesh_dim_names:
        plan.shard("<in:input_ids>", Shard(0), mesh="dp")
    return plan.attention(r"model.layers.\d+.self_attn", method, mesh="cp")  # type: ignore[arg-type]


def measured_and_predicted(
    sizes: dict[str, int], method: str, rows: Any, kv_heads: int, tokens: int
) -> tuple[Totals, Totals]:
    options = {"num_attention_heads": 8, "num_key_value_heads": kv_heads, "hidden_size": 64, "num_hidden_layers": 1}
    model, mesh = make_llama(**options), make_mesh(**sizes)
    ids = batch()[0][:, :tokens]
    with torch.device("meta"):
        on_meta = make_llama(**options)
    plan = with_sequence(mesh, method, rows)
    prediction = predict(on_meta, plan, {"input_ids": ids.to("meta"), "use_cache": False})
    assert prediction.stopped is None, prediction
    parallelize(model, plan, strict=True)
    with record_comms() as ledger:
        model(ids).logits.to_local().square().sum().backward()
    found = [
        ((r.op.removesuffix("_v"), r.axes, ".grad:" in r.requester), r.bytes) for r in ledger.records if r.num_ranks > 1
    ]
    expected = [((c.op, c.axis, c.target.endswith(".grad")), c.num_bytes) for c in prediction.made]
    return totals(found), totals(expected)


def all_predictions() -> list[tuple[str, Totals, Totals]]:
    balanced, cases = InterleavedShard(1, 3), []
    for method in ("all_gather", "ring", "ulysses"):
        cases.append(({"cp": 4}, method, Shard(1), 2))  # fewer key/value heads than ranks
        cases.append(({"cp": 2, "tp": 2}, method, balanced, 4))
    cases.append(({"cp": 4}, "ring", balanced, 4))
    cases.append(({"dp": 2, "cp": 2}, "ring", Shard(1), 4))
    cases.append(({"tp": 2, "cp": 2}, "ulysses", Shard(1), 4))
    return [(str(case), *measured_and_predicted(*case, tokens=12)) for case in cases]


def test_predicted_calls_and_bytes(ranks: RankPools) -> None:
    """What differs between ranks (contiguous parts of a causal sequence) is predicted of the last, which gets most."""
    for case, measured, predicted in ranks.run(all_predictions)[3]:
        assert measured == predicted, case


# As any collective


class Noted(Observer):
    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def started(self, operation: Operation) -> None:
        self.operations.append(operation)


def observed() -> list[tuple[str, int, str, str, bool]]:
    mesh = make_mesh(cp=4)
    model, noted = Attend({"is_causal": True}), Noted()
    plan = Plan(mesh)
    for name in "qkv":
        plan.shard(f"<in:{name}>", Shard(2), mesh="cp")
    parallelize(model, plan.attention("", "ring", mesh="cp"), strict=True)
    end = observe(noted)
    try:
        model(*(torch.randn(1, 2, 8, 4, dtype=torch.float64) for _ in range(3))).square().sum().backward()
    finally:
        end()
    return [(o.op, o.number, o.axes, o.requester, o.has_ended()) for o in noted.operations]


def test_hang_reports_and_traces_see_each_step(ranks: RankPools) -> None:
    found = ranks.run(observed)
    for operations in found:
        steps = [
            (op, number)
            for op, number, axes, requester, _ in operations
            if requester.startswith("attention: ring on cp")
        ]
        assert len(steps) == 3 + 3 + 4 and {op for op, _ in steps} == {"all_to_all"}
        assert steps == [(o[0], o[1]) for o in found[0] if o[3].startswith("attention: ring on cp")]
        assert all(ended for *_, ended in operations)


# Precision, and what surrounds a call


def precisions() -> list[tuple[str, float, float, float]]:
    """(dtype, error of the ring, of one device in the same dtype, of one device whose operands alone are rounded)."""
    mesh = make_mesh(cp=4)
    generator, found = torch.Generator().manual_seed(3), []
    given = [torch.randn(1, 4, 64, 16, generator=generator, dtype=torch.float64) for _ in range(3)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rounded = [x.to(dtype).requires_grad_() for x in given]
        exact = [x.detach().double().requires_grad_() for x in rounded]
        single = [x.detach().clone().requires_grad_() for x in rounded]
        model = Attend({"is_causal": True})
        model.scale = torch.nn.Parameter(torch.ones(16, dtype=dtype))
        plan = Plan(mesh)
        for name in "qkv":
            plan.shard(f"<in:{name}>", Shard(2), mesh="cp")
        parallelize(model, plan.attention("", "ring", mesh="cp"), strict=True)
        results = []
        for tensors in (rounded, single, exact):
            if tensors is rounded:
                out = model(*tensors).full_tensor()
            else:
                out = F.scaled_dot_product_attention(*tensors, is_causal=True)
            out.sum().backward()
            results.append([out.detach().double(), *(x.grad.double() for x in tensors)])
        own, one = (
            max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(result, results[2]))
            for result in results[:2]
        )
        found.append((str(dtype), own, one, torch.finfo(dtype).eps))
    return found


def test_low_precision_is_as_good_as_one_device(ranks: RankPools) -> None:
    for found in ranks.run(precisions):
        for dtype, ring, single, eps in found:
            assert ring <= max(2 * single, 2 * eps), (dtype, ring, single)


def with_autocast() -> tuple[torch.dtype, float]:
    mesh = make_mesh(cp=2, tp=2)
    model = Attend({"is_causal": True}).float()
    plan = Plan(mesh)
    for name in "qkv":
        plan.shard(f"<in:{name}>", Shard(2), mesh="cp")
    parallelize(model, plan.attention("", "ring", mesh="cp"), strict=True)
    given = [torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3)]
    with torch.autocast(device_type(), dtype=torch.bfloat16):
        found = model(*given).full_tensor()
        expected = F.scaled_dot_product_attention(*given, is_causal=True)
    found.float().sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in given)
    return found.dtype, (found - expected).abs().max().item()


def test_autocast_reaches_it(ranks: RankPools) -> None:
    for kind, difference in ranks.run(with_autocast):
        assert kind == torch.bfloat16 and difference < 0.05
