"""Loads the shared libraries that the install built from ``vescale/csrc/*.cpp``, and tells which ones are missing."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import sys
import threading
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from vescale.csrc._names import FOLDER, built_for, file_name, helper_names

BUILT = "built"
OFF = "switched off (VESCALE_NO_NATIVE)"


def _is_off() -> bool:
    return os.environ.get("VESCALE_NO_NATIVE", "") not in ("", "0")


_WAS_OFF = _is_off()  # when vescale was imported
_IMPORTING = threading.RLock()
# Errors of libraries that are there and cannot be loaded, by helper.
_ERRORS: dict[str, str] = {}


def _path(name: str) -> Path | None:
    """The library of a helper for this Python and this torch."""
    names = [file_name(name, torch.__version__, suffix) for suffix in EXTENSION_SUFFIXES]
    return next((path for path in map(FOLDER.joinpath, names) if path.exists()), None)


@functools.cache
def _open(name: str) -> ctypes.CDLL | None:
    path = _path(name)
    try:
        return None if path is None else ctypes.CDLL(str(path))
    except OSError as error:  # for another machine or C library
        _ERRORS[name] = str(error)
        return None


@functools.cache
def _import(name: str) -> ModuleType | None:
    with _IMPORTING:  # as Python's own lock does: another thread gets the module when it is complete
        full_name, path = f"vescale.csrc._{name}", _path(name)
        if path is None or full_name in sys.modules:
            return sys.modules.get(full_name)
        spec = importlib.util.spec_from_file_location(full_name, path)
        assert spec is not None and spec.loader is not None
        try:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except ImportError as error:
            _ERRORS[name] = str(error)
            return None
        sys.modules[full_name] = module
        return module


def load(name: str) -> ctypes.CDLL | None:
    """The library built from ``vescale/csrc/{name}.cpp``; None if there is none for this machine, Python and torch.

    ``VESCALE_NO_NATIVE=1`` in the environment answers None for every helper, so that the fallbacks can be tested.
    """
    return None if _is_off() else _open(name)


def load_module(name: str) -> ModuleType | None:
    """The same for a helper that is a Python module, because it handles Python objects."""
    return None if _is_off() else _import(name)


def dispatcher() -> ModuleType | None:
    """``load_module("dispatch")`` by the environment when vescale was imported: others rely on what it does."""
    return None if _WAS_OFF else _import("dispatch")


def step_marks() -> ModuleType | None:
    """``load_module("step_marks")``, the same: every step of a model asks for it."""
    return None if _WAS_OFF else _import("step_marks")


def tape() -> ModuleType | None:
    """``load_module("tape")``, the same."""
    return None if _WAS_OFF else _import("tape")


def helper_states() -> dict[str, str]:
    """Each helper with ``built``, or the reason why its Python fallback runs."""
    return {name: _state(name) for name in helper_names()}


def missing_helpers() -> dict[str, str]:
    """The helpers whose Python fallbacks run although nobody has switched them off, each with the reason."""
    return {name: state for name, state in helper_states().items() if state not in (BUILT, OFF)}


def _state(name: str) -> str:
    if _is_off():
        return OFF
    is_loaded = load(name) is not None  # modules, too, are libraries
    if name in _ERRORS:
        return f"cannot be loaded: {_ERRORS[name]}"
    if is_loaded:
        return BUILT
    others = built_for(name)
    this = f"torch {torch.__version__} and Python {platform.python_version()}"
    return f"built for {'; '.join(sorted(others))}; this is {this}" if others else f"not built for {this}"


# The command that builds the helpers for the Python and the torch that run, which depends on how vescale was installed.


_SETUPTOOLS = 77  # the oldest that reads pyproject.toml
_CLONE = "FOLDER-OF-A-CLONE"


def rebuild_command(root: Path = FOLDER.parent.parent) -> str:
    """A line for a shell.

    Args:
        root: the folder that the package ``vescale`` is in.
    """
    python = shlex.quote(sys.executable)
    if (root / "setup.py").exists() and (root / "pyproject.toml").exists():  # a clone, whether installed or not
        build = f"cd {shlex.quote(str(root))} && {python} setup.py build_ext --inplace"
    else:
        # Without pip's cache: it has the wheel of a commit that was built for another torch.
        options = "--no-build-isolation --no-deps --no-cache-dir --force-reinstall"
        build = f"{python} -m pip install {options} {shlex.quote(_origin(root))}"
    return build if _has_setuptools() else f'{python} -m pip install "setuptools>={_SETUPTOOLS}" && {build}'


def _origin(root: Path) -> str:
    """What pip installed the package from, as pip takes it. Wheels have no sources: a placeholder for them."""
    for distribution in importlib.metadata.distributions(name="vescale-plan", path=[str(root)]):
        found: dict[str, Any] = json.loads(distribution.read_text("direct_url.json") or "{}")
        if "vcs_info" in found:
            return f"{found['vcs_info']['vcs']}+{found['url']}@{found['vcs_info']['commit_id']}"
        if "dir_info" in found or ("archive_info" in found and not found["url"].endswith(".whl")):
            return str(found["url"])
    return _CLONE


def _has_setuptools() -> bool:
    try:
        return int(importlib.metadata.version("setuptools").partition(".")[0]) >= _SETUPTOOLS
    except importlib.metadata.PackageNotFoundError:
        return False
