"""The command that builds the helpers for the Python and the torch that run, which depends on how vescale was installed."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from vescale.csrc._names import FOLDER

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
