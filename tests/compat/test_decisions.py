"""For every op with a rule, and drawn placements: decisions are those of PyTorch's own search in the installed version,
and ranks that follow them have one device's numbers."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.compat import aten_calls
from tests.compat.aten_calls import Call
from tests.compat.drawn_decisions import (
    MESHES,
    Case,
    Refused,
    Wrong,
    alike,
    check_numbers,
    decide,
    draw,
    meshes_of,
    ops_with_rules,
)
from vescale import Plan, compat, parallelize
from vescale.compat import clear_sharding_caches
from vescale.compat.dispatch import handlers_of_dtensor, keeps_operands
from vescale.compat.model_hooks import model_hooks

pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "upstream.md"

# Rules of PyTorch that give other numbers than one device, and that vescale leaves alone: by op, the section of the page.
_AVERAGES = "Averages of pending integers are those of their terms"
WRONG_RULES: dict[str, str] = {
    "aten.avg_pool2d.default": _AVERAGES,
    "aten.avg_pool2d.out": _AVERAGES,
    "aten.linalg_pinv.atol_rtol_tensor": "Operands that are keywords are not moved",
    "aten.view_copy.default": "Copies of views are cut where views are not",
}
_OUT, _PENDING_OUT = "Sizes stay global where `out` is given", "A pending `out` is written to as if it were whole"

# Ops with a rule and a kernel for CPUs that no call was found of: most stand in graphs alone, take 8-bit numbers, or have no
# operand that is placed.
NOT_CALLED = frozenset(
    {
        "aten._batch_norm_with_update_functional.default",
        "aten._native_batch_norm_legit_functional.default",
        "aten.normal_functional.default",
        "aten.rrelu_with_noise_functional.default",
        "aten._scaled_mm.default",
        "aten._scaled_mm.out",
        "aten._upsample_lanczos2d_aa.default",
        "aten._upsample_lanczos2d_aa.out",
        "aten._upsample_lanczos2d_aa_backward.default",
        "aten._upsample_lanczos2d_aa_backward.grad_input",
        "aten.adaptive_avg_pool1d.out",
        "aten.avg_pool1d.out",
        "aten.eye.m_out",
    }
)

PARTS = 48
DRAWS = {1: 3, 2: 1.5, 3: 0.3}
"""Of one op, on meshes with so many axes, on average. PyTorch's whole search takes up to seconds on three."""


@pytest.fixture
def world() -> Iterator[Any]:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    meshes_of.cache_clear()
    yield dist.group.WORLD
    meshes_of.cache_clear()
    clear_sharding_caches()
    dist.destroy_process_group()


def recorded(chosen: Callable[[Sequence[Any]], Sequence[Any]]) -> dict[Any, list[Call]]:
    """Calls of ops with rules, by the chosen ones of PyTorch's functions with samples."""
    return called(aten_calls.samples(chosen))


def called(functions: Iterable[Callable[[], Any]]) -> dict[Any, list[Call]]:
    """Calls of ops with rules that the functions make. Ops of ``prims`` stand in graphs alone."""
    ops = [op for op in ops_with_rules() if op.namespace == "aten"]
    calls = aten_calls.record(functions, ops)
    aten_calls.add_siblings(calls, ops)
    return calls


def drawn(calls: dict[Any, list[Call]], chance: random.Random, max_axes: int = 3) -> list[Case]:
    """Each case is followed by one with the same placements and other sizes, where there is one."""
    cases = []
    for op in sorted(calls, key=str):
        for num_axes, number in DRAWS.items():
            shapes = [shape for shape in MESHES if len(shape) == num_axes <= max_axes]
            number = number / 3 if op._overloadname.endswith("out") else number  # decided as without it
            for _ in range(int(number + chance.random()) if shapes else 0):
                case = draw(chance.choice(calls[op]), chance.choice(shapes), chance)
                cases += [c for c in (case, alike(case, calls[op], chance)) if c is not None]
    return cases


def facts(found: Any) -> Any:
    if isinstance(found, AssertionError):  # of PyTorch's code about itself; it tells of the candidate that it came to
        return AssertionError
    if isinstance(found, Exception):
        return type(found), str(found)[:200]
    outputs = found.output_spec if isinstance(found.output_spec, list | tuple) else [found.output_spec]
    return (
        [spec if spec is None else placed(spec) for spec in outputs],
        found.needs_redistribute,
        found.use_val_from_redistribute_schema,
        str(found.redistribute_schema),
    )


