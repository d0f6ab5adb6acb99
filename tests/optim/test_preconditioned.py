"""``Shampoo`` and ``SOAP``: against references of one page on one matrix, and against one device on any mesh."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tests.examples import NIGHTLY
from tests.optim.meshes import GRIDS, LINES, Case, assert_equal, build, missing_gradients, on_mesh, set_gradients
from tests.optim.references import shampoo_steps, soap_steps
from tests.pipeline.steps import Net, mesh_of
from tests.ranks import RankPools, run_cases
from tests.whole import whole
from vescale import parallelize
from vescale.errors import OptimizerError
from vescale.optim import SOAP, Shampoo, report
from vescale.optim._preconditioned import inverse_root, refresh_phases
from vescale.plans import Plan


def run_alone(kind: Any, shape: tuple[int, int], num_steps: int, **options: Any) -> tuple[Any, Any, list[Any]]:
    torch.manual_seed(0)
    weight = torch.randn(shape)
    gradients = [torch.randn(shape) + 0.5 * weight for _ in range(num_steps)]
    parameter = nn.Parameter(weight.clone())
    optimizer = kind([parameter], **options)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach(), weight, gradients


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"frequency": 3},
        {"frequency": 2, "start": 5, "b1": 0.9, "wd": 0.1},
        {"grafting": "sgd", "b2": 0.9},
        {"grafting": None, "b2": 0.95},
    ],
)
@pytest.mark.parametrize("shape", [(6, 9), (9, 4)])
def test_shampoo_is_that_of_the_paper(shape: tuple[int, int], options: dict[str, Any]) -> None:
    frequency = options.get("frequency", 1)
    found, weight, gradients = run_alone(
        Shampoo,
        shape,
        25,
        lr=0.01,
        betas=(options.get("b1", 0.0), options.get("b2", 0.999)),
        weight_decay=options.get("wd", 0.0),
        precondition_frequency=frequency,
        start_preconditioning_step=options.get("start"),
        grafting=options.get("grafting", "adam"),
    )
    expected = shampoo_steps(weight, gradients, lr=0.01, **{"start": frequency, **options})
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
    assert (found - weight).abs().max() > 0.05


@pytest.mark.parametrize("options", [{}, {"frequency": 3, "b1": 0.9}, {"frequency": 1, "wd": 0.2}, {"largest": 6}])
# The first factors of longer matrices have null spaces, in which eigenvectors are a matter of rounding.
@pytest.mark.parametrize("shape", [(7, 7), (8, 7)])
def test_soap_is_that_of_the_paper(shape: tuple[int, int], options: dict[str, Any]) -> None:
    found, weight, gradients = run_alone(
        SOAP,
        shape,
        25,
        lr=0.01,
        betas=(options.get("b1", 0.95), 0.95),
        weight_decay=options.get("wd", 0.01),
        precondition_frequency=options.get("frequency", 10),
        max_preconditioner_dim=options.get("largest", 10000),
    )
    torch.testing.assert_close(found, soap_steps(weight, gradients, lr=0.01, **options), rtol=2e-4, atol=2e-4)
    assert (found - weight).abs().max() > 0.05


@pytest.mark.parametrize(
    ("kind", "dtype", "noise", "bound"),
    [(SOAP, torch.float64, 1e-15, 1e-9), (SOAP, torch.float32, 1e-7, 1e-3), (Shampoo, torch.float32, 1e-7, 1e-4)],
)
def test_rounding_does_not_decide_where_gradients_have_no_full_rank(
    kind: Any, dtype: torch.dtype, noise: float, bound: float
) -> None:
    """Gradients that differ in their last bits, as those of two meshes do, give equal steps."""
    found = []
    for scale in (0.0, noise):
        generator = torch.Generator().manual_seed(0)
        parameter = nn.Parameter(torch.zeros(16, 12, dtype=dtype))
        optimizer = kind([parameter], lr=0.01, precondition_frequency=2)
        for _ in range(12):
            rows, columns, last_bits = (
                torch.randn(shape, generator=generator, dtype=dtype) for shape in ((16, 3), (3, 12), (16, 12))
            )
            parameter.grad = (rows @ columns) * (1 + scale * last_bits)
            optimizer.step()
        found.append(parameter.detach())
    difference = (found[0] - found[1]).abs().max() / found[0].abs().max()
    assert difference <= bound, difference


@pytest.mark.parametrize("power", [-1 / 4, -1 / 2])
def test_roots_of_what_is_below_rounding(power: float) -> None:
    """Eigenvalues of rounding, also below zero, count as the rounding of the largest; zero has the root of epsilon."""
    basis = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(0)))[0]
    values = torch.tensor([2.0, 1.0, 1e-9, 0.0, -1e-8])
    floor = torch.finfo(torch.float32).eps * 5 * 2.0
    expected = (basis * values.clamp(min=floor).pow(power)) @ basis.T
    found = inverse_root((basis * values) @ basis.T, power, 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    torch.testing.assert_close(inverse_root(torch.zeros(2, 2), power, 1e-12), 1e-12**power * torch.eye(2))


def test_soap_keeps_factors_in_double_precision() -> None:
    parameter = nn.Parameter(torch.ones(4, 3))
    for given in (torch.float64, torch.float32):
        optimizer = SOAP([parameter], factor_dtype=given)
        state = optimizer.state[parameter]
        assert {state["row_factor"].dtype, state["column_factor"].dtype} == {given}
        assert state["row_basis"].dtype == state["exp_avg"].dtype == torch.float32
        planned = report(optimizer).parameters[0].state_bytes
        parameter.grad = torch.ones(4, 3)
        optimizer.step()
        saved = {**optimizer.state_dict()}
        optimizer.load_state_dict(saved)
        assert optimizer.state[parameter]["row_factor"].dtype == given
        assert planned == sum(value.nbytes for value in optimizer.state[parameter].values())
    with pytest.raises(OptimizerError, match="factor_dtype"):
        SOAP([parameter], factor_dtype=torch.bfloat16)


def test_soap_changes_nothing_in_its_first_step() -> None:
    found, weight, _ = run_alone(SOAP, (4, 3), 1, weight_decay=0.5)
    assert torch.equal(found, weight)


def test_soap_without_bases_is_adam() -> None:
    """Vectors, scalars and long sides: the gradients after the first, with AdamW's decay. Epsilon is beside sqrt(v) before
    its correction."""
    torch.manual_seed(0)
    start = [torch.randn(5), torch.randn(()), torch.randn(4, 7)]
    ours, theirs = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
    optimizer = SOAP(ours, lr=0.01, eps=0.0, max_preconditioner_dim=3)
    reference = torch.optim.AdamW(theirs, lr=0.01, betas=(0.95, 0.95), eps=0.0, weight_decay=0.01)
    for step in range(8):
        for a, b in zip(ours, theirs):
            a.grad = torch.randn_like(a)
            b.grad = None if step == 0 else a.grad.clone()
        optimizer.step()
        reference.step()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b)


def test_shampoo_treats_tiles_apart() -> None:
    """As parameters of their own, also along dims that do not divide; stacks, and a convolution as a matrix."""
    torch.manual_seed(0)
    whole, stack, kernel = nn.Parameter(torch.randn(7, 10)), nn.Parameter(torch.randn(2, 4, 4)), torch.randn(4, 3, 2, 2)
    conv, flat = nn.Parameter(kernel.clone()), nn.Parameter(kernel.flatten(1).clone())
    tiles = [nn.Parameter(t.clone()) for rows in whole.detach().split(4) for t in rows.split(4, 1)]
    tiles += [nn.Parameter(t.clone()) for t in stack.detach().unbind()]
    options: dict[str, Any] = {"lr": 0.1, "max_preconditioner_dim": 4}
    one, apart = Shampoo([whole, stack], **options), Shampoo(tiles, **options)
    wide, narrow = Shampoo([conv], lr=0.1), Shampoo([flat], lr=0.1)
    for _ in range(3):
        whole.grad, stack.grad, conv.grad = torch.randn_like(whole), torch.randn_like(stack), torch.randn_like(conv)
        parts = [t for rows in whole.grad.split(4) for t in rows.split(4, 1)] + list(stack.grad.unbind())
        for tile, gradient in zip(tiles, parts):
            tile.grad = gradient.clone()
        flat.grad = conv.grad.flatten(1).clone()
        for optimizer in (one, apart, wide, narrow):
            optimizer.step()
    found = [t for rows in whole.detach().split(4) for t in rows.split(4, 1)] + list(stack.detach().unbind())
    for tile, value in zip(tiles, found):
        assert torch.equal(tile, value)
    assert torch.equal(conv.flatten(1), flat)


def refreshes_of_stages(sizes: dict[str, int]) -> None:
    """Each stage has an optimizer of its own; matrices are due in the steps in which they are due on one device."""
    torch.manual_seed(0)
    reference = Net(tied=True, dropout=0.0)
    plan = Plan(mesh_of(**sizes)).pipeline(split_before=["blocks.1"], microbatches=2, loss="out.loss")
    model = parallelize(copy.deepcopy(reference), plan)
    for kind in (SOAP, Shampoo):
        made = []
        for each in (model, reference):
            late = {n: p for n, p in each.named_parameters() if n == "blocks.3.up.weight"}
            named = [(n, p) for n, p in each.named_parameters() if n not in late]
            groups = [{"params": [(n, p) for n, p in named if p.ndim == d]} for d in (2, 1)]
            made.append(kind(groups, lr=0.1, precondition_frequency=3))
            made[-1].add_param_group({"params": list(late.items())})
        optimizer, alone = made
        found, expected = dict(model.named_parameters()), dict(reference.named_parameters())
        for step in range(7):
            for number, (name, parameter) in enumerate(expected.items()):
                draws = torch.Generator().manual_seed(100 * step + number)
                parameter.grad = torch.randn(parameter.shape, generator=draws)
                if name in found:
                    own = found[name]
                    own.grad = on_mesh(parameter.grad, own.device_mesh, own.placements)
            optimizer.step()
            alone.step()
        for name, parameter in found.items():
            assert torch.equal(whole(parameter), expected[name]), (kind, name)
            for key, value in alone.state[expected[name]].items():
                assert torch.equal(whole(optimizer.state[parameter][key]), value), (kind, name, key)
        assert copy.deepcopy(optimizer)._phases == optimizer._phases


def test_refreshes_of_stages(ranks: RankPools) -> None:
    ranks.run(refreshes_of_stages, {"pp": 2}, world_size=2)


def test_no_step_has_all_refreshes() -> None:
    costs = [100, 90, 80, 10, 10, 10, 10, 5, 5, 100, 90, 80]
    phases = refresh_phases(costs, [3] * 12)
    loads = [sum(c for c, p in zip(costs, phases) if p == phase) for phase in range(3)]
    assert phases[0] == 0 and max(loads) <= 1.15 * sum(costs) / 3
    assert refresh_phases([5], [10]) == [0] and refresh_phases([1, 2], [1, 1]) == [0, 0]


def test_a_copy_keeps_the_schedule() -> None:
    """Also of matrices that were added later, whose phases would be others had they been there from the start."""
    torch.manual_seed(0)
    members = [nn.Parameter(torch.randn(4, 6)) for _ in range(5)]
    optimizer = SOAP(members[:2], lr=0.1, precondition_frequency=3)
    optimizer.add_param_group({"params": members[2:]})
    copied, twins = copy.deepcopy((optimizer, members))
    for _ in range(9):
        for parameter, twin in zip(members, twins):
            parameter.grad = torch.randn(4, 6)
            twin.grad = parameter.grad.clone()
        optimizer.step()
        copied.step()
    assert all(map(torch.equal, members, twins))


KINDS: list[tuple[Any, dict[str, Any]]] = [
    (Shampoo, {"lr": 0.02, "precondition_frequency": 2, "max_preconditioner_dim": 9, "bucket_bytes": 700}),
    (Shampoo, {"lr": torch.tensor(0.02), "betas": (0.9, 0.99), "grafting": "sgd", "split_replicas": False}),
    (SOAP, {"lr": 0.02, "precondition_frequency": 4, "bucket_bytes": 700}),
    (SOAP, {"lr": torch.tensor(0.02), "max_preconditioner_dim": 10, "split_replicas": False}),
]


def steps_equal_one_device(cases: list[Case], kind: Any, options: dict[str, Any], num_steps: int) -> None:
    own, reference = build(cases)
    optimizer, alone = kind(own, **options), kind(reference, **options)
    for step in range(num_steps):
        set_gradients(own, reference, step)
        optimizer.step()
        alone.step()
    assert_equal(optimizer, alone)


VECTORS: list[Any] = [((9,), 0), ((1,), 0), ((), None), ((4, 3, 2, 2), 1)]


def with_vectors(cases: list[Case], num_ranks: int) -> list[Case]:
    ranks = tuple(range(num_ranks))
    extra = [(ranks, shape, (Replicate() if dim is None else Shard(dim),), None) for shape, dim in VECTORS]
    return [*cases, *extra]


STEPS = 20 if NIGHTLY else 8


def on_lines(num_ranks: int) -> int:
    cases = with_vectors(LINES[num_ranks], num_ranks)
    return run_cases(
        steps_equal_one_device, [(cases, *kind, STEPS if i % 2 == 0 else 5) for i, kind in enumerate(KINDS)]
    )


def on_grids() -> int:
    return run_cases(
        steps_equal_one_device, [(GRIDS, *kind, STEPS if i % 2 == 0 else 5) for i, kind in enumerate(KINDS)]
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_has_the_bits_of_one_device(ranks: RankPools, num_ranks: int) -> None:
    assert set(ranks.run(on_lines, num_ranks, world_size=num_ranks)) == {len(KINDS)}


def test_has_the_bits_of_one_device_on_two_axes(ranks: RankPools) -> None:
    assert set(ranks.run(on_grids, world_size=4)) == {len(KINDS)}


def test_missing_gradients(ranks: RankPools) -> None:
    options = {"lr": 0.02, "weight_decay": 0.1, "precondition_frequency": 2}
    assert ranks.run(run_cases, missing_gradients, [(Shampoo, options), (SOAP, options)], world_size=4) == [2] * 4
