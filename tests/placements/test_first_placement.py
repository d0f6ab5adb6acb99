"""The first placement of a process, in every order of imports, lookups and constructions."""

from __future__ import annotations

import pytest

from tests.fresh import run_fresh

WORLD = """
import functools, pickle, sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
x = torch.arange(8.0).view(4, 2)

def check(found, units=(1, 3)):
    (placement,) = found.placements
    assert (type(placement).__name__, placement.local_units) == ("RaggedShard", units), placement
    assert found.to_local().numel() == 2 * units[0] and tuple(found.shape) == (4, 2), found.to_local()
    assert torch.equal((found + found).to_local(), 2 * found.to_local())
"""
PICKLED = r"b'\x80\x04cvescale.placements._ragged\nRaggedShard\n((K\x00t(K\x01K\x03tNtR.'"
FIRST = "from torch.distributed.tensor import DTensor, Replicate, distribute_tensor"
GLOBAL = "given = DTensor.from_local(x, mesh, [Replicate()])"


@pytest.mark.parametrize(
    "program",
    [
        f"{FIRST}; from vescale import RaggedShard; check(distribute_tensor(x, mesh, [RaggedShard((0,), (1, 3))]))",
        f"from vescale import RaggedShard; {FIRST}; check(distribute_tensor(x, mesh, [RaggedShard((0,), (1, 3))]))",
        f"import vescale; {FIRST}; P = vescale.RaggedShard; check(distribute_tensor(x, mesh, [P((0,), (1, 3))]))",
        f"{FIRST}; import vescale.placements as p; check(distribute_tensor(x, mesh, [p.RaggedShard((0,), (1, 3))]))",
        f"{FIRST}; from vescale import Plan, RaggedShard as P; check(distribute_tensor(x, mesh, [P((0,), (1, 3))]))",
        "import torch.distributed.tensor as t; from vescale import RaggedShard as P; "
        "check(t.distribute_tensor(x, mesh, [P((0,), (1, 3))]))",
        "from vescale.placements import distribute_tensor, RaggedShard as P; "
        "check(distribute_tensor(x, mesh, [P((0,), (1, 3))]))",
        f"{FIRST}; p = pickle.loads({PICKLED}); check(distribute_tensor(x, mesh, [p]))",
        f"{FIRST}; import vescale; f = functools.partial(DTensor.from_local, x.view(-1)[:2], mesh, shape=(4, 2)); "
        "check(f(placements=[vescale.RaggedShard((0,), (1, 3))], stride=(2, 1)))",
        f"{FIRST}; import vescale; "
        "check(DTensor.from_local(x.view(-1)[:2], mesh, [vescale.RaggedShard((0,), (1, 3))], shape=(4, 2), stride=(2, 1)))",
        f"{FIRST}; from vescale import RaggedShard as P; "
        "check(DTensor.from_local(x.view(-1)[:2], mesh, (P((0,), (1, 3)) for _ in '1'), shape=(4, 2), stride=(2, 1)))",
        f"{FIRST}; check(DTensor.from_local(x.view(-1)[:2], mesh, [pickle.loads({PICKLED})], shape=(4, 2), stride=(2, 1)))",
        f"{FIRST}; {GLOBAL}; import vescale; check(given.redistribute(mesh, [vescale.RaggedShard((0,), (1, 3))]))",
        f"{FIRST}; {GLOBAL}; import vescale; check(given.redistribute(placements=[vescale.RaggedShard((0,))]), (2, 2))",
        f"{FIRST}; {GLOBAL}; check(given.redistribute(placements=[pickle.loads({PICKLED})]))",
        # After it was taken back, the next construction installs it again.
        f"{FIRST}; from vescale import compat, RaggedShard as P; P(); compat.uninstall(); p = P((0,), (1, 3)); "
        "from torch.distributed.tensor import distribute_tensor; check(distribute_tensor(x, mesh, [p]))",
    ],
)
def test_the_first_placement(program: str) -> None:
    done = run_fresh(WORLD + program)
    assert done.returncode == 0, done.stderr


def test_gradients_of_the_first_redistribution() -> None:
    program = f"""
{FIRST}
given = DTensor.from_local(x.requires_grad_(), mesh, [Replicate()])
import vescale
found = given.redistribute(mesh, [vescale.RaggedShard((0,))])
assert found.placements[0].local_units == (2, 2)
(found * 2).to_local().sum().backward()
assert x.grad.shape == x.shape
"""
    done = run_fresh(WORLD + program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "program",
    [
        f"{FIRST}; import vescale; distribute_tensor(x, mesh, [vescale.RaggedShard((0,), (1, 3))])",
        f"{FIRST}; import vescale; f = [distribute_tensor]; P = vescale.RaggedShard; f[0](x, mesh, [P((0,), (1, 3))])",
        f"{FIRST}; distribute_tensor(x, mesh, [pickle.loads({PICKLED})])",
    ],
)
def test_a_function_that_was_looked_up_before(program: str) -> None:
    """PyTorch's own function calls nothing that could answer for it. The error tells the edit; what follows works."""
    done = run_fresh(WORLD + program)
    assert "VS0401" in done.stderr and "from vescale import RaggedShard" in done.stderr, done.stderr


def test_what_an_import_changes() -> None:
    """Importing vescale, or a part of it without placements, changes nothing. The placements replace one function, which
    does the same until there is one."""
    program = f"""
{FIRST}
import vescale, vescale.compat, vescale.comm
kept = [distribute_tensor]
assert not vescale.compat.is_installed()
import vescale.placements
assert distribute_tensor is not kept[0] and vescale.compat.is_installed("entry")
assert not vescale.compat.is_installed("placements") and not vescale.compat.is_installed("ops")
changes = [name for one in vescale.compat.patch_states() for name in one.changes]
assert changes == ["torch.distributed.tensor.distribute_tensor"]
assert distribute_tensor(x, mesh, [Replicate()]).to_local().equal(x)
assert not vescale.compat.is_installed("placements")
vescale.RaggedShard()
assert vescale.compat.is_installed("placements") and vescale.compat.is_installed("ops")
vescale.compat.uninstall()
assert distribute_tensor is kept[0] and not vescale.compat.is_installed()
vescale.compat.install()
assert distribute_tensor is not kept[0] and vescale.compat.is_installed("placements")
"""
    done = run_fresh(WORLD + program)
    assert done.returncode == 0, done.stderr
