"""Errors of optimizers, clipping and averages."""

from __future__ import annotations

from vescale.errors._coded import Coded


class OptimizerOptionError(Coded, ValueError):
    """An option of an optimizer is out of its range, or excludes another one."""

    code = "VS0802"


class MatrixBlocksError(Coded, ValueError):
    """`blocks=` or a pattern of `muon_groups` does not fit the parameter."""

    code = "VS0804"


class CutBlockError(Coded, ValueError):
    """The border of a rank would cut a block that is quantized together."""

    code = "VS0804"


class OptimizerStateError(Coded, ValueError):
    """A loaded optimizer state was saved by another optimizer, or with other options."""

    code = "VS0802"


class OptimizerParameterError(Coded, ValueError, RuntimeError):
    """A parameter is of a kind that the optimizer does not update: not a real float, without values, or on another mesh."""

    code = "VS0802"


class MissingGradientError(Coded, ValueError, RuntimeError):
    """A gradient is missing on some ranks, sparse, or placed otherwise than its parameter."""

    code = "VS0802"


class TotalNormError(Coded, ValueError, RuntimeError):
    """The total norm of gradients is not finite, or cannot be computed of what was given."""

    code = "VS0802"


class EMAError(Coded, ValueError, RuntimeError):
    """An `EMA` does not fit its model any more, or its averages are swapped in."""

    code = "VS0802"


class OptimizerReportError(Coded, NotImplementedError):
    """`report` cannot plan the states of an optimizer that has not stepped yet."""

    code = "VS0802"


class UnevenBlocksError(Coded, ValueError):
    """No placement describes where the blocks of a tensor are on a mesh, although none is cut."""

    code = "VS0804"
