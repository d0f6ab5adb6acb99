"""Optimizers and the models whose parameters they have: adopted by ``fully_shard`` and ``parallelize``, names in messages,
state dicts of whole tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor, Replicate

from tests.device import device_type
from tests.optim.meshes import assert_equal, on_mesh
from tests.ranks import RankPools, run_cases
from vescale import parallelize
from vescale.fsdp import fully_shard
from vescale.optim import EMA, SOAP, AdamW8bit, Muon, Shampoo, adamw8bit_layout, report
from vescale.placements import RaggedShard
from vescale.plans import INIT, RUN, Plan

BLOCK = 8
KINDS: list[tuple[Any, dict[str, Any]]] = [
    (AdamW8bit, {"block_size": BLOCK, "min_numel": 32}),
    (Muon, {}),
    (Shampoo, {"precondition_frequency": 2, "max_preconditioner_dim": 10}),
    (SOAP, {"precondition_frequency": 3}),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(12, 16, bias=False)) for _ in range(2))
        self.head = nn.Linear(16, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(x) + self.second(x))


def model_of() -> Net:
    torch.manual_seed(0)
    return Net()


def cut(model: Net, way: str, **options: Any) -> None:
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),), mesh_dim_names=("dp",))
    if way == "plan":
        plan = Plan(mesh)
        plan.shard(".*", RaggedShard(block=BLOCK), mesh="dp", phase=INIT)
        plan.shard(".*", Replicate(), mesh="dp", phase=RUN)
        parallelize(model, plan, **options)
        return
    for module in (model.first, model.second, model):  # the optimizer is adopted three times
        fully_shard(module, mesh=mesh, orig_param_policy=adamw8bit_layout(BLOCK, min_numel=32), **options)


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    for index, p in enumerate(model.parameters()):
        whole = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * number + index))
        p.grad = on_mesh(whole, p.device_mesh, p.placements) if isinstance(p, DTensor) else whole
    optimizer.step()


def adopted(kind: Any, options: dict[str, Any], way: str, num_before: int) -> None:
    model, alone = model_of(), model_of()
    optimizer, reference = (kind(m.parameters(), lr=0.1, **options) for m in (model, alone))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    theirs = torch.optim.lr_scheduler.StepLR(reference, 1, gamma=0.5)
    for number in range(7):
        if number == num_before:
            cut(model, way, optimizer=optimizer)
            assert set(optimizer.state) == set(model.parameters())
        step(model, optimizer, number)
        step(alone, reference, number)
        schedule.step()
        theirs.step()
    assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])
    assert_equal(optimizer, reference)
    names = [one.name for one in report(optimizer).parameters]
    assert names == ["first.0.weight", "second.0.weight", "head.weight"], names


def test_made_before_the_model_is_cut(ranks: RankPools) -> None:
    cases = [(*kind, "fully_shard", 3) for kind in KINDS] + [(*kind, "plan", 0) for kind in KINDS[:2]]
    ranks.run(run_cases, adopted, cases, world_size=2)


def refused() -> None:
    """Blocks that the model's cut splits: as when the optimizer is made afterwards, and it stays as it was."""
    mesh = init_device_mesh(device_type(), (2,))
    model = nn.Sequential(nn.Linear(9, 9, bias=False))
    optimizer = AdamW8bit(model.parameters(), block_size=16, min_numel=0)
    held, states = list(model.parameters()), dict(optimizer.state)
    with pytest.raises(ValueError, match=r"parameter 0\.weight of shape \(9, 9\).*must not be divided"):
        fully_shard(model, mesh=mesh, optimizer=optimizer)
    assert optimizer.param_groups[0]["params"][0] is held[0] and optimizer.state[held[0]] is states[held[0]]


def names_in_messages() -> None:
    model = model_of()
    cut(model, "fully_shard")
    with pytest.raises(ValueError, match=r"parameter second\.0\.weight of shape"):
        AdamW8bit([{"params": list(model.second.parameters())}], block_size=56, min_numel=0)
    optimizer = Muon(model.parameters())
    assert optimizer._known().all[2].name == "head.weight"
    for p in model.parameters():
        p.grad = torch.zeros(p.shape)  # no DTensor
    with pytest.raises(RuntimeError, match=r"parameter 'first\.0\.weight' of shape"):
        optimizer.step()
    assert [one.name for one in report(torch.optim.SGD(model.parameters())).parameters][1] == "second.0.weight"
    apart = model_of()  # the model around them is not sharded
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
    fully_shard(apart.first, mesh=mesh)
    fully_shard(apart.second, mesh=mesh)
    names = [p.name for p in Muon(apart.parameters())._known().all]
    assert names == [
        "group 0, parameter 0 (0.weight of Sequential)",
        "group 0, parameter 1 (0.weight of Sequential)",
        "group 0, parameter 2",
    ]
    given = Muon([("mine", p) for p in model.head.parameters()])
    assert [p.name for p in given._known().all] == ["mine"]


def test_names_and_errors(ranks: RankPools) -> None:
    ranks.run(names_in_messages, world_size=2)
    ranks.run(refused, world_size=2)


def whole_states(kind: Any, options: dict[str, Any]) -> None:
    """PyTorch's state dict of whole tensors goes to one device, and onto another cut; next steps are equal."""
    model, alone = model_of(), model_of()
    cut(model, "fully_shard")
    optimizer, reference = (kind(m.named_parameters(), lr=0.1, **options) for m in (model, alone))
    for number in range(4):
        step(model, optimizer, number)
        step(alone, reference, number)
    full = StateDictOptions(full_state_dict=True)
    saved = get_optimizer_state_dict(model, optimizer, options=full)  # on rank 0
    everyone: list[Any] = [saved]
    dist.broadcast_object_list(everyone)
    one, other = model_of(), model_of()
    for target, source in ((one, alone), (other, alone)):
        target.load_state_dict(source.state_dict())
    cut(other, "plan")
    for target in (one, other):
        again = kind(target.named_parameters(), lr=0.3, **options)
        set_optimizer_state_dict(target, again, copy.deepcopy(everyone[0]), options=full)
        expected = copy.deepcopy(alone)
        twin = kind(expected.named_parameters(), lr=0.1, **options)
        twin.load_state_dict(reference.state_dict())
        for number in range(4, 7):
            step(target, again, number)
            step(expected, twin, number)
        assert_equal(again, twin)


def test_states_of_whole_tensors(ranks: RankPools) -> None:
    ranks.run(run_cases, whole_states, KINDS, world_size=2)


def averages_under_stock_fsdp() -> None:
    """An evaluation leaves FSDP2's root gathered."""
    model = model_of()
    stock_fully_shard(model, mesh=init_device_mesh(device_type(), (2,)))
    ema = EMA(model, 0.5)
    before = [p.full_tensor() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    ema.update()
    for _ in range(2):
        with ema.swap(), torch.no_grad():
            model(torch.ones(1, 12))
            for p, value in zip(model.parameters(), before):
                assert not isinstance(p, DTensor)  # gathered, with the averages
                torch.testing.assert_close(p.detach(), value + 0.5)
        for p, value in zip(model.parameters(), before):
            torch.testing.assert_close(p.full_tensor(), value + 1)


def test_averages_under_stock_fsdp(ranks: RankPools) -> None:
    ranks.run(averages_under_stock_fsdp, world_size=2)
