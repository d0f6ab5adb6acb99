"""The forward hooks of a parallelized model's modules in C++ (``csrc/module_hooks.cpp``)."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from vescale import csrc
from vescale.compat.autograd import set_compiler
from vescale.compat.native_dispatch import native_boundaries


def native_hooks() -> Any:
    """The module with ``Timeline``, and the hooks ``Enter`` and ``Leave``; None where it or the C++ dispatcher has
    not been built, or ``VESCALE_DISPATCH`` leaves everything to Python."""
    functions = native_boundaries()
    module: Any = csrc.load_module("module_hooks") if functions is not None else None
    if module is not None:
        slots = [DTensor.__dict__[name] for name in ("_spec", "_local_tensor")]
        module.install(DTensor, *slots, set_compiler, functions)
    return module
