"""Small models with odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fsdp.compare import data

__all__ = ["Adapted", "Block", "Net", "net_loss", "tokens"]


class Block(nn.Module):
    def __init__(self, dim: int, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, **options)
        self.up = nn.Linear(dim, 2 * dim + 1, **options)
        self.down = nn.Linear(2 * dim + 1, dim, bias=False, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Adapted(Block):
    """LoRA: a frozen block with two trainable factors beside its first matrix."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.requires_grad_(False)
        self.a, self.b = nn.Linear(dim, 2, bias=False), nn.Linear(2, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.b(self.a(x))


class Net(nn.Module):
    """Embedding, blocks, head; options for what the tests need."""

    def __init__(
        self,
        dim: int = 7,
        num_blocks: int = 3,
        *,
        block: Callable[[int], nn.Module] = Block,
        tied: bool = False,
        recompute: bool | None = None,
        repeat: int = 1,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, dim)
        self.blocks = nn.ModuleList(block(dim) for _ in range(num_blocks))
        self.head = nn.Linear(dim, 11, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.recompute, self.repeat = recompute, repeat

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for _ in range(self.repeat):
            for block in self.blocks:
                if self.recompute is None or not torch.is_grad_enabled():
                    x = block(x)
                else:
                    x = checkpoint(block, x, use_reentrant=self.recompute)
        return self.head(x)


def tokens(step: int, rank: int, shape: tuple[int, ...] = (2, 5)) -> torch.Tensor:
    return torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def net_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    ids = tokens(step, rank)
    return nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.roll(1).flatten())


def dense_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(data((3, 7), step, rank)).float().square().mean()
