"""Stream order without a device: stand-ins for streams keep vector clocks, and every buffer that is freed or
read must have been waited for. The engine then goes the way that it goes on a device, and must find the same gradients."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from tests.device import device_type
from tests.fsdp.compare import by_block, mesh_of, same_gradients
from tests.fsdp.extended import MixedBlock
from tests.fsdp.models import Net, net_loss
from tests.ranks import RankPools, run_cases, run_functions
from vescale.buffer import Allocation
from vescale.comm import SideStream
from vescale.fsdp import _context, fully_shard
from vescale.fsdp._contract import Residency
from vescale.fsdp._gather import BufferGather
from vescale.fsdp._group_memory import GroupMemory
from vescale.gradients import ShardedReduction, _sharded_reduction

Time = dict[str, int]


class Clocks:
    """What each stream has done, and what it knows others to have done."""

    def __init__(self) -> None:
        self.current = "compute"
        self.known: dict[str, Time] = defaultdict(dict)
        # Not by address, which later memory may have.
        self.uses: WeakKeyDictionary[Allocation, list[tuple[str, int]]] = WeakKeyDictionary()
        self.owners: WeakKeyDictionary[Allocation, str] = WeakKeyDictionary()
        self.num_checks = self.last_copy = 0

    def tick(self, stream: str) -> Time:
        self.known[stream][stream] = self.known[stream].get(stream, 0) + 1
        return dict(self.known[stream])

    def merge(self, stream: str, event: Time) -> None:
        for other, time in event.items():
            self.known[stream][other] = max(self.known[stream].get(other, 0), time)

    def use(self, memory: Allocation, stream: str) -> None:
        self.uses.setdefault(memory, []).append((stream, self.tick(stream)[stream]))

    def check(self, memory: Allocation, stream: str, what: str) -> None:
        for other, time in self.uses.get(memory, []):
            self.num_checks += 1
            assert self.known[stream].get(other, 0) >= time, f"{what} on {stream} before {other} was waited for"


class ClockedStream(SideStream):
    def __init__(self, clocks: Clocks, name: str) -> None:
        self.clocks, self.name, self.stream, self.is_real = clocks, name, name, True

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        before, self.clocks.current = self.clocks.current, self.name
        try:
            yield
        finally:
            self.clocks.current = before

    def __call__(self) -> Any:
        return self._inside()

    def wait_for_compute(self) -> None:
        self.clocks.merge(self.name, self.clocks.tick(self.clocks.current))

    def wait_event(self, event: Any) -> None:
        if event is not None:
            self.clocks.merge(self.name, event)

    def done(self) -> Any:
        return self.clocks.tick(self.name)

    def compute_done(self) -> Any:
        return self.clocks.tick(self.clocks.current)

    def compute_waits(self, event: Any) -> None:
        if event is not None:
            self.clocks.merge(self.clocks.current, event)

    def host_waits(self, event: Any) -> None:
        if event is not None:
            self.clocks.merge("host", event)


@contextlib.contextmanager
def clocked(model: Any, patch: pytest.MonkeyPatch) -> Iterator[Clocks]:
    """``model`` has run once; its streams become clocks."""
    clocks, comm = Clocks(), model._state.comm
    comm.gather_stream, comm.reduce_stream = ClockedStream(clocks, "gather"), ClockedStream(clocks, "reduce")
    comm.replica_stream = ClockedStream(clocks, "replica")
    check_uses(clocks, patch)
    yield clocks


@contextlib.contextmanager
def on_device_path() -> Iterator[Clocks]:
    """The engine goes the way of a device, for all models that are given to ``fully_shard`` inside."""
    clocks, names = Clocks(), itertools.cycle(("gather", "reduce", "replica"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_context, "SideStream", lambda *_, **__: ClockedStream(clocks, next(names)))
        check_uses(clocks, patch)
        yield clocks


def check_uses(clocks: Clocks, patch: pytest.MonkeyPatch) -> None:
    """What is freed or read must have been waited for."""
    own: dict[str, Callable[..., Any]] = {
        "wait": GroupMemory.wait,
        "unshard": GroupMemory.unshard,
        "release": GroupMemory._release,
        "start": ShardedReduction.start,
        "copy": BufferGather.start,
        "free": Allocation.free,
    }

    def unshard(self: Any) -> None:
        starts = self.residency in (Residency.SHARDED, Residency.KEPT_PIECE)
        own["unshard"](self)
        if starts and self.comm.gather_stream.is_real:  # another model may have no clocks
            clocks.uses[self.gathered] = []
            clocks.owners[self.gathered] = "gather"
            clocks.use(self.gathered, "gather")
            self._event = clocks.tick("gather")

    def wait(self: Any) -> None:
        gathers = self.residency is Residency.GATHERING and self.comm.gather_stream.is_real
        own["wait"](self)
        if gathers:
            clocks.check(self.gathered, "compute", "parameters are read")

    def release(self: Any, event: Any) -> None:
        if self.is_unsharded and self.comm.gather_stream.is_real:
            clocks.use(self.gathered, clocks.current)
        own["release"](self, event)

    def start(self: Any) -> None:
        if not self._stream.is_real:
            own["start"](self)
            return
        memory = self.gradients.unreduced.buffer._allocation
        if memory not in clocks.owners:
            clocks.owners[memory] = "compute"
        clocks.use(memory, "compute")  # gradients were written
        own["start"](self)
        clocks.check(memory, "reduce", "gradients are reduced")
        clocks.use(memory, "reduce")

    def copy(self: Any, *args: Any, **options: Any) -> Any:
        clocks.last_copy = clocks.tick(clocks.current)[clocks.current]
        return own["copy"](self, *args, **options)

    def free(self: Any) -> None:
        owner = clocks.owners.get(self)
        if owner is not None and self.is_allocated:
            clocks.check(self, owner, "memory is freed")
            clocks.uses[self] = []
        own["free"](self)

    patch.setattr(GroupMemory, "unshard", unshard)
    patch.setattr(GroupMemory, "wait", wait)
    patch.setattr(GroupMemory, "_release", release)
    patch.setattr(ShardedReduction, "start", start)
    patch.setattr(Allocation, "free", free)
    patch.setattr(BufferGather, "start", copy)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Any], Any]]] = {
    "default": ({}, {}, lambda model: None),
    "in place": ({}, {}, lambda model: model.set_in_place_gradients()),
    "direct": ({}, {}, lambda model: model.set_direct_linear_gradients()),
    "kept after forward": ({}, {"reshard_after_forward": False}, lambda model: None),
    "many in flight": ({}, {}, lambda model: model.set_reduce_scatter_max_input_buffers(3)),
    "twice": ({"repeat": 2}, {}, lambda model: None),
    "checkpointed": ({"recompute": False}, {}, lambda model: None),
    "checkpointed, reentrant": ({"recompute": True}, {}, lambda model: None),
    "tensor subclasses": ({"dim": 8, "block": MixedBlock}, {}, lambda model: None),
}


def steps(name: str) -> None:
    of_model, options, prepare = CASES[name]
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net(**of_model))
        by_block(models[-1], fully_shard, mesh_of(), **options)
        prepare(models[-1])
        net_loss(models[-1], 0, dist.get_rank()).backward()
    with pytest.MonkeyPatch.context() as patch, clocked(models[0], patch) as clocks:
        for step in range(2):
            net_loss(models[0], step, dist.get_rank()).backward()
        assert clocks.num_checks > 30, clocks.num_checks
    for step in range(2):
        net_loss(models[1], step, dist.get_rank()).backward()
    same_gradients(models, name)


def after_the_optimizer() -> None:
    """The next forward's gathers wait for the optimizer: for all of the current stream, or for the event that it was given,
    once, and then for nothing else of that stream."""
    torch.manual_seed(0)
    model: Any = Net()
    by_block(model, fully_shard, mesh_of())
    net_loss(model, 0, dist.get_rank()).backward()
    with pytest.MonkeyPatch.context() as patch, clocked(model, patch) as clocks:
        for event in (True, False):
            before = clocks.tick("compute")["compute"]
            if event:
                model.set_post_optim_event(clocks.tick("optimizer"))
            gather = clocks.known["gather"]
            seen: list[tuple[int, int]] = []
            handle = model.embed.register_forward_pre_hook(
                lambda *_, seen=seen, gather=gather: seen.append((gather.get("optimizer", 0), gather.get("compute", 0)))
            )
            net_loss(model, 0, dist.get_rank())
            handle.remove()
            ((optimizer, compute),) = seen
            assert optimizer == 1 and (compute < before) is event, (event, seen, before)


def unshard_by_hand_after_the_optimizer() -> None:
    """What ``torch.distributed.pipelining`` does. Inside of a forward it waits for nothing that the forward has computed."""
    with on_device_path() as clocks:
        model: Any = Net()
        by_block(model, fully_shard, mesh_of())
        net_loss(model, 0, dist.get_rank()).backward()
        gather = clocks.known["gather"]
        optimizer = clocks.tick("compute")["compute"]
        model.blocks[1].unshard(async_op=True)
        assert gather["compute"] >= optimizer, (gather, optimizer)
        model.blocks[1].reshard()
        optimizer = clocks.tick("compute")["compute"]
        model.set_post_optim_event(clocks.tick("optimizer"))
        model.blocks[1].unshard()
        assert gather["optimizer"] == 1 and gather["compute"] < optimizer, gather
        model.blocks[1].reshard()
        seen: list[tuple[int, int]] = []

        def prefetch(*_: Any) -> None:
            computed = clocks.tick("compute")["compute"]
            model.blocks[2].unshard(async_op=True)
            seen.append((gather["compute"], computed))

        handle = model.blocks[1].register_forward_hook(prefetch)
        net_loss(model, 1, dist.get_rank())
        handle.remove()
        ((known, computed),) = seen
        assert known < computed, seen


class Branches(nn.Module):
    """The second branch is not always taken."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.one(x) + (self.other(x) if both else 0)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Branches()])

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.blocks[0](x, both)


