"""Estimates against real ranks: bytes at rest are equal, and the peak is that of PyTorch's allocator."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.estimation.measure import CASES, build_counting_allocator, estimated, measured
from tests.ranks import RankPools


@pytest.fixture(scope="session")
def allocator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_counting_allocator(tmp_path_factory.mktemp("allocator"))


@pytest.mark.parametrize("name", CASES)
def test_bytes_of_a_step(ranks: RankPools, allocator: Path, name: str) -> None:
    case = CASES[name]
    found = ranks.run(measured, case, allocator, world_size=case.num_ranks)
    loads = [sum(counts) for counts in zip(*(one.loads for one in found))]
    for rank, measured_bytes in enumerate(found):
        # Ranks of experts get different numbers of tokens: each is estimated with its own.
        estimate = estimated(case, load=loads or 1.0, rank=rank if loads else None)
        (own,) = (r for r in estimate.ranks if rank in r.ranks)
        assert own.maximum["parameters"] == measured_bytes.parameters
        assert own.maximum["gradients"] == measured_bytes.gradients
        assert own.maximum["optimizer"] == measured_bytes.optimizer
        error = (own.peak_bytes - measured_bytes.peak) / measured_bytes.peak
        assert abs(error) <= 0.01, f"rank {rank}: {error:+.2%}, {own.peak_at}, {own.categories}"
