"""Ops that DTensor's table of handlers has, on operands that every rank has whole: C++ runs them on the local tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.compat.test_passed_functions import mesh
from vescale.compat import dispatch_counts, reset_dispatch_counts
from vescale.compat.native_dispatch import without_native
from vescale.placements import InterleavedShard

__all__ = ["mesh"]  # a fixture

pytestmark = pytest.mark.helper("dispatch")


def whole(x: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def losses(mesh: DeviceMesh, dtype: torch.dtype, reduction: str) -> list[Any]:
    torch.manual_seed(0)
    found: list[Any] = []
    for rows in (5, 5, 8):
        scores = whole(torch.randn(rows, 7, dtype=dtype), mesh).requires_grad_()
        labels = torch.randint(7, (rows,))
        labels[1] = -100
        loss: Any = F.cross_entropy(scores, whole(labels, mesh), reduction=reduction)
        loss.sum().backward()
        found += [loss, scores.grad, F.l1_loss(scores, scores.detach() * 2, reduction=reduction)]
    return found


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_equal_pytorchs_path(mesh: DeviceMesh, dtype: torch.dtype, reduction: str) -> None:
    with without_native():
        expected = losses(mesh, dtype, reduction)
    losses(mesh, dtype, reduction)
    reset_dispatch_counts()
    found = losses(mesh, dtype, reduction)
    counts = dispatch_counts()
    for name in ("aten::nll_loss_forward", "aten::nll_loss_backward"):
        hits, misses, _, stock = counts[name]
        assert (hits, misses, stock) == (3, 0, {}), name
    for own, other in zip(found, expected, strict=True):
        assert own.placements == other.placements and own.stride() == other.stride() and own.dtype == other.dtype
        assert torch.equal(own.to_local(), other.to_local())


def test_labels_that_are_no_class(mesh: DeviceMesh) -> None:
    scores, labels = whole(torch.randn(3, 4), mesh), whole(torch.tensor([0, 1, 9]), mesh)
    for _ in range(2):
        with pytest.raises(IndexError, match="Target 9 is out of bounds"):
            F.cross_entropy(scores, labels)


def test_values(mesh: DeviceMesh) -> None:
    x = torch.tensor([3])
    for _ in range(2):
        for value, kind in ((x, int), (x > 1, bool), (x * 0.5, float)):
            found = whole(value, mesh)
            assert found.item() == value.item() and type(found.item()) is kind
        assert whole(x, mesh).sum() and not (whole(x, mesh) < 1).all()
    reset_dispatch_counts()
    whole(x, mesh).item()
    assert dispatch_counts()["aten::_local_scalar_dense"][0] == 1
    reset_dispatch_counts()
    part = DTensor.from_local(torch.tensor([[2.0]]), mesh, [Shard(0)], run_check=False)
    part.sum().item()  # a value that ranks have parts of is read by all of them
    assert dispatch_counts()["aten::_local_scalar_dense"][3]


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_chunks_beside_whole_operands(mesh: DeviceMesh, dim: int, chunks: int) -> None:
    """This rank takes its piece of each chunk of a whole operand, where that is not broadcast: a rotary table of a sequence
    in chunks."""
    shape, placements = (12, 24, 36), [InterleavedShard(dim, chunks)]

    def part(full: torch.Tensor) -> torch.Tensor:
        pieces = full.unflatten(dim, (chunks, mesh.size(), -1))
        return pieces.select(dim + 1, mesh.get_local_rank()).flatten(dim, dim + 1)

    full = torch.randn(shape)
    x = DTensor.from_local(part(full), mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
    for other in (shape, shape[1:], (12, 1, 36), (1, 24, 1), (12, 24, 1)):
        y = torch.randn(other)
        for function in (torch.mul, torch.sub, torch.maximum, lambda a, b: torch.where(a > 0, a, b)):
            function(x, whole(y, mesh))
            reset_dispatch_counts()
            found = function(x, whole(y, mesh))
            assert not any(stock for _, _, _, stock in dispatch_counts().values()), (other, function)
            assert found.placements == tuple(placements)
            assert torch.equal(found.to_local(), part(function(full, y)))
