"""``GradientReducer`` when modules change, backwards break off, and others would reduce the same gradients."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import Partial, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import vescale
from tests.device import device_type
from tests.gradients.test_destinations import Loss
from tests.gradients.test_reducer import assert_equal_gradients, data, local_model, meshes
from tests.placements.on_ranks import make_mesh
from tests.ranks import RankPools
from vescale import GradientReducer, Plan, parallelize
from vescale.comm import record_comms
from vescale.compat import default_store
from vescale.errors import GradientError
from vescale.placements import from_local

F64 = torch.float64
P, R = Partial, Replicate


def loss(model: Callable[[torch.Tensor], torch.Tensor], step: int, rank: int) -> torch.Tensor:
    return model(data(step, rank, 3, 7)).square().sum()


def compare(model: nn.Module, reference: nn.Module, step: int, forward: str = "") -> None:
    """A step of both, the reference on all ranks' inputs."""
    for m in (model, reference):
        m.zero_grad()
    run = getattr(model, forward) if forward else model
    loss(run, step, dist.get_rank()).backward()
    for rank in range(dist.get_world_size()):
        loss(reference, step, rank).backward()
    assert_equal_gradients(model, reference)


# Modules that change


class Chain(nn.Sequential):
    def other(self, x: torch.Tensor) -> torch.Tensor:
        """A forward that is not the module's own."""
        return self.forward(x)


def unfrozen(forward: str) -> None:
    """Frozen at first, in turn unfrozen and frozen, also when a backward reaches nothing that it reached before."""
    model = Chain(*local_model(4))
    reference = copy.deepcopy(model)
    for m in (model, reference):
        m[:3].requires_grad_(False)
    reducer = GradientReducer(model, meshes((4,)), op="sum", bucket_bytes=500)
    assert sum(len(bucket.slots) for bucket in reducer.buckets) == 4
    for step in range(6):
        for m in (model, reference):
            if step == 2:
                m[0].requires_grad_(True)
            if step == 3:
                m[3:].requires_grad_(False)
            if step == 4:
                m.requires_grad_(True)
        compare(model, reference, step, forward)
    assert sum(len(bucket.slots) for bucket in reducer.buckets) == 10


def replaced(forward: str) -> None:
    """A parameter, all parameters, and a module are replaced, and one is added."""
    torch.manual_seed(0)
    model = Chain(*local_model(4))
    reference = copy.deepcopy(model)
    reducer = GradientReducer(model, meshes((4,)), op="sum", bucket_bytes=500)
    total = 0
    for step in range(10):
        for m in (model, reference):
            torch.manual_seed(step)
            if step == 2:
                m[1].weight = nn.Parameter(torch.randn(7, 7, dtype=F64))
            if step == 4 and not forward:  # a backward that reaches nothing known is seen by the module's forward alone
                m.load_state_dict({k: torch.randn_like(v) for k, v in m.state_dict().items()}, assign=True)
            if step == 6:
                m[2] = nn.Linear(7, 7, bias=False, dtype=F64)
            if step == 7:
                m.append(nn.Linear(7, 7, dtype=F64))
        compare(model, reference, step, forward)
        total = sum(bucket.num_bytes for bucket in reducer.buckets)
    assert total == sum(p.numel() * 8 for p in model.parameters())  # nothing that is gone is communicated
    reducer.remove()
    compare_alone = copy.deepcopy(model)
    for m in (model, compare_alone):
        m.zero_grad()
        loss(m, 0, dist.get_rank()).backward()
    assert_equal_gradients(model, compare_alone)


def changed_then_used_by_one() -> None:
    """After a parameter is replaced, or gone, all have places again, also those that nobody has used since; and ranks agree
    on these although one of them has nothing to do backward for."""
    for is_gone in (False, True):
        model, world, rank = local_model(4), dist.get_world_size(), dist.get_rank()
        reference = copy.deepcopy(model)
        reducer = GradientReducer(model, meshes((4,)), op="sum", timeout=timedelta(seconds=20))

        def some(m: nn.Module, step: int, index: int) -> torch.Tensor:
            x = m[0](data(step, index, 3, 7))
            return (m[1](x) if step < 2 or (step == 4 and index == 2) else x).square().sum()

        for step in range(6):
            for m in (model, reference):
                m.zero_grad()
                torch.manual_seed(step)
                if step == 2 and is_gone:
                    m[3] = nn.Identity()
                elif step == 2:
                    m[0].weight = nn.Parameter(torch.randn(7, 7, dtype=F64))
            idle = {1} if step == 3 else set()
            if rank not in idle:
                some(model, step, rank).backward()
            reducer.finish()
            for r in set(range(world)) - idle:
                some(reference, step, r).backward()
            assert_equal_gradients(model, reference)


