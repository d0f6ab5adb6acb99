"""The contract of residency: the table itself, and a model that is driven through its states."""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from tests.fsdp.compare import by_block, gradients_of, mesh_of
from tests.fsdp.extended import MixedBlock
from tests.fsdp.models import Net, net_loss, tokens
from tests.ranks import RankPools, run_cases
from vescale.comm import record_comms
from vescale.errors import GradientError
from vescale.fsdp import Event, ModuleState, ParameterGroup, Residency, ResidencyError, fully_shard
from vescale.fsdp._contract import GROUP, HOLDINGS, MODULE, ROOT, TRANSITIONS, Move, Stage, Turn
from vescale.fsdp._group_memory import GroupMemory
from vescale.fsdp._iteration import Iteration
from vescale.gradients import GradientPlace, UnreducedGradients


def test_every_pair_is_in_the_contract_or_raises() -> None:
    memory = object.__new__(GroupMemory)
    memory.at_rest = SimpleNamespace(path="blocks.0")  # type: ignore[assignment]
    for state, event in itertools.product(Residency, Event):
        memory.residency = state
        if (state, event) in TRANSITIONS:
            memory._move(event)
            assert memory.residency is TRANSITIONS[state, event][0]
            continue
        with pytest.raises(ResidencyError, match=rf"group 'blocks.0' .* is '{state.value}' .* event '{event.value}'"):
            memory._move(event)
        assert memory.residency is state


def test_the_contract_is_consistent() -> None:
    assert set(HOLDINGS) == set(Residency) and {event for _, event in TRANSITIONS} == set(Event)
    for state in Residency:  # every state is reached from rest, and leads back there
        assert state in reachable(Residency.SHARDED) and Residency.SHARDED in reachable(state)
    for (state, event), (to, communication) in TRANSITIONS.items():
        # Whatever gets memory that has no contents communicates, and nothing else does.
        begins = HOLDINGS[to].gathered and not HOLDINGS[state].gathered
        assert bool(communication) is begins, (state, event)
        assert not HOLDINGS[to].piece or HOLDINGS[state].gathered, (
            state,
            event,
        )  # it is copied out of what was gathered


def test_the_contract_of_a_step_is_consistent() -> None:
    """From rest every state is reached, and from every state rest; any other move raises."""
    group, module, root = (object.__new__(kind) for kind in (ParameterGroup, ModuleState, Iteration))
    group.at_rest, module.groups, root._name = SimpleNamespace(path="x"), [group], "x"  # type: ignore[attr-defined]
    machines: list[Any] = [(group, "turn", GROUP), (module, "stage", MODULE), (root, "stage", ROOT)]
    for machine, attribute, table in machines:
        states, rest = {state for state, _ in table}, next(iter(table))[0]
        assert states == {*table.values()} == closure(table, rest) and rest in (Stage.IDLE, Turn.REST)
        for state, move in itertools.product(states, Move):
            assert rest in closure(table, state)
            setattr(machine, attribute, state)
            if (state, move) in table:
                machine._move(move)
                assert getattr(machine, attribute) is table[state, move]
                continue
            with pytest.raises(ResidencyError, match=rf"'x' of fully_shard is '{state.value}' .* '{move.value}'"):
                machine._move(move)
            assert getattr(machine, attribute) is state


def test_gradients_move_by_their_table() -> None:
    """What the documentation says is legal; any other move raises, and changes nothing."""
    told = set(re.findall(r"``(\w+)`` to ``(\w+)``", GradientPlace.__doc__ or ""))
    legal = {(GradientPlace[of], GradientPlace[to]) for of, to in told}
    legal |= {(place, GradientPlace.NONE) for place in GradientPlace}
    gradients = object.__new__(UnreducedGradients)
    gradients.parameters = []
    for of, to in itertools.product(GradientPlace, repeat=2):
        gradients.place = of
        if (of, to) in legal:
            gradients._move(to)
            continue
        with pytest.raises(GradientError, match=f"are {of.name} and were to be {to.name}"):
            gradients._move(to)
        assert gradients.place is of


