"""Errors of random numbers, deferred initialization and samplers."""

from __future__ import annotations

from vescale.errors._coded import Coded

__all__ = [
    "GeneratorError",
    "MaterializeError",
    "RandomOpError",
    "SamplerError",
    "UnsupportedDeferredError",
    "UnsupportedRandomOpError",
]


class UnsupportedRandomOpError(Coded, NotImplementedError):
    """A random op is unknown, or has no implementation for the tensor or device."""

    code = "VS1206"


class RandomOpError(Coded, RuntimeError):
    """A random op cannot give the numbers of one device where it is used: a Partial tensor, a fused kernel, or a captured
    graph."""

    code = "VS1202"


class UnsupportedDeferredError(Coded, NotImplementedError):
    """An op or hook cannot be recorded inside of `deferred_init()`."""

    code = "VS1207"


class MaterializeError(Coded, ValueError, RuntimeError):
    """Deferred tensors cannot be given values as asked for."""

    code = "VS1203"


class SamplerError(Coded, ValueError):
    """A `ShardedBatchSampler` cannot deal out batches as asked for, or has the state of another one."""

    code = "VS1204"


class GeneratorError(Coded, ValueError):
    """A generator or its state is not of the kind that can be continued."""

    code = "VS1205"
