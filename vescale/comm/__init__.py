"""Variable-size collectives, process groups over mesh axes, and the communication ledger."""

from vescale.comm._collectives import MAX_PADDING, Pending, all_gather_v, all_reduce, all_to_all_v, reduce_scatter_v
from vescale.comm._flat import all_gather_into, all_reduce_, reduce_scatter_into
from vescale.comm._groups import AxisGroup, axis_group, group_of_ranks
from vescale.comm._ledger import CommRecord, Ledger, asking, record, record_comms

__all__ = [
    "MAX_PADDING",
    "AxisGroup",
    "CommRecord",
    "Ledger",
    "Pending",
    "all_gather_into",
    "all_gather_v",
    "all_reduce",
    "all_reduce_",
    "all_to_all_v",
    "asking",
    "axis_group",
    "group_of_ranks",
    "record",
    "record_comms",
    "reduce_scatter_into",
    "reduce_scatter_v",
]
