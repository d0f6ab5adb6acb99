"""``torch.compile`` of functions with our placements: the collectives are in the graph, and so are the waits for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.ops.layouts import assert_same, data, mesh_of, whole
from tests.ranks import RankPools
from vescale.placements import RaggedShard, distribute_tensor

UNEVEN = RaggedShard((0,), (1, 7))

FUNCTIONS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "elementwise": (UNEVEN, lambda x: (x * 2 + x.exp()).clamp(max=3)),
    "reductions": (UNEVEN, lambda x: x.sum() + x.norm(3) + x.amax() + x.var()),
    "full": (RaggedShard((0,), (0, 8)), lambda x: x.full_tensor() + 1),
    "exchange": (UNEVEN, lambda x: x.redistribute(placements=[Shard(1)], async_op=True) * 2),
    "local": (UNEVEN, lambda x: x.to_local().sum() + x.redistribute(placements=[Replicate()]).to_local() * 2),
    "rows": (RaggedShard((0, 1), (20, 28)), lambda x: x[1:5].flatten() * 3),
    "halves": (UNEVEN, lambda x: x.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16)),
}


def compiled(backend: str, names: tuple[str, ...]) -> None:
    mesh = mesh_of((2,))  # one object: specs of an equal one may be cached
    for name in names:
        torch._dynamo.reset()
        placement, fn = FUNCTIONS[name]
        twin: Any = torch.compile(fn, backend=backend)
        for call in range(2):  # the second call runs the graph of the first on other numbers
            values = data(call)
            results = []
            for function in (twin, fn):
                x = distribute_tensor(values, mesh, [placement], src_data_rank=None).requires_grad_()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the backward of a slice gathers
                    y = function(x)
                    whole(y).float().sum().backward()
                results.append((y, x.grad))
            (y, grad), (expected, expected_grad) = results
            assert type(y) is type(expected) and grad.placements == expected_grad.placements
            assert_same(whole(y).detach(), whole(expected).detach())
            assert_same(grad, expected_grad.full_tensor())
    torch._dynamo.reset()

    def pending(local: torch.Tensor) -> torch.Tensor:
        placed = DTensor.from_local(local, mesh, [Partial("avg")], shape=local.shape, stride=local.stride())
        return placed.redistribute(placements=[UNEVEN]).to_local()

    twin = torch.compile(pending, backend=backend)
    for call in range(2):
        local = data(10 * call + dist.get_rank())
        torch.testing.assert_close(twin(local), pending(local))
    torch._dynamo.reset()


SOME = ("reductions", "exchange", "rows")
OTHERS = ("full", "local", "elementwise", "halves")


@pytest.mark.parametrize(
    ("backend", "names"),
    [
        pytest.param("eager", SOME, id="eager"),
        pytest.param("aot_eager", (*SOME, *OTHERS[:2]), id="aot_eager"),
        pytest.param("aot_eager", OTHERS[2:], id="aot_eager, others"),
    ],
)
def test_compiled_functions(ranks: RankPools, backend: str, names: tuple[str, ...]) -> None:
    ranks.run(compiled, backend, names, world_size=2)
