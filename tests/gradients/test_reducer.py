"""``GradientReducer`` by itself, on stock DTensor models and local modules, against one device and stock DTensor."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from tests.device import device_type
from tests.gradients.buckets import of_buckets
from tests.ranks import RankPools
from tests.runtime.llama import counted
from tests.whole import whole_tensors
from vescale import GradientReducer
from vescale.comm import fused_bytes, record_comms

R, S, P = Replicate, Shard, Partial
F64 = torch.float64


def data(step: int, index: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(1000 * step + index))


def local_model(num_layers: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(7, 7) for _ in range(num_layers)], nn.LayerNorm(7)).to(F64)


def assert_equal_gradients(model: nn.Module, reference: nn.Module, tolerance: float = 1e-12) -> None:
    gradients: Any = whole_tensors({name: own.grad for name, own in model.named_parameters()})
    for (name, own), (_, expected) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        if expected.grad is None:
            assert own.grad is None, name
            continue
        assert own.grad is not None, name
        if isinstance(own, DTensor):
            assert own.grad.placements == own.placements, (name, own.grad.placements)
        scale = max(expected.grad.abs().max().item(), 1e-9)
        difference = (gradients[name] - expected.grad).abs().max().item() / scale
        assert difference <= tolerance, (name, difference)


def meshes(sizes: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh(device_type(), sizes, mesh_dim_names=("dp", "cp", "tp")[: len(sizes)])


# Local modules: every rank feeds its part of the batch


def local_modules(sizes: tuple[int, ...], op: str | None, bucket_bytes: Any) -> None:
    model = local_model()
    reference = copy.deepcopy(model)
    mesh, world = meshes(sizes), dist.get_world_size()
    reducer = GradientReducer(model, mesh, bucket_bytes=bucket_bytes, op=op)
    weight = 1.0 if op == "sum" else 1 / world
    total = sum(p.numel() * 8 for p in model.parameters())
    expected_buckets = reducer.num_buckets
    for step in range(4):
        if step != 2:  # gradients of step 2 are added to those of step 1
            model.zero_grad(set_to_none=step != 3)
            reference.zero_grad()
        with record_comms() as ledger, counted() as counts:
            model(data(step, dist.get_rank(), 3, 7)).square().sum().backward()
        reducer.finish()
        (weight * sum(reference(data(step, rank, 3, 7)).square().sum() for rank in range(world))).backward()
        assert_equal_gradients(model, reference)
        assert len(ledger.records) == sum(counts.values())
        buckets = of_buckets(ledger)
        assert len(buckets) == reducer.num_buckets == expected_buckets
        assert abs(sum(record.bytes for record in buckets) - fused_bytes(total, sizes)) <= reducer.num_buckets
        assert {record.op for record in ledger.records} == {"all_reduce"}
    assert reducer.num_buckets == 1 or bucket_bytes != 2**20


@pytest.mark.parametrize("sizes", [(8,), (4, 2), (2, 2, 2)], ids=str)
def test_local_modules(ranks: RankPools, sizes: tuple[int, ...]) -> None:
    for op, bucket_bytes in ((None, 2**20), ("avg", 1000), ("sum", [300, 2000]), ("sum", "auto")):
        ranks.run(local_modules, sizes, op, bucket_bytes, world_size=8)


# Stock DTensor models


class Block(nn.Module):
    """Tensor and sequence parallel by stock DTensor: gradients are Partial over dp, over tp, and over both."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.mesh = mesh
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)
        self.gain = nn.Parameter(torch.ones(8))
        self.double()
        if mesh is not None:
            cut = {"up.weight": S(0), "up.bias": S(0), "down.weight": S(1)}
            for name, parameter in list(self.named_parameters()):
                owner = self.get_submodule(name.rpartition(".")[0])
                placements = [*[R()] * (mesh.ndim - 1), cut.get(name, R())]
                setattr(
                    owner,
                    name.rpartition(".")[2],
                    nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)),
                )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x) * self.gain
        if self.mesh is not None:
            y = y.redistribute(placements=[*y.placements[:-1], R()])
        y = self.down(self.up(y).relu())
        if self.mesh is not None:
            y = y.redistribute(placements=x.placements)
        return x + y


