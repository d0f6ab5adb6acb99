"""Skipping words of mt19937 against really drawing them, with the C++ helper and without."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from vescale.rng import _mt19937 as _mt19937_jump
from vescale.rng._mt19937 import Mt19937State


@pytest.fixture(params=[pytest.param("native", marks=pytest.mark.helper("mt19937")), "numpy"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "numpy":
        monkeypatch.setenv("VESCALE_NO_NATIVE", "1")
    yield request.param


def seeded(seed: int, drawn: int) -> torch.Generator:
    generator = torch.Generator().manual_seed(seed)
    if drawn:
        torch.empty(drawn, dtype=torch.uint8).random_(generator=generator)  # one word each
    return generator


@pytest.mark.parametrize("drawn", [0, 1, 7, 623, 624, 625])
def test_skip_gives_the_bytes_of_drawing(path: str, drawn: int) -> None:
    for seed in (0, 1, 2**63):
        start = seeded(seed, drawn)
        state = Mt19937State.of(start)
        for count in (0, 1, 2, 622, 623, 624, 625, 1248, 100_003):
            generator = torch.Generator()
            generator.set_state(start.get_state())
            if count:
                torch.empty(count, dtype=torch.uint8).random_(generator=generator)
            assert state.skip(count).raw == generator.get_state().numpy().tobytes(), (seed, drawn, count)


def test_polynomial_jump_equals_computing_every_block(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = Mt19937State.of(seeded(3, 0)).block  # as seeded: 31 bits of its first word are outside the recurrence
    for num_blocks in (1, 2, 31, 32, 33, 34, 5_000, 65_537):
        monkeypatch.setattr(_mt19937_jump, "_JUMP_FROM_NATIVE", 10**9)
        monkeypatch.setattr(_mt19937_jump, "_JUMP_FROM_NUMPY", 10**9)
        walked = _mt19937_jump.advance_blocks(block, num_blocks)
        monkeypatch.setattr(_mt19937_jump, "_JUMP_FROM_NATIVE", 0)
        monkeypatch.setattr(_mt19937_jump, "_JUMP_FROM_NUMPY", 0)
        assert np.array_equal(walked, _mt19937_jump.advance_blocks(block, num_blocks)), num_blocks


def test_far_jumps_compose(path: str) -> None:
    block = Mt19937State.of(seeded(4, 10)).block
    near, far = 2**33 + 12_345, 2**41 + 777
    there = _mt19937_jump.advance_blocks(_mt19937_jump.advance_blocks(block, near), far)
    assert np.array_equal(there, _mt19937_jump.advance_blocks(block, near + far))
    assert not np.array_equal(there, _mt19937_jump.advance_blocks(block, near + far + 1))


@pytest.mark.helper("mt19937")
def test_both_paths_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Mt19937State.of(seeded(5, 1)).block
    for num_blocks in (1, 500, 50_000, 10**9, 2**53):
        native = _mt19937_jump.advance_blocks(block, num_blocks)
        monkeypatch.setenv("VESCALE_NO_NATIVE", "1")
        assert np.array_equal(native, _mt19937_jump.advance_blocks(block, num_blocks)), num_blocks
        monkeypatch.delenv("VESCALE_NO_NATIVE")


def test_words_of_the_stream_obey_the_characteristic_polynomial() -> None:
    block = _mt19937_jump._following_block(Mt19937State.of(seeded(6, 0)).block)
    blocks = [block]
    for _ in range(34):
        blocks.append(_mt19937_jump._following_block(blocks[-1]))
    words = np.concatenate(blocks)
    exponents = [19937, *_mt19937_jump.characteristic_exponents()]
    for offset in range(0, 600, 37):
        assert np.bitwise_xor.reduce(words[[offset + e for e in exponents]]) == 0


def test_skip_keeps_a_waiting_normal() -> None:
    generator = seeded(7, 3)
    torch.empty(1).normal_(generator=generator)
    state = Mt19937State.of(generator)
    assert state.normal_waits and state.skip(1000).normal_waits
    torch.empty(1000, dtype=torch.uint8).random_(generator=generator)
    assert state.skip(1000).raw == generator.get_state().numpy().tobytes()
    cleared = torch.Generator()
    state.without_waiting_normal().write_to(cleared)
    assert not Mt19937State.of(cleared).normal_waits


def test_another_state_size_is_refused() -> None:
    with pytest.raises(ValueError, match="5056"):
        Mt19937State.parse(b"\0" * 16)
