"""Errors of placements and of conversions between them."""

from __future__ import annotations

from vescale.errors._coded import Coded

__all__ = [
    "DTensorStorageError",
    "DistributeError",
    "FromLocalError",
    "OtherMeshError",
    "PlacementError",
    "RedistributeError",
    "SavedPartWarning",
    "ShardedStateError",
]


class PlacementError(Coded, ValueError):
    """A placement does not fit the tensor or the mesh: a dim that it does not have, units that do not divide, the wrong
    number of placements."""

    code = "VS0401"


class RedistributeError(Coded, ValueError):
    """A redistribution has no meaning: pending reductions of different operations, or of values for which the operation is
    not defined."""

    code = "VS0402"


class OtherMeshError(Coded, NotImplementedError):
    """A DTensor was to be redistributed to another mesh."""

    code = "VS0403"


class DistributeError(Coded, ValueError):
    """`distribute_tensor` was given a DTensor of other placements, or a placement that has no source; or a program holds
    PyTorch's function from before vescale's placements were loaded."""

    code = "VS0404"


class FromLocalError(Coded, ValueError):
    """`from_local` cannot build a DTensor of the parts: ranks give different dtypes or placements, or the parts do not
    tell the global shape."""

    code = "VS0405"


class ShardedStateError(Coded, ValueError):
    """A state dict of torch.distributed.checkpoint does not fit the DTensor that it is loaded into."""

    code = "VS0406"


class DTensorStorageError(Coded, RuntimeError):
    """Foreign code asked for the memory of a DTensor, which has none of its own."""

    code = "VS0408"


class SavedPartWarning(Coded, UserWarning):
    """`torch.save` writes this rank's part of a DTensor."""

    code = "VS0407"
