"""The optimizers on models that a plan cuts: experts over an axis of their own, and losses of the demo model."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.device import device_type
from tests.optim.meshes import assert_equal, on_mesh
from tests.optim.small_llama import small_llama
from tests.plan_zoo.models import MODELS
from tests.ranks import RankPools
from vescale import Plan, parallelize, plan_zoo
from vescale.optim import SOAP, AdamW8bit, Muon, Shampoo, muon_groups
from vescale.placements import RaggedShard
from vescale.plans import INIT, RUN

EXPERTS = {f"model.layers.*.mlp.experts.{name}": Shard(0) for name in ("gate_up_proj", "down_proj")}
EMBEDDINGS = [r"model\.embed_tokens\.weight", r"lm_head\.weight"]
KINDS: list[tuple[Any, str, dict[str, Any]]] = [
    (AdamW8bit, "", {"min_numel": 256}),
    (Muon, "muon", {}),
    (Shampoo, "shampoo", {"precondition_frequency": 2, "max_preconditioner_dim": 40}),
    (SOAP, "soap", {"precondition_frequency": 2}),
]
LOSSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "muon": (Muon, {"lr": 0.01, "ns_dtype": torch.float32}),
    "shampoo": (Shampoo, {"lr": 0.001}),
    "soap": (SOAP, {"lr": 0.001}),
    "soap, small steps": (SOAP, {"lr": 5e-6}),
}


def groups_for(model: nn.Module, algorithm: str) -> list[dict[str, Any]]:
    """Embeddings and vectors by AdamW, the matrices by ``algorithm``."""
    groups = muon_groups(model, adamw=EMBEDDINGS, verbose=False)
    for group in groups:
        if group["algorithm"] == "muon":
            group.update(algorithm=algorithm)
            if algorithm != "muon":
                del group["blocks"]
    return groups


def experts_over_an_axis() -> None:
    """Mixtral, whose experts are cut over ``ep`` and, like all else, over ``fsdp`` at rest; equal gradients."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("fsdp", "ep"))
    model = MODELS["mixtral"].build()
    alone = copy.deepcopy(model)
    given = SimpleNamespace(extra_parallel_plan={"ep": EXPERTS})
    model.get_parallel_plan = lambda: given  # type: ignore[assignment]
    plan = Plan.from_model(model, mesh, batch_axes=["fsdp", "ep"], shard_axis=None)
    plan.shard(".*", RaggedShard(block=256), mesh="fsdp", phase=INIT)
    plan.shard(".*", Replicate(), mesh="fsdp", phase=RUN)
    parallelize(model, plan)
    experts = model.get_parameter("model.layers.0.mlp.experts.down_proj")
    assert isinstance(experts, DTensor) and experts.placements[1] == Shard(0), experts
    step = 0
    for kind, algorithm, options in KINDS:
        optimizers = [
            kind(groups_for(m, algorithm) if algorithm else m.named_parameters(), lr=0.01, **options)
            for m in (model, alone)
        ]
        for _ in range(5):
            step += 1
            generator = torch.Generator().manual_seed(step)
            for p, twin in zip(model.parameters(), alone.parameters(), strict=True):
                twin.grad = torch.randn(twin.shape, generator=generator)
                p.grad = on_mesh(twin.grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else twin.grad
            for optimizer in optimizers:
                optimizer.step()
        assert_equal(*optimizers)


def test_experts_over_an_axis_have_the_bits_of_one_device(ranks: RankPools) -> None:
    ranks.run(experts_over_an_axis, world_size=4)


# Losses with real gradients.


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """The model in ``dtype`` throughout: norms and the loss of transformers would compute in float32."""
    model = model.to(dtype)
    if dtype == torch.float32:
        return model
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            norm = nn.RMSNorm(len(module.weight), module.variance_epsilon, dtype=dtype)
            norm.load_state_dict(module.state_dict())
            model.set_submodule(name, norm)
    model.loss_function = lambda logits, labels, **_: nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    return model


def llama(num_steps: int, algorithm: str, dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """(losses on one device, on a mesh): a small Llama with the zoo's ZeRO-3 plan over two axes."""
    kind, options = LOSSES[algorithm]
    losses: tuple[list[float], list[float]] = ([], [])
    for found, on_mesh_ in zip(losses, (False, True)):
        model = in_dtype(small_llama(256), dtype)
        if on_mesh_:
            parallelize(
                model,
                plan_zoo.load("llama_zero3", init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))),
            )
        optimizer = kind(groups_for(model, algorithm.partition(",")[0]), **options)
        generator = torch.Generator().manual_seed(0)
        for _ in range(num_steps):
            starts = torch.randint(0, 256, (4, 1), generator=generator)
            ids = (starts + 3 * torch.arange(16)) % 256
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return losses


def losses_follow_one_device(num_steps: int, algorithm: str, dtype: torch.dtype = torch.float32) -> float:
    alone, on_mesh_ = llama(num_steps, algorithm, dtype)
    assert alone[-1] < alone[0]
    worst = max(abs(a - b) / abs(a) for a, b in zip(alone, on_mesh_))
    assert worst <= 1e-4, (worst, alone, on_mesh_)
    return worst


@pytest.mark.parametrize("algorithm", ["muon", "shampoo", "soap"])
def test_losses_of_a_plan_follow_one_device(ranks: RankPools, algorithm: str) -> None:
    ranks.run(losses_follow_one_device, 5 if algorithm == "soap" else 3, algorithm, world_size=4)


# SOAP amplifies rounding, also on one device (docs/optimizers-matrix.md, "Bits"): 200 steps in double precision, or small.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_steps", "algorithm", "dtype"),
    [
        (200, "muon", torch.float32),
        (200, "shampoo", torch.float32),
        (200, "soap", torch.float64),
        (200, "soap, small steps", torch.float32),
    ],
)
def test_losses_of_many_steps_follow_one_device(
    ranks: RankPools, num_steps: int, algorithm: str, dtype: torch.dtype
) -> None:
    ranks.run(losses_follow_one_device, num_steps, algorithm, dtype, world_size=4, timeout=1800.0)
