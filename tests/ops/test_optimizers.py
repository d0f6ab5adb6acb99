"""Stock optimizers on ragged and interleaved parameters, mixed with stock placements, equal one device."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.ops.layouts import Layout, assert_same, data, layouts, mesh_of, place, ragged_layouts, replicated
from tests.ranks import RankPools, run_cases
from vescale import compat
from vescale.ops import strict_placements
from vescale.placements import RaggedShard, distribute_tensor

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "Adam amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "Rprop": (torch.optim.Rprop, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
}
FUSED = ("AdamW", "Adam amsgrad", "SGD", "SGD nesterov", "Adagrad")
# Stock DTensor has no rule for these on plain Shard parameters, or is wrong there.
RAGGED_ONLY = ("Rprop", "Adafactor")


def parameters_on(name: str, world: int, num_axes: int) -> list[Layout]:
    if name in RAGGED_ONLY:
        return [layout for layout in ragged_layouts(world) if len(layout[0]) == num_axes and not layout[1][1:]][:3]
    found = [layout for layout in layouts(world) if len(layout[0]) == num_axes][::2]
    mesh = (world,) if num_axes == 1 else (2, 2)
    stock: list[Layout] = [(mesh, (Shard(0),) * num_axes), (mesh, (Replicate(),) * num_axes)]
    return [*found, *stock]


def check_optimizer(name: str, form: str, gradients: str, where: Sequence[Layout], steps: int = 3) -> None:
    """Several steps with clipping; gradients lie as their parameters, or replicated, as some backwards leave them."""
    kind, options = OPTIMIZERS[name]
    options = {**options, "foreach": form == "foreach", **({"fused": True} if form == "fused" else {})}
    if form == "fused":
        del options["foreach"]
    ours = [torch.nn.Parameter(place(data(seed), layout)) for seed, layout in enumerate(where)]
    theirs = [torch.nn.Parameter(data(seed)) for seed in range(len(where))]
    optimizer, reference = kind(ours, **options), kind(theirs, **options)
    for step in range(steps):
        for seed, (one, other, layout) in enumerate(zip(ours, theirs, where)):
            grad = data(100 + 7 * step + seed)
            other.grad = grad.clone()  # a replicated DTensor would share its memory
            one.grad = place(grad, layout, layout[1] if gradients == "as parameters" else replicated(layout))
        torch.nn.utils.clip_grad_norm_(ours, 1.0)
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Adafactor's row means
            optimizer.step()
        reference.step()
    for one, other, layout in zip(ours, theirs, where):
        assert_same(one.detach(), other.detach())
        assert isinstance(one.data, DTensor) and one.placements == place(data(), layout).placements
        for key, state in optimizer.state[one].items():
            expected = reference.state[other][key]
            if isinstance(state, DTensor):
                assert_same(state, expected)
                if gradients == "as parameters" and name not in RAGGED_ONLY:
                    assert state.placements == one.placements, f"state {key} lies as its parameter"


def cases(world: int, names: Sequence[str], num_axes: int) -> list[tuple[Any, ...]]:
    found = []
    for name, form in itertools.product(names, ("for-loop", "foreach", "fused")):
        if form == "fused" and name not in FUSED:
            continue
        where = parameters_on(name, world, num_axes)
        if where:
            found.append((name, form, "as parameters", where))
            if num_axes == 1 and name in ("AdamW", "SGD nesterov", "Adagrad"):
                found.append((name, form, "replicated", where))
    return found


def on_rank_optimizers(world: int, names: Sequence[str], num_axes: int) -> int:
    return run_cases(check_optimizer, cases(world, names, num_axes))


@pytest.mark.parametrize("world", [1, 4])
def test_optimizers_on_one_axis(ranks: RankPools, world: int) -> None:
    names = list(OPTIMIZERS) if world == 4 else ["AdamW", "SGD nesterov", "Adagrad", "Adafactor"]
    ranks.run(on_rank_optimizers, world, names, 1, world_size=world)


def test_optimizers_on_two_axes(ranks: RankPools) -> None:
    names = ["AdamW", "Adam amsgrad", "SGD nesterov", "Adagrad", "RMSprop", "NAdam"]
    ranks.run(on_rank_optimizers, 4, names, 2, world_size=4)


def on_rank_scalars(world: int) -> None:
    """Parameters without dims: one rank owns the element."""
    mesh = mesh_of((world,))
    for name, (kind, options) in OPTIMIZERS.items():
        if name == "Rprop":  # assigns a number at a mask, which no DTensor without dims can
            continue
        for owner in range(world):
            units = tuple(int(rank == owner) for rank in range(world))
            ours = torch.nn.Parameter(distribute_tensor(torch.tensor(0.5), mesh, [RaggedShard((0,), units)]))
            theirs = torch.nn.Parameter(torch.tensor(0.5))
            optimizer, reference = kind([ours], **options), kind([theirs], **options)
            for grad in (0.3, -0.2, -0.4):
                theirs.grad = torch.tensor(grad)
                ours.grad = distribute_tensor(torch.tensor(grad), mesh, ours.placements)
                optimizer.step()
                reference.step()
            assert_same(ours.detach(), theirs.detach())


def test_optimizers_on_scalars(ranks: RankPools) -> None:
    ranks.run(on_rank_scalars, 2, world_size=2)


def on_rank_training(world: int) -> None:
    """A small model trained for a few steps: backward, accumulation over two batches, clipping, AdamW."""
    where = [layout for layout in ragged_layouts(world) if len(layout[0]) == 1]
    model = [torch.nn.Parameter(place(data(seed), layout)) for seed, layout in enumerate(where)]
    reference = [torch.nn.Parameter(data(seed)) for seed in range(len(where))]
    optimizers = torch.optim.AdamW(model, lr=0.05), torch.optim.AdamW(reference, lr=0.05)
    inputs = [data(50 + batch, (5, 8)) for batch in range(2)]
    mesh = mesh_of((world,))
    for _ in range(3):
        for parameters, optimizer in zip((model, reference), optimizers):
            optimizer.zero_grad(set_to_none=False)
            for batch in inputs:
                x: Any = place(batch, ((world,), ()), [Replicate()]) if parameters is model else batch
                for weight in parameters:  # at rest ragged, replicated while it computes, as in ZeRO-3
                    used = weight.redistribute(mesh, [Replicate()]) if isinstance(weight, DTensor) else weight
                    x = x + torch.nn.functional.gelu(x @ used) @ used.t()
                x.square().mean().backward()
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
        for one, other in zip(model, reference):
            assert one.grad is not None and one.grad.placements == one.placements
            assert_same(one.grad, other.grad)
            assert_same(one.detach(), other.detach())


def test_training(ranks: RankPools) -> None:
    ranks.run(on_rank_training, 3, world_size=3)


def on_rank_state_dict() -> None:
    """An optimizer's state_dict holds DTensors that lie as the parameters, and loads again."""
    layout = ragged_layouts(4)[0]
    parameter = torch.nn.Parameter(place(data(), layout))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = place(data(1), layout)
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["state"][0]["exp_avg"].placements == parameter.placements
    twin = torch.nn.Parameter(parameter.detach().clone())
    other = torch.optim.AdamW([twin])
    other.load_state_dict(saved)
    twin.grad = parameter.grad.clone()
    optimizer.step()
    other.step()
    assert_same(twin.detach(), parameter.full_tensor().detach())