def dtensor_models(sizes: tuple[int, ...], op: str | None) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(*[Block(None) for _ in range(3)])
    mesh = meshes(sizes)
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(mesh) for _ in range(3)])
    stock = copy.deepcopy(model)
    reducer = GradientReducer(model, mesh, bucket_bytes=2**20, op=op)
    batch_axes = [S(0), S(0)][: mesh.ndim - 1]
    scale = 1 if op != "avg" else None
    for step in range(2):
        x = data(step, 0, 8, 4, 8)
        placed = distribute_tensor(x, mesh, [*batch_axes, S(1)])
        for m in (model, reference, stock):
            m.zero_grad()
        with record_comms() as ledger, counted() as counts:
            loss = model(placed)
            before = len(ledger.records), sum(counts.values())
            loss.square().sum().backward()
            buckets = of_buckets(ledger)
        reference(x).square().sum().backward()
        stock(placed).square().sum().backward()
        partial = {name: p.grad.placements for name, p in stock.named_parameters()}
        assert any(q.is_partial() for placements in partial.values() for q in placements)
        if scale is not None:
            assert_equal_gradients(model, reference)
        for (name, own), other in zip(model.named_parameters(), stock.parameters()):
            expected = other.grad.redistribute(placements=other.placements).to_local()
            if op == "avg":
                n = [mesh.size(i) for i, q in enumerate(partial[name]) if q.is_partial()]
                expected = expected / torch.tensor(n).prod()
            torch.testing.assert_close(own.grad.to_local(), expected, rtol=1e-12, atol=1e-13)
        kinds = {tuple(i for i, q in enumerate(placements) if q.is_partial()) for placements in partial.values()}
        assert len(buckets) == reducer.num_buckets >= len(kinds) and before
        # every kind of gradient in one collective over the union of its axes
        for bucket in reducer.buckets:
            (stage,) = bucket.reduction.stages
            assert bucket.moved_bytes == fused_bytes(bucket.num_bytes, stage.axes.sizes)
        assert [record.bytes for record in buckets] == [bucket.moved_bytes for bucket in reducer.buckets]
        local = sum(p.to_local().numel() * 8 for name, p in model.named_parameters())
        assert sum(bucket.num_bytes for bucket in reducer.buckets) == local


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (2, 2, 2)], ids=str)
def test_stock_dtensor_models(ranks: RankPools, sizes: tuple[int, ...]) -> None:
    for op in (None, "sum", "avg"):
        ranks.run(dtensor_models, sizes, op, world_size=math.prod(sizes))


# What users do


def accumulation(sizes: tuple[int, ...]) -> None:
    """no_sync, several backwards, zero_grad in between, and finish()."""
    model, mesh, world, rank = local_model(), meshes(sizes), dist.get_world_size(), dist.get_rank()
    reference = copy.deepcopy(model)
    reducer = GradientReducer(model, mesh, op="sum", bucket_bytes=1500)

    def backward(m: nn.Module, step: int, ranks: range) -> None:
        for r in ranks:
            m(data(step, r, 3, 7)).square().sum().backward()

    own, everyone = range(rank, rank + 1), range(world)
    for round_ in range(3):
        for step in range(3):
            with reducer.no_sync(), record_comms() as ledger:
                backward(model, step, own)
            assert not ledger.records
            backward(reference, step, everyone)
        if round_ < 2:
            with record_comms() as ledger:
                backward(model, 3, own)
            backward(reference, 3, everyone)
        else:
            with record_comms() as ledger:
                reducer.finish()
        assert len(of_buckets(ledger)) == reducer.num_buckets
        assert_equal_gradients(model, reference)
        if round_ == 0:  # the next round adds to these
            with reducer.no_sync():
                backward(model, 4, own)
            backward(model, 5, own)
            for step in (4, 5):
                backward(reference, step, everyone)
            assert_equal_gradients(model, reference)
        model.zero_grad()
        reference.zero_grad()
    with reducer.no_sync():
        backward(model, 6, own)
    first = model[0].weight.grad.data_ptr()
    with reducer.no_sync():
        backward(model, 7, own)
    assert model[0].weight.grad.data_ptr() == first  # in its bucket
    model.zero_grad()  # given up
    backward(model, 8, own)
    backward(reference, 8, everyone)
    assert_equal_gradients(model, reference)
    assert model[0].weight.grad.data_ptr() == first


def kept_gradients() -> None:
    """Gradients that somebody still holds are not overwritten by the next step; else the memory is used again."""
    model, mesh, rank = local_model(), meshes((4,)), dist.get_rank()
    GradientReducer(model, mesh)
    pointers, kept = [], None
    for step in range(5):
        model.zero_grad()
        model(data(step, rank, 3, 7)).sum().backward()
        pointers.append(model[0].weight.grad.data_ptr())
        if step == 2:
            kept = model[2].bias.grad
            copied = kept.clone()
    assert torch.equal(kept, copied)
    assert pointers[0] == pointers[1] == pointers[2] != pointers[3] == pointers[4]


