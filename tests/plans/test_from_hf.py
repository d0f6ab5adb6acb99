"""``Plan.from_hf``: every style of transformers, short paths, what cannot be cut, and every model that carries a plan."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tests.plans.tiny_hf import planned_config, planned_configs, tiny_model
from vescale import InterleavedShard, Plan, lower
from vescale.ir import check, coverage
from vescale.plans import HfImportWarning, LocalEntry, PlanError
from vescale.plans._hf_import import STYLES, expressions

MESH = {"dp": 2, "tp": 2}
SAMPLE = [
    "llama:LlamaConfig",
    "qwen3:Qwen3Config",
    "gemma3:Gemma3TextConfig",
    "phi3:Phi3Config",
    "gpt_neox:GPTNeoXConfig",
    "glm4:Glm4Config",
    "mixtral:MixtralConfig",
    "qwen3_moe:Qwen3MoeConfig",
    "deepseek_v3:DeepseekV3Config",
    "llama4:Llama4TextConfig",
    "cohere2:Cohere2Config",
    "longcat_flash:LongcatFlashConfig",
]


def hf(name: str, **settings: Any) -> nn.Module:
    return tiny_model(planned_config(name), meta=True, **settings)


def shards(plan: Plan) -> dict[str, Any]:
    return {e.path.text: dict(e.placements) for e in plan.entries if not isinstance(e, LocalEntry)}


def test_every_style_of_transformers_is_known() -> None:
    from transformers.distributed import expert_parallel, tensor_parallel

    assert expert_parallel.ALL_PARALLEL_STYLES is tensor_parallel.ALL_PARALLEL_STYLES
    assert set(tensor_parallel.ALL_PARALLEL_STYLES.keys()) <= set(STYLES)


def test_llama() -> None:
    plan = Plan.from_hf(hf("llama:LlamaConfig"), MESH)
    layer, r, s0 = r"model.layers.\d+", {"tp": Replicate()}, {"tp": Shard(0)}
    assert shards(plan) == {
        "model.embed_tokens.weight": s0,
        "model.embed_tokens.<out>": r,
        rf"{layer}.self_attn.(q|k|v)_proj.weight": s0,
        rf"{layer}.self_attn.(q|k|v)_proj.<in>": r,
        rf"{layer}.self_attn.o_proj.weight": {"tp": Shard(1)},
        rf"{layer}.self_attn.o_proj.<in>": {"tp": Shard(-1)},
        rf"{layer}.self_attn.o_proj.<out>": r,
        rf"{layer}.mlp.(gate|up)_proj.weight": s0,
        rf"{layer}.mlp.(gate|up)_proj.<in>": r,
        rf"{layer}.mlp.down_proj.weight": {"tp": Shard(1)},
        rf"{layer}.mlp.down_proj.<in>": {"tp": Shard(-1)},
        rf"{layer}.mlp.down_proj.<out>": r,
        "lm_head.weight": s0,
        "lm_head.<in>": r,
        "lm_head.<out>": r,
        **{f"<in:{name}>": {"dp": Shard(0)} for name in ("input_ids", "inputs_embeds", "labels")},
    }


def test_axes_are_chosen() -> None:
    plan = Plan.from_hf(hf("llama:LlamaConfig"), {"a": 2, "b": 2}, axis="b", batch_axis="a")
    assert {axis for placements in shards(plan).values() for axis in placements} == {"a", "b"}
    assert "<in:input_ids>" not in shards(Plan.from_hf(hf("llama:LlamaConfig"), {"tp": 2}))
    with pytest.raises(PlanError, match=r"no axis 'tpp' \(axes: dp, tp\); did you mean 'tp'"):
        Plan.from_hf(hf("llama:LlamaConfig"), MESH, "tpp")


def test_biases_follow_their_weights() -> None:
    found = shards(Plan.from_hf(hf("llama:LlamaConfig", attention_bias=True), {"tp": 2}))
    assert found[r"model.layers.\d+.self_attn.(q|k|v)_proj.(weight|bias)"] == {"tp": Shard(0)}
    assert r"model.layers.\d+.self_attn.o_proj.weight" in found  # its bias stays whole


def test_fewer_key_value_heads_than_ranks() -> None:
    model = hf("llama:LlamaConfig", num_key_value_heads=1)
    with pytest.warns(HfImportWarning, match=r"k_proj.weight is replicated: 2 ranks do not divide its 1 heads"):
        plan = Plan.from_hf(model, {"tp": 2})
    assert r"model.layers.\d+.self_attn.q_proj.weight" in shards(plan)
    assert not any("k_proj" in path or "k|" in path for path in shards(plan))
    lower(plan, model)


def test_sizes_that_do_not_divide() -> None:
    model = hf("llama:LlamaConfig", intermediate_size=49, vocab_size=65)
    with pytest.warns(HfImportWarning, match=r"lm_head.weight is replicated: 2 ranks do not divide its dim 0 of 65"):
        plan = Plan.from_hf(model, {"tp": 2})
    assert not any("mlp" in path or "lm_head" in path for path in shards(plan))
    lower(plan, model)


def test_tied_weights_lie_alike() -> None:
    model = hf("llama:LlamaConfig", tie_word_embeddings=True)
    model.tie_weights()
    found = shards(Plan.from_hf(model, {"tp": 2}))
    assert found["model.embed_tokens.weight"] == {"tp": Shard(0)} and "lm_head.weight" not in found
    assert found["lm_head.<in>"] == found["lm_head.<out>"] == {"tp": Replicate()}


def test_experts_by_features_and_by_expert() -> None:
    model = hf("mixtral:MixtralConfig")
    plan = Plan.from_hf(model, {"tp": 2})
    (region,) = [entry for entry in plan.entries if isinstance(entry, LocalEntry)]
    experts = r"model.layers.\d+.mlp.experts"
    assert (region.path.text, region.kind, region.dispatch) == (experts, "experts", None)
    assert shards(plan)[f"{experts}.gate_up_proj"] == {"tp": InterleavedShard(1, 2)}
    assert shards(plan)[f"{experts}.down_proj"] == {"tp": Shard(2)}
    spread = Plan.from_hf(model, MESH, expert_axis="tp", batch_axis=None)
    (region,) = [entry for entry in spread.entries if isinstance(entry, LocalEntry)]
    assert (region.kind, region.dispatch) == ("experts", "mask")
    assert shards(spread)[f"{experts}.(gate_up_proj|down_proj)"] == {"tp": Shard(0)}
    assert not any("Interleaved" in str(placements) for placements in shards(spread).values())


def test_a_plan_that_cuts_packed_experts_in_two_is_mended() -> None:
    """Inkling's cuts gate from up: the first rank would take all gates, the second all ups."""
    with pytest.warns(HfImportWarning, match=r"gate_up_proj holds gate and up"):
        plan = Plan.from_hf(hf("inkling:InklingTextConfig"), {"tp": 2})
    assert shards(plan)[r"model.layers.\d+.mlp.experts.gate_up_proj"] == {"tp": InterleavedShard(1, 2)}


