"""``distribute_tensor`` learns of new placements wherever it was imported, also before vescale was."""

from __future__ import annotations

import inspect

import pytest

from tests.fresh import run_fresh

PROGRAM = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale.placements import RaggedShard, distribute_tensor as ours

dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
mesh = init_device_mesh("cpu", (3,))
x = torch.arange(10.0)
ragged = [RaggedShard((0,), (5, 2, 3))]
for function in (distribute_tensor, torch.distributed.tensor.distribute_tensor, ours):
    {body}
"""
BODIES = {
    "ragged": """
    found = function(x, mesh, ragged, src_data_rank=None)
    assert found.placements == tuple(ragged) and found.to_local().tolist() == [5.0, 6.0], found
""",
    "generator": """
    assert function(x, mesh, (p for p in ragged), src_data_rank=None).to_local().tolist() == [5.0, 6.0]
""",
    "stock": """
    assert function(x, mesh, [Shard(0)], src_data_rank=None).to_local().tolist() == [4.0, 5.0, 6.0, 7.0]
""",
}


@pytest.mark.parametrize("body", BODIES)
def test_a_name_bound_before(body: str) -> None:
    program = PROGRAM.format(body=BODIES[body].strip())
    done = run_fresh(program)
    assert done.returncode == 0, done.stderr


def test_the_signature_stays() -> None:
    from torch.distributed.tensor import distribute_tensor

    import vescale.placements  # noqa: F401

    names = list(inspect.signature(distribute_tensor).parameters)
    assert names == ["tensor", "device_mesh", "placements", "src_data_rank"]
