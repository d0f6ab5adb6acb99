"""The forward hooks of a parallelized model's modules in C++ (``csrc/module_hooks.cpp``)."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from vescale import csrc
from vescale.compat.autograd import set_compiler
from vescale.compat.native_dispatch import counts_local_writes

__all__ = ["native_hooks"]


def native_hooks() -> Any:
    """The module with ``Timeline``, and the hooks ``Enter`` and ``Leave``; None where it or the C++ dispatcher has
    not been built, or ``VESCALE_DISPATCH`` leaves everything to Python."""
    module: Any = csrc.load_module("module_hooks") if counts_local_writes() else None
    if module is not None:
        slots = [DTensor.__dict__[name] for name in ("_spec", "_local_tensor")]
        module.install(DTensor, *slots, set_compiler)
    return module
