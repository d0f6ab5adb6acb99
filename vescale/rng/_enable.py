"""``enable``, ``disable`` and ``deferred_init``: the switches of this package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from vescale.compat import install_part, is_installed, uninstall_part
from vescale.compat.random_ops import RandomHooks
from vescale.rng._deferred_tensor import Recorder
from vescale.rng._initializers import INITIALIZERS, dtensor_factory
from vescale.rng._mt19937_jump import characteristic_exponents
from vescale.rng._native_parts import native_part
from vescale.rng._op_handlers import handlers

__all__ = ["deferred_init", "disable", "enable", "is_enabled"]


def enable() -> None:
    """Give random ops on DTensors, DTensor factories and ``bool(dtensor)`` single-device semantics; idempotent.

    Programs without DTensors are not affected. All ranks must be seeded alike; nothing is communicated.
    """
    if not is_enabled():
        hooks = RandomHooks(handlers(), native_part, characteristic_exponents(), dtensor_factory, INITIALIZERS)
        install_part("random", hooks)


def disable() -> None:
    """Restore PyTorch as it was before :func:`enable`; idempotent."""
    uninstall_part("random")


def is_enabled() -> bool:
    """Whether random ops on DTensors draw each rank's part of one device's numbers, see :func:`enable`."""
    return is_installed("random")


@contextlib.contextmanager
def deferred_init() -> Iterator[None]:
    """Construct modules without memory: ``with deferred_init(): model = Model(config)``.

    Tensors that are made inside have a shape, a dtype and a device, and record how their values are computed. Random ops
    draw nothing, but advance the generator, so that code after the constructor draws what it would on one device.
    :func:`materialize` (or ``parallelize``) later computes the values, on each rank those of its part only. They are
    bit-equal to the values without ``deferred_init``, including overwritten, tied and derived tensors.

    Code inside that reads values (``item()``, ``tolist()``, ``numpy()``) gets those of small tensors; for large ones,
    :class:`DeferredValueError` names the line. Also calls :func:`enable`. Communication: none.
    """
    enable()
    with Recorder():
        yield
