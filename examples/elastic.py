"""A job that loses ranks, or whole hosts, and continues on the remaining ones with another mesh.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/elastic.py --out run

    # On each of one or two hosts. If one host fails, the job continues on the other, and on both when it is back:
    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint host-a:29500 \\
        examples/elastic.py --out /shared/run

Without the environment variable, restarted ranks find the addresses of the previous attempt (pytorch#135712). Kill any
process with ``kill -9``: torchrun restarts the ranks, the script creates a mesh for their number, and training resumes at
the newest complete step. Parameters, optimizer, dropout and the order of the data are those of an uninterrupted run, and
of one device. If a single host has fewer GPUs than before, run torchrun again with a smaller ``--nproc-per-node``.
"""

import argparse
import json
import os
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import vescale


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT-2 on as many ranks as there are.")
    parser.add_argument(
        "--out", type=Path, required=True, help="checkpoints and losses.jsonl; all hosts see this folder"
    )
    parser.add_argument(
        "--tp", type=int, default=2, help="ranks of tensor parallelism, if the number of ranks allows it"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--batch", type=int, default=12, help="sequences of the whole job: the same on any mesh")
    parser.add_argument("--length", type=int, default=32)
    return parser.parse_args(argv)


def mesh_text(ranks: int, tp: int, batch: int) -> str:
    """Return a mesh for this number of ranks: tensor parallel over at most ``tp``, data parallel over the rest."""
    tp = max(size for size in range(1, tp + 1) if ranks % size == 0)
    if batch % (ranks // tp):
        raise SystemExit(f"--batch {batch} cannot be divided among {ranks // tp} ranks of dp; choose a multiple")
    return f"dp={ranks // tp},tp={tp}"


def make_model(args: argparse.Namespace) -> GPT2LMHeadModel:
    sizes = {"vocab_size": 256, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": args.length}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))  # with dropout


def make_data(args: argparse.Namespace) -> TensorDataset:
    """Return sequences of bytes of Python's manual."""
    text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))
    return TensorDataset(text[: len(text) // args.length * args.length].view(-1, args.length))


def main(argv: list[str] | None = None) -> list[float]:
    """Train, and return the loss of each step that these ranks have run."""
    args = parse(argv)
    text = mesh_text(int(os.environ.get("WORLD_SIZE", 1)), args.tp, args.batch)
    args.out.mkdir(parents=True, exist_ok=True)
    mesh = vescale.init_mesh(text)
    torch.manual_seed(17)  # the same on every rank
    with vescale.deferred_init():
        model = make_model(args)
    plan = vescale.plan_zoo.load("gpt2", mesh).local_inputs()  # each rank passes its own rows
    model = vescale.parallelize(model, plan, strict=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = make_data(args)
    batches = vescale.ShardedBatchSampler(data, args.batch, mesh, "dp", shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_sampler=batches)

    losses: list[float] = []
    state = {"model": model, "optimizer": optimizer, "sampler": batches}
    with vescale.checkpoint.Checkpointer(args.out / "checkpoints", keep=2) as checkpoints:
        found = checkpoints.restore(**state)  # the newest complete step, saved on any mesh, or None
        first = found["step"] + 1 if found else 0
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        print(
            f"rank {dist.get_rank()} of {text}, process {os.getpid()}, attempt {attempt}: from step {first}", flush=True
        )
        rows = iter(loader)
        for step in range(first, args.steps):
            batch = next(rows, None)
            if batch is None:  # the next epoch
                rows = iter(loader)
                batch = next(rows)
            ids = batch[0].to(mesh.device_type)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if dist.get_rank() == 0:
                with (args.out / "losses.jsonl").open("a") as file:
                    file.write(json.dumps({"step": step, "loss": losses[-1], "mesh": text}) + "\n")
            if (step + 1) % args.save_every == 0:
                checkpoints.save(step, **state)  # in the background
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
