"""How long ``lower`` takes, and how much memory, for Llama-3-405B on the meta device. Figures: under 5 s, under 1 GB.

python benchmarks/lower.py [--layers 126] [--repeat 5]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vescale import lower, plan_zoo


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    config = LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=args.layers,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    plan = plan_zoo.load("llama", {"dp": 16, "tp": 8})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = [], []
    for _ in range(args.repeat):
        start, start_cpu = time.perf_counter(), time.process_time()
        program = lower(plan, model)
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.0f} billion parameters, {len(program)} instructions")
    print(
        f"lower: {statistics.median(wall):.3f} s ({statistics.median(cpu):.3f} s of processor time), median of {args.repeat}"
    )
    added = (peak - before) / 1e6
    print(f"peak memory, torch and transformers included: {peak / 1e6:.2f} GB, of which lower added {added:.3f} GB")
    return 0 if statistics.median(cpu) < 5 and peak < 1e6 else 1


if __name__ == "__main__":
    sys.exit(main())
