"""Drawn modules in which tensors alias, against one device: values, gradients, errors, and who sees whose writes.

``python -m tests.runtime.test_aliasing_programs 0 1000`` runs seeds, and prints those that fail; with ``wide 3`` of the wide
space (see :func:`draw_model`), on three ranks. Ranks are threads, which takes a fifth of the processor time of processes.
"""

from __future__ import annotations

import contextlib
import copy
import math
import multiprocessing
import random
import sys
import traceback
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device import device_type
from tests.examples import NIGHTLY
from tests.fork_server import fork_context
from tests.runtime.drawn_modules import ROWS, WIDTH, Block, UndefinedOnOneDeviceError, draw_model, draw_plan
from tests.runtime.test_aliasing import in_a_fake_world
from tests.simulate import on_other_thread, simulate
from tests.whole import whole
from vescale import (
    parallelize,
    static,  # noqa: F401  (the mode's name)
)

TOLERANCE = {"rtol": 1e-9, "atol": 1e-10}
# An output that is a view of what was written to: it may not be used, but the forward ends. A view that one boundary passes
# on and another one writes back to, before a write to its base.
FAILED_ONCE = (1789, 6873)
# Without the C++ helpers: a recomputation that ends inside of a module that has written; a copy that was gathered anew as
# long as it existed, which one rank did and another one did not (a hang); writes by way of to_local(), before a view is
# read and by way of a view; a write to one side of a boundary, after a save of the other one;
# a view that a boundary moves.
FAILED_IN_PYTHON = (31, 86, 146, 172, 181, 255, 682, 845)
# Under a dispatch mode, with the helpers.
FAILED_UNDER_A_MODE = (2, 6, 10, 12, 13, 14, 17, 22, 30, 34, 49, 51)
# Of the wide space: a parameter whose gradient is undefined, because it goes to an input of a reentrant checkpoint that the
# output does not depend on (an assertion of the reducer); see MULTIPLE_VIEWS. On three ranks, one of which holds nothing of
# some tensors (hangs): inputs taken for one memory there, and copies of views that were not remembered there.
FAILED_WIDE = {2: (877, 366), 3: (124, 165, 920_012)}
# An output of chunk whose base was written to: one device passes it on, where nothing reads it, and a boundary reads it.
MULTIPLE_VIEWS = "is the output of a function that returns multiple views"
# Views that one device does not let a program write to, of a reentrant checkpoint or of split, which a boundary that moves
# data replaces by tensors of their own (see test_aliasing.py).
READ_ONLY_VIEWS = ("of CheckpointFunction is a view and is being modified inplace", MULTIPLE_VIEWS)
# What a boundary that moves data may answer instead of what one device does.
REFUSED = (
    MULTIPLE_VIEWS,
    "one tensor; here they are two",
    "which on one device shares memory with",
    "to_local() of it was written to",
)


@dataclass(frozen=True)
class Space:
    """What is drawn, and how it runs."""

    is_wide: bool = False
    """Of more ops, views, writes and uses of parameters and buffers (see :func:`draw_model`)."""
    is_static: bool = False
    """Three steps with other numbers in static mode; the first one is recorded."""
    is_seen: bool = False
    """Under a dispatch mode."""
    mesh: tuple[int, ...] = (2,)


