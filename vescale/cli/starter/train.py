"""Training: `python train.py`, or `torchrun --nproc-per-node 4 train.py mesh=dp=2,tp=2`; KEY=VALUE changes config.yaml."""

import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import yaml
from model import Decoder
from torch.utils.data import DataLoader, Dataset

import vescale

HERE = Path(__file__).parent


class Text(Dataset):
    """Bytes of Python's manual, and those that follow them. Put your own data here: a row for each index."""

    def __init__(self, length: int) -> None:
        text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
        self.tokens, self.length = torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = index * self.length
        return self.tokens[begin : begin + self.length], self.tokens[begin + 1 : begin + self.length + 1]


def read_config(changes: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((HERE / "config.yaml").read_text())
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals or key not in config:
            raise SystemExit(f"{change!r}: write KEY=VALUE with a key of config.yaml: {', '.join(config)}")
        config[key] = yaml.safe_load(value)
    return config


def main(changes: list[str]) -> list[float]:
    """Train; returns the losses of the steps that this run has made."""
    config = read_config(changes)
    mesh = vescale.init_mesh(config["mesh"])
    torch.manual_seed(config["seed"])  # the same on every rank
    with vescale.deferred_init():
        model = Decoder(**config["model"])  # no memory: each rank makes its own parts
    model = vescale.parallelize(model, vescale.Plan.from_yaml(HERE / config["plan"], mesh), strict=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["learning_rate"])
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=config["warmup"])
    data = Text(config["model"]["length"])
    batches = vescale.ShardedBatchSampler(data, config["batch"], mesh, "dp", shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_sampler=batches)

    out = HERE / config["out"]
    losses: list[float] = []
    rows: Iterator[Any] = iter(())
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": batches}
    with (
        vescale.checkpoint.Checkpointer(out / "checkpoints", keep=2) as checkpoints,
        vescale.debug.monitor(model, jsonl=out / "steps.jsonl", sequence_length=data.length, every=10) as watch,
    ):
        found = checkpoints.restore(**state)
        for step in range(found["step"] + 1 if found else 0, config["steps"]):
            batch = next(rows, None)
            if batch is None:  # the next epoch
                rows = iter(loader)
                batch = next(rows)
            tokens, labels = (x.to(mesh.device_type) for x in batch)
            loss = model(tokens, labels)
            loss.backward()
            vescale.optim.clip_grad_norm_(model.parameters(), config["clip"])
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            watch.step(loss, tokens=config["batch"] * data.length, step=step)
            losses.append(loss.item())
            if (step + 1) % config["save_every"] == 0:
                checkpoints.save(step, **state)  # in the background
    return losses


if __name__ == "__main__":
    main(sys.argv[1:])
    dist.destroy_process_group()
