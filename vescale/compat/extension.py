"""When DTensor is extended: as soon as a placement is constructed that stock DTensor does not know."""

from __future__ import annotations

import importlib

from vescale.compat.install import is_installed

__all__ = ["extend_dtensor"]

# The package whose install() fills the hooks. It is named instead of imported, because it imports the placements, whose
# constructors call extend_dtensor(): a program that imports nothing but a placement gets the ops on it as well.
_PROVIDER = "vescale.ops"


def extend_dtensor() -> None:
    """Install the DTensor hooks for placements that stock DTensor does not know, once in a process.

    Raises UnsupportedTorchError when this torch lacks something that the hooks build on; nothing is changed then.
    """
    if not is_installed():
        importlib.import_module(_PROVIDER).install()
