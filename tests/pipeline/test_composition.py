"""Pipelines with ZeRO units, replicas of them, sequence and context parallelism, and experts: as one device."""

from __future__ import annotations

import contextlib
import copy
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

from tests.pipeline.steps import Net, counts_of, mesh_of, rel, same_steps, token_batch
from tests.pipeline.test_steps import NAMES, assert_exact, make_net
from tests.ranks import RankPools
from tests.runtime.llama import make_llama
from tests.runtime.zero import sharded_at_rest
from tests.simulate import simulate
from tests.whole import whole
from vescale import parallelize, plan_zoo
from vescale.comm import CommRecord, record_comms
from vescale.estimation import predict
from vescale.pipeline import StagedProgram
from vescale.plans import Plan, PlanError
from vescale.runtime import no_sync

ZERO: dict[str, dict[str, Any]] = {
    "1F1B": {"splits": [2], "microbatches": 4},
    "ZBV": {"splits": [1, 2, 3], "microbatches": 4, "accumulate": True},
    "ZBV by micro-batch": {"splits": [1, 2, 3], "microbatches": 2, "reduce": "microbatch", "accumulate": True},
    "1F1B of ZeRO-3": {"splits": [2], "microbatches": 2, "unit": {"reshard_after_forward": True}},
    "1F1B of ZeRO-1": {
        "splits": [2],
        "microbatches": 4,
        "reduce": "microbatch",
        "unit": {"reshard_after_forward": False, "reshard_after_backward": False},
    },
}


def zero_plan(mesh: Any, case: str) -> Plan:
    given = ZERO[case]
    plan = Plan(mesh)
    for name in NAMES:
        plan.shard(f"<in:{name}>", Shard(0), mesh="dp")
    sharded_at_rest(plan, ".*", "dp")
    if "unit" in given:
        plan.unit(r"blocks.\d+", **given["unit"])
    return plan.pipeline(
        split_before=[f"blocks.{n}" for n in given["splits"]],
        schedule=case.split()[0],
        microbatches=given["microbatches"],
        reduce=given.get("reduce", "step"),
    )


MESH = {"pp": 2, "dp": 2}


def zero_case(case: str) -> dict[str, float]:
    batches = [token_batch(step, names=NAMES) for step in range(3)]
    return same_steps(
        make_net, lambda: zero_plan(mesh_of(**MESH), case), batches, accumulate=ZERO[case].get("accumulate", False)
    )


@pytest.mark.parametrize("case", ZERO)
def test_units_in_stages(ranks: RankPools, case: str) -> None:
    assert_exact(ranks.run(zero_case, case, world_size=4))


def parts_case(rows: int, schedule: str, microbatches: int) -> tuple[dict[str, float], str]:
    """Each rank gives its rows; and what parts of no batch raise."""
    mesh = mesh_of(**MESH)
    plan = Plan(mesh)
    plan.shard("<in:ids>", Shard(0), mesh="dp", given="local").shard("<in:labels>", Shard(0), mesh="dp")
    plan.local_inputs().pipeline(split_before=["blocks.2"], schedule=schedule, microbatches=microbatches)

    def own(batch: dict[str, Any]) -> dict[str, Any]:
        return {name: value.chunk(2)[mesh.get_local_rank("dp")] for name, value in batch.items()}

    found = same_steps(make_net, lambda: plan, [token_batch(step, rows, names=NAMES) for step in range(2)], given=own)
    model = parallelize(make_net(), plan)
    with pytest.raises(PlanError) as raised:
        model.step(**token_batch(0, 2 + mesh.get_local_rank("dp"), names=NAMES))
    return found, str(raised.value)


@pytest.mark.parametrize(("rows", "schedule", "microbatches"), [(8, "1F1B", 4), (5, "GPipe", 1)])
def test_parts_of_the_batch(ranks: RankPools, rows: int, schedule: str, microbatches: int) -> None:
    results = ranks.run(parts_case, rows, schedule, microbatches, world_size=4)
    assert_exact([found for found, _ in results])
    for _, message in results:
        assert re.search(r"parts that ranks pass .* not those of one batch; .*\(5, 6\)", message)


