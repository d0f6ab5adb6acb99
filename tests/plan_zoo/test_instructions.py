"""Every instruction that a plan is lowered to has one executor in the runtime, and nothing else is installed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.plan_zoo.models import model_of, tokens
from tests.plan_zoo.test_zero import CALLED_ALONE
from tests.runtime.zero import sharded_at_rest
from vescale import lower, plan_zoo
from vescale.fsdp import state_of
from vescale.ir import Attention, Factory, Hook, Instruction, Local, Op, Place, Program, Redistribute, Unit, Wrap
from vescale.plans import INIT, RUN, MeshAxes, PlanError
from vescale.runtime import _gradient_hooks, _install, install
from vescale.runtime._executors import Executor, executor_of
from vescale.runtime._gradient_hooks import full_name
from vescale.runtime._local_region import ExpertRegion, LocalRegion
from vescale.runtime._placing import Placing
from vescale.runtime._runtime import Runtime

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


def executed(model: nn.Module) -> Iterator[Instruction]:
    """The instructions that parts of a parallelized model's runtime hold to carry them out, except those of units."""
    runtime = Runtime.of(model)
    assert runtime is not None
    for path, module in model.named_modules():
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        found = {id(one.__self__): one.__self__ for hook in hooks for one in placing(hook)}
        for own in found.values():
            yield from (one.instruction for one in (*own.inputs, *own.outputs))
            yield from own.parameters
        if isinstance(getattr(module.forward, "__self__", module), LocalRegion | ExpertRegion):
            yield Instruction(path, Hook.FORWARD, "<self>", None, region_of(runtime, path))
    for path, placements in runtime._factories.items():
        yield Instruction(path, Hook.FORWARD, "<self>", None, Factory(placements))
    for path, methods in runtime._attention.items():
        yield Instruction(path, Hook.FORWARD, "<self>", None, Attention(methods))
    for instructions in runtime.gradients._instructions.values():
        yield from instructions


def placing(hook: Any) -> list[Any]:
    """The methods of a module's instructions that a hook in Python calls."""
    held = [getattr(hook, name, None) for name in ("place", "around")]
    return [one for one in held if hasattr(one, "__self__")]


def region_of(runtime: Runtime, path: str) -> Local:
    (op,) = (i.op for i in runtime.program if i.path == path and isinstance(i.op, Local))
    return op


@pytest.mark.parametrize("name", plan_zoo.names())
def test_what_explain_shows_is_installed(
    one_rank: None, name: str, monkeypatch: pytest.MonkeyPatch, ran: set[int]
) -> None:
    """Each instruction of the printed program is held by the part that executes it, once, and nothing else is. A step
    carries all of them out, except those of inputs that the model is not given."""
    monkeypatch.setattr(_install, "native_hooks", lambda: None)  # those in C++ do not show what they call
    sizes = dict.fromkeys(plan_zoo.about(name).axes, 1)
    zoo = model_of(name)
    zoo.need()
    model = zoo.build().double()
    plan = plan_zoo.load(name, sizes)
    program = lower(plan, model)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    install(model, program, mesh)
    printed = [line.strip() for line in program.to_text().splitlines()]
    assert all(instruction.text(program.axes) in printed for instruction in program)
    elsewhere = (Executor.STATE, Executor.UNIT)
    expected = Counter(i.text(program.axes) for i in program if executor_of(i) not in elsewhere)
    assert Counter(i.text(program.axes) for i in executed(model)) == expected
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for instruction in program:
        executor = executor_of(instruction)
        if executor is Executor.STATE:
            tensor = named[full_name(instruction)]
            assert isinstance(tensor, DTensor)
            assert isinstance(instruction.op, Place), instruction
        elif executor is Executor.UNIT:
            assert isinstance(instruction.op, Unit)
            state = state_of(model.get_submodule(instruction.path))
            assert state is not None
            held = {parameter.name for group in state.groups for parameter in group.parameters}
            prefix = f"{instruction.path}." if instruction.path else ""
            assert {prefix + each for each in instruction.op.names} <= held | tied(model), instruction

    inputs = zoo.inputs() if "cp" not in sizes else {"input_ids": tokens()}
    zoo.objective(model, inputs).backward()
    carried_out = (Executor.INPUT, Executor.OUTPUT, Executor.GRADIENT)
    left = [i for i in program if executor_of(i) in carried_out and id(i) not in ran]
    assert all(i.path == "" and isinstance(i.op, Wrap) and i.index not in inputs for i in left), left


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The ids of the instructions of inputs, outputs and gradients that are carried out."""
    found: set[int] = set()
    place, rule = Placing.__call__, _gradient_hooks._rule

    def placing(self: Placing, *args: Any) -> Any:
        found.add(id(self.instruction))
        return place(self, *args)

    def ruling(instructions: Any, *args: Any) -> Any:
        found.update(map(id, instructions))
        return rule(instructions, *args)

    monkeypatch.setattr(Placing, "__call__", placing)
    monkeypatch.setattr(_gradient_hooks, "_rule", ruling)
    return found


def tied(model: nn.Module) -> set[str]:
    """Further names of parameters that have several."""
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return every - {name for name, _ in model.named_parameters()}


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
