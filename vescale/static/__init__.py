"""Static mode: after one recorded step, the model runs on local tensors, with the collectives that its plan needs."""

from vescale.static._install import StaticMode
from vescale.static._record_export import program
from vescale.static._record_loading import read_record
from vescale.static._record_values import (
    RecordedBoundary,
    RecordedFunction,
    RecordedModule,
    RecordedPatch,
    RecordedSite,
    RecordedStep,
    RecordedType,
    Site,
)
from vescale.static._recorded_program import RecordedProgram
from vescale.static._report import EagerFunction, Fallback, StaticReport, report

__all__ = [
    "Fallback",
    "RecordedBoundary",
    "RecordedModule",
    "RecordedProgram",
    "RecordedSite",
    "RecordedStep",
    "RecordedType",
    "Site",
    "StaticReport",
    "program",
    "report",
]
