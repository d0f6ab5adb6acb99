"""``fully_shard`` on the simulated device: the numbers of one device, no race, and each kind of wait is needed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from tests.checkpoint import hf_models, test_data_order
from tests.compiler import needs_compiler
from tests.device import everywhere
from tests.fsdp import (
    test_between_steps,
    test_extensions,
    test_in_place,
    test_interrupted,
    test_migration,
    test_registered,
    test_training,
)
from tests.fsdp.compare import by_block, mesh_of, same_gradients
from tests.fsdp.models import Net, net_loss
from tests.ops import test_rules
from tests.ops.attend import Attend, attend_like_one_device
from tests.optim import test_group_edits
from tests.pipeline import test_own_checkpoints
from tests.placements import test_checkpoint_state_dict
from tests.ranks import RankPools
from tests.runtime import test_generate
from vescale import Plan, parallelize
from vescale.checkpoint import load_hf
from vescale.comm import SideStream
from vescale.fsdp import fully_shard
from vescale.gradients import BackwardTracker
from vescale.optim import clip_grad_norm_

pytestmark = needs_compiler

NAMES = [one.name for one in test_training.CASES]


@pytest.mark.parametrize("share", [pytest.param(0, id="daily"), pytest.param(1, id="nightly", marks=pytest.mark.slow)])
def test_trains_like_one_device_and_fsdp2(share: int, ranks: RankPools) -> None:
    names = NAMES[::6] if share == 0 else [name for number, name in enumerate(NAMES) if number % 6]
    size = 2 if share == 0 else 4  # some cases are of four
    found = ranks.run(everywhere, test_training.run_all, names, world_size=size, device="sim", timeout=900)
    assert found == [len(names)] * size


def test_parameters_are_right_after_a_backward_that_failed_in_place(ranks: RankPools) -> None:
    """What an exception leaves in the place of parameters is no write of theirs."""
    ranks.run(everywhere, test_in_place.what_is_still_needed_is_not_silently_wrong, world_size=2, device="sim")


def after_a_backward_that_is_held() -> None:
    """What runs a backward on a device lets go of it some time after the exception has reached its caller."""
    model, same = test_between_steps.sharded(), test_between_steps.sharded()
    test_between_steps.break_off(model)
    held = object()
    model._state.iteration._backward.current = lambda: held
    for one in (model, same):
        one.zero_grad()
        net_loss(one, 2, dist.get_rank()).backward()
    same_gradients([model, same], "after an exception")


def test_a_step_after_a_backward_that_is_held(ranks: RankPools) -> None:
    ranks.run(everywhere, after_a_backward_that_is_held, world_size=2, device="sim")


def slow_to_break_off(case: Callable[[str], None], kind: str) -> None:
    """What follows from the end of a backward takes a while, in which other threads run."""
    is_over = BackwardTracker._is_over
    with mock.patch.object(BackwardTracker, "_is_over", lambda *args: (time.sleep(0.1), is_over(*args))):
        case(kind)


@pytest.mark.parametrize("kind", ["fsdp", "zero", "plan"])
def test_what_an_exception_leaves_is_there_when_its_caller_has_it(ranks: RankPools, kind: str) -> None:
    """Gradients that come back later would survive zero_grad()."""
    for case in (test_registered.cleared_after_an_exception, test_registered.derivatives_of_reduced_gradients):
        ranks.run(everywhere, slow_to_break_off, case, kind, world_size=2, device="sim")


def test_what_a_failed_gather_has_read_is_waited_for(ranks: RankPools) -> None:
    """Before the shards go, with the model."""
    ranks.run(everywhere, test_extensions.refused, world_size=4, device="sim")


def test_what_an_interrupt_loses_is_waited_for(ranks: RankPools) -> None:
    """A collective whose handle nobody has got, because of an exception, reads parameters that the program writes next."""
    ranks.run(everywhere, test_interrupted.run, list(test_interrupted.CASES), 41, world_size=2, device="sim")


def test_a_recomputation_draws_as_its_forward(ranks: RankPools) -> None:
    """Also of a pipeline's micro-batch: on a device the backward runs on another thread."""
    for found, _ in ranks.run(
        everywhere, test_own_checkpoints.case, "block", False, "1F1B", world_size=2, device="sim"
    ):
        assert max(found.values()) <= 1e-12, found


def test_prompts_of_a_rank_are_told(ranks: RankPools) -> None:
    """Also in later calls of ``generate``, when the tokens are in a device's memory."""
    ranks.run(everywhere, test_generate.local_inputs, ("greedy",), world_size=2, device="sim")


def test_parameters_frozen_on_a_rank(ranks: RankPools) -> None:
    """All ranks raise before they exchange gradients; else they would meet in different collectives."""
    ranks.run(everywhere, test_group_edits.frozen_on_a_rank, (0, True), (1, True), world_size=2, device="sim")


def test_meta_models_are_filled_on_the_device(ranks: RankPools) -> None:
    """PyTorch gives full values on the CPU where no tensor of the model is anywhere and the job has gloo, too."""
    ranks.run(everywhere, test_checkpoint_state_dict.meta_model, test_checkpoint_state_dict.FULL, device="sim")