def used_differently() -> None:
    """Ranks use different parameters, in another order each, and a part of them first in a later step."""
    torch.manual_seed(0)
    layers = nn.ModuleDict({name: nn.Linear(3, 3) for name in "abcde"}).to(F64)
    reference = copy.deepcopy(layers)
    mesh, world, rank = meshes((2, 2)), dist.get_world_size(), dist.get_rank()
    reducer = GradientReducer(layers, mesh, op="sum", bucket_bytes=200)

    def chosen(step: int, r: int) -> str:
        if step == 4 and r == 1:
            return ""  # nothing to do
        return ["ab", "ba", "b", "abc"][r] if step < 2 else ["d", "ba", "d", "cd"][r] if step < 5 else "bad"

    def loss(m: nn.Module, step: int, r: int) -> torch.Tensor:
        x = data(step, r, 2, 3)
        for name in chosen(step, r):
            x = m[name](x)
        return x.square().sum()

    for step in range(7):
        for m in (layers, reference):
            m.zero_grad()
        if chosen(step, rank):
            loss(layers, step, rank).backward()
        reducer.finish()
        total = sum(loss(reference, step, r) for r in range(world) if chosen(step, r))
        total.backward()
        assert_equal_gradients(layers, reference)
        if step >= 5:
            assert layers["e"].weight.grad is None and layers["c"].weight.grad is None
    assert all(p.grad is None for p in layers["e"].parameters())


def recomputation() -> None:
    """Both kinds of activation checkpointing; a parameter that is used in two recomputed parts."""
    for reentrant in (True, False):
        for shared in (False, True):
            model, mesh, world, rank = local_model(4), meshes((4,)), dist.get_world_size(), dist.get_rank()
            reference = copy.deepcopy(model)
            reducer = GradientReducer(model, mesh, op="sum", bucket_bytes=500)

            def forward(
                m: nn.Module, x: torch.Tensor, *, recompute: bool, shared: bool = shared, reentrant: bool = reentrant
            ) -> torch.Tensor:
                order = [0, 1, 0, 2, 3, 1] if shared else [0, 1, 2, 3]
                for index in order:
                    layer: Callable[..., torch.Tensor] = m[index]
                    x = checkpoint(layer, x, use_reentrant=reentrant) if recompute else layer(x)
                return m[4](x).square().sum()

            for step in range(3):
                model.zero_grad()
                reference.zero_grad()
                x = data(step, rank, 3, 7).requires_grad_()
                with record_comms() as ledger:
                    forward(model, x, recompute=True).backward()
                for r in range(world):
                    forward(reference, data(step, r, 3, 7), recompute=False).backward()
                assert_equal_gradients(model, reference)
                assert len(of_buckets(ledger)) == reducer.num_buckets


