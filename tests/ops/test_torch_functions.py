"""Torch functions and modules one by one, in eager and in static mode, over a cut batch and over cut features: losses,
gradients and buffers are those of one device."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.device import device_type
from tests.ops.torch_functions import CASES
from tests.ranks import RankPools
from vescale import Plan, init_mesh, parallelize
from vescale.errors import IndexBoundsError

# Cut features: convolutions and bilinear forms must be cut evenly.
_UNEVEN = ("ce-2d", "bilinear")
# These take rows that a smaller batch does not have.
_OF_ROWS = ("op-embidx", "op-topk0", "op-kthvalue", "op-indexput")


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def steps(model: nn.Module, shape: tuple[int, ...], num_steps: int) -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(1)
    found = []
    for step in range(num_steps):
        model.zero_grad()
        generator = torch.Generator().manual_seed(5 + step)
        loss = model(torch.randn(shape, generator=generator))
        loss.backward()
        values = {"loss": loss, **dict(model.named_buffers())}
        values |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for name, value in values.items():
            found.append((f"{name} of step {step}", whole(value)))
    return found


def equal_to_one_device(names: Sequence[str], axis: str, mode: str, num_rows: int, num_steps: int) -> None:
    warnings.simplefilter("ignore")
    mesh = init_mesh(f"{axis}=2")
    with in_float64():
        for name in names:
            make, shape = CASES[name]
            plan = Plan(mesh)
            plan.shard(*(("<in:x>", Shard(0)) if axis == "dp" else ("(a|b|c).(weight|bias)", Shard(0))))
            models = []
            for _ in range(2):
                torch.manual_seed(0)
                models.append(make())
            if axis == "tp" and not any(hasattr(models[0], layer) for layer in "abc"):
                continue
            shape = (num_rows, *shape[1:])
            parallel = parallelize(models[1], plan, mode=mode)
            for (what, x), (_, y) in zip(
                steps(models[0], shape, num_steps), steps(parallel, shape, num_steps), strict=True
            ):
                torch.testing.assert_close(y, x, rtol=1e-9, atol=1e-11, equal_nan=True, msg=f"{name}: {what}")


def test_a_sample(ranks: RankPools) -> None:
    """Those that failed once, and one in twenty of the others; also where a rank has no row."""
    ranks.run(equal_to_one_device, ["gru", "op-einsum2", "op-clampt", "op-amax"], "dp", "eager", 1, 1, world_size=2)
    failed = (
        "img-fmax gridsample op-cumprod op-quantile op-trace op-cummax op-normal op-distB op-prod pairdist op-distC"
    )
    names = [*failed.split(), *list(CASES)[::20]]
    ranks.run(equal_to_one_device, names, "dp", "eager", 6, 1, world_size=2)
    ranks.run(equal_to_one_device, [n for n in names if n not in _UNEVEN], "tp", "eager", 6, 1, world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "mode", "num_rows"),
    [
        ("dp", "eager", 6),
        ("dp", "eager", 5),
        ("dp", "eager", 1),
        pytest.param("dp", "static", 6, marks=pytest.mark.helper("dispatch")),
        ("tp", "eager", 6),
        pytest.param("tp", "static", 6, marks=pytest.mark.helper("dispatch")),
    ],
)
def test_all(ranks: RankPools, axis: str, mode: str, num_rows: int) -> None:
    left_out = _UNEVEN if axis == "tp" else _OF_ROWS if num_rows < 6 else ()
    names = [name for name in CASES if name not in left_out]
    ranks.run(equal_to_one_device, names, axis, mode, num_rows, 3, world_size=2, timeout=900.0)


class Features(nn.Module):
    """The layers of a case that may be cut; what a script then computes with their outputs is not the model's."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        for name, layer in net.named_children():
            setattr(self, name, layer)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: layer(x) for name, layer in self.named_children()}