def test_state_dict(ranks: RankPools) -> None:
    ranks.run(on_rank_state_dict, world_size=4)


def on_rank_scalar_parameter() -> None:
    """A parameter without dims, owned by one rank."""
    layout = ((3,), (RaggedShard((), (0, 1, 0)),))
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        one, other = torch.nn.Parameter(place(torch.tensor(1.5), layout)), torch.nn.Parameter(torch.tensor(1.5))
        optimizers = torch.optim.AdamW([one], **options), torch.optim.AdamW([other], **options)
        for gradient in (0.5, -0.25):
            one.grad, other.grad = place(torch.tensor(gradient), layout), torch.tensor(gradient)
            with strict_placements():
                for optimizer in optimizers:
                    optimizer.step()
        assert_same(one.detach(), other.detach())


def test_parameter_without_dims(ranks: RankPools) -> None:
    ranks.run(on_rank_scalar_parameter, world_size=3)


def on_rank_grad_scaler_step() -> None:
    """Mixed precision: unscaling finds an infinity that one rank holds, on all ranks."""
    layout = ragged_layouts(3)[0]
    for value, infinite in ((2.0, 0.0), (float("inf"), 1.0)):
        grad = data()
        grad[-1, -1] = value
        scaled = place(grad * 8, layout)
        found = torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_([scaled], found, torch.tensor(0.125))
        assert found.item() == infinite
        if not infinite:
            assert_same(scaled, grad)


def test_unscaling(ranks: RankPools) -> None:
    ranks.run(on_rank_grad_scaler_step, world_size=3)


def test_torchscript_compiles_the_functions_of_optimizers() -> None:
    """As torch.distributed.optim does when it is imported, which may be after ``parallelize``: what TorchScript compiles
    without vescale. It does not compile AdamW's since torch 2.14."""

    def compiled() -> list[str]:
        found = []
        for name in ("adadelta", "adagrad", "adam", "adamax", "adamw", "nadam", "radam", "rmsprop", "rprop", "sgd"):
            with contextlib.suppress(RuntimeError, torch.jit.frontend.NotSupportedError):
                torch.jit.script(getattr(importlib.import_module(f"torch.optim.{name}"), name))
                found.append(name)
        return found

    compat.uninstall()
    expected = compiled()
    compat.install()
    assert expected and compiled() == expected
