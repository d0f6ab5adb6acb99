"""Diffusion: a DiT (diffusers) learns to draw scikit-learn's digits, a data set of real images that the package contains.

    python examples/diffusion_dit.py
    torchrun --nproc-per-node 4 examples/diffusion_dit.py --mesh dp=2,tp=2

On every mesh, the noise that the script draws with torch.randn_like, and the classes that DiT drops for guidance, are
those of one device, bit for bit. At the end, samples are drawn with an exponential moving average of the parameters.
"""

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import DDIMScheduler, DiTTransformer2DModel
from sklearn.datasets import load_digits

import vescale


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small DiT on digits.")
    parser.add_argument("--mesh", default="dp=-1,tp=1")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--samples", type=int, default=4, help="digits that are drawn at the end; 0: none")
    return parser.parse_args(argv)


def make_model() -> DiTTransformer2DModel:
    return DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=1,
        out_channels=1,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=1000,
    )


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 1,797 images of shape (1, 8, 8) in [-1, 1], and their digits."""
    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(digits.target)


def batches(args: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield global batches, the same on every rank; the plan shards them."""
    pictures, classes = images()
    generator = torch.Generator().manual_seed(5)
    for _ in range(args.steps):
        rows = torch.randint(len(pictures), (args.batch,), generator=generator)
        yield pictures[rows], classes[rows]


def loss_of(
    model: torch.nn.Module, noising: DDIMScheduler, pictures: torch.Tensor, classes: torch.Tensor
) -> torch.Tensor:
    """Return the mean squared error of the noise, as on one device: all tensors are global."""
    noise = torch.randn_like(pictures)
    times = torch.randint(noising.config.num_train_timesteps, (len(pictures),), device=pictures.device)
    noisy = noising.add_noise(pictures, noise, times)
    found = model(hidden_states=noisy, timestep=times, class_labels=classes).sample
    return F.mse_loss(found, noise)


@torch.no_grad()
def draw(model: torch.nn.Module, noising: DDIMScheduler, classes: torch.Tensor) -> torch.Tensor:
    """Draw images of ``classes`` from noise, in 10 steps. All ranks must call this."""
    model.eval()
    noising.set_timesteps(10)
    pictures = torch.randn(len(classes), 1, 8, 8, device=classes.device)
    for time in noising.timesteps:
        noise = model(hidden_states=pictures, timestep=time.expand(len(classes)), class_labels=classes).sample
        pictures = noising.step(noise, time, pictures).prev_sample
    model.train()
    return pictures


def show(picture: torch.Tensor) -> str:
    return "\n".join("".join(" .:-=+*#%@"[int((x + 1) * 4.99)] * 2 for x in row.clamp(-1, 1)) for row in picture[0])


def main(argv: list[str] | None = None) -> list[float]:
    """Train, and return the losses."""
    args = parse(argv)
    mesh = vescale.init_mesh(args.mesh)
    device = mesh.device_type
    torch.manual_seed(17)  # the same on every rank
    with vescale.deferred_init():
        model = make_model()
    plan = vescale.plan_zoo.load("dit", mesh)
    plan.shard("<out:sample>", torch.distributed.tensor.Replicate(), mesh=("dp", "tp"))  # a plain tensor for the loss
    model = vescale.parallelize(model, plan, strict=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    average = vescale.optim.EMA(model, decay=0.95)
    noising = DDIMScheduler()
    watch = vescale.debug.monitor(model, every=10)
    losses = []
    for pictures, classes in batches(args):
        loss = loss_of(model, noising, pictures.to(device), classes.to(device))
        loss.backward()
        vescale.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        watch.step(loss, tokens=args.batch)
        losses.append(loss.item())
    watch.close()
    if args.samples:
        with average.swap():
            drawn = draw(model, noising, torch.arange(args.samples, device=device) % 10)
        if dist.get_rank() == 0:
            print("\n\n".join(show(picture) for picture in drawn), flush=True)
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
