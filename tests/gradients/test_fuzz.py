"""Random meshes, gradients, steps and users against one device that adds up what every rank contributed."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.examples import NIGHTLY
from tests.gradients.test_destinations import Loss
from tests.placements.on_ranks import row_major_mesh
from tests.ranks import RankPools, run_cases
from tests.simulate import simulate
from tests.whole import whole
from vescale import GradientReducer
from vescale.placements import RaggedShard, from_local, local_region, normalize_placements

R, S, P = Replicate, Shard, Partial
_DTYPES = [torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.complex128]
_COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


@dataclass
class Case:
    """One parameter, and what one device knows of its gradient.

    ``own``, ``came``: None for a plain tensor. ``pending``: by rank, what has not been reduced; ``complete``: what has.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    own: tuple[Any, ...] | None
    came: tuple[Any, ...] | None
    parameter: nn.Parameter
    pending: dict[int, torch.Tensor] = field(default_factory=dict)
    complete: torch.Tensor | None = None
    is_known: bool = False


class World:
    """A mesh, parameters on it, and the same on one device."""

    def __init__(self, sizes: tuple[int, ...], seed: int) -> None:
        self.random = random.Random(seed)
        self.mesh = row_major_mesh(sizes)
        self.sizes = sizes
        self.coordinates = list(itertools.product(*map(range, sizes)))  # by rank
        self.op = self.random.choice([None, "sum", "avg"])
        self.cases = [self._case(plain=True)] + [self._case(plain=False) for _ in range(self.random.randint(1, 7))]
        self.module = nn.Module()
        for index, case in enumerate(self.cases):
            self.module.register_parameter(f"p{index}", case.parameter)
        bucket_bytes = self.random.choice([1, 64, 300, 2**20, [40, 200], "auto"])
        wide = self.random.choice([None, None, torch.float64]) if self._is_real() else None
        self.reducer = GradientReducer(self.module, self.mesh, op=self.op, bucket_bytes=bucket_bytes, reduce_dtype=wide)

    def _is_real(self) -> bool:
        return not any(case.dtype.is_complex for case in self.cases)

    def _case(self, plain: bool) -> Case:
        choose, ndim = self.random.choice, len(self.sizes)
        shape = tuple(self.random.randint(1, 6) for _ in range(self.random.randint(0, 3)))
        dtype = torch.float64 if plain else choose(_DTYPES)
        if plain or self.random.random() < 0.2:
            return Case(shape, dtype, None, None, nn.Parameter(torch.zeros(shape, dtype=dtype)))
        cuts = [R(), *(S(dim) for dim in range(len(shape)))]
        own = [choose([*cuts, R()]) for _ in range(ndim)]
        if shape and self.random.random() < 0.25:
            own = [R() for _ in range(ndim)]
            own[self.random.randrange(ndim)] = RaggedShard()
        sums = (
            [P("sum"), P("avg")] if dtype.is_complex or self.random.random() < 0.8 else [choose([P("max"), P("min")])]
        )
        came = []
        for placement in own:
            if isinstance(placement, Shard) and self.random.random() < 0.6:
                came.append(placement)
            else:
                came.append(choose([R(), *sums, *sums]))
        placed = normalize_placements(own, shape, self.mesh)
        zeros = from_local(torch.zeros(shape, dtype=dtype), self.mesh, [R()] * ndim)
        parameter = nn.Parameter(zeros.redistribute(placements=list(placed)))
        return Case(shape, dtype, tuple(placed), tuple(came), parameter)

    # Contributions

    def local_gradients(self, index: int, step: int, sync: bool) -> dict[int, torch.Tensor]:
        """By rank, for ranks that use the parameter: small integers, so that sums are exact."""
        case = self.cases[index]
        if not sync and any(p.is_partial("max") or p.is_partial("min") for p in case.came or ()):
            return {}  # DTensor reduces them, before autograd adds others
        chance = random.Random(f"{index} {step} {self.sizes}").choice([1.0, 1.0, 0.6, 0.0])
        if chance == 0.6 and case.came is not None and not case.is_known:
            chance = 1.0  # a DTensor that is new is used by all ranks
        found = {}
        for rank, coordinate in enumerate(self.coordinates):
            came = case.came if case.came is not None else (P("sum"),) * len(self.sizes)
            key = tuple(c if not p.is_replicate() else 0 for c, p in zip(coordinate, came))
            # Ranks along axes that are not reduced over have parts of the same gradient: all have it, or none.
            summand = tuple(c if p.is_partial() else 0 for c, p in zip(coordinate, came))
            used = random.Random(f"{index} {step} {summand}").random() < chance
            if not used and index != 0:  # every rank has something to do backward for
                continue
            shape = case.shape
            if case.came is not None:
                shape = local_region(case.shape, case.came, self.sizes, coordinate).local_shape
            generator = torch.Generator().manual_seed(hash((index, step, key)) % 2**31)
            values = torch.randint(-4, 5, shape, generator=generator).to(case.dtype)
            if case.dtype.is_complex:
                values = values + 1j * torch.randint(-4, 5, shape, generator=generator)
            found[rank] = values
        return found

    def reduce(self, case: Case) -> torch.Tensor | None:
        """One device's view of what is pending: None when no rank has contributed."""
        if not case.pending:
            return None
        if case.came is None:
            total = torch.stack(list(case.pending.values())).sum(0)
            return total if self.op == "sum" else total / len(self.coordinates)
        partial = [axis for axis, p in enumerate(case.came) if p.is_partial()]
        ops = {case.came[axis].reduce_op for axis in partial}
        adds = ops <= {"sum", "avg"}
        op = "sum" if adds else ops.pop()
        neutral = {"sum": 0.0, "max": -math.inf, "min": math.inf}[op]
        result = torch.full(case.shape, neutral, dtype=case.dtype)
        for rank, local in case.pending.items():
            coordinate = self.coordinates[rank]
            if any(c for c, p in zip(coordinate, case.came) if p.is_replicate()):
                continue  # the same as another rank's
            index = _indices(case.shape, case.came, self.sizes, coordinate)
            result[index] = _COMBINE[op](result[index], local.view(result[index].shape))
        if adds:
            for axis in partial:
                if self.op == "avg" or (self.op is None and case.came[axis].is_partial("avg")):
                    result = result / self.sizes[axis]
        return result

    # What users do

    def backward(self, step: int, sync: bool) -> None:
        rank = dist.get_rank()
        losses = []
        for index, case in enumerate(self.cases):
            gradients = self.local_gradients(index, step, sync)
            for other, local in gradients.items():
                case.pending[other] = case.pending[other] + local if other in case.pending else local
            if rank in gradients:
                gradient: torch.Tensor = gradients[rank].clone()
                if case.came is not None:
                    stride = torch.empty(case.shape, device="meta").stride()
                    gradient = from_local(gradient, self.mesh, case.came, shape=case.shape, stride=stride)
                losses.append(Loss.apply(case.parameter, gradient).to(torch.complex128))
        total = torch.stack(losses).sum()
        if sync:
            total.backward(torch.ones_like(total))
            self._complete()
        else:
            with self.reducer.no_sync():
                total.backward(torch.ones_like(total))

    def _complete(self) -> None:
        for case in self.cases:
            case.is_known |= bool(case.pending)
            reduced = self.reduce(case)
            case.pending.clear()
            if reduced is not None:
                case.complete = reduced if case.complete is None else case.complete + reduced

    def clear(self, set_to_none: bool) -> None:
        if any(case.pending and case.complete is not None for case in self.cases) and not set_to_none:
            return  # zeros of one kind, and none of the other: tested elsewhere
        self.module.zero_grad(set_to_none=set_to_none)
        for case in self.cases:
            case.pending = {} if set_to_none else {rank: torch.zeros_like(t) for rank, t in case.pending.items()}
            case.complete = None if set_to_none or case.complete is None else torch.zeros_like(case.complete)

    def check(self, said: str) -> None:
        for index, case in enumerate(self.cases):
            gradient = case.parameter.grad
            text = f"p{index} {case.shape} {case.dtype} {case.own} from {case.came}, op={self.op}, {said}"
            if case.complete is None and gradient is not None and dist.get_backend() == "threaded":
                assert not whole(gradient).any(), text  # simulated sums begin with 0.0, so that -0.0 is lost
                continue
            assert (gradient is None) == (case.complete is None), text
            if gradient is None:
                continue
            assert gradient.dtype == case.dtype
            if isinstance(gradient, DTensor):
                assert gradient.placements == case.parameter.placements, text
            tolerance = 0.05 if case.dtype == torch.bfloat16 else 1e-12 if case.dtype != torch.float32 else 1e-5
            torch.testing.assert_close(
                whole(gradient), case.complete, rtol=tolerance, atol=tolerance, msg=lambda m, t=text: f"{t}: {m}"
            )


