"""Ranks that run different modules: one error on every rank that names them, before an optimizer's step, or a wrong use."""

from __future__ import annotations

import copy
import gc
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import vescale
from tests.device import device_type
from tests.fsdp.compare import gradients_of
from tests.ranks import RankPools
from tests.runtime.zero import sharded_at_rest
from vescale import Plan, parallelize
from vescale.checks import StepMismatchError
from vescale.comm import look_while_waiting, record_comms
from vescale.comm._long_waits import look
from vescale.errors import OrderMismatchError
from vescale.fsdp import MixedPrecisionPolicy, fully_shard, share_comm_ctx
from vescale.gradients import OrderedUnit
from vescale.gradients import _collective_order as replica_errors
from vescale.plans import PlanMismatchError

pytestmark = pytest.mark.waits

EQUAL, DIFFERENT = (8, 8, 8), (8, 12, 20)


class Mixture(nn.Module):
    """Experts of which the caller chooses some, one after the other."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, n), nn.Linear(n, 4)) for n in widths)

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        x = self.first(x)
        for number in chosen:
            if number < 0:
                raise ZeroDivisionError("a rank fails")
            x = x + self.experts[number](x)
        return x.square().mean()


def made(widths: tuple[int, ...], replicas: int = 1, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Mixture(widths)
    one = copy.deepcopy(model)
    shape = (dist.get_world_size(),) if replicas == 1 else (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for expert in model.experts:
        fully_shard(expert, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options), one


def raises_alike(run: Callable[[], Any], *texts: str, error: type[RuntimeError] = OrderMismatchError) -> None:
    """On every rank, with one text (of each shard group, where one finds it) that has the given parts."""
    found: list[str | None] = [None] * dist.get_world_size()
    with pytest.raises(error) as caught:
        run()
    dist.all_gather_object(found, str(caught.value))
    own = str(found[dist.get_rank()])
    # Ranks that have waited for long, as on a busy machine, find it before they compare what they have run.
    told = re.sub(r"(ranks? [\d, ]+) in a gather of (\S+) \(\d+ bytes\)", r"\2 on \1", own)
    assert all(text in told for text in texts), own
    assert found.count(own) in (len(found), 2), found


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPools]:
    """Of this file alone: where a rank raises what its replicas have found, the others of its shard group may raise it at
    another place, so that their collectives no longer pair. Programs end then; cases go on."""
    pools = RankPools()
    yield pools
    pools.close()


X = torch.linspace(-1, 1, 12).view(3, 4)


def trains(model: nn.Module, one: nn.Module, chosen: tuple[int, ...]) -> None:
    """A step with the same modules on every rank is right, also after an error."""
    model.zero_grad()
    one.zero_grad()
    loss = model(X, chosen)
    assert torch.equal(loss, one(X, chosen))
    loss.backward()
    one(X, chosen).backward()
    for name, gradient in gradients_of(model).items():
        expected = one.get_parameter(name).grad
        assert (gradient is None) == (expected is None), name
        assert expected is None or torch.allclose(gradient, expected, rtol=1e-5, atol=1e-7), name


def training(widths: tuple[int, ...], replicas: int, warm: bool) -> None:
    rank = dist.get_rank()
    model, one = made(widths, replicas)
    if warm:
        for chosen in ((0,), (0, 2), (0,)):
            trains(model, one, chosen)
    model.zero_grad()
    chosen = (0,) if rank % 2 == 0 else (1,)
    if warm and widths == EQUAL:  # nobody waits for what is compared: it is told at the end of the next step
        model(X, chosen).backward()
        model.zero_grad()
        chosen = (0,)
    raises_alike(lambda: model(X, chosen).backward(), "experts.0 on rank", "experts.1 on rank", "gather")
    assert all(parameter.grad is None for parameter in model.parameters())
    trains(model, one, (1, 2))


@pytest.mark.parametrize("warm", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("widths", [EQUAL, DIFFERENT], ids=["equal", "different"])
def test_training(ranks: RankPools, widths: tuple[int, ...], replicas: int, warm: bool) -> None:
    ranks.run(training, widths, replicas, warm, world_size=2 * replicas)


def replicas_differ() -> None:
    """Each shard group agrees, and their sums over the replicas do not match. Forwards without gradients may differ."""
    model, one = made(EQUAL, 2)
    replica = dist.get_rank() // 2
    with torch.no_grad():
        for _ in range(replica + 1):
            assert torch.equal(model(X, (replica,)), one(X, (replica,)))
    trains(model, one, (0,))
    raises_alike(lambda: model(X, (replica,)).backward(), "experts.0 on ranks [0, 1]", "experts.1 on ranks [2, 3]")
    trains(model, one, (1,))


def test_replicas_that_differ(ranks: RankPools) -> None:
    ranks.run(replicas_differ, world_size=4)


def one_shard_group() -> None:
    """The first one finds by itself that its ranks have gathered different units. The other one waits in a backward."""
    rank = dist.get_rank()
    model, one = made(EQUAL, 2)

    def evaluates_and_trains(chosen: int) -> None:
        with torch.no_grad():
            model(X, (chosen,))
        model(X, (0,)).backward()

    trains(model, one, (0,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_errors, "end_soon", lambda error: None)
        if rank < 2:  # goes on in time
            with torch.no_grad(), pytest.raises(OrderMismatchError):
                model(X, (rank,))
        trains(model, one, (0,))
        patch.setattr(replica_errors, "_SECONDS_TO_GO_ON", 0.0)
        raises_alike(
            lambda: evaluates_and_trains(rank % 2 if rank < 2 else 0), "experts.0 on rank 0", "experts.1 on rank 1"
        )
        if rank < 2:
            with pytest.raises(OrderMismatchError, match=r"experts\.0 on rank 0"):
                evaluates_and_trains(0)
        look(None, "a collective of another model")  # does not raise the same error again


def test_replicas_of_a_shard_group_raise_what_it_raises(ranks: RankPools) -> None:
    """They waited for it until their timeout, or told of a process that has ended."""
    ranks.run(one_shard_group, world_size=4)


class Raises:
    """When a rank that waits for the gather of a model looks."""

    looks_last = False

    def __init__(self, model: Any) -> None:
        (self.bucket,) = model._state.groups[0].buckets

    def look(self, awaited: Sequence[int] | None, what: str, in_vain: bool = False) -> None:
        self.gathered = self.bucket.gathering.whole.local.untyped_storage()
        raise OrderMismatchError("ranks of a replica have raised")


def abandoned_gather() -> None:
    """Rank 0 raises what others have found while it waits for rank 1, which comes late, so that the gather arrives."""
    model, one = made(EQUAL)
    trains(model, one, (0,))
    rank, looks = dist.get_rank(), Raises(model)
    if rank == 0:
        look_while_waiting(looks)
        with pytest.raises(OrderMismatchError, match="have raised"):
            model(X, (-1,))
        assert looks.gathered.nbytes(), "gloo is about to write there"
    else:
        with pytest.MonkeyPatch.context() as patch:
            begins = OrderedUnit.begins_gather
            patch.setattr(OrderedUnit, "begins_gather", lambda *args: (time.sleep(2.5), begins(*args)))
            with pytest.raises(ZeroDivisionError):
                model(X, (-1,))
    del looks
    gc.collect()
    trains(model, one, (0,))


def test_a_gather_that_is_abandoned_keeps_its_memory(ranks: RankPools) -> None:
    """The process was killed by a write to memory that was freed."""
    ranks.run(abandoned_gather, world_size=2)


def other_ways(kind: str) -> None:
    rank = dist.get_rank()
    own = (0,) if rank == 0 else (1,)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, one = made(EQUAL, **({"mp_policy": policy} if kind == "mixed precision" else {}))
    names = ("experts.0 on rank 0", "experts.1 on rank 1")
    if kind == "evaluation":
        with torch.no_grad():
            assert torch.equal(model(X, (1,)), one(X, (1,)))
            raises_alike(lambda: model(X, own), *names)
            assert torch.equal(model(X, (2,)), one(X, (2,)))
    elif kind == "accumulation":
        model.set_requires_gradient_sync(False)
        raises_alike(lambda: model(X, own).backward(), *names)
        model(X, (2,)).backward()
        model.set_requires_gradient_sync(True)
        raises_alike(lambda: model(X, own).backward(), *names)
    elif kind == "two forwards":
        raises_alike(lambda: (model(X, own) + model(X, (1 - rank,))).backward(), *names)
        trains(model, one, (2, 1))
        raises_alike(lambda: (model(X, (0, 1) if rank else (1, 0))).backward())
    elif kind == "one module more":
        raises_alike(lambda: model(X, (0, 1, 2) if rank else (0, 2, 1)).backward(), "experts.1 on rank 1")
    elif kind == "mixed precision":
        raises_alike(lambda: model(X, own).backward(), *names)
    elif kind == "a rank fails":
        trains(model, one, (0, 1))
        if rank == 1:
            with pytest.raises(ZeroDivisionError):
                model(X, (-1,))
        raises_alike(lambda: model(X, (0, 1)).backward(), "experts.0 on rank 0", "the root on rank 1")
    if kind not in ("mixed precision",):
        trains(model, one, (1, 0))


WAYS = ["evaluation", "accumulation", "two forwards", "one module more", "mixed precision", "a rank fails"]


@pytest.mark.parametrize("kind", WAYS)
def test_other_ways(ranks: RankPools, kind: str) -> None:
    ranks.run(other_ways, kind, world_size=2)


def of_a_plan(widths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Mixture(widths).double()
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    parallelize(model, sharded_at_rest(Plan(mesh)))
    x = X.double()
    for chosen in ((0,), (0, 1)):
        model(x, chosen).backward()
        model.zero_grad()
    own = (0,) if dist.get_rank() == 0 else (1,)
    with vescale.no_sync(model):
        model(x, (0,)).backward()
    with vescale.unchecked():  # that the ranks' arguments differ would be found first
        raises_alike(lambda: model(x, own).backward(), "experts.0 on rank 0", "experts.1 on rank 1")


@pytest.mark.parametrize("widths", [EQUAL, DIFFERENT], ids=["equal", "different"])
def test_units_of_a_plan(ranks: RankPools, widths: tuple[int, ...]) -> None:
    ranks.run(of_a_plan, widths, world_size=2)


def roots(
    widths: tuple[int, ...], shared: bool = False, equal_meshes: bool = False
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Modules that are given to ``fully_shard`` by themselves, and whole ones; ``shared``: streams and memory in flight;
    ``equal_meshes``: each is on a mesh of its own."""
    torch.manual_seed(0)
    alone = [nn.Sequential(nn.Linear(4, n), nn.Linear(n, 4)) for n in widths]
    whole = copy.deepcopy(alone)
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
    for module in alone:
        if equal_meshes:
            mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(module, mesh=mesh)
    if shared:
        share_comm_ctx(alone)  # type: ignore[arg-type]
    return alone, whole


