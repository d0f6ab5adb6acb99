"""What each op does on DTensors: one registry of placement rules, handlers and torch functions, by op family.

Importing the package registers the op families, and changes nothing in PyTorch; :func:`install` does, which the first
placement that is constructed calls.
"""

from vescale.ops import (
    argmax,
    comparisons,
    elementwise,
    factories,
    foreach,
    interleaved,
    masked_assignment,
    random,
    reductions,
    slicing,
    stack,
    vector_norms,
    views,
)
from vescale.ops._call import OpCall
from vescale.ops._decision import Decision, Rule
from vescale.ops._dispatch import run_interleaved
from vescale.ops._fallback import PlacementFallbackError, PlacementFallbackWarning, strict_placements
from vescale.ops._install import install
from vescale.ops._register_rule import register_rule
from vescale.ops._registry import (
    OpEntry,
    OpFamily,
    entries,
    entry_of,
    families,
    register,
    register_aten,
    register_family,
)
from vescale.ops.elementwise import is_elementwise

__all__ = [
    "FAMILY_FILES",
    "Decision",
    "OpCall",
    "OpEntry",
    "OpFamily",
    "PlacementFallbackError",
    "PlacementFallbackWarning",
    "Rule",
    "entries",
    "entry_of",
    "families",
    "install",
    "is_elementwise",
    "register",
    "register_aten",
    "register_family",
    "register_rule",
    "run_interleaved",
    "strict_placements",
]

# The files of op families. Each registers its ops in the registry when it is imported.
FAMILY_FILES = (
    argmax,
    comparisons,
    elementwise,
    factories,
    foreach,
    interleaved,
    masked_assignment,
    random,
    reductions,
    slicing,
    stack,
    vector_norms,
    views,
)
