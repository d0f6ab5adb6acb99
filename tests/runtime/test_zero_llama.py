"""ZeRO lines on the plan of an unmodified Llama: with tensor, sequence and vocabulary parallelism, and hybrid sharding."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.ranks import RankPools
from tests.runtime.llama import batch, make_llama
from tests.runtime.zero import llama_plan, mesh_of, same_steps
from tests.whole import whole, whole_tensors
from vescale import deferred_init, no_sync, optim, parallelize
from vescale.comm import record_comms
from vescale.estimation import predict
from vescale.plans import Plan
from vescale.runtime import gradient_reducer

DP_TP = {"dp": 2, "tp": 2}
HYBRID = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}


def plan_on(sizes: dict[str, int]) -> Plan:
    mesh = mesh_of(sizes)
    return llama_plan(mesh, "dp_shard", "dp_replicate") if "dp_shard" in sizes else llama_plan(mesh)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """Uneven labels: the first half of the batch has fewer."""
    ids, labels = batch()
    loss: torch.Tensor = model(input_ids=(ids + step) % 64, labels=labels).loss
    loss.backward()
    return loss


def exact_steps(sizes: dict[str, int], tied: bool) -> dict[str, Any]:
    """Float64, three steps of AdamW with clipping; what was communicated beside activations in the last."""
    reference, model = (make_llama(tie_word_embeddings=tied) for _ in range(2))
    parallelize(model, plan_on(sizes), strict=True)
    norms: list[list[float]] = [[], []]

    def clip(m: nn.Module, _: Any) -> None:
        is_ours = m is model
        clip_grad_norm_ = optim.clip_grad_norm_ if is_ours else nn.utils.clip_grad_norm_
        norms[is_ours].append(float(whole(clip_grad_norm_(m.parameters(), 0.1))))

    found = same_steps(reference, model, loss_of, around=clip)
    with record_comms() as ledger:
        loss_of(model, 5)
    reductions = Counter(
        (
            r.op.removesuffix("_v"),
            r.axes,
            "unit" if r.requester in ("", "model.layers.0", "model.layers.1") else "bucket",
        )
        for r in ledger.records
        if r.requester in ("", "model.layers.0", "model.layers.1") or r.requester.startswith("bucket")
    )
    assert max(abs(a - b) / a for a, b in zip(*norms)) <= 1e-12
    return {"difference": found, "reductions": reductions}


@pytest.mark.parametrize(
    ("sizes", "tied"),
    [
        pytest.param(DP_TP, False, id="dp,tp"),
        pytest.param(DP_TP, True, id="dp,tp, tied"),
        pytest.param(HYBRID, False, id="hybrid,tp", marks=pytest.mark.slow),
        pytest.param(HYBRID, True, id="hybrid,tp, tied"),
    ],
)
def test_gradients_and_parameters_equal_one_device(ranks: RankPools, sizes: dict[str, int], tied: bool) -> None:
    """1e-12; the loss is Hugging Face's own, in float32. Only the norms' gradients are left for a bucket over tp, on ranks
    that hold a part of them."""
    world_size = 4 if sizes is DP_TP else 8
    shard = "dp" if sizes is DP_TP else "dp_shard"
    expected = Counter({("all_gather", shard, "unit"): 5, ("reduce_scatter", shard, "unit"): 3})
    if sizes is HYBRID:
        expected["all_reduce", "dp_replicate", "unit"] = 3
    all_found = ranks.run(exact_steps, sizes, tied, world_size=world_size)
    over_tp = [found["reductions"].pop(("all_reduce", "tp", "bucket"), 0) for found in all_found]
    assert max(over_tp) == 1
    for found in all_found:
        difference = found["difference"]
        assert difference.loss <= 1e-6, difference
        assert difference.gradient[0] <= 1e-12 and difference.parameter[0] <= 1e-11, difference
        assert found["reductions"] == expected


def training(sizes: dict[str, int]) -> list[float]:
    """Relative differences of the losses of 20 steps in float32: accumulation, clipping, AdamW; checkpointed layers."""
    reference, model = make_llama(torch.float32), make_llama(torch.float32)
    for m in (reference, model):
        m.gradient_checkpointing_enable({"use_reentrant": False})
        m.train()
    parallelize(model, plan_on(sizes), strict=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (reference, model)]
    differences = []
    for step in range(20):
        losses = []
        for m, optimizer in zip((reference, model), optimizers, strict=True):
            if m is model:
                with no_sync(m):
                    first = loss_of(m, 2 * step)
            else:
                first = loss_of(m, 2 * step)
            losses.append(whole((first + loss_of(m, 2 * step + 1)).detach()).item())
            optim.clip_grad_norm_(m.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        differences.append(abs(losses[1] - losses[0]) / losses[0])
    return differences


def test_training_in_float32(ranks: RankPools) -> None:
    for found in ranks.run(training, DP_TP):
        assert max(found) <= 1e-4, found


def deferred_state() -> None:
    """Built under deferred_init: the bits of one device."""
    reference = make_llama(torch.float32)
    with deferred_init():
        model = make_llama(torch.float32)
    parallelize(model, plan_on(DP_TP), strict=True)
    found: Any = whole_tensors(dict(model.named_parameters()))
    for (name, own), (_, other) in zip(found.items(), reference.named_parameters(), strict=True):
        assert torch.equal(own, other), name


def test_deferred_init(ranks: RankPools) -> None:
    ranks.run(deferred_state)


def saved(path: str) -> None:
    """Written by dp x tp after two steps with AdamW; read on another mesh, where training goes on as on one device."""
    reference, model = make_llama(), make_llama()
    parallelize(model, plan_on(DP_TP), strict=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (reference, model)]

    def step(m: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        loss_of(m, number)
        optimizer.step()
        optimizer.zero_grad()

    for number in range(2):
        for m, optimizer in zip((reference, model), optimizers, strict=True):
            step(m, optimizer, number)
    after = [copy.deepcopy(reference)]
    step(reference, optimizers[0], 2)
    after.append(reference)
    state = state_of(model, optimizers[1])
    dcp.save(state, checkpoint_id=path)
    fresh = make_llama()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    one_device = make_llama()
    for other, plan in ((fresh, plan_on({"dp": 4, "tp": 1})), (one_device, None)):
        if plan is not None:
            parallelize(other, plan, strict=True)
        optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
        loaded = state_of(other, optimizer)
        dcp.load(loaded, checkpoint_id=path)
        put(other, optimizer, loaded)
        for expected in after:
            found: Any = whole_tensors(dict(other.named_parameters()))
            for (name, own), (_, theirs) in zip(found.items(), expected.named_parameters(), strict=True):
                torch.testing.assert_close(own.detach(), theirs.detach(), rtol=1e-9, atol=1e-12, msg=name)
            if expected is not reference:
                step(other, optimizer, 2)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def put(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import set_state_dict

    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def test_checkpoints_cross_meshes(ranks: RankPools, tmp_path: Any) -> None:
    ranks.run(saved, str(tmp_path))


def test_explained_collectives_are_those_that_run(ranks: RankPools) -> None:
    """Pieces of gradients in buckets are as uneven as the planner cuts; their sum over dp is as predicted, and an element
    for each that is empty, which tells whether there is a gradient."""
    all_found = ranks.run(predicted)
    for found in all_found:
        assert found["units"] == found["expected units"]
        flags = 4 * sum(other["empty pieces"] for other in all_found)
        assert sum(other["bucket bytes"] for other in all_found) == 4 * found["expected bucket bytes"] + flags


def predicted() -> dict[str, Any]:
    model = make_llama(torch.float32)
    plan = plan_on(DP_TP)
    with torch.device("meta"):
        twin = make_llama(torch.float32)
    ids, labels = batch()
    inputs = {"input_ids": ids.to("meta"), "labels": labels.to("meta"), "use_cache": False}
    prediction = predict(twin, plan, inputs)
    parallelize(model, plan, strict=True)
    for step in range(2):
        with record_comms() as ledger:
            loss_of(model, step)
    paths = {c.path for c in prediction.collectives if c.target.startswith("<unit>")}
    return {
        "units": Counter(
            (r.requester, r.op.removesuffix("_v"), r.bytes) for r in ledger.records if r.requester in paths
        ),
        "expected units": Counter(
            (c.path, c.op, c.num_bytes) for c in prediction.collectives if c.target.startswith("<unit>")
        ),
        "bucket bytes": sum(bucket.num_bytes for bucket in gradient_reducer(model).buckets),
        "empty pieces": sum(not slot.numel for bucket in gradient_reducer(model).buckets for slot in bucket.slots),
        "expected bucket bytes": sum(b.num_bytes for b in prediction.buckets),
    }
