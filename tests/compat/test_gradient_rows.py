"""Gradients taken and given all at once: the helper and Python do the same, all or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from tests.ranks import RankPools
from vescale import Plan, csrc, parallelize
from vescale.compat import ZEROED, ParameterRow, TensorRow, num_storage_users, spec_of
from vescale.compat import gradient_rows as grads_module

native = pytest.mark.helper("grads")
SHAPES = [(3, 4), (5,), (), (2, 1, 2)]


@pytest.fixture(autouse=True, params=[pytest.param("native", marks=native), "python"])
def side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setenv("VESCALE_NO_NATIVE", "1")
    return str(request.param)


def make(dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], list[torch.Tensor], torch.Tensor]:
    """Parameters with gradients, copies of these, and a flat buffer for them."""
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    flat = torch.full((sum(p.numel() for p in parameters),), 7.0, dtype=dtype)
    return parameters, [parameter.grad.clone() for parameter in parameters], flat


def views_of(flat: torch.Tensor) -> list[torch.Tensor]:
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), SHAPES)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_take(dtype: torch.dtype) -> None:
    parameters, expected, flat = make(dtype)
    assert ParameterRow(parameters).take_grads(TensorRow(views_of(flat)), dtype)
    assert torch.equal(flat, torch.cat([gradient.flatten() for gradient in expected]))
    assert all(parameter.grad is None for parameter in parameters)


def test_take_lets_go_of_the_gradients() -> None:
    parameters, _, flat = make()
    held = [parameter.grad.untyped_storage() for parameter in parameters]
    gradients = [torch.empty(0).set_(storage) for storage in held]  # type: ignore[call-overload]
    before = list(map(num_storage_users, gradients))
    assert ParameterRow(parameters).take_grads(TensorRow(views_of(flat)), torch.float32)
    assert list(map(num_storage_users, gradients)) == [number - 1 for number in before]


def test_a_gradient_that_is_in_its_place() -> None:
    parameters, expected, flat = make()
    views = views_of(flat)
    views[1].copy_(expected[1])
    parameters[1].grad = flat[12:17]
    assert ParameterRow(parameters).take_grads(TensorRow(views), torch.float32)
    assert torch.equal(flat, torch.cat([gradient.flatten() for gradient in expected]))


def test_a_gradient_in_the_place_of_another_is_not_taken() -> None:
    """Which would be written before it is read."""
    parameters, _, flat = make()
    views = views_of(flat)
    parameters[0].grad, before = flat[5:17].view(3, 4), flat.clone()
    assert not ParameterRow(parameters).take_grads(TensorRow(views), torch.float32)
    assert torch.equal(flat, before) and all(parameter.grad is not None for parameter in parameters)


REFUSED: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "none": lambda gradient: None,
    "sparse": lambda gradient: gradient.to_sparse(),
    "dtype": lambda gradient: gradient.double(),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("place", range(len(SHAPES)))
def test_all_or_nothing_is_taken(what: str, place: int) -> None:
    parameters, _, flat = make()
    parameter = parameters[place]
    odd = REFUSED[what](parameter.grad)
    if what == "dtype":
        parameter.grad_dtype = None
    parameter.grad = odd
    before = [parameter.grad for parameter in parameters]
    assert not ParameterRow(parameters).take_grads(TensorRow(views_of(flat)), torch.float32)
    assert all(parameter.grad is gradient for parameter, gradient in zip(parameters, before))
    assert flat.eq(7).all()


UNUSUAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda gradient: gradient.T.contiguous().T,
    "expanded": lambda gradient: torch.zeros(()).expand(gradient.shape),
    "negated": lambda gradient: torch._neg_view(gradient),
    "zero without memory": lambda gradient: torch._efficientzerotensor(gradient.shape),
    "of a graph": lambda gradient: gradient * torch.ones((), requires_grad=True),
    "with an offset": lambda gradient: torch.cat([gradient.new_zeros(1, 4), gradient])[1:],
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_unusual_gradients_are_taken_as_what_they_are(what: str) -> None:
    parameters, expected, flat = make()
    parameters[0].grad = UNUSUAL[what](expected[0])
    expected[0] = parameters[0].grad.detach().clone()
    assert ParameterRow(parameters).take_grads(TensorRow(views_of(flat)), torch.float32)
    assert torch.equal(flat, torch.cat([gradient.flatten() for gradient in expected]))
    assert parameters[0].grad is None


def test_conjugated_gradients() -> None:
    parameters, expected, flat = make(torch.complex64)
    parameters[0].grad = (expected[0] + 2j).conj()
    expected[0] = (expected[0] + 2j).conj().resolve_conj()
    assert ParameterRow(parameters).take_grads(TensorRow(views_of(flat)), torch.complex64)
    assert torch.equal(flat, torch.cat([gradient.flatten() for gradient in expected]))


def test_targets_of_another_dtype() -> None:
    parameters, expected, _ = make(torch.bfloat16)
    wide = torch.zeros(sum(p.numel() for p in parameters))
    assert ParameterRow(parameters).take_grads(TensorRow(views_of(wide)), torch.bfloat16)
    assert torch.equal(wide, torch.cat([gradient.flatten() for gradient in expected]).float())


def test_gradients_of_the_targets_dtype_but_not_of_the_one_asked_for() -> None:
    parameters, _, flat = make()
    assert not ParameterRow(parameters).take_grads(TensorRow(views_of(flat)), torch.bfloat16)
    assert all(parameter.grad is not None for parameter in parameters) and flat.eq(7).all()


def test_give() -> None:
    parameters, expected, _ = make()
    row = TensorRow(expected)
    assert not ParameterRow(parameters).give_grads(row)
    for parameter in parameters[1:]:
        parameter.grad = None
    first = parameters[0].grad
    assert not ParameterRow(parameters).give_grads(row) and parameters[0].grad is first
    assert all(parameter.grad is None for parameter in parameters[1:])
    parameters[0].grad = None
    assert ParameterRow(parameters).give_grads(row)
    assert all(parameter.grad is gradient for parameter, gradient in zip(parameters, expected))


def test_nothing() -> None:
    nobody, nothing = ParameterRow([]), TensorRow([])
    assert nobody.take_grads(nothing, torch.float32) and nobody.give_grads(nothing)


def test_a_parameter_whose_tensor_was_swapped() -> None:
    """What a Python tensor stands for can be exchanged, as ``module.to`` does where it is told to."""
    parameters, _, flat = make()
    row, other = ParameterRow(parameters), nn.Parameter(torch.ones(3, 4))
    assert row.take_grads(TensorRow(views_of(flat)), torch.float32)
    torch.utils.swap_tensors(parameters[0], other)
    results = [torch.ones_like(parameter) for parameter in parameters]
    assert row.give_grads(TensorRow(results))
    assert parameters[0].grad is results[0] and other.grad is None
    assert row.take_grads(TensorRow(views_of(flat)), torch.float32)
    assert flat.eq(1).all() and parameters[0].grad is None


def test_targets_and_results_whose_tensors_were_swapped() -> None:
    """What they stood for before is freed: it must neither be written nor given."""
    parameters, expected, flat = make()
    row, targets = ParameterRow(parameters), TensorRow(views_of(flat))
    assert row.take_grads(targets, torch.float32)
    torch.utils.swap_tensors(targets.tensors[0], torch.zeros(3, 4))
    before = flat.clone()
    for parameter, gradient in zip(parameters, expected):
        parameter.grad = gradient * 2
    assert row.take_grads(targets, torch.float32)
    assert torch.equal(targets.tensors[0], expected[0] * 2) and torch.equal(flat[:12], before[:12])
    torch.utils.swap_tensors(targets.tensors[0], torch.ones(3, 4))
    assert row.give_grads(targets)
    assert parameters[0].grad is targets.tensors[0] and parameters[0].grad.eq(1).all()


@native
def test_the_helper_takes_what_is_usual(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    """That there is no silent fall back."""
    if side == "python":
        return
    monkeypatch.setattr(grads_module, "foreach_copy_", None)
    parameters, _, flat = make()
    assert csrc.load("grads") is not None
    assert ParameterRow(parameters).take_grads(TensorRow(views_of(flat)), torch.float32)


def of_dtensors() -> None:
    """The local tensors of DTensors, and plain gradients among them."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    parallelize(nn.Identity(), Plan(mesh))  # which tells C++ what a DTensor is
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    parameters = [nn.Parameter(DTensor.from_local(value, mesh, [Replicate()])) for value in values[:3]]
    parameters.append(nn.Parameter(values[3]))
    grads = [DTensor.from_local(value.clone(), mesh, [Partial()]) for value in values[:3]]
    specs = [*(grad._spec for grad in grads), None]

    def give(*others: Any) -> ParameterRow:
        for parameter, grad in zip(parameters, (*others, *grads[len(others) :], values[3].clone()), strict=False):
            parameter.grad = grad
        return ParameterRow(parameters, specs)

    flat = torch.zeros(sum(value.numel() for value in values))
    others = [DTensor.from_local(values[0].clone(), mesh, [p]) for p in (Replicate(), Partial())]
    others[1].requires_grad_()
    for other in (None, *others):  # of other placements, and one with a graph
        row = give(other)
        assert not row.take_grads(TensorRow(views_of(flat)), torch.float32)
        assert all(parameter.grad is not None for parameter in parameters[1:]) and not flat.any()
    row = give()
    assert row.take_grads(TensorRow(views_of(flat)), torch.float32)
    assert torch.equal(flat, torch.cat([value.flatten() for value in values]))
    assert all(parameter.grad is None for parameter in parameters)


