"""Errors of the installed PyTorch and of FSDP2's interface."""

from __future__ import annotations

from vescale.errors._coded import Coded

__all__ = [
    "CudaError",
    "JoinedMeshError",
    "MissingHelpersWarning",
    "PrivateAttributeError",
    "SetDataError",
]


class CudaError(Coded, RuntimeError):
    """The CUDA driver or compiler refused a kernel."""

    code = "VS1702"


class PrivateAttributeError(Coded, AttributeError, NotImplementedError):
    """A script uses a private attribute of FSDP2 that this engine does not have."""

    code = "VS1703"


class JoinedMeshError(Coded, ValueError):
    """Meshes cannot be joined into one, or name no axis."""

    code = "VS1704"


class SetDataError(Coded, ValueError):
    """`parameter.data` of a DTensor was set to data of another shape."""

    code = "VS1705"


class MissingHelpersWarning(Coded, UserWarning):
    """C++ helpers are missing, or were built for another torch: their Python fallbacks take more host time."""

    code = "VS1707"