def recomputed_more_often() -> None:
    """A layer's gradient comes once more than was learned (reentrant checkpointing, two forwards): that does not stand for
    another layer's, which is still to come. Large layers, of which each is heard."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(96, 96, bias=False) for _ in range(4)]).to(F64)
    reference, world, rank = copy.deepcopy(model), dist.get_world_size(), dist.get_rank()
    GradientReducer(model, meshes((4,)), op="sum")

    def loss(m: nn.Module, step: int, rank: int) -> torch.Tensor:
        found = []
        for number in range(1 + step):
            x = m[0](data(10 * step + number, rank, 3, 96))
            for index in (1, 2):
                x = checkpoint(m[index], x, use_reentrant=True) if m is model else m[index](x)
            found.append(m[3](x).square().mean())
        return torch.stack(found).sum()

    for step in range(4):
        model.zero_grad()
        reference.zero_grad()
        loss(model, step, rank).backward()
        for r in range(world):
            loss(reference, step, r).backward()
        assert_equal_gradients(model, reference)


def dtypes() -> None:
    """bfloat16 gradients are added in float32, and rounded once."""
    mesh, rank, world = meshes((2, 2)), dist.get_rank(), dist.get_world_size()
    for op, reduce_dtype in (("sum", torch.float32), ("avg", torch.float32), ("avg", None), ("sum", torch.float64)):
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
        module.other = nn.Parameter(torch.zeros(10, dtype=torch.float32))
        reducer = GradientReducer(module, mesh, reduce_dtype=reduce_dtype, op=op)
        for _ in range(2):
            module.zero_grad()
            values = [data(0, r, 1000).to(torch.bfloat16) for r in range(world)]
            with record_comms() as ledger:
                ((module.weight * values[rank]).sum() + module.other.sum() * rank).backward()
            wide = torch.stack([v.float() for v in values]).sum(0) / (world if op == "avg" else 1)
            assert module.weight.grad.dtype == torch.bfloat16 and module.other.grad.dtype == torch.float32
            assert torch.equal(module.weight.grad, wide.to(torch.bfloat16))
            torch.testing.assert_close(module.other.grad, torch.full((10,), 6.0 / (world if op == "avg" else 1)))
        sizes = sorted(bucket.num_bytes for bucket in reducer.buckets)
        width = reduce_dtype.itemsize if reduce_dtype else 2
        assert sizes == [10 * (width if reduce_dtype else 4), 1000 * width]
        assert ledger.records


def tiny_gradients() -> None:
    """A gradient that only one rank has, of which rounding the average leaves -0.0, is there on every rank."""
    mesh, rank = meshes((2, 2)), dist.get_rank()
    for reduce_dtype in (None, torch.float32):
        module = nn.Module()
        for name in ("used", "used_once", "unused"):
            module.register_parameter(name, nn.Parameter(torch.zeros(3, dtype=torch.float16)))
        GradientReducer(module, mesh, reduce_dtype=reduce_dtype, op="avg")
        for _ in range(3):
            module.zero_grad()
            loss = module.used.sum()
            if rank == 1:
                loss = loss + (module.used_once * -(2.0**-24)).sum()
            loss.backward()
            assert module.used_once.grad is not None and not module.used_once.grad.any()
            assert module.unused.grad is None


def hooks() -> None:
    """A hook that compresses to half precision, and one that reduces as it would have been."""
    from vescale.comm import Pending, all_gather_v

    mesh, rank, world = meshes((2, 2)), dist.get_rank(), dist.get_world_size()
    seen = []

    def compressed(bucket: Any) -> Pending:
        seen.append((bucket.index, bucket.names, bucket.op))
        half = bucket.buffer.to(torch.bfloat16)
        sizes = [half.numel()] * bucket.group.size()
        gathered = all_gather_v(half, sizes, bucket.group).wait().view(bucket.group.size(), -1)
        return Pending(gathered.double().sum(0))

    for hook, tolerance in ((compressed, 2e-2), (lambda bucket: bucket.all_reduce(), 1e-12)):
        model = local_model(3)
        reference = copy.deepcopy(model)
        reducer = GradientReducer(model, mesh, op="avg", bucket_bytes=600)
        reducer.register_comm_hook(hook)
        for step in range(2):
            model.zero_grad()
            reference.zero_grad()
            model(data(step, rank, 3, 7)).square().sum().backward()
            (sum(reference(data(step, r, 3, 7)).square().sum() for r in range(world)) / world).backward()
            assert_equal_gradients(model, reference, tolerance)
    assert {name for _, names, _ in seen for name in names} == {name for name, _ in model.named_parameters()}


def exceptions() -> None:
    """A backward that ends by an exception leaves nothing behind."""
    model, mesh, world, rank = local_model(), meshes((4,)), dist.get_world_size(), dist.get_rank()
    reference = copy.deepcopy(model)
    GradientReducer(model, mesh, op="sum", bucket_bytes=500)
    for step in range(4):
        model.zero_grad()
        reference.zero_grad()
        handle = model[2].weight.register_hook(lambda grad: 1 / 0) if step in (0, 2) else None
        out = model(data(step, rank, 3, 7)).square().sum()
        if handle is not None:
            with pytest.raises(ZeroDivisionError):
                out.backward()
            handle.remove()
            continue
        out.backward()
        sum(reference(data(step, r, 3, 7)).square().sum() for r in range(world)).backward()
        assert_equal_gradients(model, reference)


def repeatable() -> None:
    """Bitwise the same for two runs."""
    found = []
    for _ in range(2):
        model = local_model().float()
        GradientReducer(model, meshes((2, 2)), bucket_bytes=500)
        for step in range(3):
            model.zero_grad()
            model(data(step, dist.get_rank(), 3, 7).float()).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def hook_of_the_user() -> None:
    """What a hook on a parameter changes is what is reduced."""
    model, world, rank = local_model(2), dist.get_world_size(), dist.get_rank()
    reference = copy.deepcopy(model)
    GradientReducer(model, meshes((4,)), op="sum")
    for m in (model, reference):
        m[0].weight.register_hook(lambda grad: grad * 3)
    for step in range(2):
        model.zero_grad()
        reference.zero_grad()
        model(data(step, rank, 3, 7)).sum().backward()
        sum(reference(data(step, r, 3, 7)).sum() for r in range(world)).backward()
        assert_equal_gradients(model, reference)


@pytest.mark.parametrize(
    "case",
    [
        kept_gradients,
        used_differently,
        recomputation,
        recomputed_more_often,
        dtypes,
        tiny_gradients,
        hooks,
        exceptions,
        repeatable,
        hook_of_the_user,
    ],
    ids=lambda case: case.__name__,
)
def test_what_users_do(ranks: RankPools, case: Callable[[], None]) -> None:
    ranks.run(case)


@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
def test_accumulation(ranks: RankPools, sizes: tuple[int, ...]) -> None:
    ranks.run(accumulation, sizes)
