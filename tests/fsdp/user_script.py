"""A training script as users of PyTorch's FSDP2 write it; the test changes the first import, nothing else."""

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.w1, self.w2 = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(3 * dim, dim, bias=False)

    def init_weights(self) -> None:
        for linear in (self.qkv, self.out, self.w1, self.w2):
            nn.init.constant_(linear.weight, 0.02)
        for norm in (self.attention_norm, self.ffn_norm):
            norm.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.w2(nn.functional.silu(self.w1(self.ffn_norm(x))))


class Transformer(nn.Module):
    def __init__(self, dim: int = 12, vocab: int = 31) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleDict({str(i): Layer(dim) for i in range(3)})
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, vocab, bias=False)

    def init_weights(self) -> None:
        nn.init.constant_(self.tok_embeddings.weight, 0.5)
        for layer in self.layers.values():
            layer.init_weights()
        self.norm.reset_parameters()
        nn.init.constant_(self.output.weight, 0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, param_dtype: torch.dtype, offload: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    config = {"mesh": mesh, "mp_policy": policy}
    if offload:
        config["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    fully_shard(model.tok_embeddings, **config, reshard_after_forward=True)
    for layer in model.layers.values():
        fully_shard(layer, **config, reshard_after_forward=True)
    fully_shard([model.norm, model.output], **config, reshard_after_forward=False)
    fully_shard(model, **config)


class AppState(Stateful):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


def train(rank: int, mesh_shape: tuple[int, ...], folder: str, param_dtype: torch.dtype, offload: bool) -> list[float]:
    names = ("dp_replicate", "dp_shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    with torch.device("meta"):
        model = Transformer()
    apply_fsdp(model, mesh, param_dtype, offload)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    assert isinstance(model, FSDPModule) and all(isinstance(layer, FSDPModule) for layer in model.layers.values())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=False, foreach=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    found = []
    for step in range(4):
        if step == 2:
            dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=folder)
            dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=folder)
        optimizer.zero_grad()
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            model.set_is_last_backward(micro == 1)
            tokens = torch.randint(
                0, 31, (2, 9), generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            )
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()) / 2
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        scheduler.step()
        found += [loss.item(), norm.item()]
    model.eval()
    with torch.no_grad():
        found.append(model(torch.arange(8)[None]).float().mean().item())
    return found