def with_zero_signs() -> None:
    """C++ replaces -0.0 at the start of a target, and nothing else."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    parallelize(nn.Identity(), Plan(mesh))
    for dtype in sorted(ZEROED, key=str):
        values = [torch.tensor(row, dtype=dtype) for row in ([-0.0, -0.0], [0.0, -0.0], [-1.5, 1.0])]
        parameters = [nn.Parameter(DTensor.from_local(value, mesh, [Replicate()])) for value in values]
        for parameter, value in zip(parameters, values):
            parameter.grad = DTensor.from_local(value.clone(), mesh, [Replicate()])
        flat = torch.full((6,), 7.0, dtype=dtype)
        row = ParameterRow(parameters, [spec_of(x.grad) for x in parameters if isinstance(x.grad, DTensor)])
        targets = TensorRow([part.view(2) for part in flat.split(2)])
        assert row.take_local_grads(targets, zeroes_signs=True)
        assert flat.tolist() == [0.0, 0.0, 0.0, 0.0, -1.5, 1.0]
        assert torch.signbit(flat).tolist() == [False, True, False, True, True, False], dtype


@pytest.mark.helper("dispatch")
def test_zero_signs(ranks: RankPools, side: str) -> None:
    if side == "native":
        ranks.run(with_zero_signs, world_size=1)


def test_dtensors(ranks: RankPools, side: str) -> None:
    ranks.run(on_side, side, world_size=1)


def on_side(side: str) -> None:
    before = os.environ.get("VESCALE_NO_NATIVE", "")
    os.environ["VESCALE_NO_NATIVE"] = "1" if side == "python" else ""
    try:
        of_dtensors()
    finally:
        os.environ["VESCALE_NO_NATIVE"] = before
