"""What is counted of ops on DTensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from vescale.compat import extend_dtensor
from vescale.compat.native_dispatch import without_native
from vescale.debug import dispatch_stats

pytestmark = pytest.mark.helper("dispatch")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    extend_dtensor()
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_hits_misses_and_fallbacks(mesh: DeviceMesh) -> None:
    x = DTensor.from_local(torch.rand(4, 6), mesh, [Shard(0)])
    dispatch_stats(reset=True)
    for _ in range(5):
        torch.sinh(x)
    moved = DTensor.from_local(torch.rand(8, 3), mesh, [Shard(1)])
    for _ in range(3):
        torch.sinh(x).add(moved)  # one of them has to move
    with without_native():
        torch.sinh(x)  # not counted: nothing of ours runs
    found = {op.op: op for op in dispatch_stats(reset=True).ops}
    sinh, add = found["aten::sinh"], found["aten::add.Tensor"]
    assert (sinh.hits, sinh.misses, dict(sinh.fallbacks)) == (7, 1, {})
    assert sinh.miss_seconds > 0
    assert (add.hits, add.misses, dict(add.fallbacks)) == (0, 1, {"decision": 3})
    assert add.fallback_seconds > 0
    assert dispatch_stats().ops == ()


def test_other_numbers_are_no_other_calls(mesh: DeviceMesh) -> None:
    """A scale decides nothing; a dim does."""
    x = DTensor.from_local(torch.rand(4, 6), mesh, [Replicate()])
    dispatch_stats(reset=True)
    for number in range(10):
        x * (0.5 + number)
    for dim in (0, 1):
        x.softmax(dim)
    found = {op.op: op for op in dispatch_stats(reset=True).ops}
    assert found["aten::mul.Tensor"].misses == 1
    assert found["aten::_softmax"].misses == 2


def test_modes_see_all_ops(mesh: DeviceMesh) -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = DTensor.from_local(torch.rand(4, 6), mesh, [Replicate()])
    x + x
    seen: list[object] = []
    with Mode():
        x + x
    assert torch.ops.aten.add.Tensor in seen


def test_the_table_names_the_most_expensive_op_first(mesh: DeviceMesh) -> None:
    x = DTensor.from_local(torch.rand(4, 6), mesh, [Shard(0)])
    dispatch_stats(reset=True)
    for _ in range(50):
        x.add(DTensor.from_local(torch.rand(8, 3), mesh, [Shard(1)]))
    x.cosh()
    lines = str(dispatch_stats()).splitlines()
    assert lines[0].endswith("50 by PyTorch's path")
    assert lines[2].startswith("add.Tensor") and lines[2].endswith("decision")
