"""Static mode: after one recorded step, the model runs on local tensors, with the collectives that its plan needs."""

from vescale.static._forward import StaticMode
from vescale.static._printed import (
    Fallback,
    RecordedProgram,
    RecordedSite,
    RecordedStep,
    RecordedType,
    StaticReport,
    program,
    report,
)

__all__ = [
    "Fallback",
    "RecordedProgram",
    "RecordedSite",
    "RecordedStep",
    "RecordedType",
    "StaticReport",
    "program",
    "report",
]
