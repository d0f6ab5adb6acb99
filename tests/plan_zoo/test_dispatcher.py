"""Every model of the zoo gives the same bits with the C++ dispatcher and by PyTorch's path."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.plan_zoo.models import MODELS
from tests.ranks import RankPools
from tests.runtime.hf import quiet
from vescale import parallelize, plan_zoo
from vescale.compat import dispatch_counts, reset_dispatch_counts
from vescale.compat.native_dispatch import without_native

pytestmark = pytest.mark.helper("dispatch")


def compare(name: str, sizes: dict[str, int]) -> tuple[list[str], int]:
    """What differs, and how many ops C++ ran. Float32: other orders of additions show."""
    quiet()
    case = MODELS[name]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(3)
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in case.inputs().items()}
    if case.package == "diffusers":
        rows = [Shard(0) if axis == "dp" else Replicate() for axis in sizes]
        inputs = {k: distribute_tensor(v, mesh, rows) for k, v in inputs.items()}
    model = case.build().float()
    parallelize(model, plan_zoo.load(name, mesh), strict=True)

    def step() -> dict[str, torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(7)
        loss = case.objective(model, inputs)
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss.detach(), **grads}

    with without_native():
        expected = step()
    step()  # decides
    reset_dispatch_counts()
    found = step()
    num_ops = sum(hits for hits, _, _, _ in dispatch_counts().values())
    assert found.keys() == expected.keys()
    differing = [key for key in found if not _is_same(found[key], expected[key])]
    return differing, num_ops


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        return a._spec == b._spec and torch.equal(a._local_tensor, b._local_tensor)
    return torch.equal(a, b)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_same_bits_as_pytorchs_path(ranks: RankPools, name: str) -> None:
    MODELS[name].need()
    for differing, num_ops in ranks.run(compare, name, {"dp": 1, "tp": 2}, world_size=2):
        assert not differing
        assert num_ops > 100
