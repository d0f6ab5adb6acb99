"""``get_*_state_dict`` and ``set_*_state_dict`` of models and optimizers whose tensors have our placements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tests.device import device_type
from tests.ranks import RankPools, error_of
from vescale.compat import local_of, make_dtensor, spec_of
from vescale.placements import InterleavedShard, RaggedShard, StridedRaggedShard, distribute_tensor

FULL = StateDictOptions(full_state_dict=True)
OFFLOADED = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

VALUES = {
    "weight": torch.arange(12 * 8.0).reshape(12, 8),
    "inner.bias": torch.arange(8.0) + 200,
    "inner.packed": torch.arange(6 * 5.0).reshape(6, 5) + 300,
    "inner.scale": torch.tensor(41.0),
    "stock": torch.arange(4 * 3.0).reshape(4, 3) + 400,
    "counter": torch.tensor([7.0, 8.0]),
}

Layout = dict[str, tuple[Placement, ...]]
LAYOUTS: dict[str, tuple[tuple[int, ...], Layout]] = {
    "flat": (
        (4,),
        {
            "weight": (RaggedShard((0, 1), (13, 47, 0, 36)),),
            "inner.bias": (RaggedShard((0,), (0, 0, 8, 0)),),
            "inner.packed": (InterleavedShard(0, 2),),
            "inner.scale": (RaggedShard((), (0, 1, 0, 0)),),
            "stock": (Shard(0),),
        },
    ),
    "grid": (
        (2, 2),
        {
            "weight": (StridedRaggedShard((0,), (1, 5), split_factor=2), Shard(0)),
            "inner.bias": (Replicate(), RaggedShard((0,), (3, 5))),
            "inner.packed": (InterleavedShard(1, 2), RaggedShard()),
            "inner.scale": (Replicate(), RaggedShard((), (0, 1))),
            "stock": (Shard(1), Replicate()),
        },
    ),
}


class Inner(nn.Module):
    bias: nn.Parameter
    packed: nn.Parameter
    scale: nn.Parameter


class Net(nn.Module):
    weight: nn.Parameter
    stock: nn.Parameter
    counter: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()


def place(tensor: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    return distribute_tensor(tensor.detach().clone(), mesh, placements, src_data_rank=None)


def make_model(layout: str, change: float = 0.0) -> Net:
    """The model in one of the layouts, every value moved by ``change``."""
    mesh_shape, placements = LAYOUTS[layout]
    mesh = init_device_mesh(device_type(), mesh_shape)
    model = Net()
    for name, value in VALUES.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        leaf = name.rpartition(".")[2]
        if name in placements:
            owner.register_parameter(leaf, nn.Parameter(place(value + change, mesh, placements[name])))
        else:
            owner.register_buffer(leaf, (value + change).to(device_type()))
    return model


def assert_model_holds(model: Net, change: float = 0.0, *, skip: frozenset[str] = frozenset()) -> None:
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, value in VALUES.items():
        if name not in skip:
            assert_holds(state[name], value + change, name)


def assert_holds(found: Any, expected: torch.Tensor, name: str) -> None:
    if isinstance(found, DTensor):
        expected = local_of(place(expected, found.device_mesh, found.placements))
        found = local_of(found)
    assert torch.equal(found, expected.to(device_type())), (name, dist.get_rank(), found, expected)


def full_values(change: float = 0.0) -> dict[str, torch.Tensor]:
    return {name: (value + change).to(device_type()) for name, value in VALUES.items()}


# ---------------------------------------------------------------- models


def model_state_dicts(layout: str) -> None:
    model = make_model(layout)
    sharded = get_model_state_dict(model)
    assert sharded.keys() == VALUES.keys()
    for name, param in model.named_parameters():
        assert isinstance(sharded[name], DTensor) and local_of(sharded[name]).data_ptr() == local_of(param).data_ptr()
    full = get_model_state_dict(model, options=FULL)
    for name, value in full_values().items():
        assert type(full[name]) is torch.Tensor and torch.equal(full[name], value), name
    offloaded = get_model_state_dict(model, options=OFFLOADED)
    assert offloaded.keys() == (VALUES.keys() if dist.get_rank() == 0 else set())
    for name, value in offloaded.items():
        assert torch.equal(value, VALUES[name])

    addresses = {name: local_of(p).data_ptr() for name, p in model.named_parameters()}
    set_model_state_dict(model, full_values(1), options=FULL)
    assert_model_holds(model, 1)
    set_model_state_dict(model, full_values(2) if dist.get_rank() == 0 else {}, options=BROADCAST)
    assert_model_holds(model, 2)
    some = {name: value for name, value in full_values(3).items() if name != "weight"}
    with pytest.raises(RuntimeError, match=r"Missing key.*weight"):
        set_model_state_dict(model, dict(some) if dist.get_rank() == 0 else {}, options=BROADCAST)
    loose = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False, cpu_offload=True)
    set_model_state_dict(model, some if dist.get_rank() == 0 else {}, options=loose)
    assert_model_holds(model, 3, skip=frozenset({"weight"}))
    set_model_state_dict(model, get_model_state_dict(make_model(layout, 4)))
    assert_model_holds(model, 4)
    assert addresses == {name: local_of(p).data_ptr() for name, p in model.named_parameters()}, "not set in place"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_model_state_dicts(ranks: RankPools, layout: str) -> None:
    ranks.run(model_state_dicts, layout)


def meta_model(options: StateDictOptions) -> None:
    model = make_model("flat")
    for name, param in list(model.named_parameters()):
        meta = make_dtensor(local_of(param).to("meta"), spec_of(param))
        owner = model.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], nn.Parameter(meta))
    full = full_values(5) if dist.get_rank() == 0 or not options.broadcast_from_rank0 else {}
    set_model_state_dict(model, full, options=options)
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor) and param.placements == LAYOUTS["flat"][1][name], name
        assert param.device.type == device_type() and param.requires_grad
    assert_model_holds(model, 5)


def test_model_on_meta_device_is_filled_from_full_values(ranks: RankPools) -> None:
    ranks.run(meta_model, BROADCAST)
    ranks.run(meta_model, FULL)


def wrong_full_shape(options: StateDictOptions) -> None:
    model = make_model("flat")
    full = full_values() | {"weight": torch.zeros(8, 12)}
    set_model_state_dict(
        model, full if dist.get_rank() == 0 or not options.broadcast_from_rank0 else {}, options=options
    )


@pytest.mark.parametrize("options", [FULL, BROADCAST], ids=["full", "broadcast"])
def test_full_values_of_another_shape_are_refused_by_name(ranks: RankPools, options: StateDictOptions) -> None:
    for text in ranks.run(error_of, wrong_full_shape, options):
        for part in ("weight: ", "(8, 12)", "(12, 8)", "RaggedShard", "pass the full tensor"):
            assert part in text


# ---------------------------------------------------------------- optimizers


def adamw(model: Net, change: float) -> torch.optim.AdamW:
    """AdamW with a state of known values in the layout of its parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        optimizer.state[param] = {
            "step": torch.tensor(3.0 + change),
            "exp_avg": place(VALUES[name] * 10 + change, param.device_mesh, param.placements),
            "exp_avg_sq": place(VALUES[name] * 100 + change, param.device_mesh, param.placements),
        }
    return optimizer


