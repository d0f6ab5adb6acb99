"""Memory, padding, bytes and load of large jobs by ``vescale.estimate``; padding of block-wise buffers by the planner.

    python -m benchmarks.scale_study              # some minutes; two tables as Markdown, for docs/internals/scale.md
    python -m benchmarks.scale_study --ranks 1024

Nothing runs on ranks or devices. Seconds are processor time of the estimate, on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate

from vescale import Plan, RaggedShard, plan_zoo
from vescale.cli import main
from vescale.estimation import Estimate, estimate, hybrid_plan, zero_plan

TP = 8
LISTS = ("llama-3-70b", "llama-3-405b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-120b", "deepseek-v3")
_GIB = float(1 << 30)


def llama_405b() -> nn.Module:
    import transformers

    heads = {"num_attention_heads": 128, "num_key_value_heads": 8, "num_hidden_layers": 126}
    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "vocab_size": 128256, "max_position_embeddings": 8192}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**heads, **sizes))


def deepseek_v3(**sizes: int) -> nn.Module:
    import transformers

    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes))


def mixture_24t() -> nn.Module:
    """2.4T parameters in DeepSeek-V3's architecture: 80 layers of 384 experts."""
    sizes = {"hidden_size": 8192, "moe_intermediate_size": 3072, "n_routed_experts": 384, "num_hidden_layers": 80}
    return deepseek_v3(**sizes)


def zero3(plan: Plan, rows: int | None) -> Plan:
    """Parameters over ``dp``, in blocks of ``rows`` elements; None: of a parameter's rows, which are experts where they are
    stacked."""
    found = zero_plan(plan, ("dp",), 0)
    found.shard(".*", {"dp": RaggedShard() if rows is None else RaggedShard(block=rows)}, phase="init")
    found.shard(".*", {"dp": Replicate()}, phase="run")
    return found.unit(r"model.layers.\d+").unit("").checkpoint(r"model.layers.\d+", "full")


def hsdp(plan: Plan, part: int) -> Plan:
    return hybrid_plan(plan, "dp", part).unit(r"model.layers.\d+").unit("").checkpoint(r"model.layers.\d+", "full")


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Plan]]] = {
    "Llama-3-405B, HSDP over 64 (x tp 8)": (
        llama_405b,
        lambda dp: hsdp(plan_zoo.load("llama", {"dp": dp, "tp": TP}), 64),
    ),
    "Llama-3-405B, ZeRO-3 (x tp 8)": (llama_405b, lambda dp: zero3(plan_zoo.load("llama", {"dp": dp, "tp": TP}), None)),
    "DeepSeek-V3, ep 8, ZeRO-3, whole experts": (
        deepseek_v3,
        lambda dp: zero3(plan_zoo.load("deepseek_v3", {"dp": dp, "tp": TP}), None),
    ),
    "DeepSeek-V3, ep 8, ZeRO-3, rows": (
        deepseek_v3,
        lambda dp: zero3(plan_zoo.load("deepseek_v3", {"dp": dp, "tp": TP}), 7168),
    ),
    "2.4T mixture, ep 8, ZeRO-3, rows": (
        mixture_24t,
        lambda dp: zero3(plan_zoo.load("deepseek_v3", {"dp": dp, "tp": TP}), 8192),
    ),
}


def row(name: str, ranks: int) -> tuple[str, ...]:
    build, make = CASES[name]
    with torch.device("meta"):
        model = build().to(torch.bfloat16)
    dp, began = ranks // TP, time.process_time()
    found = estimate(model, make(dp), batch={"input_ids": (dp, 4096)}, device="h100-80g")
    seconds = time.process_time() - began
    most = found.peak.maximum
    states = most["parameters"] + most["gradients"] + most["optimizer"]
    return (
        name,
        f"{ranks:,}",
        f"{found.peak_bytes / _GIB:.1f}",
        f"{states / _GIB:.1f}",
        f"{most['unsharded'] / _GIB:.1f}",
        f"{most['activations'] / _GIB:.1f}",
        f"{100 * found.padding_bytes / max(most['parameters'] - found.padding_bytes, 1):.1f}",
        f"{sum(found.time.collective_bytes.values()) / _GIB:.0f}",
        f"{load(found):.3f}",
        f"{found.time.host:.2f}",
        f"{seconds:.1f}",
    )


def load(found: Estimate) -> float:
    """Of optimizer states, which have no padding: the most of a rank by the mean."""
    total = sum(len(one.ranks) * one.maximum["optimizer"] for one in found.ranks)
    return max(one.maximum["optimizer"] for one in found.ranks) * sum(len(one.ranks) for one in found.ranks) / total


def padding(ranks: str, rows: str) -> Iterator[tuple[str, ...]]:
    for name in LISTS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            main(["advise", name, "--ranks", ranks, "--granularity", rows, "--json", "--effort", "fast"])
        for one in json.loads(printed.getvalue())["granularities"]:
            yield name, str(one["rows"]), *(f"{100 * size['padding']:.2f}" for size in one["sizes"])


def table(names: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for cells in rows:
        print("| " + " | ".join(cells) + " |", flush=True)
    print()


def run() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="1024,4096,10240")
    args: Any = parser.parse_args()
    sizes = [int(text) for text in args.ranks.split(",")]
    names = ("plan", "ranks", "peak GiB", "states", "gathered", "activations", "padding %", "GiB moved a step")
    table((*names, "max/mean load", "host s", "estimate s"), [row(name, n) for name in CASES for n in sizes])
    shards = "8,64,512,1024,4096,10240"
    table(("model", "rows of a block", *shards.split(",")), list(padding(shards, "1,16,128")))


if __name__ == "__main__":
    run()
