"""What newer versions of PyTorch give and older ones in the declared range do not: what stands in for it."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch.distributed.tensor import Partial, Replicate

from tests.fresh import run_fresh
from vescale.compat import DataParallelMeshDims, ThreadValue, meshes
from vescale.placements import _local_conversion


def without_mesh_dims(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``vescale.compat.meshes`` as it is imported where ``torch.distributed.fsdp`` has no ``DataParallelMeshDims``."""
    monkeypatch.delattr(torch.distributed.fsdp, "DataParallelMeshDims")
    spec = importlib.util.spec_from_file_location("older_meshes", meshes.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "older_meshes", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "given", [{"shard": "dp"}, {"shard": ("dp", "cp"), "replicate": "pod"}, {"replicate": ("pod",)}]
)
def test_mesh_dims_are_those_of_newer_versions(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert DataParallelMeshDims is torch.distributed.fsdp.DataParallelMeshDims
    own, newer = without_mesh_dims(monkeypatch).DataParallelMeshDims(**given), DataParallelMeshDims(**given)
    assert type(own) is not type(newer)
    assert (own.shard_names, own.replicate_names) == (newer.shard_names, newer.replicate_names)


def test_mesh_dims_name_an_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    older = without_mesh_dims(monkeypatch)
    for kind in (older.DataParallelMeshDims, DataParallelMeshDims):
        with pytest.raises(ValueError):
            kind()


def test_from_local_gets_no_gradient_placements_that_nobody_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's takes none before 2.12."""
    given: list[dict[str, Any]] = []
    older = SimpleNamespace(from_local=lambda local, mesh, placements, **options: given.append(options))
    monkeypatch.setattr(_local_conversion, "stock", lambda: older)
    _local_conversion.from_local(torch.ones(2), None, [Replicate()])
    _local_conversion.from_local(torch.ones(2), None, [Replicate()], grad_placements=[Partial()])
    assert ["grad_placements" in options for options in given] == [False, True]


def test_a_value_of_a_thread_is_released_as_often_as_it_is_taken() -> None:
    """PyTorch releases it once more before 2.12, and others find it freed."""
    value, other = ThreadValue("first"), object()
    before = sys.getrefcount(other)
    with value.within(other):
        assert value.get() is other
        with value.within(None):
            assert value.get() is None
        assert value.get() is other
    assert sys.getrefcount(other) == before and value.get() is None


RULES = """
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

from vescale.runtime._handlers import install_handlers

install_handlers()
x = DTensor.from_local(torch.ones(2, 3, 8), mesh, [Shard(0), Shard(1)])
for sizes in [(1, 2), (0, 1)]:
    padded = torch.nn.functional.pad(x, sizes)
    assert padded.placements == (Shard(0), Shard(1)), padded.placements
    assert padded.shape == (4, 6, 8 + sum(sizes)) and padded.to_local().shape == (2, 3, 8 + sum(sizes)), padded.shape
logits = x.view(-1, 8)
assert logits.to_local().shape == (6, 8), logits.placements

part = torch.arange(30.0).view(5, 3, 2)
gradient = DTensor.from_local(part, mesh, [Partial("avg"), Shard(2)], shape=(5, 3, 3), stride=(9, 3, 1))
copy = gradient.new_empty_strided((5, 3, 3), (9, 3, 1)).copy_(gradient)  # as autograd copies a gradient
assert copy.placements == (Partial("avg"), Shard(2)), copy.placements
assert torch.equal(copy._local_tensor, part)

scores = DTensor.from_local(torch.arange(24.0).view(3, 8), mesh, [Shard(0), Shard(0)])
best, chosen = scores.topk(2, dim=-1)  # whose backward scatters
for y in (scores.scatter(1, chosen, best), scores.scatter(1, chosen, 0.0), scores.clone().scatter_(-1, chosen, best)):
    assert y.placements == (Shard(0), Shard(0)), y.placements
    assert torch.equal(y.to_local()[:, :-2], scores.to_local()[:, :-2])
assert torch.equal(y.to_local(), scores.to_local())
rows = scores.scatter(0, chosen, best)
assert rows.placements == (Replicate(), Replicate()), rows.placements
"""


def test_rules_that_older_versions_lack() -> None:
    """``F.pad``, views of two sharded dims, ``scatter``, and copies of gradients move nothing."""
    done = run_fresh(RULES)
    assert done.returncode == 0, done.stderr