class Seen(TorchDispatchMode):
    """As counters of operations and profilers are: sees every op, and changes none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Run:
    """A forward and backward of a model, with everything that a program can see of it."""

    def __init__(self, model: Block, draw: random.Random, is_seen: bool = False, turn: int = 0) -> None:
        self.model, self.is_seen = model, is_seen
        self.grad = draw.random() < 0.9 and not model.by_local
        self.threaded = draw.random() < 0.3
        self.leaf = draw.random() < 0.5
        self.again = draw.random() < 0.3
        generator = torch.Generator().manual_seed(draw.randrange(1000) + 1000 * turn)
        given = [torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator) for _ in model.inputs]
        if len(given) == 2 and self.again:
            given[1] = given[0]
        self.leaves = [x.requires_grad_(self.leaf and self.grad) for x in given]
        self.inputs = [x * 1 for x in self.leaves]
        if len(given) == 2 and self.again:
            self.inputs[1] = self.inputs[0]
        self.outputs: tuple[Any, ...] = ()

    def forward(self) -> None:
        def run() -> None:
            with torch.set_grad_enabled(self.grad), self._mode():
                self.outputs = self.model(*self.inputs)

        if self.threaded:
            on_other_thread(run)
        else:
            run()

    def backward(self) -> None:
        with self._mode():
            losses = [(x * x.sin()).sum() for x in self.outputs if x.requires_grad]
            if self.grad and losses:
                sum(losses).backward()  # type: ignore[union-attr]

    def _mode(self) -> contextlib.AbstractContextManager[Any]:
        return Seen() if self.is_seen else contextlib.nullcontext()

    def values(self) -> list[torch.Tensor]:
        return [whole(x.detach()) for x in (*self.outputs, *self.inputs)]

    def gradients(self) -> list[torch.Tensor | None]:
        found = [*self.model.parameters(), *self.leaves]
        return [None if x.grad is None else whole(x.grad) for x in found]


def attempt(function: Any) -> BaseException | None:
    try:
        function()
    except (RuntimeError, ValueError, NotImplementedError, AssertionError, TypeError) as error:
        return error
    return None


def same(expected: list[Any], found: list[Any], what: str) -> None:
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert (one is None) == (other is None), f"{what} {index}: {other}, one device {one}"
        if one is not None:
            torch.testing.assert_close(other, one, **TOLERANCE, msg=lambda m, i=index: f"{what} {i}: {m}")


def compare(seed: int, mesh: Any, space: Space) -> str:
    """What came of it: ``equal``, ``both raise``, ``refused in`` a step (see REFUSED), ``undefined``, ``refused on one
    device`` (see READ_ONLY_VIEWS). AssertionError for anything else."""
    draw = random.Random(seed)
    plain = draw_model(draw, space.is_wide)
    model: Any = copy.deepcopy(plain)
    plan, entries = draw_plan(plain, draw, mesh)
    outcome, turn, one = "", 0, None
    try:
        parallelize(model, plan, mode="static" if space.is_static else "eager")
        for turn in range(3 if space.is_static else 1):
            for each in (plain, model):
                each.zero_grad()
            one, many = (Run(each, random.Random(seed), space.is_seen, turn) for each in (plain, model))
            outcome = compare_step(one, many)
            if outcome != "equal":
                return outcome
        return outcome
    except BaseException as error:
        where = f"seed {seed}, rank {dist.get_rank()}, step {turn}"
        text = "\n".join([where, *plain.text(), *entries, str(vars_of(one) if one else "")])
        raise AssertionError(text) from error


def compare_step(one: Run, many: Run) -> str:
    """See :func:`compare`."""
    for step in ("forward", "values", "backward", "gradients"):
        outcomes = [attempt(getattr(run, step)) for run in (one, many)]
        if outcomes[0] is None and outcomes[1] is None:
            if step in ("values", "gradients"):
                same(getattr(one, step)(), getattr(many, step)(), step)
            continue
        if isinstance(outcomes[0], UndefinedOnOneDeviceError):
            return "undefined"
        if outcomes[1] is None and any(text in str(outcomes[0]) for text in READ_ONLY_VIEWS):
            return "refused on one device"
        if outcomes[1] is None:
            raise AssertionError(f"{step}: no error; one device: {outcomes[0]}")
        if outcomes[0] is None:
            if any(text in str(outcomes[1]) for text in REFUSED):
                return f"refused in {step}"
            raise AssertionError(f"{step}: {outcomes[1]}") from outcomes[1]
        return "both raise"
    return writes_afterwards(one, many)


def vars_of(run: Run) -> dict[str, bool]:
    return {name: value for name, value in vars(run).items() if isinstance(value, bool)}


def writes_afterwards(one: Run, many: Run) -> str:
    """Whether the outputs share memory with each other as on one device."""
    inputs = {x.untyped_storage().data_ptr() for x in one.inputs}
    own = [i for i, x in enumerate(one.outputs) if x.untyped_storage().data_ptr() not in inputs]
    for index in own:
        for run in (one, many):
            with torch.no_grad():
                problem = attempt(lambda run=run, index=index: run.outputs[index].detach().mul_(index + 2))
            if problem is not None:
                assert run is many and any(text in str(problem) for text in REFUSED), problem
                return "refused afterwards"
        for each in own:
            expected = one.outputs[each].detach()
            found: list[torch.Tensor] = []
            problem = attempt(lambda each=each, found=found: found.append(whole(many.outputs[each].detach())))
            if problem is not None:
                assert any(text in str(problem) for text in REFUSED), problem
                return "refused afterwards"
            torch.testing.assert_close(found[0], expected, **TOLERANCE)
    return "equal"


def compare_all(seeds: list[int], space: Space) -> tuple[Counter[str], list[str]]:
    mesh = init_device_mesh(device_type(), space.mesh, mesh_dim_names=("tp", "dp", "cp")[: len(space.mesh)])
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    for seed in seeds:
        try:
            outcomes[compare(seed, mesh, space)] += 1
        except AssertionError as error:
            failures.append(f"{error}\n" + "".join(traceback.format_exception(error.__cause__))[-3500:])
            outcomes["failed"] += 1
    return outcomes, failures


def run(seeds: list[int], space: Space = Space()) -> tuple[Counter[str], list[str]]:
    with warnings.catch_warnings():  # for all threads
        warnings.simplefilter("ignore")
        found: tuple[Counter[str], list[str]] = simulate(
            compare_all, math.prod(space.mesh), seeds, space, timeout=120.0 + 40 * len(seeds)
        )[0]
    return found


def run_apart(seeds: list[int], space: Space = Space()) -> tuple[Counter[str], list[str]]:
    """In a process of its own: how many programs are refused has been seen to depend on what ran before."""
    with ProcessPoolExecutor(1, fork_context()) as pool:
        return pool.submit(run, seeds, space).result()


def test_drawn_modules() -> None:
    seeds = range(10_000) if NIGHTLY else (*range(48), *FAILED_ONCE)
    outcomes, failures = run_apart(list(seeds))
    assert not failures, "\n\n".join(failures[:5])
    assert outcomes["equal"] > len(seeds) * 0.5, outcomes


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_drawn_modules_of_the_wide_space(num_ranks: int) -> None:
    """Three ranks cut unevenly."""
    seeds = range(5_000) if NIGHTLY else (*range(30 if num_ranks == 2 else 0), *FAILED_WIDE[num_ranks])
    outcomes, failures = run_apart(list(seeds), Space(is_wide=True, mesh=(num_ranks,)))
    assert not failures, "\n\n".join(failures[:5])
    assert outcomes["equal"] > len(seeds) * 0.5, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 2), (3, 2)])
def test_drawn_modules_on_two_axes(mesh: tuple[int, ...]) -> None:
    """A batch may be cut by both axes, unevenly."""
    outcomes, failures = run_apart(list(range(100)), Space(is_wide=True, mesh=mesh))
    assert not failures, "\n\n".join(failures[:5])
    assert outcomes["equal"] > 30, outcomes


@pytest.mark.slow
@pytest.mark.helper("dispatch")
def test_drawn_modules_in_static_mode() -> None:
    """Ranks are threads, which share the functions whose code static forwards exchange: program 26 hung."""
    outcomes, failures = run_apart(list(range(20, 32)), Space(is_wide=True, is_static=True))
    assert not failures, "\n\n".join(failures[:5])
    assert outcomes["equal"] > 3, outcomes


def test_drawn_modules_under_a_dispatch_mode() -> None:
    """Under a mode, conversions run in Python; of the first 120 programs, 30 read old values, or had other gradients."""
    seeds = range(2_000) if NIGHTLY else FAILED_UNDER_A_MODE
    outcomes, failures = run_apart(list(seeds), Space(is_seen=True))
    assert not failures, "\n\n".join(failures[:5])
    assert NIGHTLY is False or outcomes["equal"] > len(seeds) * 0.4, outcomes


def test_drawn_modules_without_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VESCALE_DISPATCH", "stock")
    seeds = range(2_000) if NIGHTLY else FAILED_IN_PYTHON
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # which reads the environment anew
        pool.submit(in_a_fake_world).result()
        outcomes, failures = pool.submit(run, list(seeds)).result()
    assert not failures, "\n\n".join(failures[:5])
    assert outcomes["equal"] > len(seeds) * 0.3, outcomes


def main() -> None:
    """``FIRST END [wide] [static] [seen] [3]``; the last is the mesh, as ``2x2``."""
    first, end, words = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    mesh = next((tuple(map(int, word.split("x"))) for word in words if word[0].isdigit()), (2,))
    space = Space("wide" in words, "static" in words, "seen" in words, mesh)
    outcomes, failures = run(list(range(first, end)), space)
    print("\n\n".join(failures[:5]), flush=True)
    print(outcomes, len(failures))


if __name__ == "__main__":
    main()
