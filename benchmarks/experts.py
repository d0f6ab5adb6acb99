"""Expert parallelism: a step of a mixture whose tokens are sent to their experts, against one whose experts meet all tokens.

    python benchmarks/experts.py [--experts 4,8,16] [--repeats 15] [--ranks 4]

One block of Mixtral (transformers), its sequence sharded over gloo ranks on this machine, forward and backward. The side
``mask`` gathers the block's input and scatters its output, as in Megatron-style sequence parallelism, which is the best
plan for it. Steps alternate between the two sides, so that the load of the machine hits both; the ratio is the median of
those of neighbouring steps, of wall time and, for busy machines, of processor time. One JSON line for each number of
experts, with the bytes that a rank receives in a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from vescale import Plan, parallelize
from vescale.comm import record_comms

HIDDEN, FEATURES, BATCH, LENGTH = 512, 192, 2, 1024  # the proportions of Qwen3-MoE


class Model(nn.Module):
    """A block in a model that hands it tokens of a sharded sequence."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        config = MixtralConfig(
            hidden_size=HIDDEN, intermediate_size=FEATURES, num_local_experts=num_experts, num_experts_per_tok=2
        )
        config._experts_implementation = "eager"
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.mlp = MixtralSparseMoeBlock(config)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.05)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states * self.scale
        return x + self.mlp(x)


def plan_of(mesh: DeviceMesh, dispatch: str) -> Plan:
    plan = Plan(mesh).shard("<in:hidden_states>", Shard(1))
    plan.shard("mlp.experts.(gate_up|down)_proj", Shard(0))
    plan.local("mlp.experts", kind="experts", dispatch=dispatch)
    if dispatch == "mask":
        plan.shard("mlp.<in>", Replicate()).shard("mlp.<out>", Shard(1))
    return plan


def measure(num_experts: int, repeats: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    models = {}
    for dispatch in ("all_to_all", "mask"):
        torch.manual_seed(0)
        models[dispatch] = parallelize(Model(num_experts), plan_of(mesh, dispatch), strict=True)
    x = torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))

    def step(model: nn.Module) -> tuple[float, float]:
        """Seconds of the step, and of processors on all ranks together."""
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        model(x).square().mean().backward()
        model.zero_grad()
        dist.barrier()
        seconds, cpu = time.perf_counter() - start, torch.tensor(time.process_time() - cpu_start)
        dist.all_reduce(cpu)
        return seconds, cpu.item()

    received = {}
    for name, model in models.items():
        with record_comms() as ledger:
            step(model)
        step(model)
        received[name] = sum(record.bytes for record in ledger.records if ".grad:" not in record.requester)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for number in range(repeats):
        for name in sorted(models, reverse=bool(number % 2)):
            times[name].append(step(models[name]))
    pairs = list(zip(times["mask"], times["all_to_all"]))
    ratios = [[mask[clock] / sent[clock] for mask, sent in pairs] for clock in range(2)]
    return {
        "experts": num_experts,
        "ranks": dist.get_world_size(),
        "mask_over_all_to_all": round(statistics.median(ratios[0]), 3),
        "processor_mask_over_all_to_all": round(statistics.median(ratios[1]), 3),
        "milliseconds": {name: round(statistics.median(wall for wall, _ in t) * 1e3, 1) for name, t in times.items()},
        "received_bytes": received,
    }


def run_rank(rank: int, ranks: int, store: str, experts: list[int], repeats: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for num_experts in experts:
        found = measure(num_experts, repeats)
        if rank == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", default="4,8,16")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        experts = [int(number) for number in args.experts.split(",")]
        mp.spawn(run_rank, (args.ranks, f"{folder}/store", experts, args.repeats), nprocs=args.ranks)


if __name__ == "__main__":
    main()
