"""Everything that vescale changes in PyTorch is in one table, is put in place all or nothing, and is taken back exactly."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.hf_storage
import torch.nn.init
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _api as tensor_api
from torch.nn.modules import module as module_hooks

from tests.fresh import run_fresh
from vescale import compat, rng
from vescale.compat import patches
from vescale.compat.patches import PATCHES
from vescale.optim import extend_torch_for_stages
from vescale.runtime._handlers import install_handlers


@pytest.fixture
def found() -> Iterator[None]:
    """Nothing is installed; afterwards what was installed is again."""
    compat.uninstall()
    yield
    compat.install()


def holders() -> Iterator[tuple[str, dict[Any, Any]]]:
    """Every dictionary of PyTorch that a patch may write to: modules, their classes, the dispatcher and its tables."""
    dispatcher: Any = DTensor._op_dispatcher
    yield "dispatcher", vars(dispatcher)
    yield "handlers", dispatcher._custom_op_handlers
    yield "schema infos", dispatcher.sharding_propagator.op_to_schema_info
    yield "propagator", vars(dispatcher.sharding_propagator)
    yield "registration hooks", dict(enumerate(module_hooks._global_module_registration_hooks.values()))
    yield "parameter hooks", dict(enumerate(module_hooks._global_parameter_registration_hooks.values()))
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] in ("torch", "__main__", "tests"):
            yield name, vars(module)
            for attribute, value in list(vars(module).items()):
                # isinstance asks for __class__, about which the deprecated torch.distributed.reduce_op warns
                if issubclass(type(value), type) and value.__module__ == name:
                    yield f"{name}.{attribute}", dict(vars(value))


def state() -> dict[tuple[str, Any], int]:
    """What is where, by identity."""
    return {
        (name, key): id(value)
        for name, holder in holders()
        for key, value in list(holder.items())
        if (key not in ("_REPLICAS", "__warningregistry__") and callable(value)) or name in ("handlers", "schema infos")
    }


def has_kernel() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect")


def install_everything() -> None:
    install_handlers()
    compat.extend_dtensor()
    rng.enable()
    extend_torch_for_stages()
    compat.install_part("observation", lambda name, group, inputs, outputs, call: call(None)[0])


def test_uninstall_restores_every_attribute_entry_and_kernel(found: None) -> None:
    import torch.distributed.checkpoint.state_dict  # noqa: F401  # loaded by the first install

    install_everything()  # loads what is loaded lazily
    compat.uninstall()
    before, kernel = state(), has_kernel()
    kept = list(vars(tensor_api).values())  # so that no id is given to another object
    for _ in range(2):
        install_everything()
        assert {s for _, s in compat.patch_states()} == {"installed"}
        changed = {key for key, value in state().items() if before.get(key) != value}
        assert len(changed) > 40 and has_kernel() and not kernel
        compat.uninstall()
        after = state()
        assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} == set()
        assert has_kernel() == kernel
        assert {s for _, s in compat.patch_states()} == {"not installed"} and not compat.is_installed()
    assert kept
    compat.install()
    assert {part for part in ("placements", "models", "random", "observation") if compat.is_installed(part)} == {
        "placements",
        "models",
        "random",
        "observation",
    }
    compat.uninstall_part("observation")
    assert has_kernel() == kernel


def test_installing_twice_changes_nothing(found: None) -> None:
    compat.install()  # what the fixture removed, too
    install_handlers()
    once = state()
    install_handlers()
    compat.install()
    assert state() == once


def test_threads_install_once(found: None) -> None:
    threads = [threading.Thread(target=install_handlers) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(patches._APPLIED) == len({id(patch) for patch, _ in patches._APPLIED})
    compat.uninstall()
    assert "redistribute_local_args" not in vars(DTensor._op_dispatcher)


@pytest.mark.parametrize("failing", [0, 7, -1])
def test_all_patches_of_a_part_or_none(found: None, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    before = state()

    def fails(changes: Any, hooks: Any) -> None:
        changes.attribute(nn.init, "zeros_", None)
        raise RuntimeError("planted")

    rows = [patch for patch in PATCHES if patch.part in ("models", "ops")]
    rows[failing] = patches.Patch("t", "r", "r", "models", fails)
    monkeypatch.setattr(patches, "PATCHES", tuple(rows))
    with pytest.raises(RuntimeError, match="planted"):
        install_handlers()
    assert state() == before and not compat.is_installed()


def test_the_table() -> None:
    assert len(PATCHES) <= 25 and len({patch.target for patch in PATCHES}) == len(PATCHES)
    for patch in PATCHES:
        assert all((patch.target, patch.replacement, patch.reason, patch.part, patch.issue, patch.torch)), patch


def test_a_missing_optional_name_costs_one_feature() -> None:
    program = """
import torch, torch.distributed.checkpoint.default_planner as planner
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
import torch.distributed as dist
del planner._create_default_metadata_only_plan, planner_helpers._create_default_metadata_only_plan
from vescale import compat
from vescale.placements import RaggedShard, distribute_tensor
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,))
x = distribute_tensor(torch.ones(4), mesh, [RaggedShard((0,), (1, 3))], src_data_rank=None)
assert (x + x).to_local().tolist() == [2.0]
states = {patch.target: state for patch, state in compat.patch_states()}
assert sum(state.startswith("unavailable: torch lacks torch.distributed.checkpoint") for state in states.values()) == 2
try:
    x.__create_write_items__("x", x)
except compat.UnsupportedTorchError as error:
    assert "torch.distributed.checkpoint of DTensors" in str(error) and "_create_default_metadata_only_plan" in str(error)
else:
    raise AssertionError
"""
    done = run_fresh(program)
    assert done.returncode == 0, done.stderr
