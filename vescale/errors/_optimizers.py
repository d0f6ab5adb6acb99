"""Errors of optimizers, clipping and averages."""

from __future__ import annotations

from vescale.errors._coded import Coded


class MatrixBlocksError(Coded, ValueError):
    """`blocks=` or a pattern of `muon_groups` does not fit the parameter."""

    code = "VS0804"


class OptimizerReportError(Coded, NotImplementedError):
    """`report` cannot plan the states of an optimizer that has not stepped yet."""

    code = "VS0802"


class UnevenBlocksError(Coded, ValueError):
    """No placement describes where the blocks of a tensor are on a mesh, although none is cut."""

    code = "VS0804"


class OptimizerError(Coded, ValueError, RuntimeError):
    """An optimizer, clipping or an average gets options, states, parameters or gradients that it cannot take."""

    code = "VS0802"
