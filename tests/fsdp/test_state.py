"""State dicts in every form, checkpoints onto other meshes and engines, meta-device initialization, tensor parallelism."""

from __future__ import annotations

import copy
import io
import os
import tempfile
from inspect import signature
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
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.torch_version import TorchVersion

from tests.device import device_type
from tests.examples import NIGHTLY
from tests.fsdp.compare import by_block, full, mesh_of, resting_memory
from tests.fsdp.models import Net, net_loss, tokens
from tests.ranks import RankPools, run_functions
from tests.whole import whole_tensors
from vescale import rng
from vescale.fsdp import DataParallelMeshDims, fully_shard
from vescale.placements import RaggedShard, StridedRaggedShard, distribute_tensor


def trained(shard: Any = fully_shard, mesh_shape: tuple[int, ...] | None = None, steps: int = 1, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = Net()
    by_block(model, shard, mesh_of(mesh_shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(steps):
        net_loss(model, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    found = whole_tensors(model.state_dict())
    return {name: value.clone() for name, value in found.items() if value is not None}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def state_dicts() -> None:
    model, optimizer = trained()
    expected = values(model)
    # sharded, into a model of other values; in place, so optimizers keep their parameters
    other, _ = trained(seed=1)
    parameters = list(other.parameters())
    other.load_state_dict(model.state_dict())
    assert_same(values(other), expected)
    assert all(p is q for p, q in zip(parameters, other.parameters(), strict=True))
    # assign: the parameters of the state dict themselves, and slices of one buffer again after the next gather
    other, _ = trained(seed=2)
    copied = {name: value.clone() for name, value in model.state_dict().items()}
    other.load_state_dict(copied, assign=True)
    assert_same(values(other), expected)
    net_loss(other, 5, dist.get_rank()).backward()
    net_loss(model, 5, dist.get_rank()).backward()
    for p, q in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(full(p.grad), full(q.grad))  # type: ignore[arg-type]
    assert len(resting_memory(other)) == 4
    # full, gathered and set again
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(type(value) is torch.Tensor for value in state.values())
    assert_same(state, expected)
    other, _ = trained(seed=3)
    # PyTorch puts its own tensors into the dict that it is given
    set_model_state_dict(other, dict(state), options=StateDictOptions(full_state_dict=True))
    assert_same(values(other), expected)
    other, _ = trained(seed=4)
    on_first = dict(state) if dist.get_rank() == 0 else {}
    set_model_state_dict(other, on_first, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    assert_same(values(other), expected)
    offloaded = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(offloaded) == (dist.get_rank() == 0)
    # model and optimizer together
    both = get_state_dict(model, optimizer)
    other, other_optimizer = trained(seed=5)
    moments = {name: {k: v.clone() for k, v in one.items()} for name, one in both[1]["state"].items()}
    of_optimizer = {**both[1], "state": moments}  # optimizers keep the tensors that they are given
    set_state_dict(other, other_optimizer, model_state_dict=both[0], optim_state_dict=of_optimizer)
    for m, o in ((model, optimizer), (other, other_optimizer)):
        m.zero_grad()
        net_loss(m, 7, dist.get_rank()).backward()
        o.step()
    assert_same(values(other), values(model))
    whole = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    assert all(type(v) is torch.Tensor for state in whole["state"].values() for v in state.values())


def saved_and_copied() -> None:
    """``torch.save`` and ``copy.deepcopy`` of state dicts and parameters, on each rank, as scripts do without DCP."""
    for options in ({}, {"shard_placement_fn": lambda p: Shard(0)}):
        torch.manual_seed(0)
        model = Net()
        by_block(model, fully_shard, mesh_of(), **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        net_loss(model, 0, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = values(model)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        copied = copy.deepcopy(model.state_dict())
        average = copy.deepcopy(list(model.parameters()))
        model.unshard()  # type: ignore[operator]
        torch.save(list(model.parameters()), io.BytesIO())
        model.reshard()  # type: ignore[operator]
        net_loss(model, 1, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
        after_two = values(model)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        for state in (copied, loaded["model"]):
            assert_same({name: full(value) for name, value in state.items()}, expected)  # type: ignore[misc]
        assert_same(dict(zip(expected, map(full, average), strict=True)), expected)  # type: ignore[arg-type]
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        net_loss(model, 1, dist.get_rank()).backward()
        optimizer.step()
        assert_same(values(model), after_two)


def checkpoints() -> None:
    """Onto another mesh, onto stock FSDP2, onto one device, and back; training goes on with the same numbers."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    kinds: dict[str, Any] = {
        "ours": lambda seed: trained(seed=seed),
        "HSDP": lambda seed: trained(mesh_shape=(2, 2), seed=seed),
        "stock": lambda seed: trained(stock_fully_shard, seed=seed),
    }
    for source, make in kinds.items():
        model, optimizer = make(0)
        path = os.path.join(folder[0], source)
        saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(saved, checkpoint_id=path)
        expected = values(model)
        results = {}
        for target, make_other in kinds.items():
            if not NIGHTLY and target == source != "stock":
                continue  # onto what wrote it
            other, other_optimizer = make_other(1)
            found = dict(zip(("model", "optimizer"), get_state_dict(other, other_optimizer), strict=True))
            dcp.load(found, checkpoint_id=path)
            set_state_dict(other, other_optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
            assert_same(values(other), expected)
            net_loss(other, 9, dist.get_rank()).backward()
            other_optimizer.step()
            results[target] = values(other)
        for target, result in results.items():
            for name, value in result.items():
                torch.testing.assert_close(
                    value, results["stock"][name], rtol=1e-5, atol=1e-5, msg=f"{source} {target} {name}"
                )
        plain = Net()
        state = {"model": plain.state_dict()}
        dcp.load(state, checkpoint_id=path)
        plain.load_state_dict(state["model"])
        assert_same(values(plain), expected)


def meta_device() -> None:
    """Wrap on the meta device, materialize only shards, then initialize or load."""
    expected, _ = trained(steps=0)
    with torch.device("meta"):
        model = Net()
    by_block(model, fully_shard, mesh_of())
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device=device_type())
    assert all(isinstance(p, DTensor) and not p.is_meta for p in model.parameters())
    assert len(resting_memory(model)) == 4  # a buffer a group
    model.load_state_dict(expected.state_dict())
    assert_same(values(model), values(expected))
    results = []
    for m in (model, expected):
        loss = net_loss(m, 0, dist.get_rank())
        loss.backward()
        results.append(loss.detach())
    assert torch.equal(*results)
    with torch.device("meta"):
        model = Net()
    by_block(model, fully_shard, mesh_of())
    model.load_state_dict({name: value.clone() for name, value in expected.state_dict().items()}, assign=True)
    assert_same(values(model), values(expected))
    net_loss(model, 0, dist.get_rank()).backward()
    with torch.device("meta"):
        model = Net()
    by_block(model, fully_shard, mesh_of())
    model.to_empty(device=device_type())
    for p in model.parameters():
        nn.init.constant_(p, 0.5)
    assert all(bool((value == 0.5).all()) for value in values(model).values())
    rng.disable()  # whatever other tests have left on
    with torch.device("meta"):
        model = Net()
    by_block(model, fully_shard, mesh_of())
    model.to_empty(device=device_type())
    plain = Net()
    for one in (model, plain):  # the usual way: sharded parameters are drawn, and are those of one device
        torch.manual_seed(11)
        for part in one.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
    assert_same(values(model), values(plain))
    model.double()
    model.half()
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    net_loss(model.float(), 0, dist.get_rank()).backward()
    with torch.device("meta"):
        model = Net()
    fully_shard(
        [model.blocks[0], model.blocks[1]], mesh=mesh_of()
    )  # one group, whose modules get their memory in turns
    fully_shard(model, mesh=mesh_of())
    for number, part in enumerate((model.blocks[0], model.blocks[1], model)):
        part.to_empty(device=device_type())
        assert any(p.is_meta for p in model.parameters()) == (number < 2)
    for p, value in zip(model.parameters(), values(expected).values(), strict=True):
        with torch.no_grad():
            p.copy_(distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None))
    loss = net_loss(model, 0, dist.get_rank())
    loss.backward()
    assert torch.equal(loss.detach(), results[0])


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


def tensor_parallel() -> None:
    """FSDP over parameters that tensor parallelism has cut, on dim 0 and on dim 1; against stock and one device."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = nn.Sequential(Mlp(), Mlp())
    models = []
    for shard in (fully_shard, stock_fully_shard):
        model = copy.deepcopy(plain)
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            shard(block, mesh=mesh["dp"])
        shard(model, mesh=mesh["dp"])
        models.append(model)
    ours = models[0]
    up, down = ours[0].up.weight, ours[0].down.weight
    assert isinstance(up.placements[0], StridedRaggedShard) and up.placements[1] == Shard(0)
    assert type(down.placements[0]) is RaggedShard and down.placements[1] == Shard(1)
    assert up.device_mesh.mesh_dim_names == ("dp", "tp")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (*models, plain)]
    for step in range(3):
        rows = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(step))
        for m, optimizer in zip((*models, plain), optimizers, strict=True):
            optimizer.zero_grad()
            part = rows[mesh.get_local_rank("dp")] if m is not plain else rows
            m(part).square().mean().backward()
            if m is not plain:
                torch.nn.utils.clip_grad_norm_([p for p in m.parameters() if p.grad.device_mesh.ndim == 2], 1e9)
            optimizer.step()
        for (name, p), q, r in zip(ours.named_parameters(), models[1].parameters(), plain.parameters(), strict=True):
            for kind, other in (("stock", q), ("one device", r)):
                torch.testing.assert_close(
                    full(p.detach()),
                    full(other.detach()),
                    rtol=1e-5,
                    atol=1e-5,
                    msg=lambda m, w=f"{name} {kind}": f"{w} {m}",
                )
    assert_same(values(ours), {name: full(p.detach()) for name, p in ours.named_parameters()})  # type: ignore[misc]


def whole_mesh() -> None:
    """Parameters that are DTensors on the whole mesh, with the data-parallel axes named."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = nn.Linear(6, 8, bias=False)
    models = []
    for shard in (fully_shard, stock_fully_shard):
        model = copy.deepcopy(plain)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate(), Shard(0)]))
        shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        models.append(model)
    for m in models:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(mesh.get_local_rank("dp")))
        out = m(DTensor.from_local(x, mesh, [Shard(0), Replicate()]))
        out.square().sum().backward()
    ours, stock = models
    assert isinstance(ours.weight, DTensor) and isinstance(ours.weight.placements[0], StridedRaggedShard)
    torch.testing.assert_close(full(ours.weight.grad), full(stock.weight.grad))


def several_axes_of_the_whole_mesh() -> None:
    """Two of them shard together: at rest on the mesh that stock FSDP has, with one axis in their place; also around an
    axis between them, which stock FSDP refuses."""

    def trained(sharding: Any, sizes: dict[str, int]) -> nn.Linear:
        mesh = init_device_mesh(device_type(), tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        torch.manual_seed(0)
        model = nn.Linear(6, 5)
        for name, parameter in list(model.named_parameters()):
            run = [Shard(0) if axis == "tp" else Replicate() for axis in sizes]
            setattr(model, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, run)))
        sharding(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=("dp", "ep")))
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
        rows = [Replicate() if axis == "tp" else Shard(0) for axis in sizes]
        model(DTensor.from_local(x, mesh, rows)).square().sum().backward()
        return model

    stock, ours = (trained(sharding, {"dp": 2, "ep": 2}) for sharding in (stock_fully_shard, fully_shard))
    around = trained(fully_shard, {"dp": 2, "tp": 1, "ep": 2})
    found = [model.weight for model in (stock, ours, around)]
    assert all(isinstance(weight, DTensor) for weight in found)
    assert found[1].device_mesh.mesh_dim_names == ("dp_ep",)  # type: ignore[attr-defined]
    if TorchVersion(torch.__version__) >= "2.13":  # before, stock FSDP keeps both axes
        assert found[1].device_mesh == found[0].device_mesh  # type: ignore[attr-defined]
    assert found[2].device_mesh.mesh_dim_names == ("tp", "dp_ep")  # type: ignore[attr-defined]
    for model in (ours, around):
        assert isinstance(model.weight.placements[-1], RaggedShard)  # type: ignore[attr-defined]
        for own, other in zip(model.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(full(own.grad), full(other.grad))


# Before 2.12 stock FSDP knows no such meshes to compare with.
ON_MESHES = (
    (whole_mesh, several_axes_of_the_whole_mesh) if "dp_mesh_dims" in signature(stock_fully_shard).parameters else ()
)
PARTS = {  # by the number of ranks
    2: (state_dicts, saved_and_copied, meta_device),
    4: (checkpoints, tensor_parallel, *ON_MESHES),
}


@pytest.mark.parametrize("num_ranks", PARTS)
def test_state(ranks: RankPools, num_ranks: int) -> None:
    assert tokens(0, 0).shape == (2, 5)
    assert ranks.run(run_functions, PARTS[num_ranks], world_size=num_ranks) == [len(PARTS[num_ranks])] * num_ranks
