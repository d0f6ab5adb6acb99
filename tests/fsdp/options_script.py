"""A script on PyTorch's FSDP2 with most of its options; the test changes the import of fully_shard, nothing else."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, vocab: int = 29, dim: int = 12) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(vocab, dim), nn.ModuleList(Block(dim) for _ in range(3))
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.temperature

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            ids = torch.cat([ids, self.forward(ids)[:, -1:].argmax(-1)], 1)
        return ids


def train(options: set[str]) -> list[float]:
    world = dist.get_world_size()
    shape, names = ((2, world // 2), ("replicate", "shard")) if "hsdp" in options else ((world,), ("fsdp",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    model = Decoder()
    if "wrapper" in options:
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda module: isinstance(module, Block)
        )
    if "checkpoint" in options:
        for block in model.blocks:
            block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)
    if "compile" in options:
        for block in model.blocks:
            block.compile(backend="eager")
    config: dict[str, Any] = {"mesh": mesh}
    if "bfloat16" in options:
        config["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if "offload" in options:
        config["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if "placement" in options:
        config["shard_placement_fn"] = lambda parameter: Shard(1) if parameter.ndim == 2 else None
    after = {"keep": False, "two": 2}
    reshard: Any = next((value for name, value in after.items() if name in options), True)
    for block in model.blocks:
        fully_shard(block, **config, reshard_after_forward=reshard)
    ignored = {model.temperature} if "ignored" in options else None
    fully_shard(model, **config, ignored_params=ignored)
    register_fsdp_forward_method(model, "generate")
    if "prefetch" in options:
        for first, second in zip(model.blocks, model.blocks[1:]):
            first.set_modules_to_forward_prefetch([second])
            second.set_modules_to_backward_prefetch([first])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    found: list[float] = []
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            if "unshard" in options:
                model.unshard()
            ids = torch.randint(29, (2, 9), generator=data)
            logits = model(ids[:, :-1]).float()
            (nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) / 2).backward()
        if "ignored" in options:
            dist.all_reduce(model.temperature.grad)
        sharded = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
        norm = nn.utils.clip_grad_norm_(sharded, 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        found += [norm.item(), logits.sum().item()]
    model.eval()
    return [*found, *model.generate(torch.tensor([[1, 2]]), 4).flatten().tolist()]
