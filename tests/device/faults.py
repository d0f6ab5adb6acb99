"""Programs that are right, each with one fault that can be planted: a wait, an event or a ``record_stream`` that is missing,
memory that is freed or written too early, a host that reads too soon. They run on ranks with the simulated device."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Fault = Callable[[bool], None]

LOCAL: dict[str, Fault] = {}
"""Of one rank."""
COLLECTIVE: dict[str, Fault] = {}
"""Of two ranks, which plant the same fault."""


def _in(table: dict[str, Fault]) -> Callable[[Fault], Fault]:
    def add(fault: Fault) -> Fault:
        table[fault.__name__] = fault
        return fault

    return add


local, collective = _in(LOCAL), _in(COLLECTIVE)


def side(priority: int = 0) -> Any:
    return torch.sim.Stream(priority=priority)


def here() -> Any:
    return torch.sim.current_stream()


def ones(*sizes: int, **options: Any) -> torch.Tensor:
    return torch.ones(*(sizes or (64,)), device="sim", **options)


def joined() -> Any:
    """A side stream that knows all that was done so far."""
    stream = side()
    stream.wait_stream(here())
    return stream


# ------------------------------------------------------------------------------------------------ streams and events


@local
def side_reads_without_waiting(bad: bool) -> None:
    x, stream = ones(), side()
    if not bad:
        stream.wait_stream(here())
    with torch.sim.stream(stream):
        y = x + 1
    here().wait_stream(stream)
    del y


@local
def side_writes_without_waiting(bad: bool) -> None:
    x, stream = ones(), side()
    if not bad:
        stream.wait_stream(here())
    with torch.sim.stream(stream):
        x.mul_(2)
    here().wait_stream(stream)


@local
def result_read_without_waiting(bad: bool) -> None:
    x, stream = ones(), joined_after()
    with torch.sim.stream(stream):
        x.mul_(2)
    if not bad:
        here().wait_stream(stream)
    x + 1


def joined_after() -> Any:
    stream = side()
    torch.sim.synchronize()
    return stream


@local
def overwritten_while_side_reads(bad: bool) -> None:
    x = ones()
    stream = joined()
    with torch.sim.stream(stream):
        y = x.sum()
    if not bad:
        here().wait_stream(stream)
    x.zero_()
    here().wait_stream(stream)
    del y


@local
def event_recorded_too_early(bad: bool) -> None:
    x = ones()
    stream, event = joined(), torch.sim.Event()
    with torch.sim.stream(stream):
        if bad:
            event.record(stream)
        x.add_(1)
        if not bad:
            event.record(stream)
    here().wait_event(event)
    x.sum()


@local
def event_of_another_stream(bad: bool) -> None:
    x = ones()
    stream, other = joined(), side()
    with torch.sim.stream(stream):
        x.add_(1)
    here().wait_event((other if bad else stream).record_event())
    x.sum()


@local
def event_never_recorded(bad: bool) -> None:
    x = ones()
    stream, event = joined(), torch.sim.Event()
    with torch.sim.stream(stream):
        x.add_(1)
        if not bad:
            event.record()
    here().wait_event(event)
    x.sum()


@local
def wait_the_wrong_way(bad: bool) -> None:
    x = ones()
    stream = joined()
    with torch.sim.stream(stream):
        x.add_(1)
    if bad:
        stream.wait_stream(here())
    else:
        here().wait_stream(stream)
    x.sum()


@local
def chain_without_its_middle(bad: bool) -> None:
    x = ones()
    first, second = joined(), side()
    with torch.sim.stream(first):
        x.add_(1)
    if not bad:
        second.wait_stream(first)
    here().wait_stream(second)
    x.sum()


@local
def view_written_on_side(bad: bool) -> None:
    x, stream = ones(8, 8), side()
    rows = x[2:4]
    if not bad:
        stream.wait_stream(here())
    with torch.sim.stream(stream):
        rows.t().fill_(3)
    here().wait_stream(stream)


@local
def slices_that_overlap(bad: bool) -> None:
    x = ones(100)
    stream = joined()
    with torch.sim.stream(stream):
        x[:50].add_(1)
    x[49 if bad else 50 :].add_(1)
    here().wait_stream(stream)


@local
def out_argument_on_side(bad: bool) -> None:
    x, y = ones(), ones()
    stream = joined()
    with torch.sim.stream(stream):
        torch.add(x, x, out=y)
    if not bad:
        here().wait_stream(stream)
    y.sum()
    here().wait_stream(stream)


@local
def list_of_tensors_on_side(bad: bool) -> None:
    xs = [ones(), ones(), ones()]
    stream = joined()
    with torch.sim.stream(stream):
        torch._foreach_mul_(xs, 2.0)
    if not bad:
        here().wait_stream(stream)
    xs[2].sum()


@local
def indexed_write_on_side(bad: bool) -> None:
    x, index = ones(), torch.arange(4, device="sim")
    stream = side()
    if not bad:
        stream.wait_stream(here())
    with torch.sim.stream(stream):
        x[index] = 0.0
    here().wait_stream(stream)


@local
def backward_of_another_stream(bad: bool) -> None:
    """The CUDA semantics notes: a backward on a side stream, gradients used outside of it."""
    w = ones(4, 4, requires_grad=True)
    x = ones(4, 4)
    stream = joined()
    with torch.sim.stream(stream):
        (w @ x).sum().backward()
    if not bad:
        here().wait_stream(stream)
    w.grad.mul_(2)


@local
def initial_gradient_of_another_stream(bad: bool) -> None:
    """The CUDA semantics notes: the gradient that a backward starts with."""
    w = ones(4, 4, requires_grad=True)
    stream = joined()
    with torch.sim.stream(stream):
        loss = (w * 2).sum()
    initial = ones(1).squeeze()
    if not bad:
        stream.wait_stream(here())
    with torch.sim.stream(stream):
        loss.backward(gradient=initial)
    here().wait_stream(stream)


@local
def optimizer_on_a_side_stream(bad: bool) -> None:
    w = torch.nn.Parameter(ones(4))
    optimizer = torch.optim.AdamW([w], foreach=True)
    w.square().sum().backward()
    stream = side()
    if not bad:
        stream.wait_stream(here())
    with torch.sim.stream(stream):
        optimizer.step()
    here().wait_stream(stream)
    w.sum()


@local
def parameters_read_before_the_optimizer_has_written(bad: bool) -> None:
    w = torch.nn.Parameter(ones(4))
    optimizer = torch.optim.SGD([w], lr=0.1)
    w.square().sum().backward()
    stream = joined()
    with torch.sim.stream(stream):
        copied = w.detach().clone()
    if not bad:
        here().wait_stream(stream)
    optimizer.step()
    here().wait_stream(stream)
    del copied


@local
def random_numbers_on_side(bad: bool) -> None:
    x, stream = ones(), side()
    if not bad:
        stream.wait_stream(here())
    with torch.sim.stream(stream):
        x.normal_()
    here().wait_stream(stream)


@local
def query_that_said_no(bad: bool) -> None:
    x, stream = ones(), joined_after()
    with torch.sim.stream(stream):
        x.add_(1)
        event = stream.record_event()
    event.query()
    if not bad:
        assert event.query()
    x.sum()


# ------------------------------------------------------------------------------------------------ memory


@local
def record_stream_dropped(bad: bool) -> None:
    """The documentation of ``Tensor.record_stream``."""
    x = ones(1000)
    stream = joined()
    with torch.sim.stream(stream):
        y = x * 2
    if not bad:
        x.record_stream(stream)
    del x
    ones(1000)
    here().wait_stream(stream)
    del y


@local
def record_stream_of_another_stream(bad: bool) -> None:
    x = ones(1000)
    stream, other = joined(), side()
    with torch.sim.stream(stream):
        y = x * 2
    x.record_stream(other if bad else stream)
    del x
    ones(1000)
    here().wait_stream(stream)
    del y


@local
def freed_before_the_wait(bad: bool) -> None:
    x = ones(1000)
    stream = joined()
    with torch.sim.stream(stream):
        y = x.sum()
    if not bad:
        here().wait_stream(stream)
    del x
    ones(10)  # a smaller one fits as well
    here().wait_stream(stream)
    del y


@local
def storage_emptied_before_the_wait(bad: bool) -> None:
    x = ones(1000)
    stream = joined()
    with torch.sim.stream(stream):
        y = x.sum()
    if not bad:
        here().wait_stream(stream)
    x.untyped_storage().resize_(0)
    ones(1000)
    here().wait_stream(stream)
    del y


@local
def side_memory_freed_by_compute(bad: bool) -> None:
    stream = joined()
    with torch.sim.stream(stream):
        x = ones(1000)
    here().wait_stream(stream)
    y = x * 2  # the current stream reads it
    if not bad:
        x.record_stream(here())
    del x
    with torch.sim.stream(stream):
        z = ones(1000)
    here().wait_stream(stream)
    del y, z


@local
def allocated_here_and_filled_there(bad: bool) -> None:
    stream = side()
    x = torch.empty(1000, device="sim")
    if not bad:
        stream.wait_stream(here())
    with torch.sim.stream(stream):
        x.fill_(1)
    here().wait_stream(stream)


@local
def memory_used_after_it_was_emptied(bad: bool) -> None:
    x = ones(16)
    y = x.view(4, 4)
    if bad:
        x.untyped_storage().resize_(0)
    y.sum()


@local
def storage_within_another_one(bad: bool) -> None:
    x = ones(1000)
    storage = torch._C._construct_storage_from_data_pointer(x.data_ptr() + 400, x.device, 400)
    y = torch.empty(0, device="sim").set_(storage, 0, (100,))
    stream = joined()
    with torch.sim.stream(stream):
        x.mul_(2)
    if not bad:
        here().wait_stream(stream)
    y + 1


# ------------------------------------------------------------------------------------------------ pinned memory


def pinned(*sizes: int) -> torch.Tensor:
    return torch.ones(*(sizes or (2000,))).pin_memory()


@local
def source_written_before_the_copy_has_read(bad: bool) -> None:
    source = pinned()
    x = source.to("sim", non_blocking=True)
    if not bad:
        torch.sim.synchronize()
    source.zero_()
    x.sum()


@local
def source_written_by_numpy(bad: bool) -> None:
    source = pinned()
    x = source.to("sim", non_blocking=True)
    if not bad:
        here().record_event().synchronize()
    source.numpy()[7] = 3.0
    x.sum()


@local
def part_of_a_source_written(bad: bool) -> None:
    source = pinned(4096)
    x = source[:2048].to("sim", non_blocking=True)
    source[2047 if bad else 2048 :].zero_()
    x.sum()


@local
def result_read_before_the_copy_has_ended(bad: bool) -> None:
    x, target = ones(2000), pinned()
    target.copy_(x, non_blocking=True)
    if not bad:
        torch.sim.synchronize()
    target.sum()


@local
def to_cpu_without_waiting(bad: bool) -> None:
    """The tutorial on ``non_blocking``: ``.to("cpu", non_blocking=True)`` and no synchronization."""
    target = ones(2000).to("cpu", non_blocking=True)
    if not bad:
        here().synchronize()
    assert bad or target.sum() == 2000
    if bad:
        target.sum()


@local
def result_read_by_numpy(bad: bool) -> None:
    target = ones(2000).to("cpu", non_blocking=True)
    if not bad:
        here().synchronize()
    target.numpy().sum()


@local
def synchronized_with_another_stream(bad: bool) -> None:
    x = ones(2000)
    stream, target = joined(), pinned()
    with torch.sim.stream(stream):
        target.copy_(x, non_blocking=True)
    (here() if bad else stream).synchronize()
    target.sum()
    here().wait_stream(stream)


@local
def event_before_the_copy(bad: bool) -> None:
    x, target = ones(2000), pinned()
    event = here().record_event()
    target.copy_(x, non_blocking=True)
    if not bad:
        event = here().record_event()
    event.synchronize()
    target.sum()


@local
def staging_buffer_used_twice(bad: bool) -> None:
    x, y, staging = ones(2000), ones(2000), pinned()
    stream = joined()
    staging.copy_(x, non_blocking=True)
    if not bad:
        stream.wait_stream(here())
    with torch.sim.stream(stream):
        staging.copy_(y, non_blocking=True)
    here().wait_stream(stream)
    torch.sim.synchronize()


@local
def upload_read_without_waiting(bad: bool) -> None:
    source, stream = pinned(), side()
    with torch.sim.stream(stream):
        x = source.to("sim", non_blocking=True)
    if not bad:
        here().wait_stream(stream)
    x.sum()


@local
def shards_stepped_while_they_are_copied(bad: bool) -> None:
    """Offloaded parameters: the optimizer of the host writes what a copy still reads."""
    shard = torch.nn.Parameter(pinned())
    shard.grad = torch.ones_like(shard)
    optimizer = torch.optim.SGD([shard], lr=0.1)
    whole = shard.detach().to("sim", non_blocking=True)
    if not bad:
        here().record_event().synchronize()
    optimizer.step()
    whole.sum()


# ------------------------------------------------------------------------------------------------ the host


@local
def host_reads_device_memory(bad: bool) -> None:
    x = ones()
    if bad:
        (ctypes.c_float * 4).from_address(x.data_ptr())[1]
    else:
        x.cpu().numpy()[1]


@local
def host_writes_device_memory(bad: bool) -> None:
    x = ones()
    if bad:
        ctypes.memset(x.data_ptr(), 0, 16)
    else:
        x.zero_()


@local
def item_of_another_stream(bad: bool) -> None:
    x, stream = ones(1), joined_after()
    with torch.sim.stream(stream):
        x.add_(1)
    if not bad:
        here().wait_stream(stream)
    x.item()


@local
def list_of_another_stream(bad: bool) -> None:
    x, stream = ones(8), joined_after()
    with torch.sim.stream(stream):
        x.add_(1)
        if not bad:
            x.tolist()
    if bad:
        x.tolist()


@local
def blocking_copy_of_another_stream(bad: bool) -> None:
    x, stream = ones(8), joined_after()
    with torch.sim.stream(stream):
        x.add_(1)
    if not bad:
        stream.synchronize()
    x.cpu()


@local
def item_while_captured(bad: bool) -> None:
    x = ones(1)
    with torch.sim.capture():
        x.add_(1)
        if bad:
            x.item()


@local
def shape_from_the_device_while_captured(bad: bool) -> None:
    x = ones(8)
    with torch.sim.capture() if bad else contextlib.nullcontext():
        x.nonzero()


# ------------------------------------------------------------------------------------------------ collectives


def wait(work: Any, bad: bool) -> None:
    if not bad:
        work.wait()


def finished(*works: Any) -> None:
    """Ranks go on together, whatever was planted."""
    for work in works:
        work.wait()
    torch.sim.synchronize()


@collective
def reduced_without_waiting(bad: bool) -> None:
    x = ones()
    work = dist.all_reduce(x, async_op=True)
    try:
        wait(work, bad)
        x + 1
    finally:
        finished(work)


@collective
def reduced_on_the_host_without_waiting(bad: bool) -> None:
    x = ones()
    work = dist.all_reduce(x, async_op=True)
    try:
        wait(work, bad)
        x.tolist()
    finally:
        finished(work)


@collective
def gathered_without_waiting(bad: bool) -> None:
    x, whole = ones(), ones(128)
    work = dist.all_gather_into_tensor(whole, x, async_op=True)
    try:
        wait(work, bad)
        whole.sum()
    finally:
        finished(work)


@collective
def uneven_lists_without_waiting(bad: bool) -> None:
    x = ones(3 + dist.get_rank())
    parts = [ones(3), ones(4)]
    work = dist.all_gather(parts, x, async_op=True)
    try:
        wait(work, bad)
        torch.cat(parts)
    finally:
        finished(work)


@collective
def input_overwritten_before_it_was_reduced(bad: bool) -> None:
    x, part = ones(128), ones()
    work = dist.reduce_scatter_tensor(part, x, async_op=True)
    try:
        wait(work, bad)
        x.zero_()
    finally:
        finished(work)


@collective
def waited_for_by_another_stream(bad: bool) -> None:
    x, stream = ones(), side()
    work = dist.all_reduce(x, async_op=True)
    try:
        with torch.sim.stream(stream if bad else here()):
            work.wait()
        x + 1
    finally:
        finished(work)


@collective
def input_of_a_side_stream(bad: bool) -> None:
    x, stream = ones(), joined_after()
    with torch.sim.stream(stream):
        x.add_(1)
    if not bad:
        here().wait_stream(stream)
    work = None
    try:
        work = dist.all_reduce(x, async_op=True)
    finally:
        finished(*([work] if work else []))


@collective
def broadcast_without_waiting(bad: bool) -> None:
    x = ones()
    work = dist.broadcast(x, 0, async_op=True)
    try:
        wait(work, bad)
        x * 2
    finally:
        finished(work)


@collective
def exchanged_without_waiting(bad: bool) -> None:
    x, y = ones(4), ones(4)
    work = dist.all_to_all_single(y, x, async_op=True)
    try:
        wait(work, bad)
        y * 2
    finally:
        finished(work)


@collective
def received_without_waiting(bad: bool) -> None:
    x = ones()
    if dist.get_rank() == 0:
        dist.send(x, 1)
        return
    work = dist.irecv(x, 0)
    try:
        wait(work, bad)
        x + 1
    finally:
        finished(work)


@collective
def sent_and_overwritten(bad: bool) -> None:
    x = ones()
    if dist.get_rank() == 1:
        dist.recv(x, 0)
        return
    work = dist.isend(x, 1)
    try:
        wait(work, bad)
        x.zero_()
    finally:
        finished(work)


@collective
def batch_without_waiting(bad: bool) -> None:
    x, y, other = ones(), ones(), 1 - dist.get_rank()
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)])
    try:
        for work in works:
            wait(work, bad)
        y.sum()
    finally:
        finished(*works)


@collective
def coalesced_without_waiting(bad: bool) -> None:
    xs = [ones(4), ones(5)]
    with dist._coalescing_manager(device=torch.device("sim"), async_ops=True) as works:
        for x in xs:
            dist.all_reduce(x)
    try:
        wait(works, bad)
        xs[1].sum()
    finally:
        finished(works)


@collective
def future_of_another_stream(bad: bool) -> None:
    x, stream = ones(), side()
    work = dist.all_reduce(x, async_op=True)
    try:
        with torch.sim.stream(stream if bad else here()):
            work.get_future().wait()
        x + 1
    finally:
        finished(work)


@collective
def output_freed_and_handed_out_again(bad: bool) -> None:
    stream = joined()
    with torch.sim.stream(stream):
        x = ones(1000)
        work = dist.all_reduce(x, async_op=True)
    try:
        work.wait()  # the current stream waits; the one that owns the memory does not
        if not bad:
            stream.wait_stream(here())
        del x, work
        with torch.sim.stream(stream):
            ones(1000)
    finally:
        finished()


@collective
def different_collectives(bad: bool) -> None:
    x, group = ones(), dist.new_group()
    if bad and dist.get_rank():
        dist.broadcast(x, 0, group=group)
    else:
        dist.all_reduce(x, group=group)
    x.sum()


@collective
def different_orders(bad: bool) -> None:
    x, y, group = ones(4), ones(5), dist.new_group()
    for z in (y, x) if bad and dist.get_rank() else (x, y):
        dist.all_reduce(z, group=group)
    (x.sum() + y.sum()).item()


@collective
def different_reductions(bad: bool) -> None:
    x, group = ones(), dist.new_group()
    dist.all_reduce(x, op=dist.ReduceOp.MAX if bad and dist.get_rank() else dist.ReduceOp.SUM, group=group)
    x.sum()


@collective
def different_sizes(bad: bool) -> None:
    x, group = ones(4 + (bad and dist.get_rank())), dist.new_group()
    dist.all_reduce(x, group=group)
    x.sum()


@collective
def sent_as_another_type(bad: bool) -> None:
    x, group = ones(4), dist.new_group()
    if dist.get_rank() == 0:
        dist.send(x.double() if bad else x, 1, group=group)
    else:
        dist.recv(x, 0, group=group)
        x.sum()
