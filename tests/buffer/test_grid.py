"""The 330 real cases against the file of record, and the figures of the veScale-FSDP paper."""

from __future__ import annotations

import pytest

from tests.buffer import grid, oracle
from tests.buffer.grid import Case
from vescale.buffer import plan_layout
from vescale.buffer._planner import plan_group

RECORDED = grid.read()


def planned(case: Case, **options: object):
    layout = plan_layout(*case.tensors, case.num_shards, grid.ALIGNMENT, **options)
    oracle.check_layout(
        layout.numels, layout.blocks, layout.num_shards, layout.alignment, layout.shard_size, layout.offsets
    )
    return layout


def test_the_file_holds_the_grid() -> None:
    assert list(RECORDED) == grid.CASES
    assert len(RECORDED) == 330
    for sizes in RECORDED.values():
        assert sizes.bound <= sizes.shard_size <= sizes.paper
        assert sizes.shard_size <= 1.0005 * sizes.bound
    assert sum(sizes.shard_size == sizes.bound for sizes in RECORDED.values()) >= 316


@pytest.mark.parametrize("name", grid.LISTS)
def test_paper_order(name: str) -> None:
    """Algorithm 1, in pure Python."""
    for case in grid.CASES:
        if case.name == name:
            assert planned(case, order="default").shard_size == RECORDED[case].paper, case


@pytest.mark.helper("planner")
@pytest.mark.parametrize("name", grid.LISTS)
def test_all_orders(name: str) -> None:
    for case in grid.CASES:
        if case.name == name:
            layout = planned(case)
            assert layout.shard_size == RECORDED[case].shard_size, case
            assert layout.lower_bound <= RECORDED[case].bound, case
            if layout.optimal:
                assert layout.shard_size == RECORDED[case].bound, case


# Of each kind of list and of each strategy; together a few seconds in numpy.
WITHOUT_HELPER = [
    *(case for case in grid.CASES if case.name in ("dsv3_dense", "gptoss_hf", "llama3_70b", "qwen3_30b_fused")),
    *(case for case in grid.CASES if case.name == "mixtral"),
    Case("dsv3_moe", 1, 1024),
    Case("qwen3_30b", 128, 512),
]


def test_all_orders_without_the_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fallback gives the layouts on file wherever its smaller tables suffice."""
    monkeypatch.setenv("VESCALE_NO_NATIVE", "1")
    plan_group.cache_clear()
    for case in WITHOUT_HELPER:
        assert planned(case).shard_size == RECORDED[case].shard_size, case


PAPER_PADDING = {  # percent, in the paper's order; section 6.4 and its figures as far as its text tells them
    Case("gptoss_hf", 128, 1024): 17.485,  # "spikes up to 18 %"
    Case("gptoss_hf", 128, 512): 5.736,
    Case("gptoss_hf", 128, 64): 1.330,
    Case("gptoss_hf", 16, 1024): 2.799,  # 1 and 16 rows: "less than 3 %"
    Case("gptoss_hf", 1, 1024): 0.045,
    Case("dsv3_moe", 128, 128): 0.016,
    Case("dsv3_moe", 128, 256): 0.308,
    Case("dsv3_moe", 128, 512): 2.058,
    Case("dsv3_moe", 128, 1024): 7.306,
    Case("dsv3_moe", 16, 1024): 0.016,
    Case("llama3_70b", 128, 64): 9.802,
    Case("llama3_70b", 128, 1024): 778.415,
    Case("gptoss_per_expert", 128, 128): 2.065,
    Case("gptoss_per_expert", 128, 256): 5.736,
    Case("qwen3_30b", 128, 256): 7.698,
    Case("mixtral", 128, 32): 5.199,
}


def padding(case: Case, shard_size: int) -> float:
    total = sum(case.tensors[0])
    return 100 * (case.num_shards * shard_size / total - 1)


@pytest.mark.parametrize("case", PAPER_PADDING, ids=str)
def test_padding_in_the_papers_order(case: Case) -> None:
    assert padding(case, RECORDED[case].paper) == pytest.approx(PAPER_PADDING[case], abs=6e-4)


@pytest.mark.parametrize(
    ("case", "percent"),
    [
        (Case("dsv3_moe", 128, 512), 0.308),
        (Case("dsv3_moe", 128, 1024), 2.641),
        (Case("qwen3_30b", 128, 256), 2.313),
        (Case("qwen3_30b", 16, 512), 0.967),
        (Case("mixtral", 128, 32), 0.575),
        (Case("gptoss_per_expert", 128, 256), 2.799),
    ],
    ids=str,
)
def test_padding_over_all_orders(case: Case, percent: float) -> None:
    assert padding(case, RECORDED[case].shard_size) == pytest.approx(percent, abs=6e-4)


@pytest.mark.parametrize(
    ("case", "one", "two"),
    [
        (Case("gptoss_hf", 128, 1024), 17.485, 5.8),
        (Case("gptoss_hf", 128, 256), 5.736, 0.8),
        (Case("dsv3_dense", 128, 16), 35.861, 3.6),
    ],
    ids=str,
)
def test_two_buffers(case: Case, one: float, two: float) -> None:
    alone = plan_layout(*case.tensors, case.num_shards, grid.ALIGNMENT)
    assert 100 * alone.padding_ratio == pytest.approx(one, abs=6e-4)
    assert alone.optimal, "what one buffer wastes is inherent"
    plan = plan_layout(*case.tensors, case.num_shards, grid.ALIGNMENT, max_buffers=2)
    assert 100 * plan.padding_ratio <= two
