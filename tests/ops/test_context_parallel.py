"""Attention over a sharded sequence against one device: gathered keys and values, a ring, Ulysses, with tensor
parallelism."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from tests.examples import daily_sample
from tests.ops.attend import Attend, attend_like_one_device
from tests.ranks import RankPools, run_cases
from tests.runtime.llama import batch, double_loss, make_llama, make_mesh, tensor_parallel, worst_gradient
from vescale import parallelize
from vescale.comm import record_comms
from vescale.placements import InterleavedShard
from vescale.plans import Plan, PlanError, Target
from vescale.runtime import ImplicitCommunicationError, implicit_communication

R, BATCH, HEADS, ROWS = Replicate(), Shard(0), Shard(1), Shard(2)
BALANCED = InterleavedShard(2, 3)


def tensors(
    heads: int, kv_heads: int, length: int, num_keys: int, mask: str, value_size: int
) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, length, 4), (2, kv_heads, num_keys, 4), (2, kv_heads, num_keys, value_size)]
    made: list[torch.Tensor | None] = [
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes
    ]
    shape = {
        "batch": (2, 1, length, num_keys),
        "heads": (1, heads, length, num_keys),
        "plain": (length, num_keys),
        "keys": (2, 1, 1, num_keys),
    }.get(mask)
    bias = torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() if shape else None
    if mask == "bool":
        bias = torch.ones(length, num_keys, dtype=torch.bool).tril()
    return [*made, bias]


class Case:
    """One call: placements of q, k, v and the mask on (dp, cp, tp) or (cp, tp), and methods for axes."""

    def __init__(
        self,
        placed: list[Any],
        methods: dict[str, str],
        *,
        heads: int = 4,
        kv_heads: int = 4,
        length: int = 12,
        num_keys: int | None = None,
        mask: str = "",
        value_size: int = 3,
        **options: Any,
    ) -> None:
        self.placed, self.methods, self.options = placed, methods, options
        self.given = heads, kv_heads, length, num_keys or length, mask, value_size

    def __repr__(self) -> str:
        return f"Case({self.placed}, {self.methods}, {self.given}, {self.options})"


def attend(mesh: Any, case: Case, strict: bool = True) -> None:
    model = Attend(case.options)
    plan = Plan(mesh)
    for name, placements in zip(("q", "k", "v", "mask"), case.placed):
        plan.shard(f"<in:{name}>", dict(zip(mesh.mesh_dim_names, placements)))
    if case.methods:
        plan.attention("", case.methods)  # type: ignore[arg-type]
    parallelize(model, plan, strict=strict)
    expected_in, found_in = tensors(*case.given), tensors(*case.given)
    found = attend_like_one_device(model, case.options, expected_in, found_in)
    if found is not None:
        assert found.placements == tuple(case.placed[0])
        assert bool(implicit_communication(model)) == (not strict)


GATHER, RING, ULYSSES = {"cp": "all_gather"}, {"cp": "ring"}, {"cp": "ulysses"}
METHODS = (GATHER, RING, ULYSSES)


def cases() -> list[Case]:
    """On (cp=2, tp=2)."""
    made = []
    for method, rows, causal in itertools.product(METHODS, (ROWS, BALANCED), (False, True)):
        made.append(Case([(rows, R)] * 3, method, is_causal=causal))
        made.append(Case([(rows, HEADS)] * 3, method, is_causal=causal))
        made.append(Case([(rows, BATCH)] * 3, method, is_causal=causal))
        made.append(Case([(rows, HEADS)] * 3, method, is_causal=causal, heads=8, kv_heads=4, enable_gqa=True))
        made.append(Case([(rows, HEADS)] * 3, method, is_causal=causal, heads=8, kv_heads=2, enable_gqa=True))
        made.append(Case([(rows, R)] * 3, method, is_causal=causal, heads=4, kv_heads=1, enable_gqa=True))
        made.append(Case([(rows, R), (R, R), (R, R)], method, is_causal=causal, num_keys=7))
        made.append(Case([(rows, R), (rows, R), (rows, R)], method, is_causal=causal, length=6, num_keys=18))
        made.append(Case([(rows, R)] * 3, method, is_causal=causal, dropout_p=0.3))
        made.append(Case([(rows, HEADS)] * 3, method, is_causal=causal, dropout_p=0.3, scale=0.7))
    for method, rows, mask in itertools.product(METHODS, (ROWS, BALANCED), ("batch", "heads", "plain", "bool")):
        made.append(Case([(rows, HEADS)] * 3 + [(R, R)], method, mask=mask))
    for method in METHODS:
        made.append(Case([(ROWS, HEADS)] * 3 + [(Shard(2), R)], method, mask="batch"))
        made.append(Case([(ROWS, HEADS)] * 3 + [(Shard(0), R)], method, mask="plain"))
        made.append(Case([(ROWS, HEADS)] * 3 + [(R, R)], method, mask="keys"))
        both = {
            "mask": "bool",
            "value_size": 4,
            "is_causal": True,
        }  # one device takes both where all sizes are alike, until torch 2.13
        made.append(Case([(ROWS, HEADS)] * 3 + [(R, R)], method, **both))
        made.append(Case([(ROWS, HEADS)] * 3 + [(R, R)], method, mask="keys", dropout_p=0.3))
    for method in (GATHER, RING):
        made.append(
            Case([(ROWS, R)] * 3, method, heads=3, kv_heads=3, length=7, is_causal=True)
        )  # uneven rows, odd heads
        made.append(Case([(ROWS, ROWS)] * 3, dict.fromkeys(("cp", "tp"), method["cp"]), is_causal=True))
    made.append(Case([(ROWS, ROWS)] * 3, {"cp": "all_gather", "tp": "ulysses"}, is_causal=True))
    made.append(Case([(ROWS, ROWS)] * 3, {"cp": "ulysses", "tp": "ulysses"}, is_causal=True))
    made.append(Case([(HEADS, ROWS)] * 3, {"tp": "ulysses"}, is_causal=True))
    made += [Case([(HEADS, ROWS)] * 3, {"tp": "ring"}, is_causal=causal) for causal in (False, True)]
    for other in ("all_gather", "ulysses"):
        made.append(Case([(ROWS, ROWS)] * 3, {"cp": "ring", "tp": other}, is_causal=True))
        made.append(Case([(ROWS, ROWS)] * 3, {"cp": other, "tp": "ring"}, is_causal=True, length=14))
    made.append(Case([(ROWS, R), (ROWS, R), (R, R)], RING))  # the value is sharded as the key first
    made.append(Case([(BALANCED, R), (ROWS, R), (R, R)], RING, is_causal=True))
    made.append(Case([(BALANCED, HEADS), (ROWS, HEADS), (ROWS, HEADS)], RING, is_causal=True, num_keys=8))
    return made


def all_cases() -> int:
    mesh = make_mesh(cp=2, tp=2)
    return run_cases(attend, [(mesh, case) for case in daily_sample(cases())])


def test_values_gradients_and_dropout_are_those_of_one_device(ranks: RankPools) -> None:
    assert set(ranks.run(all_cases)) == {len(daily_sample(cases()))}


def wide() -> None:
    mesh = make_mesh(cp=4)
    for method, rows in itertools.product(METHODS, (ROWS, BALANCED)):
        attend(mesh, Case([(rows,)] * 3, method, is_causal=True))
    attend(mesh, Case([(ROWS,)] * 3, GATHER, length=3, is_causal=True))  # a rank without rows
    attend(mesh, Case([(ROWS,)] * 3, GATHER, length=3, is_causal=True, dropout_p=0.5))


def test_four_ranks(ranks: RankPools) -> None:
    ranks.run(wide)


def unasked() -> str:
    """Without an entry keys and values are gathered, which is implicit; in strict mode it is refused."""
    mesh = make_mesh(cp=2, tp=2)
    attend(mesh, Case([(ROWS, R)] * 3, {}, is_causal=True), strict=False)
    with pytest.raises(ImplicitCommunicationError) as caught:
        attend(mesh, Case([(ROWS, R)] * 3, {}, is_causal=True))
    return str(caught.value)


def test_without_an_entry_it_is_implicit(ranks: RankPools) -> None:
    for message in ranks.run(unasked):
        assert "write `'': {cp: all_gather}` in the plan's attention section" in message


def indivisible() -> str:
    with pytest.raises(PlanError) as caught:
        attend(make_mesh(cp=2, tp=2), Case([(ROWS, HEADS)] * 3, ULYSSES, heads=6, kv_heads=6))
    return str(caught.value)


def test_heads_that_ranks_do_not_divide(ranks: RankPools) -> None:
    for message in ranks.run(indivisible):
        assert (
            "the query of shape (2, 6, 12, 4) has 6 heads, which 4 ranks do not divide; write ring or all_gather"
            in message
        )


def communicated() -> list[list[tuple[str, int]]]:
    mesh = make_mesh(cp=4)
    found = []
    for method, kv_heads in itertools.product(METHODS, (4, 2)):
        with record_comms() as ledger:
            attend(mesh, Case([(ROWS,)] * 3, method, kv_heads=kv_heads, enable_gqa=kv_heads < 4))
        found.append([(r.op, r.bytes) for r in ledger.records if r.requester.startswith("attention")])
    return found


def test_bytes_of_each_method(ranks: RankPools) -> None:
    """For tensors of 2 x 4 x 12 x (4 + 3) doubles on four ranks: what a rank sends, forward and backward."""
    for rank, (gathered, gathered_grouped, ring, ring_grouped, exchanged, _) in enumerate(ranks.run(communicated)):
        part = 2 * 12 * 7 * 8 // 4  # of a rank, for one head of k and v
        assert gathered == [("all_gather_v", 3 * 4 * part), ("reduce_scatter_v", 3 * 4 * part)], gathered
        assert gathered_grouped == [("all_gather_v", 3 * 2 * part), ("reduce_scatter_v", 3 * 2 * part)]
        for found, kv_heads in (
            (ring, 4),
            (ring_grouped, 2),
        ):  # blocks are sent 3 times each way, and their gradients back
            assert found == [("all_to_all_v", kv_heads * part)] * (3 + 3 + 4), rank
        assert len(exchanged) == 8 and {op for op, _ in exchanged} == {"all_to_all_v"}
        # q, k, v and the result have 4 + 4 + 3 + 3 numbers a position; three of four parts leave a rank
        assert sum(size for _, size in exchanged) == 2 * (2 * 4 * 12 * 14 * 8 // 4) * 3 // 4


def llama(mesh: Any, method: str, rows: Any, in_model: bool, plan: Plan | None = None) -> tuple[float, float]:
    """One strict step of an unmodified Llama in float64: relative differences of the loss and of the worst gradient."""
    options = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}
    reference, model = make_llama(**options), make_llama(**options)
    plan = plan or Plan(mesh)
    plan.shard("<in:input_ids>", rows, mesh="cp")
    if "dp" in mesh.mesh_dim_names:
        plan.shard("<in:input_ids>", Shard(0), mesh="dp").shard("<in:labels>", Shard(0), mesh="dp")
    plan.attention(r"model.layers.\d+.self_attn", method, mesh="cp")  # type: ignore[arg-type]
    parallelize(model, plan, strict=True)
    ids, labels = batch()
    if in_model:
        expected, loss = (m(input_ids=ids, labels=labels).loss for m in (reference, model))
    else:
        expected, loss = (double_loss(m(ids).logits, labels) for m in (reference, model))
    expected.backward()
    loss.backward()
    return abs(loss.item() - expected.item()) / expected.item(), worst_gradient(model, reference)


def llamas(shape: dict[str, int]) -> list[Any]:
    found = []
    rows = (Shard(1), InterleavedShard(1, 3))
    mesh = make_mesh(**shape)
    for method, (cut, in_model) in itertools.product(
        ("all_gather", "ring", "ulysses"), [(rows[0], True), (rows[0], False), (rows[1], False)]
    ):
        found.append((f"{method} {cut} {in_model}", llama(mesh, method, cut, in_model), in_model))
    return found


@pytest.mark.parametrize(
    "shape", [{"cp": 4}, {"dp": 2, "cp": 2}, pytest.param({"cp": 2, "dp": 2}, marks=pytest.mark.slow)], ids=", ".join
)
def test_llama(ranks: RankPools, shape: dict[str, int]) -> None:
    """Strict: nothing is communicated but what the plan says. The model's own loss is in float32."""
    for found in ranks.run(llamas, shape):
        for case, (loss, gradient), in_model in found:
            assert loss <= (1e-6 if in_model else 1e-14), case
            assert gradient <= 1e-12, case


def llamas_with_tensor_parallelism(shape: dict[str, int]) -> list[Any]:
    found = []
    mesh = make_mesh(**shape)
    for method, cut in itertools.product(("all_gather", "ring", "ulysses"), (Shard(1), InterleavedShard(1, 3))):
        plan = Plan(mesh)
        for entry in tensor_parallel(make_mesh(dp=2, tp=2)).entries:
            if entry.path.target is not Target.IN or entry.path.pattern:
                plan.add(entry)
        found.append((f"{method} {cut}", llama(mesh, method, cut, False, plan)))
    return found


@pytest.mark.parametrize(
    "shape", [{"cp": 2, "tp": 2}, pytest.param({"tp": 2, "cp": 2}, marks=pytest.mark.slow)], ids=", ".join
)
def test_llama_with_tensor_parallelism(ranks: RankPools, shape: dict[str, int]) -> None:
    for found in ranks.run(llamas_with_tensor_parallelism, shape):
        for case, (loss, gradient) in found:
            assert loss <= 1e-14 and gradient <= 1e-12, (case, loss, gradient)
