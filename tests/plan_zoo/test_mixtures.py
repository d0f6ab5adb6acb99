"""What is trained beside the loss of a mixture: z-losses of routers, and selection biases that follow the experts' load."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from tests.plan_zoo.models import MODELS, labels
from tests.ranks import RankPools
from tests.runtime.hf import Step, one_step, quiet
from tests.runtime.llama import make_mesh
from tests.whole import whole
from vescale import parallelize, plan_zoo


def with_z_loss(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """As ST-MoE's: the mean of the squared logarithms of the routers' sums, over all tokens of a layer."""
    output = model(**inputs)
    each = [logits.logsumexp(-1).pow(2).mean() for logits in output.router_logits]
    return output.loss + 0.1 * sum(each[1:], each[0])


def train(name: str, sizes: dict[str, int]) -> Step:
    model = MODELS[name]
    inputs = {**model.inputs(), "labels": labels(), "output_router_logits": True}
    return one_step(
        model.build, inputs, lambda _, mesh: plan_zoo.load(name, mesh), sizes, strict=True, objective=with_z_loss
    )


@pytest.mark.parametrize("name", ["gpt_oss", "mixtral", "qwen3_moe"])
def test_z_loss_beside_the_load_balancing_loss(ranks: RankPools, name: str) -> None:
    """1e-6: the model's own loss is computed in float32; the z-loss and its gradients in float64."""
    for step in ranks.run(train, name, {"dp": 2, "tp": 2}):
        assert step.is_same(1e-6) and step.implicit == 0, step


class Balance:
    """After each step raises the selection bias of experts with few tokens, lowers the others': written for one device."""

    def __init__(self, model: nn.Module, rate: float = 0.05) -> None:
        self.rate = rate
        self.counts: dict[nn.Module, torch.Tensor] = {}
        self.gates = [m.gate for m in model.modules() if hasattr(getattr(m, "gate", None), "e_score_correction_bias")]
        for gate in self.gates:
            gate.register_forward_hook(self.count)

    def count(self, gate: nn.Module, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ids = output[2].detach()  # (tokens, choices)
        experts = torch.arange(gate.num_experts)
        self.counts[gate] = (ids.unsqueeze(-1) == experts).sum((0, 1))

    def step(self) -> list[list[int]]:
        found = []
        for gate in self.gates:
            bias, counts = gate.e_score_correction_bias, self.counts[gate].double()
            bias += self.rate * torch.sign(counts.mean() - counts)
            found.append(whole(counts).int().tolist())
        return found


def balanced(sizes: dict[str, int], num_steps: int = 3) -> list[tuple[float, list[list[int]], float]]:
    """For each step: difference of the loss, tokens of each expert, difference of the biases."""
    quiet()
    zoo = MODELS["deepseek_v3"]
    reference = zoo.build().double()
    model = copy.deepcopy(reference)
    parallelize(model, plan_zoo.load("deepseek_v3", make_mesh(**sizes)), strict=True)
    runs = [(m, Balance(m), torch.optim.SGD(m.parameters(), lr=0.1)) for m in (reference, model)]
    found = []
    for _ in range(num_steps):
        losses, counts = [], []
        for each, balance, optimizer in runs:
            loss = zoo.objective(each, zoo.inputs())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                counts.append(balance.step())
            losses.append(whole(loss.detach()).item())
        assert counts[0] == counts[1]
        biases = [[whole(gate.e_score_correction_bias) for gate in balance.gates] for _, balance, _ in runs]
        different = max((a - b).abs().max().item() for a, b in zip(*biases))
        found.append((abs(losses[1] / losses[0] - 1), counts[1], different))
    return found


@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 4}], ids=str)
def test_selection_biases_that_follow_the_load(ranks: RankPools, sizes: dict[str, int]) -> None:
    found = ranks.run(balanced, sizes)
    assert all(result == found[0] for result in found)
    for loss, counts, bias in found[0]:
        assert loss <= 1e-6 and bias == 0
        assert all(sum(layer) == 4 * 8 * 2 for layer in counts)  # every token, twice
    assert found[0][0][1] != found[0][-1][1]  # the biases have moved tokens
