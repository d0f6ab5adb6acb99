"""``parallelize`` on models built under ``deferred_init``: local parts only, and the numbers of one device."""

from __future__ import annotations

import resource
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.device import device_type
from tests.fork_server import fork_context
from tests.ranks import RankPools
from tests.runtime.llama import make_mesh
from vescale import Plan, PlanError, RaggedShard, deferred_init, parallelize
from vescale.fsdp import report
from vescale.plans import INIT, RUN
from vescale.rng import has_deferred, is_deferred

VOCABULARY, WIDTH, HEADS, STEPS = 32, 32, 4, 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2 if self.training else 0.0)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        nn.init.trunc_normal_(self.up.weight, std=0.05, a=-0.1, b=0.1)
        nn.init.orthogonal_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm(x)), 0.1, self.training)
        return x + self.down(F.dropout(F.gelu(self.up(x)), 0.2, self.training))


class Model(nn.Module):
    """Tied weights, buffers computed in the constructor, a tensor that is neither, dropout in every place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)
        self.noise = torch.rand(3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embed(tokens), 0.1, self.training) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plan_of(kind: str, mesh: Any) -> Plan:
    plan = Plan(mesh)
    plan.shard("<in>", Shard(0), mesh="dp")
    if kind in ("tp", "both"):
        plan.shard(r".*attention.(q|k|v).weight", Shard(0), mesh="tp")
        plan.shard(r".*(attention.o|down).weight", Shard(1), mesh="tp")
        plan.shard(r".*(attention.o|down).<out>", Replicate(), mesh="tp")
        plan.shard(r".*up.(weight|bias)", Shard(0), mesh="tp")
    if kind in ("ragged", "both"):
        plan.shard(r".*(up|down|q|k|v|o).weight", RaggedShard(), mesh="dp", phase=INIT)
        plan.shard(r".*(up|down|q|k|v|o).weight", Replicate(), mesh="dp", phase=RUN)
    return plan


def train(model: nn.Module) -> list[float]:
    tokens = torch.randint(0, VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(4))
    target = F.one_hot(tokens, VOCABULARY).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        out = model(tokens)
        loss: Any = F.mse_loss(out.full_tensor() if isinstance(out, DTensor) else out, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def as_on_one_device(kind: str) -> None:
    torch.manual_seed(0)
    reference = Model()
    state = torch.get_rng_state()
    torch.manual_seed(0)
    with deferred_init():
        model = Model()
    assert all(is_deferred(parameter) for parameter in model.parameters()) and has_deferred(model)
    model = parallelize(model, plan_of(kind, make_mesh(dp=2, tp=2)))
    assert torch.equal(torch.get_rng_state(), state)
    found = dict([*model.named_parameters(), *model.named_buffers()])
    for name, expected in [*reference.named_parameters(), *reference.named_buffers()]:
        assert isinstance(found[name], DTensor), name
        assert torch.equal(found[name].full_tensor(), expected), name
        assert found[name].requires_grad == expected.requires_grad
    parts = {id(x): x.to_local() for x in found.values()}.values()
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    padding = sum(bucket.padding_elements for bucket in report(model)) * 4
    assert sum(storages.values()) <= sum(part.nbytes for part in parts) + padding, "only the rank's own parts are held"
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.noise, reference.noise)
    torch.manual_seed(1)
    expected_losses, state = train(reference), torch.get_rng_state()
    torch.manual_seed(1)
    losses = train(model)
    assert torch.equal(torch.get_rng_state(), state), "all dropouts drew what one device draws"
    assert max(abs(a - b) for a, b in zip(losses, expected_losses)) < 6e-5, (losses, expected_losses)


@pytest.mark.parametrize("kind", ["tp", "ragged", "both"])
def test_deferred_models_train_as_on_one_device(ranks: RankPools, kind: str) -> None:
    ranks.run(as_on_one_device, kind)


def other_seeds() -> None:
    torch.manual_seed(torch.distributed.get_rank() // 2)
    with deferred_init():
        model = Model()
    with pytest.raises(PlanError, match="has other values"):
        parallelize(model, plan_of("tp", make_mesh(dp=2, tp=2)))
    assert is_deferred(model.embed.weight), "nothing was placed"


def test_ranks_that_recorded_other_values_are_refused(ranks: RankPools) -> None:
    ranks.run(other_seeds)


def meta_model() -> None:
    with torch.device("meta"):
        model = Model()
    model.noise = torch.zeros(3)
    parallelize(model, plan_of("tp", make_mesh(dp=2, tp=2)))
    up = model.blocks[0].up.weight
    assert isinstance(up, DTensor) and up.is_meta and tuple(up.to_local().shape) == (2 * WIDTH, WIDTH)


def test_models_on_the_meta_device_become_meta_dtensors(ranks: RankPools) -> None:
    ranks.run(meta_model)


def placed(width: int) -> nn.Module:
    """On one of 64 ranks, of which the others do not exist."""
    mesh = init_device_mesh(device_type(), (64,), mesh_dim_names=("fsdp",))
    with deferred_init():
        model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width))
    plan = Plan(mesh)
    plan.shard(".*weight", RaggedShard(), mesh="fsdp", phase=INIT)
    plan.shard(".*weight", Replicate(), mesh="fsdp", phase=RUN)
    plan.shard(".*bias", Shard(0), mesh="fsdp", phase=INIT)
    plan.shard(".*bias", Replicate(), mesh="fsdp", phase=RUN)
    return parallelize(model, plan)


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_of_a_large_model() -> tuple[int, int, int]:
    """Elements of all parameters, bytes of this rank's parts, and by how much the peak of memory has grown."""
    dist.init_process_group("fake", rank=37, world_size=64, store=FakeStore())
    placed(64)
    before = peak_memory()
    parameters: Any = list(placed(24576).parameters())
    grown = peak_memory() - before
    return sum(p.numel() for p in parameters), sum(p.to_local().nbytes for p in parameters), grown


def test_peak_memory_is_that_of_the_local_parts() -> None:
    """19 GB of parameters over 64 ranks; Llama-3-8B is in benchmarks/rng.py."""
    with ProcessPoolExecutor(1, fork_context()) as pool:
        numel, shards, grown = pool.submit(memory_of_a_large_model).result()
    assert numel > 4.8e9 and abs(shards - 4 * numel / 64) < 0.01 * shards
    assert grown <= 1.10 * shards, f"{grown / shards:.3f} of the local parts"
