"""What each op does on DTensors: one registry of placement rules, handlers and torch functions, by op family.

Importing the package registers the op families, and changes nothing in PyTorch; :func:`install` does, which the first
placement that is constructed calls.
"""

# The files of op families: each registers its ops in the registry when it is imported.
from vescale.ops import (
    attention,
    convolution,
    elementwise,
    factories,
    indexing,
    interleaved,
    losses,
    norms,
    recurrent,
    reductions,
    slicing,
    statistics,
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
from vescale.ops._call import Decision, OpCall
from vescale.ops._conversion import (
    PreparedConversion,
    bring,
    convert,
    cut,
    enter_local,
    leave_local,
    refuse_transforms,
    settle,
    share_version,
    stages_between,
    with_cut_gradient,
    wrap_global,
    write_back,
)
from vescale.ops._install import (
    PlacementFallbackError,
    PlacementFallbackWarning,
    decide_interleaved,
    install,
    misjudged_view,
    register_rule,
    run_op,
    strict_placements,
    view_of_parts,
)
from vescale.ops._observer import ModelObserver, observe, report_implicit_move, running_module
from vescale.ops._registry import OpContext, OpEntry, When, entries, families, register, register_family
from vescale.ops._ring_attention import RingSchedule, meetings
from vescale.ops._sparse import is_sparse, multiply_sparse
from vescale.ops._view_copies import remember_copy, write_through
from vescale.ops.attention import ROWS, AttentionWork, attend_to_prefixes, sequence_axes
from vescale.ops.elementwise import derivative_of_sum, is_elementwise, is_foreach, is_listed
from vescale.ops.losses import cross_entropy_of_rows, has_whole_rows, without_dim

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
