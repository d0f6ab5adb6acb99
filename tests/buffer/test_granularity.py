"""Rows and tiles as blocks of elements."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vescale.buffer import FFN_WEIGHTS, Elements, GranularityTable, Rows, Tile, plan_layout


@pytest.mark.parametrize(
    ("granularity", "shape", "block"),
    [
        (Elements(), (4, 6), 1),
        (Elements(32), (4, 6), 32),
        (Rows(1), (4, 6), 6),
        (Rows(2), (4, 6), 12),
        (Rows(3), (4, 6), 18),  # a lone matrix may end with a short block
        (Rows(9), (4, 6), 24),
        (Rows(2), (8, 4, 6), 12),
        (Rows(9), (8, 4, 6), 24),  # an expert has only 4 rows: it stays whole
        (Rows(3, across_matrices=True), (8, 4, 6), 18),
        (Rows(2), (7,), 7),
        (Rows(2), (), 1),
        (Tile((128, 128)), (256, 512), 128 * 512),
        (Tile((128, 128)), (16, 256, 512), 128 * 512),
        (Tile((1, 128)), (16, 512), 128),
        (Tile((2, 3, 4)), (4, 3, 8), 2 * 3 * 8),
        (Tile((1, 1)), (5, 7), 1),
        (Tile((4,)), (10,), 4),
        (Tile((4, 4)), (0, 8), 1),
    ],
)
def test_blocks(granularity: Rows, shape: tuple[int, ...], block: int) -> None:
    assert granularity.block(shape) == block


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
@settings(max_examples=examples(300), deadline=None)
def test_blocks_cut_no_tile(shape: list[int], dims: list[int]) -> None:
    """By definition: all elements of a tile lie in one block."""
    if len(dims) > len(shape):
        with pytest.raises(ValueError, match="has no tiles"):
            Tile(tuple(dims)).block(shape)
        return
    try:
        block = Tile(tuple(dims)).block(shape)
    except ValueError as error:
        assert "Nearest sizes that work" in str(error)
        return
    leading = len(shape) - len(dims)
    tile_of: dict[tuple[int, ...], set[int]] = {}
    for position, index in enumerate(itertools.product(*map(range, shape))):
        tile = (*index[:leading], *(i // size for i, size in zip(index[leading:], dims, strict=True)))
        tile_of.setdefault(tile, set()).add(position // block)
    assert all(len(blocks) == 1 for blocks in tile_of.values())
    assert block <= math.prod(shape)


@pytest.mark.parametrize("granularity", [Rows(128), Tile((128, 128)), Tile((1, 128, 128))])
def test_rows_never_run_from_one_expert_into_the_next(granularity: Rows) -> None:
    with pytest.raises(ValueError) as caught:  # GPT-OSS: 22.5 blocks of 128 rows in each expert
        granularity.block((128, 2880, 5760))
    assert "128 does not divide the 2880 of dim 1" in str(caught.value)
    assert "120 or 144" in str(caught.value)
    for works in (120, 144):
        assert Rows(works).block((128, 2880, 5760)) == works * 5760


def test_the_table_is_a_policy() -> None:
    policy = GranularityTable([(r".*\.down_proj\.weight", Rows(1)), (r".*proj\.weight", Tile((2, 2)))])
    model = torch.nn.ModuleDict(
        {
            "up_proj": torch.nn.Linear(4, 8, bias=False, device="meta"),
            "mlp": torch.nn.ModuleDict({"down_proj": torch.nn.Linear(8, 4, device="meta")}),
        }
    )
    found = {name: policy(name, parameter) for name, parameter in model.named_parameters()}
    assert found == {"up_proj.weight": 8, "mlp.down_proj.weight": 8, "mlp.down_proj.bias": None}, "the first match wins"
    blocks = policy.blocks({name: parameter.shape for name, parameter in model.named_parameters()})
    assert blocks == [8, 8, 1]
    plan_layout([parameter.numel() for parameter in model.parameters()], blocks, 4, 4)


def test_patterns_match_whole_names() -> None:
    table = GranularityTable([("weight", Rows(1))])
    assert table("layer.weight", torch.empty(2, 2)) is None
    with pytest.raises(ValueError, match=r"'weight' matches none of 1 parameters, for example layer\.weight"):
        table.blocks({"layer.weight": (2, 2)})


def test_errors_name_the_parameter() -> None:
    with pytest.raises(ValueError, match=r"parameter 'experts\.w', Rows\(count=3.*dim 1.*2 or 4"):
        GranularityTable([("experts.*", Rows(3))]).blocks({"experts.w": (2, 8, 4)})
    with pytest.raises(ValueError, match=r"pattern '\(' is not a regular expression"):
        GranularityTable([("(", Rows(3))])
    with pytest.raises(ValueError, match="at least 1"):
        Rows(0)
    with pytest.raises(ValueError, match=r"Tile\.dims is empty"):
        Tile(())


@pytest.mark.parametrize(
    ("name", "matches"),
    [
        ("mlp.experts.gate_up_proj", True),
        ("mlp.experts.gate_up_proj_bias", False),
        ("mlp.gate.weight", False),
        ("mlp.shared_experts.down_proj.weight", True),
        ("block_sparse_moe.experts.3.w2.weight", True),
        ("self_attn.o_proj.weight", False),
        ("down_proj.weight", True),
        ("mlp.down_proj.bias", False),
        ("h.0.mlp.c_fc.weight", True),
    ],
)
def test_ffn_weights(name: str, matches: bool) -> None:
    assert (GranularityTable([(FFN_WEIGHTS, Rows(1))])(name, torch.empty(2, 2)) is not None) == matches
