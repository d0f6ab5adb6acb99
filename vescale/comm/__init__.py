"""Variable-size collectives, process groups over mesh axes, and the communication ledger."""

from vescale.comm._board import Board, CrossWaitError, RankGoneError, shared_memory
from vescale.comm._buckets import DEFAULT_BUCKET_BYTES, FIRST_BUCKET_BYTES, BucketBytes, bucket_limits, plan_buckets
from vescale.comm._byte_text import bytes_text
from vescale.comm._collectives import (
    MAX_PADDING,
    all_gather_v,
    all_reduce,
    all_to_all_v,
    gathered_size,
    reduce_scatter_v,
)
from vescale.comm._consensus import Consensus, ConsensusError, LateRanksWarning, wait_limit
from vescale.comm._flat_collectives import all_gather_into, all_reduce_, reduce_scatter_into
from vescale.comm._groups import AxisGroup, axis_group, group_of_ranks
from vescale.comm._joined_axes import join_axes
from vescale.comm._kept_results import (
    KeptResults,
    KeptTensors,
    keep_tensors,
    keeps_result,
    note_write,
    outside_of_kept,
    watch_holder,
)
from vescale.comm._ledger import LISTENERS, CommRecord, Ledger, current_requester, record, record_comms, requested_by
from vescale.comm._local_ranks import ProcessFailed, messages
from vescale.comm._long_waits import look_while_waiting, waiting_thread
from vescale.comm._observation import Observer, Operation, axes_of, expect_message, name_group, observe, received_bytes
from vescale.comm._pending import REDUCE_OPS, Pending, one_reduction, uses_nccl
from vescale.comm._posted_order import Apart, PostedOrder
from vescale.comm._rank_comparison import (
    Description,
    Difference,
    compare_descriptions,
    first_difference,
    listen_to_descriptions,
)
from vescale.comm._ring_cost import (
    Link,
    ReductionCost,
    fused_bytes,
    link_of,
    per_axis_bytes,
    reduction_cost,
    ring_bytes,
    ring_seconds,
)
from vescale.comm._streams import SideStream
from vescale.comm._waiting_ranks import WaitNotice

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "FIRST_BUCKET_BYTES",
    "LISTENERS",
    "MAX_PADDING",
    "REDUCE_OPS",
    "Apart",
    "AxisGroup",
    "Board",
    "BucketBytes",
    "CommRecord",
    "Consensus",
    "ConsensusError",
    "CrossWaitError",
    "Description",
    "Difference",
    "KeptResults",
    "KeptTensors",
    "LateRanksWarning",
    "Ledger",
    "Link",
    "Observer",
    "Operation",
    "Pending",
    "PostedOrder",
    "ProcessFailed",
    "RankGoneError",
    "ReductionCost",
    "SideStream",
    "WaitNotice",
    "all_gather_into",
    "all_gather_v",
    "all_reduce",
    "all_reduce_",
    "all_to_all_v",
    "axes_of",
    "axis_group",
    "bucket_limits",
    "bytes_text",
    "compare_descriptions",
    "current_requester",
    "expect_message",
    "first_difference",
    "fused_bytes",
    "gathered_size",
    "group_of_ranks",
    "join_axes",
    "keep_tensors",
    "keeps_result",
    "link_of",
    "listen_to_descriptions",
    "look_while_waiting",
    "messages",
    "name_group",
    "note_write",
    "observe",
    "one_reduction",
    "outside_of_kept",
    "per_axis_bytes",
    "plan_buckets",
    "received_bytes",
    "record",
    "record_comms",
    "reduce_scatter_into",
    "reduce_scatter_v",
    "reduction_cost",
    "requested_by",
    "ring_bytes",
    "ring_seconds",
    "shared_memory",
    "uses_nccl",
    "wait_limit",
    "waiting_thread",
    "watch_holder",
]
