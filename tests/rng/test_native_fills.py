"""The C++ kernels of random ops: the bits and the generator state of one device, and nothing of Python on a call."""

from __future__ import annotations

import copy
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.device import device_type
from tests.examples import NIGHTLY
from tests.rng import cases
from vescale import csrc, rng
from vescale.compat import clear_sharding_caches, local_of, make_dtensor, make_spec
from vescale.compat.native_dispatch import write_through_python
from vescale.compat.patching import HOOKS, Changes, undo
from vescale.compat.random_ops import count_forward
from vescale.placements import RaggedShard, local_region
from vescale.rng import _enable as _native_parts
from vescale.rng import _op_handlers
from vescale.rng._engine import fill_region
from vescale.rng._random_ops import Fill, RandomOp

pytestmark = pytest.mark.helper("random_fills")

MESHES: list[tuple[int, ...]] = [(1,), (3,), (8,), (2, 3), (4, 1), (2, 2, 2)]


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    warnings.filterwarnings("ignore", message=".*out of bounds.*")
    rng.disable()  # a pipeline that another test has run leaves random ops to Python
    rng.enable()
    yield
    rng.disable()


class _Mesh:
    """A mesh as one of its ranks sees it, without the others."""

    def __init__(self, shape: tuple[int, ...], rank: int) -> None:
        self.shape, self.rank = shape, rank

    def __enter__(self) -> DeviceMesh:
        size = torch.Size(self.shape).numel()
        clear_sharding_caches()  # of specs on an equal mesh, as another rank sees it
        dist.init_process_group("fake", rank=self.rank, world_size=size, store=FakeStore())
        return init_device_mesh(device_type(), self.shape)

    def __exit__(self, *_: Any) -> None:
        dist.destroy_process_group()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with _Mesh((4,), 1) as made:
        yield made


def placed(whole: Tensor, mesh: DeviceMesh, placements: Any) -> DTensor:
    """The DTensor of a whole tensor, with a local tensor of its own that has the memory order of the whole one."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    region = local_region(tuple(whole.shape), placements, tuple(mesh.shape), tuple(coordinate))
    local = cases.part_of(whole.detach(), region)
    if region.flat is None:
        order = sorted(range(whole.ndim), key=lambda dim: -whole.stride(dim))
        inverse = sorted(range(whole.ndim), key=order.__getitem__)
        local = local.permute(order).contiguous().permute(inverse)
    spec = make_spec(mesh, placements, whole.shape, whole.stride(), whole.dtype)
    return make_dtensor(local.clone() if local.is_contiguous() else local, spec)


def expect_part(result: DTensor, expected: Tensor) -> None:
    mesh = result.device_mesh
    region = local_region(
        tuple(expected.shape), result.placements, tuple(mesh.shape), tuple(mesh.get_coordinate() or ())
    )
    assert torch.equal(local_of(result).detach(), cases.part_of(expected.detach(), region)), "values"
    assert (result.shape, result.dtype, result.stride()) == (expected.shape, expected.dtype, expected.stride())
    assert result.requires_grad == expected.requires_grad


@pytest.fixture
def handled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fills that Python has run."""
    found: list[str] = []
    original = _op_handlers.fill

    def fill(dtensor: DTensor, op: RandomOp, *args: Any) -> None:
        found.append(op.name)
        original(dtensor, op, *args)

    monkeypatch.setattr(_op_handlers, "fill", fill)
    return found


