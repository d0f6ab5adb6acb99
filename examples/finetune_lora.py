"""Fine-tuning Hugging Face weights with LoRA (PEFT), and exporting adapters and merged weights.

    python examples/finetune_lora.py --out lora
    torchrun --nproc-per-node 4 examples/finetune_lora.py --mesh dp=2,tp=2 --out lora
    torchrun ... examples/finetune_lora.py --base models/Llama-3.2-1B --out lora   # a folder of Hugging Face weights

Without --base, the example first creates a small Llama in OUT/base. Each rank reads only its own slices of the weights.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import Shard
from transformers import LlamaConfig, LlamaForCausalLM

import vescale
from vescale.checkpoint import export_hf, load_hf


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="LoRA fine-tuning of a Llama.")
    parser.add_argument("--mesh", default="dp=-1,tp=1")
    parser.add_argument("--base", type=Path, help="folder with config.json and safetensors; left out: one is made")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--rank", type=int, default=4, help="of the adapters")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(argv)


def make_base(folder: Path) -> None:
    """Save a small model, in the form of one from the Hub."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_model(base: Path, rank: int) -> torch.nn.Module:
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(base))
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.05, target_modules=targets))


def make_plan(mesh: torch.distributed.device_mesh.DeviceMesh) -> vescale.Plan:
    """Return the zoo's plan for the base model, with adapters sharded like the weights that they adapt."""
    plan = vescale.plan_zoo.load("llama", mesh)
    plan.shard(r".*\.(q|k|v|gate|up)_proj\.lora_B\..*\.weight", Shard(0), mesh="tp")
    plan.shard(r".*\.(o|down)_proj\.lora_A\..*\.weight", Shard(1), mesh="tp")
    return plan


def batches(args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Yield global batches, the same on every rank; the plan shards them."""
    text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))
    generator = torch.Generator().manual_seed(5)
    for _ in range(args.steps):
        starts = torch.randint(len(text) - args.length, (args.batch,), generator=generator).tolist()
        yield torch.stack([text[start : start + args.length] for start in starts])


def main(argv: list[str] | None = None) -> list[float]:
    """Train, write OUT/adapters and OUT/merged, and return the losses."""
    args = parse(argv)
    mesh = vescale.init_mesh(args.mesh)
    base = args.base or args.out / "base"
    if args.base is None:
        if dist.get_rank() == 0:
            make_base(base)
        dist.barrier()
    torch.manual_seed(17)
    with vescale.deferred_init():
        model = make_model(base, args.rank)
    model = vescale.parallelize(model, make_plan(mesh), strict=True)
    load_hf(model.get_base_model(), base)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    watch = vescale.debug.monitor(model, jsonl=args.out / "steps.jsonl", sequence_length=args.length, every=10)
    losses = []
    for ids in batches(args):
        ids = ids.to(mesh.device_type)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        vescale.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss, tokens=ids.numel())
        losses.append(loss.item())
    watch.close()
    model.save_pretrained(args.out / "adapters")  # only the adapters, in the form that PEFT loads
    export_hf(model.merge_and_unload(), args.out / "merged")  # the merged model, in the form that transformers loads
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
