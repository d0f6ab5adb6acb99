"""Bytes that an engine copies and allocates, read from the profiler and the allocator, not from the clock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["copied_bytes", "engine_copies", "peak_bytes"]

# Each with the function from its inputs' shapes to the elements that it writes.
_FSDP2: dict[str, Callable[[Any], float]] = {
    "fsdp::split_with_sizes_copy": lambda shapes: math.prod(shapes[0]),  # the gathered buffer, to the parameters
    "fsdp::chunk_cat": lambda shapes: math.prod(shapes[3]),  # the gradients, to the buffer that is reduced
}
_COPY_IN = "fsdp::all_gather_copy_in"  # this rank's shards, to its slot of the buffer whose shape is recorded
_TAKE_GRADS = "vescale::take_grads"  # gradients, to the buffer that is reduced
_PARTS_OF_OTHERS = ("c10d::", "gloo:", "nccl:", "fsdp::")


def copied_bytes(step: Callable[[], Any], num_ranks: int, item_bytes: int = 4) -> Counter[str]:
    """Run ``step``; bytes by kernel. FSDP2's are known by name, all other ``copy_`` count as "copy_".

    A copy inside of a collective is the backend's: on the threads of gloo, inside of c10d's ops, and what a backend that
    has no in-place gather does instead.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        step()
    events = prof.events() or []
    own_thread = Counter(event.thread for event in events).most_common(1)[0][0]
    found: Counter[str] = Counter()
    for event in events:
        if event.name == _COPY_IN:
            found[event.name] += item_bytes * math.prod(event.input_shapes[1]) // num_ranks
        elif event.name in _FSDP2:
            found[event.name] += int(item_bytes * _FSDP2[event.name](event.input_shapes))
        elif event.name == _TAKE_GRADS:
            found["copy_"] += item_bytes * sum(map(math.prod, event.input_shapes))
        elif (
            event.name == "aten::copy_"
            and event.input_shapes[0]
            and event.thread == own_thread
            and not _is_part_of_another(event)
        ):
            found["copy_"] += item_bytes * math.prod(event.input_shapes[0])
    return found


def _is_part_of_another(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith(_PARTS_OF_OTHERS):
            return True
        parent = parent.cpu_parent
    return False


def engine_copies(step: Callable[[], Any], plain_step: Callable[[], Any], num_ranks: int) -> Counter[str]:
    """What ``step`` of a sharded model copies beyond ``plain_step`` of the same model on one device."""
    found, plain = copied_bytes(step, num_ranks), copied_bytes(plain_step, num_ranks)
    return found - plain


def peak_bytes(step: Callable[[], Any], device: str = "cpu") -> int:
    """Most bytes allocated at once above those at the start: what tensors took, and backends through the same allocator."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - start
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    assert prof.profiler is not None and prof.profiler.kineto_results is not None
    changes = [
        (event.start_ns(), event.nbytes())
        for event in prof.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    allocated = peak = 0
    for _, num_bytes in sorted(changes):
        allocated += num_bytes
        peak = max(peak, allocated)
    return peak
