"""What training scripts do around a model: checkpointing, accumulation, caches, hooks, ties, several models."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from tests.ranks import RankPools
from tests.runtime.compare import assert_same_gradients, assert_same_step, pair
from tests.runtime.llama import batch, double_loss, make_llama, make_mesh, make_plan, worst_gradient
from vescale import parallelize
from vescale.comm import record_comms
from vescale.placements import RaggedShard
from vescale.plans import INIT, RUN, Plan, PlanError
from vescale.runtime import (
    ImplicitCommunicationError,
    ImplicitCommunicationWarning,
    gradient_reducer,
    implicit_communication,
)


def data(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None, *, shift: Any = None) -> torch.Tensor:
        x = self.down(F.gelu(self.up(x)))
        x = x if scale is None else x * scale
        return x if shift is None else x + shift["by"][0]


def megatron(plan: Plan) -> None:
    plan.shard("<in:x>", Shard(0), mesh="dp")
    plan.shard("up.(weight|bias)", Shard(0), mesh="tp")
    plan.shard("<in:x>", Replicate(), mesh="tp")
    plan.shard("up.<in>", Replicate(), mesh="tp")
    plan.shard("down.weight", Shard(1), mesh="tp")
    plan.shard("down.<out>", Replicate(), mesh="tp")


MESH = {"dp": 2, "tp": 2}

# Checkpointing


def checkpointed_llama(reentrant: bool) -> None:
    reference, model = make_llama(), make_llama()
    parallelize(model, make_plan("zoo", make_mesh(dp=1, tp=2)), strict=True)
    for m in (reference, model):
        m.gradient_checkpointing_enable({"use_reentrant": reentrant})
        m.train()
    ids, labels = batch()
    with record_comms() as ledger:
        double_loss(model(ids).logits, labels).backward()
    double_loss(reference(ids).logits, labels).backward()
    assert worst_gradient(model, reference) <= 1e-12
    assert ledger.count("reduce_scatter_v") > 10  # the forward's communication runs again


class Recomputed(nn.Module):
    """Checkpoints a plain function that makes tensors and attends outside of any module."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 24)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._attend, self.linear(x), use_reentrant=self.reentrant)

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x + torch.arange(24, dtype=x.dtype, device=x.device)).unflatten(-1, (3, 2, 4)).unbind(2)
        return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)


def checkpointed_function(reentrant: bool) -> None:
    def entries(plan: Plan) -> None:
        plan.shard("<in:x>", Shard(0), mesh="dp")

    assert_same_step(*pair(lambda: Recomputed(reentrant), entries, {"dp": 2}), data(4, 5, 8))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(ranks: RankPools, reentrant: bool) -> None:
    ranks.run(checkpointed_llama, reentrant, world_size=2)
    ranks.run(checkpointed_function, reentrant, world_size=2)


# Training loops


def loops() -> None:
    reference, model = pair(Mlp, megatron, MESH)
    for m in (reference, model):  # several forwards in one backward, then accumulation over several backwards
        (m(data(4, 8)).sum() + m(data(6, 8, seed=8)).square().sum()).backward()
        m(data(2, 8, seed=9)).square().sum().backward()
    assert_same_gradients(reference, model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (reference, model)]
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    for m in (reference, model):
        m(data(4, 8)).square().sum().backward()
    assert_same_gradients(reference, model, 1e-10)
    (grads,) = (torch.autograd.grad(m(data(4, 8)).sum(), list(m.parameters())) for m in (model,))
    assert all(not p.is_partial() for g in grads for p in g.placements)


def uneven_batches() -> None:
    """Five rows over two ranks, and one row: a rank without any."""
    for rows in (5, 1):
        for loss in (torch.sum, torch.mean):
            reference, model = pair(Mlp, megatron, MESH, strict=False)  # stock matmuls gather uneven shards
            assert_same_step(reference, model, data(rows, 8), loss=lambda y, f=loss: f(y.square()), max_implicit=99)


