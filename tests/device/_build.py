"""Builds the simulated accelerator's extension, once for each torch and each state of its sources."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch

from tests.compiler import compiler

__all__ = ["build", "load"]

_SOURCES = Path(__file__).parent / "csrc"
_FOLDER = Path(__file__).parent / "build"
_NAME = "vescale_sim"


def _arguments() -> list[str]:
    include = Path(torch.__file__).parent / "include"
    folders = [include, include / "torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    return [
        *("-std=c++20", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-stringop-overflow"),
        *(argument for folder in folders for argument in ("-isystem", str(folder))),
        f"-DTORCH_EXTENSION_NAME={_NAME}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]


def _target() -> Path:
    digest = hashlib.sha256(" ".join(_arguments()).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    version = f"torch-{torch.__version__}-{sysconfig.get_config_var('SOABI')}"
    return _FOLDER / f"{version}-{digest.hexdigest()[:16]}" / f"{_NAME}.so"


def build() -> Path:
    """The library, which is compiled if it is not there: about a minute on one core. Raises ``RuntimeError`` with what
    the compiler says."""
    target = _target()
    if target.exists():
        return target
    command = compiler()
    if command is None:
        raise RuntimeError("the simulated device is C++, and no compiler was found: set CXX, or install one")
    target.parent.mkdir(parents=True, exist_ok=True)
    libraries = Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, ThreadPoolExecutor(os.cpu_count()) as threads:

        def run(*arguments: str) -> None:
            done = subprocess.run([command, *arguments], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the simulated device does not compile:\n{done.stderr[-6000:]}")

        def compile_one(source: Path) -> str:
            run(*_arguments(), "-c", str(source), "-o", made := str(Path(folder) / f"{source.stem}.o"))
            return made

        objects = list(threads.map(compile_one, sorted(_SOURCES.glob("*.cpp"))))
        names = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        made = Path(folder) / target.name
        run("-shared", *objects, f"-L{libraries}", f"-Wl,-rpath,{libraries}", *names, "-o", str(made))
        made.rename(target)  # at once: another process may build the same
    return target


def load() -> ModuleType:
    """The extension's module."""
    if _NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(_NAME, build())
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[_NAME] = module
    return sys.modules[_NAME]
