"""A few training steps of a parallelized model on real ranks, with all memory that PyTorch's allocator gave."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.cpp_extension import get_cxx_compiler, include_paths, library_paths

from tests.runtime.hf import quiet
from vescale import RaggedShard, parallelize, plan_zoo
from vescale.compat import local_of
from vescale.estimation import Estimate, estimate
from vescale.fsdp import state_of
from vescale.plans import Plan

__all__ = ["CASES", "Case", "Measured", "build_counting_allocator", "estimated", "groups_of", "held", "measured"]

_DECODER = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
_STEPS = 5
_EXPERTS = {**_DECODER, "num_local_experts": 8, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Case:
    """A model of transformers, a plan of the zoo, and what the plan is given besides."""

    model: str
    sizes: Mapping[str, Any]
    plan: str
    mesh: Mapping[str, int]
    policy: Any = None
    batch: tuple[int, int] = (8, 128)
    stages: Mapping[str, Any] | None = None

    @property
    def num_ranks(self) -> int:
        return math.prod(self.mesh.values())

    def build(self) -> nn.Module:
        import transformers

        quiet()
        config = getattr(transformers, self.model[: self.model.index("For")] + "Config")(**self.sizes)
        return getattr(transformers, self.model)._from_config(config)

    def make_plan(self, mesh: Any) -> Plan:
        plan = plan_zoo.load(self.plan, mesh)
        if self.stages is not None:
            plan.pipeline(mesh="pp", **self.stages)
        return plan if self.policy is None else plan.checkpoint(r"model.layers.\d+", self.policy)

    def inputs(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, 1000, self.batch, generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}


_LLAMA = ("LlamaForCausalLM", _DECODER)
_MIXTRAL = ("MixtralForCausalLM", _EXPERTS)
_TIED = ("LlamaForCausalLM", {**_DECODER, "tie_word_embeddings": True})
_DEEP = ("LlamaForCausalLM", {**_DECODER, "num_hidden_layers": 10})
_SPLIT = {"split_before": ["model.layers.5"], "schedule": "1F1B", "microbatches": 4}
CASES = {
    "dp": Case(*_LLAMA, "llama", {"dp": 2, "tp": 1}),
    "tp": Case(*_LLAMA, "llama", {"dp": 1, "tp": 2}),
    "tp one sequence": Case(*_LLAMA, "llama", {"dp": 1, "tp": 2}, batch=(1, 128)),
    "zero3": Case(*_LLAMA, "llama_zero3", {"dp": 2, "tp": 1}),
    "zero3 tp": Case(*_LLAMA, "llama_zero3", {"dp": 2, "tp": 2}),
    "zero3 tied": Case(*_TIED, "llama_zero3", {"dp": 2, "tp": 1}),  # all of one buffer is padding on rank 1
    "zero3 uneven": Case(*_LLAMA, "llama_zero3", {"dp": 2, "tp": 1}, batch=(7, 100)),
    "tp full": Case(*_LLAMA, "llama", {"dp": 1, "tp": 2}, "full"),
    "zero3 full": Case(*_LLAMA, "llama_zero3", {"dp": 2, "tp": 1}, "full"),
    "tp selective": Case(*_LLAMA, "llama", {"dp": 1, "tp": 2}, "selective"),
    "zero3 selective": Case(*_LLAMA, "llama_zero3", {"dp": 2, "tp": 1}, "selective"),
    "zero3 offload": Case(*_LLAMA, "llama_zero3", {"dp": 2, "tp": 1}, "offload"),
    "experts dp": Case(*_MIXTRAL, "mixtral", {"dp": 2, "tp": 1}),
    "experts tp": Case(*_MIXTRAL, "mixtral", {"dp": 1, "tp": 2}),
    "experts full": Case(*_MIXTRAL, "mixtral", {"dp": 1, "tp": 2}, "full"),
    "stages": Case(*_DEEP, "llama", {"pp": 2, "dp": 1, "tp": 1}, stages=_SPLIT),
    "stages selective": Case(*_DEEP, "llama", {"pp": 2, "dp": 1, "tp": 1}, "selective", stages=_SPLIT),
}


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank: at rest after a step, and the most of a step in steady state: the least of several, because
    threads of gloo hold the tensors of a collective until they run again."""

    parameters: int
    gradients: int
    optimizer: int
    peak: int
    loads: tuple[int, ...] = ()
    """Of experts: how many tokens this rank's part of the sequence gave to each."""


def estimated(case: Case, **options: Any) -> Estimate:
    with torch.device("meta"):
        model = case.build()
    return estimate(model, case.make_plan(dict(case.mesh)), batch=case.inputs(), **options)


