"""Communication buffers: the layout planner."""

from vescale.buffer._granularity import FFN_WEIGHTS, Elements, GranularityTable, Rows, Tile
from vescale.buffer._layout import Layout, LocalUnits, ShardSlice
from vescale.buffer._planner import Effort, plan_layout
from vescale.buffer._shapes import ModelShapes, Unit, group_units, shape_list, shape_list_names
from vescale.buffer._splitting import BufferPlan
from vescale.buffer._suggest import ShardSuggestion, suggest_num_shards

__all__ = [
    "FFN_WEIGHTS",
    "BufferPlan",
    "Effort",
    "Elements",
    "GranularityTable",
    "Layout",
    "LocalUnits",
    "ModelShapes",
    "Rows",
    "ShardSlice",
    "ShardSuggestion",
    "Tile",
    "Unit",
    "group_units",
    "plan_layout",
    "shape_list",
    "shape_list_names",
    "suggest_num_shards",
]