def assert_adamw_holds(optimizer: torch.optim.Optimizer, model: Net, change: float) -> None:
    for name, param in model.named_parameters():
        state = optimizer.state[param]
        assert float(state["step"]) == 3.0 + change
        for key, factor in (("exp_avg", 10), ("exp_avg_sq", 100)):
            assert isinstance(state[key], DTensor) and state[key].placements == param.placements, (name, key)
            assert_holds(state[key], VALUES[name] * factor + change, f"{name}.{key}")


def optimizer_state_dicts(layout: str) -> None:
    model = make_model(layout)
    sharded = get_optimizer_state_dict(model, adamw(model, 0))
    assert sharded["state"]["weight"]["exp_avg"].placements == LAYOUTS[layout][1]["weight"]
    full = get_optimizer_state_dict(model, adamw(model, 1), options=FULL)
    for name in LAYOUTS[layout][1]:
        assert torch.equal(full["state"][name]["exp_avg"], full_values()[name] * 10 + 1), name
        assert float(full["state"][name]["step"]) == 4.0
    offloaded = get_optimizer_state_dict(model, adamw(model, 1), options=OFFLOADED)
    assert bool(offloaded) == (dist.get_rank() == 0)

    optimizer = adamw(model, -1)
    set_optimizer_state_dict(model, optimizer, full, options=FULL)
    assert_adamw_holds(optimizer, model, 1)
    two = get_optimizer_state_dict(model, adamw(model, 2), options=FULL)
    optimizer = adamw(model, -1)
    set_optimizer_state_dict(model, optimizer, two if dist.get_rank() == 0 else {}, options=BROADCAST)
    assert_adamw_holds(optimizer, model, 2)
    optimizer = adamw(model, -1)
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, adamw(model, 3)))
    assert_adamw_holds(optimizer, model, 3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_optimizer_state_dicts(ranks: RankPools, layout: str) -> None:
    ranks.run(optimizer_state_dicts, layout)


# ---------------------------------------------------------------- through a checkpoint


def save_training(folder: Path, layout: str, options: StateDictOptions) -> None:
    model = make_model(layout, 6)
    model_state, optimizer_state = get_state_dict(model, adamw(model, 6), options=options)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=str(folder))


