"""What the simulated device offers, and that it computes what the CPU computes."""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.compiler import needs_compiler
from tests.ranks import RankPools, run_functions

pytestmark = needs_compiler

SIM: Any = "sim"


def doors() -> None:
    sim = torch.get_device_module("sim")
    assert torch.accelerator.current_accelerator() == torch.device("sim") and torch.accelerator.device_count() == 1
    assert torch.accelerator.current_stream() == sim.current_stream() == sim.default_stream()
    stream = sim.Stream(priority=-1)
    with stream:
        assert torch.accelerator.current_stream() == stream
    with sim.stream(stream), sim.stream(None):
        assert sim.current_stream() == stream
    assert sim.current_stream() == sim.default_stream()
    event = stream.record_event()
    assert event.query() and stream.query()  # nothing was launched
    with pytest.raises(RuntimeError, match="index 0 alone"):
        sim.set_device(1)


def memory_is_poisoned_and_counted() -> None:
    sim = torch.sim
    before = torch.accelerator.memory_allocated()
    x = torch.empty(1000, device=SIM)
    assert torch.accelerator.memory_allocated() - before == sim.memory_allocated() - before == 4096
    assert x.isnan().all() and (torch.empty(3, dtype=torch.int32, device=SIM) == -1).all()
    torch.accelerator.reset_peak_memory_stats()
    del x
    x = torch.ones(7777, device=SIM)  # no other block is as large
    address = x.data_ptr()
    del x
    y = torch.empty(7777, device=SIM)
    assert y.data_ptr() == address and y.isnan().all()  # the same stream has it at once
    assert torch.accelerator.max_memory_allocated() >= before + 4096
    y.untyped_storage().resize_(0)
    assert torch.accelerator.memory_allocated() == before
    sim.set_memory_limit(before + 10000)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="100000 bytes"):
            torch.empty(100000, dtype=torch.uint8, device=SIM)
    finally:
        sim.set_memory_limit(None)


def another_stream_gets_other_memory() -> None:
    stream = torch.sim.Stream()
    x = torch.empty(1000, device=SIM)
    address = x.data_ptr()
    stream.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(stream):
        x + 1
        y = torch.empty(1000, device=SIM)
    assert y.data_ptr() != address
    x.record_stream(stream)
    del x
    z = torch.empty(1000, device=SIM)
    assert z.data_ptr() != address  # the stream has not ended yet
    torch.sim.synchronize()
    assert torch.empty(1000, device=SIM).data_ptr() == address


def generators_draw_by_seed_and_offset() -> None:
    torch.manual_seed(5)
    state = torch.sim.get_rng_state()
    assert state.numel() == 16
    first = torch.randn(100, device=SIM)
    torch.sim.set_rng_state(state)
    again = torch.randn(100, device=SIM)
    assert torch.equal(first, again) and not torch.equal(first, torch.randn(100, device=SIM))
    own = torch.Generator("sim").manual_seed(5)
    assert torch.equal(torch.randn(100, device=SIM, generator=own), first)
    dropped = torch.dropout(torch.ones(1000, device=SIM), 0.5, True)
    assert 300 < int((dropped == 0).sum()) < 700
    with pytest.raises(RuntimeError, match="type for generator"):
        torch.randn(3, device=SIM, generator=torch.Generator())


def autocast_and_forward_mode() -> None:
    x, linear = torch.randn(4, 3), nn.Linear(3, 2)
    found = []
    for device in ("cpu", SIM):
        y, layer = x.to(device), linear.to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            low = layer(y)
            assert low.dtype == torch.bfloat16 and F.layer_norm(y, (3,)).dtype == torch.float32
        with forward_ad.dual_level():  # tangents of the parameters are zeros without memory
            tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(y, y.cos())).relu()).tangent
        found.append((low.cpu(), tangent.cpu()))
    torch.testing.assert_close(*found)


def set_shares_memory() -> None:
    x, y = torch.ones(3, device=SIM), torch.ones(6, device=SIM)[3:]
    x.set_(y)
    y.mul_(2)
    assert x.tolist() == [2, 2, 2]