def closure(table: Any, start: Any) -> set[Any]:
    found = {start}
    while new := {to for (of, _), to in table.items() if of in found} - found:
        found |= new
    return found


def reachable(start: Residency) -> set[Residency]:
    found, new = {start}, [start]
    while new:
        state = new.pop()
        for to in {to for (of, _), (to, _) in TRANSITIONS.items() if of is state} - found:
            found.add(to)
            new.append(to)
    return found


@contextlib.contextmanager
def watched(model: Any) -> Iterator[list[str]]:
    """The events of block 0. At each event of any group: the state that the contract says, memory and registered parameters
    as they must be in it, and collectives if the contract has some."""
    found: list[str] = []
    move = GroupMemory._move

    def checked(self: GroupMemory, event: Event) -> None:
        before = self.residency
        move(self, event)
        to, communication = TRANSITIONS[before, event]
        where = f"{self.at_rest.path}: {before.value}, {event.value}"
        assert self.residency is to, where
        holding = HOLDINGS[to]
        assert self.gathered is not None
        # On a device, memory goes with a later gather.
        is_there = holding.gathered or any(left is self.gathered for left, _ in self.comm._left)
        assert self.gathered.is_allocated == is_there, where
        storages = [storage for storage, _ in self.gathered._attached.values()]
        if self.gathered._storage is not None:
            storages.append(self.gathered._storage)
        full = self.gathered.num_bytes + sum(size for _, size in self.gathered._attached.values())
        allocated = sum(storage.size() for storage in storages)
        assert allocated == (full if is_there else 0), where
        pieces = self.kept_bytes if to is not Residency.GATHERING else 0  # they stay until they have been gathered from
        plain = [b for b in self.at_rest.buckets if hasattr(b.gathering, "whole")]
        assert pieces == (sum(b.whole.num_bytes for b in plain) // 2 if holding.piece else 0), where
        for parameter in self.at_rest.parameters:
            form = parameter.unsharded if holding.registered else parameter.sharded
            assert all(slot.module._parameters[slot.name] is form for slot in parameter.slots), where
        gathers = [r for r in ledger.records if r.requester == self.at_rest.path and "gather" in r.op]
        ledger.records[:] = [r for r in ledger.records if r not in gathers]
        expected = len(self.at_rest.buckets) if communication else 0
        assert len(gathers) == expected, (where, gathers)
        if self is model.blocks[0]._state.groups[0].memory:
            found.append(event.value)

    with pytest.MonkeyPatch.context() as patch, record_comms() as ledger:
        patch.setattr(GroupMemory, "_move", checked)
        yield found


def train(model: Any) -> None:
    net_loss(model, 0, dist.get_rank()).backward()


def no_sync(model: Any) -> None:
    model.set_requires_gradient_sync(False)
    train(model)
    model.set_requires_gradient_sync(True)
    train(model)


def evaluate(model: Any) -> None:
    with torch.no_grad():
        model(tokens(0, 0))
    train(model)


def two_forwards(model: Any) -> None:
    net_loss(model, 0, dist.get_rank())
    train(model)


def kept_after_backward(model: Any) -> None:
    model.set_reshard_after_backward(False)
    train(model)
    model.set_reshard_after_backward(True)
    train(model)


def create_graph(model: Any) -> None:
    loss = net_loss(model, 0, dist.get_rank())
    torch.autograd.backward(loss, create_graph=True)
    train(model)


def piece(model: Any) -> None:
    model.set_reshard_after_forward(True)
    for block in model.blocks:
        block._state.groups[0].reshard_after_forward = 2  # all ranks, which fully_shard would take for True
    train(model)
    net_loss(model, 0, dist.get_rank())
    train(model)


def by_hand(model: Any) -> None:
    block = model.blocks[0]
    block.unshard(async_op=True)
    block.unshard()
    block.reshard()
    block.reshard()
    with pytest.raises(
        ResidencyError, match=r"group 'blocks.0' of fully_shard is 'sharded' and got the event 'arrive'"
    ):
        block._state.groups[0].memory._move(Event.ARRIVE)


GATHERED = ["gather", "arrive", "use"]
FORWARD, KEPT = [*GATHERED, "reshard"], [*GATHERED, "leave"]
REDUCED = ["borrow", "reshard", "give back"]  # the backward's end reshards what may still be gathered
BACKWARD = [*GATHERED, *REDUCED]
APART = [*GATHERED, "reshard", "reshard"]  # gradients have memory of their own
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Case = tuple[dict[str, Any], dict[str, Any], Callable[[Any], None], list[str]]
CASES: dict[str, Case] = {
    "default": ({}, {}, train, FORWARD + BACKWARD),
    "no sync": ({}, {}, no_sync, (FORWARD + APART) * 2),
    "kept": ({}, {"reshard_after_forward": False}, train, [*KEPT, "use", *REDUCED]),
    "kept, evaluation": (
        {},
        {"reshard_after_forward": False},
        evaluate,
        [*KEPT, "reshard", *KEPT, "use", *REDUCED],
    ),
    "evaluation": ({}, {}, evaluate, FORWARD * 2 + BACKWARD),
    "kept, two forwards": (
        {},
        {"reshard_after_forward": False},
        two_forwards,
        [*KEPT, "use", "leave", "use", *REDUCED],
    ),
    "kept after backward": ({}, {}, kept_after_backward, [*FORWARD, *KEPT, "use", "reshard", *BACKWARD]),
    "create_graph": ({}, {}, create_graph, [*FORWARD, *KEPT, "use", "leave", "use", "reshard"]),
    "a piece": (
        {},
        {},
        piece,
        [*GATHERED, "keep piece", *BACKWARD, *GATHERED, "keep piece", "reshard", *GATHERED, "keep piece", *BACKWARD],
    ),
    "offloaded": ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, train, FORWARD + BACKWARD),
    "reduced in another dtype": ({}, {"mp_policy": LOW}, train, FORWARD + APART),
    "twice": ({"repeat": 2}, {}, train, FORWARD * 3 + BACKWARD),
    "checkpointed": ({"recompute": False}, {}, train, FORWARD + BACKWARD),
    "tensor subclasses": ({"dim": 8, "block": MixedBlock}, {}, train, FORWARD + BACKWARD),
    "by hand": ({}, {}, by_hand, [*FORWARD, "reshard"]),
}