def through(modules: list[nn.Module], order: tuple[int, ...]) -> torch.Tensor:
    x = X
    for number in order:
        x = modules[number](x)
    return x.square().mean()


def by_themselves(widths: tuple[int, ...], check: str, shared: bool) -> None:
    """Roots in another order: nothing above them knows all, and gathers tell."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VESCALE_CHECK", check)
        alone, whole = roots(widths, shared)
        names = ("of Sequential (number ", "on rank 0", "on rank 1")

        def equal(order: tuple[int, ...]) -> None:
            for module in (*alone, *whole):
                module.zero_grad()
            loss, expected = through(alone, order), through(whole, order)
            loss.backward()
            expected.backward()
            assert torch.equal(loss, expected)
            for own, reference in zip(alone, whole):
                for name, gradient in gradients_of(own).items():
                    one = reference.get_parameter(name).grad
                    assert (gradient is None) == (one is None), name
                    assert one is None or torch.allclose(gradient, one, rtol=1e-5, atol=1e-7), name

        for order in ((0, 1), (0, 1), (1,), (0,), (0, 1)):
            equal(order)
        raises_alike(lambda: through(alone, (0, 1) if rank == 0 else (1, 0)).backward(), *names)
        equal((0, 1))
        equal((1, 0))
        with torch.no_grad():  # evaluations
            for order in ((1,), (0, 1), (0,)):
                assert torch.equal(through(alone, order), through(whole, order))
            raises_alike(lambda: through(alone, (rank,)), *names)
        equal((0, 1))


@pytest.mark.parametrize("check", ["off", ""])
@pytest.mark.parametrize("widths", [(8, 8), (8, 12)], ids=["equal", "different"])
def test_modules_by_themselves(ranks: RankPools, widths: tuple[int, ...], check: str) -> None:
    ranks.run(by_themselves, widths, check, False, world_size=2)


def test_modules_that_share_streams(ranks: RankPools) -> None:
    ranks.run(by_themselves, (8, 8), "off", True, world_size=2)


def on_equal_meshes() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VESCALE_CHECK", "off")
        alone, _ = roots((8, 12), equal_meshes=True)
        for order in ((0, 1), (0, 1), (1,), (0,), (0, 1)):
            through(alone, order).backward()
        order = (0, 1) if dist.get_rank() % 2 == 0 else (1, 0)
        raises_alike(lambda: through(alone, order).backward(), "of Sequential (number ", "on rank")
        through(alone, (1, 0)).backward()


def test_modules_on_equal_meshes(ranks: RankPools) -> None:
    """Their buffers communicate in one group, so that their order is one."""
    ranks.run(on_equal_meshes, world_size=4)


def first_forwards() -> None:
    alone, _ = roots((8, 8))
    raises_alike(lambda: alone[dist.get_rank()](X), "calls of fully_shard", error=PlanMismatchError)


def test_first_forwards_of_different_roots(ranks: RankPools) -> None:
    ranks.run(first_forwards, world_size=2)


def two_reductions(widths: tuple[int, ...], shared: bool = False) -> None:
    """All modules have been gathered by all ranks, and stay: gradients of another root are reduced on each rank."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VESCALE_CHECK", "off")
        alone, _ = roots(widths, shared)
        for _ in range(2):
            losses = [module(X).square().mean() for module in alone]
            (losses[0] + losses[1]).backward()
        for module in alone:
            module.zero_grad()
        losses = [module(X).square().mean() for module in alone]
        raises_alike(losses[rank].backward, "Sequential (root ", "on rank 0", "on rank 1")
        assert all(parameter.grad is None for parameter in alone[rank].parameters())
        for module in alone:
            module.reset_iter_state()  # type: ignore[operator]
        (alone[0](X).square().mean() + alone[1](X).square().mean()).backward()
        assert all(parameter.grad is not None for module in alone for parameter in module.parameters())


