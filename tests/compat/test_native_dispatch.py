"""Ops that the C++ dispatcher runs give what PyTorch's path gives."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.examples import NIGHTLY
from vescale.compat import (
    clear_sharding_caches,
    dispatch_counts,
    extend_dtensor,
    make_dtensor,
    make_spec,
    reset_dispatch_counts,
    sharding_caches,
)
from vescale.compat.native_dispatch import is_native, native_boundaries, num_entries, without_native
from vescale.compat.patches import install, uninstall
from vescale.compat.sharding_caches import INTERNED_SPECS
from vescale.placements import RaggedShard, contiguous_stride, own_region

pytestmark = pytest.mark.helper("dispatch")

# Functions by the shapes of their operands. An operand named "index" has int64 values, "mask" bools.
FUNCTIONS: dict[str, tuple[tuple[Any, ...], Callable[..., Any]]] = {}


def case(name: str, shapes: tuple[Any, ...], function: Callable[..., Any]) -> None:
    FUNCTIONS[name] = shapes, function


SQUARE = ((8, 12),)
UNARY = (
    "abs neg exp log1p sin cos tanh sigmoid relu sqrt rsqrt reciprocal square erf floor ceil round sign trunc expm1 "
    "asinh atan isnan isfinite logical_not t clone detach zeros_like ones_like contiguous frac exp2 sinh cosh"
)
for name in UNARY.split():
    case(
        name,
        SQUARE,
        lambda x, name=name: getattr(x if hasattr(x, name) else torch, name)(*(() if hasattr(x, name) else (x,))),
    )
BINARY = "add sub mul div maximum minimum pow atan2 eq ne lt le gt ge logical_and logical_or fmod remainder hypot"
for name in BINARY.split():
    case(name, ((8, 12), (8, 12)), lambda x, y, name=name: getattr(torch, name)(x, y))
    case(f"{name} broadcast", ((8, 12), (12,)), lambda x, y, name=name: getattr(torch, name)(x, y))
ACTIVATIONS = "silu gelu relu6 softplus leaky_relu elu hardtanh mish selu logsigmoid hardswish"
for name in ACTIVATIONS.split():
    case(name, SQUARE, lambda x, name=name: getattr(F, name)(x))
for number in (2, 2.0, True):
    case(f"add {number!r}", SQUARE, lambda x, number=number: x + number)
    case(f"mul {number!r}", SQUARE, lambda x, number=number: number * x)
    case(f"pow {number!r}", SQUARE, lambda x, number=number: x**number)
REDUCTIONS = "sum mean amax amin prod logsumexp all any argmax var std norm"
for name in REDUCTIONS.split():
    full = {"logsumexp": lambda x: x.logsumexp((0, 1)), "amax": lambda x: x.amax(), "amin": lambda x: x.amin()}
    case(f"{name} full", SQUARE, full.get(name, lambda x, name=name: getattr(x, name)()))
    for dim in (0, -1):
        dims = {"norm": lambda x, dim=dim: x.norm(dim=dim)}
        case(f"{name} {dim}", SQUARE, dims.get(name, lambda x, name=name, dim=dim: getattr(x, name)(dim)))
case("sum keepdim", SQUARE, lambda x: x.sum(1, keepdim=True))
case("max values", SQUARE, lambda x: x.max(1))
case("cumsum", SQUARE, lambda x: x.cumsum(1))
case("sort", SQUARE, lambda x: x.sort(-1))
case("topk", SQUARE, lambda x: x.topk(3, -1))
case("softmax", SQUARE, lambda x: x.softmax(-1))
case("softmax 0", SQUARE, lambda x: x.softmax(0))
case("log_softmax", SQUARE, lambda x: x.log_softmax(-1))
case("layer_norm", ((4, 8, 12), (12,), (12,)), lambda x, w, b: F.layer_norm(x, (12,), w, b))
case("rms_norm", ((4, 8, 12), (12,)), lambda x, w: F.rms_norm(x, (12,), w))
case("view", ((8, 12),), lambda x: x.view(8, 3, 4))
case("view -1", ((4, 8, 12),), lambda x: x.view(-1, 12))
case("reshape", ((4, 8, 12),), lambda x: x.reshape(4, 96))
case("flatten", ((4, 8, 12),), lambda x: x.flatten(1))
case("unflatten", ((8, 12),), lambda x: x.unflatten(1, (3, 4)))
case("transpose", ((4, 8, 12),), lambda x: x.transpose(0, 2))
case("permute", ((4, 8, 12),), lambda x: x.permute(2, 0, 1))
case("unsqueeze", SQUARE, lambda x: x.unsqueeze(1))
case("squeeze", ((8, 1, 12),), lambda x: x.squeeze(1))
case("squeeze of parts", ((4, 1, 12),), lambda x: [x.squeeze(0), x.squeeze(1), x.squeeze(-1)])
case("squeeze all", ((8, 1, 12),), lambda x: x.squeeze())
case("expand", ((8, 1),), lambda x: x.expand(8, 12))
case("select", SQUARE, lambda x: x[:, 3])
case("slice", SQUARE, lambda x: x[:, 2:7])
case("slice steps", SQUARE, lambda x: x[:, ::2])
case("narrow", SQUARE, lambda x: x.narrow(1, 1, 5))
case("split", SQUARE, lambda x: x.split(4, 1))
case("split sizes", SQUARE, lambda x: x.split([3, 9], 1))
case("chunk", SQUARE, lambda x: x.chunk(3, 1))
case("unbind", ((8, 4, 12),), lambda x: x.unbind(1))
case("cat", ((8, 12), (8, 4)), lambda x, y: torch.cat([x, y], 1))
case("stack", ((8, 12), (8, 12)), lambda x, y: torch.stack([x, y], 1))
case("repeat", SQUARE, lambda x: x.repeat(1, 2))
case("mm", ((8, 12), (12, 16)), lambda x, y: x @ y)
case("mm t", ((8, 12), (16, 12)), lambda x, y: x @ y.t())
case("bmm", ((4, 8, 12), (4, 12, 8)), torch.bmm)
case("addmm", ((16,), (8, 12), (12, 16)), torch.addmm)
case("matmul 3-D", ((4, 8, 12), (12, 16)), torch.matmul)
case("linear", ((4, 8, 12), (16, 12)), F.linear)
case("linear bias", ((8, 12), (16, 12), (16,)), F.linear)
case("where", (("mask", (8, 12)), (8, 12), (8, 12)), torch.where)
case("masked_fill", ((8, 12), ("mask", (8, 12))), lambda x, m: x.masked_fill(m, 0.5))
case("tril", SQUARE, torch.tril)
case("gather", ((8, 12), ("index", (8, 4))), lambda x, i: x.gather(1, i))
case("index_select", ((8, 12), ("index", (6,))), lambda x, i: x.index_select(1, i))
case("embedding", (("index", (4, 8)), (8, 12)), F.embedding)
case("to bfloat16", SQUARE, lambda x: x.to(torch.bfloat16))
case("double", SQUARE, lambda x: x.double() * 2)
case("clamp", SQUARE, lambda x: x.clamp(-0.5, 0.5))
case("clamp min", SQUARE, lambda x: x.clamp(min=0.25))
case("lerp", ((8, 12), (8, 12)), lambda x, y: torch.lerp(x, y, 0.3))
case("addcmul", ((8, 12), (8, 12), (8, 12)), lambda x, y, z: torch.addcmul(x, y, z, value=0.5))
case("addcdiv", ((8, 12), (8, 12), (8, 12)), lambda x, y, z: torch.addcdiv(x, y, z * z + 1, value=0.5))
case("flip", SQUARE, lambda x: x.flip(1))
case("new_zeros", SQUARE, lambda x: x.new_zeros(x.shape))
case("full_like", SQUARE, lambda x: torch.full_like(x, 3.0))
case("mse_loss", ((8, 12), (8, 12)), F.mse_loss)
case("foreach_add", ((8, 12), (4, 12)), lambda x, y: torch._foreach_add([x, y], 1.0))
case("foreach_mul", ((8, 12), (8, 12)), lambda x, y: torch._foreach_mul([x], [y]))
case("add out of scalar tensor", SQUARE, lambda x: x + torch.tensor(2.0))
case("float scalar tensor", SQUARE, lambda x: x * torch.tensor(2.0, dtype=torch.float64))
# Writes; the operand is returned as well.
case("add_", ((8, 12), (8, 12)), lambda x, y: [x.add_(y), x])
case("mul_ number", SQUARE, lambda x: [x.mul_(2.0), x])
case("zero_", SQUARE, lambda x: [x.zero_(), x])
case("copy_", ((8, 12), (8, 12)), lambda x, y: [x.copy_(y), x])
case("write to a view", ((8, 3, 4),), lambda x: [x.view(8, 12).mul_(3.0), x])
case("write to a part", SQUARE, lambda x: [x[:, 2:5].add_(1.0), x])
case("clamp_", SQUARE, lambda x: [x.clamp_(0.1, 0.2), x])
case("masked_fill_", ((8, 12), ("mask", (8, 12))), lambda x, m: [x.masked_fill_(m, 1.0), x])
case("out", ((8, 12), (8, 12)), lambda x, y: [torch.add(x, x, out=y), y])
case("foreach_add_", ((8, 12), (8, 12)), lambda x, y: [torch._foreach_add_([x, y], 2.0), x, y])
case("foreach_lerp_", ((8, 12), (8, 12)), lambda x, y: [torch._foreach_lerp_([x], [y], 0.1), x])
# Errors of one device.
case("wrong shapes", ((8, 12), (8, 5)), torch.add)
case("wrong view", SQUARE, lambda x: x.view(7, 3))
case("wrong dim", SQUARE, lambda x: x.sum(5))
WRITING = {name for name in FUNCTIONS if name.endswith("_") or "write" in name or "_ " in name or name == "out"}

MESHES = {"1-D": (4,), "2-D": (2, 2), "3-D": (2, 1, 2)}


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[dict[str, DeviceMesh]]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    extend_dtensor()  # whatever ran before
    yield {name: init_device_mesh("cpu", shape) for name, shape in MESHES.items()}
    dist.destroy_process_group()


def placements_of(num_axes: int) -> list[tuple[Placement, ...]]:
    """The same placement for every operand: on all axes, or on the last one."""
    found = [(p,) * num_axes for p in (Replicate(), Shard(0), Partial())]
    if num_axes > 1:
        found += [(Replicate(),) * (num_axes - 1) + (Shard(1),), (Shard(0),) + (Replicate(),) * (num_axes - 1)]
    else:
        found += [(Shard(1),), (RaggedShard((0,), (1, 1, 0, 2)),), (Partial("avg"),)]
    return found


def made(shape: Any, mesh: DeviceMesh, placements: tuple[Placement, ...], grow: int, seed: int) -> DTensor:
    """A DTensor whose local values are drawn: no communication. ``grow`` is added to the sizes above 1 of dim 0."""
    kind, shape = shape if isinstance(shape[0], str) else ("", shape)
    shape = (max(1, shape[0] + grow) if shape[0] > 1 else 1, *shape[1:]) if len(shape) > 1 else shape
    if any(isinstance(p, Shard) and p.dim >= len(shape) for p in placements):
        placements = tuple(Replicate() for _ in placements)
    if any(isinstance(p, RaggedShard) for p in placements):
        placements = placements if shape[0] % 4 == 0 else (Replicate(),)
    if kind:
        placements = tuple(Replicate() if p.is_partial() else p for p in placements)
    region = own_region(shape, placements, mesh)
    assert region is not None
    local_shape = region.local_shape
    torch.manual_seed(seed)
    local = torch.rand(local_shape) + 0.5
    if kind == "index":
        local = (local * 100).long() % 4
    elif kind == "mask":
        local = local > 1.0
    return make_dtensor(local, make_spec(mesh, placements, shape, contiguous_stride(shape), local.dtype))


@dataclass
class Outcome:
    """What a call gave, as far as one can see it."""

    error: str
    tensors: list[DTensor]
    gradients: list[DTensor | None]
    aliasing: list[bool]


def flat(value: Any) -> list[Any]:
    return [x for item in value for x in flat(item)] if isinstance(value, list | tuple) else [value]


def outcome(function: Callable[..., Any], operands: list[DTensor], with_gradient: bool) -> Outcome:
    leaves = [x.detach().requires_grad_() if with_gradient and x.is_floating_point() else x for x in operands]
    inputs = [x.clone() if x.requires_grad else x for x in leaves]
    try:
        results = flat(function(*inputs))
        tensors = [x for x in results if isinstance(x, torch.Tensor)]
        differentiable = [x for x in tensors if x.requires_grad]
        if differentiable:
            torch.autograd.backward(differentiable, [torch.ones_like(x) for x in differentiable])
    except Exception as error:
        name = type(error).__name__.replace("MixedTensorsError", "RuntimeError")  # which it is, with another text
        return Outcome(f"{name}: {str(error)[:80]}", [], [], [])
    storages = [x.untyped_storage()._cdata for x in (*inputs, *tensors)]
    aliasing = [a == b for a, b in itertools.combinations(storages, 2)]
    return Outcome("", tensors, [x.grad for x in leaves], [*aliasing, *(x._is_view() for x in tensors)])


def strides(x: torch.Tensor) -> list[int]:
    """Those that mean something: of dims with other sizes than 1."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1]