def inputs() -> None:
    """Positional, by keyword, missing, nested, given locally, a DTensor; and gradients of inputs."""
    reference, model = pair(Mlp, megatron, MESH)
    x, by = data(4, 8), {"by": (data(8), "text"), "more": [None, 3]}
    scale = data(4, 8, seed=2)
    expected = reference(x, scale, shift=by)
    torch.testing.assert_close(model(x, scale, shift=by).full_tensor(), expected)
    torch.testing.assert_close(model(x=x, scale=scale, shift=by).full_tensor(), expected)
    mesh = next(iter(model.parameters())).device_mesh
    placed = DTensor.from_local(x.chunk(2)[mesh.get_local_rank("dp")], mesh, [Shard(0), Replicate()])
    torch.testing.assert_close(model(placed, scale=scale, shift=by).full_tensor(), expected)
    for m in (reference, model):
        x.grad = None
        x.requires_grad_()
        m(x).square().sum().backward()
        if m is reference:
            wanted = x.grad.clone()
    torch.testing.assert_close(x.grad, wanted)

    def local(plan: Plan) -> None:
        plan.shard("<in:x>", Shard(0), mesh="dp", given="local")

    reference, model = pair(Mlp, local, {"dp": 2, "tp": 2})
    rank = next(iter(model.parameters())).device_mesh.get_local_rank("dp")
    torch.testing.assert_close(model(x.detach().chunk(2)[rank]).full_tensor(), reference(x.detach()))


def outputs() -> None:
    """A scalar output is reduced, and prints like one; an <out> entry that replicates hands out plain tensors."""

    class Loss(Mlp):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            return super().forward(x).square().mean()

    reference, model = pair(Loss, megatron, MESH)
    loss = model(data(4, 8))
    assert tuple(loss.placements) == (Replicate(), Replicate())
    assert f"{loss:.6f}" == f"{reference(data(4, 8)):.6f}"
    assert abs(float(loss) - float(reference(data(4, 8)))) < 1e-12

    def plain(plan: Plan) -> None:
        megatron(plan)
        plan.shard("<out>", {"dp": Replicate(), "tp": Replicate()})

    reference, model = pair(Mlp, plain, MESH)
    target = data(4, 8, seed=5)
    for m in (reference, model):
        y = m(data(4, 8))
        assert not isinstance(y, DTensor)
        F.mse_loss(y, target).backward()
    assert_same_gradients(reference, model)


def two_models() -> None:
    """A model whose output feeds another, in one backward; plans, function modes and reports stay apart."""
    first = pair(Mlp, megatron, MESH)
    second = pair(Mlp, lambda plan: plan.shard("<in:x>", Shard(0), mesh="dp"), MESH, strict=False)
    for a, b in zip(first, second):
        b(a(data(4, 8))).square().sum().backward()
    assert_same_gradients(*first)
    assert_same_gradients(*second)
    assert not isinstance(torch.arange(3), DTensor)


def hooks_of_the_user() -> None:
    reference, model = pair(Mlp, megatron, MESH)
    seen: list[tuple[bool, ...]] = []
    for m in (reference, model):
        m.up.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        m.down.register_forward_hook(lambda module, args, output: output + 1)
        m.down.register_full_backward_hook(lambda module, grads, outs: seen.append(tuple(g is None for g in grads)))
    assert_same_step(reference, model, data(4, 8))
    assert seen[0] == seen[1]


def failing_forward() -> None:
    """An exception in a forward leaves nothing switched on."""
    reference, model = pair(Mlp, megatron, MESH)
    with pytest.raises(RuntimeError):
        model(data(4, 9))
    assert not isinstance(torch.zeros(2), DTensor)
    assert_same_step(reference, model, data(4, 8))


def test_training_loops(ranks: RankPools) -> None:
    ranks.run(loops)


def test_uneven_batches(ranks: RankPools) -> None:
    ranks.run(uneven_batches)


def test_inputs(ranks: RankPools) -> None:
    ranks.run(inputs)


def test_outputs(ranks: RankPools) -> None:
    ranks.run(outputs)


def test_two_models_in_one_backward(ranks: RankPools) -> None:
    ranks.run(two_models)


def test_hooks_of_the_user(ranks: RankPools) -> None:
    ranks.run(hooks_of_the_user)


def test_a_failing_forward(ranks: RankPools) -> None:
    ranks.run(failing_forward)


# Copies, checkpoints, other containers


