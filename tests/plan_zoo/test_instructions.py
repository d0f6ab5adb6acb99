"""Every instruction that a plan is lowered to has one executor in the runtime, and nothing else is installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.plan_zoo.models import model_of
from tests.plan_zoo.test_zero import CALLED_ALONE
from tests.runtime.zero import sharded_at_rest
from vescale import lower, plan_zoo
from vescale.ir import Hook, Instruction, Op, Place, Program, Redistribute, Unit, Wrap
from vescale.plans import INIT, RUN, MeshAxes, PlanError
from vescale.runtime import install
from vescale.runtime._executors import Executor, executor_of

R, S0 = Replicate(), Shard(0)


def programs(name: str) -> Iterator[Program]:
    """Of a plan of the zoo: as it is, with parameters sharded at rest, and with a parameter that is moved by itself."""
    sizes = dict.fromkeys(plan_zoo.about(name).axes, 2)
    zoo = model_of(name)
    zoo.need()
    with torch.device("meta"):
        model = zoo.build()
    yield lower(plan_zoo.load(name, sizes), model)
    if name == "llama_zero3":
        return
    axis = next(iter(sizes))
    sharded = sharded_at_rest(plan_zoo.load(name, sizes), axis=axis)
    yield lower(sharded.unit(CALLED_ALONE[name]) if name in CALLED_ALONE else sharded, model)
    moved = next(path for path, p in model.named_parameters() if p.ndim == 1 and p.shape[0] % 2 == 0)
    alone = plan_zoo.load(name, sizes).annotate(f"{moved}.grad", Partial(), mesh=axis)
    yield lower(alone.shard(moved, S0, mesh=axis, phase=INIT).shard(moved, R, mesh=axis, phase=RUN), model)


@pytest.mark.parametrize("name", plan_zoo.names())
def test_every_instruction_has_an_executor(name: str) -> None:
    found = {executor_of(instruction) for program in programs(name) for instruction in program}
    moved = set() if name == "llama_zero3" else {Executor.PARAMETER, Executor.GRADIENT}
    assert {Executor.STATE, Executor.INPUT, Executor.SETTING} | moved <= found


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("hook", "target", "op"),
    [
        (Hook.FORWARD_POST, "weight", Redistribute((S0,), (R,))),
        (Hook.FORWARD_PRE, "weight", Wrap((S0,))),
        (Hook.FORWARD_PRE, "<out>", Redistribute((R,))),
        (Hook.BACKWARD, "weight", Place((R,))),
        (Hook.FORWARD, "<self>", Unit(("weight",), ("dp",))),
    ],
)
def test_a_program_that_nothing_executes_is_refused(one_rank: None, hook: Hook, target: str, op: Op) -> None:
    program = Program(MeshAxes(("dp",), (1,)), (Instruction("", hook, target, None, op),))
    with pytest.raises(PlanError, match=f"nothing executes a {type(op).__name__} of '{target}' at '{hook.value}'"):
        install(nn.Linear(2, 2), program, init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