def assert_same(found: Outcome, expected: Outcome, is_defined: bool) -> None:
    assert found.error == expected.error
    assert found.aliasing == expected.aliasing
    for a, b in zip(found.tensors + found.gradients, expected.tensors + expected.gradients, strict=True):
        assert type(a) is type(b)
        if a is None or b is None:
            continue
        assert (a.shape, a.stride(), a.dtype, a.requires_grad) == (b.shape, b.stride(), b.dtype, b.requires_grad)
        if isinstance(a, DTensor):
            assert a._spec == b._spec
            a, b = a._local_tensor, b._local_tensor
        assert (a.shape, strides(a)) == (b.shape, strides(b))
        if is_defined:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("grow", [0, 1, -7], ids=["even", "uneven", "empty"])
def test_ops_equal_pytorchs_path(world: dict[str, DeviceMesh], mesh_name: str, grow: int) -> None:
    mesh = world[mesh_name]
    num_hits = 0
    # Daily, one in twenty.
    drawn = random.Random(f"{mesh_name} {grow}")
    for name, (shapes, function) in FUNCTIONS.items():
        for placements in placements_of(mesh.ndim):
            for with_gradient in (False, True):
                if not NIGHTLY and drawn.random() > 0.05:
                    continue
                operands = lambda: [made(s, mesh, placements, grow, seed) for seed, s in enumerate(shapes)]  # noqa: B023, E731
                with without_native():
                    expected = outcome(function, operands(), with_gradient)
                first = outcome(function, operands(), with_gradient)
                reset_dispatch_counts()
                second = outcome(function, operands(), with_gradient)
                counts = dispatch_counts().values()
                # What fake groups gather is not defined.
                is_defined = not any(hits_of_stock for _, _, _, hits_of_stock in counts)
                num_hits += sum(hits for hits, _, _, _ in counts)
                try:
                    for found in (first, second):
                        assert_same(found, expected, is_defined)
                except AssertionError as error:
                    raise AssertionError(f"{name} on {placements}, with_gradient={with_gradient}: {error}") from error
    assert num_hits > 100


