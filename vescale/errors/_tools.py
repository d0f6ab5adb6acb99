"""Errors of estimates."""

from __future__ import annotations

from vescale.errors._coded import Coded
from vescale.errors._plans import PlanError

# Errors of estimates.


class EstimateError(PlanError):
    """An estimate cannot be made of this model, plan and batch."""

    code = "VS1502"


class SimulationError(Coded, ValueError, RuntimeError):
    """A script cannot be simulated as asked for: there is no such file or rank, or the simulation itself ended."""

    code = "VS1502"


# Errors of `vescale.debug`.


class DebugOptionError(Coded, ValueError, RuntimeError):
    """A tool of `vescale.debug` has an argument that cannot be used, or is on already."""

    code = "VS0001"


class VerifyError(Coded, ValueError, TypeError):
    """`verify` cannot train the model on meshes with what it was given."""

    code = "VS1502"


class ProcessFailed(Coded, RuntimeError):
    """A local process raised an exception or died."""

    code = "VS0212"


class EstimateOptionError(Coded, ValueError):
    """A device table, a variant or an option of an estimate or a search is not possible."""

    code = "VS1502"
