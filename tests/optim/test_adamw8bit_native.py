"""The C++ helper of AdamW8bit: every width of its vectors has the bits of the PyTorch ops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vescale import csrc
from vescale.optim import AdamW8bit, _adamw8bit_native
from vescale.optim._adamw8bit_update import quantize
from vescale.optim._blocks import Part
from vescale.optim._dynamic_map import dynamic_map


@pytest.fixture(params=[1, 8, 16])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """At most so many elements in a vector; where the processor has fewer, as many as it has."""
    if csrc.load("adamw8bit") is None:
        pytest.skip("compares the C++ helper with the PyTorch ops, and it is not built: there is no compiler")
    monkeypatch.setattr(_adamw8bit_native, "_WIDTH", request.param)
    return int(request.param)


def _near(numbers: torch.Tensor, largest: float) -> torch.Tensor:
    """Blocks of 256 that begin with ``largest``; then ``numbers`` times it, the 13 float32 on each side, their negatives."""
    found = (numbers.double() * largest).float().numpy()
    around = [found]
    for towards in (0.0, np.inf):
        each = found
        for _ in range(13):
            each = np.nextafter(each, np.float32(towards))
            around.append(each)
    every = np.concatenate([*around, *(-each for each in around), np.zeros(1, np.float32)])
    every = every[np.abs(every) <= largest]
    blocks = np.zeros((-(-len(every) // 255), 256), np.float32)
    blocks[:, 0] = largest
    rest = np.zeros(blocks[:, 1:].size, np.float32)
    rest[: len(every)] = every
    blocks[:, 1:] = rest.reshape(-1, 255)
    return torch.from_numpy(blocks.reshape(-1))


# The last ones have no inverse in float32, or a rounded one only.
@pytest.mark.parametrize("largest", [1.0, 0.7, 3.1e-5, 1.3e30, 1.2e-38, 5e-39, 1.5e38, 3e-44, 0.0])
@pytest.mark.parametrize("signed", [True, False])
def test_codes_next_to_their_borders(width: int, signed: bool, largest: float) -> None:
    thresholds = dynamic_map(signed).thresholds
    numbers = torch.cat([thresholds[thresholds > 0], torch.rand(3000), 10 ** (-8 * torch.rand(3000))])
    x = _near(numbers, largest)
    p = torch.nn.Parameter(torch.zeros_like(x))
    # Without a past the first moment is the gradient, and the second one its square, if it decays to nothing.
    optimizer = AdamW8bit([p], betas=(0.0, 0.0), eps=1.0)
    if signed:
        p.grad, expected, key = x, x, "exp_avg"
    else:
        p.grad = x.abs().sqrt()
        expected, key = p.grad * p.grad, "exp_avg_sq"
    optimizer.step()
    codes, maxima = quantize(expected, Part(1, 1, len(x), 1, 256), dynamic_map(signed))
    assert torch.equal(optimizer.state[p][key], codes)
    assert torch.equal(optimizer.state[p][f"{key}_max"], maxima)


def test_steps(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short blocks, numbers that are not finite, codes of all values; the same bits as without the helper."""

    def run() -> list[torch.Tensor]:
        generator, found = torch.Generator().manual_seed(0), []
        for shape, block_size in (((5003,), 256), ((40, 130), 100), ((9, 1024), 1024), ((6000,), 7)):
            p = torch.nn.Parameter(torch.randn(shape, generator=generator))
            optimizer = AdamW8bit([p], lr=1e-2, block_size=block_size)
            for step in range(6):
                p.grad = torch.randn(shape, generator=generator) * 10 ** (-7 * torch.rand(shape, generator=generator))
                if step == 4:
                    p.grad.view(-1)[[3, 2000, 4000]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
                optimizer.step()
                found += [p.detach().clone(), *(value.clone() for value in optimizer.state[p].values())]
        return found

    native = run()
    monkeypatch.setenv("VESCALE_NO_NATIVE", "1")
    for ours, expected in zip(native, run(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
