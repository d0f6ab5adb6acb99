"""torch.compile of models in static mode: their steps run as they are, which a warning says."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.ranks import RankPools
from tests.static.models import compare, mesh_of, same
from tests.static.test_printed import CASES, batch, built
from vescale.static import report

pytestmark = pytest.mark.helper("dispatch")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield mesh_of()
    dist.destroy_process_group()
    torch._dynamo.reset()


def whole(model: nn.Module, backend: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=backend)


def in_place(model: nn.Module, backend: Any) -> Callable[..., Any]:
    model.compile(backend=backend)
    return model


def by_block(model: nn.Module, backend: Any) -> Callable[..., Any]:
    for block in model.children():
        block.compile(backend=backend)
    return model


def steps(name: str, how: Any, backend: str, num_steps: int = 3) -> tuple[int, Any]:
    """Compares with the model that is not compiled. Returns how many graphs there were, and the report."""
    model, plan = CASES[name]
    reference = built(model, plan(mesh_of()))
    compiled = built(model, plan(mesh_of()))
    counter = CompileCounterWithBackend(backend)
    call = how(compiled, counter)
    with warnings.catch_warnings():
        for step in range(num_steps):
            outputs = []
            for owner, run in ((reference, reference), (compiled, call)):
                owner.zero_grad()
                torch.manual_seed(step)
                outputs.append(run(batch(rows=4 + 2 * step, seed=step)))
                outputs[-1].square().mean().backward()
            is_close = torch.allclose(outputs[0].to_local(), outputs[1].to_local(), atol=1e-6)
            assert same(*outputs) if backend == "aot_eager" else is_close
            for (key, p), q in zip(reference.named_parameters(), compiled.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), key
                if p.grad is not None and q.grad is not None:
                    a, b = p.grad.to_local(), q.grad.to_local()
                    assert torch.equal(a, b) if backend == "aot_eager" else torch.allclose(a, b, atol=1e-6), key
    return counter.frame_count, report(compiled)


KINDS = [
    pytest.param("twice", whole, "aot_eager", id="whole"),
    pytest.param("twice", by_block, "aot_eager", id="by block"),
    pytest.param("checkpointed", in_place, "aot_eager", id="in place"),
]


@pytest.mark.parametrize(("name", "how", "backend"), KINDS)
def test_compiled_models_run_as_they_are(mesh: DeviceMesh, name: str, how: Any, backend: str) -> None:
    with pytest.warns(UserWarning, match="torch.compile around .* has no effect"):
        num_graphs, found = steps(name, how, backend)
    assert num_graphs == 0, "something was compiled"
    assert found.static_steps == 2 and not [one for one in found.fallbacks if one.path == ""], found


def compiled_after_steps() -> Any:
    """A model that has run is compiled, and falls back to eager mode for a step, on ranks that exchange numbers."""
    model, plan = CASES["twice"]
    reference, compiled = (built(model, plan(mesh_of())) for _ in range(2))
    for step in range(2):
        compare((reference, compiled), batch(seed=step))
    compiled.compile(backend="aot_eager")
    for step in range(6):
        for one in (reference, compiled):
            one.flag = step >= 3
        compare((reference, compiled), batch(seed=step))
    return report(compiled)


@pytest.mark.slow
def test_on_two_ranks(ranks: RankPools) -> None:
    for found in ranks.run(compiled_after_steps, world_size=2):
        assert found.static_steps >= 2, found
