"""Decisions that hold for all sizes are what PyTorch decides for each."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.examples import NIGHTLY
from vescale import Plan, parallelize
from vescale.compat import clear_sharding_caches, make_dtensor, make_spec, native_dispatch, sharding_caches
from vescale.compat.closed_forms import layout_of, local_sizes
from vescale.placements import own_region

aten = torch.ops.aten
SIZES = [1, 2, 3, 4, 4, 5, 6, 8, 8, 8, 12, 16]


class Draw:
    """Draws the operands of one kind of call: placements and dtypes once, sizes and strides for each call."""

    def __init__(self, mesh: DeviceMesh, chance: random.Random) -> None:
        self.mesh, self.chance, self.placed = mesh, chance, dict[str, Any]()
        self.alike = tuple(self.placement() for _ in range(mesh.ndim))

    def placement(self) -> Any:
        if self.mesh.ndim > 2:  # searches for placements take long: most ops take these as they are
            return self.chance.choice([Replicate(), Shard(0)])
        return self.chance.choice(
            [Replicate(), Replicate(), Shard(0), Shard(0), Shard(1), Shard(2), Partial(), Partial("avg")]
        )

    def size(self) -> int:
        return 0 if self.chance.random() < 0.03 else self.chance.choice(SIZES)

    def sizes(self, num_dims: int) -> list[int]:
        return [self.size() for _ in range(num_dims)]

    def once(self, name: str, draw: Callable[[], Any]) -> Any:
        """Something that all calls of the kind share."""
        if name not in self.placed:
            self.placed[name] = draw()
        return self.placed[name]

    def tensor(self, name: str, shape: Any, dtype: torch.dtype | None = None, contiguous: bool = False) -> DTensor:
        shape = tuple(shape)
        placements = self.once(name + " placements", self.placements)
        placements = tuple(Replicate() if isinstance(p, Shard) and p.dim >= len(shape) else p for p in placements)
        dtype = dtype or self.once(name + " dtype", lambda: self.chance.choice([torch.float32] * 3 + [torch.bfloat16]))
        kind = "new" if contiguous else self.chance.choice(["new", "new", "permuted", "gaps", "expanded"])
        order = self.chance.sample(range(len(shape)), len(shape)) if kind == "permuted" else list(range(len(shape)))
        strides, step = [0] * len(shape), 2 if kind == "gaps" else 1
        for dim in reversed(order):
            strides[dim] = step
            step *= max(shape[dim], 1)
        if kind == "expanded" and shape:
            strides[self.chance.randrange(len(shape))] = 0
        return make_dtensor(torch.empty(0, dtype=dtype), make_spec(self.mesh, placements, shape, strides, dtype))

    def placements(self) -> tuple[Any, ...]:
        if self.chance.random() < 0.7:
            return self.alike
        if self.mesh.ndim > 2:
            return self.alike
        return tuple(Replicate() for _ in range(self.mesh.ndim))

    def number(self) -> Any:
        return self.once("number", lambda: self.chance.choice([2, 2.5, True]))

    def broadcast(self, shape: list[int]) -> list[int]:
        """Of the same sizes, or smaller."""
        cut = self.once("cut", lambda: self.chance.choice([0, 0, 0, 1]))
        return [1 if self.chance.random() < 0.2 else size for size in shape][min(cut, len(shape)) :]


def rank(d: Draw, low: int = 1, high: int = 4) -> int:
    return d.once("rank", lambda: d.chance.randint(low, high))


def dim(d: Draw, extra: int = 0, name: str = "dim") -> int:
    return d.once(name, lambda: d.chance.randrange(-rank(d) - extra, rank(d) + extra))


def unary(d: Draw) -> tuple[Any, ...]:
    return (d.tensor("x", d.sizes(rank(d, 0))),)


def binary(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes(rank(d, 0))
    return d.tensor("x", shape), d.tensor("y", d.broadcast(shape))


def ternary(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes(rank(d))
    return d.tensor("m", d.broadcast(shape), torch.bool), d.tensor("x", shape), d.tensor("y", d.broadcast(shape))


def softmax(d: Draw) -> tuple[Any, ...]:
    return d.tensor("x", d.sizes(rank(d))), dim(d), False


def softmax_backward(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes(rank(d))
    x, y = d.tensor("x", shape, torch.float32), d.tensor("y", shape, torch.float32)
    return x, y, dim(d), torch.float32


def reduction(d: Draw) -> tuple[Any, ...]:
    return d.tensor("x", d.sizes(rank(d))), [dim(d)], d.once("keep", lambda: d.chance.random() < 0.5)


def matrices(d: Draw) -> tuple[Any, ...]:
    a, b, c = d.sizes(3)
    wrong = d.chance.random() < 0.05
    return d.tensor("x", (a, b), torch.float32), d.tensor("y", (b + wrong, c), torch.float32)


def batches(d: Draw) -> tuple[Any, ...]:
    n, a, b, c = d.sizes(4)
    return d.tensor("x", (n, a, b), torch.float32), d.tensor("y", (n, b, c), torch.float32)


def added(d: Draw) -> tuple[Any, ...]:
    x, y = matrices(d)
    sizes = [y.shape[1]] if d.once("bias", lambda: d.chance.random() < 0.5) else [x.shape[0], y.shape[1]]
    return d.tensor("b", [1 if d.chance.random() < 0.2 else size for size in sizes], torch.float32), x, y


def bias_of_sharded_rows(d: Draw) -> tuple[Any, ...]:
    """The operand that is whole becomes one summand of as many as ranks have parts of the product."""
    axis = d.once("axis", lambda: d.chance.randrange(d.mesh.ndim))
    rows = d.once("rows", lambda: d.chance.choice([Replicate(), Shard(0)]))
    by_axis = [(Shard(1), Shard(0)) if index == axis else (rows, Replicate()) for index in range(d.mesh.ndim)]
    d.placed["x placements"], d.placed["y placements"] = (tuple(p) for p in zip(*by_axis))
    d.placed["b placements"] = (Replicate(),) * d.mesh.ndim
    return added(d)


def whole_term_of_a_pending_sum(d: Draw) -> tuple[Any, ...]:
    axis = d.once("axis", lambda: d.chance.randrange(d.mesh.ndim))
    d.placed["x placements"] = tuple(Partial() if index == axis else Replicate() for index in range(d.mesh.ndim))
    d.placed["y placements"] = (Replicate(),) * d.mesh.ndim
    return binary(d)


def view(d: Draw) -> tuple[Any, ...]:
    """Dims are joined, and split again. None is empty: there, PyTorch's rule does not end for some sizes."""
    parts = [d.chance.choice(SIZES) for _ in range(rank(d, 2, 4))]
    joins = d.once("joins", lambda: [[d.chance.random() < 0.5 for _ in range(4)] for _ in range(2)])

    def joined(which: list[bool]) -> list[int]:
        found = parts[:1]
        for size, join in zip(parts[1:], which):
            if join:
                found[-1] *= size
            else:
                found.append(size)
        return found

    given, wanted = joined(joins[0]), joined(joins[1])
    if d.once("open", lambda: d.chance.random() < 0.3):
        wanted[0] = -1
    return d.tensor("x", given, contiguous=d.chance.random() < 0.8), wanted


