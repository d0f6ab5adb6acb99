"""Rules of users: the example of docs/placements-ops.md, rules for custom ops, and what is refused."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import library
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.device import device_type
from tests.fresh import run_fresh
from tests.ops.layouts import assert_same, data, place
from tests.ranks import RankPools
from vescale.comm import record_comms
from vescale.ops import Decision, PlacementFallbackWarning, register_rule, strict_placements
from vescale.placements import RaggedShard

PAGE = Path(__file__).parents[2] / "docs" / "placements-ops.md"
RAGGED = ((2,), (RaggedShard((0,), (5, 3)),))


def run_example(block: str) -> None:
    block = block.replace('"cpu"', f'"{device_type()}"')
    exec(compile(block, str(PAGE), "exec"), {})


def test_the_example_of_the_docs_runs(ranks: RankPools) -> None:
    (block,) = re.findall(r"## A rule of your own\n.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    ranks.run(run_example, block, world_size=4)


def custom_op(name: str) -> Any:
    """An op that DTensor has no strategy for."""

    def affine(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    op = library.custom_op(f"tests::{name}", affine, mutates_args=())
    op.register_fake(torch.empty_like)
    return getattr(torch.ops.tests, name).default


def on_rank_custom_op() -> None:
    op = custom_op("affine")
    full = data()
    x = place(full, RAGGED)
    with record_comms() as comms, pytest.warns(PlacementFallbackWarning, match="affine.default has no rule"):
        found = op(x)  # without any rule: gathered, and run on every rank
    assert_same(found, full * 2 + 1)
    assert found.placements == (Replicate(),) and comms.count() == 1

    # PyTorch's public API: stock placements. Ragged operands are still gathered.
    register_sharding(op)(lambda x: [([Shard(0)], [Shard(0)]), ([Replicate()], [Replicate()])])
    stock = place(full, ((2,), (Shard(0),)))
    assert op(stock).placements == (Shard(0),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlacementFallbackWarning)
        assert op(x).placements == (Replicate(),)

    register_rule(op, lambda call: Decision((call.operands[0].placements,), (call.operands[0].placements,)))
    with record_comms() as comms, strict_placements():
        found = op(x)
    assert_same(found, full * 2 + 1)
    assert found.placements == x.placements and not comms.records
    assert op(stock).placements == (Shard(0),)  # rules are not for stock placements

    def unknown(call: Any) -> None:
        """Leaves every call to the next rule."""

    register_rule([op], unknown)
    with strict_placements():
        assert op(x).placements == x.placements


def test_a_custom_op(ranks: RankPools) -> None:
    ranks.run(on_rank_custom_op, world_size=2)


# name -> what the rule returns for a call of an op with one operand and one result; the error, and what it says
WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "not a decision": (
        lambda call: call.operands[0].placements,
        TypeError,
        r"wrong.default: the rule .* returned \(RaggedShard.*\); expected a Decision, or None to leave",
    ),
    "too many inputs": (
        lambda call: Decision((call.operands[0].placements,) * 2, (call.operands[0].placements,)),
        ValueError,
        r"returned inputs .*; expected a tuple with the placements of each of the 1 tensor operands",
    ),
    "inputs without a tuple for each operand": (
        lambda call: Decision((Replicate(),), ((Replicate(),),)),  # type: ignore[arg-type]
        ValueError,
        r"returned inputs\[0\] = Replicate\(\); expected a tuple of 1 placements, one for each mesh axis",
    ),
    "too many mesh axes": (
        lambda call: Decision((call.operands[0].placements,), ((Replicate(), Replicate()),)),
        ValueError,
        r"returned outputs\[0\] = \(Replicate\(\), Replicate\(\)\); expected a tuple of 1 placements",
    ),
    "too many outputs": (
        lambda call: Decision((call.operands[0].placements,), ((Replicate(),), (Replicate(),))),
        ValueError,
        r"returned outputs .*; expected a tuple with the placements of each of its 1 results",
    ),
    "no outputs": (
        lambda call: Decision((call.operands[0].placements,)),
        ValueError,
        r"returned outputs=None, but the op returns tensors; return the placements of each",
    ),
}


def on_rank_wrong_rules() -> None:
    op = custom_op("wrong")
    x = place(data(), RAGGED)
    for rule, error, message in WRONG.values():
        register_rule(op, rule)
        with pytest.raises(error, match=message):
            op(x)
    # An op that returns a number.
    ours = RaggedShard((0,), (2, 6))  # no other test's: a rule stays registered
    y = place(data(), ((2,), (ours,)))

    def wrong(call: Any) -> Decision | None:
        placements = call.operands[0].placements
        return Decision((placements, placements), (placements,)) if placements == (ours,) else None

    register_rule(torch.ops.aten.equal.default, wrong)
    with pytest.raises(ValueError, match="expected None: it returns no tensor"):
        torch.equal(y, y)
    assert torch.equal(x, x)


def test_rules_that_return_something_else(ranks: RankPools) -> None:
    ranks.run(on_rank_wrong_rules, world_size=2)


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (torch.flip, r"found <built-in method flip .*expected an op overload such as torch.ops.aten.flip.default"),
        (
            torch.ops.aten.sum,
            r"found aten.sum, which has the overloads .*; expected one overload .*: pass aten.sum\.\w+",
        ),
        ([torch.ops.aten.flip.default, "roll"], r"found 'roll'; expected an op overload"),
        (None, r"found None; expected an op overload"),
    ],
)
def test_something_else_than_overloads(op: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        register_rule(op, lambda call: None)


def test_something_else_than_a_rule() -> None:
    with pytest.raises(TypeError, match="found the rule 'local'; expected a function of an OpCall"):
        register_rule(torch.ops.aten.flip.default, "local")  # type: ignore[arg-type]


ONLY_PLACEMENTS = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

before = DTensor.redistribute
from vescale.placements import RaggedShard

assert "vescale.ops" not in sys.modules and DTensor.redistribute is before
dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
ragged = [RaggedShard((0,), (5, 2, 3))]
x = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (3,)), ragged, shape=(10,))
y = x * 2 + x
assert DTensor.redistribute is not before
assert y.placements == x.placements and y.to_local().tolist() == [3.0, 3.0], y
"""


