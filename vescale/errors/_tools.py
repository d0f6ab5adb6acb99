"""Errors of estimates."""

from __future__ import annotations

from vescale.errors._coded import Coded
from vescale.errors._plans import PlanError

# Errors of estimates.


class DeviceTableError(Coded, ValueError):
    """A table of a device is unknown or not complete."""

    code = "VS1502"


class EstimateError(PlanError):
    """An estimate cannot be made of this model, plan and batch."""

    code = "VS1502"


class SimulationError(Coded, ValueError, RuntimeError):
    """A script cannot be simulated as asked for: there is no such file or rank, or the simulation itself ended."""

    code = "VS1502"


class EstimateArgumentError(Coded, ValueError):
    """An argument of an estimate has a value that cannot be used."""

    code = "VS0001"


class WhatIfError(Coded, ValueError):
    """A change of `--what-if` cannot be read."""

    code = "VS1502"


class SearchError(Coded, ValueError):
    """A search cannot be made with this number of devices, batch or model."""

    code = "VS1502"


# Errors of `vescale.debug`.


class DebugOptionError(Coded, ValueError, RuntimeError):
    """A tool of `vescale.debug` has an argument that cannot be used, or is on already."""

    code = "VS0001"


class ModelFlopsError(Coded, ValueError):
    """The operations for a token do not follow from the model's parameters."""

    code = "VS1502"


class VerifyError(Coded, ValueError, TypeError):
    """`verify` cannot train the model on meshes with what it was given."""

    code = "VS1502"


class ProcessFailed(Coded, RuntimeError):
    """A local process raised an exception or died."""

    code = "VS0212"
