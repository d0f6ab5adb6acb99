"""Long sequences: each rank has a part of every sequence, and keys and values circulate in a ring.

    python examples/long_context.py
    torchrun --nproc-per-node 4 examples/long_context.py --mesh dp=1,cp=4,tp=1
    torchrun --nproc-per-node 4 examples/long_context.py --mesh dp=1,cp=2,tp=2 --length 1024

The plan llama_cp divides the sequence into short runs that alternate between the ranks, which balances causal attention.
No rank ever holds the keys of a whole sequence, nor, with activation checkpointing, the activations of all layers.
"""

import argparse
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import vescale


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Llama on long sequences.")
    parser.add_argument("--mesh", default="dp=1,cp=-1,tp=1")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=512, help="divisible by 8 times the size of cp")
    return parser.parse_args(argv)


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=args.length,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_plan(mesh: torch.distributed.device_mesh.DeviceMesh) -> vescale.Plan:
    plan = vescale.plan_zoo.load("llama_cp", mesh)
    return plan.checkpoint(r"model\.layers\.\d+", "full")  # backward recomputes layers, but not collectives


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
    torch.manual_seed(17)
    with vescale.deferred_init():
        model = make_model(args)
    model = vescale.parallelize(model, make_plan(mesh), strict=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch = vescale.debug.monitor(model, sequence_length=args.length, every=4)
    losses = []
    for ids in batches(args):
        ids = ids.to(mesh.device_type)
        loss = model(input_ids=ids, labels=ids).loss  # labels are replicated
        loss.backward()
        vescale.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss, tokens=ids.numel())
        losses.append(loss.item())
    watch.close()
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
