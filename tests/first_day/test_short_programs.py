"""Short correct programs that look like mistakes: none raises, none warns, whatever one rank does alone beside the model."""

from __future__ import annotations

import collections
import contextlib
import copy
import cProfile
import functools
import io
import itertools
import json
import logging
import random
import time
import tracemalloc
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.data import DataLoader, TensorDataset

from tests.first_day.start import Net, inputs, plan, rank
from tests.ranks import RankPools, run_cases
from vescale import Plan, parallelize
from vescale.fsdp import fully_shard

Program = Callable[[Any, Any], None]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def train(model: Any, optimizer: Any, steps: int = 2, after: Callable[[Any], None] | None = None) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(inputs(step)).square().mean()
        loss.backward()
        if after is not None:
            after(loss)
        optimizer.step()


def hooked(model: Any, optimizer: Any, hook: Callable[..., None], **options: Any) -> None:
    handles = [module.register_forward_hook(hook, **options) for module in model.modules()]
    train(model, optimizer)
    for handle in handles:
        handle.remove()


# Rank 0 logs.


@program
def a_logger(model: Any, optimizer: Any) -> None:
    logger = logging.getLogger("run")
    numbers: list[float] = []  # the reading may communicate
    train(model, optimizer, after=lambda loss: numbers.append(loss.item()))
    if rank() == 0:
        logger.info("losses %s", numbers)


@program
def a_history_in_json(model: Any, optimizer: Any) -> None:
    history: list[float] = []
    train(model, optimizer, after=lambda loss: history.append(loss.item()))
    if rank() == 0:
        json.dumps({"history": history, "run": str(uuid.uuid4())})


@program
def a_progress_bar(model: Any, optimizer: Any) -> None:
    tqdm = pytest.importorskip("tqdm")
    for step in tqdm.tqdm(range(2), disable=rank() != 0, file=io.StringIO()):
        model(inputs(step)).square().mean().backward()
        optimizer.step()


@program
def a_clock_of_each_rank(model: Any, optimizer: Any) -> None:
    begin = time.perf_counter()
    train(model, optimizer, after=lambda loss: print(end="" if time.perf_counter() > begin else " "))


@program
def a_profiler_on_rank_0(model: Any, optimizer: Any) -> None:
    with torch.profiler.profile() if rank() == 0 else contextlib.nullcontext():
        train(model, optimizer)


@program
def a_profile_of_python_on_rank_0(model: Any, optimizer: Any) -> None:
    profile = cProfile.Profile()
    if rank() == 0:
        profile.enable()
    train(model, optimizer)
    profile.disable()


@program
def regions_that_are_named(model: Any, optimizer: Any) -> None:
    with torch.profiler.record_function(f"step of rank {rank()}"):
        train(model, optimizer)


@program
def traced_memory_on_rank_0(model: Any, optimizer: Any) -> None:
    if rank() == 0:
        tracemalloc.start()
    train(model, optimizer)
    tracemalloc.stop()


@program
def counted_modules(model: Any, optimizer: Any) -> None:
    counts: collections.Counter[str] = collections.Counter()
    hooked(model, optimizer, lambda module, *_: counts.update([type(module).__name__]))
    assert counts["Linear"] == 4


@program
def shapes_in_hooks_of_rank_0(model: Any, optimizer: Any) -> None:
    seen: list[Any] = []
    hooked(model, optimizer, lambda module, given, output: seen.append(output.shape) if rank() == 0 else None)


@program
def hooks_that_are_always_called(model: Any, optimizer: Any) -> None:
    hooked(model, optimizer, lambda *_: None, always_call=True)


@program
def times_in_pre_hooks(model: Any, optimizer: Any) -> None:
    begins: dict[Any, float] = {}
    handle = model.register_forward_pre_hook(lambda module, _: begins.__setitem__(module, time.time()))
    train(model, optimizer)
    handle.remove()


@program
def norms_of_gradients_on_all_ranks(model: Any, optimizer: Any) -> None:
    norms: list[float] = []
    train(model, optimizer, after=lambda _: norms.extend(float(p.grad.norm()) for p in model.parameters()))


@program
def a_summary_of_the_model_on_rank_0(model: Any, optimizer: Any) -> None:
    if rank() == 0:
        text = f"{model}", sum(p.numel() for p in model.parameters()), [p.dtype for p in model.parameters()]
        assert text
    train(model, optimizer)


