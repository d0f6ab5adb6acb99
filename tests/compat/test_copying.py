"""DTensors inside of larger storages are copied and pickled as others are."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.ranks import RankPools
from vescale import parallelize
from vescale.compat import dtensor_patches as dtensor_copies
from vescale.errors import SavedPartWarning
from vescale.fsdp import fully_shard
from vescale.plans import Plan


def parts(tensors: Iterable[Any]) -> list[torch.Tensor]:
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def assert_equal(some: Iterable[Any], others: Iterable[Any]) -> None:
    pairs = list(zip(some, others, strict=True))
    assert pairs
    for one, other in pairs:
        assert type(one) is type(other)
        assert getattr(one, "placements", None) == getattr(other, "placements", None)
        assert torch.equal(*(local.detach() for local in parts((one, other))))


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def a_part_is_saved() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize(nn.Linear(4, 2), Plan(mesh).shard("weight", Shard(0), mesh="tp"))
    dtensor_copies._WARNED.clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        copy.deepcopy(model.state_dict())
        pickle.dumps(model.weight)
        saved(model.bias)
        assert not [each for each in seen if each.category is SavedPartWarning]
        saved(model.state_dict())
        saved(model.state_dict())
    return [str(each.message) for each in seen if each.category is SavedPartWarning]


def test_a_saved_part_warns_once(ranks: RankPools) -> None:
    """Copies, and what goes to other processes, do not; neither do tensors of which this rank has all."""
    for found in ranks.run(a_part_is_saved, world_size=2):
        assert len(found) == 1 and "part (1, 4) of a DTensor of shape (2, 4)" in found[0], found
        assert "vescale.checkpoint.save" in found[0]


def model_with_gradients(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    if kind == "plan":
        plan = Plan(mesh)
        plan.shard("<in:input>", Shard(0), mesh="dp")
        model = parallelize(model, plan)
    else:
        fully_shard(model, mesh=mesh)
    step(model, 1)
    return model


def step(model: nn.Module, seed: int) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()


def gradients(parameters: Iterable[nn.Parameter]) -> list[Any]:
    return [parameter.grad for parameter in parameters]


def with_gradients(kind: str) -> None:
    """A model whose gradients are there: an average or a checkpoint made between ``backward`` and ``zero_grad``."""
    model = model_with_gradients(kind)
    assert any(gradient.data_ptr() for gradient in gradients(model.parameters())), "all begin their storages"
    average = copy.deepcopy(list(model.parameters()))
    assert_equal(average, model.parameters())
    assert_equal(saved(gradients(model.parameters())), gradients(model.parameters()))
    copied = copy.deepcopy(model)
    for copies in (average, copied.parameters()):
        assert not any(gradient is not None for gradient in gradients(copies)), "as of parameters on one device"
    model.zero_grad()
    for each in (model, copied):
        step(each, 2)
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert_equal(gradients(copied.parameters()), gradients(model.parameters()))
    assert_equal(copied.parameters(), model.parameters())
    pairs = zip(parts(average), parts(model.parameters()))
    assert not any(len(a) and torch.equal(a, b) for a, b in pairs), "the average has moved with the model"


def single_tensors() -> None:
    """Stock placements: shared references, strides, what hangs on a tensor, and what cannot be copied."""
    model_with_gradients("plan")  # what installs the wrappers
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    local = torch.arange(30.0)[6:18].view(3, 4).t()
    x = DTensor.from_local(local, mesh, [Shard(0)]).requires_grad_()
    x.grad, x.note = DTensor.from_local(local + dist.get_rank(), mesh, [Shard(0)]), "kept"
    assert x.data_ptr() != 0
    first, second = copy.deepcopy([x, x])
    assert first is second and first.note == "kept" and first.is_leaf and first.requires_grad
    assert first.stride() == x.stride() and first.data_ptr() == 0
    assert_equal([first, first.grad], [x, x.grad])
    with torch.no_grad():
        copy.copy(x).to_local()[0] = -1.0
    assert local[0].eq(-1).all() and first.to_local()[0].ne(-1).all(), (
        "a shallow copy shares memory, a deep one does not"
    )
    loaded = saved(x)
    assert loaded.to_local().untyped_storage().nbytes() == 12 * 4, "more than the tensor was written"
    assert loaded.note == "kept" and loaded.requires_grad
    assert_equal([loaded], [x])
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(DTensor.from_local((x * 2).to_local()[1:], mesh, [Shard(0)]))


def run() -> None:
    for kind in ("plan", "fully_shard"):
        with_gradients(kind)
    single_tensors()


def test_copies_and_pickles(ranks: RankPools) -> None:
    ranks.run(run, world_size=2)
