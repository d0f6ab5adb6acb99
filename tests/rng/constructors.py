"""Modules whose constructors do what constructors do, and some things that few do."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.device import device_type


class Unusual(nn.Module):
    """Views, partial writes, overwritten draws, ops on draws, factorizations, rejections, ties, values read."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(14, 10) * 0.02)
        self.shifted = nn.Parameter((torch.rand(9, 4) - 0.5).mul_(2.0).add_(torch.arange(4.0)))
        self.overwritten = nn.Parameter(torch.empty(13, 6))
        nn.init.kaiming_uniform_(self.overwritten)
        nn.init.normal_(self.overwritten, std=0.5)
        self.padded = nn.Embedding(11, 6, padding_idx=3)
        self.packed = nn.Parameter(torch.empty(12, 5))
        for index in range(3):
            nn.init.xavier_uniform_(self.packed[4 * index : 4 * index + 4])
        with torch.no_grad():
            self.packed[:, 2].zero_()
            self.packed[3:9, 1:4].mul_(3.0)
            self.packed[5].normal_()
            self.packed[:, 0:3].uniform_(-1, 1)
            self.packed[2:4, 4].copy_(torch.ones(2))
        self.experts = nn.Parameter(torch.empty(4, 6, 8))
        for expert in range(4):
            nn.init.normal_(self.experts[expert], std=expert + 1.0)
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(5, 9)))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(7, 8), 0.4))
        self.eye = nn.Parameter(nn.init.eye_(torch.empty(6, 6)))
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(40, 5), a=-1.0, b=1.0))
        self.rare = nn.Parameter(nn.init.trunc_normal_(torch.empty(6, 5), 0.0, 1.0, 1.5, 2.5))
        self.transposed = nn.Parameter(torch.empty(8, 6).t().normal_())
        self.halves = nn.Parameter(torch.rand(9, 7).to(torch.bfloat16))
        self.doubles = nn.Parameter(torch.randn(5, 5, dtype=torch.float64).log_normal_())
        self.choice = nn.Parameter(torch.bernoulli(torch.full((6, 5), 0.3)))
        self.coins = nn.Parameter(torch.empty(6, 5).bernoulli_(torch.rand(5)))
        self.permuted = nn.Parameter(torch.randperm(9).float())
        self.joined = nn.Parameter(torch.cat([torch.zeros(2, 3), torch.randn(4, 3)]))
        self.exponent = nn.Parameter(torch.exp(torch.rand(7, 3)).clamp(min=1.5))
        self.sorted = nn.Parameter(torch.rand(8, 3).sort(0).values)
        self.nothing = nn.Parameter(torch.randn(0, 4))
        self.scalar = nn.Parameter(torch.randn(()))
        self.literal = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.tied = self.scaled
        self.frozen = nn.Parameter(self.shifted.data, requires_grad=False)
        self.copied = copy.deepcopy(self.padded)
        self.register_buffer("frequencies", 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)))
        self.register_buffer("mask", torch.tril(torch.ones(5, 5, dtype=torch.bool)).view(1, 1, 5, 5))
        self.register_buffer("positions", torch.arange(6).expand(1, -1), persistent=False)
        self.rates = [x.item() for x in torch.linspace(0, 0.1, 4)]
        self.plain = torch.rand(3)
        self.listed = [torch.ones(2), torch.rand(2)]
        self.assigned = nn.Linear(4, 4)
        self.assigned.weight.data = torch.randn(3, 4)
        self.cast = nn.Linear(3, 2).to(torch.bfloat16)
        self.own_generator = nn.Parameter(
            torch.empty(4, 4).normal_(generator=torch.Generator(device_type()).manual_seed(9))
        )


def standard() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 6),
        nn.LayerNorm(6),
        nn.Embedding(10, 6, padding_idx=2),
        nn.Conv2d(3, 4, 3),
        nn.MultiheadAttention(8, 2),
        nn.BatchNorm1d(4),
        nn.LSTM(4, 5, 2),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
        nn.Bilinear(3, 4, 5),
        nn.PReLU(),
    )


__all__ = ["Unusual", "standard"]
