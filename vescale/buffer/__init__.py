"""Communication buffers: the layout planner, and ``DBuffer``, memory laid out by it."""

import importlib
from typing import TYPE_CHECKING, Any

from vescale.buffer._granularity import FFN_WEIGHTS, Elements, GranularityTable, Rows, Tile
from vescale.buffer._layout import Layout, ShardSlice
from vescale.buffer._planner import BufferPlan, plan_layout
from vescale.errors import BufferMismatchError

if TYPE_CHECKING:
    from vescale.buffer._agreement import check_same_buffers
    from vescale.buffer._dbuffer import Allocation, DBuffer, PendingBuffer, observe_allocations
    from vescale.buffer._tensor_group import COLLECTIVE_ALIGNMENT_BYTES, TensorGroup, alignment_in_elements

# Planning needs no torch; these do, and are loaded on first use.
_FILES = {
    "_dbuffer": "Allocation DBuffer PendingBuffer observe_allocations",
    "_tensor_group": "COLLECTIVE_ALIGNMENT_BYTES TensorGroup alignment_in_elements",
    "_agreement": "check_same_buffers",
}
_WITH_TORCH = {name: file for file, names in _FILES.items() for name in names.split()}

__all__ = [
    "FFN_WEIGHTS",
    "BufferMismatchError",
    "DBuffer",
    "Elements",
    "GranularityTable",
    "Layout",
    "PendingBuffer",
    "Rows",
    "TensorGroup",
    "Tile",
    "plan_layout",
]


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        value = getattr(importlib.import_module(f"vescale.buffer.{_WITH_TORCH[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'vescale.buffer' has no attribute {name!r}")