@pytest.mark.parametrize("mesh_name", ["1-D", "2-D"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bias_of_sharded_rows(world: dict[str, DeviceMesh], mesh_name: str, dtype: torch.dtype) -> None:
    """A whole bias becomes equal summands of the pending sum, without PyTorch's path, and with its bits."""
    extend_dtensor()
    mesh = world[mesh_name]
    for rows in (5, 2):
        operands = []
        for shape, placement in (((rows, 12), Shard(1)), ((16, 12), Shard(1)), ((16,), Replicate())):
            placements = (Replicate(),) * (mesh.ndim - 1) + (placement,)
            operands.append(made(shape, mesh, placements, 0, len(operands)).to(dtype))
        with without_native():
            expected = outcome(F.linear, operands, False)
        for _ in range(2):
            reset_dispatch_counts()
            assert not expected.error, expected
            assert_same(outcome(F.linear, operands, False), expected, True)
        counts = dispatch_counts()
        assert not any(stock for _, _, _, stock in counts.values()), counts
        assert sum(hits for hits, _, _, _ in counts.values()) > 0


R, S0, S1 = Replicate(), Shard(0), Shard(1)
# Calls in which a whole operand is needed in parts: shapes, placements on two axes, the function.
PARTS: dict[str, tuple[tuple[Any, ...], tuple[tuple[Placement, ...], ...], Callable[..., Any]]] = {
    "positions": (((4, 8, 6), (1, 8, 6)), ((S0, S1), (R, R)), torch.add),
    "rows of both axes": (((8, 6), (8, 6)), ((S0, S0), (R, R)), torch.mul),
    "the inner axis": (((8, 6), (8, 6)), ((S0, S0), (S0, R)), torch.sub),
    "the outer axis": (((8, 6), (8, 6)), ((S0, S0), (R, S0)), torch.sub),
    "mask": (((4, 8), ("mask", (4, 8)), (4, 8)), ((S0, S1), (R, R), (S0, S1)), lambda x, m, y: torch.where(m, x, y)),
    "matrix": (((6, 8), (8, 4)), ((R, R), (S0, R)), torch.mm),
    "expanded": (((8, 6), (1, 1)), ((S0, S1), (R, R)), lambda x, y: x.mul(y.expand(8, 6))),
    "transposed": (((8, 6), (6, 8)), ((S0, S1), (R, R)), lambda x, y: x.add(y.t())),
    "a term of a pending sum": (((8, 6), (8, 6)), ((S0, Partial()), (R, R)), torch.add),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_whole_operands(world: dict[str, DeviceMesh], name: str) -> None:
    """A rank takes its part of a whole operand without PyTorch's path, which gives the same bits; uneven parts and those of
    an axis whose shards lie inside of others are left to that path."""
    extend_dtensor()
    shapes, placements, function = PARTS[name]
    mesh, native = world["2-D"], 0
    for grow in (0, 4, 1, -6, -3, 8):
        operands = [
            made(x, mesh, p, grow if len(shapes[0]) < 3 else 0, i) for i, (x, p) in enumerate(zip(shapes, placements))
        ]
        with without_native():
            expected = outcome(function, operands, False)
        for _ in range(2):
            reset_dispatch_counts()
            assert_same(outcome(function, operands, False), expected, name != "the outer axis")
        native += not any(stock for _, _, _, stock in dispatch_counts().values())
    assert (native >= 3) != (name == "the outer axis"), native


def test_tables_that_fill_up(world: dict[str, DeviceMesh], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new length has specs of its own; the tables are cleared now and then, also in the middle of a call."""
    monkeypatch.setattr(sharding_caches, "MAX_SPECS", 7)
    mesh, placements = world["1-D"], (Shard(0),)
    for length in range(4, 63):  # shorter ones are gathered on some versions of torch
        shape = (length, 6)
        x, y = (made(shape, mesh, placements, 0, seed) for seed in (0, 1))
        results = torch.split((x + y).view(length, 2, 3) * 2.0, 1, 1)
        expected = ((x.to_local() + y.to_local()).view(-1, 2, 3) * 2.0).split(1, 1)
        for found, local in zip(results, expected, strict=True):
            torch.testing.assert_close(found.to_local(), local, rtol=0, atol=0)
        assert len(INTERNED_SPECS) <= 8


def test_threads_share_decisions(world: dict[str, DeviceMesh]) -> None:
    mesh, failures = world["2-D"], []

    def work(seed: int) -> None:
        try:
            for turn in range(50):
                shape = (4 + turn % 7, 6)
                x = made(shape, mesh, (Shard(0), Replicate()), 0, seed)
                found = ((x * 2 + x).sum(1) - x[:, 0]).to_local()
                local = x.to_local()
                torch.testing.assert_close(found, (local * 2 + local).sum(1) - local[:, 0], rtol=0, atol=0)
                if turn % 10 == seed:
                    clear_sharding_caches()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_no_specs_are_kept_for_equal_calls(world: dict[str, DeviceMesh]) -> None:
    """PyTorch keeps a spec for each step of some optimizers."""
    mesh = world["1-D"]

    def step() -> None:
        x = DTensor.from_local(torch.rand(2, 6), mesh, [Shard(0)], run_check=False)
        torch._foreach_lerp_([x], [x], 0.1)
        (x * 2).sum()

    for _ in range(3):
        step()
    before = len(INTERNED_SPECS), num_entries()
    for _ in range(200):
        step()
    assert (len(INTERNED_SPECS), num_entries()) == before


@pytest.mark.helper("dispatch")
@pytest.mark.parametrize("variable", [("VESCALE_DISPATCH", "stock"), ("VESCALE_NO_NATIVE", "1")])
def test_what_runs_ops_is_decided_once(variable: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that came late switched a part of the helpers off: views of gathered tensors missed writes."""
    install()
    monkeypatch.setenv(*variable)
    uninstall()
    install()
    assert is_native() and native_boundaries() is not None
