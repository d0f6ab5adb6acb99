"""Names in profiles, for nothing where nobody profiles."""

from __future__ import annotations

import contextlib
from typing import Any

from torch.autograd import profiler

__all__ = ["profiled"]

_NOTHING = contextlib.nullcontext()


def profiled(name: str) -> contextlib.AbstractContextManager[Any]:
    """``torch.profiler.record_function``, whose two calls of the dispatcher are left out while no profiler runs."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NOTHING
