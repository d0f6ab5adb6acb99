"""Static mode: after one recorded step, the model runs on local tensors, with the collectives that its plan needs."""

from vescale.static._install import StaticMode
from vescale.static._printed import RecordedProgram, RecordedSite, RecordedStep, RecordedType, program
from vescale.static._report import Fallback, StaticReport, report

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
