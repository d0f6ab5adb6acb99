"""A tiny Hugging Face Llama, its plans, and one training step on one device and on a mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device import device_type
from tests.whole import whole_tensors
from vescale import plan_zoo
from vescale.plans import Plan

LAYER = r"model.layers.\d+"


def make_mesh(**sizes: int) -> DeviceMesh:
    return init_device_mesh(device_type(), tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def make_llama(dtype: torch.dtype = torch.float64, **options: Any) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **options})).to(dtype)


def tensor_parallel(mesh: DeviceMesh, *, replicated_kv: bool = False) -> Plan:
    """Megatron's tensor parallelism without sequence and vocabulary; the batch over dp."""
    plan = Plan(mesh)
    for name in ("input_ids", "labels", "attention_mask"):
        plan.shard(f"<in:{name}>", Shard(0), mesh="dp")
    plan.shard(rf"{LAYER}.self_attn.<in:hidden_states>", Replicate(), mesh="tp")
    plan.shard(rf"{LAYER}.self_attn.q_proj.weight", Shard(0), mesh="tp")
    if not replicated_kv:
        plan.shard(rf"{LAYER}.self_attn.(k|v)_proj.weight", Shard(0), mesh="tp")
    plan.shard(rf"{LAYER}.self_attn.o_proj.weight", Shard(1), mesh="tp")
    plan.shard(rf"{LAYER}.self_attn.o_proj.<out>", Replicate(), mesh="tp")
    plan.shard(rf"{LAYER}.mlp.<in>", Replicate(), mesh="tp")
    plan.shard(rf"{LAYER}.mlp.(gate|up)_proj.weight", Shard(0), mesh="tp")
    plan.shard(rf"{LAYER}.mlp.down_proj.weight", Shard(1), mesh="tp")
    plan.shard(rf"{LAYER}.mlp.down_proj.<out>", Replicate(), mesh="tp")
    return plan


def make_plan(name: str, mesh: DeviceMesh) -> Plan:
    """``zoo``: tensor, sequence and vocabulary parallel, the logits of whole tokens; or another end of the same plan."""
    if name == "zoo":
        return plan_zoo.load("llama", mesh)
    if name in ("zoo, gathered logits", "zoo, logits by vocabulary"):
        plan = Plan(mesh)
        for entry in plan_zoo.load("llama", mesh).entries:
            if entry.path.text != "lm_head.<out>":
                plan.add(entry)
        return plan.shard("lm_head.<out>", Replicate(), mesh="tp") if name == "zoo, gathered logits" else plan
    return tensor_parallel(mesh, replicated_kv=name == "tp, replicated kv")


def batch(uneven: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of shape (4, 12); ``uneven``: many more ignored labels in the first half of the batch."""
    ids = torch.randint(64, (4, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    if uneven:
        labels[:2, :7] = -100
        labels[0] = -100
    return ids, labels


def double_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The causal loss in the logits' own precision, outside the model; plain labels, logits as the model gave them."""
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), shifted.reshape(-1))


def worst_gradient(model: torch.nn.Module, reference: torch.nn.Module) -> float:
    """The largest difference of a gradient relative to the largest element, over all parameters; each placed right."""
    worst = 0.0
    gradients: Any = whole_tensors({name: own.grad for name, own in model.named_parameters()})
    for (name, own), (other, expected) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert name == other
        assert isinstance(own.grad, DTensor), name
        assert own.grad.placements == own.placements, (name, own.grad.placements)
        assert expected.grad is not None
        difference = (gradients[name] - expected.grad).abs().max() / expected.grad.abs().max()
        worst = max(worst, difference.item())
    return worst


class CollectiveCounter(TorchDispatchMode):
    """Counts every collective that reaches PyTorch, whoever asks: independent of the ledger."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor first: what it does to the local tensors comes back here
        name = str(func)
        if name.startswith(("c10d.", "_c10d_functional.")) and "wait" not in name:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    with CollectiveCounter() as counter:
        yield counter.counts
