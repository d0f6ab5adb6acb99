"""``vescale.init_mesh``: sizes, and a process group that is there. Alone: tests/cli/test_new.py."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import vescale
from tests.device import device_type
from tests.ranks import RankPools
from vescale.errors import PlanValueError
from vescale.plans import PlanMismatchError, axis_sizes
from vescale.runtime._init_mesh import _check_store, _fill


@pytest.mark.parametrize(
    "text, num_ranks, sizes",
    [
        ("dp=2,tp=4", 8, (2, 4)),
        ("dp=-1,tp=4", 8, (2, 4)),
        ("dp=-1, tp=1", 3, (3, 1)),
        ("tp=1", 1, (1,)),
        ("dp=2,tp=-1", 2, (2, 1)),
    ],
)
def test_sizes(text: str, num_ranks: int, sizes: tuple[int, ...]) -> None:
    assert _fill(axis_sizes(text, may_be_open=True), num_ranks).sizes == sizes


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "dp=2,tp=2",
            r"mesh dp=2,tp=2 has 4 ranks, but this job has 8; pass sizes whose product is 8.*--nproc-per-node 4",
        ),
        ("dp=-1,tp=3", r"mesh dp=-1,tp=3 has 3 x n ranks, but this job has 8"),
        ("dp=-1,tp=-1", "2 axes of size -1"),
        ("dp=0,tp=8", "mesh axis 'dp' has size 0"),
        ("dp=-2,tp=4", "mesh axis 'dp' has size -2"),
        ("dp", "'dp' is not axis=size; write a mesh as dp=2,tp=4, or dp=-1,tp=4"),
        ("dp=2,dp=4", "mesh axis 'dp' is given twice"),
        ("dp=two", "is not axis=size"),
    ],
)
def test_bad_sizes(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _fill(axis_sizes(text, may_be_open=True), 8)


def test_axes_that_are_a_number() -> None:
    with pytest.raises(PlanValueError, match=r'axes is 7\.5, a float; pass sizes by name, such as "dp=2,tp=2"'):
        vescale.init_mesh(7.5)  # type: ignore[arg-type]


def on_ranks() -> None:
    group = dist.group.WORLD
    mesh = vescale.init_mesh({"dp": -1, "tp": 2})
    assert mesh.shape == (1, 2) and mesh.mesh_dim_names == ("dp", "tp") and mesh.device_type == device_type()
    assert dist.group.WORLD is group  # the one that was there
    with pytest.raises(ValueError, match="this job has 2"):
        vescale.init_mesh("dp=3")


def test_a_process_group_that_is_there(ranks: RankPools) -> None:
    ranks.run(on_ranks, world_size=2)


def differing() -> None:
    rank = dist.get_rank()
    for axes in ({"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}), ({"dp": 2}, {"tp": 2}):
        with pytest.raises(
            PlanMismatchError, match=r"init_mesh: .*on rank 0 and .*on rank 1; pass the same axes on every rank"
        ):
            vescale.init_mesh(axes[rank])
    assert vescale.init_mesh("dp=2").shape == (2,)


def test_ranks_that_differ(ranks: RankPools) -> None:
    ranks.run(differing, world_size=2)


def test_the_store_of_an_earlier_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that torchrun has restarted would wait for addresses of processes that are gone."""
    for name, value in (("TORCHELASTIC_USE_AGENT_STORE", "True"), ("TORCHELASTIC_RESTART_COUNT", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r"attempt 2.* set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        _check_store()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    _check_store()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    _check_store()
