"""Equal blocks that are left out count as if they had run: bytes of every rank, and of collectives, are those of all.

Other plans of the zoo are not equal, as docs/estimate.md says; Stable Diffusion 3 is built without a number of layers.
"""

from __future__ import annotations

import math

import pytest
from torch import nn

from tests.estimation.test_zoo_bytes import is_of_tokens, loss_of_outputs, plan_of
from tests.plan_zoo.models import model_of, tokens
from vescale import plan_zoo
from vescale.estimation import Estimate, estimate

_BLOCKS = 5
_OTHERS = ("dit", "gpt_oss_cp", "mixtral", "sd3", "vit", "whisper")
_CATEGORIES = ("parameters", "gradients", "optimizer", "unsharded", "input", "activations")


def deep(name: str) -> nn.Module:
    """The zoo's model with five blocks for two."""
    build = model_of(name).build
    cells = dict(zip(build.__code__.co_freevars, build.__closure__ or ()))
    sizes = cells["sizes"].cell_contents
    more = {key: _BLOCKS if "layer" in key and value == 2 else value for key, value in sizes.items()}
    try:
        cells["sizes"].cell_contents = more
        return build().double()
    finally:
        cells["sizes"].cell_contents = sizes


def most(found: Estimate, rank: int) -> dict[str, int]:
    (own,) = (one for one in found.ranks if rank in one.ranks)
    return {name: own.maximum[name] for name in _CATEGORIES}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [None, 3])
@pytest.mark.parametrize("name", [name for name in plan_zoo.names() if name not in _OTHERS])
def test_blocks_that_are_left_out(name: str, stage: int | None) -> None:
    model_of(name).need()
    sizes = {axis: {"dp": 2, "tp": 2}.get(axis, 1) for axis in plan_zoo.about(name).axes}
    inputs = model_of(name).inputs()
    if "cp" in sizes:
        sizes, inputs = sizes | {"cp": 2, "tp": 1}, {"input_ids": tokens()}
    model = deep(name)
    plan = plan_of(name, sizes, stage, model)
    given = {"batch": inputs, "loss": loss_of_outputs, "steps": 2}
    reduced, whole = (estimate(model, plan, **given, reduce_depth=each) for each in (True, False))
    assert any("equal modules were run" in note for note in reduced.notes)
    for rank in range(math.prod(sizes.values())):
        assert most(reduced, rank) == most(whole, rank), rank
    moved = [{k: v for k, v in one.time.collective_bytes.items() if not is_of_tokens(k)} for one in (reduced, whole)]
    assert moved[0] == pytest.approx(moved[1], abs=1)  # of which parameters got a gradient, a byte each
    assert reduced.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.015)
