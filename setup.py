"""Builds the optional C++ helpers of ``vescale.csrc``; everything else is in pyproject.toml.

Each ``vescale/csrc/NAME.cpp`` exports plain C functions and becomes the shared library ``vescale/csrc/_NAME*.so``, loaded
through ctypes. ``optional=True``: without a compiler the install still succeeds and the Python fallbacks, which give the
same answers, are used. The sources in ``USING_TORCH`` include torch's headers, and are built where torch is installed
already (``pip install --no-build-isolation``): for that torch alone.
"""

import os
import re
from pathlib import Path
from typing import Any

from setuptools import Extension, setup

USING_TORCH = {"dispatch", "grads", "hook_gate", "module_hooks", "patching", "random_fills", "step_marks"}
USING_PYTHON = {
    "dispatch",
    "module_hooks",
    "patching",
    "random_fills",
    "step_marks",
}  # Python modules; the others are plain C libraries
# Arithmetic whose bits a Python fallback gives, too: no contraction of products and sums, vectors of square roots.
EXACT = {"adamw8bit": ["-ffp-contract=off", "-fno-math-errno"]}
# Several are compiled at a time, those that take longest first.
SOURCES = sorted(Path("vescale/csrc").glob("*.cpp"), key=lambda source: (source.stem not in USING_TORCH, source))


def headers(source: Path) -> set[Path]:
    """Our headers that a source includes, directly or by way of another one."""
    direct = {source.parent / name for name in re.findall(r'^#include "(.*)"', source.read_text(), re.MULTILINE)}
    return direct.union(*map(headers, direct))


def torch_options() -> dict[str, Any] | None:
    """What compiles and links with the torch that is installed; None where none is."""
    try:
        import torch
    except ImportError:
        return None
    folder = Path(torch.__file__).parent
    return {
        "include_dirs": [str(folder / "include"), str(folder / "include/torch/csrc/api/include")],
        "library_dirs": [str(folder / "lib")],
        "libraries": ["c10", "torch_cpu"],  # loaded by ``import torch`` when the helper is
        "define_macros": [
            ("VESCALE_TORCH_VERSION", f'"{torch.__version__}"'),
            ("_GLIBCXX_USE_CXX11_ABI", str(int(torch.compiled_with_cxx11_abi()))),
        ],
    }


def extension(source: Path, options: dict[str, Any]) -> Extension:
    if source.stem in USING_PYTHON:
        options = {**options, "libraries": [*options["libraries"], "torch", "torch_python"]}
    standard = "c++20" if source.stem in USING_TORCH else "c++17"
    return Extension(
        f"vescale.csrc._{source.stem}",
        [str(source)],
        depends=sorted(map(str, headers(source))),
        language="c++",
        extra_compile_args=["-O3", "-g0", f"-std={standard}", "-fvisibility=hidden", *EXACT.get(source.stem, [])],
        optional=True,
        **options,
    )


with_torch = torch_options()
options = {source: with_torch if source.stem in USING_TORCH else {} for source in SOURCES}
setup(
    ext_modules=[extension(source, found) for source, found in options.items() if found is not None],
    options={"build_ext": {"parallel": min(4, os.cpu_count() or 1)}},
)