@pytest.mark.parametrize("name", cases.OPS)
def test_in_place_fills(name: str, handled: list[str]) -> None:
    """Ops x dtypes x shapes x memory orders x placements x meshes, for random ranks: small tensors, and long runs."""
    draw = random.Random(name)
    op = cases.OPS[name]
    for number in range(60):
        shape = MESHES[number % len(MESHES)]
        with _Mesh(shape, draw.randrange(torch.Size(shape).numel())) as mesh:
            sizes = cases.random_shape(draw) if number % 3 else (draw.choice((3, 40)), draw.choice((1100, 2500)), 3)
            order = cases.random_memory_order(draw, len(sizes))
            whole = cases.empty_in_order(sizes, order, draw.choice(cases.DTYPES.get(name, cases.FLOATS)))
            placements: list[Placement] = [draw.choice((Replicate(), Shard(0), Shard(len(sizes) - 1))) for _ in shape]
            if number % 10 == 9:
                placements[0] = RaggedShard()
            start = cases.used_generator(draw)
            dtensor, generator = placed(whole, mesh, placements), cases.clone_of(start)
            op.fill(whole, start)
            op.fill(dtensor, generator)
            expect_part(dtensor, whole)
            assert torch.equal(generator.get_state(), start.get_state()), "generator state"
    # Pairs of normals, holes between dims and the like are left to Python.
    assert len(handled) < (60 if op.name == "log_normal_" else 25)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "rand_like": torch.rand_like,
    "rand_like dtype": lambda x: torch.rand_like(x, dtype=x.dtype),
    "rand_like other dtype": lambda x: torch.rand_like(x, dtype=torch.float64),
    "randn_like": torch.randn_like,
    "dropout": lambda x: F.dropout(x, 0.2),
    "dropout 0": lambda x: F.dropout(x, 0.0),
    "dropout 1": lambda x: F.dropout(x, 1.0),
    "dropout eval": lambda x: F.dropout(x, 0.5, training=False),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.2, inplace=True),
    "module": torch.nn.Dropout(0.4),
    "native_dropout": lambda x: torch.native_dropout(x, 0.2, True),
    "native_dropout 1": lambda x: torch.native_dropout(x, 1.0, True),
    "native_dropout eval": lambda x: torch.native_dropout(x, 0.2, False),
    "bernoulli_": lambda x: torch.empty_like(x, dtype=torch.bool).bernoulli_(0.3),
    "two in turn": lambda x: F.dropout(torch.rand_like(x).normal_(), 0.1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_functions(dtype: torch.dtype) -> None:
    """Values, generator state, shape, strides, dtype and requires_grad; second calls come from the table."""
    placements: list[list[Placement]] = [
        [Replicate(), Replicate()], [Shard(0), Replicate()], [Shard(0), Shard(1)], [Shard(1), Shard(1)]
    ]  # fmt: skip
    for rank in range(6) if NIGHTLY else (0, 5):
        with _Mesh((2, 3), rank) as mesh:
            for number, (name, function) in enumerate(FUNCTIONS.items()):
                for shape in ((32, 32), (7, 5), (2, 4, 3)):
                    whole = torch.randn(shape, dtype=dtype)
                    for where in placements:
                        dtensor = placed(whole, mesh, where)
                        for _ in range(2):
                            torch.manual_seed(number)
                            expected = function(whole)
                            state = torch.get_rng_state()
                            torch.manual_seed(number)
                            found = function(dtensor)
                            assert torch.equal(torch.get_rng_state(), state), name
                            for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected))):
                                expect_part(a, b)


