"""Fixtures shared by the whole suite."""

from collections.abc import Iterator

import pytest
import torch

from tests.ranks import RankPools


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """Gloo ranks: ``ranks.run(fn, *args, world_size=4)``."""
    pools = RankPools()
    yield pools
    pools.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
