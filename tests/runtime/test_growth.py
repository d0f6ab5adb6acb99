"""Training keeps nothing: not of steps, not of sequence lengths, and not of models that are gone."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.device import device_type
from tests.examples import NIGHTLY
from vescale import Plan, RaggedShard, parallelize
from vescale.compat import clear_sharding_caches, local_of, sharding_caches
from vescale.optim import clip_grad_norm_
from vescale.plans import INIT, RUN

NUM_STEPS = 1000 if NIGHTLY else 120
NUM_LENGTHS = 200 if NIGHTLY else 80


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.dropout = nn.Embedding(32, 16), nn.LayerNorm(16), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        heads = self.norm(x).view(*tokens.shape, 4, 4).transpose(1, 2)
        scores = (heads @ heads.transpose(-1, -2)) * 0.5
        x = x + (scores.softmax(-1) @ heads).transpose(1, 2).reshape(*tokens.shape, 16)
        return x + self.dropout(self.down(torch.relu(self.up(x))))


@pytest.fixture
def plan() -> Iterator[Plan]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    plan = Plan(init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp")))
    plan.shard("up.<in>", Replicate(), mesh="tp")
    plan.shard("up.weight", Shard(0), mesh="tp")
    plan.shard("up.bias", Shard(0), mesh="tp")
    plan.shard("down.weight", Shard(1), mesh="tp")
    plan.shard("down.<out>", Replicate(), mesh="tp")
    yield plan
    clear_sharding_caches()
    dist.destroy_process_group()


@pytest.fixture
def model(plan: Plan) -> nn.Module:
    torch.manual_seed(0)
    made = Model()
    return parallelize(made, plan) or made


class MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]  # so ctypes wants it


def usage() -> tuple[int, int]:
    """Python objects, and bytes that are allocated. (Pages in memory vary by one percent with the order of allocations.)"""
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallocInfo
    found = mallinfo2()
    return len(gc.get_objects()) + gc.get_freeze_count(), found.uordblks + found.hblkhd


def assert_flat(step: Callable[[int], None], num_calls: int, turn: int, limit: float) -> None:
    """At most ``limit`` times as much is in use in the second half of the calls as in the first; ``turn`` calls fill tables
    once."""
    for index in range(turn):
        step(index)
    gc.collect()
    gc.freeze()  # what is there is counted, and not searched each time
    found = []
    for index in range(turn, turn + num_calls):
        step(index)
        if index % max(1, turn // 6) == 0:  # counting what is frozen takes longer than a step
            found.append(usage())
    half = len(found) // 2
    for before, after, what in zip(map(max, zip(*found[:half])), map(max, zip(*found[half:])), ("objects", "memory")):
        assert after <= before * limit, f"{what}: {before} before, {after} after"


@pytest.mark.parametrize("kind", ["foreach", "fused", "loop"])
def test_steps(model: nn.Module, kind: str) -> None:
    options = {"foreach": kind == "foreach"} if kind != "fused" else {"fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    tokens = torch.randint(32, (4, 8))

    def step(_: int) -> None:
        optimizer.zero_grad()
        model(tokens).sum().backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    assert_flat(step, NUM_STEPS, 40, 1.0005)


@pytest.mark.helper("dispatch")  # without it, PyTorch's own cache keeps a decision for each size
def test_sequence_lengths(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables fill up and are emptied. Without dropout, which remembers up to 1,024 sizes: more than are drawn here."""
    model.eval()
    monkeypatch.setattr(sharding_caches, "MAX_SPECS", 600)

    def step(index: int) -> None:
        # Each length once, in an order in which the memory of the activations does not grow.
        length = 268 - (index * 97) % 260
        model(torch.randint(32, (1, length))).sum().backward()

    assert_flat(step, NUM_LENGTHS, 60, 1.005)
    assert len(sharding_caches.INTERNED_SPECS) <= 600


@pytest.mark.parametrize(
    "has_units, mode",
    [
        (False, "eager"),
        (True, "eager"),
        pytest.param(False, "static", marks=pytest.mark.helper("dispatch")),
        pytest.param(True, "static", marks=pytest.mark.helper("dispatch")),
    ],
)
def test_models(plan: Plan, has_units: bool, mode: Literal["eager", "static"]) -> None:
    """Garbage collection frees a model with its parameters, as trained, and as built."""
    if has_units:
        plan.shard(".*", RaggedShard(), mesh="dp", phase=INIT).shard(".*", Replicate(), mesh="dp", phase=RUN)
        plan.unit("").unit("up")
    parts: list[weakref.ref[object]] = []
    for num_steps in (0, 1, 3):
        model = parallelize(Model(), plan, mode=mode)
        for _ in range(num_steps):
            model(torch.randint(32, (4, 8))).sum().backward()
        parts += [weakref.ref(x) for x in (model, model.up, *model.parameters(), local_of(model.norm.weight))]
        del model
    gc.collect()
    gc.collect()  # parameters that the nodes of local tensors have held
    assert [found for part in parts if (found := part()) is not None] == []