def test_a_program_that_imports_a_placement_alone() -> None:
    done = run_fresh(ONLY_PLACEMENTS)
    assert done.returncode == 0, done.stderr


aten = torch.ops.aten
# Ops with a number that changes nothing about placements, so that decisions for one number would do for another.
WITH_NUMBERS: dict[Any, Callable[[torch.Tensor, float], Any]] = {
    aten.add.Tensor: lambda x, n: torch.add(x, x, alpha=n),
    aten.add_.Tensor: lambda x, n: x.add_(x, alpha=n),
    aten.sub.Tensor: lambda x, n: torch.sub(x, x, alpha=n),
    aten.mul.Tensor: lambda x, n: x * n,
    aten.mul_.Tensor: lambda x, n: x.mul_(n),
    aten.pow.Tensor_Scalar: lambda x, n: x**n,
    aten.addcmul.default: lambda x, n: torch.addcmul(x, x, x, value=n),
    aten.addcmul_.default: lambda x, n: x.addcmul_(x, x, value=n),
    aten.addcdiv.default: lambda x, n: torch.addcdiv(x, x, x, value=n),
    aten.lerp.Scalar: lambda x, n: torch.lerp(x, x, n),
    aten.fill_.Scalar: lambda x, n: x.fill_(n),
    aten.clamp.default: lambda x, n: torch.clamp(x, max=n),
    aten.clamp_.default: lambda x, n: x.clamp_(min=n),
    aten.leaky_relu.default: lambda x, n: torch.nn.functional.leaky_relu(x, n),
    aten.hardtanh.default: lambda x, n: torch.nn.functional.hardtanh(x, -n, n),
    aten._foreach_add.Scalar: lambda x, n: torch._foreach_add([x, x], n),
    aten._foreach_mul_.Scalar: lambda x, n: torch._foreach_mul_([x], n),
    aten._foreach_addcmul_.Scalar: lambda x, n: torch._foreach_addcmul_([x], [x], [x], value=n),
    aten._foreach_add_.List: lambda x, n: torch._foreach_add_([x], [x.clone()], alpha=n),
}


def numbers_that_rules_read() -> dict[str, list[float]]:
    """By op, where a rule has not been asked for each number. Rules stay: for a process of its own."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    found: dict[Any, list[Any]] = {op: [] for op in WITH_NUMBERS}

    def reading(call: Any) -> Decision | None:
        found[call.op] += [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, float)][-1:]
        return None

    for op, run in WITH_NUMBERS.items():
        x = place(data(), RAGGED)
        run(x, 5.0)  # decided before there is a rule
        register_rule(op, reading)
        for number in (2.0, 3.0, 2.0, 4.0):
            run(x, number)
    return {str(op): numbers for op, numbers in found.items() if set(numbers) != {2.0, 3.0, 4.0}}


def test_rules_that_read_numbers() -> None:
    """A rule may read a number that no rule of PyTorch's or of ours reads: no decision for another number is taken."""
    done = run_fresh("from tests.ops.test_register_rule import *; print(numbers_that_rules_read())")
    assert done.returncode == 0 and done.stdout.strip().splitlines()[-1] == "{}", done