def slices(d: Draw) -> tuple[Any, ...]:
    start, end = d.chance.choice([0, 0, 1, -3]), d.chance.choice([2, 5, -1, 9223372036854775807])
    return d.tensor("x", d.sizes(rank(d))), dim(d), start, end, d.chance.choice([1, 1, 2])


def slices_backward(d: Draw) -> tuple[Any, ...]:
    sizes, where = [size + 2 for size in d.sizes(rank(d))], dim(d)
    cut = list(sizes)
    cut[where] = 2
    return d.tensor("x", cut), sizes, where, 1, 3, 1


def expand(d: Draw) -> tuple[Any, ...]:
    shape = [1 if d.chance.random() < 0.4 else size for size in d.sizes(rank(d))]
    added_dims = d.once("added", lambda: d.chance.randrange(2))
    keep = d.once("keep", lambda: d.chance.random() < 0.3)
    wanted = [-1 if keep else 3 if size == 1 and d.chance.random() < 0.7 else size for size in shape]
    return d.tensor("x", shape), [2] * added_dims + wanted


def cat(d: Draw) -> tuple[Any, ...]:
    shape, where = d.sizes(rank(d)), dim(d)
    other = list(shape)
    other[where] = d.size()
    return [d.tensor("x", shape), d.tensor("y" if d.chance.random() < 0.2 else "x", other)], where


