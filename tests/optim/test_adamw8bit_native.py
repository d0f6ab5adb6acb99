"""The C++ helper of AdamW8bit: every width of its vectors has the bits of the PyTorch ops."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest
import torch

from vescale import csrc
from vescale.errors import OptimizerError
from vescale.optim import AdamW8bit, _adamw8bit_update
from vescale.optim._adamw8bit_update import dynamic_map, quantize
from vescale.optim._blocks import Part


@pytest.fixture(params=[1, 8, 16])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """At most so many elements in a vector; where the processor has fewer, as many as it has."""
    if csrc.load("adamw8bit") is None:
        pytest.skip("compares the C++ helper with the PyTorch ops, and it is not built: there is no compiler")
    monkeypatch.setattr(_adamw8bit_update, "_WIDTH", request.param)
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


CHANGES: list[dict[str, object]] = [
    {"block_size": 64},
    {"block_size": 4096},
    {"block": (2, 8)},
    {"min_numel": 10**9},
    {"min_numel": 1},
    {"state_dtype": "float32"},
    {"state_dtype": "bfloat16"},
    {"state_dtype": "uint8", "min_numel": 0},
    {"block_size": 100, "min_numel": 1, "state_dtype": "uint8"},
]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("start", [{}, {"state_dtype": "bfloat16"}, {"min_numel": 10**9}, {"block": (4, 16)}])
def test_options_of_states_that_change_between_steps(
    native: bool, start: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """States that stay what they are, or an error that names the options, and nothing written."""
    if not native:
        monkeypatch.setenv("VESCALE_NO_NATIVE", "1")
    for change in CHANGES:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((64, 80), (5003,), (30,))]
        optimizer = AdamW8bit(params, **start)  # type: ignore[arg-type]
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        optimizer.param_groups[0].update(change)
        before = [p.detach().clone() for p in params]
        states = [{k: v.clone() for k, v in optimizer.state[p].items() if k != "step"} for p in params]
        try:
            optimizer.step()
        except OptimizerError as error:
            assert "block_size, block, min_numel, state_dtype" in str(error)
            assert all(torch.equal(p, old) for p, old in zip(params, before)), change
            for p, old in zip(params, states):
                assert all(torch.equal(optimizer.state[p][k], v) for k, v in old.items()), change
        else:
            wanted = [AdamW8bit([torch.nn.Parameter(p.clone())], **{**start, **change}).state for p in params]  # type: ignore[arg-type]
            for p, state in zip(params, wanted):
                (made,) = state.values()
                assert {k: (v.shape, v.dtype) for k, v in made.items()} == {
                    k: (v.shape, v.dtype) for k, v in optimizer.state[p].items()
                }, change


def test_sizes_are_checked_in_cpp(width: int) -> None:
    """Items whose tensors are too small, at random, among sound ones: which one, and no write behind any of them."""
    draw = random.Random(0)
    for _ in range(300):
        rows, kinds, memory = [], draw.choice([0, 1, 2]), []
        guard = 64
        bad = None
        for index in range(draw.randint(1, 4)):
            matrices, height, columns = draw.randint(1, 3), draw.randint(1, 40), draw.randint(1, 70)
            block = draw.choice([(1, 16), (1, 256), (4, 8), (3, 64)])
            numel = matrices * height * columns
            maxima = matrices * -(-height // block[0]) * -(-columns // block[1])
            less = draw.choice([0, 0, 0, 1, numel])
            fewer = draw.choice([0, 0, 0, 1, maxima]) if kinds == 2 else 0
            if (less or fewer) and bad is None:
                bad = index
            dtypes = [torch.float32, torch.float32, *[(torch.float32, torch.bfloat16, torch.uint8)[kinds]] * 2]
            tensors = [torch.full((numel - less + guard,), 7, dtype=dtype) for dtype in dtypes]
            tensors += [torch.full((maxima - fewer + guard,), 7.0) for _ in range(2)]
            memory.append((tensors, [numel - less] * 4 + [maxima - fewer] * 2))
            pointers = [t.data_ptr() for t in tensors] + [0, 0]
            sizes = (matrices, height, columns, *block, numel - less, maxima - fewer)
            rows.append((*pointers, *sizes, 0, 0, kinds, 0, 0.1, 0.9, 0.1, 1.0, 0.1, 1.0, 1e-8, 0.0))
        items = np.array(rows, dtype=_adamw8bit_update._ITEM)
        library = _adamw8bit_update._library()
        assert library is not None
        maps = _adamw8bit_update._maps().ctypes.data
        done = library.adamw8bit_step(
            ctypes.c_void_p(items.ctypes.data),
            ctypes.c_int64(len(items)),
            ctypes.c_void_p(maps),
            ctypes.c_int32(2),
            ctypes.c_int32(width),
        )
        assert done == (len(items) if bad is None else bad)
        for tensors, sizes_of in memory:
            for t, size in zip(tensors, sizes_of):
                assert bool((t[size:] == 7).all()), "written behind the end"
                assert bad is None or bool((t == 7).all()), "written though an item is not sound"
