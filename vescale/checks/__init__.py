"""Mistakes of the script around a model that would end in wrong numbers or a hang: found, and told with the edit."""

from vescale.checks._backward_graph import ScriptGraph, describe_graphs, follows_graphs
from vescale.checks._descriptions import (
    RandomStates,
    TrainedParameters,
    called_by_user,
    describe,
    describe_draw,
    hash_of,
    sample,
    sum_of_bits,
    tensor_text,
)
from vescale.checks._mismatches import (
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
from vescale.checks._replaced_parameters import (
    RegisteredParameters,
    ReplacedParameterError,
    adopt_optimizers,
    check_optimizers,
    known_names,
    listed_optimizers,
    replacement_of,
)
from vescale.checks._start import HASHES_OF_CHECKED_MESHES, start_checks, start_checks_among, step_checks
from vescale.checks._steps import LocalPart, StepChecks, is_unchecked, unchecked
