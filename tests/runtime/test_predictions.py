"""What ``explain`` predicts is what a step communicates: calls and bytes, by op and axis."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.ranks import RankPools
from tests.runtime.llama import batch, make_llama, make_mesh, make_plan
from vescale.comm import record_comms
from vescale.ir import lower, predict
from vescale.runtime import parallelize

# (op, axis, whether of a parameter's gradient) -> (calls, bytes)
Totals = dict[tuple[str, str, bool], tuple[int, int]]


def measured_and_predicted(plan_name: str, dp: int, tp: int, options: dict[str, Any]) -> tuple[Totals, Totals]:
    model, mesh = make_llama(**options), make_mesh(dp=dp, tp=tp)
    plan, (ids, labels) = make_plan(plan_name, mesh), batch()
    with torch.device("meta"):
        on_meta = make_llama(**options)
    inputs = {"input_ids": ids.to("meta"), "labels": labels.to("meta"), "use_cache": False}
    prediction = predict(lower(plan, on_meta), on_meta, inputs)
    assert prediction.stopped is None and all(c.op is not None for c in prediction.collectives)
    parallelize(model, plan, strict=True)
    with record_comms() as ledger:
        logits = model(ids).logits
        # A loss that communicates nothing: each rank's part of a weighted sum.
        logits.to_local().square().sum().backward()
    found = [
        ((r.op.removesuffix("_v"), r.axes, ".grad:" in r.asker), r.bytes) for r in ledger.records if r.num_ranks > 1
    ]
    expected = [((c.op or "", c.axis, c.target.endswith(".grad")), c.num_bytes or 0) for c in prediction.collectives]
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
