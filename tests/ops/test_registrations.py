"""The registrations of the op families: for which ops, to which calls handlers apply, and the observer of implicit moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.device import device_type
from vescale import rng
from vescale.compat import OpSchema, make_spec
from vescale.ops import entries, report_implicit_move, running_module
from vescale.placements import RaggedShard, contiguous_stride

aten = torch.ops.aten
S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def test_handlers_are_for_aten_ops_and_functions_for_the_rest() -> None:
    for op, entry in entries().items():
        if entry.handler is not None or entry.applies is not None:
            assert isinstance(op, torch._ops.OpOverload), op
        if entry.function is not None:
            assert callable(op) and not isinstance(op, torch._ops.OpOverload | torch._ops.OpOverloadPacket), op
        if entry.applies is not None:
            assert entry.handler is not None, op


def test_random_ops_have_handlers_of_their_own() -> None:
    random = set(rng.handlers())
    # Also those that nothing has used yet, which torch.ops does not list.
    assert {"aten::rrelu_", "aten::scaled_dot_product_attention", "aten::_sample_dirichlet"} <= {
        op.name() for op in random
    }
    assert aten.native_dropout.default in random
    registered = entries()
    assert all(registered[op].handler is None for op in random & registered.keys() - {aten.native_dropout.default})


@pytest.mark.parametrize(
    ("op", "placements", "arguments", "expected"),
    [
        (aten._log_softmax.default, [S1], (1, False), True),
        (aten._log_softmax.default, [S1], (-1, False), True),
        (aten._log_softmax.default, [S0], (1, False), False),
        (aten._log_softmax.default, [R], (1, False), False),
        (aten._log_softmax.default, [RaggedShard()], (1, False), True),
        (aten._log_softmax_backward_data.default, [S1, S1], (1, torch.float32), True),
        (aten._log_softmax_backward_data.default, [S1, S0], (1, torch.float32), False),
        (aten.linalg_vector_norm.default, [S0], (2,), True),
        (aten.linalg_vector_norm.default, [S0], (2, [1]), False),
        (aten.linalg_vector_norm.default, [S0], (2, [-2]), True),
        (aten.linalg_vector_norm.default, [P], (2, [1]), True),
        (aten.linalg_vector_norm.default, [R], (2,), False),
    ],
)
def test_handlers_apply_where_stock_dtensor_gathers_or_is_wrong(
    mesh: DeviceMesh, op: Any, placements: list[Placement], arguments: tuple[Any, ...], expected: bool
) -> None:
    """The decision depends on specs alone: there are no tensors."""
    shape = (4, 6)
    specs = [make_spec(mesh, [p], shape, contiguous_stride(shape), torch.float32) for p in placements]
    applies = entries()[op].applies
    assert applies(op, OpSchema(op, (*specs, *arguments), {})) is expected


@pytest.mark.parametrize(
    ("x", "index", "source", "expected"),
    [(R, S0, S0, True), (R, R, R, False), (S0, S0, S0, False), (R, P, S0, False), (R, S0, R, True)],
)
def test_scatter_add_applies_to_sharded_indices_of_a_vector_that_every_rank_has(
    mesh: DeviceMesh, x: Placement, index: Placement, source: Placement, expected: bool
) -> None:
    for op in (aten.scatter_add.default, aten.scatter_add_.default):
        a, b, c = (make_spec(mesh, [p], (8,), (1,), torch.float32) for p in (x, index, source))
        assert entries()[op].applies(op, OpSchema(op, (a, 0, b, c), {})) is expected
        matrix = make_spec(mesh, [R], (8, 2), (2, 1), torch.float32)
        assert entries()[op].applies(op, OpSchema(op, (matrix, 0, b, c), {})) is False


def test_moves_outside_of_every_model_are_not_reported() -> None:
    assert running_module() is None
    report_implicit_move("op", "operand", None, [S0], [R])
