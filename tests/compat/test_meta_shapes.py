"""What ops give on meta tensors is what they give on PyTorch's fake tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from tests.compat.test_exact_matches import DTYPES, OPS
from vescale import ops
from vescale.compat import meta_shapes
from vescale.compat.meta_shapes import meta_of_result, result_on_meta

aten = torch.ops.aten

MORE: list[tuple[Any, list[tuple[int, ...]], tuple[Any, ...]]] = [
    (aten.add.Tensor, [(8, 4), ()], ({}, {})),
    (aten.mul.Tensor, [(1, 4, 1), (8, 1, 6)], ({}, {})),
    (aten.view.default, [(8, 4)], ({}, [4, 2, 4])),
    (aten.expand.default, [(8, 1)], ({}, [3, 8, 5])),
    (aten.split.Tensor, [(8, 4)], ({}, 3, 1)),
    (aten.equal.default, [(8, 4), (8, 4)], ({}, {})),
    (aten.unbind.int, [(8, 4)], ({}, 1)),
    (aten.select.int, [(8, 4)], ({}, 0, 2)),
    (aten.clone.default, [(8, 4, 6)], ({},)),
    (aten.baddbmm.default, [(2, 3, 5), (2, 3, 4), (2, 4, 5)], ({}, {}, {})),
    (aten._log_softmax.default, [(8, 4)], ({}, 0, False)),
    (
        aten.native_layer_norm_backward.default,
        [(8, 6), (8, 6), (8, 1), (8, 1), (6,), (6,)],
        ({}, {}, [6], {}, {}, {}, {}, [True, False, True]),
    ),
]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def draw(op: Any, position: int, shape: tuple[int, ...], mesh: DeviceMesh, chance: random.Random) -> DTensorSpec:
    """Of any layout in memory and dtype."""
    dtype = DTYPES.get((op, position)) or chance.choice([torch.float32] * 3 + [torch.bfloat16])
    order = chance.sample(range(len(shape)), len(shape))
    tensor = torch.empty([shape[dim] for dim in order], dtype=dtype, device="meta")
    tensor = tensor.permute([order.index(dim) for dim in range(len(shape))])
    assert tensor.shape == shape
    return DTensorSpec(mesh, (Replicate(),), tensor_meta=TensorMeta(tensor.shape, tensor.stride(), tensor.dtype))


def test_shapes_strides_and_dtypes_are_those_of_fake_tensors(mesh: DeviceMesh) -> None:
    ops.install()
    propagator = DTensor._op_dispatcher.sharding_propagator
    found = type(propagator)._propagate_tensor_meta_non_cached
    chance = random.Random(0)
    compared = 0
    for op, shapes, arguments in OPS + MORE:
        for _ in range(8):
            left = iter(draw(op, position, shape, mesh, chance) for position, shape in enumerate(shapes))
            args = tuple(
                [next(left) for _ in a] if isinstance(a, list) and a and a[0] == {} else next(left) if a == {} else a
                for a in arguments
            )
            schema = OpSchema(op, args, {})
            try:
                expected = found.__wrapped__(propagator, schema)
            except Exception as error:
                with pytest.raises(Exception, match=r".") as caught:
                    found(propagator, schema)
                assert type(caught.value) is type(error), schema
                continue
            assert found(propagator, schema) == expected, schema
            compared += 1
    assert compared > 4 * len(OPS + MORE)


def test_what_tells_calls_apart() -> None:
    """Results are kept: equal numbers of another type, and another default dtype, are other calls."""
    x = torch.empty(2, 3, dtype=torch.int32, device="meta")
    of_x = TensorMeta(x.shape, x.stride(), x.dtype)
    before = torch.get_default_dtype()
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            for number in (1, True, 1.0, 1, 1 + 0j):
                found = meta_of_result(aten.add.Tensor, (of_x, number), {})
                assert found.dtype == (x + number).dtype, (dtype, number)
            assert meta_of_result(aten.mean.default, (of_x,), {"dtype": torch.float64}).dtype is torch.float64
        finally:
            torch.set_default_dtype(before)
    pieces = meta_of_result(aten.split.Tensor, (of_x, 2, 1), {})
    pieces.clear()  # the caller's own
    assert len(meta_of_result(aten.split.Tensor, (of_x, 2, 1), {})) == 2


def test_results_on_meta() -> None:
    """New tensors are made like those of an earlier call, without the op's kernel; views and writes run as before."""
    x, bias = torch.empty(4, 2, 6, device="meta").transpose(0, 1), torch.empty(6, device="meta")
    numbers, mean = torch.empty(4, dtype=torch.int64, device="meta"), torch.empty(2, 4, 1, device="meta")
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (aten.native_layer_norm.default, (x, [6], bias, None, 1e-5), {}),
        (aten.native_layer_norm_backward.default, (x, x, [6], mean, mean, bias, bias, [True, False, True]), {}),
        (aten.gelu.default, (x,), {"approximate": "tanh"}),
        (aten.cat.default, ([x, x], 1), {}),
        (aten._to_copy.default, (x,), {"dtype": torch.bfloat16}),
        (aten.add.Tensor, (x, 2), {"alpha": 3}),
        (aten.embedding.default, (x[0], numbers), {}),
    ]
    for op, args, kwargs in calls:
        expected = tree_leaves(op(*args, **kwargs))
        found = tree_leaves(result_on_meta(op, args, kwargs))
        before = meta_shapes._run_once.cache_info().hits
        again = tree_leaves(result_on_meta(op, args, kwargs))
        assert meta_shapes._run_once.cache_info().hits == before + 1, op
        for results in (found, again):
            for result, like in zip(results, expected, strict=True):
                assert repr(result) == repr(like) and (like is None or result.stride() == like.stride()), op
        assert found[0].untyped_storage()._cdata != again[0].untyped_storage()._cdata
    for op, args in (
        (aten.view.default, (bias, [3, 2])),
        (aten._unsafe_view.default, (bias, [2, 3])),
        (aten.mul_.Tensor, (x, x)),
    ):
        assert result_on_meta(op, args, {}).untyped_storage()._cdata == args[0].untyped_storage()._cdata, op
    assert result_on_meta(aten.mul.Tensor, (torch.ones(2), 3.0), {}).tolist() == [3.0, 3.0]