def _indices(shape: tuple[int, ...], came: tuple[Any, ...], sizes: tuple[int, ...], at: tuple[int, ...]) -> Any:
    """Which elements a shard holds."""
    every = torch.arange(math.prod(shape)).view(shape)
    for axis, placement in enumerate(came):
        if isinstance(placement, Shard):
            chunks = every.chunk(sizes[axis], placement.dim)
            empty = every.narrow(placement.dim, 0, 0)
            every = chunks[at[axis]] if at[axis] < len(chunks) else empty
    return torch.unravel_index(every, shape) if shape else ()


def run(sizes: tuple[int, ...], seed: int, num_steps: int = 5) -> None:
    world = World(sizes, seed)
    chance = random.Random(seed + 1)
    for step in range(num_steps):
        number = 0
        for number in range(chance.choice([0, 0, 1, 2])):
            world.backward(10 * step + number, sync=False)
            if chance.random() < 0.15:
                world.clear(set_to_none=chance.random() < 0.5)
        if chance.random() < 0.2 and number == 0:
            world._complete()  # by finish()
        else:
            world.backward(10 * step + 9, sync=True)
        world.reducer.finish()
        world.check(f"step {step}")
        if chance.random() < 0.7:
            world.clear(set_to_none=chance.random() < 0.7)
    world.reducer.remove()


def run_seeds(cases: list[tuple[tuple[int, ...], int]]) -> int:
    return run_cases(run, cases)


def test_random_steps(ranks: RankPools) -> None:
    cases = [((4,), 0), ((2, 2), 1), ((4,), 2), ((2, 2), 3), ((4,), 4), ((2, 2), 5), ((2, 2), 6)]
    ranks.run(run_seeds, cases, timeout=200)


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (2, 2, 2)], ids=str)
def test_random_steps_on_simulated_ranks(sizes: tuple[int, ...]) -> None:
    for seed in range(5 if NIGHTLY else 3):
        simulate(run, math.prod(sizes), sizes, seed)


def test_random_steps_without_the_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every gradient calls into Python then."""
    monkeypatch.setenv("VESCALE_NO_NATIVE", "1")
    for seed in range(7, 10):
        simulate(run, 4, (2, 2), seed)


@pytest.mark.slow
def test_random_steps_on_64_simulated_ranks() -> None:
    simulate(run, 64, (4, 4, 4), 3, 2, timeout=200)
