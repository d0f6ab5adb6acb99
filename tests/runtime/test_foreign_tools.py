"""Tools around a parallelized model: each works, or raises our error with the edit."""

from __future__ import annotations

import copy
import io
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import DataParallelMeshDims, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from tests.device import device_type
from tests.ranks import RankPools
from tests.runtime.llama import make_mesh
from vescale import parallelize
from vescale.debug._watchdog import HangWatch
from vescale.errors import DTensorStorageError, FullyShardError, OpPlacementError
from vescale.plans import Plan, PlanError
from vescale.rng import deferred_init
from vescale.runtime._missing_values import MissingValuesWarning

REFUSED: dict[str, tuple[Callable[[nn.Module, torch.Tensor], Any], str]] = {
    "DDP": (
        lambda m, x: DistributedDataParallel(m),
        "DistributedDataParallel of a parallelized.*call the model directly",
    ),
    "FSDP2": (lambda m, x: fully_shard(m), "fully_shard of a parallelized.*let the plan shard parameters"),
    "FSDP2 of a part": (lambda m, x: fully_shard(m[0]), "fully_shard of a parallelized"),
    "FSDP2 around": (lambda m, x: fully_shard(nn.Sequential(m, nn.Linear(4, 4))), "fully_shard of a parallelized"),
    "script of a part": (lambda m, x: torch.jit.script(m[0]), "torch.jit.script of a parallelized"),
    "script": (lambda m, x: torch.jit.script(m), "torch.jit.script of a parallelized"),
    "trace": (lambda m, x: torch.jit.trace(m, x), "torch.jit.trace of a parallelized.*single-device model"),
    "export": (lambda m, x: torch.export.export(m, (x,)), "torch.export of a parallelized.*single-device model"),
    "export around": (lambda m, x: torch.export.export(nn.Sequential(m), (x,)), "torch.export of a parallelized"),
    "export of a part": (lambda m, x: torch.export.export(m[0], (x,)), "torch.export of a parallelized"),
    "strict export": (
        lambda m, x: torch.export.export(mod=m, args=(x,), strict=True),
        "torch.export of a parallelized",
    ),
    "draft export": (lambda m, x: torch.export.draft_export(m, (x,)), "torch.export of a parallelized"),
    "trace of a part": (
        lambda m, x: torch.jit.trace(m[0], x),
        "torch.jit.trace of a parallelized.*single-device model",
    ),
    "trace of a function": (
        lambda m, x: torch.jit.trace(lambda y: m(y), x),
        "torch.jit.trace of a parallelized.*single-device model",
    ),
    "bfloat16": (lambda m, x: m.bfloat16(), r"cannot be moved or converted after parallelize.*plan\.precision"),
}


def plan_of(mesh: Any) -> Plan:
    plan = Plan(mesh).shard("0.(weight|bias)", Shard(0)).shard("2.weight", Shard(1))
    return plan.shard("0.<in>", Replicate()).shard("2.<out>", Shard(0))


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def tools() -> None:
    mesh, x = make_mesh(tp=2), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    model = parallelize(plain(), plan_of(mesh), strict=True)
    expected = plain()(x)
    for tried in (model, copy.deepcopy(model)):  # a copy has its own
        for name, (use, message) in REFUSED.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of jit's deprecation
                with pytest.raises(PlanError, match=message):
                    use(tried, x)
            torch.testing.assert_close(tried(x).full_tensor(), expected, msg=name)
    for use in (
        lambda m: m.share_memory(),
        lambda m: FullyShardedDataParallel(m, device_id=torch.device(device_type())),
    ):
        with pytest.raises(
            DTensorStorageError, match=r"to_local\(\)\.share_memory_\(\).*remove FullyShardedDataParallel"
        ):
            use(parallelize(plain(), plan_of(mesh)))
    assert model[0].weight.is_shared() == (device_type() != "cpu")  # as PyTorch says of all memory of a device
    with pytest.raises(TypeError, match=r"cannot be pickled.*save model\.state_dict"):
        torch.save(model, io.BytesIO())
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=False)
    assert all(isinstance(value, DTensor) for value in state.values())
    assert model.to(device_type()) is model and model.float() is model  # nothing to do
    again = parallelize(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).requires_grad_(True), plan_of(mesh)
    )
    again.load_state_dict(state)
    torch.testing.assert_close(again(x).full_tensor(), expected)