@pytest.mark.parametrize("widths", [(8, 8), (8, 12)], ids=["equal", "different"])
def test_reductions_of_different_roots(ranks: RankPools, widths: tuple[int, ...]) -> None:
    ranks.run(two_reductions, widths, world_size=2)


def test_reductions_of_roots_that_share_streams(ranks: RankPools) -> None:
    """One order for all of them did not tell them apart: sums of different sizes met, which ends the process."""
    ranks.run(two_reductions, (8, 12), True, world_size=2)


def zeroed_after_an_exception() -> None:
    alone, whole = roots((8,))
    for module in (*alone, *whole):
        through([module], (0,)).backward()
    handle = alone[0][0].register_full_backward_pre_hook(_fail)  # type: ignore[index]
    with pytest.raises(ZeroDivisionError):
        through(alone, (0,)).backward()
    handle.remove()
    for module in (*alone, *whole):
        module.zero_grad()
        through([module], (0,)).backward()
    for name, gradient in gradients_of(alone[0]).items():
        assert torch.allclose(gradient, whole[0].get_parameter(name).grad, rtol=1e-5, atol=1e-7), name


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def test_zero_grad_after_an_exception_in_backward(ranks: RankPools) -> None:
    """The module still had its gathered parameters, and the gradients of its shards stayed: the next step added to them."""
    ranks.run(zeroed_after_an_exception, world_size=2)


