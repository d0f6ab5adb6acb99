"""Sharded stages of ``torch.distributed.pipelining``: 2 pipeline ranks with 2 data-parallel ranks each."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from tests.device import device_type
from tests.examples import NIGHTLY
from tests.fsdp.compare import agree, data, full, resting_memory
from tests.ranks import RankPools, run_cases
from vescale.comm import record_comms
from vescale.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

STEPS, MICROBATCHES, WIDTH = 3 if NIGHTLY else 2, 4, 7
SCHEDULES = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zero bubble": (ScheduleInterleavedZeroBubble, 2),
}


class Layer(nn.Module):
    """With a branch that only some microbatches take, and a parameter that nobody uses."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH + number), nn.Linear(2 * WIDTH + number, WIDTH, bias=False)
        self.expert = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(3))
        self.routes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.relu(self.up(x)))
        return x + self.expert(x) if self.routes and bool(x.detach().double().sum() > 0) else x


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.float() - target).square().mean()


def build(routes: bool) -> list[Layer]:
    torch.manual_seed(0)
    layers = [Layer(number) for number in range(4)]
    for layer in layers:
        layer.routes = routes
    return layers


def batch(step: int, dp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = data((2 * MICROBATCHES, WIDTH), step, dp_rank)
    return x, data((2 * MICROBATCHES, WIDTH), 100 + step, dp_rank)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), 0.1, momentum=0.5)


