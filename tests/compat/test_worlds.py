"""What is remembered of decisions holds for one world: a process may become another rank of an equal mesh."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.simulate import simulate
from tests.whole import whole
from vescale import parallelize, placements
from vescale.plans import Plan

_VALUES = torch.arange(20.0).reshape(5, 4).sin()
_CLASSES = torch.tensor([0, 3, 1, 2, 0])


@pytest.fixture(autouse=True)
def _leaves_no_world() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _results(x: torch.Tensor) -> list[torch.Tensor]:
    """Of ops that PyTorch's C++ decides, and of ops that the table of handlers takes."""
    each = F.nll_loss(x, _CLASSES, reduction="none")
    return [x * 2, x.sort(0).values, x[1:], each, F.mse_loss(x, x + 1, reduction="none")]


def _rows_of_results() -> list[torch.Tensor]:
    """This rank's rows; no communication."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize(nn.Identity(), Plan(mesh))  # the handlers
    results = _results(distribute_tensor(_VALUES, mesh, [Replicate()] * 2, src_data_rank=None))
    return [x.redistribute(placements=[Replicate(), Shard(0)]).to_local() for x in results]  # type: ignore[attr-defined]


def _expected_rows(rank: int) -> list[torch.Tensor]:
    return [x.chunk(2)[rank % 2] for x in _results(_VALUES)]


def _become(rank: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())


def test_a_process_becomes_another_rank() -> None:
    for rank in (0, 3, 1, 2):
        _become(rank)
        for found, expected in zip(_rows_of_results(), _expected_rows(rank), strict=True):
            assert torch.equal(found, expected), f"rank {rank} has the part of another one"


@pytest.mark.parametrize(
    "make", [distribute_tensor, placements.distribute_tensor, DTensor.from_local, placements.from_local]
)
def test_tensors_without_a_model(make: Callable[..., DTensor]) -> None:
    """Results are on the mesh of this world, however the tensor was made."""
    placements.RaggedShard()  # the hooks
    for rank in (0, 3, 1, 2):
        _become(rank)
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        if "from_local" in make.__qualname__:
            local = torch.tensor_split(_VALUES[:4], 4)[rank]
            x = make(local, mesh, [Shard(0)])
        else:
            x = make(_VALUES, mesh, [Shard(0)], src_data_rank=None)
        for result in (x.detach(), x * 2, nn.Parameter(x)):
            assert result.device_mesh.get_coordinate() == (rank,), f"rank {rank} has the mesh of another one"


def test_simulated_ranks_whose_threads_had_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that end leave their identity, by which PyTorch tells equal meshes of simulated ranks apart, to later ones."""

    class Threading:
        turn = 0

        def __getattr__(self, name: str) -> object:
            return getattr(threading, name)

        def get_ident(self) -> int:
            return 1000 + (dist.get_rank() + self.turn) % 4

    threads = Threading()
    monkeypatch.setattr(device_mesh, "threading", threads)
    for threads.turn in range(3):
        for rank, parts in enumerate(simulate(_rows_of_results, 4)):
            for found, expected in zip(parts, _expected_rows(rank), strict=True):
                assert torch.equal(found, expected), f"rank {rank} has the part of another one"


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(13, 6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(x)))
        return x[:, :3].square().sum()


def _train_in_worlds(process: int, stores: list[str]) -> None:
    for turn, store in enumerate(stores):
        rank = (process + turn) % 4
        dist.init_process_group(
            "gloo", rank=rank, world_size=4, store=dist.FileStore(store, 4), timeout=timedelta(seconds=60)
        )
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = Plan(mesh).shard("up.weight", Shard(0), mesh="tp").shard("up.bias", Shard(0), mesh="tp")
        plan.shard("down.weight", Shard(1), mesh="tp").shard("embed.weight", Shard(0), mesh="tp")
        plan.shard("<in>", Shard(0), mesh="dp")
        torch.manual_seed(0)
        reference = _Net().double()
        torch.manual_seed(0)
        model = parallelize(_Net().double(), plan)
        ids = torch.arange(20).reshape(5, 4) % 13
        expected, loss = reference(ids), model(ids)
        expected.backward()
        loss.backward()
        assert abs(float(loss) - float(expected)) < 1e-12
        for mine, one in zip(model.parameters(), reference.parameters(), strict=True):
            assert isinstance(mine.grad, DTensor) and one.grad is not None
            assert torch.allclose(whole(mine.grad), one.grad, rtol=1e-12, atol=1e-14)
        dist.barrier()
        dist.destroy_process_group()


@pytest.mark.slow
def test_processes_that_join_another_world_as_other_ranks(tmp_path: Path) -> None:
    """Decisions that were remembered with a mesh of the destroyed world asked for process groups that are gone."""
    mp.spawn(_train_in_worlds, ([str(tmp_path / str(turn)) for turn in range(3)],), 4)  # type: ignore[no-untyped-call]
