"""Mistakes of the script around a model that would end in wrong numbers or a hang: found, and told with the edit."""

from vescale.checks._adopted_optimizers import adopt_optimizers, check_optimizers, listed_optimizers
from vescale.checks._backward_graph import ScriptGraph, describe_graphs, follows_graphs
from vescale.checks._call_site import call_site, called_by_user
from vescale.checks._descriptions import describe, hash_of, sample, sum_of_bits, tensor_text
from vescale.checks._events import LocalPart
from vescale.checks._mismatches import (
    DRAWN,
    GENERATING,
    MADE,
    NUMBERS,
    PARTS,
    SEED,
    STATE,
    UNKNOWN,
    USED,
    WRITTEN,
    WRITTEN_GATHERED,
    InputMismatchError,
    StepMismatchError,
    parts_text,
)
from vescale.checks._optimizer_steps import watch_optimizers
from vescale.checks._parameter_names import known_names
from vescale.checks._random_states import RandomStates, describe_draw
from vescale.checks._repeated_parts import RepeatedPartsWarning
from vescale.checks._replaced_parameters import (
    RegisteredParameters,
    ReplacedParameterError,
    Replacement,
    replacement_of,
)
from vescale.checks._settings import check_every, check_mode, is_unchecked, unchecked
from vescale.checks._start import HASHES_OF_CHECKED_MESHES, start_checks, start_checks_among, step_checks
from vescale.checks._steps import StepChecks

__all__ = [
    "DRAWN",
    "GENERATING",
    "HASHES_OF_CHECKED_MESHES",
    "MADE",
    "NUMBERS",
    "PARTS",
    "SEED",
    "STATE",
    "UNKNOWN",
    "USED",
    "WRITTEN",
    "WRITTEN_GATHERED",
    "InputMismatchError",
    "LocalPart",
    "RandomStates",
    "RegisteredParameters",
    "RepeatedPartsWarning",
    "ReplacedParameterError",
    "Replacement",
    "ScriptGraph",
    "StepChecks",
    "StepMismatchError",
    "adopt_optimizers",
    "call_site",
    "called_by_user",
    "check_every",
    "check_mode",
    "check_optimizers",
    "describe",
    "describe_draw",
    "describe_graphs",
    "follows_graphs",
    "hash_of",
    "is_unchecked",
    "known_names",
    "listed_optimizers",
    "parts_text",
    "replacement_of",
    "sample",
    "start_checks",
    "start_checks_among",
    "step_checks",
    "sum_of_bits",
    "tensor_text",
    "unchecked",
    "watch_optimizers",
]