def stack(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes(rank(d))
    return [d.tensor("x", shape), d.tensor("x", shape)], dim(d)


def norm(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes(rank(d, 2))
    weight = d.tensor("w", shape[-1:], torch.float32) if d.once("w", lambda: d.chance.random() < 0.7) else None
    return d.tensor("x", shape, torch.float32), shape[-1:], weight, None, 1e-5


def embedding(d: Draw) -> tuple[Any, ...]:
    return d.tensor("w", d.sizes(2)), d.tensor("i", d.sizes(rank(d, 0, 3)), torch.int64)


def embedding_backward(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes(rank(d, 1, 3))
    return d.tensor("g", [*shape, d.size()]), d.tensor("i", shape, torch.int64), 12, -1, False


def padded(d: Draw) -> tuple[Any, ...]:
    sides = [d.chance.choice([0, 1, 2]), 1, *d.once("more", lambda: d.chance.choice([[], [0, 0]]))]
    return d.tensor("x", d.sizes(rank(d, 2))), sides, d.number()


# By op: the arguments of a call, and those by name.
CASES: list[tuple[Any, Callable[[Draw], tuple[Any, ...]], dict[str, Any]]] = [
    *[(op, unary, {}) for op in (aten.neg.default, aten.exp.default, aten.silu.default, aten.relu_.default)],
    *[(op, unary, {}) for op in (aten.clone.default, aten.alias.default, aten.detach.default, aten.zero_.default)],
    *[(op, unary, {}) for op in (aten.zeros_like.default, aten.ones_like.default, aten.rsqrt.default)],
    (aten.clone.default, unary, {"memory_format": torch.contiguous_format}),
    (aten._to_copy.default, unary, {"dtype": torch.bfloat16}),
    (aten._to_copy.default, unary, {"dtype": torch.bool}),
    *[(op, binary, {}) for op in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.sub.Tensor)],
    *[(op, binary, {}) for op in (aten.maximum.default, aten.lt.Tensor, aten.add_.Tensor)],
    (aten.silu_backward.default, binary, {}),
    (aten.add.Tensor, binary, {"alpha": 2}),
    (aten.add.Tensor, lambda d: (*unary(d), torch.tensor(2.0)), {}),
    (aten.mul.Tensor, lambda d: (*unary(d), torch.tensor(2, dtype=torch.int64)), {}),
    (aten.mul.Scalar, lambda d: (*unary(d), d.number()), {}),
    (aten.div.Scalar, lambda d: (*unary(d), d.number()), {}),
    (aten.pow.Tensor_Scalar, lambda d: (*unary(d), d.number()), {}),
    (aten.gt.Scalar, lambda d: (*unary(d), d.number()), {}),
    (aten.where.self, ternary, {}),
    *[(op, softmax, {}) for op in (aten._softmax.default, aten._log_softmax.default)],
    *[
        (op, softmax_backward, {})
        for op in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
    ],
    *[(op, reduction, {}) for op in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default)],
    *[(op, unary, {}) for op in (aten.sum.default, aten.mean.default)],
    (aten.mm.default, matrices, {}),
    (aten.bmm.default, batches, {}),
    (aten.addmm.default, added, {}),
    (aten.addmm.default, bias_of_sharded_rows, {}),
    *[(op, whole_term_of_a_pending_sum, {}) for op in (aten.add.Tensor, aten.sub.Tensor)],
    (aten.view.default, view, {}),
    (aten.view.default, view, {}),
    (aten._unsafe_view.default, view, {}),
    (aten.t.default, lambda d: (d.tensor("x", d.sizes(rank(d, 0, 2))),), {}),
    (aten.transpose.int, lambda d: (d.tensor("x", d.sizes(rank(d))), dim(d), dim(d, name="other")), {}),
    (
        aten.permute.default,
        lambda d: (d.tensor("x", d.sizes(3)), d.once("p", lambda: d.chance.sample(range(3), 3))),
        {},
    ),
    (aten.unsqueeze.default, lambda d: (d.tensor("x", d.sizes(rank(d))), dim(d)), {}),
    (aten.select.int, lambda d: (d.tensor("x", d.sizes(rank(d))), dim(d), d.chance.randrange(-2, 3)), {}),
    (aten.split.Tensor, lambda d: (d.tensor("x", d.sizes(rank(d))), d.chance.choice([1, 2, 5]), dim(d)), {}),
    (
        aten.split_with_sizes.default,
        lambda d: (d.tensor("x", [6, *d.sizes(2)]), d.chance.choice([[2, 4], [1, 2, 3]]), 0),
        {},
    ),
    (aten.unbind.int, lambda d: (d.tensor("x", d.sizes(rank(d))), dim(d)), {}),
    (aten.slice.Tensor, slices, {}),
    (aten.slice_backward.default, slices_backward, {}),
    (aten.expand.default, expand, {}),
    (aten.cat.default, cat, {}),
    (aten.stack.default, stack, {}),
    (aten.native_layer_norm.default, norm, {}),
    (aten.embedding.default, embedding, {}),
    (aten.embedding_dense_backward.default, embedding_backward, {}),
    (aten.constant_pad_nd.default, padded, {}),
]


@pytest.fixture(scope="module", params=[(4,), (2, 2), (2, 1, 2)], ids=["1-D", "2-D", "3-D"])
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    mesh = init_device_mesh("cpu", request.param, mesh_dim_names=("a", "b", "c")[: len(request.param)])
    parallelize(nn.Linear(2, 2), Plan(mesh))  # from then on, views that PyTorch misjudges are decided otherwise
    clear_sharding_caches()
    yield mesh
    clear_sharding_caches()
    dist.destroy_process_group()


def decide(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As C++ asks: trailing arguments that are the defaults are left out."""
    declared = op._schema.arguments
    while args and not isinstance(args[-1], DTensor) and declared[len(args) - 1].has_default_value():
        if args[-1] != declared[len(args) - 1].default_value:
            break
        args = args[:-1]
    name, _, overload = op.name().partition(".")
    return native_dispatch._decide(name, overload, args, kwargs)


def test_decisions_equal_pytorchs(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a mesh, on another one of the same shape, and on one in which this rank has another place."""
    chance, found, compared, divided = random.Random(str(mesh.shape)), [], 0, 0
    ranks = torch.arange(mesh.size()).view(tuple(mesh.shape))
    names = [f"other {axis}" for axis in range(mesh.ndim)]
    other, flipped = DeviceMesh("cpu", ranks, mesh_dim_names=names), DeviceMesh("cpu", ranks.flip(mesh.ndim - 1))
    meshes = mesh, other, mesh, other, flipped
    known_form, form_key = native_dispatch.known_form, native_dispatch.form_key

    def counting(call: Any) -> Any:
        result = known_form(call)
        if result is not None:
            found.append(str(call.op))
        return result

    monkeypatch.setattr(native_dispatch, "known_form", counting)
    for op, draw, kwargs in CASES:
        for _ in range(20 if NIGHTLY else 3 - max(mesh.ndim - 1, 1)):
            kind = Draw(mesh, chance)
            for number in range(15 if NIGHTLY else 18 // mesh.ndim):
                kind.mesh = meshes[number % len(meshes)]
                args = draw(kind)
                monkeypatch.setattr(native_dispatch, "form_key", lambda *_: None)
                expected = decide(op, args, kwargs)
                monkeypatch.setattr(native_dispatch, "form_key", form_key)
                known, given = len(found), decide(op, args, kwargs)
                compared += 1
                described = f"{op} on {[x._spec if isinstance(x, DTensor) else x for x in args]} {kwargs}"
                assert (given is None) == (expected is None), described
                if given is None:
                    continue
                sized = [(position, tuple(sizes)) for position, sizes in given[1]]
                local = [(position, tuple(sizes)) for position, sizes in expected[1]]
                # Sizes that are local and global ones at once may be given or left out.
                assert sized == local or [tuple(args[position]) for position, _ in sized] == [s for _, s in sized], (
                    described
                )
                assert given[2] == expected[2], described
                divided += bool(given[2]) and len(found) > known
                assert len(given[0]) == len(expected[0]), described
                for (specs, *alias), (wanted, *aliases) in zip(given[0], expected[0]):
                    assert alias == aliases, described
                    assert specs == wanted, described
                    for a, b in zip(specs, wanted):
                        assert a is b, described  # of equal specs, one is kept
    assert len(found) > compared / 4 and divided > 2
    missing = {str(op) for op, _, _ in CASES} - set(found)
    assert len(missing) < len(CASES) / 4 or mesh.ndim > 2, missing


def test_a_cut_dim_that_a_view_drops(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """What describes a cut of one index depends on the other dims: two rows, one token each, were taken for six."""
    form_key = native_dispatch.form_key
    placements = (Shard(1),) if mesh.ndim == 1 else (Shard(0), Shard(1), Shard(1))[: mesh.ndim]
    results: list[dict[Any, Any]] = []
    for key in (lambda *_: None, form_key):
        clear_sharding_caches()
        monkeypatch.setattr(native_dispatch, "form_key", key)
        results.append({})
        for rows, length, last in itertools.product((2, 6, 4, 1, 3), (1, 2, 3), (4, 1)):
            spec = make_spec(mesh, placements, (rows, length, last), (length * last, last, 1), dtype=torch.float32)
            for wanted in ([rows * length, last], [rows, length * last], [rows * length * last]):
                found = decide(aten.view.default, (make_dtensor(torch.empty(0), spec), wanted), {})
                results[-1][spec.shape, *wanted] = found and (found[0], found[1] or ((1, tuple(wanted)),))
    for call, expected in results[0].items():
        assert results[1][call] == expected, call


def test_local_sizes(mesh: DeviceMesh) -> None:
    chance = random.Random(0)
    for _ in range(200):
        shape = [chance.choice([0, 1, 2, 3, 5, 8]) for _ in range(3)]
        placements = tuple(chance.choice([Replicate(), Shard(0), Shard(1), Shard(2)]) for _ in range(mesh.ndim))
        spec = make_spec(mesh, placements, shape, (64, 8, 1), torch.float32)
        region = own_region(torch.Size(shape), placements, mesh)
        assert region is not None
        assert local_sizes(layout_of(spec), shape) == tuple(region.local_shape)


def test_other_rules_than_pytorchs_decide_each_time(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that a program registers may read sizes that PyTorch's does not."""
    kind = Draw(mesh, random.Random(0))
    kind.placed["x placements"] = (Replicate(),) * mesh.ndim
    x = kind.tensor("x", (8, 8))
    key = native_dispatch.form_key(aten.exp.default, (x,), {})
    assert key is not None
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    monkeypatch.setitem(propagator.op_strategy_funcs, aten.exp.default, lambda schema: None)
    monkeypatch.delitem(propagator.op_single_dim_strategy_funcs, aten.exp.default)
    assert native_dispatch.form_key(aten.exp.default, (x,), {}) is None


def test_full_tables_of_sizes_keep_what_holds_for_all(mesh: DeviceMesh) -> None:
    clear_sharding_caches()
    kind = Draw(mesh, random.Random(0))
    kind.placed["x placements"] = (Shard(0),) + (Replicate(),) * (mesh.ndim - 1)
    decide(aten.exp.default, (kind.tensor("x", (8, 8), torch.float32),), {})
    num_forms = len(sharding_caches.FORMS)
    assert num_forms
    sharding_caches.forget_sizes()
    assert len(sharding_caches.FORMS) == num_forms
    assert not sharding_caches.INTERNED_SPECS
    clear_sharding_caches()
    assert not sharding_caches.FORMS
