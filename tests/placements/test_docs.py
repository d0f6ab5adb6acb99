"""The code of docs/placements.md does what the page says, on four ranks."""

from __future__ import annotations

import re
from pathlib import Path

from tests.ranks import RankPools

PAGE = Path(__file__).parents[2] / "docs" / "placements.md"


def run_page(blocks: list[str]) -> int:
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    return len(blocks)


def test_the_page_runs(ranks: RankPools) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 8  # which have their values on the CPU
    assert ranks.run(run_page, blocks, world_size=4, device="cpu") == [len(blocks)] * 4
