"""Errors of ops on DTensors."""

from __future__ import annotations

from vescale.errors._coded import Coded

# Errors of ops on DTensors.


class RuleError(Coded, ValueError, TypeError):
    """A rule that was registered for an op is not one, or returned a decision that does not fit the op."""

    code = "VS1603"


class UnsupportedOpError(Coded, NotImplementedError):
    """An op is not implemented for the placements of its operands: options that need the rows of other ranks, heads cut in
    several runs."""

    code = "VS1604"


class OpPlacementError(Coded, RuntimeError):
    """An op has no meaning on the placements of its operands: a write to a copy, operands on different meshes."""

    code = "VS1604"


class MixedTensorsError(Coded, RuntimeError):
    """Plain tensors of the size of this rank's part meet outputs of a model, parameters of `fully_shard` meet plain tensors
    outside of their module's forward, or a DTensor that requires a gradient is written to a plain tensor."""

    code = "VS1607"


class IndexBoundsError(Coded, IndexError):
    """Indices are out of bounds: tokens that an embedding has no row for, positions for ``gather``, classes for
    ``one_hot``."""

    code = "VS1605"


class PendingSumWarning(Coded, UserWarning):
    """`to_local()` of a pending sum (`Partial`) of a parallelized model gave this rank's summand, which is not the value."""

    code = "VS0407"


# Errors of placements and of conversions between them.


class PlacementError(Coded, ValueError):
    """A placement does not fit the tensor or the mesh: a dim that it does not have, units that do not divide, the wrong
    number of placements."""

    code = "VS0401"


class OtherMeshError(Coded, NotImplementedError):
    """A DTensor was to be redistributed to another mesh."""

    code = "VS0401"


class ShardedStateError(Coded, ValueError):
    """A state dict of torch.distributed.checkpoint does not fit the DTensor that it is loaded into."""

    code = "VS0407"


class DTensorStorageError(Coded, RuntimeError):
    """Foreign code asked for the memory of a DTensor, which has none of its own."""

    code = "VS0209"


class SavedPartWarning(Coded, UserWarning):
    """`torch.save` writes this rank's part of a DTensor."""

    code = "VS0407"


# Errors of random numbers, deferred initialization and samplers.


class UnsupportedRandomOpError(Coded, NotImplementedError):
    """A random op is unknown, or has no implementation for the tensor or device."""

    code = "VS1202"


class RandomOpError(Coded, RuntimeError):
    """A random op cannot give the numbers of one device where it is used: a Partial tensor, a fused kernel, or a captured
    graph."""

    code = "VS1202"


class UnsupportedDeferredError(Coded, NotImplementedError):
    """An op or hook cannot be recorded inside of `deferred_init()`."""

    code = "VS1201"


class MaterializeError(Coded, ValueError, RuntimeError):
    """Deferred tensors cannot be given values as asked for."""

    code = "VS1201"


class GeneratorError(Coded, ValueError):
    """A generator or its state is not of the kind that can be continued."""

    code = "VS1202"
