"""A training script on PyTorch's FSDP2: torchrun --nproc-per-node 4 examples/migrate_fsdp2/before.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from vescale.fsdp import MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(x)))


def main(steps: int = 10) -> list[float]:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32), *(Block(32) for _ in range(3)), nn.Linear(32, 64)).to(device)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in model[1:4]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(1 + dist.get_rank())  # each rank has its own batch
    losses = []
    for _ in range(steps):
        first = torch.randint(64, (8, 1), generator=data)
        tokens = ((first + 7 * torch.arange(17)) % 64).to(device)  # sequences that can be learned
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_(), op=dist.ReduceOp.SUM)
        losses.append(loss.item() / dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"loss {losses[-1]:.6f}", flush=True)
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