class Outputs:
    """Stands for the network in a case's function: its layers are outputs that have been computed."""

    def __init__(self, outputs: dict[str, torch.Tensor]) -> None:
        self.outputs = outputs

    def __getattr__(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: self.outputs[name]


def outside_of_the_model(names: Sequence[str], axis: str) -> None:
    warnings.simplefilter("ignore")
    mesh = init_mesh(f"{axis}=2")
    with in_float64():
        for name in names:
            make, shape = CASES[name]
            results = []
            for on_mesh in (False, True):
                torch.manual_seed(0)
                net = make()
                model: nn.Module = Features(net)
                if on_mesh:
                    entry = ("<in:x>", Shard(0)) if axis == "dp" else ("(a|b).(weight|bias)", Shard(0))
                    model = parallelize(model, Plan(mesh).shard(*entry))
                x = torch.randn(shape, generator=torch.Generator().manual_seed(5))
                loss = net.function(Outputs(model(x)), x)
                loss.backward()
                results.append([whole(loss), *(whole(p.grad) for p in model.parameters() if p.grad is not None)])
            for x, y in zip(*results, strict=True):
                torch.testing.assert_close(y, x, rtol=1e-9, atol=1e-11, equal_nan=True, msg=f"{name}, {axis}")


_RANDOM = ["randn", "normal", "distN", "distB", "distG", "distC", "bernoulli", "multinomial", "gumbel", "randperm"]


def test_a_sample_outside_of_the_model(ranks: RankPools) -> None:
    names = ["op-maskidx", "op-nonzero", "op-indexput", "op-embidx", "op-setitem", "pairdist", "op-cumprod", "ce-sum"]
    for axis in ("dp", "tp"):
        ranks.run(outside_of_the_model, names, axis, world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_all_outside_of_the_model(ranks: RankPools, axis: str) -> None:
    names = [name for name in CASES if name.startswith("op-") and name.removeprefix("op-") not in _RANDOM]
    ranks.run(outside_of_the_model, names, axis, world_size=2, timeout=600.0)


class Scores(nn.Module):
    """A head over classes, cut, and what a function makes of its scores and of labels."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self.head, self.function = nn.Linear(6, 8), function

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(x)
        if self.function == "gather":  # the log-probabilities of given classes
            return scores.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)[1:].mean()
        if self.function == "take_along_dim":
            return scores.take_along_dim(labels.unsqueeze(-1), -1).t().flip(1).sin().mean()
        if self.function == "one_hot":
            return (F.one_hot(labels, 8) * scores).mean()
        return F.embedding(labels, self.head.weight).sin().mean()


def look_up(function: str, mode: str) -> None:
    """Over 3 ranks, 8 classes are cut unevenly."""
    warnings.simplefilter("ignore")
    mesh = init_mesh("tp=3")
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Scores(function).double())
    plan = Plan(mesh).shard("head.(weight|bias)", Shard(0)).shard("<out>", Replicate())
    parallel = parallelize(models[1], plan, mode=mode)
    x, labels = torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 7, 3, 5])
    for _ in range(2):
        losses = [model(x, labels) for model in models[:1]] + [parallel(x, labels)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(whole(losses[1]), losses[0], rtol=1e-12, atol=1e-13)
    for wanted, found in zip(models[0].parameters(), parallel.parameters(), strict=True):
        if wanted.grad is not None:
            torch.testing.assert_close(whole(found.grad), wanted.grad, rtol=1e-12, atol=1e-13)
    if function != "take_along_dim":  # which takes the remainder
        error = (IndexBoundsError, "1 of 4 indices are out of bounds, the first is 9; expected 0..7")
        if device_type() != "cpu":  # an assertion on the device
            error = (RuntimeError, f"{function}: indices out of bounds")
        with pytest.raises(error[0], match=error[1]):
            parallel(x, torch.tensor([0, 7, 9, 5]))


@pytest.mark.parametrize("mode", ["eager", pytest.param("static", marks=pytest.mark.helper("dispatch"))])
@pytest.mark.parametrize("function", ["gather", "take_along_dim", "one_hot", "embedding"])
def test_lookups_over_cut_classes(ranks: RankPools, function: str, mode: str) -> None:
    ranks.run(look_up, function, mode, world_size=3)
