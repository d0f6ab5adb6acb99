"""Attention by the math kernel while a forward is traced: the others hide what they compute from the trace."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["math_attention"]

_LOCK = threading.Lock()
_SCOPE = contextlib.ExitStack()
_inside = 0


@contextlib.contextmanager
def math_attention() -> Iterator[None]:
    """``sdpa_kernel(SDPBackend.MATH)`` for threads that may overlap, as simulated ranks do.

    The choice of kernels belongs to the process. The first thread that enters changes it, and the last one that leaves
    restores it; with a scope for each thread, one would restore what another had set, and all later attention of the process
    would run with the math kernel.
    """
    global _inside
    with _LOCK:
        if _inside == 0:
            _SCOPE.enter_context(sdpa_kernel(SDPBackend.MATH))
        _inside += 1
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if _inside == 0:
                _SCOPE.close()
