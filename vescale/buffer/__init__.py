"""Communication buffers: the layout planner."""

from vescale.buffer._layout import Layout, LocalUnits, ShardSlice
from vescale.buffer._planner import Effort, plan_layout
from vescale.buffer._splitting import BufferPlan

__all__ = ["BufferPlan", "Effort", "Layout", "LocalUnits", "ShardSlice", "plan_layout"]
