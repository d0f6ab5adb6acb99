"""Errors of gradients and their reduction."""

from __future__ import annotations

from vescale.errors._coded import Coded

__all__ = [
    "CommHookError",
    "ConcurrentBackwardError",
    "GradientError",
    "GradientReducerError",
    "SparseGradientError",
]


class GradientReducerError(Coded, ValueError):
    """A `GradientReducer` or the data-parallel axes of a mesh cannot be used as given."""

    code = "VS0703"


class CommHookError(Coded, ValueError, RuntimeError):
    """A communication hook returned a tensor of another shape, or was registered during a backward."""

    code = "VS0704"


class SparseGradientError(Coded, NotImplementedError):
    """A sparse gradient reached `fully_shard`, which reduces dense ones."""

    code = "VS0706"


class GradientError(Coded, ValueError, RuntimeError):
    """A gradient cannot be reduced: it is sparse, came twice in one backward, was changed meanwhile, or would lose its
    imaginary part."""

    code = "VS0705"


class ConcurrentBackwardError(Coded, RuntimeError):
    """Two threads run backwards of one model at the same time, and its gradients are reduced."""

    code = "VS0707"