def gradients_are_added_on_the_computation() -> None:
    """Also those of parameters that only other ranks have used; hooks of parameters run there, too."""
    with on_device_path() as clocks, pytest.MonkeyPatch.context() as patch:
        model: Any = Branching()
        by_block(model, fully_shard, mesh_of())
        found: list[str] = []
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: found.append(clocks.current))
            parameter.register_post_accumulate_grad_hook(lambda parameter: found.append(clocks.current))
        own = _sharded_reduction.added

        def added(before: Any, part: torch.Tensor, spec: Any) -> Any:
            found.append(clocks.current)
            return own(before, part, spec)

        patch.setattr(_sharded_reduction, "added", added)
        for both in (True, dist.get_rank() == 1):
            model(torch.ones(2, 4), both).sum().backward()
            assert len(found) == 3 * 4 and set(found) == {"compute"}, found
            known, reduced = clocks.known["compute"]["reduce"], clocks.known["reduce"]["reduce"]
            assert known == reduced, (known, reduced)  # the optimizer comes after all of it
            found.clear()


def host_memory_is_left() -> None:
    """Shards on the host may be written to after a forward without gradients, and after a backward: copies from them have
    ended. Gradients are on the host when a backward returns."""
    with on_device_path() as clocks:
        model: Any = Net()
        by_block(model, fully_shard, mesh_of(), offload_policy=CPUOffloadPolicy(pin_memory=False))
        for step in range(2):
            with torch.no_grad():
                net_loss(model, step, dist.get_rank())
            assert clocks.known["host"]["gather"] >= clocks.last_copy > 0
            net_loss(model, step, dist.get_rank()).backward()
            assert clocks.known["host"]["gather"] >= clocks.last_copy


def run() -> int:
    if device_type() != "cpu":  # which has streams of its own
        return 0
    more = (
        after_the_optimizer,
        unshard_by_hand_after_the_optimizer,
        gradients_are_added_on_the_computation,
        host_memory_is_left,
    )
    return run_cases(steps, [(name,) for name in CASES]) + run_functions(more)


def test_what_is_freed_or_read_has_been_waited_for(ranks: RankPools) -> None:
    ranks.run(run, world_size=2)
