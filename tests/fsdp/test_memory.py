"""The peak of a step above what rests (shards and optimizer state), in bytes of the allocator, against FSDP2's.

On a fake process group, for gloo's threads free what they have allocated without the profiler's knowledge; what its
collectives take is in tests/comm/test_flat.py.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.fsdp.copies import peak_bytes
from vescale.fsdp import fully_shard, report

DIM, NUM_BLOCKS = 128, 6
BLOCK_BYTES = 2 * DIM * DIM * 4
"""Two weights without biases: shards need no padding."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@pytest.fixture(params=[2, 4, 64])
def num_ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def sharded(kind: str, **options: Any) -> Any:
    model: Any = nn.Sequential(*[Block() for _ in range(NUM_BLOCKS)])
    shard: Any = stock_fully_shard if kind == "FSDP2" else fully_shard
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        shard(block, mesh=mesh, **options)
    shard(model, mesh=mesh, **options)
    if kind == "in place":
        model.set_in_place_gradients()
    if kind == "direct":
        model.set_direct_linear_gradients()
    return model


def peak(kind: str, microbatches: int = 1, **options: Any) -> float:
    """In blocks, of forward, backward and the optimizer's step; the few activations count for next to nothing."""
    model = sharded(kind, **options)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, foreach=False)

    def step() -> None:
        for micro in range(microbatches):
            model.set_requires_gradient_sync(micro == microbatches - 1)
            model(torch.ones(2, DIM)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    if kind != "FSDP2" and not options:
        expected = BLOCK_BYTES * (1 + (kind != "in place")) + BLOCK_BYTES // dist.get_world_size()
        assert {one.peak_bytes for one in report(model)} == {expected}
    return peak_bytes(step) / BLOCK_BYTES


def test_peak_of_a_step(num_ranks: int) -> None:
    found = {kind: peak(kind) for kind in ("default", "in place", "direct", "FSDP2")}
    # Parameters and gradients of one block; those of the block that runs last are reduced when all others are there.
    reduced = (NUM_BLOCKS - 1) / num_ranks
    assert found["default"] == pytest.approx(2 + reduced, abs=0.1), found
    assert found["direct"] == pytest.approx(2 + reduced, abs=0.1), found
    # A parameter and a gradient less, if each block's are two; then the reduction, with the last block's own piece.
    assert found["in place"] == pytest.approx(1.5 + reduced, abs=0.1), found
    assert found["default"] <= (0.76 if num_ranks == 2 else 0.65) * found["FSDP2"], found
    gradients = NUM_BLOCKS / num_ranks
    assert found["default"] - gradients <= 0.55 * (found["FSDP2"] - gradients), found


def test_peak_when_gradients_are_reduced_in_another_dtype(num_ranks: int) -> None:
    """They cannot lie where parameters were, which are freed before."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = {kind: peak(kind, mp_policy=policy) for kind in ("default", "FSDP2")}
    # Half a block of gradients in bfloat16, and as many in float32
    assert found["default"] == pytest.approx(1.5 + (NUM_BLOCKS - 1) / num_ranks, abs=0.1), found
    # Matmuls in bfloat16 allocate more on some processors, which adds to FSDP2's peak: on two ranks 0.84 to 0.89.
    assert found["default"] <= (0.89 if num_ranks == 2 else 0.85) * found["FSDP2"], found
    gradients = NUM_BLOCKS / num_ranks
    assert found["default"] - gradients <= 0.67 * (found["FSDP2"] - gradients), found


def test_peak_of_accumulation(num_ranks: int) -> None:
    """The unreduced gradients of all blocks stay, and one more is gathered; each gradient is added where it belongs."""
    assert peak("default", microbatches=2) <= NUM_BLOCKS + 1.6 + NUM_BLOCKS / num_ranks


def test_peak_without_resharding_after_forward(num_ranks: int) -> None:
    """All parameters until backward, which frees them block by block, and the gradients of one block; FSDP2 frees them so
    from PyTorch 2.15 on."""
    found = {kind: peak(kind, reshard_after_forward=False) for kind in ("default", "FSDP2")}
    assert found["default"] == pytest.approx(NUM_BLOCKS + 1, abs=0.15), found
    frees_late = torch.torch_version.TorchVersion(torch.__version__) < "2.15"
    assert found["default"] <= (0.9 if frees_late else 1.0) * found["FSDP2"], found


class _Saved:
    """What a graph holds of a tensor that it has saved."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_a_graph_goes_with_its_outputs(num_ranks: int) -> None:
    """At once, and without the garbage collector, whether it had a backward or not (a step that is skipped): nothing of the
    engine leads from the graph back to itself."""
    model = sharded("default")
    model(torch.ones(2, DIM)).square().sum().backward()
    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> _Saved:
        saved.add(one := _Saved(tensor.detach()))
        return one

    gc.collect()
    gc.disable()
    try:
        for has_backward in (False, True):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
                loss = model(torch.ones(2, DIM)).square().sum()
            assert len(saved) > NUM_BLOCKS
            if has_backward:
                loss.backward(retain_graph=True)
            node = weakref.ref(loss)
            del loss
            assert node() is None and not saved, len(saved)
    finally:
        gc.enable()
