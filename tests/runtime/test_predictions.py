"""What ``explain`` predicts is what a step communicates: calls and bytes, by op and axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tests.plan_zoo.models import model_of, tokens
from tests.ranks import RankPools
from tests.runtime.llama import batch, make_llama, make_mesh, make_plan
from vescale import parallelize, plan_zoo
from vescale.comm import record_comms
from vescale.estimation import Prediction, predict
from vescale.plans import Plan

# (op, axis, whether of a parameter's gradient) -> (calls, bytes)
Totals = dict[tuple[str, str, bool], tuple[int, int]]


def measured_and_predicted(
    plan_name: str, dp: int, tp: int, options: dict[str, Any], rows: int | None = None, length: int | None = None
) -> tuple[Totals, Totals]:
    model, mesh = make_llama(**options), make_mesh(dp=dp, tp=tp)
    plan, ids = make_plan(plan_name, mesh), batch()[0][:rows, :length]
    with torch.device("meta"):
        on_meta = make_llama(**options)
    inputs = {"input_ids": ids.to("meta"), "use_cache": False}
    prediction = predict(on_meta, plan, inputs)
    parallelize(model, plan, strict=True)
    return compared(prediction, lambda: model(ids).logits, of_busiest=rows is not None or length is not None)


def compared(prediction: Prediction, forward: Callable[[], Any], of_busiest: bool = False) -> tuple[Totals, Totals]:
    """``of_busiest``: of the ranks, in each collective."""
    assert prediction.stopped is None, prediction
    with record_comms() as ledger:
        # A loss that communicates nothing: each rank's part of a weighted sum.
        forward().to_local().square().sum().backward()
    found = [
        ((r.op.removesuffix("_v"), r.axes, ".grad:" in r.requester), r.bytes) for r in ledger.records if r.num_ranks > 1
    ]
    if of_busiest:
        on_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(on_ranks, found)
        found = [(every[0][0], max(size for _, size in every)) for every in zip(*on_ranks, strict=True)]
        assert all(len({key for key, _ in every}) == 1 for every in zip(*on_ranks, strict=True))
    expected = [((c.op, c.axis, c.target.endswith(".grad")), c.num_bytes) for c in prediction.made]
    return totals(found), totals(expected)


def totals(collectives: list[tuple[tuple[str, str, bool], int]]) -> Totals:
    calls = Counter(key for key, _ in collectives)
    return {key: (calls[key], sum(size for other, size in collectives if other == key)) for key in calls}


@pytest.mark.parametrize(
    ("plan_name", "dp", "tp", "options"),
    [
        ("tp", 1, 2, {}),
        ("zoo", 1, 2, {}),
        ("tp", 2, 2, {}),
        ("zoo", 2, 2, {}),
        ("zoo", 2, 2, {"tie_word_embeddings": True}),
        ("tp, replicated kv", 1, 2, {"num_key_value_heads": 1}),
    ],
    ids=str,
)
def test_calls_and_bytes(ranks: RankPools, plan_name: str, dp: int, tp: int, options: dict[str, Any]) -> None:
    for measured, predicted in ranks.run(measured_and_predicted, plan_name, dp, tp, options, world_size=dp * tp):
        assert measured == predicted


@pytest.mark.parametrize(("dp", "tp", "rows", "length"), [(2, 1, 3, None), (1, 2, None, 7), (2, 2, 3, 7)])
def test_ranks_do_not_divide_the_batch_or_the_sequence(
    ranks: RankPools, dp: int, tp: int, rows: Any, length: Any
) -> None:
    """Bytes are those of the busiest rank."""
    for measured, predicted in ranks.run(measured_and_predicted, "zoo", dp, tp, {}, rows, length, world_size=dp * tp):
        assert measured == predicted


def zoo_measured_and_predicted(name: str, tp: int, options: dict[str, Any]) -> tuple[Totals, Totals]:
    """As models train that are not told otherwise: with a key-value cache."""
    zoo, mesh = model_of(name), make_mesh(dp=2, tp=tp)
    model, inputs = zoo.build().double(), {"input_ids": tokens()}
    with torch.device("meta"):
        on_meta = zoo.build().double()
    for each in (model, on_meta):
        each.config.update(options)
    plan = plan_zoo.load(name, mesh)
    prediction = predict(on_meta, plan, {"input_ids": inputs["input_ids"].to("meta")})
    parallelize(model, plan)
    return compared(prediction, lambda: model(**inputs).logits)


@pytest.mark.parametrize(
    ("name", "tp", "options"), [("llama", 2, {"_attn_implementation": "eager"}), ("gpt2", 1, {})], ids=str
)
def test_models_as_they_train(ranks: RankPools, name: str, tp: int, options: dict[str, Any]) -> None:
    for measured, predicted in ranks.run(zoo_measured_and_predicted, name, tp, options, world_size=2 * tp):
        assert measured == predicted


class Tower(nn.Module):
    """Channels are cut between ``up`` and ``down``, and again between ``widen`` and ``narrow``, which are transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.up, self.inner = nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.deep, self.last = nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.BatchNorm2d(8)
        self.down = nn.Conv2d(8, 6, 1)
        self.widen, self.narrow = nn.ConvTranspose2d(6, 4, 2, stride=2), nn.ConvTranspose2d(4, 6, 1, bias=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(self.stem(x)))
        x = x + self.down(self.last(self.deep(F.relu(self.inner(self.up(x))))))
        return self.narrow(F.relu(self.widen(x)))


def tower_measured_and_predicted(dp: int, tp: int, training: bool) -> tuple[Totals, Totals]:
    torch.manual_seed(0)
    model, x = Tower().train(training), torch.randn(4, 3, 5, 6, dtype=torch.float64)
    with torch.device("meta"):
        on_meta = Tower().train(training)
    plan = Plan(make_mesh(dp=dp, tp=tp)).shard("<in:x>", {"dp": Shard(0)})
    plan.shard("(up|deep).(weight|bias)", {"tp": Shard(0)}).shard("down.weight", {"tp": Shard(1)})
    plan.shard("(inner|last).(weight|bias|running_mean|running_var)", {"tp": Shard(0)})
    plan.shard("widen.weight", {"tp": Shard(1)}).shard("widen.bias", {"tp": Shard(0)})
    plan.shard("narrow.weight", {"tp": Shard(0)})
    plan.shard("(up|widen).<in>", {"tp": Replicate()}).shard("(down|narrow).<out>", {"tp": Replicate()})
    prediction = predict(on_meta, plan, {"x": x.to("meta")})
    statistics = Counter(c.path for c in prediction.collectives if c.target == "<batch_norm>")
    assert statistics == (dict.fromkeys(("first", "inner", "last"), 2) if training and dp > 1 else {})
    parallelize(model, plan, strict=True)
    return compared(prediction, lambda: model(x))


@pytest.mark.parametrize(("dp", "tp", "training"), [(1, 2, True), (2, 2, True), (2, 2, False)])
def test_channels_that_are_cut_and_statistics_of_a_batch(ranks: RankPools, dp: int, tp: int, training: bool) -> None:
    for measured, predicted in ranks.run(tower_measured_and_predicted, dp, tp, training, world_size=dp * tp):
        assert measured == predicted and len(measured) == (4 if training and dp > 1 else dp)
