"""Four kinds of parallelism at once: pipeline, sharded data (ZeRO), context and tensor parallelism.

    python examples/pipeline_4d.py --microbatches 4
    torchrun --nproc-per-node 4 examples/pipeline_4d.py --mesh pp=2,dp=1,cp=1,tp=2
    torchrun --nproc-per-node 16 examples/pipeline_4d.py --mesh pp=2,dp=2,cp=2,tp=2

Stages are parts of the unmodified model; .step() trains on the whole batch with one device's loss, gradients and dropout.
"""

import argparse
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import vescale


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Llama in pipeline stages.")
    parser.add_argument("--mesh", default="pp=-1,dp=1,cp=1,tp=1")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="divisible by 8 times the size of cp")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--schedule", default="1F1B")
    return parser.parse_args(argv)


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        max_position_embeddings=args.length,
    )
    return LlamaForCausalLM(config)


def make_plan(mesh: torch.distributed.device_mesh.DeviceMesh, args: argparse.Namespace) -> vescale.Plan:
    name = "llama_cp" if mesh["cp"].size() > 1 else "llama"
    plan = vescale.plan_zoo.load(name, mesh)  # entries for dp, cp and tp; a mesh may have more axes
    plan.zero(3, axis="dp")  # ZeRO-3 inside each stage
    plan.pipeline(balance="cost", mesh="pp", schedule=args.schedule, microbatches=args.microbatches)
    return plan


def batches(args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Yield global batches, the same on every rank; the plan shards them."""
    text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))
    generator = torch.Generator().manual_seed(5)
    for _ in range(args.steps):
        starts = torch.randint(len(text) - args.length, (args.batch,), generator=generator).tolist()
        yield torch.stack([text[start : start + args.length] for start in starts])


def main(argv: list[str] | None = None) -> list[float]:
    """Train, and return the losses."""
    args = parse(argv)
    mesh = vescale.init_mesh(args.mesh)
    torch.manual_seed(17)  # the same on every rank
    model = make_model(args)
    flops = vescale.debug.flops_per_token(model, args.length)  # of the whole model, before it is split
    model = vescale.parallelize(model, make_plan(mesh, args))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # for the stages of this rank
    watch = vescale.debug.monitor(model, flops_per_token=flops, every=10)
    losses = []
    for ids in batches(args):
        ids = ids.to(mesh.device_type)
        loss = model.step(input_ids=ids, labels=ids)  # the whole batch, forward and backward
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss, tokens=ids.numel())
        losses.append(loss.item())
    watch.close()
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
