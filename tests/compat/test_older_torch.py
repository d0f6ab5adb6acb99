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

from vescale.compat import DataParallelMeshDims, meshes
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
