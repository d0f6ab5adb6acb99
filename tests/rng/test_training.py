"""Training with dropout and deferred initialization on meshes: the losses of one device, to reduction order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.device import device_type
from tests.ranks import RankPools
from vescale import rng
from vescale.compat import random_ops
from vescale.compat.simulated_ranks import fake_world
from vescale.rng import deferred_init, drawing_part_of, materialize
from vescale.rng._op_handlers import handlers

STEPS = 8
VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 32, 32, 4, 12, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        for linear in (self.up, self.down):
            nn.init.trunc_normal_(linear.weight, std=0.05, a=-0.1, b=0.1)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        heads = [p(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)]
        attended = F.scaled_dot_product_attention(*heads, dropout_p=0.1)
        x = x + F.dropout(self.o(attended.transpose(1, 2).flatten(2)), 0.1)
        return x + F.dropout(self.down(F.dropout(F.gelu(self.up(x)), 0.2)), 0.1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(F.dropout(self.embed(tokens), 0.1)))


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(4))


def one_device() -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Model()
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        loss = F.mse_loss(model(tokens()), F.one_hot(tokens(), VOCABULARY).float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, initial


def train(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    """The same program with DTensors: stock placements and rules, our random numbers."""
    world = dist.get_world_size()
    shape = {"dp x tp": (2, world // 2), "tp": (1, world), "fsdp": (world, 1)}[kind]
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=("dp", "tp"))

    def placements(name: str, tensor: Tensor) -> Any:
        if kind == "fsdp":
            return [Shard(0), Replicate()]
        if name.endswith(("q.weight", "k.weight", "v.weight", "up.weight", "up.bias")):
            return [Replicate(), Shard(0)]
        if name.endswith(("o.weight", "down.weight")):
            return [Replicate(), Shard(1)]
        return [Replicate(), Replicate()]

    torch.manual_seed(0)
    with deferred_init():
        model = Model()
    materialize(model, mesh, placements)
    for name, module in model.named_modules():
        if name.endswith((".o", ".down")):  # terms of a sum over tp: dropout needs the sum
            module.register_forward_hook(lambda _, args, out: out.redistribute(mesh, [Shard(0), Replicate()]))
    initial = {name: parameter.full_tensor().detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = [Shard(0), Replicate()]
    inputs = distribute_tensor(tokens(), mesh, batch, src_data_rank=None)
    target = distribute_tensor(F.one_hot(tokens(), VOCABULARY).float(), mesh, batch, src_data_rank=None)
    losses = []
    for _ in range(STEPS):
        parameters: dict[str, Any] = dict(model.named_parameters())
        if kind == "fsdp":  # unsharded for the computation; the gradients are reduce-scattered on their way back
            parameters = {name: p.redistribute(mesh, [Replicate()] * 2) for name, p in parameters.items()}
        loss: Any = F.mse_loss(torch.func.functional_call(model, parameters, (inputs,)), target)
        loss.backward()
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
            parameter.grad = parameter.grad.redistribute(mesh, parameter.placements)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # of the whole batch: a pending mean is reduced
    rng.disable()
    return losses, initial


@pytest.mark.parametrize("kind", ["dp x tp", "tp", "fsdp"])
def test_losses_follow_one_device(ranks: RankPools, kind: str) -> None:
    ((expected, initial),) = ranks.run(one_device, world_size=1)
    assert expected[-1] < 0.8 * expected[0], "it learns"
    torch.manual_seed(0)
    for losses, parameters in ranks.run(train, kind, world_size=4):
        assert [name for name in initial if not torch.equal(parameters[name], initial[name])] == []
        difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        assert difference < 6e-5, (difference, losses, expected)


def test_attention_reads_no_list_of_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tags of all of ATen's ops are read once: in each attention with dropout it took longer than the attention."""
    handlers()
    monkeypatch.setattr(random_ops, "_dispatch_get_all_op_names", lambda: pytest.fail("read again"))
    with fake_world(2, 0):
        mesh = init_device_mesh(device_type(), (2,))
        with drawing_part_of(mesh, (Shard(0),), (4, 2)):
            pass