def waits_of_the_host_are_counted_with_their_places() -> None:
    sim = torch.sim
    x = torch.ones(4, device=SIM)
    sim.clear()
    x.add_(1)
    assert sim.num_syncs() == 0
    x.sum().item()
    x.tolist()
    x.to("cpu", non_blocking=True)
    assert sim.num_syncs() == 2
    x[x > 1]
    assert sim.num_syncs() == 3
    places = sim.counts()["host_syncs"]["places"]
    assert sum(places.values()) == 3 and all("test_device.py" in place for place in places), places
    assert sim.counts()["launches"]["ops"]["aten::add_.Tensor"] == 1


def an_event_has_not_happened_when_it_is_asked_first() -> None:
    torch.ones(4, device=SIM)
    event = torch.sim.current_stream().record_event()
    assert not event.query() and event.query()


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)) for _ in range(3)]
    return nn.Sequential(nn.Embedding(11, 12), *blocks, nn.Linear(12, 11))


def loss_of(net: nn.Module, step: int, rank: int, device: str) -> torch.Tensor:
    rows = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(10 * step + rank), device="cpu").to(
        device
    )
    return nn.functional.cross_entropy(net(rows).flatten(0, 1), rows.flatten())


def trains_as_the_cpu_does() -> None:
    one = model().to("cpu")
    other = copy.deepcopy(one).to("sim")
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True) for net in (one, other)]
    for step in range(3):
        for net, optimizer, device in zip((one, other), optimizers, ("cpu", "sim"), strict=True):
            loss_of(net, step, 0, device).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b.cpu())


def is_about_as_fast_as_the_cpu() -> None:
    one = model().to("cpu")
    other = copy.deepcopy(one).to("sim")

    def seconds(net: nn.Module, device: str) -> float:
        rows = torch.randint(0, 11, (64, 50), device="cpu").to(device)
        start = time.process_time()
        for _ in range(5):
            net(rows).sum().backward()
        return time.process_time() - start

    ratios = []
    for _ in range(4):
        ratios.append(seconds(other, "sim") / seconds(one, "cpu"))
    assert min(ratios) < 3, ratios


def conjugated_and_negated_views_are_copied() -> None:
    whole = torch.arange(6.0, device="cpu")
    for view in (lambda x: x.conj(), lambda x: x.conj().imag):
        expected, found = (view(torch.complex(x, -x)) for x in (whole, whole.to(SIM)))
        assert torch.equal(found.cpu(), expected.cpu().resolve_conj().resolve_neg())
        assert torch.equal(found.clone()[2:5].cpu(), expected[2:5])


LOCAL = [
    autocast_and_forward_mode,
    set_shares_memory,
    conjugated_and_negated_views_are_copied,
    doors,
    memory_is_poisoned_and_counted,
    another_stream_gets_other_memory,
    generators_draw_by_seed_and_offset,
    waits_of_the_host_are_counted_with_their_places,
    an_event_has_not_happened_when_it_is_asked_first,
    trains_as_the_cpu_does,
    is_about_as_fast_as_the_cpu,
]


def collectives_give_what_gloo_gives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    results: dict[str, list[torch.Tensor]] = {}
    for device in ("cpu", "sim"):
        found = results[device] = []

        def values(*sizes: int, device: str = device) -> torch.Tensor:
            return (
                (torch.arange(24, dtype=torch.float32, device="cpu")[: sizes[0]] * (rank + 1)).reshape(sizes).to(device)
            )

        x = values(6)
        dist.all_reduce(x)
        dist.broadcast(x, 1)
        found.append(x)
        gathered = values(6 * size)
        dist.all_gather_into_tensor(gathered, values(6))
        parts = [values(3) for _ in range(size)]
        dist.all_gather(parts, values(3))
        scattered = values(6)
        dist.reduce_scatter_tensor(scattered, values(6 * size))
        exchanged = values(size)
        dist.all_to_all_single(exchanged, values(size))
        reduced = values(4)
        dist.reduce(reduced, 0, op=dist.ReduceOp.MAX)
        found += [gathered, *parts, scattered, exchanged, *([reduced] if rank == 0 else [])]
        received = values(5)
        sent, other = values(5), 1 - rank
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
        ):
            work.wait()
        found.append(received)
    for a, b in zip(results["cpu"], results["sim"], strict=True):
        assert torch.equal(a, b.cpu())


def the_mean_is_a_reduction() -> None:
    x = torch.full((3,), float(dist.get_rank()), device=SIM)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert x.tolist() == [0.5] * 3


