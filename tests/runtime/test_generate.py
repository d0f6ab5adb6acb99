"""``generate`` of a parallelized model without an ``<out>`` entry: the tokens, and the random numbers, of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.examples import NIGHTLY
from tests.ranks import RankPools
from tests.runtime.hf import quiet
from tests.runtime.llama import make_mesh
from vescale import Plan, parallelize, plan_zoo
from vescale.checks import InputMismatchError
from vescale.runtime import implicit_communication

NEW = {"max_new_tokens": 5, "min_new_tokens": 5}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 10},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "no cache": {"do_sample": False, "use_cache": False},
    "scores": {"do_sample": False, "output_scores": True, "return_dict_in_generate": True},
}
_TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def build(kind: str) -> Any:
    import transformers as tf

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 64, **_TOKENS}
    torch.manual_seed(0)
    if kind == "llama":
        return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)).eval().double()
    if kind == "mixtral":  # its grouped product has no float64
        return tf.MixtralForCausalLM(tf.MixtralConfig(**sizes, num_local_experts=4)).eval()
    if kind == "gpt2":
        config = tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **_TOKENS)
        return tf.GPT2LMHeadModel(config).eval().double()
    if kind == "t5":
        config = tf.T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, **_TOKENS, decoder_start_token_id=0
        )
        return tf.T5ForConditionalGeneration(config).eval().double()
    config = tf.WhisperConfig(
        **_TOKENS,
        **{f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in _WHISPER.items()},
        d_model=32,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        decoder_start_token_id=1,
        begin_suppress_tokens=None,
        suppress_tokens=None,
    )
    return tf.WhisperForConditionalGeneration(config).eval().double()


_WHISPER = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}


def compare(kind: str, sizes: dict[str, int], ways: tuple[str, ...], strict: bool) -> None:
    quiet()
    reference, model = build(kind), build(kind)
    mesh = make_mesh(**sizes)
    parallelize(model, plan_zoo.load(kind, mesh), strict=strict)
    generator = torch.Generator().manual_seed(1)
    inputs: dict[str, Any] = {"inputs": torch.randint(3, 64, (2, 5), generator=generator)}
    if kind == "whisper":
        inputs = {"input_features": torch.randn(2, 8, 32, generator=generator, dtype=torch.float64)}
    else:
        inputs["attention_mask"] = torch.ones(2, 5, dtype=torch.long)
        inputs["attention_mask"][0, :2] = 0
    for way in ways:
        found = []
        for each in (reference, model):
            torch.manual_seed(3)
            found.append((each.generate(**inputs, **NEW, **WAYS[way]), torch.get_rng_state()))
        (expected, state), (tokens, own_state) = found
        if way == "scores":
            for one, other in zip(expected.scores, tokens.scores, strict=True):
                assert type(other) is torch.Tensor
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
            expected, tokens = expected.sequences, tokens.sequences
        assert type(tokens) is torch.Tensor, way
        assert torch.equal(expected, tokens), way
        assert torch.equal(state, own_state), way
    assert not strict or not implicit_communication(model)
    if kind == "llama":  # outside of generate, outputs are what they were
        assert isinstance(model(inputs["inputs"]).logits, DTensor)


EVERY = tuple(WAYS)
CASES = [
    ("llama", {"dp": 1, "tp": 2}, EVERY if NIGHTLY else ("greedy", "static cache", "no cache", "scores"), True),
    ("t5", {"dp": 1, "tp": 2}, ("sampled", "beams"), True),
    pytest.param("llama", {"dp": 2, "tp": 2}, EVERY, True, marks=pytest.mark.slow),
    pytest.param("gpt2", {"dp": 1, "tp": 2}, EVERY, False, marks=pytest.mark.slow),
    pytest.param("gpt2", {"dp": 2, "tp": 2}, EVERY, False, marks=pytest.mark.slow),
    pytest.param("t5", {"dp": 2, "tp": 2}, EVERY, True, marks=pytest.mark.slow),
    pytest.param("whisper", {"dp": 1, "tp": 2}, EVERY, False, marks=pytest.mark.slow),
    pytest.param("whisper", {"dp": 2, "tp": 2}, EVERY, False, marks=pytest.mark.slow),
    pytest.param("mixtral", {"dp": 1, "tp": 2}, EVERY, False, marks=pytest.mark.slow),
    pytest.param("mixtral", {"dp": 2, "tp": 2}, EVERY, False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "sizes", "ways", "strict"), CASES)
def test_tokens_of_one_device(
    ranks: RankPools, kind: str, sizes: dict[str, int], ways: tuple[str, ...], strict: bool
) -> None:
    """Greedy, sampled, beams; dynamic, static and no cache. In strict mode where plans leave one token whole."""
    ranks.run(compare, kind, sizes, ways, strict, world_size=sizes["dp"] * sizes["tp"])


def local_inputs(ways: tuple[str, ...]) -> None:
    """A plan whose inputs are parts of ranks, in training; prompts are those of all ranks, and may be an odd number."""
    quiet()
    reference, model = build("llama"), build("llama")
    parallelize(model, plan_zoo.load("llama", make_mesh(dp=2, tp=1)).local_inputs(), strict=True)
    prompts, rank = torch.randint(3, 64, (3, 5), generator=torch.Generator().manual_seed(1)), dist.get_rank()
    for way in ways:
        for rows in (3, 2):
            found = []
            for each in (reference, model):
                torch.manual_seed(3)
                found.append(each.generate(prompts[:rows], **NEW, **WAYS[way]))
            assert torch.equal(*found), way
        part = prompts[rank : rank + 1]
        loss, expected = model(part, labels=part).loss, reference(prompts[:2], labels=prompts[:2]).loss
        torch.testing.assert_close(loss.full_tensor(), expected)
    with pytest.raises(InputMismatchError, match=r"in generate\(\).*takes the prompts of all ranks.*gather them first"):
        model.generate(prompts[rank : rank + 1], **NEW, **WAYS["greedy"])


@pytest.mark.parametrize("ways", [("greedy",), pytest.param(tuple(WAYS)[1:5], marks=pytest.mark.slow)])
def test_prompts_of_all_ranks(ranks: RankPools, ways: tuple[str, ...]) -> None:
    """Where the plan has given="local", the method ended in an error about sizes."""
    ranks.run(local_inputs, ways, world_size=2)


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, masks: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.linear(x) * masks["full"] + masks["sliding"]

    def prepare_inputs_for_generation(self) -> None: ...

    def generate(self, x: torch.Tensor, masks: dict[str, torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = self(x, masks=masks)
        return result


def masks_in_two_orders() -> None:
    torch.manual_seed(0)
    model, reference, mesh = _Masked(), _Masked(), make_mesh(tp=2)
    reference.load_state_dict(model.state_dict())
    parallelize(model, Plan(mesh))
    x, masks = torch.ones(2, 4), {"full": torch.ones(4), "sliding": torch.arange(4.0)}
    given = masks if dist.get_rank() else dict(reversed(masks.items()))
    torch.testing.assert_close(model.generate(x, given), reference(x, masks))
    with pytest.raises(InputMismatchError, match=r"in the order.*masks\['sliding'\]"):
        model(x, masks=given)


def test_masks_in_the_order_of_a_set(ranks: RankPools) -> None:
    """transformers makes those of a static cache by kind of layer from a set, whose order differs between processes."""
    ranks.run(masks_in_two_orders, world_size=2)


def static_cache() -> None:
    """Its keys and values are cut over heads as the projections are: a rank holds its part only."""
    quiet()
    model = build("llama")
    parallelize(model, plan_zoo.load("llama", make_mesh(dp=1, tp=2)), strict=True)
    found = model.generate(
        torch.full((2, 4), 5), **NEW, cache_implementation="static", do_sample=False, return_dict_in_generate=True
    )
    keys = found.past_key_values.layers[0].keys
    assert isinstance(keys, DTensor) and keys.shape[1] == 2 and keys.to_local().shape[1] == 1


def test_static_caches_are_sharded(ranks: RankPools) -> None:
    ranks.run(static_cache, world_size=2)