def is_reduction(record: CommRecord) -> bool:
    """Of gradients: not of losses, nor what ranks compare or ask each other."""
    asks = ("which", "nll_loss", "comparison of steps")
    return record.op in ("reduce_scatter_v", "all_reduce") and not any(word in record.requester for word in asks)


def two_stages(mesh: Any) -> Plan:
    made = Plan(mesh)
    for name in NAMES:
        made.shard(f"<in:{name}>", Shard(0), mesh="dp")
    return made.pipeline(split_before=["blocks.2"], microbatches=4)


def counted_case(case: str | None) -> tuple[dict[int, dict[str, int]], Counter[str], Counter[int], int]:
    """What is predicted, what the ledger of the second step has, the reductions that name a stage, and the gathers of an
    evaluation."""

    def plan(mesh: Any) -> Plan:
        return two_stages(mesh) if case is None else zero_plan(mesh, case)

    model, batch = make_net(), token_batch(0, names=NAMES)
    predicted = counts_of(plan(MESH), model, batch)
    model = parallelize(model, plan(mesh_of(**MESH)))
    model.step(**batch)
    with record_comms() as ledger:
        model.step(**batch)
    counts: Counter[str] = Counter()
    by_stage: Counter[int] = Counter()
    for record in ledger.records:
        what = {"send": "sends", "recv": "receives", "all_gather_v": "gathers"}.get(record.op)
        counts[what or ("reductions" if is_reduction(record) else "others")] += 1
        if is_reduction(record) and record.requester.startswith("stage "):
            by_stage[int(record.requester.split()[1].rstrip(","))] += 1
    model.evaluate(**batch)
    with record_comms() as ledger:
        model.evaluate(**batch)
    return predicted, counts, by_stage, sum(record.op == "all_gather_v" for record in ledger.records)


