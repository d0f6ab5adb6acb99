"""The engine of ``fully_shard`` on one GPU: streams, memory, time. A part of ``benchmarks/gpu.py``, or by itself:

    python benchmarks/gpu_engine.py [--device cpu] [--ranks 64] [--rounds 5]

One process is rank 0 of a simulated group (fake process group): collectives move nothing, so that stand-ins copy what
this rank has to all slots, on the stream that a collective would run on, after a random delay. All else is what a rank of
a large job does. ``--device cpu`` runs the same code without streams, small: it checks the script. Every failure is a line
of the table and exit code 1; so is an exception.

=================  =========================================================================================================
part               what must hold
=================  =========================================================================================================
stream order       losses and gradients equal those without delays bit for bit, with freed buffers poisoned (NaN) on the
                   stream that frees them, and random sleeps on every stream: a read before its write has come, or after
                   memory has gone, gives NaN or other bits
memory reuse       allocated memory returns to that at rest after each step; reserved memory stops growing after the second
peak, time         peak of reserved memory and median step time against FSDP2, turns interleaved
=================  =========================================================================================================
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale.fsdp import fully_shard

__all__ = ["Device", "Row", "measure", "table"]

SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, in-place gradients": {"in_place": True},
    "float32, direct gradients": {"direct": True},
    "bfloat16, reduced in float32": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "kept after forward": {"reshard_after_forward": False},
    "two buffers of gradients": {"buffers": 2},
    "hybrid": {"hybrid": True},
}


@dataclass
class Row:
    """One check or measurement of one setting."""

    part: str
    setting: str
    figures: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


class Device:
    """A CUDA device, or the CPU, which has no streams and whose memory is not counted."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.is_cuda = kind == "cuda"
        self.name = torch.cuda.get_device_name() if self.is_cuda else "CPU (checks this script, not a GPU)"

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.is_cuda else 0

    def reserved(self) -> int:
        return torch.cuda.memory_reserved() if self.is_cuda else 0

    def reset_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_reserved(self) -> int:
        return torch.cuda.max_memory_reserved() if self.is_cuda else 0

    @contextlib.contextmanager
    def refusing_waits(self) -> Iterator[None]:
        """Ops for which the host would wait raise."""
        if not self.is_cuda:
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def sleep(self, milliseconds: float) -> None:
        """Keep the current stream busy; ``torch.cuda._sleep`` counts cycles, of which there are 1 to 2 million a ms."""
        if self.is_cuda:
            torch.cuda._sleep(int(milliseconds * 1_500_000))


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build(device: Device, dim: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(dim) for _ in range(depth)]).to(device.kind)


def shard(model: nn.Module, mesh: DeviceMesh, how: Callable[..., Any], setting: dict[str, Any]) -> Any:
    options = {key: setting[key] for key in ("mp_policy", "reshard_after_forward") if key in setting}
    for block in model.children():
        how(block, mesh=mesh, **options)
    how(model, mesh=mesh, **options)
    sharded: Any = model
    if setting.get("in_place"):
        sharded.set_in_place_gradients()
    if setting.get("direct"):
        sharded.set_direct_linear_gradients()
    if "buffers" in setting and hasattr(sharded, "set_reduce_scatter_max_input_buffers"):  # not FSDP2's before 2.13
        sharded.set_reduce_scatter_max_input_buffers(setting["buffers"])
    return sharded


