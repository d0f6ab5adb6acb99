"""Small models on the meta device, for plans to be lowered on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["MODELS", "build", "gpt2", "llama"]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 8)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("step", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.fc2(self.fc1(x).relu()) * self.scale
        return hidden if shift is None else hidden + shift


class Stack(nn.Module):
    """Layers in a ModuleList, the first and last sharing one module."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(num_layers))
        self.again = self.layers[0]

    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        x = xs[0]
        for layer in self.layers:
            x = layer(x)
        return self.again(x)


class Attention(nn.Module):
    """torch's own attention, whose output projection is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.LazyLinear(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def llama(num_layers: int = 2, *, tied: bool = False, **changes: Any) -> nn.Module:
    """An unmodified LlamaForCausalLM: 4 heads of 16, 2 key/value heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        **{**sizes, "vocab_size": 128, "num_hidden_layers": num_layers, "tie_word_embeddings": tied, **changes}
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """Weights as (in, out), a packed q, k and v: 3 heads of 16."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(n_embd=48, n_head=3, n_layer=2, n_inner=96, vocab_size=64, n_positions=32))


MODELS = {
    "gpt2": gpt2,
    "mlp": Mlp,
    "stack": Stack,
    "attention": Attention,
    "lazy": Lazy,
    "llama": llama,
    "tied_llama": lambda: llama(tied=True),
    "one_kv_head": lambda: llama(num_key_value_heads=1),
    "three_heads": lambda: llama(hidden_size=48, num_attention_heads=3, num_key_value_heads=3),
}


def build(name: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name]()