@pytest.mark.parametrize("case", [None, *ZERO])
def test_counts_are_those_of_the_ledger(ranks: RankPools, case: str | None) -> None:
    results = ranks.run(counted_case, case, world_size=4)
    predicted = results[0][0]
    for rank, (_, counts, by_stage, gathers) in enumerate(results):
        own = {2: (rank // 2,), 4: ((0, 3), (1, 2))[rank // 2]}[len(predicted)]
        for what in ("sends", "receives", "gathers", "reductions"):
            assert counts[what] == sum(predicted[stage][what] for stage in own), (rank, what, counts, predicted)
        for stage, number in by_stage.items():
            tied = 0 if len(predicted) == 4 else 1
            assert number == predicted[stage]["reductions"] - tied, (rank, stage, by_stage, predicted)
        if case != "1F1B of ZeRO-3":  # a step and an evaluation gather each unit once
            assert gathers == counts["gathers"], (rank, gathers, counts)


def no_sync_case(case: str | None) -> tuple[float, int]:
    """The largest difference of gradients, which one device accumulates over the same steps, and how many reductions there
    were inside of ``no_sync``."""
    reference = make_net()
    model = parallelize(
        copy.deepcopy(reference), two_stages(mesh_of(**MESH)) if case is None else zero_plan(mesh_of(**MESH), case)
    )
    names = dict(reference.named_parameters())
    worst, inside = 0.0, 0
    for syncs in ((False, True), (True, False, False, True), (False, True)):
        for step, now in enumerate(syncs):
            batch = token_batch(step, 8 if len(syncs) > 2 or not now else 16, names=NAMES)  # 16: another shape is tried
            torch.manual_seed(step)
            reference(**batch)["loss"].backward()
            torch.manual_seed(step)
            with contextlib.nullcontext() if now else no_sync(model), record_comms() as ledger:
                model.step(**batch)
            inside += 0 if now else sum(map(is_reduction, ledger.records))
            if now:
                gradients = [(whole(p.grad), names[name].grad) for name, p in model.named_parameters()]
                worst = max(worst, *(rel(ours, theirs) for ours, theirs in gradients))
        reference.zero_grad()
        model.zero_grad()
    return worst, inside


@pytest.mark.parametrize("case", [None, "1F1B", "ZBV by micro-batch"])
def test_no_sync(ranks: RankPools, case: str | None) -> None:
    for worst, inside in ranks.run(no_sync_case, case, world_size=4):
        assert worst <= 1e-12 and inside == 0


PRECISION: dict[str, Any] = {
    "model": lambda plan: plan.precision("", param="float32", reduce="float64"),
    "blocks": lambda plan: plan.precision(r"blocks.\d+", param="float32", reduce="float64", output="float64"),
    "units": lambda plan: sharded_at_rest(plan.precision("", param="float32", reduce="float64"), ".*", "dp"),
    "policies": lambda plan: sharded_at_rest(plan, ".*", "dp").unit(
        r"blocks.\d+", mp_policy=MixedPrecisionPolicy(torch.float32, torch.float64, torch.float64)
    ),
}


def precision_case(kind: str) -> tuple[float, float, torch.dtype, set[int]]:
    """Differences of gradients from the same entries without a pipeline, and from none; what is sent between stages."""

    sent: set[int] = set()

    def gradients(plan: Plan) -> dict[str, torch.Tensor]:
        for name in NAMES:
            plan.shard(f"<in:{name}>", Shard(0), mesh="dp")
        model: Any = parallelize(make_net(), plan)
        for step in range(2):
            batch = token_batch(step, names=NAMES)
            torch.manual_seed(step)
            if plan.pipeline_entry is not None:
                with record_comms() as ledger:
                    model.step(**batch)
                sent.clear()  # the first step tries larger micro-batches, too
                sent.update(record.bytes for record in ledger.records if record.op == "send")
            else:
                model(**batch)["loss"].backward()
        return {name: whole(p.grad) for name, p in model.named_parameters()}

    splits = [f"blocks.{n}" for n in (1, 2, 3)]

    def staged() -> Plan:
        plan = Plan(mesh_of(**MESH)).pipeline(split_before=splits, schedule="ZBV", microbatches=4)
        PRECISION[kind](plan)
        return plan

    found = gradients(staged())
    plan = Plan(mesh_of(x=2, dp=2))
    PRECISION[kind](plan)
    expected, exact = gradients(plan), gradients(Plan(mesh_of(x=2, dp=2)))
    boundary = StagedProgram.of(staged(), make_net()).traced(token_batch(0, names=NAMES)).boundaries[1]
    worst = [max(rel(found[name], other[name]) for name in found) for other in (expected, exact)]
    return worst[0], worst[1], boundary.dtypes[0], sent


@pytest.mark.parametrize("kind", PRECISION)
def test_precision_in_stages(ranks: RankPools, kind: str) -> None:
    """A float64 model that computes in float32."""
    for same, exact, dtype, sent in ranks.run(precision_case, kind, world_size=4):
        assert same <= 2e-6 and 1e-9 < exact < 1e-4, (same, exact)
        size = 4 if kind in ("model", "units") else 8
        assert dtype.itemsize == size and sent == {1 * 6 * 16 * size}


def zoo_case(name: str, sizes: dict[str, int], dropout: float, length: int = 16) -> dict[str, float]:
    def plan() -> Plan:
        made = plan_zoo.load(name, mesh_of(**sizes))
        return made.pipeline(split_before=["model.layers.1"], microbatches=2)

    batches = [token_batch(step, length=length) for step in range(2)]
    return same_steps(lambda: make_llama(attention_dropout=dropout, tie_word_embeddings=True), plan, batches)


@pytest.mark.parametrize(
    ("name", "sizes", "dropout"),
    [("llama", {"pp": 2, "dp": 1, "tp": 2}, 0.1), ("llama_cp", {"pp": 2, "dp": 1, "cp": 2, "tp": 1}, 0.0)],
    ids=["sequence", "context"],
)
def test_sequences_in_parts(ranks: RankPools, name: str, sizes: dict[str, int], dropout: float) -> None:
    assert_exact(ranks.run(zoo_case, name, sizes, dropout, world_size=4), loss=1e-6)


@pytest.mark.slow
def test_a_rank_without_tokens(ranks: RankPools) -> None:
    """Eight tokens in the plan's eight runs for each rank: the first has them all."""
    sizes = {"pp": 2, "dp": 1, "cp": 2, "tp": 1}
    assert_exact(ranks.run(zoo_case, "llama_cp", sizes, 0.0, 8, world_size=4), loss=1e-6)


def make_mixtral() -> nn.Module:
    """Its router and norms compute in float64, too: Hugging Face's cast to float32. (So does its loss.)"""
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm, MixtralTopKRouter

    class Router(MixtralTopKRouter):
        def forward(self, hidden_states: torch.Tensor) -> Any:
            logits = torch.nn.functional.linear(hidden_states.reshape(-1, hidden_states.shape[-1]), self.weight)
            weights, chosen = torch.topk(torch.softmax(logits, -1), self.top_k, dim=-1)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

    class Norm(MixtralRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)

    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64, num_local_experts=4, num_experts_per_tok=2, attention_dropout=0.1,
        experts_implementation="eager",
    )  # fmt: skip
    model = MixtralForCausalLM(config).double()
    for module in model.modules():
        if isinstance(module, MixtralTopKRouter):
            module.__class__ = Router
        elif isinstance(module, MixtralRMSNorm):
            module.__class__ = Norm
    return model


def sum_and_count(out: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    labels = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].flatten()
    return nn.functional.cross_entropy(out.logits.flatten(0, 1), labels, reduction="sum"), (labels != -100).sum()


def mixtral_case(sizes: dict[str, int], zero: bool) -> dict[str, float]:
    def plan() -> Plan:
        made = plan_zoo.load("mixtral", mesh_of(**sizes))
        if zero:
            sharded_at_rest(made, ".*(weight|bias|proj)", "dp")
        return made.pipeline(split_before=["model.layers.1"], microbatches=2, loss=sum_and_count)

    return same_steps(make_mixtral, plan, [token_batch(step) for step in range(2)], loss=sum_and_count)


@pytest.mark.parametrize("zero", [False, True], ids=["experts", "units"])
def test_experts(ranks: RankPools, zero: bool) -> None:
    sizes = {"pp": 2, "dp": 2, "tp": 1} if zero else {"pp": 2, "dp": 1, "tp": 2}
    assert_exact(ranks.run(mixtral_case, sizes, zero, world_size=4))


# Eight ranks, which are simulated: without dropout, because they share one generator.


def eight_ranks(kind: str, model: nn.Module) -> dict[str, float]:
    def plan() -> Plan:
        if kind == "pp x dp x tp":
            made = plan_zoo.load("llama", mesh_of(pp=2, dp=2, tp=2))
            return made.pipeline(split_before=["model.layers.1"], microbatches=2)
        made = Plan(mesh_of(pp=2, replicate=2, shard=2))
        for name in NAMES:
            made.shard(f"<in:{name}>", {"replicate": Shard(0), "shard": Shard(0)})
        sharded_at_rest(made, ".*", "shard")
        return made.pipeline(split_before=["blocks.1", "blocks.2", "blocks.3"], schedule="ZBV", microbatches=2)

    names = ("input_ids", "labels") if kind == "pp x dp x tp" else NAMES
    batches = [token_batch(step, names=names) for step in range(2)]
    return same_steps(lambda: copy.deepcopy(model), plan, batches, draws=False, accumulate=True)


@pytest.mark.parametrize("kind", ["pp x dp x tp", "replicas of units"])
def test_eight_ranks(kind: str) -> None:
    torch.manual_seed(0)
    model = make_llama(tie_word_embeddings=True) if kind == "pp x dp x tp" else Net(dropout=0.0).double()
    assert_exact(simulate(eight_ranks, 8, kind, model), loss=1e-6 if kind == "pp x dp x tp" else 1e-12)


FOUR = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBV": 2,
    "DualPipeV": 2,
}


