"""Static mode against code that was written for its mesh by hand: forward and backward of a small Llama on four meshes.

The process group is fake (collectives return at once) and the model small, so that only the host's work shows. Rows:

* ``local``: the model of one rank's sizes, written for local tensors, without any collective;
* ``hand``: the same with collectives written by hand, as Megatron does, with one bucket for gradients that ranks add up;
* ``static``: the model of one device, through ``parallelize(model, plan, mode="static")``;
* ``eager``: the same in eager mode;
* ``stock``: ``torch.distributed.tensor.parallel.parallelize_module`` for tp, and by hand what it does not do.

python benchmarks/static.py [--layers 4] [--hidden 64] [--tokens 16] [--repeat 300] [--processes 3]
                            [--meshes tp sp dp_tp tp_cp] [--pairs static/hand static/local eager/hand stock/hand]

Two rows are compared at a time: their steps alternate in a process that has no other model, as in a program that trains
one, and each row comes first as often as second. (With all rows in turn, each finds the caches full of the others' code and
objects, and rows that run more of them once in a step pay most.) Times are processor time, and figures medians: of the
ratios of the pairs of one process, one figure for each process. The number of collectives of a step is counted for each row.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import math
import pstats
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from vescale import Plan, parallelize
from vescale.static import report

VOCABULARY, HEAD = 256, 16
MESHES = {"tp": {"tp": 2}, "sp": {"tp": 2}, "dp_tp": {"dp": 2, "tp": 2}, "tp_cp": {"cp": 2, "tp": 2}}
LAYER = r"layers\.\d+"


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    def __init__(self, hidden: int, share: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(hidden, hidden // share, bias=False) for _ in range(3))
        self.o = nn.Linear(hidden // share, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (f(x).view(rows, length, -1, HEAD).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(attended.transpose(1, 2).reshape(rows, length, -1))


class FeedForward(nn.Module):
    def __init__(self, hidden: int, share: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, 2 * hidden // share, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * hidden // share, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, hidden: int, share: int) -> None:
        super().__init__()
        self.norm1, self.attention = Norm(hidden), Attention(hidden, share)
        self.norm2, self.mlp = Norm(hidden), FeedForward(hidden, share)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """As one writes it for one device. ``share`` ranks divide heads and inner features; this is the part of one."""

    layer_type: type[nn.Module] = Layer

    def __init__(self, layers: int, hidden: int, length: int, share: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList([self.layer_type(hidden, share) for _ in range(layers)])
        self.norm, self.head = Norm(hidden), nn.Linear(hidden, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(length), 1e4 ** -torch.linspace(0, 1, HEAD // 2)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# By hand


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def _gathered(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    size = dist.get_world_size(group)
    whole = x.new_empty((size * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return torch.cat(whole.chunk(size), dim)


def _scattered(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    parts = torch.cat(x.chunk(dist.get_world_size(group), dim))
    own = parts.new_empty((x.shape[0], *parts.shape[1:]))
    dist.reduce_scatter_tensor(own, parts, group=group)
    return own


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _gathered(x, 1, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _scattered(grad, 1, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _scattered(x, 1, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _gathered(grad, 1, ctx.group), None


class _GatherKeys(torch.autograd.Function):
    """Keys and values of all ranks, in one collective."""

    @staticmethod
    def forward(ctx: Any, keys: torch.Tensor, values: torch.Tensor, group: Any) -> Any:
        ctx.group = group
        return _gathered(torch.stack((keys, values)), 3, group).unbind()

    @staticmethod
    def backward(ctx: Any, keys: torch.Tensor, values: torch.Tensor) -> Any:
        return *_scattered(torch.stack((keys, values)), 3, ctx.group).unbind(), None


class _Cut(torch.autograd.Function):
    """This rank's part of a sequence that all ranks have; the gradient of the whole is gathered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _gathered(grad, 1, ctx.group), None


