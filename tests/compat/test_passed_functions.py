"""Methods and attributes that a model's function mode passes through are not brought to it: with the results, types and
aliases that they have with the mode, and only where it would do nothing."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale import Plan, parallelize
from vescale.compat import filter_functions
from vescale.ops import When

pytestmark = pytest.mark.helper("dispatch")

Call = Callable[[DTensor, DTensor], Any]


class Mode(TorchFunctionMode):
    """Notes what goes to Python, with the filter in front."""

    def __init__(self, when: dict[Any, Any]) -> None:
        super().__init__()
        self.seen: list[str] = []
        filter_functions(self, Mode.__torch_function__, when)

    def __torch_function__(self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    made = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize(torch.nn.Linear(2, 2), Plan(made))  # installs the part `models`
    yield made
    dist.destroy_process_group()


def tensors(mesh: DeviceMesh, placement: Any = None) -> tuple[DTensor, DTensor]:
    torch.manual_seed(0)
    placement = Shard(0) if placement is None else placement
    return tuple(DTensor.from_local(torch.rand(4, 4), mesh, [placement], run_check=False) for _ in range(2))  # type: ignore[return-value]


CALLS: dict[str, Call] = {
    "operators": lambda x, y: (x + y, x - y, x * y, x / (y + 1), -x, x @ x.t(), x < y, x > 0),
    "numbers": lambda x, y: (x + 1, 2 * x, 1 - x, x**2, 1 / (x + 1), x // 2),
    "in place": lambda x, y: (x.add_(y), x.mul_(2.0), x.__iadd__(y), x.zero_()),
    "views": lambda x, y: (
        x.view(-1),
        x.transpose(0, 1),
        x.unsqueeze(1),
        x.t(),
        x.expand(2, -1, -1),
        x[:, 1:3],
        x[1],
        x[..., None],
    ),
    "keywords": lambda x, y: (x.sum(dim=1, keepdim=True), x.to(dtype=torch.float64), x.add(other=y, alpha=2)),
    "attributes": lambda x, y: (x.shape, x.dtype, x.device, x.ndim, x.requires_grad, x.is_leaf, x.grad, x.T, x.is_cuda),
    "reductions": lambda x, y: (x.mean(-1), x.softmax(-1), x.amax(), x.max(1)),
    "metadata": lambda x, y: (
        x.size(),
        x.size(0),
        x.stride(),
        x.numel(),
        x.dim(),
        x.is_contiguous(),
        x.is_floating_point(),
    ),
}


def described(value: Any) -> Any:
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return [described(item) for item in value]
    if isinstance(value, DTensor):
        return (
            type(value).__name__,
            value.placements,
            value.shape,
            value.stride(),
            value.to_local().tolist(),
            value._version,
        )
    return type(value).__name__, value


@pytest.mark.parametrize("name", CALLS)
def test_the_same_with_and_without_the_mode(mesh: DeviceMesh, name: str) -> None:
    plain = described(CALLS[name](*tensors(mesh)))
    mode = Mode({})
    with mode:
        moded = CALLS[name](*tensors(mesh))
    outer, inner = Counting(), Mode({})
    with outer, inner:
        under = CALLS[name](*tensors(mesh))
    assert described(moded) == described(under) == plain and not mode.seen
    assert outer.seen  # a mode of the program below sees every function


def test_what_the_mode_is_for_goes_to_it(mesh: DeviceMesh) -> None:
    x, y = tensors(mesh)
    whole, pending = tensors(mesh, Replicate())[0], tensors(mesh, Partial())[0]
    when = {
        torch.Tensor.mul: When.ALWAYS,
        torch.Tensor.add: When.PARTIAL,
        torch.Tensor.sub: When.NOT_REPLICATE,
        torch.Tensor.__getitem__: When.INDEX,
        torch.Tensor.sum: lambda function, args, kwargs: args[0].placements[0].is_shard(),
    }
    index = torch.tensor([0, 1])
    for call, seen in (
        (lambda: x * y, ["mul"]),
        (lambda: x + y, []),
        (lambda: pending + pending, ["add"]),
        (lambda: whole - whole, []),
        (lambda: x - y, ["sub"]),
        (lambda: whole[:, 1], []),
        (lambda: whole[DTensor.from_local(index, mesh, [Replicate()], run_check=False)], ["__getitem__"]),
        (lambda: x.sum(), ["sum"]),
        (lambda: whole.sum(), []),
    ):
        mode = Mode(when)
        with mode:
            call()
        assert mode.seen == seen, inspect.getsource(call)


def test_plain_tensors_among_dtensors_go_to_the_mode(mesh: DeviceMesh) -> None:
    x, _ = tensors(mesh, Replicate())
    mode = Mode({})
    with mode:
        x * torch.rand(4, 4)
    assert mode.seen == ["mul"]
    mode = Mode({})
    with mode:
        x * torch.tensor(2.0), torch.rand(4) * torch.rand(4)
    assert not mode.seen


def test_switched_off_torch_functions_stay_so(mesh: DeviceMesh) -> None:
    x, y = tensors(mesh)
    mode = Mode({torch.Tensor.mul: When.ALWAYS})
    with mode, torch._C.DisableTorchFunction():
        x * y
    assert not mode.seen
    with mode:
        x + y
        assert torch._C._is_torch_function_enabled() and torch._C._len_torch_function_stack() == 1
        with pytest.raises(RuntimeError):
            x.view(3)
        assert torch._C._is_torch_function_enabled()
        x * y
    assert mode.seen == ["mul"]


def test_the_descriptors_are_not_seen(mesh: DeviceMesh) -> None:
    x, _ = tensors(mesh)
    assert DTensor.add is torch.Tensor.add and DTensor.shape is torch.Tensor.shape  # type: ignore[comparison-overlap]
    assert isinstance(x.add, types.BuiltinMethodType) and x.add.__self__ is x
    assert x.__mul__.__name__ == "__mul__"
    x.requires_grad = True
    assert x.requires_grad
    with pytest.raises(AttributeError):
        x.shape = (1,)  # type: ignore[misc, assignment]


def test_plain_on_the_left_is_the_same_op(mesh: DeviceMesh) -> None:
    """Python asks a subclass for its own method of the right operand first; there are none."""
    own = [name for name in vars(DTensor) if name.startswith("__r") and callable(getattr(torch.Tensor, name, None))]
    assert set(own) <= {"__repr__", "__reduce_ex__", "__reduce__"}
