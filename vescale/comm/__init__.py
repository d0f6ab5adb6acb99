"""Variable-size collectives, process groups over mesh axes, and the communication ledger."""

from vescale.comm._buckets import (
    DEFAULT_BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    BucketBytes,
    Link,
    ReductionCost,
    bucket_limits,
    fused_bytes,
    link_of,
    per_axis_bytes,
    plan_buckets,
    reduction_cost,
    ring_bytes,
)
from vescale.comm._collectives import (
    MAX_PADDING,
    all_gather_into,
    all_gather_v,
    all_reduce,
    all_reduce_,
    all_to_all_v,
    bytes_text,
    gathered_size,
    reduce_scatter_into,
    reduce_scatter_v,
)
from vescale.comm._joined_axes import AxisGroup, axis_group, group_of_ranks, join_axes
from vescale.comm._kept_results import (
    KeptResults,
    KeptTensors,
    keep_tensors,
    keeps_result,
    note_locals,
    note_write,
    outside_of_kept,
    watch_holder,
)
from vescale.comm._ledger import (
    LISTENERS,
    CommRecord,
    Ledger,
    current_requester,
    record,
    record_comms,
    release_at_end,
    requested_by,
)
from vescale.comm._local_ranks import messages
from vescale.comm._long_waits import (
    DEVICE,
    LONG_WAIT_SECONDS,
    look,
    look_while_waiting,
    waiting_thread,
    waits_for,
)
from vescale.comm._observation import (
    Observer,
    Operation,
    axes_of,
    expect_message,
    name_group,
    observe,
    received_bytes,
    tell_wait,
)
from vescale.comm._pending import REDUCE_OPS, Pending, one_reduction, uses_nccl
from vescale.comm._streams import DeviceWait, HostCopy, SideStream, to_device

__all__ = ["CommRecord", "Ledger", "join_axes", "record_comms"]
