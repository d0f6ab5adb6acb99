"""Errors of random numbers, deferred initialization and samplers."""

from __future__ import annotations

from vescale.errors._coded import Coded

__all__ = [
    "GeneratorError",
    "MaterializeError",
    "RandomOpError",
    "SamplerError",
]


class RandomOpError(Coded, NotImplementedError, ValueError):
    """A random op cannot give the numbers of one device where it is used: an unknown op, a Partial tensor, a fused kernel,
    or a captured graph."""

    code = "VS1202"


class MaterializeError(Coded, NotImplementedError, ValueError):
    """Deferred tensors cannot be given values as asked for."""

    code = "VS1203"


class SamplerError(Coded, ValueError):
    """A `ShardedBatchSampler` cannot deal out batches as asked for, or has the state of another one."""

    code = "VS1204"


class GeneratorError(Coded, ValueError):
    """A generator or its state is not of the kind that can be continued."""

    code = "VS1205"