def four_stages(schedule: str, microbatches: int, model: nn.Module) -> dict[str, float]:
    per_rank = FOUR[schedule]

    def plan() -> Plan:
        splits = [f"blocks.{n}" for n in range(2 if per_rank == 1 else 1, 8, 3 - per_rank)]
        return Plan(mesh_of(pp=4)).pipeline(split_before=splits, schedule=schedule, microbatches=microbatches)

    batches = [token_batch(step, names=NAMES) for step in range(2)]
    return same_steps(lambda: copy.deepcopy(model), plan, batches, draws=False, accumulate=True)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", FOUR)
def test_each_schedule_on_four_ranks(schedule: str) -> None:
    """Simulated, without dropout; unequal numbers of labels, accumulated over two steps."""
    torch.manual_seed(0)
    model = Net(depth=8, dropout=0.0).double()
    for microbatches in (4, 8):
        if schedule == "DualPipeV" and microbatches < 8:
            continue
        assert_exact(simulate(four_stages, 4, schedule, microbatches, model))


def plan_of_eight(mesh: Any) -> Plan:
    return plan_zoo.load("llama", mesh).pipeline(split_before=["model.layers.1"], microbatches=2)


def count_eight(model: nn.Module) -> Counter[str]:
    batch = token_batch(0)
    model = parallelize(copy.deepcopy(model), plan_of_eight(mesh_of(pp=2, dp=2, tp=2)))
    model.step(**batch)
    with record_comms() as ledger:
        model.step(**batch)
    names = {"send": "sends", "recv": "receives", "all_gather_v": "gathers"}
    counts = Counter(names[r.op] for r in ledger.records if r.op in ("send", "recv"))
    counts["reductions"] = sum("bucket " in r.requester or "tied" in r.requester for r in ledger.records)
    return counts


