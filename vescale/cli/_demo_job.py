"""The demo's training job: real English, a byte-level BPE, a small Llama; the same on one device and on every rank."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["Collective", "Job", "make_model", "tokens_of_topics", "train_mesh", "train_one_device"]


@dataclass(frozen=True)
class Job:
    """Sizes of the training; picklable, the same in every process.

    Attributes:
        axes: (name, size) of each mesh axis.
        num_steps: optimizer steps.
        plan: of the zoo, for a Llama.
        tokens: path of a ``.npy`` file with the token ids of the text.
    """

    axes: tuple[tuple[str, int], ...]
    num_steps: int
    plan: str = "llama"
    tokens: str = ""
    vocab_size: int = 1024
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    batch_size: int = 8
    sequence_length: int = 128
    learning_rate: float = 2e-3
    seed: int = 17


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind in one training step, as rank 0 saw them."""

    axis: str
    op: str
    purpose: str
    count: int
    bytes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def tokens_of_topics(vocab_size: int) -> np.ndarray:
    """Python's own manual (``pydoc_data.topics``), tokenized by a byte-level BPE trained on it; 1-D int32."""
    from pydoc_data.topics import topics

    from tokenizers import ByteLevelBPETokenizer

    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=vocab_size, show_progress=False)
    return np.array(tokenizer.encode(text).ids, dtype=np.int32)


def make_model(job: Job) -> nn.Module:
    """Hugging Face's Llama, as it is."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=job.vocab_size,
        hidden_size=job.hidden_size,
        intermediate_size=352,
        num_hidden_layers=job.num_layers,
        num_attention_heads=job.num_heads,
        num_key_value_heads=job.num_kv_heads,
        max_position_embeddings=job.sequence_length,
    )
    torch.manual_seed(job.seed)
    return LlamaForCausalLM(config)


def _batches(job: Job) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(token ids, labels) of shape (batch, sequence); some texts are shorter, and their labels are ignored there."""
    tokens = np.load(job.tokens)
    generator = np.random.default_rng(job.seed)
    for _ in range(job.num_steps):
        starts = generator.integers(0, len(tokens) - job.sequence_length, job.batch_size)
        lengths = generator.integers(job.sequence_length // 4, job.sequence_length + 1, job.batch_size)
        ids = torch.from_numpy(np.stack([tokens[s : s + job.sequence_length] for s in starts]).astype(np.int64))
        ignored = torch.arange(job.sequence_length) >= torch.from_numpy(lengths)[:, None]
        yield ids, ids.masked_fill(ignored, -100)


def _train(job: Job, model: nn.Module, report: Callable[[int, float, float], None]) -> None:
    """The training script, which does not know of a mesh."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate)
    model.train()
    for step, (ids, labels) in enumerate(_batches(job)):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        report(step, loss.item(), time.perf_counter() - begin)


def train_one_device(job: Job, send: Callable[[tuple[Any, ...]], None]) -> None:
    """Train on one device; sends ``("step", step, loss, seconds)``."""
    _train(job, make_model(job), lambda step, loss, seconds: send(("step", step, loss, seconds)))


def train_mesh(job: Job, rank: int, send: Callable[[tuple[Any, ...]], None]) -> None:
    """Train as one rank of the mesh, strictly; rank 0 sends its steps, the program and one step's collectives."""
    from torch.distributed.device_mesh import init_device_mesh

    from vescale import plan_zoo
    from vescale._parallelize import parallelize
    from vescale.comm import record_comms
    from vescale.ir import Unit, lower

    mesh = init_device_mesh(
        "cpu", tuple(size for _, size in job.axes), mesh_dim_names=tuple(name for name, _ in job.axes)
    )
    plan = plan_zoo.load(job.plan, mesh)
    model = make_model(job)
    program = lower(plan, model)
    units = {instruction.path for instruction in program if isinstance(instruction.op, Unit)}
    if rank == 0:
        send(("program", program.to_text()))
    parallelize(model, plan, strict=True)
    with record_comms() as ledger:

        def report(step: int, loss: float, seconds: float) -> None:
            if rank == 0:
                send(("step", step, loss, seconds))
                if step == 0:
                    send(("collectives", _summary(ledger.records, units)))
            ledger.records.clear()

        _train(job, model, report)


def _summary(records: list[Any], units: Collection[str]) -> list[Collective]:
    counts: Counter[tuple[str, str, str]] = Counter()
    moved: Counter[tuple[str, str, str]] = Counter()
    for record in records:
        if record.num_ranks == 1:
            continue
        key = (record.axes, record.op.removesuffix("_v"), _purpose(record.requester, record.op, units))
        counts[key] += 1
        moved[key] += record.bytes
    return [Collective(*key, counts[key], moved[key]) for key in sorted(counts)]


def _purpose(requester: str, op: str, units: Collection[str]) -> str:
    """The requester without the module: an activation, its gradient, parameters of a unit, their gradients, the loss."""
    if requester in units and op.startswith("all_gather"):
        return "parameters"
    if ".grad:" in requester or requester in units or "got a gradient" in requester:
        return "parameters' gradients"
    if "softmax" in requester or "nll" in requester:
        return "loss"
    if "gradient" in requester:
        return "activations' gradients"
    return "activations"