def copies() -> None:
    """A deep copy is a model of its own: complete gradients, its own reports, factories where the plan says."""
    reference, model = pair(Mlp, megatron, MESH)
    copied = copy.deepcopy(model)
    for m in (reference, copied):
        m(data(4, 8)).square().sum().backward()
    assert_same_gradients(reference, copied)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert implicit_communication(copied) == {} and copied.up is not model.up
    part = copy.deepcopy(model).down  # a part of a copy, called alone
    hidden = DTensor.from_local(data(4, 8), part.weight.device_mesh, [Replicate(), Shard(1)])
    part(hidden).sum().backward()
    assert part.weight.grad.placements == part.weight.placements
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(model)


def unfrozen() -> None:
    """Parameters that need a gradient only later, as in fine-tuning."""
    torch.manual_seed(0)
    reference = Mlp().double()
    reference.up.requires_grad_(False)
    model = copy.deepcopy(reference)
    plan = Plan(make_mesh(**MESH))
    megatron(plan)
    parallelize(model, plan)
    for m in (reference, model):
        m(data(4, 8)).sum().backward()
        m.up.requires_grad_(True)
        m(data(4, 8)).square().sum().backward()
    assert_same_gradients(reference, model)


def loads_plain_state() -> None:
    """A state dict of one device goes into the shards; a wrong shape is torch's own error."""
    reference, model = pair(Mlp, megatron, MESH)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(2).add_(1)
    state = reference.state_dict()
    assert model.load_state_dict(state).missing_keys == []
    assert not isinstance(state["up.weight"], DTensor)
    assert_same_step(reference, model, data(4, 8))
    with pytest.raises(RuntimeError, match=r"size mismatch for up\.weight"):
        model.load_state_dict({**state, "up.weight": data(3, 8)})
    back = {name: value.full_tensor() for name, value in model.state_dict().items()}
    torch.testing.assert_close(back, dict(state))


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    more: dict[str, Any]


class Contained(Mlp):
    def forward(self, x: Batch) -> Any:  # type: ignore[override]
        y = super().forward(x.x) * x.more["scale"]
        return Batch(y, {"loss": y.square().mean()})


def dataclasses_in_and_out() -> None:
    reference, model = pair(Contained, megatron, MESH)
    found = model(Batch(data(4, 8), {"scale": data(4, 8)}))
    expected = reference(Batch(data(4, 8), {"scale": data(4, 8)}))
    assert type(found) is Batch and tuple(found.x.placements) == (Shard(0), Replicate())
    assert tuple(found.more["loss"].placements) == (Replicate(), Replicate())
    found.more["loss"].backward()
    expected.more["loss"].backward()
    assert_same_gradients(reference, model)


def test_copies(ranks: RankPools) -> None:
    ranks.run(copies)


def test_unfrozen_parameters(ranks: RankPools) -> None:
    ranks.run(unfrozen)


def test_loading_a_plain_state_dict(ranks: RankPools) -> None:
    ranks.run(loads_plain_state)


def test_dataclasses(ranks: RankPools) -> None:
    ranks.run(dataclasses_in_and_out)


# Llama with its cache


def cache() -> None:
    """use_cache is on by default: prefill, then one token at a time, against one device."""
    reference, model = make_llama(), make_llama()
    parallelize(model, make_plan("tp", make_mesh(dp=1, tp=2)), strict=True)
    ids, _ = batch()
    with torch.no_grad():
        kept: list[Any] = [None, None]
        for start, stop in ((0, 8), (8, 9), (9, 10)):
            logits = []
            for index, m in enumerate((reference, model)):
                out = m(ids[:, start:stop], past_key_values=kept[index])
                kept[index] = out.past_key_values
                logits.append(out.logits)
            assert isinstance(kept[1].layers[0].keys, DTensor)
            torch.testing.assert_close(logits[1].full_tensor(), logits[0])
        assert kept[1].get_seq_length() == 10


def padded() -> None:
    """A padding mask: attention with a mask that is sharded like the batch, or not at all."""
    reference, model = make_llama(), make_llama()
    parallelize(model, make_plan("zoo", make_mesh(dp=2, tp=2)), strict=True)
    ids, labels = batch()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    for m in (reference, model):
        double_loss(m(ids, attention_mask=mask).logits, labels).backward()
    assert worst_gradient(model, reference) <= 1e-12


