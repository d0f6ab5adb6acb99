"""The plan's intermediate representation: instructions, programs, and lowering."""

from vescale.ir._findings import Finding, LoweringError
from vescale.ir._lower import check, lower
from vescale.ir._ops import Annotate, Factory, Local, Op, Place, Redistribute, Stage, Unit, Wrap
from vescale.ir._program import Hook, Instruction, Program

__all__ = [
    "Annotate",
    "Factory",
    "Finding",
    "Hook",
    "Instruction",
    "Local",
    "LoweringError",
    "Op",
    "Place",
    "Program",
    "Redistribute",
    "Stage",
    "Unit",
    "Wrap",
    "check",
    "lower",
]
