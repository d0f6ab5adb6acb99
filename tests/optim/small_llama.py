"""A small Llama of Hugging Face, the same in every process."""

from __future__ import annotations

import torch
from torch import nn

from tests.device import device_type


def small_llama(vocab_size: int = 1024) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
    )
    torch.manual_seed(17)
    with torch.device("cpu"):  # with its random numbers: whether losses fall in a few steps depends on them
        made = LlamaForCausalLM(config)
    return made.to(device_type())
