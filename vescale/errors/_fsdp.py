"""Errors of `fully_shard`."""

from __future__ import annotations

from vescale.errors._coded import Coded

__all__ = [
    "FSDPSettingError",
    "FullyShardError",
    "GatherHookError",
    "GroupMemoryError",
    "ReplacedInGroupError",
    "RootModuleError",
    "UnsupportedParameterError",
    "UnsupportedSettingError",
    "WrittenParameterError",
]


class FullyShardError(Coded, ValueError):
    """`fully_shard` was given modules or arguments that it cannot shard: an empty list, a module twice, tied parameters in
    two groups, a placement that does not fit."""

    code = "VS0603"


class UnsupportedParameterError(Coded, NotImplementedError):
    """A parameter is of a kind that `fully_shard` cannot gather, or has no shape yet."""

    code = "VS0604"


class GatherHookError(Coded, ValueError, RuntimeError):
    """`fsdp_pre_all_gather` or `fsdp_post_all_gather` of a tensor subclass returned something else than expected, or than
    before."""

    code = "VS0605"


class ReplacedInGroupError(Coded, ValueError):
    """A parameter of a sharded group was removed, replaced or tied after `fully_shard`."""

    code = "VS0606"


class GroupMemoryError(Coded, RuntimeError):
    """The parameters of a group are on the meta device or on another device when the group is first used."""

    code = "VS0607"


class RootModuleError(Coded, RuntimeError):
    """Modules of one model ran in an order in which their root is not known, or a root's method was called on an inner
    module."""

    code = "VS0608"


class FSDPSettingError(Coded, ValueError):
    """A setting of an `FSDPModule` has a value that cannot be used."""

    code = "VS0609"


class UnsupportedSettingError(Coded, NotImplementedError):
    """A setting of FSDP2 that this engine does not have."""

    code = "VS0610"


class WrittenParameterError(Coded, RuntimeError):
    """A parameter was written to while it was gathered, where the write cannot be kept."""

    code = "VS0611"