def build_counting_allocator(folder: Path) -> Path:
    """Compile the library for :func:`measured`; its path. Skips the test if there is no compiler."""
    if shutil.which(get_cxx_compiler()) is None:
        pytest.skip(
            "no C++ compiler: the test counts memory with a library that it compiles from counting_allocator.cpp"
        )
    library = folder / "counting_allocator.so"
    paths = [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
    source = Path(__file__).with_name("counting_allocator.cpp")
    command = [get_cxx_compiler(), "-std=c++17", "-shared", "-fPIC", *paths, str(source), "-o", str(library), "-lc10"]
    subprocess.run(command, check=True)
    return library


def measured(case: Case, allocator: str | os.PathLike[str]) -> Measured:
    """Called on every rank. ``allocator``: of :func:`build_counting_allocator`."""
    mesh = init_device_mesh("cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))
    torch.manual_seed(0)
    choices = _choices()
    loads: list[torch.Tensor] = []
    gc.collect()
    with _counting(allocator) as library:
        before = library.begin_peak()  # what earlier cases have left behind
        model = case.build()
        inputs = {name: value.clone() for name, value in case.inputs().items()}
        parallelize(model, case.make_plan(mesh))
        for path, module in model.named_modules():
            if path.endswith(".mlp.gate"):  # a router; its last output are the ids
                module.register_forward_hook(lambda _m, _a, out: (*out[:-1], _replaced(out[-1], choices, loads)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        peaks: list[int] = []
        for _ in range(2 + _STEPS):
            library.begin_peak()
            if case.stages is None:
                model(**inputs, use_cache=False).loss.backward()
            else:
                model.step(**inputs, use_cache=False)  # type: ignore[operator]
            gradients = held((p.grad for p in model.parameters() if p.grad is not None), model, "gradients")
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(library.peak_bytes())
            gc.collect()
    states = (value for state in optimizer.state.values() for value in state.values())
    load = tuple(loads[-1].tolist()) if loads else ()
    peak = min(peaks[2:]) - before
    parameters = held([*model.parameters(), *model.buffers()], model, "parameters")
    return Measured(parameters, gradients, held(states, model, "optimizer"), peak, load)


@contextlib.contextmanager
def _counting(allocator: str | os.PathLike[str]) -> Iterator[ctypes.CDLL]:
    library = ctypes.CDLL(os.fspath(allocator))
    library.begin_peak.restype = library.peak_bytes.restype = ctypes.c_int64
    library.count.argtypes = [ctypes.c_bool]
    library.count(True)
    try:
        yield library
    finally:
        library.count(False)


def _choices() -> torch.Tensor:
    """Two experts for each token of this rank, some experts more often than others."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    weights = torch.arange(1.0, 1.0 + _EXPERTS["num_local_experts"]).expand(1024, -1)
    return torch.multinomial(weights, _EXPERTS["num_experts_per_tok"], generator=generator)


def _replaced(ids: torch.Tensor, choices: torch.Tensor, loads: list[torch.Tensor]) -> torch.Tensor:
    """Expert ids that are equal in each layer and step, as an estimate assumes. Appends the number of tokens of each expert
    to ``loads``."""
    own = choices[: len(ids.to_local() if isinstance(ids, DTensor) else ids)].clone()
    loads.append(torch.bincount(own.flatten(), minlength=_EXPERTS["num_local_experts"]))
    return DTensor.from_local(own, ids.device_mesh, ids.placements) if isinstance(ids, DTensor) else own


def held(tensors: Iterable[Any], model: nn.Module, kind: str) -> int:
    """Bytes of local storages of tensors, each once, and of the engine's buffers: a rank may have nothing but padding of
    one, which no tensor shows."""
    tensors = list(tensors)
    cut = [x for x in tensors if any(isinstance(p, RaggedShard) for p in getattr(x, "placements", ()))]
    whole = set(tensors) - set(cut)
    if kind == "optimizer":
        return sum(_bytes_of(tensors))
    buckets = [bucket for group in groups_of(model) for bucket in group.buckets]
    buffers = [one.shards.num_bytes for one in buckets if kind == "parameters" or one.requires_grad]
    found = sum(_bytes_of(whole)) + sum(buffers)
    if kind == "gradients":  # those of parameters that several axes reduce together are in a buffer that no group has
        found += sum((Counter(_bytes_of(cut)) - Counter(buffers)).elements())
    return found


def _bytes_of(tensors: Iterable[Any]) -> list[int]:
    storages = [(local_of(x) if isinstance(x, DTensor) else x).untyped_storage() for x in tensors]
    return list({x.data_ptr(): x.nbytes() for x in storages if x.nbytes()}.values())


def groups_of(model: nn.Module) -> list[Any]:
    states = dict.fromkeys(state_of(module) for module in model.modules())
    return [group for state in states if state is not None for group in state.groups]
