"""Optimizers, clipping and averages that hold the parameters of before ``parallelize`` or ``fully_shard``."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import vescale
from vescale.checks import replacement_of
from vescale.fsdp import fully_shard


@pytest.fixture(autouse=True)
def group() -> Any:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def by_plan(model: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    plan = vescale.Plan(mesh)
    plan.shard("0.weight", Shard(0))
    return vescale.parallelize(model, plan, **options)


def by_unit(model: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    plan = vescale.Plan(mesh)
    plan.shard(".*", vescale.RaggedShard(), mesh="dp", phase=vescale.INIT)
    plan.shard(".*", Replicate(), mesh="dp", phase=vescale.RUN)
    return vescale.parallelize(model, plan, **options)


def by_fully_shard(model: nn.Module, **options: Any) -> nn.Module:
    fully_shard(model[0])  # type: ignore[index]
    return fully_shard(model, **options)  # type: ignore[return-value]


WAYS = [by_plan, by_unit, by_fully_shard]
Way = Callable[..., nn.Module]


class Lion(torch.optim.Optimizer):
    """An optimizer of somebody else."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"])


MADE: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.AdamW(p, lr=0.1),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
    lambda p: torch.optim.LBFGS(p, lr=0.1),
    lambda p: torch.optim.RMSprop(p, lr=0.1),
    Lion,
]


def backward(model: nn.Module, closure: Any = None) -> torch.Tensor:
    model.zero_grad()
    loss = (model(torch.arange(12.0).reshape(3, 4)) ** 2).mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("way", WAYS)
def test_the_first_step_of_an_optimizer_made_before_raises(way: Way, make: Any) -> None:
    model = build()
    optimizer = make(model.parameters())
    model = way(model)
    optimizer.zero_grad()
    backward(model)
    with pytest.raises(vescale.ReplacedParameterError, match=r"'0\.weight' of Sequential.*optimizer=optimizer"):
        optimizer.step(lambda: backward(model)) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()


@pytest.mark.parametrize("way", WAYS)
def test_deferred_parameters_are_replaced_too(way: Way) -> None:
    with vescale.deferred_init():
        model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model = way(model)
    backward(model)
    with pytest.raises(vescale.ReplacedParameterError, match=r"0\.weight"):
        optimizer.step()


