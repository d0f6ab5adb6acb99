"""The C++ dispatcher beside PyTorch's contexts: modes, autocast, inference, transforms, profilers, compilers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from tests.compat.test_native_dispatch import world
from vescale.compat import dispatch_counts, extend_dtensor, reset_dispatch_counts
from vescale.compat.native_dispatch import without_native

__all__ = ["world"]  # a fixture

pytestmark = pytest.mark.helper("dispatch")


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    extend_dtensor()


def operands(mesh: DeviceMesh) -> tuple[DTensor, DTensor, DTensor]:
    torch.manual_seed(0)
    x = DTensor.from_local(torch.randn(4, 6, 8), mesh, [Replicate()], run_check=False)
    w, b = (DTensor.from_local(torch.randn(s), mesh, [Shard(0)], run_check=False) for s in ((4, 8), (4,)))
    return x.requires_grad_(), w.requires_grad_(), b.requires_grad_()


def compute(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Composite and single ops, views, numbers, saved results. Nothing moves."""
    y = F.linear(x, w, b).unflatten(-1, (4, 4)).transpose(1, 2)
    y = torch.matmul(y.softmax(-1), (y * 2.0).mT)
    return F.layer_norm(torch.rsqrt(y * y + 0.5), (6,)).tanh()


class Names(TorchDispatchMode):
    """The ops that a mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def step(mesh: DeviceMesh, context: Callable[[], AbstractContextManager[Any]]) -> tuple[list[DTensor], Any]:
    x, w, b = operands(mesh)
    with context() as entered:
        y = compute(x, w, b)
        tensors = [y]
        if y.requires_grad:
            tensors += torch.autograd.grad(y, (x, w, b), torch.ones_like(y))
    return tensors, entered


def assert_same(found: list[DTensor], expected: list[DTensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert type(a) is type(b) is DTensor and a._spec == b._spec and a.requires_grad == b.requires_grad
        assert a.is_inference() == b.is_inference()
        assert torch.equal(a._local_tensor, b._local_tensor)


def both(mesh: DeviceMesh, context: Callable[[], AbstractContextManager[Any]]) -> tuple[Any, Any, int]:
    """What the context saw with C++ and without, and how many ops C++ ran; results are compared."""
    with without_native():
        expected, seen_by_stock = step(mesh, context)
    step(mesh, context)  # decides
    reset_dispatch_counts()
    found, seen = step(mesh, context)
    assert_same(found, expected)
    return seen, seen_by_stock, sum(hits for hits, _, _, _ in dispatch_counts().values())


@pytest.fixture
def mesh(world: dict[str, DeviceMesh]) -> Iterator[DeviceMesh]:
    yield world["1-D"]


def test_no_context(mesh: DeviceMesh) -> None:
    *_, num_ops = both(mesh, nullcontext)
    assert num_ops > 20


@pytest.mark.parametrize("context", [torch.no_grad, lambda: torch.autocast("cpu", dtype=torch.bfloat16)])
def test_grad_mode_and_autocast(mesh: DeviceMesh, context: Callable[[], AbstractContextManager[Any]]) -> None:
    *_, num_ops = both(mesh, context)
    assert num_ops > 10


def test_inference_mode(mesh: DeviceMesh) -> None:
    """There, PyTorch's path does not take composite ops apart: single ops."""
    x, w, _ = operands(mesh)

    def run() -> DTensor:
        with torch.inference_mode():
            own = x.clone()  # PyTorch refuses views of tensors that were made outside
            return torch.rsqrt((own[0] @ w.clone().t()).square() * 2.0 + 0.5).softmax(0).detach()

    with without_native():
        expected = run()
    for _ in range(2):
        assert_same([run()], [expected])


def test_modes_see_every_op(mesh: DeviceMesh) -> None:
    """A mode is in front of DTensors: it sees the ops that PyTorch takes composites apart to."""
    found, expected, _ = both(mesh, Names)
    assert found.seen == expected.seen and any("addmm" in name for name in found.seen)


def test_communication_and_operations_are_counted(mesh: DeviceMesh) -> None:
    found, expected, _ = both(mesh, CommDebugMode)
    assert found.get_comm_counts() == expected.get_comm_counts()
    flops, of_stock, _ = both(mesh, lambda: FlopCounterMode(display=False))
    assert flops.get_total_flops() == of_stock.get_total_flops() > 0


def test_profiler(mesh: DeviceMesh) -> None:
    found, _, num_ops = both(mesh, torch.profiler.profile)
    names = {event.key for event in found.key_averages()}
    assert {"aten::linear", "aten::matmul", "aten::addmm", "aten::tanh"} <= names and num_ops > 20


def test_transforms(mesh: DeviceMesh) -> None:
    """Calls that PyTorch's path refuses are refused alike."""

    def outcome(function: Callable[[], Any]) -> Any:
        try:
            result = function()
        except (RuntimeError, NotImplementedError, TypeError, AssertionError) as error:
            return type(error)
        return [x._local_tensor if isinstance(x, DTensor) else x for x in torch.utils._pytree.tree_leaves(result)]

    x, w, b = (t.detach() for t in operands(mesh))
    calls: list[Callable[[], Any]] = [
        lambda: torch.func.grad(lambda x: compute(x, w, b).sum())(x),
        lambda: torch.func.vjp(lambda x: compute(x, w, b), x)[0],
        lambda: torch.func.jvp(lambda x: F.linear(x, w, b), (x,), (x,)),
        lambda: torch.func.vmap(lambda x: F.linear(x, w, b))(x),
        lambda: torch.autograd.functional.jvp(lambda x: F.linear(x, w, b), x, x),
        lambda: torch.autograd.functional.hvp(lambda w: F.linear(x, w, b).square().sum(), w, w),
    ]
    num_results = 0
    for number, call in enumerate(calls):
        with without_native():
            expected = outcome(call)
        for _ in range(2):
            found = outcome(call)
            if isinstance(expected, list):
                num_results += 1
                assert all(map(torch.equal, found, expected)), number
            else:
                assert issubclass(found, expected), number
    assert num_results > 2


def test_checkpoints(mesh: DeviceMesh) -> None:
    def run(**options: Any) -> list[DTensor]:
        x, w, b = operands(mesh)
        y = checkpoint(compute, x, w, b, use_reentrant=False, **options)
        return [y, *torch.autograd.grad(y, (x, w, b), torch.ones_like(y))]

    selective = lambda: create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])  # noqa: E731
    for options in ({}, {"context_fn": selective}):
        with without_native():
            expected = run(**options)
        assert_same(run(**options), expected)
        assert_same(run(**options), expected)


def test_compiled_functions_of_dtensors(mesh: DeviceMesh) -> None:
    """Of other DTensors than a model's: they are traced as without the dispatcher."""
    x, w, b = operands(mesh)
    torch._dynamo.reset()
    expected = compute(x, w, b)
    compiled = torch.compile(compute, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        found = compiled(x, w, b)
        assert_same([found], [expected])
        gradients = torch.autograd.grad(found, (x, w, b), torch.ones_like(found))
        expected_gradients = torch.autograd.grad(expected, (x, w, b), torch.ones_like(expected), retain_graph=True)
        for a, c in zip(gradients, expected_gradients, strict=True):
            assert a.placements == c.placements and torch.allclose(a._local_tensor, c._local_tensor)
