"""A step of a model in static mode, captured in a CUDA graph and replayed, against the same step as it is.

A part of ``benchmarks/gpu.py``. The process group is a fake one, whose collectives return at once, so that one GPU is
enough: what is compared is what this rank computes, and what the host takes for a step.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale import Plan, parallelize
from vescale.compat import local_of
from vescale.static import report

__all__ = ["Capture", "measure", "text"]

WIDTH, LAYERS, ROWS = 64, 4, 8


@dataclass
class Capture:
    """What was found.

    Attributes:
        wrong: tensors that differ between a replay and a step, or what raised.
        static_steps: how many steps ran static.
        seconds: medians of a step as it is, and of a replay.
    """

    wrong: list[str] = field(default_factory=list)
    static_steps: int = 0
    seconds: tuple[float, float] = (0.0, 0.0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Step:
    """Forward and backward on a fixed input, whose memory is written between steps."""

    def __init__(self, device: str) -> None:
        mesh = init_device_mesh(device, (2,), mesh_dim_names=("tp",))
        plan = Plan(mesh)
        plan.shard(r".*\.up.(weight|bias)", Shard(0)).shard(r".*\.down.weight", Shard(1))
        plan.shard(r".*\.up.<in>", Replicate()).shard(r".*\.down.<out>", Replicate()).shard("<out>", Replicate())
        torch.manual_seed(0)
        self.model = parallelize(nn.Sequential(*(Layer() for _ in range(LAYERS))).to(device), plan, mode="static")
        self.x = torch.zeros(ROWS, WIDTH, device=device)
        self.loss = torch.zeros((), device=device)

    def feed(self, seed: int) -> None:
        self.x.copy_(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)))

    def __call__(self) -> None:
        self.model.zero_grad(set_to_none=False)
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.loss.copy_(loss.detach())

    def results(self) -> dict[str, torch.Tensor]:
        grads = {name: local_of(p.grad) for name, p in self.model.named_parameters()}  # type: ignore[arg-type]
        return {name: x.clone() for name, x in {"loss": self.loss, **grads}.items()}


def measure(device: str) -> Capture:
    """On ``cpu``, steps stand for replays, to check this file."""
    found = Capture()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        step = Step(device)
        replay = _captured(step) if device == "cuda" else step
        for seed in range(3):
            step.feed(seed)
            step()
            expected = step.results()
            step.feed(seed)
            replay()
            found.wrong += [
                f"{name}, seed {seed}" for name, x in step.results().items() if not torch.equal(x, expected[name])
            ]
        found.seconds = _median(step), _median(replay)
        found.static_steps = report(step.model).static_steps
    except Exception as error:
        found.wrong.append(f"{type(error).__name__}: {error}")
    finally:
        dist.destroy_process_group()
    return found


def _captured(step: Step) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for seed in range(5):  # the recorded step, static ones, and the memory of gradients
            step.feed(seed)
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = _Replay()
    with torch.cuda.graph(graph):
        step()
    return graph


class _Replay(torch.cuda.CUDAGraph):
    def __call__(self) -> None:
        self.replay()


def _median(call: object, repeats: int = 20) -> float:
    assert callable(call)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def text(found: Capture) -> str:
    """A line for people."""
    step, replay = (1e3 * seconds for seconds in found.seconds)
    state = "; ".join(found.wrong) or "equal bits"
    return f"capture of a static step: {state}; {step:.2f} ms as it is, {replay:.2f} ms as a replay"
