"""Small models for searches, each with a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tests.plan_zoo.models import MODELS as ZOO
from tests.plan_zoo.models import labels, tokens
from tests.runtime.hf import Objective, quiet
from vescale.estimation import device_of
from vescale.plan_search import Choice, Proposal, search
from vescale.plan_search._choice import plan_of
from vescale.plan_search._search import Looked
from vescale.plans import Plan

__all__ = ["DEVICES", "MODELS", "Case", "chosen", "proposals_of", "staged_llama"]

DEVICES = 4


class Net(nn.Module):
    """Written by hand; nobody has a plan for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)
        )
        self.last = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        out = self.last(x)
        return {"out": out, "loss": nn.functional.cross_entropy(out.flatten(0, 1), wanted.flatten())}


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def net_inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(4, 6, 12, generator=generator, dtype=torch.float64),
        "wanted": torch.randint(0, 16, (4, 6), generator=generator),
    }


def net_objective(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    found: torch.Tensor = model(**inputs)["loss"]
    return found


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and the loss by which it is compared."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]
    objective: Objective


MODELS = {
    **{
        name: Case(ZOO[name].build, ZOO[name].inputs, ZOO[name].objective)
        for name in ("llama", "gpt2", "mixtral", "vit")
    },
    "net": Case(make_net, net_inputs, net_objective),
}


def staged_llama() -> nn.Module:
    """Four blocks, so that it is cut into stages."""
    import transformers

    quiet()
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=4, max_position_embeddings=64)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).double()


def staged_batch() -> dict[str, Any]:
    return {"input_ids": tokens(), "labels": labels(), "use_cache": False}


def proposals_of(model: nn.Module, inputs: Mapping[str, Any], devices: int = DEVICES) -> tuple[Proposal, ...]:
    """All that fit, in closed form."""
    return search(model.float(), devices=devices, batch=_shapes(inputs), optimizer="sgd", exact=0).proposals


def chosen(model: nn.Module, inputs: Mapping[str, Any], **sizes: int) -> tuple[Choice, Plan]:
    """A choice that is not evaluated, with entries of the zoo's plan."""
    looked = Looked(model.float(), DEVICES, _shapes(inputs), device_of("h100-80g"), "sgd")
    assert looked.sources[0].name.startswith("zoo")
    choice = Choice(looked.sources[0], **sizes)
    return choice, plan_of(choice, looked.facts)


def _shapes(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty(x.shape, dtype=x.dtype if not x.is_floating_point() else torch.float32, device="meta")
        for name, x in inputs.items()
        if isinstance(x, torch.Tensor)
    }


def changed(proposal: Proposal, **changes: Any) -> tuple[Choice, Plan]:
    """What a smaller device would get: the same with another policy."""
    choice = replace(proposal.choice, **changes)
    return choice, plan_of(choice, proposal._model)
