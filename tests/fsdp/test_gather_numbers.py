"""Ranks that gather and reduce different numbers of units: on one host, all raise before the collective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.fsdp.test_gather_order import DIFFERENT, EQUAL, Mixture, X, made, raises_alike, trains
from tests.ranks import RankPools
from tests.runtime.zero import sharded_at_rest
from vescale import (
    Plan,
    static,  # noqa: F401  (the mode's name)
)
from vescale.runtime import parallelize


def different_numbers(widths: tuple[int, ...], check: str, options: dict[str, Any]) -> None:
    """Ranks would wait for each other in different collectives: a gather, a reduction, the end of a step."""
    first = dist.get_rank() == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VESCALE_CHECK", check)
        model, one = made(widths, **options)
        few, more = (0,), (0, 1)
        raises_alike(lambda: model(X, few if first else more).backward(), "experts.1 on rank")
        trains(model, one, (0, 1))
        raises_alike(lambda: model(X, more if first else few).backward(), "experts.1 on rank 0")
        trains(model, one, (2,))
        raises_alike(lambda: (model(X, (0, 1)) + model(X, (1, 0) if first else (2, 1))).backward())
        trains(model, one, (0, 2))
        with torch.no_grad():
            raises_alike(lambda: model(X, few if first else more), "experts.1 on rank")
            assert torch.equal(model(X, (2,)), one(X, (2,)))
        model.set_requires_gradient_sync(False)
        raises_alike(lambda: model(X, few if first else more).backward(), "experts.1 on rank")
        model.set_requires_gradient_sync(True)
        trains(model, one, (1, 2))


@pytest.mark.parametrize(
    ("widths", "check", "num_ranks", "options"),
    [
        (EQUAL, "", 2, {}),
        pytest.param(EQUAL, "off", 2, {"reshard_after_forward": False}, marks=pytest.mark.slow),
        pytest.param(DIFFERENT, "", 3, {}, marks=pytest.mark.slow),
        pytest.param(EQUAL, "off", 4, {"reshard_after_forward": 2}, marks=pytest.mark.slow),
    ],
)
def test_different_numbers(
    ranks: RankPools, widths: tuple[int, ...], check: str, num_ranks: int, options: dict[str, Any]
) -> None:
    ranks.run(different_numbers, widths, check, options, world_size=num_ranks)


class Routed(Mixture):
    """Chooses by itself, as a router does: the arguments of the ranks do not differ."""

    chosen: tuple[int, ...] = (0,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, self.chosen)


def different_numbers_of_a_plan(mode: str) -> None:
    """One rank comes to its backward, which the ranks of a model compare, while another one gathers."""
    torch.manual_seed(0)
    model = Routed(EQUAL).double()
    parallelize(model, sharded_at_rest(Plan(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))), mode=mode)
    x = X.double()
    for _ in range(2):
        model(x).backward()
    expected = model(x)
    model.chosen = (0,) if dist.get_rank() == 0 else (0, 1)
    raises_alike(lambda: model(x).backward(), "nothing on rank 0", "on rank 1")
    model.chosen = (0,)
    loss = model(x)
    assert torch.equal(loss, expected)
    loss.backward()


@pytest.mark.parametrize("mode", ["eager", pytest.param("static", marks=pytest.mark.slow)])
def test_different_numbers_of_units_of_a_plan(ranks: RankPools, mode: str) -> None:
    ranks.run(different_numbers_of_a_plan, mode, world_size=2)
