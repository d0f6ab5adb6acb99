"""The 330 real cases: the parameters of one layer of 11 models, rows of FFN weights as blocks, 8 to 4096 shards."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.model_shapes import shape_list
from vescale.buffer import FFN_WEIGHTS, GranularityTable, Rows

ALIGNMENT = 8  # 16 bytes of bfloat16
ROWS = (1, 16, 128)
NUM_SHARDS = tuple(8 << i for i in range(10))
REGRESSION = Path(__file__).parent / "grid.json"

# name -> (shape list, which of its units)
LISTS = {
    "dsv3_moe": ("deepseek-v3-per-expert", 2),
    "dsv3_moe_fused": ("deepseek-v3", 2),
    "dsv3_dense": ("deepseek-v3", 1),
    "gptoss_hf": ("gpt-oss-120b", 1),
    "gptoss_outin": ("gpt-oss-120b-out-in", 1),
    "gptoss_per_expert": ("gpt-oss-120b-per-expert", 1),
    "llama3_70b": ("llama-3-70b", 1),
    "qwen3_30b": ("qwen3-30b-a3b-per-expert", 1),
    "qwen3_30b_fused": ("qwen3-30b-a3b", 1),
    "mixtral": ("mixtral-8x7b-per-expert", 1),
    "mixtral_fused": ("mixtral-8x7b", 1),
}


class Case(NamedTuple):
    name: str
    rows: int
    num_shards: int

    @property
    def tensors(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(numels, blocks)."""
        return tensors(self.name, self.rows)


class Recorded(NamedTuple):
    """What is on file of one case: shard sizes in elements."""

    paper: int  # order="default"
    shard_size: int  # order="auto", effort="fast", with the C++ helper
    bound: int  # the best bound that any effort has proven


CASES = [Case(name, rows, num_shards) for name in LISTS for rows in ROWS for num_shards in NUM_SHARDS]


@cache
def tensors(name: str, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """As in the paper: rows of expert and FFN matrices, counted across fused experts; the rest element-wise."""
    model, unit = LISTS[name]
    shapes = shape_list(model).units[unit].shapes
    blocks = GranularityTable([(FFN_WEIGHTS, Rows(rows, across_matrices=True))]).blocks(shapes)
    return tuple(math.prod(shape) for shape in shapes.values()), tuple(blocks)


def read() -> dict[Case, Recorded]:
    data = json.loads(REGRESSION.read_text())
    return {Case(name, rows, num_shards): Recorded(*sizes) for name, rows, num_shards, *sizes in data["cases"]}


def write(recorded: dict[Case, Recorded]) -> None:
    lines = ",\n".join(json.dumps([*case, *sizes]) for case, sizes in recorded.items())
    head = '{"columns": ["list", "rows", "num_shards", "paper", "shard_size", "bound"], "cases": [\n'
    REGRESSION.write_text(head + lines + "\n]}\n")
