"""Reading a DTensor that is Replicate communicates nothing: ``if rank == 0: print(loss.item())`` does not hang."""

from __future__ import annotations

import contextlib
import io

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.ranks import RankPools
from vescale import parallelize
from vescale.comm import record_comms
from vescale.plans import Plan


def one_rank_reads() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    plan = Plan(mesh).shard("0.weight", Shard(0), mesh="tp")
    model = parallelize(nn.Sequential(nn.Linear(3, 4)), plan)
    loss: DTensor = model(torch.ones(2, 3)).square().mean().full_tensor()  # type: ignore[attr-defined]
    whole = [Replicate(), Replicate()]
    loss = DTensor.from_local(loss.detach(), mesh, whole, run_check=False)
    table = DTensor.from_local(torch.arange(6.0).view(2, 3), mesh, whole, run_check=False)
    flag = DTensor.from_local(torch.tensor(True), mesh, whole, run_check=False)
    with record_comms() as ledger:
        if dist.get_rank() == 0:
            number = loss.item()
            assert float(loss) == number and int(loss) == int(number) and bool(flag) and (loss == loss)
            assert f"{loss:.3f}" == f"{number:.3f}" and f"{loss}" == f"{number}"
            assert "Replicate" in repr(loss) and "Replicate" in repr(table)
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                print(loss, table, loss.item())
            assert "DTensor" in printed.getvalue()
    assert not ledger.records
    dist.barrier()
    pending = DTensor.from_local(torch.ones(()), mesh, [Replicate(), Partial()])
    with record_comms() as ledger:
        assert pending.item() == 2.0
    (asked,) = ledger.records
    assert (
        asked.op == "all_reduce"
        and "item() of a DTensor with placements" in asked.requester
        and "Partial" in asked.requester
    )


def test_one_rank_reads_a_replicated_value(ranks: RankPools) -> None:
    ranks.run(one_rank_reads, world_size=2)
