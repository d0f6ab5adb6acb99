"""Everything that vescale changes in PyTorch is in one table, is put in place all or nothing, and is taken back exactly."""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
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
from vescale import compat, csrc, rng
from vescale.compat import patches
from vescale.compat.patches import PATCHES
from vescale.optim import extend_torch_for_stages
from vescale.runtime._handlers import install_handlers


@pytest.fixture
def found() -> Iterator[None]:
    """Nothing is installed; afterwards what was installed is again, without the observer of :func:`install_everything`."""
    compat.uninstall()
    yield
    compat.install()
    compat.uninstall_part("observation")


TABLES = ("handlers", "schema infos", "schema infos of one axis")


def holders() -> Iterator[tuple[str, dict[Any, Any]]]:
    """Every dictionary of PyTorch that a patch may write to: modules, their classes, the dispatcher and its tables."""
    dispatcher: Any = DTensor._op_dispatcher
    yield "dispatcher", vars(dispatcher)
    yield "handlers", dispatcher._custom_op_handlers
    yield "schema infos", dispatcher.sharding_propagator.op_to_schema_info
    yield "schema infos of one axis", dispatcher.sharding_propagator.op_to_schema_info_for_single_dim_strategy
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
    """What is where, by identity: functions, and descriptors of classes."""
    return {
        (name, key): id(value)
        for name, holder in holders()
        for key, value in list(holder.items())
        if (key not in ("_REPLICAS", "__warningregistry__") and (callable(value) or hasattr(type(value), "__get__")))
        or name in TABLES
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
        assert {one.state for one in compat.patch_states()} == {"installed"}
        changed = {key for key, value in state().items() if before.get(key) != value}
        assert len(changed) > 40 and has_kernel() and not kernel
        compat.uninstall()
        after = state()
        assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} == set()
        assert has_kernel() == kernel
        assert {(one.state, one.changes) for one in compat.patch_states()} == {("not installed", ())}
        assert not compat.is_installed()
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
    rows[failing] = patches.Patch("t", "r", "models", fails)
    monkeypatch.setattr(patches, "PATCHES", tuple(rows))
    with pytest.raises(RuntimeError, match="planted"):
        install_handlers()
    assert state() == before and not compat.is_installed()


# Changes to PyTorch by part, with the C++ helpers, on the torch that has most. They go down: lower a number with a change
# that removes some; a higher one needs a reason in its commit.
NUM_CHANGES = {"entry": 1, "placements": 27, "ops": 2250, "models": 682, "random": 168, "stages": 3, "observation": 20}


def test_the_table() -> None:
    assert len({patch.purpose for patch in PATCHES}) == len(PATCHES)
    for patch in PATCHES:
        assert all((patch.purpose, patch.reason, patch.part, patch.issue, patch.torch)), patch
        assert patch.issue in ("none", "to be filed") or re.fullmatch(r"pytorch#\d+(, pytorch#\d+)*", patch.issue), (
            patch
        )
        assert patch.owner.startswith("vescale.compat."), patch


def test_the_count_of_changes_does_not_grow(found: None) -> None:
    install_everything()
    counts: Counter[str] = Counter()
    for patch, _, changes in compat.patch_states():
        assert changes or (csrc.dispatcher() is None and patch.owner in NATIVE), patch
        assert len(set(changes)) == len(changes)
        counts[patch.part] += len(changes)
    assert counts.keys() == NUM_CHANGES.keys()
    assert {part: count for part, count in counts.items() if count > NUM_CHANGES[part]} == {}
    if csrc.dispatcher() is not None and csrc.load_module("random_fills") is not None:
        assert {part: count for part, count in counts.items() if count < 0.9 * NUM_CHANGES[part]} == {}, (
            "lower the numbers"
        )


# What has nothing to change without the C++ helpers.
NATIVE = ("vescale.compat.native_dispatch", "vescale.compat.dtensor_patches", "vescale.compat.random_ops")


def test_the_table_names_what_is_changed(found: None) -> None:
    """Each difference that an installation makes to PyTorch's modules, classes and dispatcher is named, and each name that
    can be looked up is a difference."""
    import torch.distributed.checkpoint.state_dict  # noqa: F401

    install_everything()
    compat.uninstall()
    before = state()
    kernels = set(stock_kernels())
    kept = list(vars(tensor_api).values())
    install_everything()
    named = {name for one in compat.patch_states() for name in one.changes}
    after = state()
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    pairs = {(before.get(key), after.get(key)) for key in changed if any(is_named(*key, name) for name in named)}
    # Another module may hold a function that is replaced under another name.
    missing = [key for key in changed if (before.get(key), after.get(key)) not in pairs]
    assert not missing, missing
    assert {name for name in named if name.startswith("kernel ")} == set(stock_kernels()) - kernels
    not_found = [
        name
        for name in named
        if not name.startswith(("kernel ", "logging.")) and not any(is_named(*key, name) for key in changed)
    ]
    assert not not_found, not_found
    assert kept


def stock_kernels() -> Iterator[str]:
    """Every kernel at the keys where vescale has some, as PyTorch's dispatcher tells."""
    for op in torch._C._dispatch_get_all_op_names():
        for key in ("Python", "PythonTLSSnapshot", "BackendSelect"):
            if torch._C._dispatch_has_kernel_for_dispatch_key(op, key):
                yield f"kernel {op} @ {key}"


def is_named(holder: str, name: Any, target: str) -> bool:
    """Whether a name of the table is that of an entry of a namespace."""
    last = target.rpartition(".")[2]
    if holder in TABLES:
        return target.endswith(f"[{name}]")
    if holder in ("registration hooks", "parameter hooks"):
        return f"_global_{'module' if holder[0] == 'r' else 'parameter'}_registration_hooks" in target
    return last == str(name) or last.rstrip("]") == str(name)


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
states = [one.state for one in compat.patch_states()]
assert sum(state.startswith("unavailable: torch lacks torch.distributed.checkpoint") for state in states) == 3
try:
    x.__create_write_items__("x", x)
except compat.UnsupportedTorchError as error:
    assert "torch.distributed.checkpoint of DTensors" in str(error) and "_create_default_metadata_only_plan" in str(error)
else:
    raise AssertionError
"""
    done = run_fresh(program)
    assert done.returncode == 0, done.stderr


def test_empty_like_keeps_its_memory_format() -> None:
    """Also after a call without one: PyTorch has its rule in one of two tables, which the patch has to find."""
    program = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore
from vescale import rng
rng.enable()
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
x = DTensor.from_local(torch.randn(2, 3, 4, 5), init_device_mesh("cpu", (2,)), [Replicate()])
assert torch.empty_like(x).stride() == (60, 20, 5, 1)
found = torch.empty_like(x, memory_format=torch.channels_last)
assert found.stride() == found.to_local().stride() == (60, 1, 15, 3), found.stride()
"""
    done = run_fresh(program)
    assert done.returncode == 0, done.stderr
