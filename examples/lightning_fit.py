"""PyTorch Lightning on a mesh with any axes.

    python examples/lightning_fit.py
    torchrun --nproc-per-node 4 examples/lightning_fit.py --mesh dp=2,tp=2

Lightning's ModelParallelStrategy lets a module parallelize itself in configure_model(); MeshStrategy provides the mesh.
The loader of every rank draws the same global batches, which the plan shards. Checkpoints are Lightning's sharded ones.
"""

import argparse
import os
from typing import Any

import lightning
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.data import DataLoader, TensorDataset

import vescale
from vescale.integrations import MeshStrategy


class Classifier(lightning.LightningModule):
    """A LightningModule for one device, except for configure_model()."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4))
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self._device_mesh is None or hasattr(self, "plan"):
            return  # on one device, or already parallelized
        self.plan = vescale.Plan(self.device_mesh)
        self.plan.shard("<in:input>", Shard(0), mesh="dp")
        self.plan.shard("0.(weight|bias)", Shard(0), mesh="tp")
        self.plan.shard("3.weight", Shard(1), mesh="tp")
        self.plan.shard("<out>", Replicate(), mesh=("dp", "tp"))  # the script gets plain tensors
        self.plan.zero(3, axis="dp", path="(0|3).*")
        vescale.parallelize(self.net, self.plan, strict=True)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(256, 16, generator=generator)
    return DataLoader(TensorDataset(x, (x @ torch.randn(16, 4, generator=generator)).argmax(-1)), batch_size=32)


def main(argv: list[str] | None = None) -> list[float]:
    """Train, and return the losses."""
    parser = argparse.ArgumentParser(description="Train a classifier with Lightning.")
    parser.add_argument("--mesh", default="dp=-1,tp=1")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save", help="a folder for a checkpoint at the end")
    args = parser.parse_args(argv)
    torch.manual_seed(17)
    module = Classifier()
    trainer = lightning.Trainer(
        strategy=MeshStrategy(args.mesh),
        accelerator="auto",
        devices="auto" if torch.accelerator.is_available() else int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        max_epochs=args.epochs,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader())
    if args.save:
        trainer.save_checkpoint(args.save)
    if trainer.is_global_zero:
        print(f"loss {module.losses[0]:.4f} -> {module.losses[-1]:.4f}", flush=True)
    return module.losses


if __name__ == "__main__":
    main()
