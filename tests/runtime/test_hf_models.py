"""Unmodified Hugging Face models under the plans they carry, on a mesh against one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.plans.test_from_hf import SAMPLE
from tests.plans.tiny_hf import planned_config, planned_configs, tiny_inputs, tiny_model
from tests.ranks import RankPools, run_cases
from tests.runtime.hf import Step, one_step
from vescale.plans import Plan

# Gradients of hyper-connections nearly cancel, and are computed in float32: 1e-7 where their casts are made to float64.
TOLERANCE = {"hy_v4:HYV4Config": 1e-5}


def step(name: str, sizes: dict[str, int], options: dict[str, Any], settings: dict[str, Any], strict: bool) -> Step:
    kind = planned_config(name)
    build = functools.partial(tiny_model, kind, **settings)
    inputs = tiny_inputs(tiny_model(kind, meta=True, **settings))
    return one_step(build, inputs, lambda m, mesh: Plan.from_hf(m, mesh, **options), sizes, strict=strict)


def check(name: str, sizes: dict[str, int], options: dict[str, Any], settings: dict[str, Any]) -> None:
    found = step(name, sizes, options, settings, True)
    assert found.is_same(1e-6), found  # routers, norms and rotary embeddings compute in float32
    assert found.implicit == 0


def sampled() -> int:
    return run_cases(check, [(name, {"tp": 2}, {}, {}) for name in SAMPLE])


def test_sample_on_two_ranks(ranks: RankPools) -> None:
    assert set(ranks.run(sampled, world_size=2)) == {12}


def on_four_ranks() -> int:
    both = {"dp": 2, "tp": 2}
    cases: list[Any] = [(name, both, {}, {}) for name in ("llama:LlamaConfig", "mixtral:MixtralConfig")]
    cases += [(name, both, {"sequence_parallel": True}, {}) for name in ("llama:LlamaConfig", "mixtral:MixtralConfig")]
    cases.append(("mixtral:MixtralConfig", both, {"expert_axis": "tp"}, {}))
    # fewer key/value heads than ranks
    cases.append(("llama:LlamaConfig", {"tp": 4}, {}, {"num_attention_heads": 8, "num_key_value_heads": 2}))
    return run_cases(check, cases)


def test_with_a_batch_over_dp(ranks: RankPools) -> None:
    assert set(ranks.run(on_four_ranks)) == {6}


def counted(name: str) -> Step:
    return step(name, {"tp": 2}, {}, {}, True)


@pytest.mark.parametrize(("name", "all_reduces"), [("llama:LlamaConfig", 4), ("mixtral:MixtralConfig", 5)])
def test_collectives_of_a_layer(ranks: RankPools, name: str, all_reduces: int) -> None:
    """One all-reduce a layer for each of attention and feed-forward, forward and backward: the projections share their
    input's. Experts add one, for the gradient of the routing weights. Beside the layers: one after the embedding, one
    for the gradient before the head, and the logits are gathered, as the model's plan wants."""
    for found in ranks.run(counted, name, world_size=2):
        assert found.collectives == {("all_reduce", "tp"): 2 * all_reduces + 2, ("all_gather_v", "tp"): 1}


def test_collectives_with_the_sequence_sharded(ranks: RankPools) -> None:
    """Two reduce-scatters and two all-gathers a layer, forward and backward, and one of each around them."""
    for found in ranks.run(step, "llama:LlamaConfig", {"tp": 2}, {"sequence_parallel": True}, {}, True, world_size=2):
        assert found.collectives == {("reduce_scatter_v", "tp"): 10, ("all_gather_v", "tp"): 10 + 1}  # the logits


def every(name: str) -> str:
    """ "" when it matches; else what went wrong."""
    try:
        found = step(name, {"tp": 2}, {}, {}, False)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "" if found.is_same(TOLERANCE.get(name, 1e-6)) else str(found)


@pytest.mark.slow
def test_every_model_that_runs_on_one_device(ranks: RankPools) -> None:
    """At least 60 of the 146; none that runs differs."""
    wrong = {name: ranks.run(every, name, world_size=2) for name in planned_configs()}
    same = [name for name, found in wrong.items() if not any(found)]
    different = {name: found for name, found in wrong.items() if any("Step(" in text for text in found)}
    assert not different
    assert len(same) >= 60, wrong
