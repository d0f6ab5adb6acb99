"""A step that ends anywhere: at every call inside of the engine, Ctrl-C and running out of memory leave a state from which
the next step computes what a model computes that has had no such step, also where weights are written in between."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.device import device_type
from tests.fsdp.compare import by_block, mesh_of, same_gradients
from tests.fsdp.models import Net, net_loss
from tests.fsdp.test_streams import clocked
from tests.ranks import RankPools, run_cases
from vescale.fsdp import Residency, fully_shard, state_of

ENGINE = (
    "/vescale/fsdp/",
    "/vescale/buffer/",
    "/gradients/_sharded_reduction.py",
    "/gradients/_unreduced_gradients.py",
)


class Interrupted:
    """Notes the calls of the engine, and raises an error in place of the first one of a function from a number on."""

    def __init__(self, number: int = 0, where: str = "", error: type[BaseException] = KeyboardInterrupt) -> None:
        self.number, self.where, self.error = number, where, error
        self.seen: list[str] = []

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        # How far ``any`` looks in a set of weak references depends on its order, which is another one each time.
        if event == "call" and code.co_name != "<genexpr>" and any(part in code.co_filename for part in ENGINE):
            self.seen.append(f"{code.co_filename.rpartition('/')[2]}:{code.co_qualname}")
            if self.seen[-1] == self.where and len(self.seen) > self.number:
                raise self.error(f"in place of call {self.number}, {self.seen[-1]}")

    def run(self, step: Callable[[], None]) -> None:
        sys.setprofile(self)
        try:
            step()
        finally:
            sys.setprofile(None)


def groups_of(model: Any) -> list[Any]:
    states = {id(state): state for module in model.modules() if (state := state_of(module)) is not None}
    return [group for state in states.values() for group in state.groups]


def at_rest(model: Any) -> None:
    for group in groups_of(model):
        assert group.memory.residency is Residency.SHARDED, group
        assert not group.memory.gathered.is_allocated, group
        assert not any(bucket.unreduced.memory.is_allocated for bucket in group.buckets), group
    comm = model._state.comm
    assert not (comm._left or comm._reducing or comm.finished or comm.prefetches or comm._host_reads)


def same_calls(own: list[str]) -> list[int]:
    """The numbers, on this rank, of calls that all ranks make at the same moment. Ranks differ in calls for padding."""
    seen: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(seen, own)
    placed: list[dict[int, int]] = []
    for other in seen:
        blocks = difflib.SequenceMatcher(None, seen[0], other, autojunk=False).get_matching_blocks()
        placed.append({a + k: b + k for a, b, size in blocks for k in range(size)})
    common = [n for n in range(len(seen[0])) if all(n in one for one in placed)]
    return [placed[dist.get_rank()][n] for n in common]


def in_place(model: Any) -> None:
    model.set_in_place_gradients()


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Any], None]]] = {
    "default": ({}, {}, lambda model: None),
    "in place": ({}, {}, in_place),
    "kept after forward": ({}, {"reshard_after_forward": False}, lambda model: None),
    "checkpointed": ({"recompute": False}, {}, lambda model: None),
    "used twice": ({"repeat": 2}, {}, lambda model: None),
}


def interrupted(name: str, on_device: bool, part: int, num_parts: int) -> None:
    of_model, options, prepare = CASES[name]
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net(num_blocks=2, **of_model))
        by_block(models[-1], fully_shard, mesh_of(), **options)
        prepare(models[-1])
        net_loss(models[-1], 0, dist.get_rank()).backward()
        models[-1].zero_grad()
    model, _ = models
    parameters = [list(one.parameters()) for one in models]
    step = lambda number: net_loss(model, number, dist.get_rank()).backward()  # noqa: E731
    with contextlib.ExitStack() as stack:
        if on_device:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            stack.enter_context(clocked(model, patch))
        whole = Interrupted()
        whole.run(lambda: step(1))
        model.zero_grad()
        calls = same_calls(whole.seen)
        for number in range(part, len(calls), num_parts):
            error = KeyboardInterrupt if number % 2 else torch.OutOfMemoryError
            broken = Interrupted(calls[number], whole.seen[calls[number]], error)
            with contextlib.suppress(KeyboardInterrupt, torch.OutOfMemoryError):
                broken.run(lambda: step(1))
            where = f"{name}, {'device' if on_device else 'cpu'}, {number} of {len(calls)}: {broken.seen[-1]}"
            assert broken.seen[-1] == broken.where, where
            model.zero_grad()
            assert all(isinstance(p, DTensor) for p in model.parameters()), where
            with torch.no_grad():
                for one in parameters:
                    for parameter in one:
                        parameter.grad = None
                        parameter.mul_(-1.0)
            try:
                losses = [net_loss(one, 2, dist.get_rank()) for one in models]
                assert torch.equal(*losses), losses
                for loss in losses:
                    loss.backward()
                same_gradients(models, where)
                for one in parameters:
                    for parameter in one:
                        parameter.grad = None
                at_rest(model)
            except Exception as error:
                raise AssertionError(where) from error


def run(names: list[str], num_parts: int) -> int:
    ways = (False, True) if device_type() == "cpu" else (False,)  # on a device, its own streams
    cases = [(name, on_device, 5 * place, num_parts) for place, name in enumerate(names) for on_device in ways]
    return run_cases(interrupted, cases)


def test_the_next_step_is_right_wherever_one_was_interrupted(ranks: RankPools) -> None:
    ranks.run(run, list(CASES), 41, world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_next_step_is_right_after_many_interrupts(ranks: RankPools, name: str) -> None:
    ranks.run(run, [name], 4, world_size=2)
