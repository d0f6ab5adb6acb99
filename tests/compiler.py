"""Whether the C++ helpers can be built here."""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig

__all__ = ["compiler"]


def compiler() -> str | None:
    """What setuptools would compile with."""
    command = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    return shutil.which(shlex.split(command)[0])
