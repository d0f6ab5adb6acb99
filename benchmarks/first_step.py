"""What the first training step of a model costs the host, and the first with another sequence length, by mesh axes.

PyTorch decides every op on DTensors once for each combination of shapes and placements. The process group is fake
(collectives return at once), the model a Hugging Face Llama of hidden size 64 with tensor parallelism on the last axis.

python benchmarks/first_step.py [--axes 1 2 3] [--sizes 1] [--layers 2] [--stock-search]

``--sizes`` is the size of the other axes. ``--stock-search`` leaves out the two patches that decide without a search and
find shapes with meta kernels (`vescale env` lists them). Seconds of processor time, in a process of their own for each line.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from vescale import Plan, parallelize
from vescale.compat import patches

_DECIDING = ("_expand_single_dim_strategy_to_mesh", "_propagate_tensor_meta_non_cached")


def measure(num_axes: int, size: int, layers: int, stock_search: bool) -> list[float]:
    shape = (size,) * (num_axes - 1) + (2,)
    dist.init_process_group("fake", rank=0, world_size=torch.Size(shape).numel(), store=FakeStore())
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp", "ep", "pp", "x")[: num_axes - 1] + ("tp",))
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=256,
    )
    model = LlamaForCausalLM(config)
    if stock_search:
        kept = [patch for patch in patches.PATCHES if not any(name in patch.target for name in _DECIDING)]
        patches.PATCHES = tuple(kept)
    layer = r"model.layers.\d+"
    plan = Plan(mesh)
    plan.shard(rf"{layer}.self_attn.<in:hidden_states>", Replicate(), mesh="tp")
    plan.shard(rf"{layer}.self_attn.(q|k|v)_proj.weight", Shard(0), mesh="tp")
    plan.shard(rf"{layer}.self_attn.o_proj.weight", Shard(1), mesh="tp")
    plan.shard(rf"{layer}.self_attn.o_proj.<out>", Replicate(), mesh="tp")
    plan.shard(rf"{layer}.mlp.<in>", Replicate(), mesh="tp")
    plan.shard(rf"{layer}.mlp.(gate|up)_proj.weight", Shard(0), mesh="tp")
    plan.shard(rf"{layer}.mlp.down_proj.weight", Shard(1), mesh="tp")
    plan.shard(rf"{layer}.mlp.down_proj.<out>", Replicate(), mesh="tp")
    parallelize(model, plan)
    found = []
    for length in (16, 16, 24, 24):
        tokens = torch.randint(256, (4, length))
        start = time.process_time()
        model(input_ids=tokens, labels=tokens).loss.backward()
        found.append(time.process_time() - start)
    return found


def main() -> int:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--sizes", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--stock-search", action="store_true")
    args = parser.parse_args()
    if len(args.axes) == 1:
        first, second, longer, again = measure(args.axes[0], args.sizes, args.layers, args.stock_search)
        print(f"{args.axes[0]} axes: first step {first:.2f}, second {second:.3f}; longer: {longer:.2f}, {again:.3f}")
        return 0
    for num_axes in args.axes:
        command = [sys.executable, __file__, "--axes", str(num_axes), "--sizes", str(args.sizes)]
        command += ["--layers", str(args.layers)] + ["--stock-search"] * args.stock_search
        subprocess.run(command, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
