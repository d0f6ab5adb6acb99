"""Packed dims are found in models whatever their modules are called, and plans that cut them as one are warned of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tests.ranks import RankPools, run_cases
from tests.runtime.compare import assert_same_step, pair
from vescale import plan_zoo
from vescale.ir import check, packed_dims
from vescale.placements import InterleavedShard
from vescale.plans import Plan

PACKED = ["reshape and unbind", "view and index", "split", "slices", "view and iterate"]
BY_HEADS = ["heads first", "parts of a head"]


class Mixer(nn.Module):
    """Attention on one fused projection, taken apart in the ways that models do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.mix, self.back = how, nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        y = self.mix(x)
        parts: Any
        if self.how == "reshape and unbind":
            parts = y.reshape(rows, length, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        elif self.how == "view and index":
            seen = y.view(rows, length, 3, 4, 4)
            parts = (seen[:, :, i].transpose(1, 2) for i in range(3))
        elif self.how == "view and iterate":
            parts = y.view(rows, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
        elif self.how == "heads first":
            parts = y.view(rows, length, 4, 3, 4).permute(3, 0, 2, 1, 4)
        elif self.how == "parts of a head":
            parts = y.view(rows, length, 4, 12).transpose(1, 2).chunk(3, dim=-1)
        else:
            pieces: Any = y.split([16, 16, 16], dim=-1)
            if self.how == "slices":
                pieces = (y[..., 16 * i : 16 * (i + 1)] for i in range(3))
            parts = (piece.view(rows, length, 4, 4).transpose(1, 2) for piece in pieces)
        query, key, value = parts
        met = F.scaled_dot_product_attention(query, key, value)
        return self.back(met.transpose(1, 2).reshape(rows, length, 16))


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mixer(how) for _ in range(2)])
        self.both, self.down = nn.Linear(16, 64), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def on_meta(how: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        return Net(how), {"x": torch.empty(2, 5, 16)}


def entries(plan: Plan, mixed: Any, gated: Any) -> None:
    for path, cut in ((r"layers.\d+.mix", mixed), ("both", gated)):
        plan.shard(f"{path}.(weight|bias)", cut, mesh="tp")
        plan.shard(f"{path}.<in>", Replicate(), mesh="tp")
    for path in (r"layers.\d+.back", "down"):
        plan.shard(f"{path}.weight", Shard(1), mesh="tp")
        plan.shard(f"{path}.<out>", Replicate(), mesh="tp")


def packed_findings(plan: Plan, how: str) -> list[Any]:
    return [f for f in check(plan, *on_meta(how)) if f.rule == "packed"]


@pytest.mark.parametrize("how", [*PACKED, *BY_HEADS])
def test_plain_cuts_of_packed_dims_are_warned_of(how: str) -> None:
    plan = Plan({"tp": 2})
    entries(plan, Shard(0), Shard(0))
    found = {f.names: f.problem for f in packed_findings(plan, how)}
    fused = {name: problem for name, problem in found.items() if "layers.0.mix.weight" in name}
    assert bool(fused) == (how in PACKED)
    assert all(r"write 'layers.\d+.mix.(weight|bias)': {tp: Interleaved(0, 3)}" in text for text in fused.values()), (
        fused
    )
    assert found[("both.weight", "both.bias")].count("write 'both.(weight|bias)': {tp: Interleaved(0, 2)}") == 1


@pytest.mark.parametrize("how", [*PACKED, *BY_HEADS])
def test_what_the_warning_says_to_write(how: str) -> None:
    plan = Plan({"tp": 2})
    entries(plan, InterleavedShard(0, 3) if how in PACKED else Shard(0), InterleavedShard(0, 2))
    assert packed_findings(plan, how) == []
    gathered = Plan({"tp": 2})
    entries(gathered, Shard(0), Shard(0))
    for path in (r"layers.\d+.mix", "both"):
        gathered.shard(f"{path}.<out>", Replicate(), mesh="tp")
    assert packed_findings(gathered, how) == []


def run(how: str) -> None:
    cut = InterleavedShard(0, 3) if how in PACKED else Shard(0)
    reference, model = pair(lambda: Net(how), lambda plan: entries(plan, cut, InterleavedShard(0, 2)), {"tp": 2})
    assert_same_step(reference, model, torch.randn(2, 5, 16, dtype=torch.float64))


def every() -> int:
    return run_cases(run, [(how,) for how in (*PACKED, *BY_HEADS)])


def test_it_runs_without_other_communication(ranks: RankPools) -> None:
    """In strict mode, on gradients too."""
    assert set(ranks.run(every, world_size=2)) == {len(PACKED) + len(BY_HEADS)}


def tokens() -> dict[str, Any]:
    return {"input_ids": torch.zeros(2, 5, dtype=torch.long, device="meta"), "use_cache": False}


def hf(name: str, **sizes: Any) -> nn.Module:
    import transformers

    with torch.device("meta"):
        return getattr(transformers, name[0])(getattr(transformers, name[1])(vocab_size=64, **sizes))


def test_models_of_transformers() -> None:
    gpt2 = hf(("GPT2LMHeadModel", "GPT2Config"), n_layer=2, n_embd=32, n_head=4)
    assert [f for f in check(plan_zoo.load("gpt2", {"dp": 1, "tp": 2}), gpt2, tokens()) if f.rule == "packed"] == []
    plan = Plan({"tp": 2}).shard(r"transformer.h.\d+.attn.c_attn.weight", Shard(1), mesh="tp")
    (found,) = [f for f in check(plan, gpt2, tokens()) if f.rule == "packed"]
    assert "{tp: Interleaved(1, 3)}" in found.problem and "transformer.h.0-1.attn.c_attn.weight" in found.problem
    sizes: dict[str, Any] = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    phi = packed_dims(hf(("Phi3ForCausalLM", "Phi3Config"), pad_token_id=0, **sizes), tokens())
    assert {(p.name.rpartition("0.")[2], p.num_parts) for p in phi} == {
        ("self_attn.qkv_proj.weight", 3),
        ("mlp.gate_up_proj.weight", 2),
    }
    for name in (("LlamaForCausalLM", "LlamaConfig"), ("GPTNeoXForCausalLM", "GPTNeoXConfig")):
        assert packed_dims(hf(name, **sizes), tokens()) == ()


def test_parts_of_different_sizes() -> None:
    fewer = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = hf(("Phi3ForCausalLM", "Phi3Config"), pad_token_id=0, intermediate_size=64, **fewer)
    plan = Plan({"tp": 2}).shard(r".*qkv_proj.weight", Shard(0), mesh="tp")
    (found,) = [f for f in check(plan, model, tokens()) if f.rule == "packed"]
    assert "into unequal parts" in found.problem and "write {tp: R}" in found.problem
