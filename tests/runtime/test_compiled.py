"""torch.compile around a parallelized model, or a part of one: no effect but a warning, and one device's numbers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.ranks import RankPools
from tests.runtime.llama import batch, make_llama, make_mesh, tensor_parallel, worst_gradient
from vescale import parallelize


def compiled(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="eager")


def in_place(model: nn.Module) -> Callable[..., Any]:
    model.compile(backend="eager")
    return model


def layers(model: Any) -> Callable[..., Any]:
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


def loss_too(model: nn.Module) -> Callable[..., Any]:
    @torch.compile(backend="eager")
    def call(**inputs: Any) -> Any:
        return model(**inputs)

    return call


def runs(kinds: list[Callable[[Any], Callable[..., Any]]]) -> list[int]:
    """How many warnings each kind gives on this rank."""
    mesh, counts = make_mesh(dp=2, tp=2), []
    inputs, labels = batch()
    for kind in kinds:
        reference = make_llama()
        model = copy.deepcopy(reference)
        parallelize(model, tensor_parallel(mesh))
        expected = reference(input_ids=inputs, labels=labels).loss
        expected.backward()
        run = kind(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model.zero_grad()
                found = run(input_ids=inputs, labels=labels).loss
                found.backward()
        torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-6, atol=0)
        assert worst_gradient(model, reference) < 1e-6
        counts.append(sum("torch.compile around" in str(w.message) for w in caught))
    return counts


def test_compiled_models_run_as_they_are(ranks: RankPools) -> None:
    kinds = [compiled, in_place, layers, loss_too]
    assert ranks.run(runs, kinds) == [[1, 1, 1, 1], *[[0, 0, 0, 0]] * 3]
