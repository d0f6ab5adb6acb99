"""What ``vescale.debug.monitor`` costs: steps of a tensor-parallel Llama on two gloo ranks.

    python benchmarks/monitor.py --steps 120 --hidden 256

Processor time of the rank's own thread: medians of ``watch.step`` itself, which is all that the monitor does in a step that
it does not observe, and of the ratios of neighbouring steps of which one is observed. Ranks write JSON lines.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

import vescale
from vescale.debug import monitor


def work(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(os.path.join(folder, "store"), 2), rank=rank, world_size=2)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model = vescale.parallelize(model, vescale.plan_zoo.load("llama", vescale.init_mesh("dp=1,tp=2")), strict=True)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(256, (4, args.length), generator=torch.Generator().manual_seed(1))

    def step() -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(5):
        step().item()
    plain: list[float] = []
    calls: list[float] = []  # of watch.step, when nothing is observed
    ratios: list[float] = []  # of observed steps
    watch = monitor(model, jsonl=os.path.join(folder, "steps.jsonl"), ranks="all", console=False, every=10**9)
    watch._meter.stop()  # the first step
    for number in range(args.steps):
        pair = {}
        for is_observed in (False, True) if number % 2 else (True, False):
            began = time.thread_time()
            if is_observed:
                watch._meter.start()
            loss = step()
            loss.item()
            if is_observed:
                watch._meter.stop()
            pair[is_observed] = time.thread_time() - began
            began = time.thread_time()
            watch.step(loss, tokens=ids.numel())
            calls.append(time.thread_time() - began)
        plain.append(pair[False])
        ratios.append(pair[True] / pair[False])
    watch.close()
    if rank == 0:
        one, call, ratio = statistics.median(plain), statistics.median(calls), statistics.median(ratios)
        print(f"step without: {1e3 * one:.2f} ms")
        print(f"watch.step: {1e3 * call:.3f} ms, {100 * call / one:.2f} % of a step")
        print(f"observed step: {ratio:.3f} times one that is not ({1e3 * (ratio - 1) * one:.2f} ms more)")
        for every in (50, 200):
            print(f"every {every}th step observed: {1 + call / one + (ratio - 1) / every:.4f} times the time without")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(work, (args, folder), nprocs=2)


if __name__ == "__main__":
    main()
