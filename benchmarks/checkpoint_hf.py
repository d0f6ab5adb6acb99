"""``load_hf`` and ``export_hf`` on gloo ranks against plain file reads and writes of as many bytes.

    python benchmarks/checkpoint_hf.py --layers 16 --ranks 4

Makes a Llama of about a billion bf16 parameters (with 16 layers), in files of 1 GB, sharded by ``fully_shard``. In turns,
each rank loads its part with ``load_hf``, and reads as many bytes of the same files with plain reads into memory that is
there already. Both find the files in the page cache, so that the ratio is what ``load_hf`` adds. A turn lasts from the first
rank's start to the last rank's end: where ranks share processors, one begins later than the others, and ``load_hf`` waits
for it. Printed are medians of turns and of the processor time of all ranks, the median and the quartiles of the ratios of
neighbouring turns, the growth of a rank's resident memory over its shards, and the bytes that ranks write in an export.
``--turns`` also prints each turn, and for each rank its processor time and how long it was ready to run without a processor:
a slow turn in which these waits have grown is the scheduler's; where neither has grown, the rank waited for another one.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from vescale.checkpoint import export_hf, load_hf, open_stored
from vescale.checkpoint._safetensors import create_file, index_of, plan_files, write_block
from vescale.fsdp import fully_shard


def build(layers: int, hidden: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def write_files(folder: Path, model: Any) -> int:
    forms = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in model.state_dict().items()}
    files = plan_files(forms, "1GB")
    generator = torch.Generator().manual_seed(0)
    for file in files:
        create_file(folder / file.name, file)
        descriptor = os.open(folder / file.name, os.O_WRONLY)
        for entry in file.tensors.values():
            dtype, shape, _ = entry
            bits = (
                torch.randint(0, 256, (shape[-1] * 2,), dtype=torch.uint8, generator=generator).view(torch.int16)
                & 0x3FFF
            )
            write_block(descriptor, entry, (0,) * len(shape), bits.view(dtype).expand(shape))
        os.close(descriptor)
    (folder / "model.safetensors.index.json").write_text(index_of(files))
    model.config.save_pretrained(folder)
    return sum(file.size for file in files)


def resident() -> tuple[int, int]:
    """(now, most since the last reset) in bytes; Linux."""
    text = Path("/proc/self/status").read_text()
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Vm")}
    return values["VmRSS"], values["VmHWM"]


def waited() -> float:
    """Seconds that this thread was ready to run and did not; Linux."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def plain_reads(folder: Path, buffer: torch.Tensor, rank: int, ranks: int) -> None:
    """As many bytes as this rank holds, from every file, straight into memory that is there."""
    view, at = memoryview(buffer.numpy()), 0
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        low, high = size * rank // ranks, size * (rank + 1) // ranks
        with path.open("rb", buffering=0) as file:
            file.seek(low)
            while low < high:
                count = file.readinto(view[at : at + min(high - low, 16 << 20)])
                low, at = low + count, at + count


def work(rank: int, args: argparse.Namespace, folder: str, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(args.ranks)  # as torchrun sets it
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.ranks)
    model = build(args.layers, args.hidden)
    mesh = init_device_mesh("cpu", (args.ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    held = [parameter.to_local() for parameter in model.parameters()]
    with torch.no_grad():
        for local in held:
            local.zero_()  # pages are there before anything is measured
    largest = max(local.nbytes for local in held)
    total = sum(path.stat().st_size for path in Path(folder, "model").glob("*.safetensors"))
    buffer = torch.zeros(total // args.ranks + (1 << 20), dtype=torch.uint8)
    # Buffers that the constructor computes are of no interest here, and meta tensors have none.
    times: dict[str, list[float]] = {"load": [], "plain": []}
    processor: dict[str, list[float]] = {"load": [], "plain": []}
    extra = 0
    for repeat in range(args.repeats + 1):
        for kind in ("load", "plain") if repeat % 2 else ("plain", "load"):
            Path("/proc/self/clear_refs").write_text("5")
            before = resident()[0]
            dist.barrier()
            waits, start, busy = waited(), time.perf_counter(), time.process_time()
            if kind == "load":
                load_hf(model, Path(folder, "model"))
            else:
                plain_reads(Path(folder, "model"), buffer, rank, args.ranks)
            end, used = time.perf_counter(), torch.tensor(time.process_time() - busy)
            each = [torch.empty(3) for _ in range(args.ranks)]
            dist.all_gather(each, torch.tensor([end - start, float(used), waited() - waits]))
            span = torch.tensor([end, -start], dtype=torch.float64)  # one clock for all processes of a host
            if kind == "load":
                extra = max(extra, resident()[1] - before)
            dist.all_reduce(span, dist.ReduceOp.MAX)
            dist.all_reduce(used)
            if args.turns and rank == 0:
                ranks = " ".join("{:.0f} ({:.0f}+{:.0f})".format(*(1e3 * one).tolist()) for one in each)
                print(
                    f"{repeat} {kind}: {float(span.sum()) * 1e3:.0f} ms; of ranks, processor + waits: {ranks}",
                    flush=True,
                )
            times[kind].append(float(span.sum()))
            processor[kind].append(float(used))
    dist.barrier()
    start = time.perf_counter()
    written = export_hf(model, Path(folder, "export"), max_shard_size="1GB")
    export_time = time.perf_counter() - start
    if rank == 0:
        measured = [{kind: values[1:] for kind, values in each.items()} for each in (times, processor)]
        results.put((*measured, extra, largest, written, export_time))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--turns", action="store_true", help="print each turn")
    parser.add_argument("--folder", help="where the files are made (default: the folder of temporary files)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        Path(folder, "model").mkdir()
        model = build(args.layers, args.hidden)
        size = write_files(Path(folder, "model"), model)
        context = mp.get_context("spawn")
        results = context.SimpleQueue()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.spawn(work, (args, folder, port, results), nprocs=args.ranks)
        times, processor, extra, largest, written, export_time = results.get()
        same = open_stored(Path(folder, "model")).tensors.keys() == open_stored(Path(folder, "export")).tensors.keys()
        medians = {kind: statistics.median(values) for kind, values in times.items()}
        ratios = statistics.quantiles([a / b for a, b in zip(times["load"], times["plain"])], n=4)
        report = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "gigabytes": size / 1e9,
            "load_seconds": medians["load"],
            "plain_seconds": medians["plain"],
            "ratio": ratios[1],
            "quartiles": [ratios[0], ratios[2]],
            "processor_ratio": statistics.median(a / b for a, b in zip(processor["load"], processor["plain"])),
            "extra_mib": extra / 2**20,
            "allowed_mib": largest / 2**20 + 64,
            "export_seconds": export_time,
            "export_balance": max(written) * len(written) / sum(written),
            "same_names": same,
        }
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
