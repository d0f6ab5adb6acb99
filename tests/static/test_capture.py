"""What a CUDA graph needs of a static step, on the CPU: the same addresses in each step, nothing that waits for the device,
and no state of random numbers that the host reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import gpu_capture
from tests.static.models import mesh_of
from tests.static.test_printed import CASES, batch, built
from vescale.static import report

pytestmark = pytest.mark.helper("dispatch")

# What reads numbers of a device, or makes tensors whose sizes depend on them.
WAITING = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave",
    "aten::_unique2",
}
NAMES = ("twice", "attention", "dropout", "units")


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A model after a few static steps."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    build, plan = CASES[request.param]
    made = built(build, plan(mesh_of()))
    for _ in range(4):
        step(made)
    yield made
    dist.destroy_process_group()


def step(model: Any) -> None:
    model(batch()).square().mean().backward()


def ops(model: Any, num_steps: int) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(num_steps):
            step(model)
    return {event.name for event in profiled.events()}


def test_nothing_waits_for_the_device(model: Any) -> None:
    found = ops(model, 20)
    assert "aten::addmm" in found and not found & WAITING
    model.register_forward_hook(lambda module, args, output: output.to_local().detach().sum().item() and None)
    assert ops(model, 1) & WAITING, "the profiler sees what waits"


def test_addresses_stay(model: Any) -> None:
    found = []
    for _ in range(3):
        model.zero_grad(set_to_none=False)
        step(model)
        tensors = [x for p in model.parameters() for x in (p, p.grad) if x is not None]
        found.append([x.to_local().data_ptr() for x in tensors])
    assert found[0] == found[1] == found[2]
    assert report(model).static_steps == 6


def test_the_host_reads_no_random_state_during_a_capture(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any) -> torch.Tensor:
        raise RuntimeError("Cannot call CUDAGeneratorImpl::get_offset during CUDA graph capture")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", read)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    before = report(model).static_steps
    model(batch())
    assert report(model).static_steps == before + 1


def test_the_benchmark_runs_without_a_gpu() -> None:
    """Its steps, one after the other in place of a graph."""
    found = gpu_capture.measure("cpu")
    assert not found.wrong and found.static_steps > 0
