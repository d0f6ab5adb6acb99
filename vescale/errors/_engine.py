"""Errors of `fully_shard`."""

from __future__ import annotations

from collections.abc import Sequence

from vescale.errors._coded import Coded

# Errors of `fully_shard`.


class FullyShardError(Coded, ValueError):
    """`fully_shard` was given modules or arguments that it cannot shard: an empty list, a module twice, tied parameters in
    two groups, a placement that does not fit."""

    code = "VS0603"


class UnsupportedParameterError(Coded, NotImplementedError):
    """A parameter is of a kind that `fully_shard` cannot gather, or has no shape yet."""

    code = "VS0603"


class GatherHookError(Coded, ValueError, RuntimeError):
    """`fsdp_pre_all_gather` or `fsdp_post_all_gather` of a tensor subclass returned something else than expected, or than
    before."""

    code = "VS0603"


class UnsupportedSettingError(Coded, NotImplementedError):
    """A setting of FSDP2 that this engine does not have."""

    code = "VS0603"


# Errors of gradients and their reduction.


class GradientReducerError(Coded, ValueError):
    """A `GradientReducer` or the data-parallel axes of a mesh cannot be used as given."""

    code = "VS0703"


class SparseGradientError(Coded, NotImplementedError):
    """A sparse gradient reached `fully_shard`, which reduces dense ones."""

    code = "VS0703"


class GradientError(Coded, ValueError, RuntimeError):
    """A gradient cannot be reduced: it is sparse, came twice in one backward, was changed meanwhile, or would lose its
    imaginary part."""

    code = "VS0703"


# Errors of flat buffers and their layouts.


class DBufferError(Coded, ValueError):
    """An operation on a `DBuffer` does not fit its placements, axes or layout."""

    code = "VS0502"


class BufferMemoryError(Coded, RuntimeError):
    """The memory of a buffer was used before it was allocated, or reserved after."""

    code = "VS0502"


class UnknownTensorError(Coded, KeyError):
    """A group of tensors or the shipped shape lists have nothing of that name."""

    code = "VS0502"


# Errors of groups, buckets and comparisons between ranks.


class NotInMeshError(Coded, ValueError):
    """A rank asked for its group on a mesh that it is not part of."""

    code = "VS0212"


# Errors of scripts around a model.


class ParameterHookError(Coded, ValueError):
    """A parameter that is going to be replaced has gradient hooks, which would never run."""

    code = "VS0223"


class ConsensusError(Coded, RuntimeError):
    """Other ranks did not come to a round in time, or one of them has failed in it.

    Attributes:
        ranks: which ones.
        elsewhere: where ranks wait for each other, so that they do not come.
        failure: of the rank that has failed.
    """

    code = "VS0212"

    def __init__(self, problem: str, ranks: Sequence[int], elsewhere: str = "", failure: str = "") -> None:
        super().__init__(problem)
        self.ranks, self.elsewhere, self.failure = tuple(ranks), elsewhere, failure


class LateRanksWarning(Coded, UserWarning):
    """Some ranks have come to a round and wait for others."""

    code = "VS0212"


class OrderMismatchError(Coded, RuntimeError):
    """Ranks have gathered, or reduced, different units in one place of their order, so that the contents were mixed, or wait
    for each other in collectives that do not pair.

    ``ranks``: those that differ from the majority.
    """

    code = "VS0301"

    def __init__(self, problem: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(problem)
        self.ranks = tuple(ranks)


class FullyShardStateError(Coded, RuntimeError):
    """A module under `fully_shard` was called, written to or freed at a time when it cannot be."""

    code = "VS0603"
