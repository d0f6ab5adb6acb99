"""Activation checkpointing: what a checkpointed function is wrapped in, so that its recomputation runs like its forward."""

from __future__ import annotations

import functools
from typing import Any

import torch.utils.checkpoint as checkpointing

from vescale.compat.patching import Changes

__all__ = ["wrap_checkpointed_functions"]


def wrap_checkpointed_functions(changes: Changes, hooks: Any) -> None:
    """Have ``hooks.checkpointed(function)`` checkpointed instead of ``function``, both reentrant and not.

    It is called when ``torch.utils.checkpoint.checkpoint`` is, and returns ``function`` itself where nothing is to be done.
    The two names behind ``checkpoint`` are replaced, because callers have bound ``checkpoint`` itself.
    """
    original = checkpointing._checkpoint_without_reentrant_generator
    forward = checkpointing.CheckpointFunction.forward

    @functools.wraps(original)
    def generator(fn: Any, *args: Any, **kwargs: Any) -> Any:
        return original(hooks.checkpointed(fn), *args, **kwargs)

    @functools.wraps(forward)
    def reentrant(ctx: Any, run_function: Any, *args: Any) -> Any:
        return forward(ctx, hooks.checkpointed(run_function), *args)

    changes.function(original, generator)
    changes.attribute(checkpointing.CheckpointFunction, "forward", staticmethod(reentrant))