class _Whole(torch.autograd.Function):
    """A sequence that all ranks go on with alike."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _gathered(x, 1, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.chunk(dist.get_world_size(ctx.group), 1)[dist.get_rank(ctx.group)].contiguous(), None


class HandAttention(Attention):
    cp: Any = None

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (f(x).view(rows, length, -1, HEAD).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if self.cp is not None:  # the first rank's queries meet no later keys
            k, v = (t[:, :, :length] for t in _GatherKeys.apply(k, v, self.cp))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(attended.transpose(1, 2).reshape(rows, length, -1))


class HandLayer(Layer):
    enter: Any = None
    leave: Any = None
    tp: Any = None

    def __init__(self, hidden: int, share: int) -> None:
        super().__init__(hidden, share)
        self.attention = HandAttention(hidden, share)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        tp = self.tp
        if tp is None:
            return super().forward(x, cos, sin)
        x = x + self.leave(self.attention(self.enter(self.norm1(x), tp), cos, sin), tp)
        return x + self.leave(self.mlp(self.enter(self.norm2(x), tp)), tp)


class HandLlama(Llama):
    """One rank's part, with the collectives of its mesh."""

    layer_type = HandLayer

    def __init__(self, layers: int, hidden: int, length: int, share: int, name: str = "", mesh: Any = None) -> None:
        super().__init__(layers, hidden, length, share)
        self.cut = -1 if mesh is None else {"dp_tp": 0, "tp_cp": 1}.get(name, -1)
        self.added_over = None if self.cut < 0 else mesh.get_group("dp" if name == "dp_tp" else "cp")
        self.tp = None if mesh is None else mesh.get_group("tp")
        self.keeps_sequence_cut = name == "sp" and mesh is not None
        for layer in self.layers:
            layer.tp, layer.attention.cp = self.tp, self.added_over if name == "tp_cp" else None
            layer.enter, layer.leave = (_Gather, _Scatter) if name == "sp" else (_Copy, _Reduce)
            layer.enter, layer.leave = layer.enter.apply, layer.leave.apply
        added = list(self.parameters()) if self.cut >= 0 else []
        if self.keeps_sequence_cut:
            added = [p for n, p in self.named_parameters() if "norm" in n]
        self.bucket = Bucket(added, self.tp if self.added_over is None else self.added_over) if added else None

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos, self.sin
        if self.cut >= 0:
            ids, targets = (x.chunk(2, self.cut)[0] for x in (ids, targets))
            cos, sin = (x[: ids.shape[1]] for x in (cos, sin))
        x = self.embed(ids)
        if self.keeps_sequence_cut:
            x = _Cut.apply(x, self.tp)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x)
        if self.keeps_sequence_cut:
            x = _Whole.apply(x, self.tp)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        return loss if self.cut < 0 else _Reduce.apply(loss / 2, self.added_over)


class Bucket:
    """Adds gradients up over a group, in one collective after backward."""

    def __init__(self, parameters: list[nn.Parameter], group: Any) -> None:
        self.parameters, self.group = parameters, group
        sizes = [_local(p) for p in parameters]
        self.memory = torch.empty(sum(x.numel() for x in sizes))
        self.views = [v.view_as(x) for x, v in zip(sizes, self.memory.split([x.numel() for x in sizes]))]

    def reduce(self) -> None:
        grads = [_local(p.grad) for p in self.parameters]
        torch._foreach_copy_(self.views, grads)
        dist.all_reduce(self.memory, group=self.group)
        if any(isinstance(p.grad, DTensor) for p in self.parameters):
            torch._foreach_copy_(grads, self.views)
            return
        for p, view in zip(self.parameters, self.views):
            p.grad = view


def _local(x: Any) -> torch.Tensor:
    return x._local_tensor if isinstance(x, DTensor) else x.detach()


# The rows


def plan_of(name: str, mesh: DeviceMesh) -> Plan:
    plan, inner = Plan(mesh), Shard(1) if name == "sp" else Replicate()
    if name == "dp_tp":
        plan.shard("<in:(ids|targets)>", {"dp": Shard(0)})
    if name == "tp_cp":
        plan.shard("<in:(ids|targets)>", {"cp": Shard(1)})
        plan.shard("(cos|sin)", {"cp": Shard(0)})
        plan.attention(rf"{LAYER}\.attention", "all_gather", mesh="cp")
    if name == "sp":
        plan.shard("embed.<out>", {"tp": inner})
        plan.shard("norm.<out>", {"tp": Replicate()})
    plan.shard(rf"{LAYER}.attention.<in:x>", {"tp": Replicate()})
    plan.shard(rf"{LAYER}.attention.(q|k|v).weight", {"tp": Shard(0)})
    plan.shard(rf"{LAYER}.attention.o.weight", {"tp": Shard(1)})
    plan.shard(rf"{LAYER}.attention.o.<out>", {"tp": inner})
    plan.shard(rf"{LAYER}.mlp.<in>", {"tp": Replicate()})
    plan.shard(rf"{LAYER}.mlp.(gate|up).weight", {"tp": Shard(0)})
    plan.shard(rf"{LAYER}.mlp.down.weight", {"tp": Shard(1)})
    plan.shard(rf"{LAYER}.mlp.down.<out>", {"tp": inner})
    return plan