def test_counts_with_tensor_parallelism() -> None:
    torch.manual_seed(0)
    model = make_llama(tie_word_embeddings=True)
    predicted = counts_of(plan_of_eight({"pp": 2, "dp": 2, "tp": 2}), model, token_batch(0))
    for rank, counts in enumerate(simulate(count_eight, 8, model)):
        for what in ("sends", "receives", "reductions"):
            assert counts[what] == predicted[rank // 4][what], (rank, counts, predicted)


def net_plan(mesh: Any) -> Plan:
    plan = Plan(mesh).shard("<in:(ids|labels)>", Shard(0), mesh="dp")
    plan.shard(r"blocks.\d+.up.(weight|bias)", Shard(0), mesh="tp")
    plan.shard(r"blocks.\d+.down.weight", Shard(1), mesh="tp")
    return plan.shard(r"blocks.\d+.down.<out>", Replicate(), mesh="tp")


def count_few_rows(rows: int, model: nn.Module) -> Counter[str]:
    """The buckets of a step: norms before layers that are cut over tp, rows that dp cuts."""
    model = parallelize(copy.deepcopy(model), net_plan(mesh_of(dp=2, tp=2)))
    with record_comms() as ledger:
        model(**token_batch(0, rows=rows, names=NAMES))["loss"].backward()
    return Counter(record.axes for record in ledger.records if record.requester.startswith("bucket "))


@pytest.mark.parametrize("rows", [1, 4])
def test_reductions_with_fewer_rows_than_ranks(rows: int) -> None:
    """A norm of fewer rows than ranks sums its gradient before it uses it: weights then have nothing to add up over tp."""
    model = Net(depth=1, dropout=0.0).double()
    found = predict(model, net_plan({"dp": 2, "tp": 2}), token_batch(0, rows=rows, names=NAMES)).buckets
    predicted = Counter(",".join(bucket.axes) for bucket in found)
    for done in simulate(count_few_rows, 4, rows, model):
        assert done == predicted and set(done) == ({"dp"} if rows == 1 else {"dp", "dp,tp"}), (predicted, done)
