"""Train one model three ways, with different data on every rank: one device, PyTorch's FSDP2, and vescale's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor

from tests.device import device_type
from tests.whole import whole_tensors
from vescale.fsdp import fully_shard, state_of

Shard = Callable[[nn.Module, Callable[..., Any], DeviceMesh], None]
Step = Callable[[nn.Module, int, int], torch.Tensor]


def full(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parameters_of(model: nn.Module) -> dict[str, Any]:
    """The whole parameters."""
    return whole_tensors(dict(model.named_parameters()))


def gradients_of(model: nn.Module) -> dict[str, Any]:
    """The whole gradients."""
    return whole_tensors({name: parameter.grad for name, parameter in model.named_parameters()})


def same_gradients(models: list[Any], what: str) -> None:
    """Whether two models have equal gradients, bit by bit, or none alike."""
    one_grads, other_grads = map(gradients_of, models)
    for (name, one_grad), other_grad in zip(one_grads.items(), other_grads.values(), strict=True):
        assert (one_grad is None) == (other_grad is None), f"{what}: {name}"
        assert one_grad is None or torch.equal(one_grad, other_grad), f"{what}: {name}"  # type: ignore[arg-type]


def resting_memory(model: nn.Module) -> dict[int, int]:
    """Address and bytes of the blocks of memory that the parameters of sharded modules lie in: one for each bucket."""
    states = {id(state): state for module in model.modules() if (state := state_of(module)) is not None}
    blocks = {}
    for bucket in (bucket for state in states.values() for group in state.groups for bucket in group.buckets):
        storage = bucket.shards.local.untyped_storage()
        blocks[storage.data_ptr()] = storage.nbytes()
        for parameter in bucket.parameters:
            local = parameter.sharded.to_local()  # type: ignore[attr-defined]
            begin = local.data_ptr() - storage.data_ptr()
            assert not local.numel() or 0 <= begin <= begin + local.nbytes <= storage.nbytes(), parameter.name
            assert local.untyped_storage().nbytes() == local.nbytes and local.storage_offset() == 0, parameter.name
    return blocks


def data(shape: tuple[int, ...], step: int, rank: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def by_block(model: Any, fully_shard: Callable[..., Any], mesh: DeviceMesh, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def mesh_of(shape: tuple[int, ...] | None = None) -> DeviceMesh:
    shape = shape or (dist.get_world_size(),)
    names = ("replicate", "shard") if len(shape) == 2 else ("dp",)
    return init_device_mesh(device_type(), shape, mesh_dim_names=names)


def train_step(model: nn.Module, step: int, loss: Step, ranks: list[int], microbatches: int = 1) -> torch.Tensor:
    """Backward of the mean over ``ranks`` of their losses; gradients of microbatches add up."""
    total = torch.zeros(())
    for micro in range(microbatches):
        losses = [loss(model, 100 * step + micro, rank) for rank in ranks]
        mean = torch.stack(losses).mean()
        mean.backward()
        total = total + mean.detach()
    return total


def agree(
    what: str, ours: torch.Tensor | None, theirs: torch.Tensor | None, other: str, rtol: float, atol: float
) -> None:
    assert (ours is None) == (theirs is None), f"{what}: ours {ours}, {other} {theirs}"
    if ours is not None:
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, msg=lambda m: f"{what}, {other}: {m}")


def of_all(
    models: list[tuple[str, nn.Module]], value: Callable[[nn.Parameter], torch.Tensor | None]
) -> dict[str, dict[str, Any]]:
    """Whole values of all parameters of all models, with one collective."""
    found = whole_tensors({(name, key): value(p) for name, model in models for key, p in model.named_parameters()})
    return {name: {key: found[name, key] for key, _ in model.named_parameters()} for name, model in models}


def compare(
    build: Callable[[], nn.Module],
    loss: Step,
    shard: Shard = by_block,
    *,
    mesh_shape: tuple[int, ...] | None = None,
    steps: int = 3,
    microbatches: int = 1,
    around: Callable[[Any, int], None] = lambda model, micro: None,
    stock: bool = True,
    tolerance: float = 2e-5,
    device_tolerance: float | None = None,
    reference: bool = True,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> nn.Module:
    """Gradients, losses and parameters of every step must agree; which gradients are None, too. Returns our model.

    ``around(model, micro)`` is called on sharded models before each microbatch. ``device_tolerance``: for one device, which
    computes in float32, where it is not that for FSDP2.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = build()
    kinds: list[tuple[str, nn.Module]] = [("ours", copy.deepcopy(plain))]
    if stock:
        kinds.append(("stock", copy.deepcopy(plain)))
    mesh = mesh_of(mesh_shape)
    for name, model in kinds:
        shard(model, fully_shard if name == "ours" else stock_fully_shard, mesh)
    kinds.append(("one device", plain))
    optimizers = [optimizer([p for p in model.parameters() if p.requires_grad], lr=0.02) for _, model in kinds]
    for step in range(steps):
        losses: dict[str, torch.Tensor] = {}
        for (name, model), optim in zip(kinds, optimizers, strict=True):
            optim.zero_grad()
            if name == "one device":
                losses[name] = train_step(model, step, loss, list(range(world)), microbatches)
            else:
                total = torch.zeros(())
                for micro in range(microbatches):
                    around(model, micro)
                    one = loss(model, 100 * step + micro, rank)
                    one.backward()
                    total = total + one.detach().float()
                dist.all_reduce(total)
                losses[name] = total / world
        gradients = of_all(kinds, lambda p: p.grad)
        for optim in optimizers:
            optim.step()
        states = of_all(kinds, lambda p: p.detach())
        for other in [name for name, _ in kinds[1:] if reference or name != "one device"]:
            bound = device_tolerance if device_tolerance is not None and other == "one device" else tolerance
            torch.testing.assert_close(losses["ours"], losses[other], rtol=bound, atol=bound)
            assert gradients["ours"].keys() == gradients[other].keys()
            for key, gradient in gradients["ours"].items():
                agree(f"step {step}, {key}.grad", gradient, gradients[other][key], other, bound, bound)
                agree(f"step {step}, {key}", states["ours"][key], states[other][key], other, bound, 50 * bound)
    for module in kinds[0][1].modules():
        for key, p in module.named_parameters(recurse=False):
            assert not isinstance(p, DTensor) or any(p is q for q in kinds[0][1].parameters()), key
    return kinds[0][1]
