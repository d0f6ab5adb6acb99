"""What ``vescale.debug.monitor`` costs: steps of a tensor-parallel Llama on two gloo ranks, with and without it, by turns.

    python benchmarks/monitor.py --steps 120 --hidden 256

Processor time of the rank's own thread, medians of the ratios of neighbouring steps. Steps whose collectives are observed,
every ``--every``-th one, are told apart. Ranks write JSON lines.
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
    watched: dict[bool, list[float]] = {False: [], True: []}
    ratios: dict[bool, list[float]] = {False: [], True: []}
    watch = monitor(model, jsonl=os.path.join(folder, "steps.jsonl"), ranks="all", console=False, every=args.every)
    for number in range(args.steps):
        observed = number % args.every == 0
        pair = {}
        for is_watched in (False, True) if number % 2 else (True, False):
            if not is_watched:
                watch._meter.stop()  # the pair's other step is observed, not this one
            elif observed:
                watch._meter.start()
            began = time.thread_time()
            loss = step()
            if is_watched:
                watch.step(loss, tokens=ids.numel())
            else:
                loss.item()
            pair[is_watched] = time.thread_time() - began
        plain.append(pair[False])
        watched[observed].append(pair[True])
        ratios[observed].append(pair[True] / pair[False])
    watch.close()
    if rank == 0:
        print(f"step without: {1e3 * statistics.median(plain):.2f} ms")
        for observed, name in ((False, "not observed"), (True, "observed")):
            print(
                f"{name:12} steps: {len(ratios[observed]):4}  ratio {statistics.median(ratios[observed]):.4f}  "
                f"(median {1e3 * statistics.median(watched[observed]):.2f} ms)"
            )
        share = 1 / 50  # the default of monitor()
        mixed = (1 - share) * statistics.median(ratios[False]) + share * statistics.median(ratios[True])
        print(f"every 50th step observed: {mixed:.4f} times the time without")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(work, (args, folder), nprocs=2)


if __name__ == "__main__":
    main()
