"""Random numbers with single-device semantics: every rank draws its part of what one device would draw.

:func:`enable` makes random ops on DTensors do so, in this process, until :func:`disable`. All ranks must start from the
same seed (``torch.manual_seed``); their generators then stay equal. The ops, rules and limits are in docs/rng.md.
"""

from vescale.compat.random import RandomHooks, attach, attached, detach
from vescale.rng._handlers import handlers
from vescale.rng._init import INITIALIZERS, dtensor_factory, rand, randint, randn

__all__ = ["disable", "enable", "is_enabled", "rand", "randint", "randn"]


def enable() -> None:
    """Give random ops on DTensors, DTensor factories and ``bool(dtensor)`` single-device semantics; idempotent.

    Programs without DTensors are not affected.
    """
    if not attached():
        attach(RandomHooks(handlers(), dtensor_factory, INITIALIZERS))


def disable() -> None:
    """Leave PyTorch as :func:`enable` found it; idempotent."""
    detach()


def is_enabled() -> bool:
    return attached()