def drive(name: str) -> None:
    of_model, options, run, expected = CASES[name]
    torch.manual_seed(0)
    model: Any = Net(**of_model)
    by_block(model, fully_shard, mesh_of(), **options)
    train(model)  # the first step compares the ranks
    with watched(model) as found:
        run(model)
    assert found == expected, f"{name}: {found}"


def run() -> int:
    return run_cases(drive, [(name,) for name in CASES])


def test_a_model_keeps_the_contract(ranks: RankPools) -> None:
    ranks.run(run, world_size=2)


class Passing(nn.Module):
    """A block that returns what it was given beside its result, as T5's blocks return the bias of positions."""

    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.bias = nn.Parameter(torch.randn(6)) if has_bias else None

    def forward(self, x: torch.Tensor, bias: Any, seen: torch.Tensor) -> tuple[torch.Tensor, Any, torch.Tensor]:
        bias = (self.bias * 2)[:] if self.bias is not None else bias
        return torch.tanh(self.linear(x) + bias) + seen, bias, seen


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Passing(n == 0) for n in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen, bias = self.encoder(x)[:, :], None
        for block in self.blocks:
            x, bias, seen = block(x, bias, seen)
        return x.square().mean()


def each_unit_once() -> None:
    torch.manual_seed(0)
    reference = Decoder()
    model = copy.deepcopy(reference)
    by_block(model, fully_shard, mesh_of())
    x = torch.randn(4, 6)
    for _ in range(2):
        model.zero_grad()
        loss = model(x)
        with record_comms() as ledger:
            loss.backward()
        counts = Counter(record.op.removesuffix("_v") for record in ledger.records)
        assert counts["all_gather"] == 4 and counts["reduce_scatter"] == 5, counts  # the root stays gathered
    reference(x).backward()
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad)


def test_outputs_that_are_inputs_begin_no_backward(ranks: RankPools) -> None:
    ranks.run(each_unit_once, world_size=2)
