"""Finds the shared libraries that the install built from ``vescale/csrc/*.cpp``."""

import ctypes
import functools
import importlib
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import torch

__all__ = ["dispatcher", "load", "load_module", "step_marks"]

_FOLDER = Path(__file__).parent


def _is_off() -> bool:
    return os.environ.get("VESCALE_NO_NATIVE", "") not in ("", "0")


_WAS_OFF = _is_off()  # when vescale was imported


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
    return None if _is_off() else _open(name)


@functools.cache
def _import(name: str) -> ModuleType | None:
    try:
        module = importlib.import_module(f"vescale.csrc._{name}")
    except ImportError:  # not built, or for another torch, whose symbols it misses
        return None
    return module if module.torch_version == torch.__version__ else None


def load_module(name: str) -> ModuleType | None:
    """The same for a helper that is a Python module, because it handles Python objects."""
    return None if _is_off() else _import(name)


def dispatcher() -> ModuleType | None:
    """``load_module("dispatch")`` by the environment when vescale was imported: others rely on what it does."""
    return None if _WAS_OFF else _import("dispatch")


def step_marks() -> ModuleType | None:
    """``load_module("step_marks")``, the same: every step of a model asks for it."""
    return None if _WAS_OFF else _import("step_marks")
