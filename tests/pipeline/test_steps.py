"""Training in stages equals one device: losses, gradients, parameters and random numbers."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from tests.pipeline.steps import Net, make_gpt2, mesh_of, same_steps, token_batch
from tests.ranks import RankPools
from tests.runtime.llama import make_llama, tensor_parallel
from vescale import optim, parallelize, report
from vescale.compat import local_of
from vescale.plans import Plan

NAMES = ("ids", "labels")


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def net_case(schedule: str, microbatches: int, splits: list[int], **options: Any) -> dict[str, float]:
    def plan() -> Plan:
        return Plan(mesh_of(pp=2)).pipeline(
            split_before=[f"blocks.{n}" for n in splits],
            schedule=schedule,
            microbatches=microbatches,
            loss="out.loss",
            reduce=options.get("reduce", "step"),
        )

    batches = [token_batch(step, names=NAMES) for step in range(3)]
    return same_steps(make_net, plan, batches, accumulate=options.get("accumulate", False))


def assert_exact(results: list[dict[str, float]], loss: float = 1e-12) -> None:
    """``loss``: Hugging Face computes losses in float32, on one device as well; their gradients are exact."""
    for found in results:
        assert max(found[name] for name in ("gradient", "parameter", "norm")) <= 1e-12, found
        assert max(found[name] for name in ("loss", "evaluate")) <= loss, found


@pytest.mark.parametrize(("schedule", "microbatches"), [("GPipe", 1), ("gpipe", 4), ("1F1B", 4), ("1F1B", 8)])
def test_net_in_two_stages(ranks: RankPools, schedule: str, microbatches: int) -> None:
    assert_exact(ranks.run(net_case, schedule, microbatches, [2], world_size=2))


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV", "LoopedBFS"])
def test_two_stages_on_each_rank(ranks: RankPools, schedule: str) -> None:
    assert_exact(ranks.run(net_case, schedule, 4, [1, 2, 3], world_size=2))


def test_gradients_accumulate_over_steps(ranks: RankPools) -> None:
    assert_exact(ranks.run(net_case, "1F1B", 2, [2], accumulate=True, world_size=2))


def test_reduction_after_each_microbatch(ranks: RankPools) -> None:
    assert_exact(ranks.run(net_case, "1F1B", 4, [2], reduce="microbatch", accumulate=True, world_size=2))


def clip_case() -> list[tuple[float, float]]:
    """Norms by PyTorch's functions and ours, of a model in stages and of one device: of all orders, of gradients, and of
    parameters that one stage has, where the other rank gives none; beside a model of one device."""
    reference, plain = make_net(), torch.nn.Linear(4, 4).double()
    model = parallelize(make_net(), Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4))
    batch = token_batch(0, names=NAMES)
    torch.manual_seed(1)
    reference(**batch)["loss"].backward()
    torch.manual_seed(1)
    model.step(**batch)
    plain(torch.ones(2, 4).double()).sum().backward()
    found = []
    for of in (torch.nn.utils, optim):

        def pair(choose: Any, order: float = 2.0, of: Any = of) -> None:
            norms = (
                of.clip_grad_norm_(choose(model), 1e6, order),
                torch.nn.utils.clip_grad_norm_(choose(reference), 1e6, order),
            )
            assert norms[0].dtype == norms[1].dtype
            found.append((float(norms[0]), float(norms[1])))

        for order in (1.0, 2.0, 0.0, float("inf"), float("-inf")):
            pair(lambda net: net.parameters(), order)
        pair(lambda net: [*net.parameters(), *plain.parameters()])
        pair(lambda net: [p for name, p in net.named_parameters() if name.startswith("blocks.3")])
        gradients = [[p.grad for p in net.parameters() if p.grad is not None] for net in (model, reference)]
        found.append((float(of.get_total_norm(gradients[0])), float(torch.nn.utils.get_total_norm(gradients[1]))))
    return found


def groups_case() -> list[tuple[str, list[str]]]:
    model = parallelize(make_net(), Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4))
    groups = optim.muon_groups(model, adamw=["position.weight", "head.weight", "norm.*"], verbose=False)
    with pytest.raises(ValueError, match="'heads' of adamw matches none"):
        optim.muon_groups(model, adamw=["heads"], verbose=False)
    return [(group["algorithm"], [name for name, _ in group["params"]]) for group in groups]


def test_patterns_of_other_stages_parameters(ranks: RankPools) -> None:
    both = [dict(groups) for groups in ranks.run(groups_case, world_size=2)]
    assert "position.weight" in both[0]["adamw"] and "norm.weight" in both[1]["adamw"]
    assert all("embed.weight" in groups["adamw"] for groups in both)  # tied to the head


def test_norms_are_over_all_stages(ranks: RankPools) -> None:
    """``same_steps`` clips with both functions, too."""
    for found in ranks.run(clip_case, world_size=2):
        assert len(found) == 16
        assert all(ours == pytest.approx(theirs, rel=1e-12, abs=0) for ours, theirs in found), found


CSV = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_schedule_as_text(ranks: RankPools) -> None:
    assert_exact(ranks.run(net_case, CSV, 2, [2], world_size=2))


def sum_and_count(out: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    labels = batch["labels"].flatten()
    logits = out["logits"].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"), (labels != -100).sum()


def callable_case() -> dict[str, float]:
    def plan() -> Plan:
        return Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4, loss=sum_and_count)

    return same_steps(make_net, plan, [token_batch(step, names=NAMES) for step in range(3)], loss=sum_and_count)


def test_loss_is_a_callable(ranks: RankPools) -> None:
    assert_exact(ranks.run(callable_case, world_size=2))


def gpt2_case(schedule: str, attention: float) -> dict[str, float]:
    def plan() -> Plan:
        return Plan(mesh_of(pp=2)).pipeline(split_before=["transformer.h.2"], schedule=schedule, microbatches=4)

    return same_steps(lambda: make_gpt2(attention=attention), plan, [token_batch(step) for step in range(2)])


@pytest.mark.parametrize("attention", [0.0, 0.1])
def test_gpt2_with_dropout_and_tied_head(ranks: RankPools, attention: float) -> None:
    assert_exact(ranks.run(gpt2_case, "1F1B", attention, world_size=2), loss=1e-6)


def llama_case(sizes: dict[str, int], tied: bool) -> dict[str, float]:
    def plan() -> Plan:
        mesh = mesh_of(**sizes)
        made = tensor_parallel(mesh) if "tp" in sizes else Plan(mesh)
        if "tp" not in sizes and "dp" in sizes:
            made.shard("<in:(input_ids|labels)>", Shard(0), mesh="dp")
        return made.pipeline(split_before=["model.layers.1"], schedule="1F1B", microbatches=4)

    return same_steps(lambda: make_llama(tie_word_embeddings=tied), plan, [token_batch(step) for step in range(2)])


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"pp": 2, "dp": 1, "tp": 2}, {"pp": 2, "dp": 2, "tp": 1}], ids=str)
def test_llama(ranks: RankPools, sizes: dict[str, int]) -> None:
    assert_exact(ranks.run(llama_case, sizes, True, world_size=2 if sizes == {"pp": 2} else 4), loss=1e-6)


CUTS: dict[str, dict[str, Any]] = {
    "stages": {"stages": [["embed", "blocks.0"], ["blocks.1", "blocks.2", "blocks.3", "norm", "head"]]},
    "balance": {"balance": "cost"},
}
POLICIES: dict[str, Any] = {
    "full": "full",
    "selective": "selective",
    "save": {"save": ["aten.addmm"], "every": 2},
    "offload": "offload",
}


def variant_case(cut: str | None, policy: str | None) -> dict[str, float]:
    def plan() -> Plan:
        made = Plan(mesh_of(pp=2))
        if policy is not None:
            made.checkpoint(r"blocks.\d+", POLICIES[policy])
        return made.pipeline(**(CUTS[cut] if cut else {"split_before": ["blocks.2"]}), microbatches=4)

    runs = pytest.MonkeyPatch()  # of the environment: what objects have is put back by a recomputation
    runs.setenv("COUNTED_RUNS", "0")

    def counted(*_: Any) -> None:
        os.environ["COUNTED_RUNS"] = str(int(os.environ["COUNTED_RUNS"]) + 1)

    def make() -> Net:
        model = make_net()
        for block in model.blocks:
            block.up.register_forward_pre_hook(counted)
        return model

    found = same_steps(make, plan, [token_batch(step, names=NAMES) for step in range(2)])
    count = int(os.environ["COUNTED_RUNS"])
    runs.undo()
    return {**found, "runs": count}


@pytest.mark.parametrize("cut", CUTS)
def test_other_cuts(ranks: RankPools, cut: str) -> None:
    assert_exact(ranks.run(variant_case, cut, None, world_size=2))


@pytest.mark.parametrize("policy", POLICIES)
def test_checkpointed_blocks(ranks: RankPools, policy: str) -> None:
    found = ranks.run(variant_case, None, policy, world_size=2)
    assert_exact(found)
    plain = ranks.run(variant_case, None, None, world_size=2)
    again = 0 if policy == "offload" else 2 * 4 * 2  # steps, micro-batches, blocks of a stage
    assert [f["runs"] - p["runs"] for f, p in zip(found, plain)] == [again, again]


def gradients_case() -> list[list[torch.Tensor]]:
    """The local gradients of two steps: without a policy, with each, and with a budget, which chooses policies after one."""
    found = []
    given: list[dict[str, Any]] = [{"policy": policy} for policy in POLICIES.values()]
    for options in (None, *given, {"budget_gib": 1e-6}):
        plan = Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4)
        if options is not None:
            plan.checkpoint(r"blocks.\d+", **options)
        model = parallelize(make_net(), plan)
        torch.manual_seed(1)
        for step in range(2):
            model.step(**token_batch(step, names=NAMES))
        gradients = [parameter.grad for parameter in model.parameters()]
        found.append([local_of(gradient) for gradient in gradients if isinstance(gradient, DTensor)])
    return found


def test_policies_have_the_bits_of_none(ranks: RankPools) -> None:
    for plain, *others in ranks.run(gradients_case, world_size=2):
        assert len(plain) > 10 and all(gradient.any() for gradient in plain)
        for number, gradients in enumerate(others):
            assert all(map(torch.equal, gradients, plain)) and len(gradients) == len(plain), number


def budget_case() -> tuple[float, dict[str, str]]:
    """With a budget for the forwards of one micro-batch: what the stage's blocks save without, and their policies."""

    def stepped(budget: float | None) -> Any:
        plan = Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4)
        if budget is not None:
            plan.checkpoint(r"blocks.\d+", "full", budget_gib=budget)
        model = parallelize(make_net(), plan)
        for step in range(3):
            model.step(**token_batch(step, names=NAMES))
        return model

    plain = stepped(None)
    with pytest.raises(RuntimeError, match="between forward and backward"):
        report(plain)
    plain.step(**token_batch(0, names=NAMES))
    saved = sum(n for path, ops in report(plain).saved.items() if path.startswith("blocks") for n in ops.values())
    return saved, report(stepped(1.5 * saved / 2**30)).policies


def test_a_budget_is_shared_by_the_forwards_that_are_held(ranks: RankPools) -> None:
    """The first of two stages of 1F1B holds two micro-batches, the second one."""
    (first, one), (second, other) = ranks.run(budget_case, world_size=2)
    assert first > 0 and second > 0
    assert set(other.values()) == {"none"} and set(one.values()) != {"none"}, (one, other)
