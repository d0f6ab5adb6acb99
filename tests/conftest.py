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
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        for marker in item.iter_markers("helper"):
            name = marker.args[0]
            if csrc.load(name) is None:  # tests/csrc/test_build.py tells whether that is an error
                reason = f"optional accelerator vescale/csrc/{name}.cpp: no C++ compiler when vescale was installed"
                item.add_marker(pytest.mark.skip(reason=reason))