@program
def a_warning_of_the_script_on_rank_0(model: Any, optimizer: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if rank() == 0:
            warnings.warn("the learning rate is large", stacklevel=1)
        train(model, optimizer)


# Draws, caches and libraries.


@program
def augmentation_by_numpy(model: Any, optimizer: Any) -> None:
    np.random.default_rng(rank()).normal(size=3)
    train(model, optimizer)


@program
def names_of_runs_by_random(model: Any, optimizer: Any) -> None:
    name = random.Random().choice(["red", "green"]) if rank() == 0 else ""
    train(model, optimizer)
    assert name is not None


@program
def a_generator_of_the_scripts_own(model: Any, optimizer: Any) -> None:
    noise = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    model(inputs() + noise).sum().backward()
    optimizer.step()


@program
def a_forked_generator_on_rank_0(model: Any, optimizer: Any) -> None:
    if rank() == 0:
        with torch.random.fork_rng():
            torch.rand(3)
    train(model, optimizer)


@program
def a_cache_of_positions(model: Any, optimizer: Any) -> None:
    @functools.cache
    def positions(length: int) -> torch.Tensor:
        return torch.arange(length, dtype=torch.float32)

    for _ in range(2):
        model(inputs() + positions(8)).mean().backward()
        optimizer.step()


@program
def a_cache_that_one_rank_has_filled(model: Any, optimizer: Any) -> None:
    cache = {8: torch.ones(8)} if rank() == 0 else {}
    for _ in range(2):
        model(inputs() * cache.setdefault(8, torch.ones(8))).mean().backward()
        optimizer.step()


@program
def a_buffer_that_is_made_late(model: Any, optimizer: Any) -> None:
    kept: list[torch.Tensor] = []
    for _ in range(2):
        if not kept:
            kept.append(torch.linspace(0, 1, 8))
        model(inputs() * kept[0]).mean().backward()
    optimizer.step()


@program
def an_import_in_the_loop(model: Any, optimizer: Any) -> None:
    train(model, optimizer, after=lambda _: __import__("colorsys") and None)


@program
def work_on_a_pool_of_threads(model: Any, optimizer: Any) -> None:
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(torch.rand, 4, generator=torch.Generator()) for _ in range(1 + rank())]
        train(model, optimizer)
        assert all(future.result().shape == (4,) for future in futures)


@program
def undefined_memory_that_is_filled(model: Any, optimizer: Any) -> None:
    x = torch.empty(4, 8)
    x.copy_(inputs())
    model(x).mean().backward()
    optimizer.step()


@program
def undefined_memory_that_is_masked(model: Any, optimizer: Any) -> None:
    weights = torch.empty(4, 8).masked_fill_(torch.ones(4, 8, dtype=torch.bool), 1.0)
    (model(inputs()).mean() * weights.sum()).backward()
    optimizer.step()


# Data.


def batches(**options: Any) -> Iterator[torch.Tensor]:
    data = TensorDataset(torch.cat([inputs(0), inputs(1)]))
    for (x,) in DataLoader(data, batch_size=4, generator=torch.Generator().manual_seed(0), **options):
        yield x


@program
def a_shuffled_loader(model: Any, optimizer: Any) -> None:
    for x in batches(shuffle=True):
        model(x).square().mean().backward()
        optimizer.step()


@program
def batches_that_are_fetched_before(model: Any, optimizer: Any) -> None:
    for x in list(batches()):
        model(x).square().mean().backward()
        optimizer.step()


@program
def an_endless_loader(model: Any, optimizer: Any) -> None:
    for x in itertools.islice(itertools.cycle(batches()), 3):
        model(x).square().mean().backward()
        optimizer.step()


@program
def a_last_batch_that_is_left_out(model: Any, optimizer: Any) -> None:
    for x in batches(drop_last=True):
        model(x).square().mean().backward()
    optimizer.step()


# Steps that all ranks decide alike.


@program
def an_early_end_that_all_ranks_share(model: Any, optimizer: Any) -> None:
    best = float("inf")
    for step in range(4):
        with torch.no_grad():
            loss = model(inputs(step)).square().mean().item()
        if step and loss > 0:
            break
        best = min(best, loss)
    assert best < float("inf")


@program
def accumulation_over_two_batches(model: Any, optimizer: Any) -> None:
    for step in range(4):
        (model(inputs(step)).square().mean() / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


@program
def clipping_by_norm(model: Any, optimizer: Any) -> None:
    train(model, optimizer, after=lambda _: float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)) and None)


