"""Finds the shared libraries that the install built from ``vescale/csrc/*.cpp``."""

import ctypes
import functools
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

__all__ = ["load"]

_FOLDER = Path(__file__).parent


@functools.cache
def _open(name: str) -> ctypes.CDLL | None:
    for suffix in EXTENSION_SUFFIXES:
        path = _FOLDER / f"_{name}{suffix}"
        if path.exists():
            try:
                library = ctypes.CDLL(str(path))
            except OSError:  # built for another machine or C library: the fallback serves
                return None
            return library if _is_for_this_torch(library) else None
    return None


def _is_for_this_torch(library: ctypes.CDLL) -> bool:
    """A helper that uses torch's headers says for which torch it was built."""
    if not hasattr(library, "torch_version"):
        return True
    library.torch_version.restype = ctypes.c_char_p
    return bool(library.torch_version().decode() == torch.__version__)


def load(name: str) -> ctypes.CDLL | None:
    """The helper library built from ``vescale/csrc/{name}.cpp``, or None when it was not built, or not for this machine
    and torch.

    ``VESCALE_NO_NATIVE=1`` in the environment answers None for every helper, so that the fallbacks can be tested.
    """
    if os.environ.get("VESCALE_NO_NATIVE", "") not in ("", "0"):
        return None
    return _open(name)
