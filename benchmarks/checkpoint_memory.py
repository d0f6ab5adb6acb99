"""Peak memory of a training step under each checkpoint policy, of a model alone and of a pipeline's first stage.

A Llama of 8 layers (hidden 128, 352), 4 rows of 128 tokens, float32, on one rank; and the first of two stages of the same
model, with 4 micro-batches of 4 rows and GPipe, which holds all of them, on a fake process group. Counted are the bytes of
PyTorch's allocator on the CPU, by its profiler: the most in a step, less what was there before it (parameters, gradients,
optimizer states). Beside it what ``vescale.report`` says is saved after a forward (of a stage: after each, so that four
times as much is held). Copies that ``offload`` makes are in the same memory on a CPU, and are subtracted.

PYTHONPATH=. python -m benchmarks.checkpoint_memory
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, record_function

import vescale
from vescale import Plan, parallelize

LAYERS, ROWS, MICROBATCHES = 8, 4, 4
POLICIES: dict[str, Any] = {
    "none": None,
    "offload": "offload",
    "selective": "selective",
    "save every 4th product": {"save": "selective", "every": 4},
    "save attention": {"save": ["aten._scaled_dot_product_flash_attention"]},
    "full": "full",
    "budget of 8 MiB": {"budget_gib": 8 / 1024},
}


def make_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=352, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def peak_of(run: Any) -> int:
    """The most bytes that are allocated while ``run()`` runs, over those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function("measured"):
        run()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    now = most = 0
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def measure(policy: Any, staged: bool) -> tuple[int, int, int]:
    """Peak, bytes saved and bytes offloaded, by one step."""
    mesh = init_device_mesh("cpu", (2,) if staged else (1,), mesh_dim_names=("pp",) if staged else ("dp",))
    plan = Plan(mesh)
    if policy is not None:
        given = policy if isinstance(policy, dict) and "budget_gib" in policy else {"policy": policy}
        plan.checkpoint(r"model.layers.\d+", **given)
    if staged:
        splits = [f"model.layers.{LAYERS // 2}"]
        plan.pipeline(split_before=splits, schedule="GPipe", microbatches=MICROBATCHES)
    model: Any = parallelize(make_model(), plan)
    rows = ROWS * (MICROBATCHES if staged else 1)
    ids = torch.randint(0, 1000, (rows, 128))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        if staged:
            model.step(input_ids=ids, labels=ids)
        else:
            model(input_ids=ids, labels=ids).loss.backward()

    with mock.patch.object(dist, "recv", lambda tensor, *_, **__: tensor.fill_(1)):  # the other rank agrees on shapes
        step()
    optimizer.step()
    step()
    optimizer.step()
    peak = peak_of(step)
    with contextlib.suppress(RuntimeError):  # without entries, forwards are read from the first report on
        vescale.report(model)
    step()
    saved = vescale.report(model)
    return peak, saved.saved_bytes, saved.offloaded_bytes


def main() -> None:
    for staged in (False, True):
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2 if staged else 1)
        print("| policy | peak, MiB | of none | saved, MiB | offloaded, MiB |\n|---|---|---|---|---|")
        none = 0
        for name, policy in POLICIES.items():
            peak, saved, offloaded = measure(policy, staged)
            peak -= offloaded * (MICROBATCHES if staged else 1)
            none = none or peak
            numbers = [f"{peak / 2**20:.1f}", f"{peak / none:.2f}", f"{saved / 2**20:.1f}", f"{offloaded / 2**20:.1f}"]
            print(f"| {name} | {' | '.join(numbers)} |", flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
