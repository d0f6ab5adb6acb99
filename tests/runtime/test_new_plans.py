"""``vescale.new_plan`` for Hugging Face classes that carry no plan: without findings, and equal to one device by
``verify``'s comparison of every value, on gloo ranks."""

from __future__ import annotations

import math
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.device import on_cpu
from tests.ranks import RankPools
from tests.runtime.classes_without_plans import CLASSES, example
from tests.runtime.hf import quiet
from vescale.debug._verify_job import Job, run_mesh, run_one_device
from vescale.ir import NewPlan, check, new_plan
from vescale.plans import MeshAxes, Plan
from vescale.runtime import ImplicitCommunicationWarning

# Sites that communicate without an entry, over the batch: windows of a convolution that the model unfolds itself.
IMPLICIT = {"ConvBertForMaskedLM": 4}


def on_rank(job: Job) -> tuple[str, list[str]]:
    """(the first difference to one device, or ""; implicit communication)."""
    with on_cpu():  # where verify compares
        return compared(job)


def compared(job: Job) -> tuple[str, list[str]]:
    quiet()
    if dist.get_rank() == 0:  # a process of this pool: the order of a set of strings differs between others
        run_one_device(job)
    dist.barrier()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = run_mesh(job, dist.get_rank())
    implicit = [str(w.message) for w in seen if issubclass(w.category, ImplicitCommunicationWarning)]
    return (found.divergence[1].text() if found.divergence else ""), implicit


def verified(ranks: RankPools, name: str, axes: MeshAxes, **options: Any) -> NewPlan:
    quiet()
    model = CLASSES[name]()
    batch = example(model)
    plan = new_plan(model, axes, batch, **options)
    assert not check(plan, model, {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in batch.items()})
    assert Plan.from_yaml(plan.to_yaml()) == plan
    with tempfile.TemporaryDirectory() as folder:
        job = Job(CLASSES[name], plan.entries, batch, axes, None, None, 2, 0, 60.0, str(Path(folder, "one.pt")))
        results = ranks.run(on_rank, job, world_size=math.prod(axes.sizes))
    for difference, _ in results:
        assert not difference, difference
    assert len(results[0][1]) <= IMPLICIT.get(name, 0), results[0][1]
    return plan


@pytest.mark.parametrize("name", CLASSES)
def test_equal_to_one_device(name: str, ranks: RankPools) -> None:
    verified(ranks, name, MeshAxes.parse("tp=2"))


@pytest.mark.parametrize("name", CLASSES)
def test_sequence_and_zero(name: str, ranks: RankPools) -> None:
    verified(ranks, name, MeshAxes.parse("dp=2,tp=2"), sequence=True, zero=3)


@pytest.mark.parametrize("zero", [1, 2])
def test_stages(zero: int, ranks: RankPools) -> None:
    plan = verified(ranks, "RobertaForMaskedLM", MeshAxes.parse("dp=2"), zero=zero)
    assert "units:" in plan.to_yaml()