def placed(spec: DTensorSpec) -> Any:
    """What matters of a spec. Strides of dims with one index, and of empty tensors, say nothing."""
    meta = spec.tensor_meta
    assert meta is not None
    strides = [stride for size, stride in zip(meta.shape, meta.stride) if size > 1 and 0 not in meta.shape]
    return str(spec.placements), spec.use_strided_shard_as_shard_order, tuple(meta.shape), strides, meta.dtype


def cuts_what_is_not_there(found: Any) -> bool:
    """Whether a result is cut along a dim that it does not have (`amax.out` with `keepdim=False`)."""
    if isinstance(found, Exception):
        return False
    outputs = found.output_spec if isinstance(found.output_spec, list | tuple) else [found.output_spec]
    specs = [spec for spec in outputs if isinstance(spec, DTensorSpec)]
    return any(isinstance(p, Shard) and p.dim >= spec.ndim for spec in specs for p in spec.placements)


def is_right(case: Case, meshes: dict[Any, DeviceMesh], found: Any) -> bool:
    """Whether ranks that follow a decision, which has no sizes of one rank in it, have one device's numbers."""
    if isinstance(found, Exception) or found.use_val_from_redistribute_schema:
        return False
    try:
        check_numbers(case, meshes, lambda mesh: found)
    except Wrong:
        return False
    return True


def compare(world: Any, cases: list[Case]) -> Counter[str]:
    meshes = [meshes_of(world, case.mesh_shape) for case in cases]
    first = [next(iter(found.values())) for found in meshes]
    compat.uninstall()
    clear_sharding_caches()
    expected = [decide(case, mesh) for case, mesh in zip(cases, first)]
    parallelize(nn.Linear(2, 2), Plan(init_device_mesh("cpu", (8,), mesh_dim_names=("a",))))
    compat.install()
    clear_sharding_caches()

    counts: Counter[str] = Counter()
    differ: list[str] = []
    for case, mesh, wanted, places in zip(cases, first, expected, meshes):
        found = decide(case, mesh)
        if facts(found) != facts(wanted):
            if (
                facts(wanted) is AssertionError
                or cuts_what_is_not_there(wanted)
                or (is_right(case, places, found) and not is_right(case, places, wanted))
            ):
                counts["corrected"] += 1
                continue
            differ.append(f"{case}\n    PyTorch: {facts(wanted)}\n    vescale: {facts(found)}")
    wrong: dict[str, list[str]] = defaultdict(list)
    for case, places in zip(cases, meshes):
        try:
            counts[f"numbers: {followed(case, places)}"] += 1
        except Wrong as error:
            kind = "refused by the op" if isinstance(error, Refused) else "wrong"
            counts[f"numbers: {kind}"] += 1
            if str(case.call.op) in WRONG_RULES or (isinstance(error, Refused) and forgets_out(case.call.op)):
                continue
            if case.call.op._overloadname.endswith("out") and any(p.is_partial() for p in case.placements[-1]):
                continue  # as the page says of them
            wrong[str(case.call.op)].append(f"{case}\n    {error}")
    listed = "\n".join(f"{op}: {len(found)}, such as\n  {found[0]}" for op, found in wrong.items())
    assert not differ, f"{len(differ)} decisions are not PyTorch's:\n" + "\n".join(differ[:20])
    assert not wrong, f"{sum(map(len, wrong.values()))} decisions give other numbers than one device:\n{listed}"
    return counts


def forgets_out(op: Any) -> bool:
    """Whether PyTorch makes the sizes local that another overload of the op is given, and not this one's."""
    sized = DTensor._op_dispatcher.sharding_propagator.op_to_shape_and_stride_idx
    return op not in sized and any(getattr(op.overloadpacket, name) in sized for name in op.overloadpacket.overloads())


def test_known_faults_of_rules_stand_on_the_page() -> None:
    titles = re.findall(r"^## (.*)", PAGE.read_text(), re.MULTILINE)
    assert {*WRONG_RULES.values(), _OUT, _PENDING_OUT} <= {*titles}