def tied() -> None:
    reference, model = make_llama(tie_word_embeddings=True), make_llama(tie_word_embeddings=True)
    parallelize(model, make_plan("zoo", make_mesh(dp=2, tp=2)), strict=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
    ids, labels = batch()
    for m in (reference, model):
        double_loss(m(ids).logits, labels).backward()
    assert worst_gradient(model, reference) <= 1e-12


def test_key_value_cache(ranks: RankPools) -> None:
    ranks.run(cache, world_size=2)


def test_padding_mask(ranks: RankPools) -> None:
    ranks.run(padded)


def test_tied_weights(ranks: RankPools) -> None:
    ranks.run(tied)


# Phases and regions


def phases() -> None:
    """At rest sharded over dp, whole while it computes: the gradient comes back reduced and sharded."""

    def entries(plan: Plan) -> None:
        plan.shard("<in:x>", Shard(0), mesh="dp")
        plan.shard("(up|down).weight", Shard(0), mesh="dp", phase=INIT)
        plan.shard("(up|down).weight", Replicate(), mesh="dp", phase=RUN)

    reference, model = pair(Mlp, entries, {"dp": 2})
    with record_comms() as ledger:
        assert_same_step(reference, model, data(4, 8))
    # Both weights belong to the model's unit, which stays gathered until its backward.
    assert Counter(r.op for r in ledger.records if r.requester == "") == {"all_gather_v": 1, "reduce_scatter_v": 1}


def hybrid() -> None:
    """Ragged over dp at rest, a copy on each rank of sp: scattered over dp, the pieces added up over sp, in one bucket."""

    def entries(plan: Plan) -> None:
        plan.shard("<in:input>", Shard(0), mesh="dp")
        plan.shard("<in:input>", Shard(1), mesh="sp")
        plan.shard(".*weight", RaggedShard(), mesh="dp", phase=INIT)
        plan.shard(".*weight", Replicate(), mesh="dp", phase=RUN)

    def biased() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))

    reference, model = pair(biased, entries, {"dp": 2, "sp": 2})
    for _ in range(2):
        with record_comms() as ledger:
            assert_same_step(reference, model, data(4, 6, 8))
        reducer = gradient_reducer(model)
        found = [record for record in ledger.records if record.requester.startswith("bucket")]
        assert len(found) == sum(bucket.num_collectives for bucket in reducer.buckets)
        assert sum(record.bytes for record in found) == sum(bucket.moved_bytes for bucket in reducer.buckets)
        for m in (reference, model):
            m.zero_grad()


