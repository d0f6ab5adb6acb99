"""How many random examples a test draws: few in the daily run, many in the nightly one (``make test-all``)."""

import os

__all__ = ["NIGHTLY", "examples"]

NIGHTLY = bool(os.environ.get("VESCALE_NIGHTLY"))


def examples(nightly: int) -> int:
    """``nightly`` examples in the nightly run, a sixth of them (25 at least) in the daily one."""
    return nightly if NIGHTLY else min(nightly, max(25, nightly // 6))
