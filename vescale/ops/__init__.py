"""What each op does on DTensors: one registry of placement rules, handlers and torch functions, by op family.

Importing the package registers the op families, and changes nothing in PyTorch; :func:`install` does, which the first
placement that is constructed calls.
"""

from vescale.ops import (
    attention,
    batch_norm,
    concatenation,
    convolution,
    elementwise,
    embedding,
    factories,
    indexing,
    interleaved,
    losses,
    norms,
    pooling,
    pseudo_inverses,
    random,
    recurrent,
    reductions,
    slicing,
    statistics,
    tangents,
    to_python,
    views,
)
from vescale.ops._boundary_copies import (
    LIVE_COPIES,
    begin_anew,
    following_writes,
    note_local,
    num_writes,
    read_arguments,
    require_current,
    settling,
)
from vescale.ops._call import OpCall
from vescale.ops._context import OpContext
from vescale.ops._context_parallel import attend_to_prefixes, sequence_axes
from vescale.ops._conversion import (
    PreparedConversion,
    bring,
    bring_with_gradient,
    convert,
    enter_local,
    leave_local,
    refuse_transforms,
    wrap_global,
)
from vescale.ops._conversion_plans import cut, stages_between
from vescale.ops._cut_gradients import with_cut_gradient
from vescale.ops._decision import Decision, Rule
from vescale.ops._install import (
    PlacementFallbackError,
    PlacementFallbackWarning,
    install,
    misjudged_view,
    run_interleaved,
    run_op,
    strict_placements,
    view_of_uneven_shards,
    write_back,
)
from vescale.ops._links import settle, share_version
from vescale.ops._observer import ModelObserver, observe, report_implicit_move, running_module
from vescale.ops._register_rule import register_rule
from vescale.ops._registry import (
    OpEntry,
    OpFamily,
    When,
    entries,
    families,
    register,
    register_aten,
    register_family,
)
from vescale.ops._ring_attention import Meeting, RingSchedule, Runs, meetings
from vescale.ops._sparse import is_sparse, multiply_sparse
from vescale.ops._view_copies import remember_copy, write_through
from vescale.ops.attention import ROWS, AttentionWork
from vescale.ops.elementwise import is_elementwise, is_foreach, is_listed
from vescale.ops.losses import cross_entropy_of_rows, has_whole_rows, without_dim
from vescale.ops.norms import normalizes_locally

__all__ = [
    "Decision",
    "OpCall",
    "PlacementFallbackError",
    "PlacementFallbackWarning",
    "entries",
    "families",
    "register_rule",
    "strict_placements",
]

# The files of op families. Each registers its ops in the registry when it is imported.
FAMILY_FILES = (
    attention,
    batch_norm,
    concatenation,
    convolution,
    elementwise,
    embedding,
    factories,
    indexing,
    interleaved,
    losses,
    norms,
    pooling,
    pseudo_inverses,
    random,
    recurrent,
    reductions,
    slicing,
    statistics,
    tangents,
    to_python,
    views,
)