def unfrozen_dtensors() -> None:
    mesh, rank = make_mesh(((0, 1), (2, 3))), dist.get_rank()
    module = nn.Module()
    for name in ("first", "second"):
        module.register_parameter(name, nn.Parameter(from_local(torch.zeros(4), mesh, [R(), R()])))
    module.second.requires_grad_(False)
    GradientReducer(module, mesh, op="sum")
    for step in range(3):
        module.zero_grad()
        if step == 1:
            module.second.requires_grad_(True)
        used = [p for p in module.parameters() if p.requires_grad]
        part = torch.full((4,), rank + 1.0)
        torch.stack([Loss.apply(p, from_local(part, mesh, [P(), P()])) for p in used]).sum().backward()
        for parameter in used:
            assert torch.equal(parameter.grad.to_local(), torch.full((4,), 10.0))


def shared_frozen_parts() -> None:
    """Two reducers may look after modules that share a frozen part; not after a trained one."""
    mesh = meshes((4,))
    shared, other, third = nn.Linear(7, 7, dtype=F64), nn.Linear(7, 7, dtype=F64), nn.Linear(7, 7, dtype=F64)
    shared.requires_grad_(False)
    GradientReducer(nn.Sequential(shared, other), mesh)
    GradientReducer(nn.Sequential(shared, third), mesh)
    with pytest.raises(ValueError, match=r"0\.weight already has a GradientReducer"):
        GradientReducer(nn.Sequential(other), mesh)


def deep_copies() -> None:
    """A copy has no reducer until it gets one of its own."""
    model, mesh = local_model(2), meshes((4,))
    GradientReducer(model, mesh, op="sum")
    reference = copy.deepcopy(model)
    twin = copy.deepcopy(model)
    with record_comms() as ledger:
        loss(twin, 0, dist.get_rank()).backward()
    assert not ledger.records
    GradientReducer(twin, mesh, op="sum")
    for step in range(2):
        compare(twin, reference, step)


@pytest.mark.parametrize("forward", ["", "other"])
def test_unfrozen_and_replaced_parameters(ranks: RankPools, forward: str) -> None:
    ranks.run(unfrozen, forward, timeout=60)
    ranks.run(replaced, forward, timeout=60)


# The schedule


def second_stages() -> None:
    """Of buckets that take two collectives, the second starts after the next one's first, in backward."""
    rank = dist.get_rank()
    dp = [make_mesh((0, 2)), make_mesh((1, 3))][rank % 2]  # sliced from no common mesh
    tp = [make_mesh((0, 1)), make_mesh((2, 3))][rank // 2]
    module = nn.Module()
    for index in range(4):
        module.register_parameter(f"p{index}", nn.Parameter(from_local(torch.zeros(8, dtype=F64), tp, [R()])))
    reducer = GradientReducer(module, dp, op="sum", bucket_bytes=64)
    for _ in range(2):
        module.zero_grad()
        with record_comms() as ledger:
            part = torch.full((8,), rank + 1.0, dtype=F64)
            losses = [Loss.apply(p, from_local(part, tp, [P()])) for p in module.parameters()]
            torch.stack(losses).sum().backward()
        for parameter in module.parameters():
            assert torch.equal(parameter.grad.to_local(), torch.full((8,), 10.0, dtype=F64))
    assert reducer.num_buckets == 4 and len(ledger.records) == 8
    order = [int(record.requester.split()[1].strip(":")) for record in ledger.records]
    stages = [(bucket, order[:place].count(bucket)) for place, bucket in enumerate(order)]
    assert stages == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (3, 0), (2, 1), (3, 1)]