def mesh_of(device: Device, ranks: int, hybrid: bool = False) -> DeviceMesh:
    shape, names = ((2, ranks // 2), ("replicate", "shard")) if hybrid else ((ranks,), ("dp",))
    return init_device_mesh(device.kind, shape, mesh_dim_names=names)


# Stand-ins for collectives, and stress


class Repeated:
    """An all-gather in which all ranks hold what this one does: :meth:`FSDPModule.set_custom_all_gather`'s."""

    def __init__(self, between: Callable[[], None]) -> None:
        self.between = between

    def __call__(self, *, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **_: Any) -> None:
        self.between()
        for slot in output_tensor.chunk(output_tensor.numel() // max(1, input_tensor.numel())):
            if slot.data_ptr() != input_tensor.data_ptr():
                slot.copy_(input_tensor)
        self.between()


class Reduced:
    """A reduce-scatter to which all ranks contribute what this one does; rank 0 gets the first piece."""

    def __init__(self, between: Callable[[], None]) -> None:
        self.between = between

    def __call__(self, *, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **_: Any) -> None:
        self.between()
        output_tensor.copy_(input_tensor[: output_tensor.numel()])
        self.between()


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory that an :class:`Allocation` frees is filled with NaN first, on the stream that it goes back to: what reads it
    later, or is still reading it, sees that."""
    from vescale.buffer import Allocation

    free = Allocation.free

    def poison(self: Allocation) -> None:
        if self._storage is not None and self._storage.size() and self.device.type != "meta":
            stream = _OWNERS.get(id(self))
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self._storage)
                whole.fill_(255)  # every floating dtype reads NaN
        free(self)

    allocate = Allocation._allocate

    def remember(self: Allocation) -> None:
        if self.device.type == "cuda":
            _OWNERS[id(self)] = torch.cuda.current_stream(self.device)
        allocate(self)

    Allocation.free, Allocation._allocate = poison, remember  # type: ignore[method-assign]
    try:
        yield
    finally:
        Allocation.free, Allocation._allocate = free, allocate  # type: ignore[method-assign]
        _OWNERS.clear()


_OWNERS: dict[int, Any] = {}
"""The stream on which each allocation was made, by its ``id``."""


def train(model: Any, device: Device, dim: int, steps: int, tick: Callable[[], None]) -> list[torch.Tensor]:
    """Losses and this rank's gradients of every step; ``tick`` comes between modules."""

    def watch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        tick()
        output.register_hook(lambda gradient: tick())

    handles = [block.register_forward_hook(watch) for block in model.children()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, dim, generator=generator).to(device.kind)
        loss = model(x).float().square().mean()
        loss.backward()
        found.append(loss.detach().clone())
        found += [parameter.grad.to_local().clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    for handle in handles:
        handle.remove()
    device.synchronize()
    return [tensor.cpu() for tensor in found]


def stress(device: Device, ranks: int, dim: int, depth: int, steps: int, rounds: int) -> Iterator[Row]:
    """Bits with delays and poison against those without."""
    for name, setting in SETTINGS.items():
        row = Row("stream order", name)
        with recorded(row):
            mesh = mesh_of(device, ranks, setting.get("hybrid", False))
            plain = build(device, dim, depth)
            expected: list[torch.Tensor] = []
            for turn in range(rounds + 1):
                source = random.Random(turn)
                wait = (lambda s=source: device.sleep(s.random() * 2)) if turn else (lambda: None)
                model = shard(copy.deepcopy(plain), mesh, fully_shard, setting)
                for part in model.modules():
                    if hasattr(part, "set_custom_all_gather"):
                        part.set_custom_all_gather(Repeated(wait))
                        part.set_custom_reduce_scatter(Reduced(wait))
                with poisoned() if turn else contextlib.nullcontext():
                    found = train(model, device, dim, steps, wait)
                if not turn:
                    expected = found
                    row.figures["tensors"] = float(len(found))
                    if not all(bool(torch.isfinite(t).all()) for t in found):
                        row.wrong.append("the run without delays is not finite")
                    continue
                differing = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b)]
                if differing:
                    row.wrong.append(
                        f"round {turn}: {len(differing)} of {len(found)} tensors differ, first {differing[0]}"
                    )
        yield row


def reuse(device: Device, ranks: int, dim: int, depth: int, steps: int) -> Iterator[Row]:
    """Memory after each step: what rests, and nothing more."""
    for name, setting in SETTINGS.items():
        row = Row("memory reuse", name)
        with recorded(row):
            mesh = mesh_of(device, ranks, setting.get("hybrid", False))
            model = shard(build(device, dim, depth), mesh, fully_shard, setting)
            x = torch.randn(8, dim, device=device.kind)
            resting, reserved = [], []
            for _ in range(steps):
                model(x).float().square().mean().backward()
                model.zero_grad()
                device.synchronize()
                resting.append(device.allocated())
                reserved.append(device.reserved())
                still = [
                    group.path
                    for part in model.modules()
                    for group in getattr(getattr(part, "_state", None), "groups", ())
                    if group.memory.gathered is not None and group.memory.gathered.is_allocated
                ]
                if still:
                    row.wrong.append(f"gathered memory of {sorted(set(still))} is there after a step")
            row.figures = {"resting MiB": resting[-1] / 2**20, "reserved MiB": reserved[-1] / 2**20}
            if len(set(resting[1:])) > 1:
                row.wrong.append(f"allocated memory after steps: {resting}")
            if reserved[-1] > reserved[1]:
                row.wrong.append(f"reserved memory grows: {reserved}")
        yield row


def without_waiting(device: Device, ranks: int, dim: int, depth: int) -> Iterator[Row]:
    """Steps in steady state, in which the host must not wait."""
    for name, setting in SETTINGS.items():
        row = Row("host waits", name)
        with recorded(row):
            mesh = mesh_of(device, ranks, setting.get("hybrid", False))
            model = shard(build(device, dim, depth), mesh, fully_shard, setting)
            x = torch.randn(64, dim, device=device.kind)
            for _ in range(6):
                step(model, x)
            device.synchronize()
            with device.refusing_waits():
                for _ in range(3):
                    step(model, x)
        yield row


def against_stock(device: Device, ranks: int, dim: int, depth: int, rounds: int) -> Iterator[Row]:
    """Peak of reserved memory, and step time, of both engines."""
    for name, setting in SETTINGS.items():
        row = Row("peak, time", name)
        with recorded(row):
            mesh = mesh_of(device, ranks, setting.get("hybrid", False))
            x = torch.randn(64, dim, device=device.kind)
            plain = {key: setting[key] for key in setting if key not in ("in_place", "direct")}
            kinds = {"ours": (fully_shard, setting), "FSDP2": (stock_fully_shard, plain)}
            peaks: dict[str, int] = {}
            times: dict[str, list[float]] = {kind: [] for kind in kinds}
            for kind, (how, options) in kinds.items():
                model = shard(build(device, dim, depth), mesh, how, options)
                step(model, x)
                device.synchronize()
                device.reset_peak()
                before = device.reserved()
                for _ in range(3):
                    step(model, x)
                device.synchronize()
                peaks[kind] = device.peak_reserved() - before
                del model
            models = {kind: shard(build(device, dim, depth), mesh, how, o) for kind, (how, o) in kinds.items()}
            for turn in range(rounds + 2):
                for kind, model in models.items():
                    device.synchronize()
                    start = time.perf_counter()
                    step(model, x)
                    device.synchronize()
                    if turn >= 2:
                        times[kind].append(time.perf_counter() - start)
            row.figures["peak MiB"] = peaks["ours"] / 2**20
            if peaks["FSDP2"]:
                row.figures["peak / FSDP2"] = peaks["ours"] / peaks["FSDP2"]
            row.figures["ms"] = 1e3 * statistics.median(times["ours"])
            row.figures["time / FSDP2"] = statistics.median(times["ours"]) / statistics.median(times["FSDP2"])
        yield row


def step(model: Any, x: torch.Tensor) -> None:
    model(x).float().square().mean().backward()
    model.zero_grad()


@contextlib.contextmanager
def recorded(row: Row) -> Iterator[None]:
    """What fails is a line of the table, and the rest is run all the same."""
    try:
        yield
    except Exception as error:
        row.wrong.append(f"{type(error).__name__}: {error}")


def measure(device: Device, ranks: int = 64, rounds: int = 5) -> list[Row]:
    """All parts; makes the fake process group, and leaves none. Small on the CPU."""
    dim, depth, steps = (2048, 8, 3) if device.is_cuda else (32, 3, 2)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        return [
            *stress(device, ranks, dim, depth, steps, rounds),
            *reuse(device, ranks, dim, depth, steps + 2),
            *without_waiting(device, ranks, dim, depth),
            *against_stock(device, ranks, dim, depth, rounds),
        ]
    finally:
        dist.destroy_process_group()


def table(rows: list[Row]) -> str:
    lines = ["| part | setting | figures | wrong | the first |", "|---|---|---|---|---|"]
    for row in rows:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in row.figures.items())
        lines.append(
            f"| {row.part} | {row.setting} | {figures} | {len(row.wrong)} | {row.wrong[0] if row.wrong else ''} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was run (--device cpu checks the script itself)")
        return 0
    device = Device(given.device)
    rows = measure(device, given.ranks, given.rounds)
    wrong = sum(len(row.wrong) for row in rows)
    print(f"{device.name}, torch {torch.__version__}, rank 0 of {given.ranks}: {len(rows)} checks, {wrong} wrong.\n")
    print(table(rows))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
