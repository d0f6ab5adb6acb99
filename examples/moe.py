"""A mixture of experts: expert parallelism over ep; at rest, all parameters are sharded over fsdp and ep.

    python examples/moe.py
    torchrun --nproc-per-node 4 examples/moe.py --mesh fsdp=2,ep=2

Each rank computes its own rows of the batch. Uneven all-to-alls send tokens to the ranks of their experts: no token is
dropped, and losses, gradients and the load-balancing loss are those of one device.
"""

import argparse
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

import vescale

PLAN = r"""
version: 1
mesh: {fsdp: null, ep: null}
vars: {layer: 'model\.layers\.\d+', experts: 'model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj'}
shard:
  <in:(input_ids|labels)>: {fsdp: S(0), ep: S(0)}             # the batch, over all ranks
  ${experts}: {ep: S(0), fsdp: {init: Ragged, run: R}}        # whole experts over ep, each of them at rest over fsdp
  (?!${experts}).*: {fsdp: {init: Ragged, run: R}, ep: {init: Ragged, run: R}}  # all the rest: over every rank
local: {'${layer}.mlp.experts': {kind: experts, dispatch: all_to_all}}
"""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Mixtral.")
    parser.add_argument("--mesh", default="fsdp=-1,ep=1")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--experts", type=int, default=4)
    return parser.parse_args(argv)


def make_model(args: argparse.Namespace) -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=args.experts,
        num_experts_per_tok=2,
        output_router_logits=True,  # adds the load-balancing loss
        max_position_embeddings=args.length,
    )
    return MixtralForCausalLM(config)


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
    model = vescale.parallelize(model, vescale.Plan.from_yaml(PLAN, mesh), strict=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # one optimizer for experts and all the rest
    watch = vescale.debug.monitor(model, sequence_length=args.length, every=10)
    losses = []
    for ids in batches(args):
        ids = ids.to(mesh.device_type)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = vescale.optim.clip_grad_norm_(model.parameters(), 1.0)  # one norm
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss, tokens=ids.numel(), norm=norm.item())
        losses.append(loss.item())
    watch.close()
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
