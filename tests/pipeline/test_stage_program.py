"""Which instructions of a program the ranks of a stage run."""

from __future__ import annotations

import torch
from torch import nn

from vescale.ir import Hook, Instruction, Program, Unit
from vescale.pipeline._cut import Cut
from vescale.pipeline._staged_program import program_of_stages
from vescale.plans import MeshAxes


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))
        self.inner = Inner()


def unit(path: str, name: str) -> Instruction:
    return Instruction(path, Hook.FORWARD_PRE, "<self>", None, Unit((name,), ("dp",)))


def test_units_of_modules_that_run_in_several_stages_are_gathered_by_the_model() -> None:
    """Their own hooks do not run in each stage; all other units stay where they are."""
    owners = {"gain": 0, "inner.scale": 0, "inner.a.weight": 0, "inner.b.weight": 1}
    cut = Cut(
        ("inner.b",),
        {"inner.a": frozenset({0}), "inner.b": frozenset({1})},
        {name: frozenset({stage}) for name, stage in owners.items()},
    )
    units = unit("", "gain"), unit("inner", "scale"), unit("inner.a", "weight"), unit("inner.b", "weight")
    program = Program(MeshAxes.of({"pp": 2, "dp": 2}), units)
    found = [program_of_stages(Net(), program, cut, frozenset({stage})) for stage in (0, 1)]
    places = [[(i.path, i.op.names) for i in stage if isinstance(i.op, Unit)] for stage in found]
    assert places == [
        [("", ("gain",)), ("", ("inner.scale",)), ("inner.a", ("weight",))],
        [("inner.b", ("weight",))],
    ]
