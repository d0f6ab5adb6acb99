"""Random bits by global index: the helper and its fallback against the reference generator, element by element."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vescale import csrc
from vescale.rng import indexed_bits
from vescale.rng._philox import PhiloxState, philox


@pytest.fixture(params=["native", "fallback"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "fallback":
        monkeypatch.setenv("VESCALE_NO_NATIVE", "1")
    elif csrc.load("philox") is None:
        pytest.skip("the helper is not built")


def one_by_one(seed: int, stream: int, draw: int, runs: list[tuple[int, int]]) -> list[int]:
    found = []
    for start, length in runs:
        for element in range(start, start + length):
            words = philox(PhiloxState(seed, 0), np.int64(stream << 32 | draw), np.int64(element // 8))
            found.append(int(words[element % 8 // 2]) >> (16 * (element % 2)) & 0xFFFF)
    return found


def test_every_element(form: None) -> None:
    runs = [(3, 13), (40, 1), (0, 0), (2**40 + 5, 10), (1000, 24)]
    found = indexed_bits(2**63 + 12345, 2**31 - 1, 2**32 - 1, runs)
    assert found.dtype == torch.uint16
    assert found.tolist() == one_by_one(2**63 + 12345, 2**31 - 1, 2**32 - 1, runs)


def test_parts_are_those_of_the_whole(form: None) -> None:
    whole = indexed_bits(1, 2, 3, [(0, 1000)])
    assert torch.equal(
        torch.cat([indexed_bits(1, 2, 3, [(a, b - a)]) for a, b in ((0, 77), (77, 640), (640, 1000))]), whole
    )
    for other in (
        indexed_bits(2, 2, 3, [(0, 1000)]),
        indexed_bits(1, 3, 3, [(0, 1000)]),
        indexed_bits(1, 2, 4, [(0, 1000)]),
    ):
        assert (other.int() == whole.int()).sum() < 10


def test_they_are_even(form: None) -> None:
    numbers = indexed_bits(0, 0, 1, [(0, 65536)]).double()
    assert abs(float(numbers.mean()) - 32767.5) < 400
    assert abs(float(numbers.std()) - 65536 / 12**0.5) < 400
