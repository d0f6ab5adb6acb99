"""Builds the optional C++ helpers of ``vescale.csrc``; everything else is in pyproject.toml.

Each ``vescale/csrc/NAME.cpp`` exports plain C functions (no Python, no torch headers) and becomes the shared library
``vescale/csrc/_NAME*.so``, loaded through ctypes. ``optional=True``: without a compiler the install still succeeds and
the Python fallbacks, which give the same answers, are used.
"""

from pathlib import Path

from setuptools import Extension, setup

SOURCES = sorted(Path("vescale/csrc").glob("*.cpp"))
HEADERS = sorted(map(str, Path("vescale/csrc").glob("*.h")))

setup(
    ext_modules=[
        Extension(
            f"vescale.csrc._{source.stem}",
            [str(source)],
            depends=HEADERS,
            language="c++",
            extra_compile_args=["-O3", "-std=c++17", "-fvisibility=hidden"],
            optional=True,
        )
        for source in SOURCES
    ]
)
