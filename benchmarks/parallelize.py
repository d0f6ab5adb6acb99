"""What `parallelize` costs the host: one training step of a tensor-parallel Hugging Face Llama, five ways.

The process group is fake (collectives return at once) and the model small, so that only the host's work shows:

* ``plain``: a Llama of one rank's sizes, without DTensor and without collectives: the floor;
* ``hand``: the same with the collectives written by hand, as Megatron does: two all-reduces a layer in each direction;
* ``stock``: ``torch.distributed.tensor.parallel.parallelize_module``: DTensors inside the linear layers only;
* ``vescale``: `parallelize` with the same cuts: DTensors everywhere, checked boundaries, one device's losses;
* ``static``: the same with ``mode="static"``: local tensors after one recorded step.

python benchmarks/parallelize.py [--layers 2] [--hidden 64] [--tokens 16] [--repeat 15] [--profile]

Times are processor time, all interleaved, medians over the rounds.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from vescale import Plan, parallelize

NUM_RANKS = 2
LAYER = r"model.layers.\d+"


def llama(args: argparse.Namespace, share: int = 1) -> nn.Module:
    """``share`` ranks divide heads and inner features among them; this is the part of one."""
    heads = args.hidden // 16
    config = LlamaConfig(
        hidden_size=args.hidden,
        head_dim=16,
        intermediate_size=2 * args.hidden // share,
        num_hidden_layers=args.layers,
        num_attention_heads=heads // share,
        num_key_value_heads=heads // share,
        vocab_size=256,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


class _Copy(torch.autograd.Function):
    """Enters a region where each rank has a part: the gradients of the ranks are added."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Reduce(torch.autograd.Function):
    """Leaves such a region: the parts of the ranks are added."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def by_hand(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        attention, feed_forward = layer.self_attn.forward, layer.mlp.forward

        def attend(hidden_states: torch.Tensor, *, forward: Any = attention, **kwargs: Any) -> Any:
            output, *others = forward(_Copy.apply(hidden_states), **kwargs)
            return _Reduce.apply(output), *others

        layer.self_attn.forward = attend
        layer.mlp.forward = lambda x, forward=feed_forward: _Reduce.apply(forward(_Copy.apply(x)))
    return model


def stock(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    cuts = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    cuts |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    cuts |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, cuts)
    return model


def ours(model: nn.Module, mesh: DeviceMesh, mode: str = "eager") -> nn.Module:
    plan = Plan(mesh)
    plan.shard(rf"{LAYER}.self_attn.<in:hidden_states>", Replicate())
    plan.shard(rf"{LAYER}.self_attn.(q|k|v)_proj.weight", Shard(0))
    plan.shard(rf"{LAYER}.self_attn.o_proj.weight", Shard(1))
    plan.shard(rf"{LAYER}.self_attn.o_proj.<out>", Replicate())
    plan.shard(rf"{LAYER}.mlp.<in>", Replicate())
    plan.shard(rf"{LAYER}.mlp.(gate|up)_proj.weight", Shard(0))
    plan.shard(rf"{LAYER}.mlp.down_proj.weight", Shard(1))
    plan.shard(rf"{LAYER}.mlp.down_proj.<out>", Replicate())
    return parallelize(model, plan, strict=True, mode=mode)


class Chain(nn.Module):
    """Calls 200 modules that do nothing, and keeps the time of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Identity() for _ in range(200)])
        self.microseconds: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = time.thread_time()
        for part in self.parts:
            x = part(x)
        self.microseconds.append((time.thread_time() - start) / len(self.parts) * 1e6)
        return x


def measure_hooks(mesh: DeviceMesh, repeat: int) -> None:
    """What the forward hooks of a module without entries cost: a module that does nothing, without hooks, with two Python
    functions that do nothing, and in a parallelized model."""
    bare, idle, ours = Chain(), Chain(), parallelize(Chain(), Plan(mesh))
    assert isinstance(ours, Chain)
    for part in idle.parts:
        part.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
        part.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)
    for _ in range(20 * repeat):
        for chain in (bare, idle, ours):
            chain(torch.ones(4))
    for name, chain in (("no hooks", bare), ("hooks that do nothing", idle), ("vescale", ours)):
        print(f"{name:22} {statistics.median(chain.microseconds):6.2f} us a module call")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="print where vescale's step spends its time")
    parser.add_argument("--hooks", action="store_true", help="measure what the hooks of a module cost instead")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
    if args.hooks:
        measure_hooks(mesh, args.repeat)
        return 0
    models = {
        "plain": llama(args, NUM_RANKS),
        "hand": by_hand(llama(args, NUM_RANKS)),
        "stock": stock(llama(args), mesh),
        "vescale": ours(llama(args), mesh),
        "static": ours(llama(args), mesh, "static"),
    }
    ids = torch.randint(256, (2, args.tokens))

    def step(model: nn.Module) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

        return run

    steps = {name: step(model) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(args.repeat + 3):
        for name, run in steps.items():
            start = time.process_time()
            run()
            if number >= 3:  # caches of sharding decisions are warm
                seconds[name].append(time.process_time() - start)
    plain, by_hand_ = (statistics.median(seconds[name]) for name in ("plain", "hand"))
    for name, found in seconds.items():
        middle = statistics.median(found)
        print(
            f"{name:8} {middle * 1e3:8.2f} ms a step, {middle / plain:5.2f} times plain, {middle / by_hand_:5.2f} times hand"
        )
    if args.profile:
        profile = cProfile.Profile()
        profile.runcall(lambda: [steps["vescale"]() for _ in range(5)])
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)
    return 0


if __name__ == "__main__":
    sys.exit(main())