@program
def clipping_by_value(model: Any, optimizer: Any) -> None:
    train(model, optimizer, after=lambda _: nn.utils.clip_grad_value_(model.parameters(), 0.1))


@program
def clipping_by_the_largest_element(model: Any, optimizer: Any) -> None:
    train(model, optimizer, after=lambda _: nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf")))


@program
def a_warm_up(model: Any, optimizer: Any) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    for _ in range(3):
        train(model, optimizer, 1)
        schedule.step()


@program
def a_rate_by_the_loss(model: Any, optimizer: Any) -> None:
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(3):
        train(model, optimizer, 1)
        schedule.step(1.0)


@program
def a_cycle_of_rates(model: Any, optimizer: Any) -> None:
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
    for _ in range(3):
        train(model, optimizer, 1)
        schedule.step()


@program
def rates_that_are_written_by_hand(model: Any, optimizer: Any) -> None:
    for rate in (0.1, 0.01):
        for group in optimizer.param_groups:
            group["lr"] = rate
        train(model, optimizer, 1)


@program
def an_average_of_parameters(model: Any, optimizer: Any) -> None:
    shadow = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        train(model, optimizer, 1)
        with torch.no_grad():
            for kept, p in zip(shadow, model.parameters(), strict=True):
                kept.lerp_(p, 0.1)


@program
def an_average_of_a_copy(model: Any, optimizer: Any) -> None:
    shadow = copy.deepcopy(model).requires_grad_(False)
    for _ in range(2):
        train(model, optimizer, 1)
        with torch.no_grad():
            for kept, p in zip(shadow.parameters(), model.parameters(), strict=True):
                kept.lerp_(p, 0.1)
            shadow(inputs())


@program
def a_probe_without_gradients(model: Any, optimizer: Any) -> None:
    def probe(_: Any) -> None:
        with torch.no_grad():
            model(inputs(7)).mean().item()

    train(model, optimizer, after=probe)


@program
def an_evaluation_after_each_step(model: Any, optimizer: Any) -> None:
    for step in range(2):
        model.train()
        train(model, optimizer, 1)
        model.eval()
        with torch.inference_mode():
            model(inputs(step))


@program
def a_frozen_layer_that_thaws(model: Any, optimizer: Any) -> None:
    model.up.requires_grad_(False)
    train(model, optimizer)
    model.up.requires_grad_(True)
    train(model, optimizer)


@program
def a_state_that_is_kept_and_put_back(model: Any, optimizer: Any) -> None:
    kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    train(model, optimizer)


@program
def gradients_that_are_looked_at_before_a_step(model: Any, optimizer: Any) -> None:
    train(
        model,
        optimizer,
        after=lambda _: [None for p in model.parameters() if p.grad is None or p.grad.dtype is None][:0],
    )


@program
def a_loss_of_two_terms(model: Any, optimizer: Any) -> None:
    for step in range(2):
        out = model(inputs(step))
        (F.mse_loss(out, torch.zeros_like(out)) + 0.1 * out.abs().mean()).backward()
        optimizer.step()


@program
def numbers_that_turn_into_text_on_all_ranks(model: Any, optimizer: Any) -> None:
    lines: list[str] = []
    train(model, optimizer, after=lambda loss: lines.append(f"rank {rank()}: {loss.item():.4f}"))
    assert len(lines) == 2


def made(kind: str, mesh: Any) -> Any:
    torch.manual_seed(0)
    if kind == "fsdp":
        return fully_shard(Net(), mesh=mesh)
    if kind == "zero":
        return parallelize(Net(), Plan(mesh).zero(3).shard("<in:x>", Shard(0), mesh="dp"))
    return parallelize(Net(), plan(mesh))


def run_program(name: str, kind: str) -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp" if kind == "tp" else "dp",))
    model = made(kind, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        PROGRAMS[name](model, optimizer)
        model(inputs()).sum().backward()  # what was noted meanwhile is compared


def run_all(kind: str) -> None:
    run_cases(run_program, [(name, kind) for name in PROGRAMS])


@pytest.mark.parametrize(
    "kind", ["tp", pytest.param("zero", marks=pytest.mark.slow), pytest.param("fsdp", marks=pytest.mark.slow)]
)
def test_short_programs_run_without_a_word(ranks: RankPools, kind: str) -> None:
    assert len(PROGRAMS) >= 48
    ranks.run(run_all, kind, world_size=2)
