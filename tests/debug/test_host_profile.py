"""`profile_host`: steps of one rank among ranks that do not exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from tests.plan_zoo.models import MODELS
from vescale import Plan, plan_zoo
from vescale.cli import main
from vescale.debug import profile_host
from vescale.errors import DebugOptionError
from vescale.plans import MeshAxes
from vescale.runtime import Runtime

pytestmark = pytest.mark.helper("dispatch")

DAILY = ("llama", "mixtral")  # dense, and experts whose tokens other ranks would send


class Chain(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def plan(**sizes: int) -> Plan:
    made = Plan(MeshAxes(tuple(sizes), tuple(sizes.values())))
    made.shard("up.weight", {"tp": Shard(0)})
    return made


@pytest.mark.parametrize(
    "name", [name if name in DAILY else pytest.param(name, marks=pytest.mark.slow) for name in sorted(MODELS)]
)
def test_plans_of_the_zoo(name: str) -> None:
    case = MODELS[name]
    sizes = MeshAxes.parse("dp=2,tp=2") if not name.endswith("_cp") else MeshAxes.parse("dp=1,cp=2,tp=2")
    with torch.device("meta"):
        model = case.build()
    batch = {n: v.float() if v.is_floating_point() else v for n, v in case.inputs().items()}
    state = torch.get_rng_state()
    found = profile_host(model.float(), plan_zoo.load(name, sizes), batch, num_steps=3)
    assert found.dispatch.hits > 50
    assert found.dispatch.misses == 0  # the first step has decided
    assert min(found.forward_seconds, found.backward_seconds) > 0
    assert all(p.is_meta for p in model.parameters())
    assert Runtime.of(model) is None
    assert torch.equal(state, torch.get_rng_state())
    assert not dist.is_initialized()


def test_what_takes_pytorchs_path_is_named() -> None:
    """The whole weight meets rows that a plan shards, which move in each step."""
    found = profile_host(Chain(), plan(tp=2), {"x": (4, 8)}, num_steps=2)
    assert sum(found.dispatch.fallbacks.values()) > 0


def test_what_cannot_be_profiled() -> None:
    with pytest.raises(DebugOptionError, match="num_steps=1; pass 2 or more"):
        profile_host(Chain(), plan(tp=2), {"x": (4, 8)}, num_steps=1)
    with torch.device("meta"):
        large = Chain(1 << 15)
    with pytest.raises(DebugOptionError, match=r"take 12\.0 GiB.*fewer layers"):
        profile_host(large, plan(tp=2), {"x": (4, 1 << 15)})
    staged = plan(pp=2, tp=2).pipeline(split_before=["down"], mesh="pp", microbatches=2)
    with pytest.raises(DebugOptionError, match="the plan has a pipeline"):
        profile_host(Chain(), staged, {"x": (4, 8)})


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 1,
        "vocab_size": 64,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    command = ["explain", "llama", "--model", f"hf:{file}", "--mesh", "dp=2,tp=2", "--seq", "16", "--profile"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert text.startswith("A step of the first rank takes ")
    assert "ops on DTensors:" in text
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["is_native"]
    assert found["forward_seconds"] > 0
    assert sum(op["hits"] for op in found["ops"]) > 50
