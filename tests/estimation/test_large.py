"""What one host could not hold or run: attention of a GPU, buffers larger than the host's memory, ten thousand ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from benchmarks import scale_study
from vescale import Plan, RaggedShard, plan_zoo
from vescale.estimation import estimate


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 4 * (16 + 16 + 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inner(x).split((64, 64, 32), -1)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_gpus_have_kernels_for_attention() -> None:
    """A host keeps a matrix of queries and keys, where values have fewer numbers; a GPU keeps a number for each query."""
    length, plan = 512, Plan({"dp": 2}).shard("<in:x>", Shard(0), mesh="dp")
    given = {"batch": {"x": (4, length, 32)}, "steps": 2, "optimizer": "sgd"}
    found = {device: estimate(Attention(), plan, device=device, **given) for device in ("cpu", "h100-80g")}
    matrix = 2 * 4 * length * length * 4
    rows = 2 * 4 * length * (16 + 16 + 2 * 8) * 4  # query, key, value, result
    assert found["cpu"].peak.maximum["activations"] > matrix
    assert rows <= found["h100-80g"].peak.maximum["activations"] < 2.2 * rows < matrix
    assert found["h100-80g"].time.compute > 0


def test_buffers_larger_than_the_host() -> None:
    """A unit of half a TiB is gathered and freed."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 20, 1 << 17, bias=False), nn.Linear(1 << 17, 8, bias=False))
    plan = Plan({"dp": 4}).shard("<in:input>", Shard(0), mesh="dp")
    plan.shard(".*", RaggedShard(), mesh="dp", phase="init").shard(".*", Replicate(), mesh="dp", phase="run")
    plan.unit("0").unit("")
    found = estimate(model, plan, batch={"input": (8, 1 << 20)}, optimizer="sgd", steps=2)
    whole = (1 << 37) * 4
    assert found.peak.maximum["parameters"] == whole // 4 + (1 << 17) * 8
    assert whole <= found.peak.maximum["unsharded"] < 1.1 * whole
    assert {"forward", "backward"} <= {moment["at"].split()[0] for moment in found.peak.timeline}
    assert found.peak.timeline[-1]["unsharded"] == 0, "freed at the end"


def test_ten_thousand_ranks() -> None:
    """Every rank is in one of the few kinds; what they need is what 16 ranks with the same parts need."""
    import transformers

    sizes = {
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "n_group": 2,
    }
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 16, "kv_lora_rank": 16}
    parts = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "moe_intermediate_size": 16}
    experts = {"n_routed_experts": 16, "num_experts_per_tok": 2, "topk_group": 1, "vocab_size": 128}
    config = transformers.DeepseekV3Config(**sizes, **heads, **parts, **experts)
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(config)
    found = {}
    for dp in (2, 1280):
        plan = plan_zoo.load("deepseek_v3", {"dp": dp, "tp": 8})
        found[dp] = estimate(model, plan, batch={"input_ids": (dp, 32)}, steps=1, device="h100-80g")
        assert sorted(rank for one in found[dp].ranks for rank in one.ranks) == list(range(8 * dp))
    for name in ("parameters", "gradients", "optimizer", "activations"):
        assert found[1280].peak.maximum[name] == found[2].peak.maximum[name], name


def test_a_row_of_the_scale_study() -> None:
    """Of `docs/internals/scale.md`, whose table is the benchmark's."""
    cells = scale_study.row("Llama-3-405B, HSDP over 64 (x tp 8)", 1024)
    assert cells[1:3] == ("1,024", "45.4") and cells[6] == "2.6"