def loaded(folder: str) -> None:
    with torch.device("meta"):
        model = hf_models.MODELS["llama"].build()
    mesh = init_device_mesh("sim", (2,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    load_hf(model, folder)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"sim"}
    expected = hf_models.reference("llama", Path(folder))
    ids = torch.arange(8).view(1, 8)
    torch.testing.assert_close(model(ids.to("sim")).logits.cpu(), expected(ids).logits, rtol=1e-2, atol=1e-3)


def test_loaded_models_are_on_their_mesh(ranks: RankPools, tmp_path: Path) -> None:
    """Also buffers, which no mesh has, and where the default device is the CPU."""
    pytest.importorskip("transformers")
    hf_models.saved("llama", tmp_path)
    ranks.run(loaded, str(tmp_path), world_size=2, device="sim")


def test_samplers_draw_on_the_default_device(ranks: RankPools, tmp_path: Path) -> None:
    """A resumed run has the batches and numbers of one that was not interrupted."""
    expected = ranks.run(everywhere, test_data_order.uninterrupted, 4, 0, False, world_size=2, device="sim")
    ranks.run(everywhere, test_data_order.interrupted, str(tmp_path), 4, 0, False, world_size=2, device="sim")
    found = ranks.run(everywhere, test_data_order.resumed, str(tmp_path), 0, False, world_size=2, device="sim")
    assert found[0] == expected[0][4:]


def test_numbers_are_assigned(ranks: RankPools) -> None:
    """PyTorch makes tensors of them on the device, which were plain tensors among DTensors."""
    ranks.run(everywhere, test_rules.on_rank_assignments, 1, world_size=1, device="sim")


def causal_with_a_mask() -> None:
    options = {"is_causal": True}
    plan = Plan(mesh_of()).shard("<in:(q|k|v)>", Shard(2), mesh="dp").attention("", "all_gather", mesh="dp")
    model: Any = parallelize(Attend(options), plan)
    given = [torch.randn(1, 2, 8, 4, dtype=torch.float64) for _ in "qkv"]
    given.append(torch.zeros(8, 8, dtype=torch.float64))
    assert attend_like_one_device(model, options, given, given) is None


def test_attention_is_refused_where_the_device_refuses_it(ranks: RankPools) -> None:
    """A CPU takes a mask beside ``is_causal`` until torch 2.14."""
    ranks.run(everywhere, causal_with_a_mask, world_size=2, device="sim")


def test_offloaded_parameters_without_synchronization(ranks: RankPools) -> None:
    """What a device has not reduced yet is no gradient of a parameter on the host."""
    ranks.run(everywhere, test_migration.run_script, (2,), torch.float32, True, world_size=2, device="sim")


def clipped_together() -> None:
    mesh = mesh_of()
    shards = [distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)]) for _ in range(2)]
    norms = []
    for foreach in (True, False):
        parameters = [torch.nn.Parameter(torch.zeros(6, 4)) for _ in shards]
        for parameter, gradient in zip(parameters, shards, strict=True):
            parameter.grad = gradient.full_tensor()
        norms.append(clip_grad_norm_(parameters, 1.0, foreach=foreach))
    torch.testing.assert_close(*norms)


def test_every_device_has_multi_tensor_kernels_that_pytorch_has(ranks: RankPools) -> None:
    ranks.run(everywhere, clipped_together, world_size=2, device="sim")


def train(shard: Any, steps: int) -> None:
    torch.manual_seed(0)
    model: Any = Net()
    by_block(model, shard, mesh_of())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for step in range(steps):
        net_loss(model, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()


def launches() -> list[int]:
    """Of a steady forward and backward of ``fully_shard`` and FSDP2."""
    found = []
    for shard in (fully_shard, stock_fully_shard):
        torch.manual_seed(0)
        model: Any = Net()
        by_block(model, shard, mesh_of())
        for _ in range(5):
            torch.sim.clear()
            net_loss(model, 0, dist.get_rank()).backward()
            model.zero_grad()
        found.append(sum(torch.sim.counts()["launches"]["ops"].values()))
    return found


def test_fewer_launches_than_fsdp2(ranks: RankPools) -> None:
    for ours, theirs in ranks.run(everywhere, launches, world_size=2, device="sim"):
        assert ours < 0.75 * theirs, (ours, theirs)


# Which waits there are, by class and method.
WAITS = {
    "fully_shard": (fully_shard, SideStream, ("wait_for_compute", "wait_event", "compute_waits")),
    "FSDP2": (stock_fully_shard, None, ("wait_stream", "wait_event")),
}


def races_without(engine: str, method: str | None) -> int:
    """How many races a training has whose waits by ``method`` do nothing."""
    shard, owner, _ = WAITS[engine]
    torch.sim.clear()
    with torch.sim.recorded_races() as races, pytest.MonkeyPatch.context() as patch:
        if method is not None:
            patch.setattr(owner or torch.sim.Stream, method, lambda *_: None)
        everywhere(train, shard, 3)
    torch.sim.synchronize()
    torch.sim.clear()
    return len(races)


def without_each() -> dict[tuple[str, str | None], int]:
    return {
        (engine, method): races_without(engine, method)
        for engine, (_, _, methods) in WAITS.items()
        for method in (None, *methods)
    }


def test_each_kind_of_wait_is_needed(ranks: RankPools) -> None:
    for found in ranks.run(without_each, world_size=2, device="sim"):
        assert all((count > 0) == (method is not None) for (_, method), count in found.items()), found