def load_training(folder: Path, layout: str, options: StateDictOptions) -> None:
    model = make_model(layout, -1)
    optimizer = adamw(model, -1)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    dcp.load({"model": model_state, "optim": optimizer_state}, checkpoint_id=str(folder))
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)
    assert_model_holds(model, 6)
    assert_adamw_holds(optimizer, model, 6)


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize(("before", "after"), [("flat", "grid"), ("grid", "flat")])
def test_training_state_moves_between_layouts(
    ranks: RankPools, tmp_path: Path, before: str, after: str, flatten: bool
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    ranks.run(save_training, tmp_path, before, options)
    ranks.run(load_training, tmp_path, after, options)


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
}


def train(model: Net, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for name, param in model.named_parameters():
            grad = torch.sin(VALUES[name] + step)
            if isinstance(param, DTensor):
                grad = place(grad, param.device_mesh, param.placements)
            param.grad = grad
        optimizer.step()


def train_and_save(folder: Path, layout: str) -> None:
    for kind, make in OPTIMIZERS.items():
        model = make_model(layout)
        optimizer = make(model.parameters())
        train(model, optimizer, range(2))
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=str(folder / kind))


def resume(folder: Path, layout: str) -> None:
    for kind, make in OPTIMIZERS.items():
        model = make_model(layout, -1)
        optimizer = make(model.parameters())  # without state: the state dict functions make it
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optim": optimizer_state}, checkpoint_id=str(folder / kind))
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        train(model, optimizer, range(2, 4))

        alone = Net()
        for name, value in VALUES.items():
            if name != "counter":
                owner = alone.get_submodule(name.rpartition(".")[0])
                owner.register_parameter(name.rpartition(".")[2], nn.Parameter(value.clone()))
        train(alone, make(alone.parameters()), range(4))
        for name, param in alone.named_parameters():
            assert_holds(model.get_parameter(name), param.detach(), f"{kind} {name}")


def test_training_resumes_in_another_layout_as_on_one_device(ranks: RankPools, tmp_path: Path) -> None:
    ranks.run(train_and_save, tmp_path, "flat")
    ranks.run(resume, tmp_path, "grid")
