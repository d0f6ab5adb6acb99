"""Activation checkpointing: what a checkpointed function is wrapped in, so that its recomputation runs like its forward."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint as checkpointing

__all__ = ["install_checkpointing"]

_LOCK = threading.Lock()
_INSTALLED: list[Callable[..., Any]] = []


def install_checkpointing(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have ``wrap(function)`` checkpointed instead of ``function``, both reentrant and not; once in a process.

    ``wrap`` is called when ``torch.utils.checkpoint.checkpoint`` is, and returns ``function`` itself where nothing is to
    be done. The two names behind ``checkpoint`` are replaced, because callers have bound ``checkpoint`` itself.
    """
    with _LOCK:
        if _INSTALLED:
            return
        _INSTALLED.append(wrap)
        original = checkpointing._checkpoint_without_reentrant_generator

        @functools.wraps(original)
        def generator(fn: Any, *args: Any, **kwargs: Any) -> Any:
            return original(wrap(fn), *args, **kwargs)

        checkpointing._checkpoint_without_reentrant_generator = generator
        forward = checkpointing.CheckpointFunction.forward

        @functools.wraps(forward)
        def reentrant(ctx: Any, run_function: Any, *args: Any) -> Any:
            return forward(ctx, wrap(run_function), *args)

        checkpointing.CheckpointFunction.forward = staticmethod(reentrant)  # type: ignore[method-assign]
