"""Pretraining a Llama from a configuration, on Python's own manual, byte by byte.

    python examples/pretrain.py                                                     # one device
    torchrun --nproc-per-node 4 examples/pretrain.py --mesh dp=2,tp=2               # ZeRO-3 x tensor parallel
    torchrun --nproc-per-node 4 examples/pretrain.py --mesh dp=1,tp=4 --steps 60    # continues from the last checkpoint

On every mesh, losses are those of one device. The script uses GPUs if there are any, and CPUs otherwise.
"""

import argparse
import contextlib
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import vescale


class Manual(Dataset):
    """Sequences of bytes of Python's manual, of which the last tenth is for evaluation."""

    def __init__(self, length: int, evaluation: bool = False) -> None:
        text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
        begin = len(text) * 9 // 10
        self.bytes = torch.tensor(list(text[begin:] if evaluation else text[:begin]))
        self.length = length

    def __len__(self) -> int:
        return len(self.bytes) // self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.bytes[index * self.length : (index + 1) * self.length]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pretrain a small Llama on Python's manual.")
    parser.add_argument("--mesh", default="dp=-1,tp=1", help="axes dp and tp; -1: the ranks that are left")
    parser.add_argument("--plan", default="llama_zero3", help="of the zoo: llama, llama_zero3; or a YAML file")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8, help="sequences of the whole job in a micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16, reduce gradients in float32")
    parser.add_argument("--evaluate-every", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--out", type=Path, help="folder of checkpoints and steps.jsonl, from which a run continues")
    parser.add_argument("--tensorboard", type=Path, help="a folder for TensorBoard (pip install tensorboard)")
    return parser.parse_args(argv)


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=args.length,
    )
    return LlamaForCausalLM(config)


def make_plan(args: argparse.Namespace, mesh: torch.distributed.device_mesh.DeviceMesh) -> vescale.Plan:
    if args.plan.endswith((".yaml", ".yml")):
        plan = vescale.Plan.from_yaml(Path(args.plan), mesh)
    else:
        plan = vescale.plan_zoo.load(args.plan, mesh).local_inputs()  # each rank passes its own rows
    if args.bfloat16:
        plan.precision("", param="bfloat16", reduce="float32")
    return plan


@torch.no_grad()
def evaluate(model: torch.nn.Module, batches: DataLoader, device: str) -> float:
    """Return the mean loss. All ranks must call this, each with its own rows."""
    model.eval()
    losses = [model(input_ids=ids.to(device), labels=ids.to(device)).loss.item() for ids in batches]
    model.train()
    return sum(losses) / len(losses)


def main(argv: list[str] | None = None) -> list[float]:
    """Train, and return the loss of each step of this run."""
    args = parse(argv)
    mesh = vescale.init_mesh(args.mesh)
    device = mesh.device_type
    torch.manual_seed(17)  # the same on every rank
    with vescale.deferred_init():
        model = make_model(args)  # takes no memory: parallelize creates only the parts of each rank
    model = vescale.parallelize(model, make_plan(args, mesh), strict=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    warmup = LinearLR(optimizer, 0.1, total_iters=5)
    scheduler = SequentialLR(optimizer, [warmup, CosineAnnealingLR(optimizer, 200)], [5])

    data, held_out = Manual(args.length), Manual(args.length, evaluation=True)
    batches = vescale.ShardedBatchSampler(data, args.batch, mesh, "dp", shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_sampler=batches)
    evaluation = vescale.ShardedBatchSampler(held_out, args.batch, mesh, "dp", drop_last=True)
    held_out_loader = DataLoader(held_out, batch_sampler=evaluation)

    checkpoints = vescale.checkpoint.Checkpointer(args.out / "checkpoints", keep=2) if args.out else None
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": batches}
    found = checkpoints.restore(**state) if checkpoints else None
    first = found["step"] + 1 if found else 0

    watch = vescale.debug.monitor(
        model,
        jsonl=args.out and args.out / "steps.jsonl",
        tensorboard=args.tensorboard,
        every=10,
        sequence_length=args.length,
        peak_flops=None if device == "cuda" else "measure",
    )
    losses, rows = [], iter(loader)
    for step in range(first, args.steps):
        total = 0.0
        for number in range(args.accumulate):
            ids = next(rows, None)
            if ids is None:  # the next epoch
                rows = iter(loader)
                ids = next(rows)
            ids = ids.to(device)
            last = number == args.accumulate - 1
            with contextlib.nullcontext() if last else vescale.no_sync(model):
                loss = model(input_ids=ids, labels=ids).loss / args.accumulate
                loss.backward()
            total += loss.detach()
        norm = vescale.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        watch.step(
            total,
            tokens=args.batch * args.accumulate * args.length,
            step=step,
            lr=scheduler.get_last_lr()[0],
            norm=norm.item(),
        )
        losses.append(total.item())
        if (step + 1) % args.evaluate_every == 0:
            with watch.pause():
                mean = evaluate(model, held_out_loader, device)
            if dist.get_rank() == 0:
                print(f"step {step}  evaluation loss {mean:.4f}", flush=True)
        if checkpoints and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
            checkpoints.save(step, **state)  # in the background
    watch.close()
    if checkpoints:
        checkpoints.close()
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
