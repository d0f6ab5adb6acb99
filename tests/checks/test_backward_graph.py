"""Graphs between models and backwards are described while somebody can call that backward, and no longer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale import Plan, parallelize
from vescale.checks import _backward_graph


@pytest.fixture
def models() -> Iterator[tuple[nn.Module, nn.Module]]:
    """Of two meshes, whose steps are counted apart."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    made = []
    for name in ("tp", "dp"):
        mesh = init_device_mesh("cpu", (2,) if name == "tp" else (4,), mesh_dim_names=(name,))
        model = nn.Linear(8, 8)
        made.append(parallelize(model, Plan(mesh).shard("weight", Shard(0), mesh=name)) or model)
    yield made[0], made[1]
    dist.destroy_process_group()


def test_a_graph_ends_with_the_output_of_its_forward(
    models: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    described = []
    describe = _backward_graph._describe
    node = torch.ones((), requires_grad=True).exp().grad_fn
    assert node is not None
    start = node._sequence_nr()  # graphs of earlier tests may be alive

    def record(losses: Sequence[Any], gradients: Sequence[Any], begin: int) -> list[tuple[str, str]]:
        if begin >= start:
            described.append(begin)
        return describe(losses, gradients, begin)

    monkeypatch.setattr(_backward_graph, "_describe", record)
    frozen, trained = models
    output = frozen(torch.ones(4, 8))
    output.sum().backward()
    first = len(described)
    assert first, "the first forwards are compared"
    output = frozen(torch.ones(4, 8))  # nobody calls its backward
    trained(torch.ones(4, 8)).sum().backward()
    assert len(described) == first + 2  # of both, for the loss may reach both
    del output
    trained(torch.ones(4, 8)).sum().backward()
    assert len(described) == first + 3
