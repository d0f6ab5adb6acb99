"""Views that placement rules find are cached by DTensor's dispatcher, like those of PyTorch's own rules."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.device import device_type
from vescale import Plan, ops, parallelize
from vescale.compat.dtensor import spec_of
from vescale.compat.op_info import native_sharding
from vescale.placements import InterleavedShard, RaggedShard

ops.install()


@pytest.fixture(params=range(4))
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", rank=request.param, world_size=4, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def undecided(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that DTensor's dispatcher asks about, from now on."""
    found: list[str] = []
    dispatcher: Any = DTensor._op_dispatcher
    original = dispatcher._propagate_op_sharding_dispatch_slow_path

    @functools.wraps(original)  # with its attributes
    def propagate(op: Any, *args: Any) -> Any:
        found.append(str(op))
        return original(op, *args)

    monkeypatch.setattr(dispatcher, "_propagate_op_sharding_dispatch_slow_path", propagate)
    return found


def test_products_of_four_dims(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch and heads are sharded: matmul flattens both, and its last view splits them again, forward and backward."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize(torch.nn.Linear(2, 2), Plan(mesh))
    asked = undecided(monkeypatch)
    wholes = torch.randn(4, 6, 5, 3), torch.randn(4, 6, 3, 5)
    mine = (slice(rank // 2 * 2, rank // 2 * 2 + 2), slice(rank % 2 * 3, rank % 2 * 3 + 3))
    for _ in range(3):
        asked.clear()
        x, y = (distribute_tensor(z, mesh, [Shard(0), Shard(1)], src_data_rank=None).requires_grad_() for z in wholes)
        product = torch.matmul(x, y)
        (product * product).sum().backward()
        assert product.placements == (Shard(0), Shard(1))
        expected = [z[mine].clone().requires_grad_() for z in wholes]
        local = torch.matmul(*expected)
        (local * local).sum().backward()
        assert torch.equal(product.to_local(), local)
        for found, leaf in zip((x, y), expected, strict=True):
            assert found.grad is not None and torch.equal(found.grad.to_local(), leaf.grad)
    assert asked == []


@pytest.mark.parametrize("placement", [InterleavedShard(0, 2), RaggedShard()], ids=str)
def test_views_of_our_placements(rank: int, placement: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, asked = init_device_mesh(device_type(), (4,)), undecided(monkeypatch)
    whole = torch.arange(96.0).reshape(8, 12)
    for _ in range(2):
        asked.clear()
        x = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
        viewed = x.view(8, 3, 4)
        assert viewed.shape == (8, 3, 4)
        assert viewed._local_tensor.data_ptr() == x._local_tensor.data_ptr()
        assert torch.equal(viewed._local_tensor.flatten(), x._local_tensor.flatten())
        x.view(8, 3, 4).zero_()
        assert not x._local_tensor.any()
    assert asked == []


SHAPES = [((0, 6, 7), (0, 7)), ((0, 6), (0,)), ((0,), (0, 6)), ((2, 0, 3), (0, 3)), ((6, 0), (2, 3, 0)), ((3, 0), (0, 5)),
          ((0, 7), (0, 1, 7)), ((0, 4, 6), (0, 4, 2, 3)), ((0, 8), (-1, 8)), ((1, 0), (0,))]  # fmt: skip


def test_views_without_elements(rank: int) -> None:
    """What a mask that chooses nothing leaves. PyTorch looks for its dims without end, or names others."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize(nn.Linear(1, 1), Plan(mesh))
    for before, after in SHAPES:
        kinds = [Replicate(), *map(Shard, range(len(before)))]
        for placements in itertools.product(kinds, kinds):
            x = distribute_tensor(torch.zeros(before), mesh, placements, src_data_rank=None).requires_grad_()
            for y in (x.view(after), x.reshape(after), x.detach().reshape(after)):
                assert y.shape == torch.zeros(before).view(after).shape and not y.to_local().numel()
                assert (y * 2 + 1).sum().full_tensor() == 0
            x.view(after).sum().backward()
            assert x.grad is not None and x.grad.shape == before


def test_expand_of_a_sharded_dim_of_size_1(rank: int) -> None:
    """PyTorch's rule for it fails with a KeyError: it has no decision."""
    mesh = init_device_mesh(device_type(), (4,), mesh_dim_names=("tp",))
    token = spec_of(distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)], src_data_rank=None))
    assert native_sharding(torch.ops.aten.expand.default, (token, [4, 3]), {}, None) is None


def test_a_failing_rule_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(schema: Any) -> Any:
        raise KeyError("of a rule")

    monkeypatch.setattr(DTensor._op_dispatcher.sharding_propagator, "propagate_op_sharding_non_cached", fail)
    with pytest.raises(KeyError, match="of a rule"):
        native_sharding(torch.ops.aten.relu.default, (), {}, None)