def test_tools(ranks: RankPools) -> None:
    ranks.run(tools, world_size=2)


def wrapper_around_a_part() -> None:
    watch = HangWatch(60.0)
    try:
        with pytest.raises(
            OpPlacementError, match=r"Wrappers that broadcast parameters .*parallelize the whole module"
        ):
            DistributedDataParallel(nn.Sequential(parallelize(plain(), plan_of(make_mesh(tp=2))), nn.Linear(4, 4)))
        assert not watch.pending()  # of the refused broadcast, the shape was asked for
    finally:
        watch.close()


@pytest.mark.helper("dispatch")  # the wrapper's C++ code meets PyTorch's own refusal without it
def test_a_wrapper_around_a_part(ranks: RankPools) -> None:
    ranks.run(wrapper_around_a_part, world_size=2)


def distributed_before() -> None:
    import vescale

    mesh = make_mesh(tp=2)
    around: list[tuple[Callable[[nn.Module], nn.Module], str]] = [
        (DistributedDataParallel, "a DistributedDataParallel is already distributed by DistributedDataParallel"),
        (torch.compile, r"an OptimizedModule is wrapped by torch\.compile.*original model \(model\._orig_mod\)"),
        (lambda model: fully_shard(model, mesh=mesh), "already distributed by fully_shard"),
        (lambda model: vescale.fully_shard(model, mesh=mesh), "already distributed by fully_shard"),
        (
            lambda model: nn.Sequential(vescale.fully_shard(model, mesh=mesh)),
            "of which its part '0' is already distributed",
        ),
    ]
    for wrap, message in around:
        model = wrap(plain())
        with pytest.raises(PlanError, match=message):
            parallelize(model, Plan(mesh))


def test_models_that_are_distributed_already(ranks: RankPools) -> None:
    ranks.run(distributed_before, world_size=2)


def sharded_twice() -> None:
    import vescale

    grid, x = make_mesh(dp=2, tp=2), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for mesh in (grid, grid["dp"]):
        model = parallelize(plain(), Plan(mesh).shard("<in:input>", Shard(0), mesh="dp"))
        for given in (model, model[0], nn.Sequential(model)):
            with pytest.raises(FullyShardError, match=r"whose plan distributes it.*parallelize on mesh\['tp'\]"):
                vescale.fully_shard(given, mesh=grid["dp"])
        dims = DataParallelMeshDims(shard="dp")
        with pytest.raises(FullyShardError, match="whose plan distributes it"):
            vescale.fully_shard(parallelize(plain(), Plan(grid)), mesh=grid, dp_mesh_dims=dims)
    model, reference = vescale.fully_shard(parallelize(plain(), plan_of(grid["tp"])), mesh=grid["dp"]), plain()
    for each in (model, reference):
        each(x).square().mean().backward()
    for one, other in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad.full_tensor(), one.grad)


def test_fully_shard_over_other_axes_only(ranks: RankPools) -> None:
    """Over axes that the plan has, both would reduce gradients: they were halved, and nothing told."""
    ranks.run(sharded_twice, world_size=4)


