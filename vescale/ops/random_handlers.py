"""Random ops: the handlers with which :mod:`vescale.rng` draws the numbers of one device, in the registry.

They are installed by ``vescale.rng.enable()`` and removed by ``disable()``, and not with the other handlers.
"""

from __future__ import annotations

from vescale.ops._registry import register
from vescale.rng import handlers

__all__: list[str] = []

for _op, _handler in handlers().items():
    register(_op, random_handler=_handler)
