"""Builds the optional C++ helpers of ``vescale.csrc``; everything else is in pyproject.toml.

Each ``vescale/csrc/NAME.cpp`` becomes the shared library ``vescale/csrc/_NAME*.so``, which ``vescale.csrc`` loads.
``optional=True``: without a compiler the install still succeeds, and the Python fallbacks, which give the same answers, are
used. Sources that include torch's headers are built where torch is installed already (``pip install --no-build-isolation``),
for that version alone, which their file names contain: helpers for several versions may stand side by side.

``VESCALE_STRICT_BUILD=1`` makes compiler warnings errors, and a helper that does not compile the end of the build.
"""

import os
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NAMES = runpy.run_path("vescale/csrc/_names.py")
# Python modules; the others are plain C libraries.
USING_PYTHON = {"dispatch", "module_hooks", "patching", "random_fills", "step_marks", "tape"}
# Arithmetic whose bits a Python fallback gives, too: no contraction of products and sums, vectors of square roots.
EXACT = {"adamw8bit": ["-ffp-contract=off", "-fno-math-errno"]}
IS_STRICT = os.environ.get("VESCALE_STRICT_BUILD", "") not in ("", "0")
# GCC takes atomic reads inside of shared pointers that are empty for reads behind their end, once it has inlined them.
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-stringop-overflow"] if IS_STRICT else []


class Helper(Extension):
    """One helper, with the version of torch that it is built for; "" if it does not use torch."""

    torch_version = ""


class BuildHelpers(build_ext):
    """Names the libraries as ``vescale.csrc`` looks for them."""

    def get_ext_filename(self, fullname: str) -> str:
        path = Path(super().get_ext_filename(fullname))
        version = self.ext_map[fullname].torch_version
        name, dot, suffix = path.name.removeprefix("_").partition(".")
        return str(path.with_name(NAMES["file_name"](name, version, dot + suffix)))


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
    includes = [str(folder / "include"), str(folder / "include/torch/csrc/api/include")]
    return {
        # As system headers: warnings are about our own code.
        "extra_compile_args": [argument for include in includes for argument in ("-isystem", include)],
        "library_dirs": [str(folder / "lib")],
        "libraries": ["c10", "torch_cpu"],  # loaded by ``import torch`` when the helper is
        "define_macros": [("_GLIBCXX_USE_CXX11_ABI", str(int(torch.compiled_with_cxx11_abi())))],
        "torch_version": str(torch.__version__),
    }


def extension(name: str, options: dict[str, Any]) -> Helper:
    options = dict(options)
    if name in USING_PYTHON:
        options["libraries"] = [*options["libraries"], "torch", "torch_python"]
    version = options.pop("torch_version", "")
    arguments = ["-O3", "-g0", f"-std={'c++20' if version else 'c++17'}", "-fvisibility=hidden", *EXACT.get(name, [])]
    source = Path("vescale/csrc") / f"{name}.cpp"
    found = Helper(
        f"vescale.csrc._{name}",
        [str(source)],
        depends=sorted(map(str, headers(source))),
        language="c++",
        extra_link_args=["-s"],  # without symbols, a fifth of a library
        optional=not IS_STRICT,
        **{**options, "extra_compile_args": [*arguments, *WARNINGS, *options.get("extra_compile_args", ())]},
    )
    found.torch_version = version
    return found


def description() -> str:
    """README.md for readers of the index, where links to files of the repository would lead nowhere."""
    source = tomllib.loads(Path("pyproject.toml").read_text())["project"]["urls"]["Source"]
    text = Path("README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?!https?://|#)", f"]({source}/blob/main/", text)


with_torch = torch_options()
sources = [path.stem for path in Path("vescale/csrc").glob("*.cpp")]
options = {name: with_torch if name in NAMES["USING_TORCH"] else {} for name in sources}
# Several are compiled at a time, those that take longest first.
ORDER = sorted(options, key=lambda name: (name not in NAMES["USING_TORCH"], name))
setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    ext_modules=[extension(name, found) for name in ORDER if (found := options[name]) is not None],
    cmdclass={"build_ext": BuildHelpers},
    options={"build_ext": {"parallel": min(4, os.cpu_count() or 1)}},
)