def stock_of(model: HandLlama, name: str, mesh: DeviceMesh) -> HandLlama:
    """``model`` has all features, and no collectives of tp."""
    inner = Shard(1) if name == "sp" else Replicate()
    cuts: dict[str, Any] = {f"attention.{part}": ColwiseParallel() for part in "qkv"}
    cuts |= {"mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel()}
    cuts |= {f"{part}": RowwiseParallel(output_layouts=inner) for part in ("attention.o", "mlp.down")}
    if name == "sp":
        cuts |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        cuts["attention"] = PrepareModuleInput(
            input_layouts=(inner, None, None), desired_input_layouts=(Replicate(), None, None)
        )
        cuts["mlp"] = PrepareModuleInput(input_layouts=(inner,), desired_input_layouts=(Replicate(),))
    for layer in model.layers:
        layer.tp = None
        parallelize_module(layer, mesh["tp"], cuts)
    if model.bucket is not None:
        model.bucket = None if name == "sp" else Bucket(list(model.parameters()), model.bucket.group)
    return model


def model_of(row: str, name: str, mesh: DeviceMesh, args: argparse.Namespace) -> nn.Module:
    sizes = args.layers, args.hidden, args.tokens
    if row == "local":
        return HandLlama(*sizes, 2, f"{name} alone")
    if row == "hand":
        return HandLlama(*sizes, 2, name, mesh)
    if row == "stock":
        return stock_of(HandLlama(*sizes, 1, name, mesh), name, mesh)
    return parallelize(Llama(*sizes), plan_of(name, mesh), strict=True, mode=row)


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.found[func.__name__.partition(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def collectives(run: Callable[[], None]) -> int:
    with _Counted() as counted:
        run()
    return counted.found.total()


def step_of(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> Callable[[], None]:
    bucket = getattr(model, "bucket", None)

    def run() -> None:
        model(ids, targets).backward()
        if bucket is not None:
            bucket.reduce()

    return run


def measure(name: str, pair: str, args: argparse.Namespace) -> None:
    sizes, rows = MESHES[name], pair.split("/")
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    models = [model_of(row, name, mesh, args) for row in rows]
    ids, targets = torch.randint(VOCABULARY, (2, args.tokens)), torch.randint(VOCABULARY, (2, args.tokens))
    steps = []
    for row, model in zip(rows, models):
        given = ids, targets
        if row == "local":  # a rank's part without collectives gets the part of the batch
            num_rows, length = {"dp_tp": (1, args.tokens), "tp_cp": (2, args.tokens // 2)}.get(name, (2, args.tokens))
            given = ids[:num_rows, :length].contiguous(), targets[:num_rows, :length].contiguous()
            model.cos, model.sin = (x[:length] for x in (model.cos, model.sin))
        steps.append(step_of(model, *given))
    seconds: list[list[float]] = [[], []]
    for number in range(args.repeat + 20):
        for one in (0, 1) if number % 2 else (1, 0):
            models[one].zero_grad()
            start = time.process_time()
            steps[one]()
            if number >= 20:
                seconds[one].append(time.process_time() - start)
    if rows[0] == "static":
        found = report(models[0])
        assert not found.fallbacks and not found.eager_functions, found
    ratio = statistics.median(a / b for a, b in zip(*seconds, strict=True))
    both = " and ".join(f"{statistics.median(own) * 1e3:.2f} ms" for own in seconds)
    counts = " and ".join(str(collectives(step)) for step in steps)
    print(f"{name:6} {pair:12} {ratio:6.3f}, {both}, {counts} collectives", flush=True)
    if args.profile:
        gc.collect()
        profile = cProfile.Profile()
        profile.runcall(lambda: [steps[0]() for _ in range(20)])
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=300, help="how many pairs of steps of a process")
    parser.add_argument("--processes", type=int, default=3, help="how many processes for each pair; 0: this one")
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--pairs", nargs="+", default=["static/hand"], help="of rows, each as ROW/ROW")
    parser.add_argument("--profile", action="store_true", help="print where a step of the first row spends its time")
    args = parser.parse_args()
    if args.processes:
        sizes = [f"--{name}={getattr(args, name)}" for name in ("layers", "hidden", "tokens", "repeat")]
        sizes += ["--processes=0", *["--profile"] * args.profile]
        cases = [(name, pair) for _ in range(args.processes) for name in args.meshes for pair in args.pairs]
        commands = [[sys.executable, __file__, *sizes, "--meshes", name, "--pairs", pair] for name, pair in cases]
        return max(subprocess.run(command).returncode for command in commands)
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(MESHES[args.meshes[0]].values()))
    measure(args.meshes[0], args.pairs[0], args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
