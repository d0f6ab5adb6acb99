"""What programs do to the groups of an optimizer between steps: lists of parameters, options, ``requires_grad``, schedulers,
compilers. The groups are the truth, as in PyTorch; what cannot follow them is an error."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, StepLR

from tests.device import device_type
from tests.examples import daily_sample
from tests.ranks import RankPools
from tests.whole import whole
from vescale.checkpoint import load, save
from vescale.errors import MatrixBlocksError, OptimizerError
from vescale.fsdp import fully_shard
from vescale.optim import SOAP, AdamW8bit, Muon, Shampoo, muon_groups, muon_layout
from vescale.placements import RaggedShard, distribute_tensor, normalize_placements

KINDS: dict[str, Callable[..., Any]] = {
    "muon": lambda groups, **o: Muon(groups, lr=0.1, **o),
    "soap": lambda groups, **o: SOAP(groups, lr=0.1, precondition_frequency=2, **o),
    "shampoo": lambda groups, **o: Shampoo(groups, lr=0.1, precondition_frequency=2, **o),
    "adamw8bit": lambda groups, **o: AdamW8bit(groups, lr=0.1, min_numel=64, block_size=8, **o),
}
SHAPES = ((8, 8), (16, 8), (8, 24), (16, 16), (24, 8), (8, 16))
PLACEMENTS = (Shard(0), Shard(1), Replicate(), RaggedShard((0,), block=8), RaggedShard((0,), (1, 0)))
SCHEDULERS: dict[str, Callable[[Any], LRScheduler | None]] = {
    "none": lambda optimizer: None,
    "steps": lambda optimizer: StepLR(optimizer, 2),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
    "cycles": lambda optimizer: CyclicLR(optimizer, 0.01, 0.1, step_size_up=2),
}


class Twins:
    """The same parameters on a mesh and on one device, in optimizers with the same groups."""

    def __init__(self, kind: str, seed: int) -> None:
        self.draw = random.Random(f"{kind} {seed}")
        mesh = init_device_mesh(device_type(), (2,))
        self.own: list[nn.Parameter] = []
        self.reference: list[nn.Parameter] = []
        for number, shape in enumerate(SHAPES):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + number))
            placement = self.draw.choice(PLACEMENTS[:3] if kind == "adamw8bit" else PLACEMENTS)
            if kind == "adamw8bit" and placement == Shard(1):
                placement = Shard(0)  # no border cuts a block
            placements = normalize_placements((placement,), shape, mesh)
            self.own.append(nn.Parameter(distribute_tensor(values, mesh, placements, src_data_rank=None)))
            self.reference.append(nn.Parameter(values))
        self.places = [[0, 1], [2, 3]]  # of parameters, by group
        self.frozen = {number for number in (1, 3) if self.draw.random() < 0.3}
        self.freeze()
        make = KINDS[kind]
        self.optimizers = [
            make([{"params": [each[i] for i in group]} for group in self.places]) for each in (self.own, self.reference)
        ]
        scheduler = SCHEDULERS[self.draw.choice([*SCHEDULERS])]
        self.schedulers = [scheduler(optimizer) for optimizer in self.optimizers]

    def freeze(self) -> None:
        for each in (self.own, self.reference):
            for number, parameter in enumerate(each):
                parameter.requires_grad_(number not in self.frozen)

    def edit(self) -> None:
        """One of the edits of lists that are seen in programs, or a freeze."""
        places, edit = self.places, self.draw.randrange(6)
        present = [i for group in places for i in group]
        absent = [i for i in range(len(SHAPES)) if i not in present]
        if edit == 0 and len(present) > 1:
            places[self.draw.choice([i for i, group in enumerate(places) if group])].pop(0)
        elif edit == 1 and absent:
            self.draw.choice(places).append(self.draw.choice(absent))
        elif edit == 2:
            places[0], places[1] = places[1], places[0]
        elif edit == 3:
            self.draw.shuffle(self.draw.choice(places))
        elif edit == 4:
            self.frozen ^= {self.draw.randrange(len(SHAPES))}
        elif self.schedulers == [None, None]:  # which know the groups that there are
            places.append([])
        self.freeze()
        for optimizer, each in zip(self.optimizers, (self.own, self.reference)):
            for group, members in zip(optimizer.param_groups, places):
                group["params"][:] = [each[i] for i in members]
            if len(places) > len(optimizer.param_groups):
                optimizer.add_param_group({"params": []})

    def step(self, number: int) -> None:
        before = [parameter.detach().clone() for parameter in self.reference]
        for index, (own, twin) in enumerate(zip(self.own, self.reference)):
            twin.grad = torch.randn(twin.shape, generator=torch.Generator().manual_seed(100 * number + index))
            if index in self.frozen:
                own.grad = twin.grad = None
                continue
            assert isinstance(own, DTensor)
            own.grad = distribute_tensor(twin.grad, own.device_mesh, own.placements, src_data_rank=None)
        for optimizer, scheduler in zip(self.optimizers, self.schedulers):
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        listed = {i for group in self.places for i in group} - self.frozen
        for index, (own, twin) in enumerate(zip(self.own, self.reference)):
            assert torch.equal(whole(own), twin) and twin.isfinite().all(), (
                type(self.optimizers[0]),
                number,
                index,
                twin,
            )
            has_moved = not torch.equal(twin, before[index])
            # The first step of SOAP only begins its averages.
            assert has_moved == (index in listed) or (index in listed and self.is_new_in_soap(twin)), (number, index)
        assert [[id(p) for p in group["params"]] for group in self.optimizers[0].param_groups] == [
            [id(self.own[i]) for i in group] for group in self.places
        ]

    def is_new_in_soap(self, parameter: nn.Parameter) -> bool:
        optimizer = self.optimizers[1]
        return isinstance(optimizer, SOAP) and int(optimizer.state[parameter]["step"]) == 1


def edits(seed: int, folder: str) -> None:
    for kind in KINDS:
        twins = Twins(kind, seed)
        for number in range(8):
            if number % 3:
                twins.edit()
            twins.step(number)
        optimizer, alone = twins.optimizers
        copied = copy.deepcopy(alone)  # of the groups as they are
        for found, expected in zip(copied.param_groups, alone.param_groups):
            for parameter, twin in zip(found["params"], expected["params"]):
                parameter.grad = copy.deepcopy(twin.grad)
        copied.step()
        alone.step()
        for found, expected in zip(copied.param_groups, alone.param_groups):
            assert all(map(torch.equal, found["params"], expected["params"])), kind
        model = nn.ParameterDict({f"p{i}": parameter for i, parameter in enumerate(twins.own)})
        save(f"{folder}/{kind}", model=model, optimizer=optimizer)
        load(f"{folder}/{kind}", model=model, optimizer=optimizer)


@pytest.mark.parametrize("seed", daily_sample(range(30), 30))
def test_lists_of_parameters(ranks: RankPools, tmp_path: Any, seed: int) -> None:
    ranks.run(edits, seed, str(tmp_path), world_size=2)


def frozen_on_a_rank(*cases: tuple[int, bool]) -> None:
    """Which rank, and whether from the first step on."""
    mesh, rank = init_device_mesh(device_type(), (2,)), dist.get_rank()
    for kind, make in KINDS.items():
        for bad, first in cases:
            placed = distribute_tensor(torch.randn(2, 16, 8), mesh, [Shard(1)], src_data_rank=None)
            made = [nn.Parameter(each) for each in (placed[0], placed[1])]
            for parameter in made:
                parameter.grad = parameter.detach().clone()
            made[1].requires_grad_(not (first and rank == bad))
            error = OptimizerError
            optimizer = make(made)
            if not first:
                optimizer.step()
                made[1].requires_grad_(rank != bad)
                if kind == "adamw8bit":
                    continue  # its states are there: a frozen parameter with a gradient is one that is trained
            with pytest.raises(error, match=r"frozen|freeze"):
                optimizer.step()


def test_frozen_on_a_rank(ranks: RankPools) -> None:
    ranks.run(frozen_on_a_rank, (0, True), (1, True), world_size=2)
    # Later on a device only the rank that has changed waits, and raises; the other one is ended with the job.
    ranks.run(frozen_on_a_rank, (1, False), world_size=2, device="cpu")


@pytest.mark.parametrize(
    ("kind", "edit", "message"),
    [
        (Muon, {"algorithm": "adamw"}, "created for a different algorithm"),
        (Muon, {"algorithm": "adamw", "betas": (0.9, 0.99), "capturable": False}, "'momentum_buffer'.*del optimizer"),
        (Shampoo, {"max_preconditioner_dim": 5}, "max_preconditioner_dim=5"),
        (Shampoo, {"blocks": 2}, "blocks=2"),
        (SOAP, {"max_preconditioner_dim": 5}, "'row_factor'.*max_preconditioner_dim=5"),
        (SOAP, {"blocks": 4}, "blocks=4"),
    ],
)
def test_options_that_states_rest_on(kind: Any, edit: dict[str, Any], message: str) -> None:
    optimizer = kind([nn.Parameter(torch.randn(8, 8))])
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.randn(8, 8)
    optimizer.step()
    before = dict(optimizer.param_groups[0])
    optimizer.param_groups[0].update(edit)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    optimizer.param_groups[0].update(before)
    optimizer.step()


@pytest.mark.parametrize("edit", [{"blocks": 2}, {"blocks": ("dim", 1, 4)}, {"ns_dtype": torch.float32}, {"batch": 2}])
def test_options_that_are_followed(edit: dict[str, Any]) -> None:
    """As if they had been there from the start: Muon's states do not rest on them."""
    found = []
    for early in (True, False):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(8, 8))
        optimizer = Muon([{"params": [parameter], **(edit if early else {})}], lr=0.1)
        optimizer.param_groups[0].update(edit)
        for _ in range(2):
            parameter.grad = torch.randn(8, 8)
            optimizer.step()
        found.append(parameter.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("grafting", ["adam", "sgd", None])
def test_momentum_that_begins_later(grafting: str | None) -> None:
    """A cycle of the momentum, as of OneCycleLR, from the start is that of an optimizer made with it."""
    found = []
    for betas in ((0.0, 0.999), (0.95, 0.999)):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape)) for shape in ((8, 8), (5, 4), (3,), ())]
        optimizer = Shampoo(parameters, lr=0.1, betas=betas, grafting=grafting)
        scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape)
            optimizer.step()
            scheduler.step()
        found.append(parameters)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_steps(kind: str) -> None:
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 8, bias=False))
        optimizer = KINDS[kind](model.parameters())

        def train(batch: torch.Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        run = torch.compile(train, backend="eager") if is_compiled else train
        for _ in range(3):
            run(torch.randn(4, 16))
        found.append([*model.parameters()])
    assert all(map(torch.equal, *found))


def layouts_of_blocks() -> None:
    """By the layout of the whole model, and by those of its blocks."""
    mesh = init_device_mesh(device_type(), (2,))
    shapes = []
    for of_block in (True, False):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6)) for _ in range(3)))
        whole_layout = muon_layout(
            model, muon_groups(model, adamw=["0.0.weight"], blocks={r"\d.1.weight": 2}, verbose=False)
        )
        for block in model:
            groups = muon_groups(
                block, adamw=["0.weight"] if block is model[0] else [], blocks={"1.weight": 2}, verbose=False
            )
            layout = muon_layout(block, groups) if of_block else whole_layout
            fully_shard(block, mesh=mesh, orig_param_policy=layout)
        shapes.append([str(p.placements) for p in model.parameters()])  # type: ignore[attr-defined]
        with pytest.raises(MatrixBlocksError, match=r"without parameter 'weight'.*muon_layout\(block\)"):
            fully_shard(nn.Linear(3, 3), mesh=mesh, orig_param_policy=whole_layout)
    assert shapes[0] == shapes[1]


def test_layouts_of_blocks(ranks: RankPools) -> None:
    ranks.run(layouts_of_blocks, world_size=2)
