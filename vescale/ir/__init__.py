"""The plan's intermediate representation: instructions, programs."""

from vescale.ir._ops import Annotate, Factory, Local, Op, Place, Redistribute, Stage, Unit, Wrap
from vescale.ir._program import Hook, Instruction, Program

__all__ = [
    "Annotate",
    "Factory",
    "Hook",
    "Instruction",
    "Local",
    "Op",
    "Place",
    "Program",
    "Redistribute",
    "Stage",
    "Unit",
    "Wrap",
]