def test_experts_that_every_rank_adds_stay_whole() -> None:
    with pytest.warns(HfImportWarning, match=r"experts is replicated"):
        plan = Plan.from_hf(hf("longcat_flash:LongcatFlashConfig"), {"tp": 2})
    assert not any(".experts." in path and "<" not in path for path in shards(plan))


def test_layers_that_differ_are_told_apart() -> None:
    every = [f"layers.{i}.{name}" for i in range(4) for name in ("q_proj", "k_proj", "mlp")]
    assert expressions(every[:0], every) == []
    assert expressions([n for n in every if "proj" in n], every) == [r"layers.\d+.(q|k)_proj"]
    assert expressions(["layers.1.mlp", "layers.3.mlp"], every) == [r"layers.(1|3).mlp"]
    grid = [f"a.{i}.b.{j}" for i in range(2) for j in range(2)]
    assert expressions(["a.0.b.0", "a.1.b.1"], grid) == [r"a.0.b.0", "a.1.b.1"]
    assert expressions(["a.0.b.1", "a.1.b.1"], grid) == [r"a.\d+.b.1"]
    assert expressions([""], ["", "x"]) == [""]


def test_experts_and_norms_that_the_plan_leaves_out() -> None:
    """Muse Spark's tensor-parallel plan does not name its experts, nor the norm inside of its embedding."""
    plan = Plan.from_hf(hf("muse_spark:MuseSparkTextConfig"), {"tp": 2})
    (region,) = [entry for entry in plan.entries if isinstance(entry, LocalEntry)]
    assert (region.path.text, region.kind, region.dispatch) == (r"layers.\d+.mlp.experts", "experts", None)
    found = shards(plan)
    assert found["embed_tokens.embed_norm.<in>"] == {"tp": Replicate()}
    assert not any("experts." in path for path in found)


class Plain(nn.Linear):
    pass