def one_gradient_a_bucket() -> None:
    """Is reduced where it is: its memory is the gradient's own, and nothing is copied; unless somebody else sees it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(50, dtype=F64))
    GradientReducer(module, meshes((4,)), bucket_bytes=8)
    seen: list[int] = []
    module.weight.register_hook(lambda grad: seen.append(grad.data_ptr()))
    for step in range(3):
        module.zero_grad()
        (module.weight * data(step, rank, 50)).sum().backward()
        torch.testing.assert_close(module.weight.grad, sum(data(step, r, 50) for r in range(world)) / world)
        assert step == 0 or module.weight.grad.data_ptr() == seen[-1]
    both = data(5, rank, 100)

    class Views(torch.autograd.Function):
        """A gradient that is part of a larger one."""

        @staticmethod
        def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
            return torch.zeros((), dtype=F64, requires_grad=True)

        @staticmethod
        def backward(ctx: Any, _: torch.Tensor) -> torch.Tensor:
            return both[:50]

    module.zero_grad()
    before = both.clone()
    Views.apply(module.weight).backward()
    assert torch.equal(both, before)
    torch.testing.assert_close(module.weight.grad, sum(data(5, r, 100)[:50] for r in range(world)) / world)


def held_gradients() -> None:
    """Whoever holds a gradient, in whichever way, keeps its values; else the memory is used again."""
    model, rank = local_model(), dist.get_rank()
    GradientReducer(model, meshes((4,)))
    other = nn.Parameter(torch.zeros(7, dtype=F64))
    pointers = []

    def hold(how: str) -> Any:
        gradient = model[2].bias.grad
        if how == "itself":
            return gradient
        if how == "a view":
            return gradient[1:]
        if how == "another's":
            other.grad = gradient
            return None
        return gradient.detach() if how == "detached" else None

    for step, how in enumerate(["", "", "itself", "a view", "another's", "detached", "", ""]):
        model.zero_grad()
        model(data(step, rank, 3, 7)).sum().backward()
        held = hold(how)
        kept = (other.grad if how == "another's" else held) if how else None
        copied = kept.clone() if kept is not None else None
        pointers.append(model[0].weight.grad.data_ptr())
        model.zero_grad()
        model(data(step + 50, rank, 3, 7)).sum().backward()
        assert (model[0].weight.grad.data_ptr() == pointers[-1]) is (not how), how
        assert kept is None or torch.equal(kept, copied), how
        other.grad = held = kept = None
        gc.collect()


def changed_in_between() -> None:
    """Gradients that are zeroed in place, or scaled, while complete ones are behind contributions."""
    model, rank, world = local_model(2), dist.get_rank(), dist.get_world_size()
    reference = copy.deepcopy(model)
    reducer = GradientReducer(model, meshes((4,)), op="sum")
    for step in range(3):
        loss(model, step, rank).backward()
        with reducer.no_sync():
            loss(model, step + 10, rank).backward()
        model.zero_grad(set_to_none=False)
        loss(model, step + 20, rank).backward()
        reference.zero_grad()
        for r in range(world):
            loss(reference, step + 20, r).backward()
        assert_equal_gradients(model, reference)
        with reducer.no_sync():
            loss(model, 5, rank).backward()
        model[0].weight.grad.mul_(2)
        with pytest.raises(RuntimeError, match=r"0\.weight\.grad was changed after a backward under no_sync"):
            loss(model, 6, rank).backward()
        model.zero_grad()


def comparisons_leave_no_keys() -> None:
    dist.barrier()
    before = default_store().num_keys()
    dist.barrier()
    for _ in range(3):
        unfrozen("")
    dist.barrier()
    assert default_store().num_keys() == before


# Backwards that break off


def broken_off_alone() -> None:
    """One rank has an exception: the others get nan, not a sum without its part; the next step is right."""
    model, world, rank = local_model(), dist.get_world_size(), dist.get_rank()
    reference = copy.deepcopy(model)
    reducer = GradientReducer(model, meshes((4,)), op="sum", bucket_bytes=500)
    for step in range(6):
        for m in (model, reference):
            m.zero_grad()
        out = loss(model, step, rank)
        if rank == 1 and step in (2, 4):
            index = 0 if step == 2 else 4
            handle = model[index].weight.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                out.backward()
            handle.remove()
            if step == 4:
                reducer.finish()
            continue
        out.backward()
        if step in (2, 4):
            assert model[0].weight.grad.isnan().all()
            continue
        for r in range(world):
            loss(reference, step, r).backward()
        assert_equal_gradients(model, reference)


def broken_off_differently() -> None:
    """All ranks have an exception, each at another place, with the graph kept, and in recomputed parts."""
    for reentrant in (None, True, False):
        model, world, rank = local_model(), dist.get_world_size(), dist.get_rank()
        reference = copy.deepcopy(model)
        GradientReducer(model, meshes((4,)), op="sum", bucket_bytes=500)

        def forward(x: torch.Tensor, model: nn.Module = model, reentrant: bool | None = reentrant) -> torch.Tensor:
            for layer in model:
                x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
            return x

        for step in range(4):
            for m in (model, reference):
                m.zero_grad()
            out = forward(data(step, rank, 3, 7).requires_grad_()).square().sum()
            if step in (0, 2):
                handle = model[rank].weight.register_hook(lambda grad: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    out.backward(retain_graph=reentrant is None)
                handle.remove()
                if reentrant is not None or step == 0:
                    continue
                model.zero_grad()
                out.backward()
            else:
                out.backward()
            for r in range(world):
                loss(reference, step, r).backward()
            assert_equal_gradients(model, reference)


@pytest.mark.parametrize(
    "case",
    [
        unfrozen_dtensors,
        changed_then_used_by_one,
        shared_frozen_parts,
        deep_copies,
        second_stages,
        one_gradient_a_bucket,
        held_gradients,
        changed_in_between,
        comparisons_leave_no_keys,
        broken_off_alone,
        broken_off_differently,
    ],
    ids=lambda case: case.__name__,
)
def test_changes(ranks: RankPools, case: Callable[[], None]) -> None:
    ranks.run(case, timeout=60)


# Mistakes


def misuse() -> None:
    mesh = init_device_mesh(device_type(), (4,), mesh_dim_names=("dp",))
    for wrap in (
        lambda m: vescale.fully_shard(m, mesh=mesh),
        lambda m: stock_fully_shard(m, mesh=mesh),
        DistributedDataParallel,
        lambda m: parallelize(m, Plan(mesh)),
    ):
        managed = wrap(local_model(2))
        for module in (managed, nn.Sequential(nn.Linear(2, 2), managed)):
            with pytest.raises(ValueError, match=r"GradientReducer of a module whose part .* is (a|parallelized)"):
                GradientReducer(module, mesh)
    model = local_model(2)
    GradientReducer(model, mesh)
    with pytest.raises(ValueError, match=r"0\.weight already has a GradientReducer"):
        GradientReducer(model, mesh)
    sparse = nn.Embedding(5, 3, sparse=True)
    GradientReducer(sparse, mesh)
    with pytest.raises(RuntimeError, match=r"weight\.grad is a torch\.sparse_coo tensor.*sparse=False"):
        sparse(torch.tensor([1])).sum().backward()
    with pytest.raises(GradientError, match=r"frozen"):
        module = nn.Linear(2, 2)
        module.bias.requires_grad_(dist.get_rank() == 2)
        GradientReducer(module, mesh)
    for answer, error in (
        (
            lambda bucket: None,
            r"bucket 0 \(0\.bias\.grad and 1 others\) returned a NoneType; return the reduced tensor",
        ),
        (
            lambda bucket: bucket.all_reduce().wait()[1:],
            r"returned a tensor of shape \(5,\); return one of the .* 6 elements",
        ),
    ):
        module = nn.Sequential(nn.Linear(2, 2))
        reducer = GradientReducer(module, mesh)
        reducer.register_comm_hook(answer)  # type: ignore[arg-type]
        with pytest.raises((TypeError, ValueError), match=error):
            module(torch.ones(2)).sum().backward()
    with pytest.raises(TypeError, match="got a str; pass a function"):
        reducer.register_comm_hook("float16")  # type: ignore[arg-type]
    model = local_model(2)
    reducer = GradientReducer(model, mesh)
    model[0].weight.register_hook(lambda grad: reducer.register_comm_hook(lambda bucket: bucket.all_reduce()))
    with pytest.raises(RuntimeError, match="register_comm_hook was called during a backward"):
        loss(model, 0, dist.get_rank()).backward()


def test_misuse(ranks: RankPools) -> None:
    ranks.run(misuse, timeout=60)
