"""The plan's intermediate representation: instructions, programs, and lowering."""

from vescale.ir._diff import Change, ProgramDiff
from vescale.ir._findings import Finding, LoweringError
from vescale.ir._lower import check, lower
from vescale.ir._ops import Annotate, Batch, Factory, Local, Op, Place, Redistribute, Stage, Unit, Wrap
from vescale.ir._passes import (
    batch_redistributions,
    drop_noops,
    fuse_redistributions,
    merge_duplicates,
    optimize,
)
from vescale.ir._program import Hook, Instruction, Program

__all__ = [
    "Annotate",
    "Batch",
    "Change",
    "Factory",
    "Finding",
    "Hook",
    "Instruction",
    "Local",
    "LoweringError",
    "Op",
    "Place",
    "Program",
    "ProgramDiff",
    "Redistribute",
    "Stage",
    "Unit",
    "Wrap",
    "batch_redistributions",
    "check",
    "drop_noops",
    "fuse_redistributions",
    "lower",
    "merge_duplicates",
    "optimize",
]