@pytest.mark.parametrize("way", WAYS)
def test_other_uses_of_old_parameters(way: Way) -> None:
    model = build()
    old = list(model.parameters())
    shadows = [p.detach().clone() for p in old]
    model = way(model)
    backward(model)
    error = pytest.raises(vescale.ReplacedParameterError, match=r"0\.weight")
    with error:
        nn.utils.clip_grad_norm_(old, 1.0)
    with error:
        vescale.optim.clip_grad_norm_(old, 1.0)
    with error:
        nn.utils.clip_grad_value_(old, 1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    with error:
        scaler.unscale_(torch.optim.SGD(old, lr=0.1))
    with error, torch.no_grad():
        old[0].copy_(shadows[0])
    with error:
        old[0].data = shadows[0]
    with error, torch.no_grad():
        shadows[0].lerp_(old[0], 0.1)
    with error, torch.no_grad():
        torch._foreach_lerp_(shadows, old, 0.1)
    with error, torch.no_grad():
        torch._foreach_mul_(old, 0.5)


@pytest.mark.parametrize("way", WAYS)
def test_values_of_before_may_be_read_and_copied(way: Way) -> None:
    model = build()
    old, reference = list(model.parameters()), build()
    model = way(model)
    for before, expected, now in zip(old, reference.parameters(), model.parameters()):
        assert torch.equal(before, expected) and (before - expected).abs().max() == 0
        assert type(before.detach()) is type(before.data) is torch.Tensor
        assert torch.equal(now.full_tensor() if isinstance(now, DTensor) else now, before)
        assert "parameter" in repr(before).lower() and isinstance(before, nn.Parameter)
        copied = copy.deepcopy(before)
        assert type(copied) is nn.Parameter and copied.grad is None and torch.equal(copied, expected)
        torch.nn.utils.parameters_to_vector([before])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_values_of_before_are_not_read_after_a_step(way: Way, fused: bool) -> None:
    """On one device they would have moved: averages by hand, norms that are logged, distances from the start."""
    model = build()
    old = list(model.parameters())
    shadows = [p.data.clone() for p in old]
    model = way(model)
    shadows[0].mul_(0.9).add_(old[0].data, alpha=0.1)  # nothing has moved yet
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    backward(model)
    optimizer.step()
    error = pytest.raises(vescale.ReplacedParameterError, match=r"reads after the model has been trained.*0\.weight")
    for read in (
        lambda p: p.data,
        lambda p: p.detach(),
        lambda p: p.norm(),
        lambda p: shadows[0].add_(p),
        lambda p: p.tolist(),
    ):
        with error, torch.no_grad():
            read(old[0])
    optimizer.zero_grad()
    assert old[0].shape == shadows[0].shape and "Parameter" in repr(old[0])
    assert torch.zeros_like(old[0]).sum() == old[0].new_zeros(3).sum() == 0
    assert old[0].requires_grad_() is old[0] and isinstance(copy.deepcopy(old[0]), nn.Parameter)


@pytest.mark.parametrize("way", [by_plan, by_unit])
def test_values_of_before_are_not_read_after_a_load(way: Way) -> None:
    model, state = build(), {name: torch.ones_like(p) for name, p in build().named_parameters()}
    old = model[0].weight  # type: ignore[index]
    way(model).load_state_dict(state)
    with pytest.raises(vescale.ReplacedParameterError, match=r"0\.weight"):
        old.detach()


def test_a_model_without_values_gets_them_while_old_parameters_are_held() -> None:
    with torch.device("meta"):
        model = build()
    old = list(model.parameters())
    with pytest.warns(UserWarning):
        by_plan(model)
    model.to_empty(device="cpu")
    assert all(p.is_meta for p in old) and not any(p.is_meta for p in model.parameters())
    assert old[0].detach().is_meta


def test_a_parameter_that_another_module_has_is_in_use() -> None:
    model, other = build(), nn.Linear(4, 8)
    other.weight = model[0].weight  # type: ignore[index]
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    by_plan(model)
    optimizer.step()  # before there are gradients
    other(torch.ones(4)).sum().backward()
    before = other.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(other.weight, before) and type(other.weight) is nn.Parameter


def test_a_parameter_with_gradients_of_its_own_is_in_use() -> None:
    model = build()
    parameters = dict(model.named_parameters())
    twin = build()
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    by_plan(model)
    torch.func.functional_call(twin, parameters, torch.ones(4)).sum().backward()
    optimizer.step()


def test_frozen_parameters_have_no_gradient_to_miss() -> None:
    model = build()
    model[0].requires_grad_(False)  # type: ignore[index]
    frozen = list(model[0].parameters())  # type: ignore[index]
    optimizer = torch.optim.SGD(frozen, lr=0.1)
    by_plan(model)
    optimizer.step()


@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_nobody_holds_are_not_kept(way: Way) -> None:
    import weakref

    model = build()
    held = [weakref.ref(p) for p in model.parameters()]
    model = way(model)
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
    assert all(replacement_of(p) is None for p in model.parameters())


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_is_adopted_with_its_scheduler(way: Way, make: Any) -> None:
    """Three steps with a schedule end where one device ends."""
    reference, model = build(), build()
    ends = []
    for one, adopted in ((reference, False), (model, True)):
        optimizer = make(one.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        groups = optimizer.param_groups
        if adopted:
            one = way(one, optimizer=optimizer)
            assert optimizer.param_groups is groups
            assert [id(p) for g in groups for p in g["params"]] == [id(p) for p in one.parameters()]
        for _ in range(3):
            backward(one)
            optimizer.step((lambda one=one: backward(one)) if isinstance(optimizer, torch.optim.LBFGS) else None)
            scheduler.step()
        assert groups[0]["lr"] == pytest.approx(0.1 / 8) if "lr" in groups[0] else True
        ends.append([p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in one.parameters()])
    for expected, found in zip(*ends):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("way", WAYS)
def test_a_state_is_cut_with_its_parameter(way: Way) -> None:
    reference, model = build(), build()
    ends = []
    for one, adopted in ((reference, False), (model, True)):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.1)
        backward(one)
        optimizer.step()
        if adopted:
            one = way(one, optimizer=[optimizer])
            for p in one.parameters():
                state: Any = optimizer.state[p]["exp_avg"]
                assert isinstance(state, DTensor) and state.placements == p.placements  # type: ignore[attr-defined]
        backward(one)
        optimizer.step()
        assert len(optimizer.state) == 4
        ends.append([p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in one.parameters()])
    for expected, found in zip(*ends):
        torch.testing.assert_close(found, expected)


def test_what_cannot_be_adopted() -> None:
    model = build()
    with pytest.raises(ValueError, match="holds none of the model's parameters"):
        by_plan(model, optimizer=torch.optim.SGD(build().parameters(), lr=0.1))
    with pytest.raises(TypeError, match="expected an optimizer with param_groups"):
        by_plan(build(), optimizer=[torch.optim.lr_scheduler.StepLR(torch.optim.SGD(build().parameters()), 1)])
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].weight]["factor"] = torch.ones(3)  # type: ignore[index]
    held = list(model.parameters())
    with pytest.raises(ValueError, match=r"'factor' of '0\.weight' has shape \(3,\).*load_state_dict"):
        by_plan(model, optimizer=optimizer)
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], held))