def on_one_device(routes: bool) -> list[dict[str, Any]]:
    """Parameters' gradients and values by name, after each step."""
    model = nn.Sequential(*build(routes))
    optimizer, found = sgd(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for dp_rank in range(2):
            x, target = batch(step, dp_rank)
            for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
                (mean_square(model(part), wanted) / (2 * MICROBATCHES)).backward()
        optimizer.step()
        found.append(copy.deepcopy({name: (p.grad, p.detach()) for name, p in model.named_parameters()}))
    return found


class Pipeline:
    """This rank's stages, sharded over the ranks that have the same ones."""

    def __init__(self, shard: Any, schedule: str, mesh: DeviceMesh, *, routes: bool = False, **options: Any) -> None:
        kind, per_rank = SCHEDULES[schedule]
        self.pp_rank, self.dp_rank = (mesh[axis].get_local_rank() for axis in ("pp", "dp"))
        layers, size = build(routes), 4 // (2 * per_rank)
        self.offsets = [(self.pp_rank + 2 * turn) * size for turn in range(per_rank)]
        self.modules: list[Any] = [nn.Sequential(*layers[first : first + size]) for first in self.offsets]
        for module in self.modules:
            for layer in module:
                shard(layer, mesh=mesh["dp"], **options)
            shard(module, mesh=mesh["dp"], **options)
        stages = [
            PipelineStage(
                module, first // size, 2 * per_rank, torch.device(device_type()), group=mesh["pp"].get_group()
            )
            for module, first in zip(self.modules, self.offsets, strict=True)
        ]
        self.schedule: Any = kind(stages[0] if per_rank == 1 else stages, MICROBATCHES, loss_fn=mean_square)  # type: ignore[arg-type]
        self.optimizers = [sgd(module) for module in self.modules]

    def backward(self, step: int) -> None:
        x, target = batch(step, self.dp_rank)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if self.pp_rank == 0:
            self.schedule.step(x)
        else:
            self.schedule.step(target=target)

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def parameters(self) -> dict[str, nn.Parameter]:
        found = {}
        for module, first in zip(self.modules, self.offsets, strict=True):
            for name, parameter in module.named_parameters():
                number, _, rest = name.partition(".")
                found[f"{first + int(number)}.{rest}"] = parameter
        return found


def agrees(schedule: str, reshards: bool | None, option: str) -> None:
    """Gradients and parameters after each step are one device's, and FSDP2's; each group is reduced once a step."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("pp", "dp"))
    options: dict[str, Any] = {} if reshards is None else {"reshard_after_forward": reshards}
    routes, low = option == "routes", option == "low precision"
    if low:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ours = Pipeline(fully_shard, schedule, mesh, routes=routes, **options)
    for module in ours.modules:
        if option == "direct":
            module.set_direct_linear_gradients()
        if option == "in place":
            module.set_in_place_gradients()
    # Where one rank has a gradient and another has none, FSDP2 waits forever.
    stock = None if routes else Pipeline(stock_fully_shard, schedule, mesh, **options)
    reference = None if low else on_one_device(routes)
    for step in range(STEPS):
        with record_comms() as ledger:
            ours.backward(step)
        if step:  # the first one also tries the stages out
            groups = [group for module in ours.modules for state in module._states(True) for group in state.groups]
            assert ledger.count("reduce_scatter_v") == sum(len(group.buckets) for group in groups)
        if stock is not None:
            stock.backward(step)
        gradients = {name: full(p.grad) for name, p in ours.parameters().items()}
        ours.update()
        if stock is not None:
            theirs = {name: full(p.grad) for name, p in stock.parameters().items()}
            stock.update()
        for name, parameter in ours.parameters().items():
            assert isinstance(parameter, DTensor)
            where = f"{schedule}, {option}, step {step}, {name}"
            wanted = {} if reference is None else {"one device": reference[step][name]}
            if stock is not None:
                wanted["FSDP2"] = theirs[name], full(stock.parameters()[name].detach())
            for other, (gradient, value) in wanted.items():
                agree(f"{where}.grad", gradients[name], gradient, other, 2e-5, 2e-6)
                agree(where, full(parameter.detach()), value, other, 2e-5, 1e-5)
    for module in ours.modules:
        resting_memory(module)
        for group in (group for state in module._states(True) for group in state.groups):
            assert not any(b.whole.is_allocated or b.unreduced.buffer.is_allocated for b in group.buckets)


CASES: list[tuple[str, bool | None, str]] = [
    ("gpipe", None, ""),
    ("1f1b", True, "low precision"),
    ("interleaved", True, "in place"),
    ("zero bubble", False, "direct"),
    ("zero bubble", False, "routes"),
]
if NIGHTLY:
    CASES += [
        ("1f1b", None, "routes"),
        ("interleaved", None, ""),
        ("interleaved", False, "routes"),
        ("zero bubble", False, ""),
        ("zero bubble", False, "low precision"),
    ]


def pipelines() -> int:
    return run_cases(agrees, CASES)


def test_pipelines(ranks: RankPools) -> None:
    assert ranks.run(pipelines, world_size=4) == [len(CASES)] * 4


def goes_on() -> None:
    """An exception between the gradients and their reduction: the next forward forgets them."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("pp", "dp"))
    pipeline = Pipeline(fully_shard, "1f1b", mesh)
    pipeline.backward(0)
    expected = {name: full(p.grad) for name, p in pipeline.parameters().items()}
    (model,) = pipeline.modules
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    model(data((2, WIDTH), 9, 0)).sum().backward()
    model.set_requires_gradient_sync(True)
    fully_shard.state(model).reduce_accumulated()  # type: ignore[attr-defined]
    pipeline.backward(0)
    for name, p in pipeline.parameters().items():
        gradient = expected[name]
        assert (p.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(full(p.grad), gradient), name  # type: ignore[arg-type]


def test_what_was_broken_off_is_forgotten(ranks: RankPools) -> None:
    ranks.run(goes_on, world_size=4)


def test_what_the_schedules_ask_of_a_state() -> None:
    """A release of PyTorch that asks for more fails here, and not in somebody's training."""
    functions = [PipelineStage.perform_reduce_grad, getattr(PipelineStage, "start_gradient_reduction", None)]
    asked = {name for function in functions if function is not None for name in function.__code__.co_names}
    private = {name for name in asked if name.startswith("_")}
    groups = "_fsdp_param_groups" if TorchVersion(torch.__version__) >= "2.12" else "_fsdp_param_group"
    by_states = {"_state_ctx", groups, "_root_post_backward_final_callback"}
    assert private == ({"_gradient_reduction_handle"} if "finalize_backward" in asked else by_states)