def results_are_not_there_and_wait_does_not_block() -> None:
    """Rank 1 takes part only once rank 0 has waited: a ``wait()`` that blocked would hang."""
    x, store = torch.ones(3, device=SIM), dist.distributed_c10d._get_default_store()
    key = f"waited {torch.randint(1 << 40, (1,), device='cpu').item()}"
    if dist.get_rank() == 0:
        work = dist.all_reduce(x, async_op=True)
        assert not work.is_completed()
        work.wait()
        store.set(key, "yes")
    else:
        store.get(key)
        dist.all_reduce(x, async_op=True).wait()
    assert x.tolist() == [2.0] * 3


def tensors_of_the_cpu_are_refused() -> None:
    group = dist.new_group(backend="simccl")
    backend = group._get_backend(torch.device("sim"))
    with pytest.raises(RuntimeError, match="simulated device alone"):
        backend.allreduce([torch.ones(3, device="cpu")], dist.AllreduceOptions())


def communicators_are_made_on_first_use() -> None:
    group = dist.new_group()
    torch.sim.clear()
    assert torch.sim.counts()["communicators"]["count"] == 0
    dist.all_reduce(torch.ones(2, device=SIM), group=group)
    dist.all_reduce(torch.ones(2, device=SIM), group=group)
    assert torch.sim.counts()["communicators"]["count"] == 1


def stock_fsdp2_is_clean(mixed: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    one = model().to("cpu")
    other = copy.deepcopy(one).to("sim")
    mesh = init_device_mesh("sim", (size,))
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if mixed
        else MixedPrecisionPolicy()
    )
    for part in [*other, other]:
        stock_fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (one, other)]
    torch.sim.clear()
    for step in range(3):
        loss_of(other, step, rank, "sim").backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        loss_of(one, step, rank, "cpu").backward()
        for parameter in one.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
        optimizers[0].step()
        optimizers[0].zero_grad()
    assert torch.sim.checked_pairs() > 1000
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        whole = b.full_tensor().cpu()
        assert torch.allclose(a, whole, atol=0.1) if mixed else torch.equal(a, whole)


def stock_ddp_is_clean() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    one = model().to("cpu")
    other = DistributedDataParallel(copy.deepcopy(one).to("sim"), bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    for step in range(3):
        loss_of(other, step, rank, "sim").backward()
        loss_of(one, step, rank, "cpu").backward()
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            whole = a.grad.clone()
            dist.all_reduce(whole)
            assert torch.allclose(whole / size, b.grad.cpu(), atol=1e-6)
        one.zero_grad()
        other.zero_grad()


def stock_fsdp2_in_full_precision() -> None:
    stock_fsdp2_is_clean(mixed=False)


def stock_fsdp2_in_mixed_precision() -> None:
    stock_fsdp2_is_clean(mixed=True)


def collectives_run_in_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.full((4,), float(dist.get_rank() + 1), device=SIM)
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert x.tolist() == [1.5] * 4


COLLECTIVE = [
    collectives_run_in_inference_mode,
    collectives_give_what_gloo_gives,
    the_mean_is_a_reduction,
    results_are_not_there_and_wait_does_not_block,
    tensors_of_the_cpu_are_refused,
    communicators_are_made_on_first_use,
    stock_fsdp2_in_full_precision,
    stock_fsdp2_in_mixed_precision,
    stock_ddp_is_clean,
]


def local() -> int:
    return run_functions(LOCAL)


def collective() -> int:
    return run_functions(COLLECTIVE)


def test_one_device(ranks: RankPools) -> None:
    ranks.run(local, world_size=1, device="sim")


def test_two_ranks(ranks: RankPools) -> None:
    ranks.run(collective, world_size=2, device="sim")


def test_the_block_of_the_page() -> None:
    """docs/internals/device.md: its last line is a race."""
    page = Path(__file__).parents[2] / "docs" / "internals" / "device.md"
    block = page.read_text().partition("```python\n")[2].partition("```")[0]
    assert "RuntimeError: Race" in block.splitlines()[-1]
    done = subprocess.run([sys.executable, "-c", block], cwd=page.parents[2], capture_output=True, text=True)
    assert done.returncode == 1 and "RuntimeError: Race" in done.stderr, done.stderr
