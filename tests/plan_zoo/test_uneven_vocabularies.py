"""No usual number of ranks divides the 50,257 rows of GPT-2, or the 51,865 of Whisper: their plans on small
vocabularies, and what moves with the full ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.plan_zoo.models import _GPT2, _WHISPER, MODELS, _model
from tests.ranks import RankPools
from tests.runtime.hf import Step, one_step, quiet
from tests.runtime.test_uneven_batches import check, hf_inputs, seeded
from tests.simulate import simulate
from vescale import plan_zoo


def odd_model(name: str) -> nn.Module:
    import transformers

    config: Any = MODELS[name].build().config
    config = type(config)(**{**config.to_dict(), "vocab_size": 61})
    torch.manual_seed(0)
    return getattr(transformers, MODELS[name].build().__class__.__name__)._from_config(config)


def train(name: str, size: int) -> Step:
    zoo = MODELS[name]
    torch.manual_seed(3)
    return one_step(
        lambda: odd_model(name),
        zoo.inputs(),
        lambda _, mesh: plan_zoo.load(name, mesh),
        {"dp": 1, "tp": size},
        strict=True,
        objective=zoo.objective,
    )


@pytest.mark.parametrize(
    ("name", "size"), [("gpt2", 2), ("whisper", 2), pytest.param("gpt2", 4, marks=pytest.mark.slow)]
)
def test_step_equals_one_device(ranks: RankPools, name: str, size: int) -> None:
    MODELS[name].need()
    for step in ranks.run(train, name, size, world_size=size):
        assert step.is_same(1e-9) and step.gradient[0] <= 1e-12, step
        assert step.implicit == 0


def of_vocabulary(name: str, rows: int, heads: int) -> nn.Module:
    if name == "gpt2":
        dropout = {f"{kind}_pdrop": 0.0 for kind in ("embd", "resid", "attn")}
        sizes = {**_GPT2, **dropout, "vocab_size": rows, "n_embd": 4 * heads, "n_head": heads}
        return seeded(_model("GPT2LMHeadModel", sizes))
    attention = {f"{side}_attention_heads": heads for side in ("encoder", "decoder")}
    return seeded(
        _model("WhisperForConditionalGeneration", {**_WHISPER, **attention, "vocab_size": rows, "d_model": 4 * heads})
    )


def moved(name: str, rows: int, ranks: int) -> list[list[tuple[str, int]]]:
    """The collectives of each rank, and their bytes, in a step in strict mode with one device's gradients (1e-12)."""
    inputs, labels = hf_inputs(name, 3, 7)

    def objective(model: nn.Module) -> torch.Tensor:
        logits = model(**inputs).logits
        return F.cross_entropy(logits.flatten(0, -2), labels.reshape(-1), ignore_index=-100)

    model = of_vocabulary(name, rows, heads=8 if ranks == 8 else 6)
    found = simulate(check, ranks, model, {"dp": 1, "tp": ranks}, lambda mesh: plan_zoo.load(name, mesh), objective)
    return [[(record.op, record.bytes) for record in records] for records in found]


@pytest.mark.parametrize(
    ("name", "rows", "ranks"),
    [
        ("gpt2", 50_257, 3),
        ("whisper", 51_865, 2),
        *(
            pytest.param(name, rows, ranks, marks=pytest.mark.slow)
            for name, rows, ranks in (
                ("gpt2", 50_257, 2),
                ("gpt2", 50_257, 8),
                ("whisper", 51_865, 3),
                ("whisper", 51_865, 8),
            )
        ),
    ],
)
def test_what_moves_does_not_depend_on_the_vocabulary(name: str, rows: int, ranks: int) -> None:
    """The same bytes as with 64 rows: no row of the table, and no logits, move, or are padded."""
    MODELS[name].need()
    quiet()
    assert moved(name, rows, ranks) == moved(name, 64, ranks)
