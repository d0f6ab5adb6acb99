"""A few training steps of a parallelized model on real ranks, with all memory that PyTorch's allocator gave."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.runtime.hf import quiet
from vescale import plan_zoo
from vescale.estimation import Estimate, estimate
from vescale.plans import Plan
from vescale.runtime import parallelize

__all__ = ["CASES", "Case", "Measured", "estimated", "measured"]

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
_DEEP = ("LlamaForCausalLM", {**_DECODER, "num_hidden_layers": 10})
_SPLIT = {"split_before": ["model.layers.5"], "schedule": "1F1B", "microbatches": 4}
CASES = {
    "dp": Case(*_LLAMA, "llama", {"dp": 2, "tp": 1}),
    "tp": Case(*_LLAMA, "llama", {"dp": 1, "tp": 2}),
    "zero3": Case(*_LLAMA, "llama_zero3", {"dp": 2, "tp": 1}),
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


def measured(case: Case) -> Measured:
    """Called on every rank."""
    mesh = init_device_mesh("cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))
    torch.manual_seed(0)
    gc.collect()
    # The profiler sees one thread: not those of gloo, which free tensors of collectives between modules.
    counting = _Counting() if case.mesh["tp"] > 1 or case.stages else contextlib.nullcontext()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, counting:
        model = case.build()
        inputs = {name: value.clone() for name, value in case.inputs().items()}
        parallelize(model, case.make_plan(mesh))
        loads: list[torch.Tensor] = []
        for path, module in model.named_modules():
            if path.endswith(".mlp.gate"):  # a router; its last output are the ids
                module.register_forward_hook(lambda _m, _a, out: loads.append(_counts(out[-1])))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        counted: list[int] = []
        for step in range(2 + _STEPS):
            if isinstance(counting, _Counting):
                counting.peak = counting.now
            with record_function(f"step {step}"):
                if case.stages is None:
                    model(**inputs, use_cache=False).loss.backward()
                else:
                    model.step(**inputs, use_cache=False)  # type: ignore[operator]
                gradients = _bytes(p.grad for p in model.parameters() if p.grad is not None)
                optimizer.step()
                optimizer.zero_grad()
            gc.collect()
            if isinstance(counting, _Counting) and step >= 2:
                counted.append(counting.peak)
    states = (value for state in optimizer.state.values() for value in state.values())
    total = tuple(torch.stack(loads[-2:]).sum(0).tolist()) if loads else ()
    peak = min(counted or (_peak(profiler, f"step {2 + step}") for step in range(_STEPS)))
    return Measured(_bytes([*model.parameters(), *model.buffers()]), gradients, _bytes(states), peak, total)


class _Counting(TorchDispatchMode):
    """Bytes of all storages that ops have made, until they are gone, in whatever thread."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t not in (torch.Tensor, nn.Parameter) for t in types):
            is_fake = any(issubclass(t, FakeTensor) for t in types)
            return func(*args, **kwargs or {}) if is_fake else NotImplemented
        result = func(*args, **kwargs or {})
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.device.type == "cpu" and not isinstance(x, FakeTensor):
                self._see(x.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known[key] = weakref.finalize(storage, self._gone, key, size)
            self.now += size
            self.peak = max(self.peak, self.now)

    def _gone(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.now -= size


def _peak(profiler: Any, label: str) -> int:
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    (step,) = (event for event in events if event.name() == label)
    now = peak = 0
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            if step.start_ns() <= event.start_ns() <= step.start_ns() + step.duration_ns():
                peak = max(peak, now)
    return peak


def _counts(ids: torch.Tensor) -> torch.Tensor:
    local = ids.to_local() if isinstance(ids, DTensor) else ids
    return torch.bincount(local.flatten(), minlength=_EXPERTS["num_local_experts"])


def _bytes(tensors: Any) -> int:
    """Of local storages, each once."""
    locals_ = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    found = {(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in locals_ if x.numel()}
    return sum(size for _, size in found)