def followed(case: Case, meshes: dict[Any, DeviceMesh]) -> str:
    """Compares the numbers of the decision that ranks follow in a model."""
    op = case.call.op
    if is_composite(op):
        return "taken apart"  # before a DTensor is asked
    args, kwargs = case.on(next(iter(meshes.values())))
    hooks = model_hooks()
    assert hooks is not None
    schema = DTensor._op_dispatcher.unwrap_to_op_info(op, args, kwargs).schema
    if op in handlers_of_dtensor() or (op in hooks.handlers and hooks.handlers[op].applies(op, schema)):
        return "handled"

    def decided(mesh: DeviceMesh) -> Any:
        args, kwargs = case.on(mesh)
        return keeps_operands(op, args, kwargs)[1]

    try:
        found = decided(next(iter(meshes.values())))
    except Exception:  # compared with PyTorch's above
        return "refused"
    return "elsewhere" if found is None else check_numbers(case, meshes, decided)


def a_few(functions: Sequence[Any]) -> list[Any]:
    """Drawn once, and those whose rule has a filter."""
    rules = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs
    filtered = {
        op.name().partition("::")[2].partition(".")[0]
        for op, rule in rules.items()
        if getattr(rule, "full_mesh_strategy_filter", None) is not None
    }
    drawn = random.Random(0).sample(range(len(functions)), 12)
    return [f for index, f in enumerate(functions) if index in drawn or f.name in filtered]


def test_decisions_of_a_sample(world: Any) -> None:
    counts = compare(world, drawn(recorded(a_few), random.Random(0)))
    assert counts["numbers: stay"] > 100 and counts["numbers: moved"] > 30, counts


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_decisions(world: Any, part: int) -> None:
    cases = drawn(recorded(lambda functions: functions[part::PARTS]), random.Random(part))
    compare(world, cases)


def test_decisions_of_calls_by_hand(world: Any) -> None:
    """On one axis: of fused optimizers, PyTorch's search judges as many candidates on two as take minutes."""
    compare(world, drawn(called(aten_calls.by_hand()), random.Random(0), max_axes=1))


@pytest.mark.slow
def test_most_ops_with_rules_are_called() -> None:
    """The others are composite, so that DTensor sees what they are made of, have no kernel for CPUs, or are listed here."""
    functions = itertools.chain(aten_calls.samples(), aten_calls.by_hand())
    calls = called(functions)
    ops = [op for op in ops_with_rules() if op.namespace == "aten"]
    missing = {str(op) for op in ops if op not in calls and not is_composite(op) and has_cpu_kernel(op)}
    assert missing <= NOT_CALLED, missing - NOT_CALLED
    assert len(calls) >= 0.85 * len(ops)


def is_composite(op: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))


def has_cpu_kernel(op: Any) -> bool:
    keys = ("CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in keys)


VIEWED: list[tuple[list[int], list[int]]] = [
    ([5, 2, 3], [1, 10, 3]),
    ([3, 4, 4], [3, 16]),
    ([1, 2, 3, 6, 5], [1, 2, 90]),
    ([2, 3, 5, 5], [6, 25]),
    ([6, 6, 1, 2], [36, 1, 2]),
    ([6, 4], [2, 3, 4]),
]


@pytest.mark.parametrize(("shape", "wanted"), VIEWED)
@pytest.mark.parametrize("op", [torch.ops.aten.view.default, torch.ops.aten.view_copy.default], ids=str)
def test_views_of_uneven_pieces(world: Any, op: Any, shape: list[int], wanted: list[int]) -> None:
    """PyTorch cuts the result of a view into pieces of its own, which hold other elements where sizes are uneven."""
    compat.install()
    parallelize(nn.Linear(2, 2), Plan(init_device_mesh("cpu", (8,), mesh_dim_names=("a",))))
    call, counts = Call(op, (torch.randn(shape, dtype=torch.float64), wanted), {}), Counter[str]()
    for dim, pieces, mesh_shape in itertools.product(range(len(shape)), (2, 3), ((2,), (5,), (2, 3))):
        cut = _StridedShard(dim, split_factor=pieces)
        for placements in {(cut,) * len(mesh_shape), (cut, Shard(len(shape) - 1))[: len(mesh_shape)]}:
            case = Case(call, mesh_shape, (placements,))
            counts[followed(case, meshes_of(world, mesh_shape))] += 1
    assert counts["stay"] + counts["elsewhere"] > 10, counts
