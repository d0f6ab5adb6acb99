"""Errors of the installed PyTorch and of FSDP2's interface."""

from __future__ import annotations

import re

from vescale.errors._coded import Coded


class CudaError(Coded, RuntimeError):
    """The CUDA driver or compiler refused a kernel."""

    code = "VS1701"


class PrivateAttributeError(Coded, AttributeError, NotImplementedError):
    """A script uses a private attribute of FSDP2 that this engine does not have."""

    code = "VS0209"


class SetDataError(Coded, ValueError):
    """`parameter.data` of a DTensor was set to data of another shape, or to the memory of another parameter."""

    code = "VS1604"


class MissingHelpersWarning(Coded, UserWarning):
    """C++ helpers are missing, or were built for another torch: their Python fallbacks take more host time."""

    code = "VS1104"


# The versions of torch that vescale is made for, and the error on others.

# Minor releases; README.md says the same, and pyproject.toml has the range.
SUPPORTED_TORCH = ("2.13", "2.14", "2.15")
LIMITED_TORCH = ("2.11", "2.12")
TORCH_RANGE = ">=2.11,<2.16"
_LIMITED_TO = "README's script, the examples, fully_shard, gradients and random numbers; nothing else is tested"

_RELEASE = re.compile(r"(\d+\.\d+)(\.\d+)*(\.post\d+)?(\+.*)?")


class UnsupportedTorchError(Coded, ImportError):
    """The installed torch is not supported, or lacks something that vescale needs."""

    code = "VS1701"


class UntestedTorchWarning(Coded, UserWarning):
    """VESCALE_ALLOW_TORCH=1 lets vescale run on a torch that it is not made for."""

    code = "VS1701"


def torch_promise(version: str) -> str:
    """What is promised on a version of torch: ``supported``, ``limited: ...`` or ``not supported``, as pre-releases are."""
    release = _RELEASE.fullmatch(version)
    minor = "" if release is None else release[1]
    if minor in SUPPORTED_TORCH:
        return "supported"
    return f"limited: {_LIMITED_TO}" if minor in LIMITED_TORCH else "not supported"