def test_models_without_a_plan() -> None:
    with pytest.raises(PlanError, match="Plain carries no tp_plan"):
        Plan.from_hf(Plain(2, 2), {"tp": 2})
    model: Any = Plain(2, 2)
    model.tp_plan = {"": "colwise_packt"}
    with pytest.raises(PlanError, match=r"style 'colwise_packt', which this version of vescale does not support"):
        Plan.from_hf(model, {"tp": 2})
    model.tp_plan = {"weight": "colwise"}
    assert shards(Plan.from_hf(model, {"tp": 2})) == {"weight": {"tp": Shard(0)}}


def test_sequence_parallel_is_derived() -> None:
    plan = shards(Plan.from_hf(hf("llama:LlamaConfig"), {"tp": 2}, sequence_parallel=True))
    sequence, layer = {"tp": Shard(1)}, r"model.layers.\d+"
    for path in ("model.embed_tokens.<out>", rf"{layer}.self_attn.o_proj.<out>", rf"{layer}.mlp.down_proj.<out>"):
        assert plan[path] == sequence
    assert plan["(lm_head|model).<out>"] == {"tp": Replicate()} and "lm_head.<in>" not in plan
    mixture = shards(Plan.from_hf(hf("mixtral:MixtralConfig"), {"tp": 2}, sequence_parallel=True))
    assert mixture[rf"{layer}.mlp.<out>"] == sequence and mixture[rf"{layer}.mlp.<in>"] == {"tp": Replicate()}
    assert not any("experts.<" in path for path in mixture)  # summed once, where the block ends


def test_coverage() -> None:
    model = hf("llama:LlamaConfig")
    found = coverage(Plan.from_hf(model, {"tp": 2}), model)
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert found.parameters == 1 - norms / sum(p.numel() for p in model.parameters())
    assert dict(found.whole) == {
        "model.layers.0-1.input_layernorm.weight": 64,
        "model.layers.0-1.post_attention_layernorm.weight": 64,
        "model.norm.weight": 32,
    }
    assert found.activations == (1 + 2 * 7 + 1) / (1 + 2 * 9 + 1 + 1)  # not the norms
    nothing = coverage(Plan({"tp": 2}), model)
    assert (nothing.parameters, nothing.activations) == (0.0, 0.0)
    mixture = hf("mixtral:MixtralConfig")
    assert coverage(Plan.from_hf(mixture, {"tp": 2}), mixture).parameters > 0.95


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vescale.cli import main

    file = tmp_path / "config.json"
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    file.write_text(json.dumps({"model_type": "llama", "num_key_value_heads": 1, **sizes}))
    assert main(["zoo", "import", f"hf:{file}", "--mesh", "dp=2,tp=2", "--sequence-parallel"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# LlamaForCausalLM: ") and "of the parameters are sharded" in text and "1 heads" in text
    plan = Plan.from_yaml(text)
    assert shards(plan)[r"model.layers.\d+.mlp.down_proj.<out>"] == {"tp": Shard(1)}
    assert main(["zoo", "import", f"hf:{file}", "--json"]) == 0
    assert Plan.from_yaml(json.loads(capsys.readouterr().out)["yaml"]).axes.names == ("dp", "tp")
    assert main(["zoo", "import", str(tmp_path), "--json"]) == 0
    assert main(["zoo", "import", str(tmp_path / "none.json")]) == 2
    assert main(["zoo", "import", f"hf:{file}", "--mesh", "dp=2"]) == 2


def imported(name: str) -> str:
    """ "" when the plan of the model lowers, lints and survives YAML; else what is wrong."""
    model = hf(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HfImportWarning)
        plan = Plan.from_hf(model, MESH)
    lower(plan, model)
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert all(parameter.device == torch.device("meta") for parameter in model.parameters())
    return "; ".join(str(finding) for finding in check(plan, model) if "axis 'dp'" not in str(finding))


@pytest.mark.parametrize("name", SAMPLE)
def test_imported_plans_lower_and_lint(name: str) -> None:
    assert imported(name) == ""


@pytest.mark.slow
def test_every_model_with_a_plan() -> None:
    """At least 130 of the 146 configuration classes; the others' tiny configurations do not build."""
    wrong = {}
    for name in planned_configs():
        try:
            findings = imported(name)
        except Exception as error:
            findings = f"{type(error).__name__}: {str(error)[:200]}"
        if findings:
            wrong[name] = findings
    assert len(planned_configs()) >= 146
    assert len(planned_configs()) - len(wrong) >= 130, wrong