def annotated() -> None:
    """A region's local gradients, which nobody else knows to be parts of a sum."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(1, 2, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Norm()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) + 1

    def entries(plan: Plan, **axes: str) -> None:
        plan.shard("<in:x>", Shard(0), mesh="dp")
        plan.local("norm", inputs={"dp": Shard(0)}, outputs={"dp": Shard(0)})
        plan.annotate("norm.weight.grad", Partial(), **axes)

    for write in (entries, functools.partial(entries, mesh="dp")):
        reference, model = pair(Outer, write, {"dp": 2})
        with record_comms() as ledger:
            assert_same_step(reference, model, data(4, 8))
        assert [(r.op, r.axes) for r in ledger.records if r.requester.startswith("bucket")] == [("all_reduce", "dp")]

    def annotated_and_placed(plan: Plan) -> None:
        plan.local("norm").annotate("norm.weight.grad", Partial(), mesh="dp")
        plan.shard("norm.weight.grad", Replicate(), mesh="dp")

    reference, model = pair(Outer, annotated_and_placed, {"dp": 2})
    for each in (reference, model):
        each(data(4, 8)).sum().backward()
    found, expected = (each.get_parameter("norm.weight").grad for each in (model, reference))
    assert isinstance(found, DTensor) and expected is not None
    assert torch.equal(
        found.full_tensor(), 2 * expected
    )  # both ranks have all of it, and the plan says that it is a part


def regions() -> None:
    """A local region: its forward sees plain tensors, and factories inside stay plain."""

    class Plain(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            assert not isinstance(x, DTensor) and not isinstance(self.up.weight, DTensor)
            return super().forward(x) + torch.arange(8, dtype=x.dtype) / 2

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Plain()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x * 2) * torch.arange(8, dtype=x.dtype)

    def entries(plan: Plan) -> None:
        plan.shard("<in:x>", Shard(0), mesh="dp")
        plan.local("inner", inputs={"dp": Shard(0)}, outputs={"dp": Shard(0)})

    def reference_check(outer: nn.Module) -> nn.Module:
        return outer

    torch.manual_seed(0)
    assert_same_step(*pair(lambda: reference_check(Outer()), entries, {"dp": 2}), data(4, 8))


def factories() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            steps = torch.arange(x.shape[0], dtype=x.dtype)
            self.seen = steps.placements if isinstance(steps, DTensor) else None
            return self.linear(x) * steps[:, None]

    def entries(plan: Plan) -> None:
        plan.shard("<in:x>", Shard(0), mesh="dp")
        plan.factory("", Shard(0), mesh="dp")

    reference, model = pair(Positions, entries, {"dp": 2})
    assert_same_step(reference, model, data(4, 8))
    assert model.seen == (Shard(0),)


def test_phases_of_a_parameter(ranks: RankPools) -> None:
    ranks.run(phases, world_size=2)


def test_local_region(ranks: RankPools) -> None:
    ranks.run(regions, world_size=2)
    ranks.run(annotated, world_size=2)
    ranks.run(hybrid, world_size=4)


def test_factory_entry(ranks: RankPools) -> None:
    ranks.run(factories, world_size=2)


# Reports and refusals


def implicit(strict: bool) -> str:
    def entries(plan: Plan) -> None:
        plan.shard("up.weight", Shard(0), mesh="tp")
        plan.shard("up.bias", Shard(0), mesh="tp")
        plan.shard("down.weight", Shard(0), mesh="tp")  # wants its input whole, and nothing says so

    reference, model = pair(Mlp, entries, {"tp": 2}, strict=strict)
    if strict:
        with record_comms() as ledger, pytest.raises(ImplicitCommunicationError) as caught:
            model(data(4, 8))
        assert not ledger.records  # refused before it happened
        return str(caught.value)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ImplicitCommunicationWarning)
        for _ in range(2):
            model.zero_grad()
            reference.zero_grad()
            for m in (reference, model):
                m(data(4, 8)).square().sum().backward()
    assert_same_gradients(reference, model)
    found = implicit_communication(model)
    mine = [warning for warning in said if issubclass(warning.category, ImplicitCommunicationWarning)]
    rank = next(iter(model.parameters())).device_mesh.get_rank()
    assert 1 <= len(mine) <= len(found) if rank == 0 else not mine  # one for the forward and backward of a module
    assert found and all(count == 2 for count in found.values())
    return "\n".join(site.message(Plan({"tp": 2}).axes) for site in found)


def disagreeing() -> tuple[str, str]:
    mesh = make_mesh(dp=2)
    torch.manual_seed(torch.distributed.get_rank())
    with pytest.raises(PlanError) as values:
        parallelize(Mlp(), Plan(mesh))
    torch.manual_seed(0)
    plan = Plan(mesh)
    if torch.distributed.get_rank():
        plan.shard("up.weight", Shard(0), mesh="dp")
    with pytest.raises(PlanError) as plans:
        parallelize(Mlp(), plan)
    model = parallelize(Mlp(), Plan(mesh))
    with pytest.raises(PlanError, match="already"):
        parallelize(model, Plan(mesh))
    return str(values.value), str(plans.value)


def test_strict_names_the_site(ranks: RankPools) -> None:
    messages = ranks.run(implicit, True, world_size=2)
    assert messages[0] == messages[1]
    for part in ("down (forward", "aten.", "tp=S(1)", "tp=R", "`down.<in:0>: {tp: R}`", __file__):
        assert part in messages[0], (part, messages[0])


def test_implicit_communication_is_counted_and_reported_once(ranks: RankPools) -> None:
    for message in ranks.run(implicit, False, world_size=2):
        assert "down.<in:0>" in message


def test_ranks_that_disagree(ranks: RankPools) -> None:
    answers = ranks.run(disagreeing, world_size=2)
    assert answers[0] == answers[1]
    assert "up.weight has other values" in answers[0][0] and "on rank 1" in answers[0][0]
    assert "'shard up.weight' of plan is nothing on rank 0 and placements={dp: S(0)}" in answers[0][1]


_ = Partial
