"""A training step by vescale beside the same step by other libraries, on the host: those of them that are installed.

Each library runs in a process of its own, in turns with a step written with PyTorch alone, which is the unit of its row. The
process group is fake (collectives return at once) and the model small, so that only the host's work shows.

* ``tp``: a Llama of 4 layers over two ranks of tensor parallelism, forward and backward; unit: local tensors and
  collectives written by hand (benchmarks/parallelize.py). ``stock``: ``parallelize_module``; ``megatron``: `GPTModel` of
  ``megatron.core`` with its own layers; ``torchtitan``: its Llama 3. Both have the same sizes.
* ``zero3``: a Hugging Face Llama over two ranks, parameters, gradients and states in parts; forward, backward and AdamW;
  unit: FSDP2. ``vescale``: `vescale.fully_shard`; ``deepspeed``: stage 3.
* ``dropout``: not a time. Two real ranks train a network with dropout for three steps; the largest relative difference of a
  loss from that of one device, which trains on both batches.

python -m benchmarks.peers [--hidden 64] [--rounds 40] [--only tp zero3 dropout]

Megatron and torchtitan expect a GPU; what is replaced to run them without one is never called in a step that is timed.
Times are processor time of the main thread, medians.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

TENSOR_PARALLEL = ("vescale", "vescale static", "stock", "megatron", "torchtitan")
ZERO = ("vescale", "deepspeed")
DROPOUT = ("vescale", "fsdp2", "deepspeed")
PACKAGES = {"megatron": "megatron.core", "torchtitan": "torchtitan", "deepspeed": "deepspeed"}
LAYERS, VOCABULARY, HEAD = 4, 256, 16

Step = Callable[[], object]


def installed(library: str) -> bool:
    package = PACKAGES.get(library)
    if package is None:
        return True
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def causal_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def megatron_step(args: argparse.Namespace, ids: torch.Tensor) -> Step:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
    tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext  # dropout is 0
    heads = args.hidden // HEAD
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=args.hidden,
        num_attention_heads=heads,
        ffn_hidden_size=2 * args.hidden,
        tensor_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    length = ids.shape[1]
    positions = torch.arange(length).expand_as(ids)
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)

    def step() -> None:
        model.zero_grad()
        model(ids, positions, mask, labels=ids).mean().backward()

    return step


def torchtitan_step(args: argparse.Namespace, ids: torch.Tensor) -> Step:
    import torchtitan.models.llama3 as titan
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.common.attention import ScaledDotProductAttention

    # Its own attentions are kernels of a GPU; this one is there for its diffusion model.
    titan.get_attention_config = lambda _: ScaledDotProductAttention.Config()
    layers = titan._build_llama3_layers(
        n_layers=LAYERS,
        dim=args.hidden,
        n_heads=args.hidden // HEAD,
        hidden_dim=2 * args.hidden,
        rope=titan.ComplexRoPE.Config(dim=HEAD, max_seq_len=64, theta=10000.0),
        attn_backend="sdpa",
    )
    embedding = titan.Embedding.Config(
        num_embeddings=VOCABULARY, embedding_dim=args.hidden, param_init=titan._EMBEDDING_INIT
    )
    norm = titan.RMSNorm.Config(normalized_shape=args.hidden, param_init=titan._NORM_INIT)
    head = titan.Linear.Config(
        in_features=args.hidden, out_features=VOCABULARY, param_init=titan._output_linear_init(args.hidden)
    )
    config = titan.Llama3Model.Config(
        dim=args.hidden, vocab_size=VOCABULARY, tok_embeddings=embedding, norm=norm, lm_head=head, layers=layers
    )
    parallelism = ParallelismConfig(tensor_parallel_degree=2, enable_sequence_parallel=False)
    config.update_from_config(config=argparse.Namespace(parallelism=parallelism))
    model = config.build()
    model.init_states()
    dims = ParallelDims.from_config(parallelism, 2)
    dims.build_mesh()
    model.parallelize(dims)

    def step() -> None:
        model.zero_grad()
        logits = model(ids)  # this rank's part of the vocabulary; a loss of that part alone, which communicates nothing
        causal_loss(logits, ids % logits.shape[-1]).backward()

    return step


def tensor_parallel_step(library: str, args: argparse.Namespace, ids: torch.Tensor) -> Step:
    if library == "megatron":
        return megatron_step(args, ids)
    if library == "torchtitan":
        return torchtitan_step(args, ids)
    from benchmarks.parallelize import by_hand, llama, ours, stock

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    if library == "hand":
        model = by_hand(llama(args, 2))
    elif library == "stock":
        model = stock(llama(args), mesh)
    else:
        model = ours(llama(args), mesh, "static" if library == "vescale static" else "eager")

    def step() -> None:
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    return step


def deepspeed_engine(model: nn.Module, batch: int, optimizer: dict[str, Any]) -> Any:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": batch,
        "zero_optimization": {"stage": 3},
        "optimizer": optimizer,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(model=model, config=config, dist_init_required=False)[0]


def zero_step(library: str, args: argparse.Namespace, ids: torch.Tensor) -> Step:
    from benchmarks.parallelize import llama

    model = llama(args)
    if library == "deepspeed":
        adamw = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
        engine = deepspeed_engine(model, len(ids), adamw)

        def step() -> None:
            engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
            engine.step()

        return step
    if library == "vescale":
        from vescale import fully_shard
    else:
        from torch.distributed.fsdp import fully_shard  # type: ignore[assignment]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Step) -> float:
    start = time.thread_time()
    step()
    return time.thread_time() - start


def measure(part: str, library: str, args: argparse.Namespace) -> float:
    """A step of ``library`` by the unit's, in this process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    ids = torch.randint(0, VOCABULARY, (2, 16))
    make, unit = (tensor_parallel_step, "hand") if part == "tp" else (zero_step, "fsdp2")
    steps = [make(unit, args, ids), make(library, args, ids)]
    for _ in range(4):
        for step in steps:
            step()
    times: list[list[float]] = [[], []]
    for _ in range(args.rounds):
        for found, step in zip(times, steps):
            found.append(seconds(step))
    own, theirs = map(statistics.median, times)
    return theirs / own


