"""How many cases and random examples a test runs: few in the daily run, all in the nightly one (``make test-all``)."""

import os
import random
from collections.abc import Iterable
from typing import Any, TypeVar

__all__ = ["NIGHTLY", "daily_sample", "examples"]

NIGHTLY = bool(os.environ.get("VESCALE_NIGHTLY"))
Case = TypeVar("Case")


def examples(nightly: int) -> int:
    """``nightly`` examples in the nightly run, a tenth of them (20 at least) in the daily one."""
    return nightly if NIGHTLY else min(nightly, max(20, nightly // 10))


def daily_sample(cases: Iterable[Case], share: int = 5) -> list[Case]:
    """All cases in the nightly run; in the daily one, one in ``share`` of those that have the same name (the first string or
    function of a case), drawn with a fixed seed, and at least one of each."""
    listed = list(cases)
    if NIGHTLY:
        return listed
    groups: dict[Any, list[int]] = {}
    for index, case in enumerate(listed):
        parts = case if isinstance(case, tuple) else ()
        names = (part if isinstance(part, str) else getattr(part, "__qualname__", None) for part in parts)
        groups.setdefault(next(filter(None, names), None), []).append(index)
    draw = random.Random(0)
    chosen = [index for group in groups.values() for index in draw.sample(group, -(-len(group) // share))]
    return [listed[index] for index in sorted(chosen)]
