"""Steps that differ from the recorded one, in ways that no guard can foresee: static mode computes what eager mode does, and
that what one device does, or an error of ours is raised."""

from __future__ import annotations

import random
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.device import device_type
from tests.ranks import RankPools
from tests.static import programs
from tests.static.programs import INSIDE, KEPT, REPLACED, Net, begin_step, tensors_of
from tests.static.training_loops import AROUND
from tests.whole import whole
from vescale import Plan, parallelize
from vescale.compat import bytes_of, own_part
from vescale.errors import Coded
from vescale.placements import RaggedShard
from vescale.plans import INIT, RUN
from vescale.static import report

pytestmark = pytest.mark.helper("dispatch")

_STEPS = 6
_PART = 24  # programs of a test
_NOT_OF_ONE_DEVICE = {"autocast"}  # sums of bfloat16, of parts
_STATIC = re.compile(rf"{_STEPS - 1} static steps, 1 recordings")


def plan_of(kind: str, mesh: DeviceMesh) -> Plan:
    plan = Plan(mesh)
    if kind == "tp":
        plan.shard("(up|other).(weight|bias)", Shard(0)).shard("(up|other).<in>", Replicate())
        return plan.shard("down.weight", Shard(1)).shard("down.<out>", Replicate())
    plan.shard("<in>", Shard(0)).shard(".*(weight|bias|scale)", RaggedShard(), phase=INIT)
    return plan.shard(".*(weight|bias|scale)", Replicate(), phase=RUN).unit("up|down|other")


def steps(name: str, mode: str, kind: str = "", mesh: Any = None) -> tuple[list[dict[str, Any]], str]:
    """What each step computes and leaves behind, and the report; ``mode``: "" for one device."""
    programs.reset()
    torch.manual_seed(0)
    model: Any = Net(name).double()
    if mode:
        parallelize(model, plan_of(kind, mesh), mode=mode)
    rows: list[dict[str, Any]] = []
    for step in range(_STEPS):
        begin_step(step)
        x = torch.randn(4, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        random.seed(step)
        np.random.seed(step)
        torch.manual_seed(step)
        model.zero_grad()
        row: dict[str, Any] = {}
        rows.append(row)
        with replaced(name, step):
            try:
                row["out"] = [y.detach() for y in tensors_of(AROUND.get(name, AROUND["plain"])(model, x, step))]
            except Exception as problem:
                row["raised"] = problem
                if isinstance(problem, Coded):
                    break
        row |= {"input": x.detach().clone(), "drawn": torch.get_rng_state()}
        row["kept"] = [y.detach() if isinstance(y, torch.Tensor) else torch.zeros(()) for y in KEPT]
        for kind_of, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            for own, p in named:
                row[f"{kind_of} {own}"] = p.detach().clone()
                row[f"gradient of {own}"] = None if p.grad is None else p.grad.detach().clone()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None and p.requires_grad:
                    p.add_(p.grad, alpha=-1e-3)
    return rows, str(report(model)) if mode == "static" else ""


def replaced(name: str, step: int) -> Any:
    patch = pytest.MonkeyPatch()
    if name in REPLACED:
        target, attribute, before, late = REPLACED[name]
        patch.setattr(target, attribute, late if step >= 3 else before, raising=False)

    class Undone:
        def __enter__(self) -> None: ...

        def __exit__(self, *_: Any) -> None:
            patch.undo()

    return Undone()


def same(a: Any, b: Any) -> bool:
    """Whether two values have equal bits, and placements."""
    if isinstance(a, BaseException):
        return type(a) is type(b)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if a is None or b is None:
        return a is b
    if isinstance(a, DTensor) != isinstance(b, DTensor) or getattr(a, "placements", 0) != getattr(b, "placements", 0):
        return False
    a, b = own_part(a), own_part(b)
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bytes_of(a), bytes_of(b))


def compare(name: str, kind: str, mesh: DeviceMesh) -> str:
    """The report, or an error of ours, or what is wrong."""
    (eager, _), (static, found) = (steps(name, mode, kind, mesh) for mode in ("eager", "static"))
    for step, (expected, row) in enumerate(zip(eager, static)):
        if isinstance(row.get("raised"), Coded):
            return f"{type(row['raised']).__name__}: {row['raised']}"
        differing = [
            key for key in expected | row if key not in expected or key not in row or not same(expected[key], row[key])
        ]
        if differing:
            return f"wrong in step {step}: {differing}; {expected.get('raised')!r}, {row.get('raised')!r}; {found}"
    if kind == "tp" and name not in _NOT_OF_ONE_DEVICE and not any("raised" in row for row in eager):
        for step, (expected, row) in enumerate(zip(steps(name, "")[0], eager)):
            if not all(map(_are_close, expected.get("out", [None]), row["out"])):
                return f"wrong in step {step}: eager mode differs from one device"
    return found


def _are_close(expected: Any, found: torch.Tensor) -> bool:
    return expected is not None and torch.allclose(whole(found), expected, rtol=1e-9, atol=1e-12, equal_nan=True)


def compare_all(names: list[str], kind: str) -> dict[str, str]:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp" if kind == "tp" else "dp",))
    found = {}
    for name in names:
        try:
            found[name] = compare(name, kind, mesh)
        except Exception as problem:
            found[name] = f"wrong: {type(problem).__name__}: {problem}"
    return found


NAMES = [*INSIDE, *AROUND]


@pytest.mark.parametrize("first", range(0, len(NAMES), _PART))
@pytest.mark.parametrize("kind", ["tp", pytest.param("zero", marks=pytest.mark.slow)])
def test_steps_that_differ(ranks: RankPools, kind: str, first: int) -> None:
    """Equal to eager mode, or an error of ours; the same on all ranks."""
    names = NAMES[first : first + _PART]
    answers = ranks.run(compare_all, names, kind, world_size=2)
    texts = {name: [_without_ranks(found[name]) for found in answers] for name in names}
    wrong = [name for name, (one, other) in texts.items() if one != other or one.startswith("wrong")]
    wrong += [
        name for name, (one, _) in texts.items() if kind == "tp" and name in programs.STATIC and not _STATIC.match(one)
    ]
    wrong += [name for name, (one, _) in texts.items() if kind == "tp" and programs.REASONS.get(name, "") not in one]
    assert not wrong, "\n".join(f"{name}:\n  rank 0: {texts[name][0]}\n  rank 1: {texts[name][1]}" for name in wrong)


def _without_ranks(text: str) -> str:
    """An answer without the sizes of this rank's part."""
    return re.sub(r"torch\.Size\(\[[\d, ]*\]\)|\(\d+(, \d+)*,?\)", "(...)", text)


def test_names() -> None:
    assert len(NAMES) >= 120 and len(set(NAMES)) == len(NAMES)
    assert set(REPLACED) <= set(INSIDE) and (programs.STATIC | set(programs.REASONS)) <= set(NAMES)
