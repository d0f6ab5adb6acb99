"""Every optimizer under every engine, in runs in which everything of a training happens: bits of one device.

A run is drawn from a seed: which gradients are missing, on all ranks or for one part of a parameter, gradients in two
portions, clipping that bites, a nan, a group that is added, a parameter that is no longer frozen, schedules and tensors as
learning rates, a closure; after some steps a checkpoint, and the rest under another engine.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.device import device_type
from tests.optim.meshes import on_mesh
from tests.ranks import RankPools
from tests.whole import whole_tensors
from vescale import parallelize
from vescale.fsdp import fully_shard
from vescale.optim import SOAP, AdamW8bit, Muon, Shampoo, adamw8bit_layout, clip_grad_norm_
from vescale.placements import RaggedShard, local_region
from vescale.plans import INIT, RUN, Plan

BLOCK = 16
NUM_STEPS, SAVED_AFTER = 10, 6
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw8bit": (AdamW8bit, {"lr": 0.01, "block_size": BLOCK, "min_numel": 64}),
    "muon": (Muon, {"lr": 0.02, "bucket_bytes": 900}),
    "shampoo": (Shampoo, {"lr": 0.02, "precondition_frequency": 2, "max_preconditioner_dim": 20, "weight_decay": 0.1}),
    "soap": (SOAP, {"lr": 0.02, "precondition_frequency": 3}),
}
ENGINES = ("fsdp", "hsdp", "tp", "stock", "plan", "experts")


class Net(nn.Module):
    """Matrices, a tied one, a head of one row, one with fewer rows than ranks, experts, vectors, a scalar, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16, bias=False)
        self.out = nn.Linear(16, 32, bias=False)
        self.out.weight = self.embed.weight
        self.score = nn.Linear(16, 1)
        self.short = nn.Parameter(torch.randn(2, 48))
        self.experts = nn.Parameter(torch.randn(4, 8, 6))
        self.frozen = nn.Parameter(torch.randn(16, 16), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.late = nn.Linear(16, 16)


def model_of() -> Net:
    torch.manual_seed(0)
    return Net()


def sharded(engine: str) -> Net:
    model = model_of()
    policy = adamw8bit_layout(BLOCK, min_numel=64)
    if engine == "hsdp":
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard"))
        for module in (model.up, model.down, model):
            fully_shard(module, mesh=mesh, orig_param_policy=policy)
    elif engine == "tp":
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("fsdp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for module in (model.up, model.down, model):
            fully_shard(module, mesh=mesh["fsdp"], orig_param_policy=policy)
    elif engine == "stock":  # chunks of whole blocks
        stock_fully_shard(model, mesh=init_device_mesh(device_type(), (4,)), ignored_params={model.scale})
    elif engine == "plan":
        plan = Plan(init_device_mesh(device_type(), (4,), mesh_dim_names=("dp",)))
        plan.shard(".*", RaggedShard(block=BLOCK), mesh="dp", phase=INIT)
        plan.shard(".*", Replicate(), mesh="dp", phase=RUN)
        parallelize(model, plan)
    elif engine == "experts":  # over an axis of their own; and an axis that has whole rows
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("fsdp", "ep"))
        for module in model.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                rows = (
                    RaggedShard(block=BLOCK * p.shape[-1]) if p.ndim > 1 else RaggedShard() if p.ndim else Replicate()
                )
                cut = [RaggedShard(block=p[0].numel()), Shard(0)] if p.ndim == 3 else [rows, Replicate()]
                module.register_parameter(name, nn.Parameter(on_mesh(p.detach(), mesh, cut), p.requires_grad))
        model.out.weight = model.embed.weight
    else:
        fully_shard(model, mesh=init_device_mesh(device_type(), (4,), mesh_dim_names=("dp",)), orig_param_policy=policy)
    return model


def groups_of(model: Net, algorithm: str, lr: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(groups to begin with, the one that is added): matrices by the algorithm, the rest by AdamW."""
    named = dict(model.named_parameters())
    late = {"params": [(name, named.pop(name)) for name in list(named) if name == "late.weight"]}
    named.pop("late.bias")
    if algorithm == "adamw8bit":
        return [{"params": list(named.items()), "lr": lr}], late
    own = [item for item in named.items() if item[1].ndim > 1 and item[0] != "embed.weight"]
    rest = [item for item in named.items() if item not in own]
    return [{"params": own, "lr": lr}, {"params": rest, "algorithm": "adamw", "lr": 0.01}], late


class Run:
    """What happens in each step, drawn alike on every rank."""

    def __init__(self, seed: int, algorithm: str) -> None:
        self.draw = random.Random(seed)
        self.algorithm = algorithm
        self.lr_is_tensor = self.draw.random() < 0.5
        kind, options = KINDS[algorithm]
        self.capturable = algorithm == "adamw8bit" and self.draw.random() < 0.3
        self.options = {**options, **({"capturable": True} if self.capturable else {"skip_nonfinite": True})}
        self.kind = kind
        names = [name for name, _ in model_of().named_parameters()]
        self.bad_step = -1 if self.capturable else self.draw.randrange(NUM_STEPS)
        self.bad_name = self.draw.choice([n for n in names if n not in ("frozen", "late.weight", "late.bias")])
        self.steps = [
            {
                "seed": self.draw.randrange(10**6),
                "portions": self.draw.choice([1, 2]),
                "clip": self.draw.choice([None, 1.0, 1e6]),
                "closure": self.draw.random() < 0.3,
                # of a parameter: all have it, nobody does, or the holders of one rank's part do not
                "kinds": {name: self.draw.choice(["all"] * 6 + ["none", "part", "part"]) for name in names},
                "lacking": self.draw.randrange(4),
            }
            for _ in range(NUM_STEPS)
        ]
        self.steps[0]["kinds"]["up.weight"] = "part"
        self.steps[1]["kinds"]["down.weight"] = "none"


class Training:
    """A model and its optimizer in a run; ``like``: whose cuts decide which part of a gradient is missing."""

    def __init__(self, run: Run, model: Net, is_alone: bool) -> None:
        self.run, self.model, self.is_alone = run, model, is_alone
        lr = run.options["lr"]
        groups, self.late = groups_of(model, run.algorithm, torch.tensor(lr) if run.lr_is_tensor else lr)
        self.optimizer = run.kind(groups, **run.options)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.75)  # also of groups that are added
        self.has_late = False

    def add_late(self) -> None:
        if not self.has_late:
            self.optimizer.add_param_group(self.late)
            self.has_late = True

    def step(self, number: int, like: Net) -> None:
        if number == 3:
            self.add_late()
        if number >= 4:
            self.model.frozen.requires_grad_()
        what = self.run.steps[number]

        def gradients() -> float:
            for name, value in self.gradients(number, like):
                self.model.get_parameter(name).grad = value
            if what["clip"] is not None:
                clip_grad_norm_(self.model.parameters(), what["clip"])
                for gradient in (p.grad for p in self.model.parameters() if p.grad is not None):
                    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                    local.copy_((local * 1024).round() / 1024)  # norms of other parts differ in their last bit
            return 1.0

        if what["closure"]:
            assert self.optimizer.step(gradients) == 1.0
        else:
            gradients()
            self.optimizer.step()
        if not self.run.lr_is_tensor:
            self.schedule.step()

    def gradients(self, number: int, like: Net) -> Iterator[tuple[str, torch.Tensor | None]]:
        what = self.run.steps[number]
        generator = torch.Generator().manual_seed(what["seed"])
        cuts = dict(like.named_parameters())
        for name, parameter in self.model.named_parameters():
            whole = sum(torch.randint(-3, 4, parameter.shape, generator=generator) for _ in range(what["portions"])) / 8
            if number == self.run.bad_step and name == self.run.bad_name:
                whole.reshape(-1)[-1] = math.nan
            kind, cut = what["kinds"][name], cuts[name]
            if name == "late.bias" or not parameter.requires_grad or kind == "none":
                yield name, None
            elif kind == "all" or not isinstance(cut, DTensor):  # a plain tensor has one gradient
                yield name, self._placed(parameter, whole)
            else:
                places = list(itertools.product(*map(range, cut.device_mesh.shape)))
                lacking = _part(cut, places[what["lacking"] % len(places)])
                for box in lacking:
                    whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.sizes))] = 0
                is_mine = not self.is_alone and _part(cut, cut.device_mesh.get_coordinate()) == lacking
                everyone = self.is_alone and all(_part(cut, place) == lacking for place in places)
                yield name, None if is_mine or everyone else self._placed(parameter, whole)

    def _placed(self, parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return whole.clone()
        return on_mesh(whole, parameter.device_mesh, parameter.placements)

    def values(self) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach()
            found.update({f"{name}.{key}": value for key, value in self.optimizer.state.get(parameter, {}).items()})
        return {key: value.clone() for key, value in whole_tensors(found).items()}  # type: ignore[union-attr]


def _part(cut: DTensor, coordinate: Any) -> Any:
    return local_region(cut.shape, cut.placements, tuple(cut.device_mesh.shape), tuple(coordinate)).boxes


def combination(algorithm: str, first: str, second: str, seed: int, folder: str) -> None:
    run = Run(seed, algorithm)
    alone = Training(run, model_of(), is_alone=True)
    training = Training(run, sharded(first), is_alone=False)
    for number in range(SAVED_AFTER):
        training.step(number, training.model)
        alone.step(number, training.model)
        assert_same(training.values(), alone.values(), number)
    state = {"model": training.model.state_dict()}
    state["optimizer"] = get_optimizer_state_dict(training.model, training.optimizer)
    dcp.save(state, checkpoint_id=folder)
    schedule = copy.deepcopy(training.schedule.state_dict())
    model = sharded(second)
    model.frozen.requires_grad_()  # before, so that it has states to load
    again = Training(run, model, is_alone=False)
    again.add_late()
    state = {"model": again.model.state_dict()}
    state["optimizer"] = get_optimizer_state_dict(again.model, again.optimizer)
    dcp.load(state, checkpoint_id=folder)
    again.model.load_state_dict(state["model"])
    set_optimizer_state_dict(again.model, again.optimizer, state["optimizer"])
    again.schedule.load_state_dict(schedule)
    assert_same(again.values(), alone.values(), "after loading")
    for number in range(SAVED_AFTER, NUM_STEPS):
        again.step(number, again.model)
        alone.step(number, again.model)
        assert_same(again.values(), alone.values(), number)


def assert_same(found: dict[Any, Any], expected: dict[Any, Any], number: Any) -> None:
    assert found.keys() == expected.keys(), (number, found.keys() ^ expected.keys())
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), (number, key)


def combinations(cases: list[tuple[str, str, str, int]], folder: str) -> None:
    for case in cases:
        try:
            combination(*case, f"{folder}/{'-'.join(map(str, case))}")
        except Exception as error:
            error.add_note(f"combination{case}")
            raise


def test_some_combinations(ranks: RankPools, tmp_path: Path) -> None:
    cases = [("muon", "hsdp", "plan", 1), ("shampoo", "tp", "experts", 10)]
    ranks.run(combinations, cases, str(tmp_path), world_size=4)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_all_combinations(ranks: RankPools, tmp_path: Path, algorithm: str, engine: str) -> None:
    first = ENGINES.index(engine)
    others = [ENGINES[(first + step) % len(ENGINES)] for step in (1, 3)]
    cases = [(algorithm, engine, other, 10 + seed) for seed, other in enumerate(others)]
    ranks.run(combinations, cases, str(tmp_path), world_size=4, timeout=600.0)
