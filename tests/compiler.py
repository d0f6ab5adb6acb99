"""Whether the C++ helpers can be built here."""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig

import pytest

__all__ = ["compiler", "needs_compiler"]


def compiler() -> str | None:
    """What setuptools would compile with."""
    command = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    return shutil.which(shlex.split(command)[0])


needs_compiler = pytest.mark.skipif(
    compiler() is None,
    reason="the test builds a C++ extension: there is no compiler on this machine",
)
