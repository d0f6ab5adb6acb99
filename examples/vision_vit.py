"""Vision: a ViT (transformers) learns to read scikit-learn's digits, a data set of real images that the package contains.

    python examples/vision_vit.py
    torchrun --nproc-per-node 4 examples/vision_vit.py --mesh dp=2,tp=2

The last batch of an epoch is smaller than the others, and not divisible by the number of ranks: the step is still that
of one device.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

import vescale


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small ViT on digits.")
    parser.add_argument("--mesh", default="dp=-1,tp=1")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--images", type=int, default=1437, help="for training; the others are for evaluation")
    return parser.parse_args(argv)


def make_model() -> ViTForImageClassification:
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=10,
    )
    return ViTForImageClassification(config)


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 1,797 images of shape (1, 8, 8), and their digits, in a fixed order."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(3))
    pictures = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    return pictures[order], torch.tensor(digits.target)[order]


@torch.no_grad()
def accuracy(model: torch.nn.Module, pictures: torch.Tensor, classes: torch.Tensor) -> float:
    """Return the accuracy on all images, on every rank."""
    model.eval()
    found = model(pixel_values=pictures).logits.argmax(-1)
    model.train()
    return (found == classes).float().mean().item()


def main(argv: list[str] | None = None) -> list[float]:
    """Train, and return the losses and the accuracy on held-out images."""
    args = parse(argv)
    mesh = vescale.init_mesh(args.mesh)
    device = mesh.device_type
    torch.manual_seed(17)  # the same on every rank: model, order of data
    with vescale.deferred_init():
        model = make_model()
    plan = vescale.plan_zoo.load("vit", mesh)
    plan.shard("<out:logits>", torch.distributed.tensor.Replicate(), mesh=("dp", "tp"))  # plain tensors for the script
    model = vescale.parallelize(model, plan, strict=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    pictures, classes = images()
    training = TensorDataset(pictures[: args.images], classes[: args.images])
    loader = DataLoader(
        training, batch_size=args.batch, shuffle=True
    )  # the same seed, and so the same batches, on every rank
    watch = vescale.debug.monitor(model, every=10)
    losses = []
    for epoch in range(args.epochs):
        for batch, labels in loader:
            loss = model(pixel_values=batch.to(device), labels=labels.to(device)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss, tokens=len(batch))
            losses.append(loss.item())
        with watch.pause():
            found = accuracy(model, pictures[args.images :].to(device), classes[args.images :].to(device))
        if dist.get_rank() == 0:
            print(f"epoch {epoch}  accuracy on held-out images {found:.3f}", flush=True)
    watch.close()
    return [*losses, found]


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
