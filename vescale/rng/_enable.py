"""What turns this package on: for random ops on DTensors, and for constructors that should not allocate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from vescale.compat.random import RandomHooks, attach, attached, detach
from vescale.rng._deferred_tensor import Recorder
from vescale.rng._initializers import INITIALIZERS, dtensor_factory
from vescale.rng._op_handlers import handlers

__all__ = ["deferred_init", "disable", "enable", "is_enabled"]


def enable() -> None:
    """Give random ops on DTensors, DTensor factories and ``bool(dtensor)`` single-device semantics; idempotent.

    Programs without DTensors are not affected. All ranks must be seeded alike; nothing is communicated.
    """
    if not attached():
        attach(RandomHooks(handlers(), dtensor_factory, INITIALIZERS))


def disable() -> None:
    """Leave PyTorch as :func:`enable` found it; idempotent."""
    detach()


def is_enabled() -> bool:
    return attached()


@contextlib.contextmanager
def deferred_init() -> Iterator[None]:
    """Construct modules without memory: ``with deferred_init(): model = Model(config)``.

    Tensors made inside have a shape, a dtype and a device, and remember how they are computed. Random ops draw nothing
    but leave the generator where it would be, so that code after the constructor draws what it would on one device.
    :func:`materialize` (or ``parallelize``) then computes the values, on each rank only its own part; they are bit-equal
    to those of a constructor without ``deferred_init``, whichever were overwritten, tied or computed on the way.

    Reading values inside (``item()``, ``tolist()``, ``numpy()``) computes small tensors on the spot, and raises
    :class:`DeferredValueError`, naming the line, for large ones. Also calls :func:`enable`. Communication: none.
    """
    enable()
    with Recorder():
        yield
