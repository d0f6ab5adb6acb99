"""Random numbers beside the other parts of the library that hook into DTensor's dispatcher: in any order."""

from __future__ import annotations

import functools
import itertools
import os
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.device import device_type
from tests.ranks import RankPool, RankPools
from tests.rng.dtensor_ops import FUNCTIONS, INITIALIZERS
from tests.rng.test_dtensor import on_mesh, run_all
from vescale import rng
from vescale.compat import local_of, spec_of
from vescale.ops import install as install_placements
from vescale.runtime._handlers import install_handlers

STEPS = {"placements": install_placements, "runtime": install_handlers, "rng": rng.enable}


def table() -> dict[str, str]:
    """DTensor's handlers: op -> the function that handles it."""
    found = {}
    for op, handler in DTensor._op_dispatcher._custom_op_handlers.items():
        inner: Any = handler
        while hasattr(inner, "__wrapped__") or isinstance(inner, functools.partial):
            inner = inner.func if isinstance(inner, functools.partial) else inner.__wrapped__
        found[str(op)] = f"{inner.__module__}.{inner.__qualname__}"
    return found


def in_a_fork(*steps: Any) -> list[dict[str, str]]:
    """The table after some steps, after ``rng.disable()`` and after ``rng.enable()``, in a process that had taken none."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            tables = []
            for step in (*steps, rng.disable, rng.enable):
                step()
                tables.append(table())
            os.write(send, pickle.dumps(tables[-3:]))
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(answer)


def every_order() -> None:
    stock, before = table(), in_a_fork(*STEPS.values())
    enabled, disabled, again = before
    assert enabled == again
    for order in itertools.permutations(STEPS.values()):
        assert in_a_fork(*order) == before, order
    assert in_a_fork(rng.enable)[1] == stock
    ours = set(enabled) - set(disabled)
    assert len(ours) > 50
    changed = {op for op in disabled if enabled.get(op) != disabled[op]}
    assert not changed, f"two parts of the library handle {changed}"


def test_the_order_of_enabling_does_not_matter() -> None:
    pool = RankPool(1)  # its processes have enabled nothing yet
    try:
        pool.run(every_order)
    finally:
        pool.close()


def enable_everything() -> None:
    install_placements()
    install_handlers()


def test_all_ops_beside_the_handlers_of_parallelize(ranks: RankPools) -> None:
    ranks.run(enable_everything, world_size=4)
    todo = on_mesh([*FUNCTIONS, *INITIALIZERS], (4,), [[Shard(1)]], [(18, 6)])
    assert ranks.run(run_all, todo, world_size=4) == [len(todo)] * 4


def strides_of_copies() -> None:
    """A copy lies in memory as the whole tensor says, on every rank: random fills follow that order."""
    enable_everything()
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
    for source in (torch.zeros(18, 6).t(), torch.zeros(3, 5, 2).permute(2, 0, 1), torch.zeros(4, 3, 2, 2)):
        for dim, memory_format in itertools.product(range(2), (None, torch.contiguous_format, torch.channels_last)):
            if memory_format is torch.channels_last and source.ndim != 4:
                continue
            options = {} if memory_format is None else {"memory_format": memory_format}
            placed: Any = distribute_tensor(source, mesh, [Shard(dim)], src_data_rank=None)
            spec = spec_of(placed)
            assert spec.tensor_meta is not None and spec.tensor_meta.stride == source.stride()
            copy = placed.clone(**options)
            meta = spec_of(copy).tensor_meta
            assert meta is not None and meta.stride == source.clone(**options).stride(), (dim, memory_format)
            assert local_of(copy).shape == local_of(placed).shape


def test_copies_have_the_strides_of_the_whole_tensor(ranks: RankPools) -> None:
    ranks.run(strides_of_copies, world_size=4)