@pytest.mark.parametrize("where", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_a_known_call_does_not_enter_python(mesh: DeviceMesh, where: Placement) -> None:
    """No handler, no decision, no get_state(): the interpreter calls nothing but the op. As in a forward: outside of it, the
    checks are told."""
    dtensor = placed(torch.ones(32, 32), mesh, [where])
    calls: list[Any] = []

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            calls.append(frame.f_code.co_name if event == "call" else argument.__name__)

    for call, name in (
        (dtensor.uniform_, "uniform_"),
        (dtensor.normal_, "normal_"),
        (lambda: dtensor.bernoulli_(0.5), "bernoulli_"),
        (lambda: torch.rand_like(dtensor), "rand_like"),
        (lambda: torch.dropout(dtensor, 0.1, True), "dropout"),
        (lambda: torch.native_dropout(dtensor, 0.1, True), "native_dropout"),
    ):
        call()
        calls.clear()
        count_forward(1)
        sys.setprofile(watch)
        try:
            call()
        finally:
            sys.setprofile(None)
            count_forward(-1)
        assert [one for one in calls if one not in ("<lambda>", "setprofile")] in ([name], []), calls


def test_nothing_of_the_global_size_is_drawn_or_allocated() -> None:
    """The last of 4,096 ranks, of a tensor of 16 GiB: the numbers of the Python engine, after a jump."""
    with _Mesh((4096,), 4095) as mesh:
        spec = make_spec(mesh, [Shard(0)], (2**32,), (1,), torch.float32)
        dtensor = make_dtensor(torch.empty(2**20), spec)
        torch.manual_seed(5)
        dtensor.uniform_()
        state = torch.get_rng_state()
        torch.manual_seed(5)
        region = local_region((2**32,), [Shard(0)], (4096,), (4095,))
        expected = torch.empty(2**20)
        fill_region(expected, Fill(RandomOp("uniform_", (0.0, 1.0)), region, (1,)))
        assert torch.equal(local_of(dtensor), expected)
        assert torch.equal(torch.get_rng_state(), state)


def test_thin_shards_draw_their_own_elements_only(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of each row: the native op is called for the elements of the rank, a block of words at a time."""
    whole = torch.empty(3000, 4)
    dtensor = placed(whole, mesh, [Shard(1)])
    torch.manual_seed(0)
    dtensor.bernoulli_(0.5)
    torch.manual_seed(0)
    expect_part(dtensor, whole.bernoulli_(0.5))
    with torch.profiler.profile() as profile:
        dtensor.bernoulli_(0.5)
    calls = sum(event.name == "aten::bernoulli_" for event in profile.events())
    assert calls <= 1 + -(-3000 // 312)  # of 3,000 elements, 312 to a block


def test_gradients_of_dropout(mesh: DeviceMesh) -> None:
    whole = torch.randn(8, 6, requires_grad=True)
    for where in (Replicate(), Shard(0), Shard(1)):
        leaf = placed(whole, mesh, [where]).requires_grad_()
        results = []
        for x in (whole, leaf):
            torch.manual_seed(1)
            y = F.dropout(x, 0.3)
            (first,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad((first * first).sum(), x)
            results.append((y, first, second))
        for expected, found in zip(*results):
            expect_part(found, expected)


@pytest.mark.parametrize("rank", [0, 3])
def test_errors_are_those_of_the_op_on_every_rank(rank: int) -> None:
    """Also on a rank without elements; the generator stays as it was."""
    with _Mesh((4,), rank) as mesh:
        dtensor = placed(torch.ones(3, 2), mesh, [Shard(0)])
        state = torch.get_rng_state()
        for call in (
            lambda x: x.bernoulli_(1.5),
            lambda x: x.uniform_(2, 1),
            lambda x: x.normal_(0, -1),
            lambda x: F.dropout(x, 1.5),
            lambda x: torch.dropout(x, -0.1, True),
            lambda x: torch.native_dropout(x, 1.5, True),
        ):
            with pytest.raises((RuntimeError, ValueError)) as expected:
                call(torch.ones(3, 2))
            torch.set_rng_state(state)
            with pytest.raises(type(expected.value), match=re.escape(str(expected.value).split("\n")[0][:30])):
                call(dtensor)
            assert torch.equal(torch.get_rng_state(), state)


def test_what_is_not_for_the_kernels(mesh: DeviceMesh, handled: list[str]) -> None:
    """Modes, fake and meta tensors, other subclasses and plain tensors: as without the kernels."""
    dtensor = placed(torch.ones(8, 8), mesh, [Shard(0)])
    with CommDebugMode():
        dtensor.uniform_()
    assert handled.pop() == "uniform_"
    state = torch.get_rng_state()
    meta = make_dtensor(torch.empty(2, 8, device="meta"), make_spec(mesh, [Shard(0)], (8, 8), (8, 1), torch.float32))
    assert meta.uniform_().is_meta
    assert F.dropout(meta, 0.5).is_meta
    with FakeTensorMode():
        F.dropout(torch.empty(3), 0.5)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(RuntimeError, match="terms of a pending sum cannot be drawn separately"):
        make_dtensor(torch.ones(4), make_spec(mesh, [Partial()], (4,), (1,), torch.float32)).uniform_()
    torch.manual_seed(0)
    expected = F.dropout(torch.ones(9), 0.5)
    torch.manual_seed(0)
    assert torch.equal(torch.vmap(lambda x: F.dropout(x, 0.5), randomness="different")(torch.ones(1, 9))[0], expected)
    with torch.inference_mode():
        torch.manual_seed(0)
        expected = F.dropout(torch.ones(8, 8), 0.5)
        torch.manual_seed(0)
        expect_part(F.dropout(dtensor.fill_(1.0), 0.5), expected)


def test_writes_are_told_while_copies_are_viewed(
    mesh: DeviceMesh, handled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = SimpleNamespace(wrote=lambda tensor: handled.append("told"), draws=lambda *_: None)
    copies = {1}
    models = SimpleNamespace(view_copies=copies, handlers={}, listener=listener)
    dtensor = placed(torch.ones(8, 8), mesh, [Shard(0)])
    dtensor.uniform_()
    monkeypatch.setitem(HOOKS, "models", models)
    changes = Changes()
    write_through_python(changes, copies)
    try:
        dtensor.uniform_()
        assert handled == ["uniform_", "told"]
        copies.clear()
        dtensor.uniform_()
        assert handled == ["uniform_", "told"]
        copies.add(2)
    finally:
        undo(changes)
    dtensor.uniform_()
    assert handled == ["uniform_", "told"]


def test_another_local_tensor_is_noticed(mesh: DeviceMesh) -> None:
    """The table is by spec; the local tensor may be replaced by one with other strides."""
    whole = torch.empty(8, 8)
    dtensor = placed(whole, mesh, [Shard(0)])
    dtensor.uniform_()
    dtensor._local_tensor = torch.empty(8, 2).t()
    torch.manual_seed(2)
    dtensor.uniform_()
    torch.manual_seed(2)
    assert torch.equal(local_of(dtensor), whole.uniform_()[2:4])


def test_versions_and_tables(mesh: DeviceMesh) -> None:
    """A fill is a write; specs that are made anew do not stay."""
    dtensor = placed(torch.ones(32, 32), mesh, [Shard(0)])
    versions = dtensor._version, local_of(dtensor)._version
    dtensor.uniform_()
    assert dtensor._version == versions[0] + 1 and local_of(dtensor)._version > versions[1]
    decided = _native_parts._part.cache_info().misses
    for _ in range(600):
        made = placed(torch.empty(32, 32), mesh, [Shard(0)])
        made._spec = copy.copy(made._spec)  # vescale shares equal specs, PyTorch does not
        made.uniform_()
    assert _native_parts._part.cache_info().misses <= decided + 1


def test_without_the_helper(mesh: DeviceMesh, handled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits and states; and taken back, the kernels are gone."""
    found = []
    for switch in ("0", "1"):
        rng.disable()
        monkeypatch.setenv("VESCALE_NO_NATIVE", switch)
        rng.enable()
        handled.clear()
        results = []
        for name, function in FUNCTIONS.items():
            torch.manual_seed(len(name))
            result = function(placed(torch.ones(7, 5), mesh, [Shard(0)]))
            results += [local_of(x).clone() for x in (result if isinstance(result, tuple) else (result,))]
            results.append(torch.get_rng_state())
        found.append(results)
        assert bool(handled) == (switch == "1") or len(handled) < 4
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    rng.disable()
    names = [("aten::uniform_", "Python"), ("aten::dropout", "PythonTLSSnapshot")]
    kernels = [torch._C._dispatch_dump(name) for name, _ in names]
    assert not any("registered at vescale" in dump for dump in kernels)
    assert csrc.load_module("random_fills") is None