def dropout_difference(library: str, rank: int, port: int) -> float:
    """Three steps of a network with dropout on two ranks: the largest relative difference of a loss from one device's."""

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))

    torch.manual_seed(1)
    x = torch.randn(64, 16)
    target = (x[:, :4] > 0).float().argmax(-1)

    def train(step: Callable[[], torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(2)
        return torch.stack([step() for _ in range(3)])

    def of(model: nn.Module, optimizer: Any, rows: slice) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x[rows]), target[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    alone = network()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    wanted = train(lambda: of(alone, plain, slice(None)))

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model, mine = network(), slice(32 * rank, 32 * rank + 32)
    if library == "vescale":
        from torch.distributed.tensor import Replicate, Shard

        import vescale

        plan = vescale.Plan(mesh)
        plan.shard("<in:input>", Shard(0))
        plan.shard("<out>", Replicate())
        plan.shard("(0|3).(weight|bias)", Shard(0))
        model = vescale.parallelize(model, plan)
        own = torch.optim.SGD(model.parameters(), lr=0.1)
        return float(((train(lambda: of(model, own, slice(None))) - wanted) / wanted).abs().max())
    if library == "deepspeed":
        engine = deepspeed_engine(model, 32, {"type": "SGD", "params": {"lr": 0.1}})

        def step() -> torch.Tensor:
            loss = nn.functional.cross_entropy(engine(x[mine]), target[mine])
            engine.backward(loss)
            engine.step()
            return loss.detach()

        found = train(step)
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=mesh)
        own = torch.optim.SGD(model.parameters(), lr=0.1)
        found = train(lambda: of(model, own, mine))
    dist.all_reduce(found)
    return float(((found / 2 - wanted) / wanted).abs().max())


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(part: str, library: str, args: argparse.Namespace) -> float:
    """The figure of one row, from a process of its own, or two that talk to each other."""
    command = [sys.executable, "-m", "benchmarks.peers", "--part", part, "--system", library]
    command += [f"--hidden={args.hidden}", f"--rounds={args.rounds}", f"--port={free_port()}"]
    ranks = range(2 if part == "dropout" else 1)
    jobs = [
        subprocess.Popen([*command, f"--rank={rank}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in ranks
    ]
    outputs = [job.communicate() for job in jobs]
    for job, (_, errors) in zip(jobs, outputs):
        if job.returncode:
            raise SystemExit(f"{part} of {library} failed:\n{errors}")
    return float(json.loads(outputs[0][0].splitlines()[-1]))


def main() -> int:
    parts = {"tp": TENSOR_PARALLEL, "zero3": ZERO, "dropout": DROPOUT}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    for hidden in ("--part", "--system"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--rank", "--port"):
        parser.add_argument(hidden, type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.layers = LAYERS
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if args.system:
        dropout = args.part == "dropout"
        measured = dropout_difference(args.system, args.rank, args.port) if dropout else None
        print(json.dumps(measure(args.part, args.system, args) if measured is None else measured))
        return 0
    for part in args.only:
        for library in parts[part]:
            figure = f"{run(part, library, args):.3g}" if installed(library) else "not installed"
            print(f"{part:8} {library:15} {figure}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