def models_of_plans(check: str, units: bool) -> None:
    """Two models of one class, of equal sizes, in another order on each rank."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VESCALE_CHECK", check)
        plan = Plan(init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",)))
        plan.shard("<in:x>", Shard(0), mesh="dp")
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(parallelize(Mixture((8,)).double(), sharded_at_rest(plan) if units else plan))
        x = torch.randn(4, 4, dtype=torch.float64)

        def step(order: tuple[int, ...]) -> None:
            for number in order:
                models[number](x, (0,)).backward()

        for _ in range(3):
            step((0, 1))
        error: type[RuntimeError] = OrderMismatchError if check else StepMismatchError
        name = "first." if check and not units else "Mixture"
        raises_alike(lambda: step((0, 1) if rank == 0 else (1, 0)), name, error=error)


@pytest.mark.parametrize("units", [True, False], ids=["units", "buckets"])
@pytest.mark.parametrize("check", ["off", ""])
def test_models_of_plans(ranks: RankPools, check: str, units: bool) -> None:
    ranks.run(models_of_plans, check, units, world_size=2)


def communicated() -> None:
    model, _ = made(DIFFERENT)
    found = []
    for _ in range(3):
        with record_comms() as ledger:
            model(X, (0, 1, 2)).backward()
        found.append([record.op for record in ledger.records])
    assert found[0] == found[1] == found[2], found
    assert sorted(found[1]) == ["all_gather_v"] * 7 + ["all_reduce"] + ["reduce_scatter_v"] * 4
    with torch.no_grad(), record_comms() as ledger:
        model(X, (0, 1, 2))
    assert [record.op for record in ledger.records][-1] == "all_reduce"
    assert ledger.records[-1].bytes <= 32


def test_nothing_more_is_communicated(ranks: RankPools) -> None:
    ranks.run(communicated, world_size=2)
