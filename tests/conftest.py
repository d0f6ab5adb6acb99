"""Fixtures shared by the whole suite."""

from collections.abc import Iterator

import pytest
import torch

from tests.ranks import RankPools
from vescale import csrc


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """Gloo ranks: ``ranks.run(fn, *args, world_size=4)``."""
    pools = RankPools()
    yield pools
    pools.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(
                pytest.mark.skip(reason="compares with the bits of CUDA's own ops: no CUDA device on this machine")
            )
        for marker in item.iter_markers("helper"):
            name = marker.args[0]
            if csrc.load(name) is None:  # tests/csrc/test_build.py tells whether that is an error
                reason = (
                    f"optional accelerator vescale/csrc/{name}.cpp: not built here, or switched off (VESCALE_NO_NATIVE)"
                )
                item.add_marker(pytest.mark.skip(reason=reason))
