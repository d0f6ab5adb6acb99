"""Three heads over two ranks.

error: PlanError
says: 3 | heads|divisible|even | 2
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.first_day.start import start
from vescale import parallelize, plan_zoo

mesh = start(dp=1, tp=2)
config = LlamaConfig(vocab_size=64, hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=3)
model = parallelize(LlamaForCausalLM(config), plan_zoo.load("llama", mesh))
model(torch.arange(8).view(1, 8)).logits.sum().backward()
