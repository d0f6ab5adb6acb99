"""``torch.distributed.checkpoint.state_dict`` on our placements does what it does on stock ``Shard(0)``: same keys, same
kinds of values, same numbers, same refusals, for every option and several optimizers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

from tests.examples import NIGHTLY, daily_sample
from tests.placements.on_ranks import make_mesh
from tests.ranks import RankPools, run_cases
from vescale.placements import InterleavedShard, RaggedShard, StridedRaggedShard, distribute_tensor

GRID = ((0, 1), (2, 3))
Layout = tuple[Any, tuple[Any, ...]]
STOCK: Layout = ((0, 1, 2, 3), (Shard(0),))
LAYOUTS: dict[str, Layout] = {
    "balanced": ((0, 1, 2, 3), (RaggedShard(),)),
    "skewed": ((0, 1, 2, 3), (RaggedShard((), (0, 0, 1, 0)),)),
    "strided": (GRID, (RaggedShard(), Shard(0))),
    "interleaved": ((0, 1, 2, 3), (InterleavedShard(0, 2),)),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "AMSGrad, one by one": lambda groups: torch.optim.Adam(groups, lr=0.1, amsgrad=True, foreach=False),
    "fused AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "SGD with momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1, momentum=0.5, centered=True),
    "Adamax": lambda groups: torch.optim.Adamax(groups, lr=0.1),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 8, bias=False)
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0, 3.0]))
        self.register_buffer("count", torch.tensor(3))


class Job:
    """A model in one layout with an optimizer of two parameter groups, after some steps."""

    def __init__(self, layout: Layout, optimizer: str, seed: int, num_steps: int) -> None:
        torch.manual_seed(seed)
        self.model, self.mesh, self.placements = Net(), make_mesh(layout[0]), layout[1]
        for name, parameter in list(self.model.named_parameters()):
            owner = self.model.get_submodule(name.rpartition(".")[0])
            setattr(owner, name.rpartition(".")[2], nn.Parameter(self.place(parameter.detach())))
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        self.optimizer = OPTIMIZERS[optimizer](
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.2, "lr": 0.3}]
        )
        self.step(num_steps)

    def place(self, whole: torch.Tensor) -> DTensor:
        return distribute_tensor(whole.clone(), self.mesh, self.placements, src_data_rank=None)

    def step(self, num_steps: int) -> None:
        for number in range(num_steps):
            for parameter in self.model.parameters():
                whole = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
                parameter.grad = self.place(torch.sin(whole + number))
            self.optimizer.step()

    def state(self) -> Any:
        return described([get_model_state_dict(self.model), get_optimizer_state_dict(self.model, self.optimizer)])


def described(value: Any) -> Any:
    """What can be compared between layouts: DTensors by their whole value."""
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [described(item) for item in value]
    if isinstance(value, DTensor):
        assert type(value) is DTensor
        return "DTensor", tuple(value.shape), value.dtype, str(value.device), value.full_tensor()
    if isinstance(value, torch.Tensor):
        return type(value).__name__, tuple(value.shape), value.dtype, str(value.device), value
    return value


def assert_same(found: Any, expected: Any, optimizer: str) -> None:
    """The fused kernel rounds the last elements of a local tensor, behind the last full vector, in another order."""
    if isinstance(expected, torch.Tensor):
        loose = {"rtol": 1e-6, "atol": 1e-6} if "fused" in optimizer else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(found, expected, **loose)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value, optimizer)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            assert_same(one, other, optimizer)
    else:
        assert found == expected


def outcome(action: Callable[[], Any]) -> Any:
    try:
        return described(action())
    except (AssertionError, KeyError, ValueError, RuntimeError) as error:
        return f"raises {type(error).__name__}"


def gets(job: Job, options: StateDictOptions) -> list[Callable[[], Any]]:
    return [
        lambda: get_model_state_dict(job.model, options=options),
        lambda: get_optimizer_state_dict(job.model, job.optimizer, options=options),
        lambda: get_state_dict(job.model, job.optimizer, options=options),
        lambda: get_model_state_dict(job.model, submodules={job.model.first}, options=options),
    ]


def same_gets(layout: str, optimizer: str, full: bool, offload: bool, flatten: bool) -> None:
    arguments = optimizer, full, offload, flatten
    assert_same(results_of_gets(LAYOUTS[layout], *arguments), results_of_gets(STOCK, *arguments), optimizer)


@functools.cache  # stock's are the same for every layout
def results_of_gets(where: Layout, optimizer: str, full: bool, offload: bool, flatten: bool) -> list[Any]:
    """What each function gives; the last is the state afterwards, which asking does not change."""
    options = StateDictOptions(full_state_dict=full, cpu_offload=offload, flatten_optimizer_state_dict=flatten)
    job = Job(where, optimizer, 1, 2)
    return [*(outcome(get) for get in gets(job, options)), job.state()]


def set_all(job: Job, model_state: Any, optimizer_state: Any, options: StateDictOptions, together: bool) -> None:
    if together:
        set_state_dict(
            job.model, job.optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options
        )
        return
    set_model_state_dict(job.model, model_state, options=options)
    set_optimizer_state_dict(job.model, job.optimizer, optimizer_state, options=options)


def same_sets(layout: str, optimizer: str, full: bool, broadcast: bool, offload: bool, flatten: bool) -> None:
    """What was got is set in a job with other values, and training goes on there."""
    arguments = optimizer, full, broadcast, offload, flatten
    assert_same(results_of_sets(LAYOUTS[layout], *arguments), results_of_sets(STOCK, *arguments), optimizer)


@functools.cache
def results_of_sets(
    where: Layout, optimizer: str, full: bool, broadcast: bool, offload: bool, flatten: bool
) -> list[Any]:
    taken = StateDictOptions(full_state_dict=full, flatten_optimizer_state_dict=flatten)
    given = StateDictOptions(
        full_state_dict=full,
        broadcast_from_rank0=broadcast,
        cpu_offload=offload,
        flatten_optimizer_state_dict=flatten,
    )
    results = []
    source = Job(where, optimizer, 1, 2)
    for num_steps in (0, 1):  # without state, and with other state
        job = Job(where, optimizer, 2, num_steps)
        model_state, optimizer_state = get_state_dict(source.model, source.optimizer, options=taken)
        if broadcast and dist.get_rank():  # the setters write to what they are given
            model_state, optimizer_state = {}, {}
        together = not broadcast  # empty dicts on the other ranks make stock's own function hang
        answer = outcome(functools.partial(set_all, job, model_state, optimizer_state, given, together))
        after = job.state()
        for parameter, other in zip(job.model.parameters(), source.model.parameters()):
            assert isinstance(parameter, DTensor) and parameter.placements == other.placements
        job.step(1)
        results.append((answer, after, job.state()))
    return results


# Every option goes with every layout and one optimizer, every optimizer with one layout and few options.
OF_OPTIMIZERS = list(zip(itertools.cycle(LAYOUTS), OPTIMIZERS))


def all_gets() -> int:
    options = list(itertools.product((False, True), repeat=3))
    cases = [(layout, "AdamW", *chosen) for layout in LAYOUTS for chosen in options]
    cases += [(layout, name, True, False, False) for layout, name in OF_OPTIMIZERS]
    return run_cases(same_gets, daily_sample(cases))


def all_sets() -> int:
    options = [
        (full, broadcast, offload, flatten)
        for full, broadcast, offload, flatten in itertools.product((False, True), repeat=4)
        if (full or not broadcast) and not (full and flatten)  # stock refuses both before it comes to the placements
    ]
    cases = [(layout, "AdamW", *chosen) for layout in LAYOUTS for chosen in options]
    for layout, name in OF_OPTIMIZERS:
        cases += [(layout, name, False, False, False, True), (layout, name, True, True, False, False)]
    return run_cases(same_sets, daily_sample(cases))


def test_getting(ranks: RankPools) -> None:
    assert set(ranks.run(all_gets)) == {len(LAYOUTS) * 8 + len(OPTIMIZERS) if NIGHTLY else 8}


def test_setting(ranks: RankPools) -> None:
    assert set(ranks.run(all_sets)) == {len(LAYOUTS) * 8 + len(OPTIMIZERS) * 2 if NIGHTLY else 12}


def test_a_later_shard_makes_the_ragged_cut_strided() -> None:
    from vescale.placements import normalize_placements

    assert isinstance(normalize_placements(LAYOUTS["strided"][1], (5, 6), (2, 2))[0], StridedRaggedShard)
