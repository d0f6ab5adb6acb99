"""What modules keep between forwards, and layouts of gradients, where ranks have rows of a batch: equal to one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from tests.ranks import RankPools
from vescale import Plan, init_mesh, parallelize
from vescale.static import report


class Normalized(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.convolution(x)).square().mean()


class Pooled(nn.Module):
    """The gradient of a mean is expanded, and that of attention transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(2)[..., :6]
        return self.attention(x, x, x, need_weights=False)[0].square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: Normalized(nn.BatchNorm2d(4)),
    "instance norm": lambda: Normalized(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    "attention": Pooled,
}


def steps(model: nn.Module) -> list[torch.Tensor]:
    """Losses, gradients and what is kept after three steps; the last batch is uneven."""
    found = []
    for number in range(3):
        model.zero_grad()
        generator = torch.Generator().manual_seed(number)
        loss = model(torch.randn(6 if number < 2 else 5, 3, 5, 5, generator=generator))
        loss.backward()
        found += [loss, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]
    return [x.full_tensor().clone() if hasattr(x, "full_tensor") else x.detach().clone() for x in found]


def equal_to_one_device(modes: list[str]) -> None:
    warnings.simplefilter("ignore")
    mesh = init_mesh("dp=2")
    for name, make in MODELS.items():
        for mode in modes:
            models = []
            for _ in range(2):
                torch.manual_seed(0)
                models.append(make().double())
            torch.set_default_dtype(torch.float64)
            try:
                parallel = parallelize(models[1], Plan(mesh).shard("<in:x>", Shard(0)), mode=mode)
                torch.manual_seed(1)
                wanted = steps(models[0])
                torch.manual_seed(1)
                found = steps(parallel)
            finally:
                torch.set_default_dtype(torch.float32)
            for x, y in zip(wanted, found, strict=True):
                torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-13, msg=f"{name}, {mode}")
            assert mode == "eager" or report(parallel).recordings


@pytest.mark.parametrize("mode", ["eager", pytest.param("static", marks=pytest.mark.helper("dispatch"))])
def test_rows_of_a_batch(ranks: RankPools, mode: str) -> None:
    ranks.run(equal_to_one_device, [mode], world_size=2)
