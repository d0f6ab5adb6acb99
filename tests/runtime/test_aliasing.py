"""Who sees whose writes, where the boundaries of modules meet in-place ops, views and shared inputs: against one device."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from tests.device import device_type
from tests.ranks import RankPools, run_cases
from tests.runtime.compare import assert_same_gradients, assert_same_step
from tests.runtime.llama import make_mesh
from tests.whole import whole
from vescale import parallelize
from vescale.comm import record_comms
from vescale.compat import local_of
from vescale.ops import LIVE_COPIES
from vescale.plans import Plan, PlanError
from vescale.runtime import ImplicitCommunicationWarning

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)


class Act(nn.Module):
    """Writes to its inputs in place, wherever they are."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            for x in (
                value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
            ):
                F.relu(x, inplace=True)
        return args[0] if args else None


class Model(nn.Module):
    def __init__(self, use: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.linear, self.act, self.use = nn.Linear(6, 6), Act(), use

    def forward(self, x: torch.Tensor) -> Any:
        return self.use(self, self.linear(x))


def before_saved(m: Any, h: Any) -> Any:
    z = h * h  # saves h
    m.act(h)
    return z


def after_saved(m: Any, h: Any) -> Any:
    m.act(h)
    return h * h + h.sin()


def returned(m: Any, h: Any) -> Any:
    return m.act(h) * 2 + h


def row_of_written(m: Any, h: Any) -> Any:
    row = h[1]
    m.act(h)
    return h * 2 + row


def written_row(m: Any, h: Any) -> Any:
    m.act(h[1:3])
    return h * 2


def kwargs(m: Any, h: Any) -> Any:
    m.act(x=h)
    return h * 2


def containers(m: Any, h: Any) -> Any:
    k = h * 2
    m.act([h, k])
    m.act({"a": k})
    return h + k


def twice(m: Any, h: Any) -> Any:
    m.act(h, h)
    return h * 2


USES = [before_saved, after_saved, returned, row_of_written, written_row, kwargs, containers, twice]


def model_and_copy(module: nn.Module, entries: dict[str, Any], mesh: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    reference = module.double()
    model = copy.deepcopy(reference)
    plan = Plan(mesh)
    for path, placement in entries.items():
        plan.shard(path, placement)
    return reference, parallelize(model, plan)


def step(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    (y * y.cos()).sum().backward()
    return whole(y.detach())


def same(use: Callable[[Any, Any], Any], entries: dict[str, Any], mesh: Any) -> None:
    """Where one device refuses what was written to since it was saved, a model may have saved a copy: with right numbers."""
    reference, model = model_and_copy(Model(use), entries, mesh)
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    refused = False
    try:
        expected = step(reference, x)
    except RuntimeError:
        refused = True
        reference.zero_grad()
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            expected = step(reference, x)
    try:
        found = step(model, x)
    except RuntimeError:
        assert refused, "one device runs"
        return
    torch.testing.assert_close(found, expected)
    assert_same_gradients(reference, model)


def all_uses() -> None:
    mesh = make_mesh(tp=2)
    arriving: list[dict[str, Any]] = [{}, {"<in>": S0}, {"linear.weight": S0, "linear.bias": S0}, {"linear.weight": S1}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImplicitCommunicationWarning)
        moves: list[dict[str, Any]] = [{}, {"act.<in>": R}, {"act.<in>": S0}, {"act.<in>": S1}]
        run_cases(same, [(use, {**a, **b}, mesh) for use in USES for a in arriving for b in moves])


def test_writes_inside_of_boundaries(ranks: RankPools) -> None:
    ranks.run(all_uses, world_size=2)


class Pass(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return x.mul_(2) if y is None else x.mul_(2) + y


class Two(nn.Module):
    def __init__(self, use: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.linear, self.a, self.b, self.use = nn.Linear(6, 6), Pass(), nn.Identity(), use

    def forward(self, x: torch.Tensor) -> Any:
        return self.use(self, self.linear(x))


def later_write(m: Any, h: Any) -> Any:
    y = m.b(h)
    h.add_(1)
    return y * 2


def later_write_behind(m: Any, h: Any) -> Any:
    y = m.b(h)
    y.add_(1)
    return h * 2


def freed(m: Any, h: Any) -> Any:
    m.b(h).add_(1)
    gc.collect()
    return h * 2


def write_to_a_row(m: Any, h: Any) -> Any:
    y = m.b(h)
    y[1].mul_(2)
    return h.t() * 2


def row_of_old(m: Any, h: Any) -> Any:
    row = h[1]
    y = m.b(h)
    y.zero_()
    return row * 2


def second_copy(m: Any, h: Any) -> Any:
    y = m.b(h)
    m.a(h.detach())
    return y + 1


def read_by_another(m: Any, h: Any) -> Any:
    m.b(h).fill_(2)
    return m.a(h)


def stale_reads_are_refused(mesh: Any) -> None:
    arriving: list[dict[str, Any]] = [{}, {"<in>": S1}]
    for entries in arriving:
        for use in (later_write, later_write_behind, freed, write_to_a_row, row_of_old, second_copy, read_by_another):
            _, model = model_and_copy(Two(use), {"b.<in>": S0, "a.<in:x>": S0, **entries}, mesh)
            for grad in (True, False):
                with torch.set_grad_enabled(grad), pytest.raises(PlanError, match=r"before or after b\.<in>.*written"):
                    model(torch.ones(4, 6, dtype=torch.float64))
        for use in (before_read, written_inside, overwritten):
            _, model = model_and_copy(Two(use), {"b.<in>": S0, "a.<in:x>": S0, **entries}, mesh)
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    model(torch.ones(4, 6, dtype=torch.float64))


def before_read(m: Any, h: Any) -> Any:
    h.mul_(2)
    y = m.b(h)
    z = y + h
    assert z.shape == h.shape
    y.add_(1)
    assert h.shape == (4, 6) and h.size(0) == 4
    return y * z


def written_inside(m: Any, h: Any) -> Any:
    y = m.a(h)
    return y + h


def overwritten(m: Any, h: Any) -> Any:
    y = m.b(h)
    del y
    h = h * 3
    h.add_(1)
    return m.b(h) + h


def plain_inputs_get_what_is_written(mesh: Any) -> None:
    """Behind an entry inside of the model: nobody would see that the caller's plain tensor has old values."""

    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(x).add_(1) * 2

    _, model = model_and_copy(Behind(), {"<in>": S0, "b.<in>": R}, mesh)
    with torch.no_grad(), pytest.raises(PlanError, match=r"before or after (b\.)?<in>.*written"):
        model(torch.ones(4, 6, dtype=torch.float64))


def moved_and_refused() -> None:
    """What a boundary that moves data cannot follow raises, on every rank, and names the entry."""
    mesh = make_mesh(tp=2)

    def a_view_of_it(m: Any, h: Any) -> Any:
        return m.a(h, h[:2].sum(0))

    stale_reads_are_refused(mesh)
    plain_inputs_get_what_is_written(mesh)
    reference, model = model_and_copy(Two(a_view_of_it), {"a.<in:x>": S0}, mesh)
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(whole(model(x).detach()), reference(x).detach())
    _, model = model_and_copy(Two(lambda m, h: m.a(h, h)), {"a.<in:x>": S0, "a.<in:y>": S1}, mesh)
    with pytest.raises(PlanError, match=r"[Oo]n one device"):
        model(x)


def test_what_cannot_be_followed_is_refused(ranks: RankPools) -> None:
    ranks.run(moved_and_refused, world_size=2)


def in_a_fake_world() -> None:
    """The first of two ranks: what raises does so before anything would be received."""
    saved_operands_are_followed()
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
        stale_reads_are_refused(mesh)
        plain_inputs_get_what_is_written(mesh)
        copies_are_gathered_when_they_are_read(mesh)
    torch.distributed.destroy_process_group()


def copies_are_gathered_when_they_are_read(mesh: Any) -> None:
    """Not because they exist: memory is freed at different times on different ranks."""
    gathers: list[int] = []

    def use(m: Any, h: Any) -> Any:
        with record_comms() as ledger, torch.no_grad():
            row = h[1]
            gathers.append(len(ledger.records))
            h.mul_(2)
            h.add_(1)
            gathers.append(len(ledger.records))
            assert row.sin() is not None
            gathers.append(len(ledger.records))
            assert row.cos() is not None
            gathers.append(len(ledger.records))
        return h, row

    _, model = model_and_copy(Two(use), {"<in>": S0}, mesh)
    model(torch.ones(4, 6, dtype=torch.float64))
    assert gathers == [1, 1, 2, 2], gathers

    def handed_out(m: Any, h: Any) -> Any:
        saved = F.batch_norm(h, None, None, training=True)
        with record_comms() as ledger, torch.no_grad():
            assert not isinstance(h, DTensor) or h.to_local() is not None
            row = h[1]
            h.mul_(2)  # also counts in what batch norm has saved, but is no plain op
            assert row.sin() is not None and row.cos() is not None
            gathers.append(len(ledger.records))
        return h, row, saved

    _, model = model_and_copy(Two(handed_out), {"<in>": S0}, mesh)
    model(torch.ones(4, 6, dtype=torch.float64))
    assert gathers[4:] == [2], gathers

    def written(m: Any, h: Any) -> Any:
        with torch.no_grad():
            row = h[1]
            local = row.to_local() if isinstance(row, DTensor) else row
            local.zero_()
        return h * 2

    _, model = model_and_copy(Two(written), {"<in>": S0}, mesh)
    with pytest.raises(RuntimeError, match=r"to_local\(\) of it was written to"):
        model(torch.ones(4, 6, dtype=torch.float64))


class Ending(nn.Module):
    """Its last saved tensor is inside of a module that has written to what its caller has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(6, 6), Wave()

    def inside(self, x: torch.Tensor) -> Any:
        x = x.clone()
        return self.linear(x), self.act(x)

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inside, x, use_reentrant=False)


class Wave(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(3).sin()


def ending_early() -> None:
    """PyTorch does not see such writes under checkpoints: the gradient is of the written values, and has to be here, too."""
    reference, model = model_and_copy(Ending(), {"act.<in>": S0}, make_mesh(tp=2))
    for each in (reference, model):
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6).requires_grad_()
        sum((y * y.sin()).sum() for y in each(x)).backward()
    assert_same_gradients(reference, model)


def test_recomputations_that_end_early(ranks: RankPools) -> None:
    ranks.run(ending_early, world_size=2)


@pytest.mark.parametrize("without", ["VESCALE_DISPATCH=stock", "VESCALE_NO_NATIVE=1"])
def test_old_values_are_found_without_helpers(without: str) -> None:
    """Python follows writes where C++ does not."""
    name, _, value = without.partition("=")
    code = "from tests.runtime.test_aliasing import in_a_fake_world; in_a_fake_world()"
    environment = {**os.environ, name: value, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]


SAVED: dict[str, Callable[[Any], Any]] = {
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None] * 2, x[:, None]),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "rms norm": lambda x: F.rms_norm(x, (6,)),
}


class Save(nn.Module):
    def __init__(self, op: str, of_result: bool) -> None:
        super().__init__()
        self.op, self.of_result = op, of_result

    def forward(self, x: torch.Tensor) -> Any:
        h = x * 1
        y = SAVED[self.op](h)
        with torch.no_grad():
            (y if self.of_result else h)[:, 0].mul_(2)
        return y


def saved_operands_are_followed() -> None:
    """Where writes to DTensors do not count in the versions of local tensors by themselves, which plain ops have saved."""
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    for op, of_result in [*((op, False) for op in SAVED), ("attention", True)]:
        model: Any = Save(op, of_result)
        parallelize(model, Plan(mesh).shard("<in>", S2 if op == "rms norm" else S0))
        for each in (Save(op, of_result), model):
            y = each(torch.randn(4, 4, 6, dtype=torch.float64, requires_grad=True))
            try:
                y.sum().backward()
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)
            else:
                raise AssertionError(f"{op}: a gradient with what was written later")
    del y
    gc.collect()
    assert not LIVE_COPIES
    torch.distributed.destroy_process_group()


def identity() -> None:
    """Where nothing moves, both sides are one tensor, or views with one memory, version and base."""
    mesh = make_mesh(tp=2)
    seen: list[Any] = []

    def use(m: Any, h: Any) -> Any:
        y = m.b(h)
        assert local_of(y) is local_of(h)
        version = h._version
        y.mul_(1)
        assert h._version == y._version == version + 1
        seen.append(y)
        return h

    _, model = model_and_copy(Two(use), {"b.<in>": R}, mesh)
    model(torch.randn(4, 6, dtype=torch.float64))
    with torch.no_grad():
        _, model = model_and_copy(Two(lambda m, h: seen.append(m.b(h) is h) or h), {"b.<in>": R}, mesh)
        model(torch.randn(4, 6, dtype=torch.float64))
    assert seen[-1] is True


def test_nothing_moves(ranks: RankPools) -> None:
    ranks.run(identity, world_size=2)


def shared_conversions() -> None:
    """Modules that get one tensor, with writes to it in between, also by way of its local tensor."""
    mesh = make_mesh(tp=2)

    class Shared(nn.Module):
        def __init__(self, write: Callable[[Any], Any]) -> None:
            super().__init__()
            self.q, self.k, self.write = nn.Linear(6, 6), nn.Linear(6, 6), write

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1
            first = self.q(x)
            with torch.no_grad():
                self.write(x)
            return first + self.k(x)

    writes: list[Callable[[Any], Any]] = [
        lambda x: (x.to_local() if isinstance(x, DTensor) else x).mul_(2),
        lambda x: (x.to_local() if isinstance(x, DTensor) else x)[:1].view(-1).mul_(0),
        lambda x: x.detach().mul_(2),
        lambda x: x.mul_(2),
    ]
    for write in writes:
        reference, model = model_and_copy(Shared(write), {"<in>": R, "q.<in>": S1, "k.<in>": S1}, mesh)
        for grad in (False, True):
            x = torch.arange(24.0, dtype=torch.float64).view(4, 6)
            with torch.set_grad_enabled(grad), contextlib.suppress(RuntimeError):
                found = model(x)
                torch.testing.assert_close(whole(found.detach()), reference(x).detach())


def test_modules_that_share_a_conversion(ranks: RankPools) -> None:
    ranks.run(shared_conversions, world_size=2)


def failing() -> None:
    """A module that has written to a moved input, and fails: the caller's tensor has old values, and may not be read."""
    mesh = make_mesh(tp=2)

    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            raise ZeroDivisionError

    def use(m: Any, h: Any) -> Any:
        with contextlib.suppress(ZeroDivisionError):
            m.act(h)
        return h * 2

    built = Model(use)
    built.act = Failing()  # type: ignore[assignment]
    _, model = model_and_copy(built, {"act.<in>": S0}, mesh)
    with pytest.raises(PlanError, match=r"act\.<in>"):
        model(torch.randn(4, 6, dtype=torch.float64))


def test_a_module_that_fails(ranks: RankPools) -> None:
    ranks.run(failing, world_size=2)


def regions() -> None:
    mesh = make_mesh(tp=2)
    for inputs in (R, S0):
        torch.manual_seed(0)
        reference = Model(after_saved).double()
        model = copy.deepcopy(reference)
        parallelize(model, Plan(mesh).local("act", inputs=inputs, outputs=inputs))
        x = torch.randn(4, 6, dtype=torch.float64)
        for each in (reference, model):
            each(x).sum().backward()
        torch.testing.assert_close(whole(model(x).detach()), reference(x).detach())
        assert_same_gradients(reference, model)


def test_writes_in_local_regions(ranks: RankPools) -> None:
    ranks.run(regions, world_size=2)


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[Any], Any]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> None:
        self.draw(x)


DRAWS: list[Callable[[Any], Any]] = [
    lambda x: x.log_normal_(),
    lambda x: x.bernoulli_(torch.full((4, 6), 0.5, dtype=torch.float64)),
    lambda x: x[1:3].normal_(),
    lambda x: nn.init.trunc_normal_(x),
    lambda x: nn.init.trunc_normal_(x[1:3]),
    lambda x: nn.init.orthogonal_(x[:3]),
    lambda x: F.rrelu(x, training=True, inplace=True),
    lambda x: F.rrelu(x, training=False, inplace=True),
    lambda x: F.dropout(x, 0.5, inplace=True),
]


def drawn_at(number: int, entries: dict[str, Any], mesh: Any) -> None:
    built = Model(lambda m, h: (m.act(h), h)[1])
    built.act = Drawing(DRAWS[number])  # type: ignore[assignment]
    reference, model = model_and_copy(built, entries, mesh)
    found = []
    for each in (reference, model):
        torch.manual_seed(7)
        with torch.no_grad():
            found.append(whole(each(torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6))))
    torch.testing.assert_close(found[1], found[0])


def draws() -> None:
    mesh = make_mesh(tp=2)
    moves: list[dict[str, Any]] = [{"act.<in>": S0}, {"<in>": S0, "act.<in>": S1}, {"<in>": S0, "act.<in>": R}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImplicitCommunicationWarning)
        run_cases(drawn_at, [(number, move, mesh) for number in range(len(DRAWS)) for move in moves])


def test_draws_inside_of_boundaries(ranks: RankPools) -> None:
    """Not only C++ counts writes: random ops that run in Python do."""
    ranks.run(draws, world_size=2)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = Pass()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.act(x)
        return x


def history() -> None:
    """Seed 6873: a view that a boundary passes on, and another one writes back to, knows of later writes to its base."""

    def use(m: Any, h: Any) -> Any:
        y = m.act(h)
        h.tanh_()
        return y

    mesh = make_mesh(tp=2)
    for arriving, moved in ((S0, R), (S0, S1), (R, S0)):
        built = Model(use)
        built.act = Outer()  # type: ignore[assignment]
        entries = {"<in>": arriving, "act.<in>": arriving, "act.act.<in>": moved}
        reference, model = model_and_copy(built, entries, mesh)
        for each in (reference, model):
            x = torch.linspace(-1, 2, 24, dtype=torch.float64).view(4, 6)
            each(x).square().sum().backward()
        assert_same_gradients(reference, model)


def test_a_view_that_is_written_back_to(ranks: RankPools) -> None:
    ranks.run(history, world_size=2)


class Half(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.split(3, dim=1)[1]


def read_only_views() -> None:
    """PyTorch does not let a program write to an output of split; an entry that moves it makes a tensor of its own."""
    mesh = make_mesh(tp=2)

    def use(m: Any, h: Any) -> Any:
        y = m.act(h)
        y.add_(y)
        return y * 2

    for moved in (R, S0, S1):
        built = Model(use)
        built.act = Half()  # type: ignore[assignment]
        reference, model = model_and_copy(built, {"<in>": S0, "act.<out>": moved}, mesh)
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
        for each in (reference, model) if moved == S0 else (reference,):
            with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
                each(x)
        if moved != S0:
            reference.act.register_forward_hook(lambda module, args, output: output.clone())
            assert_same_step(reference, model, x)


def returned_views() -> None:
    """One device returns a view that autograd refuses to use, and raises when it is used. So does a model on a mesh."""

    def use(m: Any, h: Any) -> Any:
        y = h.split(3, dim=1)[1]
        with torch.no_grad():
            y.mul_(2)
        return y

    mesh = make_mesh(tp=2)
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    for checks in ("off", "steps", ""):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VESCALE_CHECK", checks)
            both = model_and_copy(Model(use), {"<in>": S0}, mesh)
        expected, found = (each(x) for each in both)
        torch.testing.assert_close(whole(found.detach()), expected.detach())
        for y in (expected, found):
            with pytest.raises(RuntimeError, match="is a view and its base"):
                y.sum()


def test_views_that_may_not_be_written_to(ranks: RankPools) -> None:
    ranks.run(read_only_views, world_size=2)
    ranks.run(returned_views, world_size=2)


class Scale(nn.Module):
    """Writes to its first input, and tells which flags it has got."""

    def forward(self, x: torch.Tensor, factor: float, flag: str | None = None) -> tuple[torch.Tensor, Any]:
        x.mul_(factor)
        return x + 1, flag


def given() -> None:
    """Plain inputs: a rank's own part sees the module's writes, the whole tensor too; other values pass as they are."""
    mesh = make_mesh(tp=2)
    whole_input = torch.arange(24.0).view(4, 6)
    part = whole_input.chunk(2)[mesh.get_local_rank()]
    for local in (False, True):
        plan = Plan(mesh).shard("<in>", S0)
        model = parallelize(Scale(), plan.local_inputs() if local else plan)
        x = (part if local else whole_input).clone()
        found, flag = model(x, 2.0, flag="as it is")
        assert flag == "as it is"
        torch.testing.assert_close(x, (part if local else whole_input) * 2)
        torch.testing.assert_close(whole(found), whole_input * 2 + 1)
    model = parallelize(Scale(), Plan(mesh).shard("<in:x>", Shard(2)))
    with pytest.raises(PlanError, match=r"<in:x> has shape \(4, 6\), but the plan shards its dim 2"):
        model(whole_input.clone(), 2.0)


def test_plain_inputs(ranks: RankPools) -> None:
    ranks.run(given, world_size=2)
