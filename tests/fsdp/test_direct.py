"""Weight gradients that ``nn.Linear`` computes in place: the same bits as copied ones, and nothing copied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.device import device_type
from tests.fsdp.compare import by_block, data, gradients_of, mesh_of, same_gradients
from tests.fsdp.copies import engine_copies
from tests.fsdp.models import Net, net_loss
from tests.ranks import RankPools, run_cases, run_functions
from vescale.fsdp import FSDPModule, fully_shard

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
BF16_SUMMED_WIDE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def twins(options: dict[str, Any], prepare: Callable[[nn.Module], None] = lambda model: None) -> list[Any]:
    """The same model twice, the first one with direct gradients."""
    torch.manual_seed(0)
    policy = options.pop("mp_policy", MixedPrecisionPolicy())
    models = [Net(**options)]
    prepare(models[0])
    models.append(copy.deepcopy(models[0]))
    for model in models:
        by_block(model, fully_shard, mesh_of(), mp_policy=policy)
    models[0].set_direct_linear_gradients()  # type: ignore[operator]
    return models


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "every layer used twice": {"repeat": 2},
    "checkpointed": {"recompute": False},
    "checkpointed, reentrant": {"recompute": True},
    "bf16": {"mp_policy": BF16},
    "bf16, reduced in float32": {"mp_policy": BF16_SUMMED_WIDE},
}


def steps(name: str) -> None:
    models = twins(dict(CASES[name]))
    rank = dist.get_rank()
    for step in range(2):
        for model in models:
            model.zero_grad()
            net_loss(model, step, rank).backward()
        same_gradients(models, f"{name}, step {step}")


def accumulated(name: str) -> None:
    """Two microbatches without communication, one with it; the second is added to what the first left in place."""
    models = twins(dict(CASES[name]))
    for step in range(2):
        for model in models:
            model.zero_grad()
            for micro in range(3):
                model.set_requires_gradient_sync(micro == 2)
                net_loss(model, 10 * step + micro, dist.get_rank()).backward()
        same_gradients(models, f"{name}, accumulated, step {step}")


def several_graphs(name: str, backwards: tuple[int, ...]) -> None:
    """Forwards before the first backward: the gradients of a layer that a graph uses twice are complete with the last use in
    that graph, however many more uses the other graphs hold, or the same graph in another backward."""
    models = twins(dict(CASES[name]))
    for step in range(2):
        for model in models:
            model.zero_grad()
            losses = [net_loss(model, 10 * step + number, dist.get_rank()) for number in range(2)]
            for number in backwards:
                losses[number].backward(retain_graph=True)
        same_gradients(models, f"{name}, backwards of {backwards}, step {step}")


def freeze(model: Any) -> None:
    model.blocks[1].up.weight.requires_grad_(False)
    model.blocks[2].down.weight.requires_grad_(False)


def frozen() -> None:
    models = twins({}, freeze)
    for model in models:
        net_loss(model, 0, dist.get_rank()).backward()
    assert models[0].blocks[1].up.weight.grad is None
    same_gradients(models, "frozen")


def autocast() -> None:
    models = twins({})
    for model in models:
        with torch.autocast("cpu", torch.bfloat16):
            loss = net_loss(model, 0, dist.get_rank())
        loss.backward()
    same_gradients(models, "autocast")


def second_derivatives() -> None:
    """A penalty on the gradient of the inputs, which differentiates the backward; parameters have to stay for that."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3)])
    models: list[Any] = [copy.deepcopy(plain), copy.deepcopy(plain)]
    for model in models:
        for block in model:
            fully_shard(block, mesh=mesh_of(), reshard_after_forward=False)
        fully_shard(model, mesh=mesh_of())
        model.set_reshard_after_backward(False)
    models[0].set_direct_linear_gradients()
    x = data((4, 6), 0, 7).requires_grad_()
    for model in (plain, *models):
        y = model(x).square().sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        (gradient.square().sum() + y).backward()
    for model in models:
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        for (name, own), expected in zip(gradients_of(model).items(), plain.parameters(), strict=True):
            torch.testing.assert_close(own, expected.grad, msg=lambda m, name=name: f"{name}: {m}")


def nothing_is_copied() -> None:
    """P bytes of parameters: P are copied by default, the biases' alone with direct gradients."""
    for bias, direct in ((False, False), (False, True), (True, True)):
        torch.manual_seed(0)
        plain = nn.Sequential(*[nn.Linear(33, 33, bias=bias) for _ in range(3)])
        model: Any = copy.deepcopy(plain)
        for layer in model:
            fully_shard(layer, mesh=mesh_of())
        fully_shard(model, mesh=mesh_of())
        model.set_direct_linear_gradients(direct)
        x = data((5, 33), 0, dist.get_rank())

        def step(of: nn.Module, x: torch.Tensor = x) -> None:
            of(x).square().sum().backward()
            of.zero_grad()

        step(model)  # the first step compares the ranks
        copied = engine_copies(lambda m=model: step(m), lambda m=plain: step(m), dist.get_world_size())
        linear = [p for p in plain.parameters() if p.ndim == 2 or not direct]
        expected = 4 * sum(p.numel() for p in plain.parameters()) - (
            4 * sum(p.numel() for p in linear) if direct else 0
        )
        assert copied.total() == expected, (bias, direct, copied, expected)


def run() -> int:
    count = run_cases(steps, [(name,) for name in CASES])
    count += run_cases(accumulated, [("plain",), ("every layer used twice",), ("bf16",)])
    orders = [(0, 1), (1, 0), (1,), (0, 0)]
    count += run_cases(
        several_graphs, [(name, order) for name in ("plain", "every layer used twice") for order in orders]
    )
    # On a device, flags and messages between ranks are copied, too.
    cases = [frozen, autocast, second_derivatives, *[nothing_is_copied] * (device_type() == "cpu")]
    return count + run_functions(cases)


def test_direct_gradients(ranks: RankPools) -> None:
    ranks.run(run, world_size=2)