class Holding(nn.Module):
    """With a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), torch.full((8,), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def attributes_without_values() -> None:
    with torch.device("meta"):
        model = Holding()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallelize(model, Plan(make_mesh(tp=2)))
    reference = Holding()
    model.to_empty(device=device_type())
    model.load_state_dict(reference.state_dict())
    with pytest.raises(PlanError, match=r"1 of 3 .*: scale;.*do not reach scale.*register_buffer"):
        model(torch.ones(2, 8))
    model.scale = torch.full((8,), 2.0)
    torch.testing.assert_close(model(torch.ones(2, 8)).full_tensor(), reference(torch.ones(2, 8)))


def test_tensors_outside_of_parameters_and_buffers(ranks: RankPools) -> None:
    ranks.run(attributes_without_values, world_size=2)


def whole_values() -> None:
    mesh = make_mesh(tp=2)
    plan = Plan(mesh).shard("0.(weight|bias)", Shard(0)).shard("2.(weight|bias)", Shard(0))
    model, x = parallelize(plain(), plan), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    y, expected = model(x).detach(), plain()(x).detach()
    assert y.placements == (Shard(1),)
    torch.testing.assert_close(torch.tensor(y.tolist()), expected)
    with torch.device(device_type()):  # a function mode, which is none of a model's
        torch.testing.assert_close(torch.tensor(y.tolist()), expected)
    for array in (lambda y: y.numpy(), np.asarray):
        if y.device.type == "cpu":
            torch.testing.assert_close(torch.from_numpy(array(y)), expected)
        else:
            with pytest.raises(TypeError, match="to host memory first"):
                array(y)
    torch.testing.assert_close(y[expected > 0].full_tensor(), expected[expected > 0])  # an op without a rule
    assert torch.allclose(y, expected, atol=1e-6)
    refused = (RuntimeError, "requires grad") if y.device.type == "cpu" else (TypeError, "to host memory first")
    with pytest.raises(refused[0], match=refused[1]):
        model(x).numpy()


def test_values_of_outputs(ranks: RankPools) -> None:
    """``tolist()``, ``numpy()`` and ops that PyTorch has no rule for see the whole value."""
    ranks.run(whole_values, world_size=2)


def without_values() -> None:
    mesh, x = make_mesh(tp=2), torch.randn(4, 8)
    reference = plain()
    with torch.device("meta"):
        model = plain()
    where = (
        "all 4 parameters and buffers of this Sequential are on the meta.*0.weight.*deferred_init.*load_hf.*to_empty"
    )
    if torch.distributed.get_rank() == 0:
        with pytest.warns(MissingValuesWarning, match=where):
            parallelize(model, plan_of(mesh))
    else:
        parallelize(model, plan_of(mesh))
    with pytest.raises(PlanError, match=where):
        model(x)
    model.to_empty(device=device_type())
    model.load_state_dict(reference.state_dict())
    output = model(x)
    torch.testing.assert_close(output.full_tensor(), reference(x))
    output.sum().backward()
    reference(x).sum().backward()
    for one, other in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad.full_tensor(), one.grad)
    partly = plain()
    partly[2] = partly[2].to("meta")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallelize(partly, plan_of(mesh))
    with pytest.raises(PlanError, match=r"2 of 4 parameters and buffers.*: 2.weight, 2.bias; build"):
        partly(x)
    torch.manual_seed(0)
    with deferred_init():
        deferred = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize(deferred, plan_of(mesh))
    torch.testing.assert_close(deferred(x).full_tensor(), plain()(x))


def test_models_without_values(ranks: RankPools) -> None:
    """They are told of by parallelize, refused by the forward, and run as soon as they are filled."""
    ranks.run(without_values, world_size=2)


def wrapped() -> None:
    from accelerate import Accelerator

    model = parallelize(plain(), plan_of(make_mesh(tp=2)))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # as torchrun sets them
    os.environ.setdefault("MASTER_PORT", "29500")
    accelerator = Accelerator(cpu=True)
    with pytest.raises(PlanError, match=r"leave the model out of prepare\(\)"):
        accelerator.prepare(model)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    x, before = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)), model[0].bias.full_tensor()
    reference = plain()
    loss, expected = model(x).square().mean(), reference(x).square().mean()
    accelerator.backward(loss)
    expected.backward()
    optimizer.step()
    torch.testing.assert_close(model[0].bias.full_tensor(), before - 0.1 * reference[0].bias.grad)


def test_accelerate(ranks: RankPools) -> None:
    """Its prepare() wraps a model in DDP, which says what to do; optimizers and backward work."""
    pytest.importorskip("accelerate")
    ranks.run(wrapped, world_size=2)


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = plain()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x) - labels).square().mean()}


def trained(folder: str) -> None:
    import transformers

    class Trainer(transformers.Trainer):
        def _move_model_to_device(self, model: Any, device: Any) -> None:
            """The model is where it is to be; Trainer would move it to the CPU from a device that it does not know."""

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    model = parallelize(WithLoss(), Plan(make_mesh(tp=2)).shard("net.0.(weight|bias)", Shard(0)))
    given: dict[str, Any] = {
        "use_cpu": True,
        "max_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    data: Any = [{"x": torch.ones(8), "labels": torch.ones(4)}] * 4
    trainer = Trainer(model=model, args=transformers.TrainingArguments(output_dir=folder, **given), train_dataset=data)
    with pytest.raises(PlanError, match=r"leave the model out of prepare\(\).*Trainer wraps it, and is not supported"):
        trainer.train()


def test_trainer(ranks: RankPools, tmp_path: Path) -> None:
    """Hugging Face's Trainer wraps the model, too, and is told so before the first step."""
    pytest.importorskip("accelerate")
    ranks.run(trained, str(tmp_path), world_size=2)
