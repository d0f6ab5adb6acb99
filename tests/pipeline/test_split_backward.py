"""The halves of a backward: together they are the whole one, and neither computes what the other does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pipeline.steps import Net, counts_of, mesh_of, same_steps, token_batch
from tests.pipeline.test_steps import NAMES, assert_exact, make_net
from tests.ranks import RankPools
from tests.runtime.llama import make_llama
from tests.runtime.zero import sharded_at_rest
from vescale import parallelize, plan_zoo
from vescale.comm import record_comms
from vescale.pipeline import StagedProgram
from vescale.pipeline._stage import ModelStage, SplitBackward
from vescale.plans import Plan


class Scaled(torch.autograd.Function):
    """Computes both of its gradients at once, as functions in Python may."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum(0)


class Layers(nn.Module):
    """One weight is used twice on the way, one behind a cast in both of its uses; a hook doubles a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.first, self.second, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.twice = nn.Parameter(torch.randn(8, 8))
        self.scale = nn.Parameter(torch.randn(8))
        self.side = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.norm(x))
        x.register_hook(lambda gradient: 2 * gradient)
        x = x @ self.twice
        x = F.gelu(self.second(x)) @ self.twice.double().float()
        x = Scaled.apply(x, self.scale) + self.side.exp()
        return self.last(x)


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_halves_are_the_whole() -> None:
    torch.manual_seed(0)
    model = Layers()
    given = torch.randn(4, 8)

    def graph() -> tuple[torch.Tensor, torch.Tensor]:
        x = given.clone().requires_grad_()
        return x, model(x).tanh().sum()

    x, loss = graph()
    with Products() as whole:
        loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for_input = x.grad
    model.zero_grad()
    x, loss = graph()
    halves = SplitBackward([loss], None, [x], lambda node: False)
    with Products() as first:
        halves.inputs()
    assert for_input is not None and x.grad is not None and torch.equal(x.grad, for_input)
    early = {name for name, p in model.named_parameters() if p.grad is not None}
    assert early == {"twice", "scale"}  # used again on the way, and of a function in Python
    arrived: list[str] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    with Products() as second:
        halves.weights()
    assert sorted(arrived) == sorted(expected.keys() - early)
    for name, p in model.named_parameters():
        assert p.grad is not None and torch.equal(p.grad, expected[name]), name  # type: ignore[arg-type]
    # Ten products: five for inputs; of those for weights, the two of ``twice`` are in the first half.
    assert [c.counts["mm"] for c in (whole, first, second)] == [10, 7, 3]
    assert whole.counts["native_layer_norm_backward"] == 1
    assert [c.counts["gelu_backward"] for c in (whole, first, second)] == [1, 1, 0]


def test_without_inputs_all_is_in_the_second_half() -> None:
    layer = nn.Linear(4, 4)
    halves = SplitBackward([layer(torch.ones(2, 4)).sum()], None, [], lambda node: False)
    halves.inputs()
    assert layer.weight.grad is None
    halves.weights()
    assert layer.weight.grad is not None


def test_roots_that_do_not_depend_on_the_inputs() -> None:
    """A stage may send what it computes from its parameters alone: an embedding for the next one, or a parameter."""
    torch.manual_seed(0)
    table, layer, start = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Parameter(torch.randn(3, 4))
    given = torch.randn(3, 4)

    def roots() -> tuple[torch.Tensor, list[torch.Tensor]]:
        x = given.clone().requires_grad_()
        own = table(torch.arange(3))
        return x, [layer(x) @ table.weight.T, own, own.exp(), start]

    parameters = [*table.parameters(), *layer.parameters(), start]
    x, made = roots()
    gradients = [torch.randn_like(one) for one in made]
    torch.autograd.backward(made, gradients)
    expected = [x.grad, *(p.grad for p in parameters)]
    for parameter in parameters:
        parameter.grad = None
    x, made = roots()
    halves = SplitBackward(made, gradients, [x], lambda node: False)
    halves.inputs()
    assert all(parameter.grad is None for parameter in parameters)
    halves.weights()
    for found, wanted in zip([x.grad, *(p.grad for p in parameters)], expected, strict=True):
        torch.testing.assert_close(found, wanted)


def arrivals_case(policy: str | None) -> tuple[Counter[str], Counter[str]]:
    """Of one step: the parameters whose gradients arrive in second halves, and in others, with how often."""
    plan = Plan(mesh_of(pp=2)).pipeline(split_before=[f"blocks.{n}" for n in (1, 2, 3)], schedule="ZBV", microbatches=4)
    if policy is not None:
        plan.checkpoint(r"blocks.\d+", policy)
    model = parallelize(make_net(), plan)
    found: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    in_second = False

    class Watched(ModelStage):
        def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
            nonlocal in_second
            in_second = True
            super().backward_weight_one_chunk(*args, **kwargs)
            in_second = False

    for stage in model._pipeline.stages:
        stage.__class__ = Watched
    nodes = {name: get_gradient_edge(parameter).node for name, parameter in model.named_parameters()}
    for name, node in nodes.items():  # hooks of the parameters themselves run once in a step
        node.register_prehook(lambda *_, name=name: found[in_second].update([name]))
    model.step(**token_batch(0, names=NAMES))
    return found[True], found[False]


@pytest.mark.parametrize("policy", [None, "full", "offload"])
def test_weights_wait_for_the_second_half(ranks: RankPools, policy: str | None) -> None:
    """What the schedule has as whole backwards (the end of ZBV) is in neither half."""
    plan = Plan({"pp": 2}).pipeline(split_before=[f"blocks.{n}" for n in (1, 2, 3)], schedule="ZBV", microbatches=4)
    staged = StagedProgram.of(plan, make_net())
    for rank, (second, others) in enumerate(ranks.run(arrivals_case, policy, world_size=2)):
        halved = Counter(a.stage for a in staged.schedule.actions[rank] if a.kind == "W")
        assert sum(halved.values()) >= 4
        for name, stages in staged.cut.owners.items():
            number = sum(halved[stage] for stage in stages)
            early = policy == "full" and name.startswith("blocks") and stages != {0}
            assert second[name] == (0 if early else number), (rank, name, second, halved)
            assert second[name] + others[name] == 4 * sum(stage in staged.schedule.stages_of(rank) for stage in stages)


def make_deep() -> Net:
    torch.manual_seed(0)
    return Net(depth=8).double()


def four_a_rank_case() -> tuple[dict[str, float], dict[int, dict[str, int]], Counter[str]]:
    def plan(mesh: Any) -> Plan:
        made = Plan(mesh)
        for name in NAMES:
            made.shard(f"<in:{name}>", Shard(0), mesh="dp")
        sharded_at_rest(made, ".*", "dp")
        splits = [f"blocks.{n}" for n in range(1, 8)]
        return made.pipeline(split_before=splits, schedule="InterleavedZeroBubble", microbatches=4)

    sizes = {"pp": 2, "dp": 2}
    batches = [token_batch(step, names=NAMES) for step in range(2)]
    found = same_steps(make_deep, lambda: plan(mesh_of(**sizes)), batches)
    model = parallelize(make_deep(), plan(mesh_of(**sizes)))
    model.step(**batches[0])
    with record_comms() as ledger:
        model.step(**batches[0])
    return found, counts_of(plan(sizes), make_deep(), batches[0]), Counter(r.op for r in ledger.records)


@pytest.mark.slow
def test_more_stages_than_stay_gathered(ranks: RankPools) -> None:
    """A stage stays gathered between the halves of its backward; gathers are as predicted."""
    results = ranks.run(four_a_rank_case, world_size=4)
    assert_exact([found for found, _, _ in results])
    for rank, (_, predicted, counts) in enumerate(results):
        assert counts["all_gather_v"] == sum(predicted[stage]["gathers"] for stage in range(rank // 2, 8, 2))


def collectives_case(name: str, sizes: dict[str, int]) -> tuple[Counter[Any], Counter[Any], dict[str, float]]:
    """The ledgers of a step with whole backwards and of one with halves; differences of the latter from one device."""

    def make() -> nn.Module:
        return make_llama(num_hidden_layers=4, tie_word_embeddings=True)

    def plan(schedule: str) -> Plan:
        splits = [f"model.layers.{n}" for n in (1, 2, 3)]
        return plan_zoo.load(name, mesh_of(**sizes)).pipeline(split_before=splits, schedule=schedule, microbatches=4)

    batches = [token_batch(step, length=16) for step in range(2)]
    found = []
    for schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        model: Any = parallelize(make(), plan(schedule))
        model.step(**batches[0])
        with record_comms() as ledger:
            model.step(**batches[0])
        found.append(Counter((r.op, r.axes, r.bytes) for r in ledger.records))
    return found[0], found[1], same_steps(make, lambda: plan("InterleavedZeroBubble"), batches)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("llama", {"pp": 2, "dp": 1, "tp": 2}), ("llama_cp", {"pp": 2, "dp": 1, "cp": 2, "tp": 1})],
    ids=["sequence", "context"],
)
def test_halves_communicate_what_the_whole_does(ranks: RankPools, name: str, sizes: dict[str, int]) -> None:
    results = ranks.run(collectives_case, name, sizes, world_size=4)
    assert_exact([found for _, _, found in results], loss=1e-6)
    for whole, halves, _ in results:
        assert whole == halves and sum(whole.values()) > 20
