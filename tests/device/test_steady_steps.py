"""A step in steady state on the simulated device: the host waits for nothing, and asks the job's store for nothing."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from tests.compiler import needs_compiler
from tests.device import everywhere
from tests.fsdp.compare import by_block, mesh_of
from tests.fsdp.models import Net, tokens
from tests.pipeline import steps as pipelines
from tests.ranks import RankPools
from tests.runtime import llama
from tests.runtime.zero import llama_plan
from vescale import debug, parallelize, plan_zoo
from vescale.fsdp import fully_shard
from vescale.optim import AdamW8bit, Muon, adamw8bit_layout, clip_grad_norm_, muon_groups
from vescale.plans import Plan

pytestmark = needs_compiler

_REQUESTS = (
    "set",
    "get",
    "add",
    "wait",
    "check",
    "compare_set",
    "append",
    "multi_get",
    "multi_set",
    "delete_key",
    "num_keys",
)

Step = Callable[[], object]


@contextlib.contextmanager
def counted_requests() -> Iterator[Counter[str]]:
    """Of this rank to any store, from Python."""
    found: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for name in _REQUESTS:
            own = getattr(dist.Store, name)

            def counted(*args: Any, name: str = name, own: Any = own) -> Any:
                found[f"{name} {args[1:2]}"] += 1
                return own(*args)

            for kind in (dist.Store, dist.PrefixStore, dist.TCPStore):
                if name in vars(kind):
                    patch.setattr(kind, name, counted)
        yield found


def sharded(**options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Net(dim=8)
    by_block(model, fully_shard, mesh_of(options.pop("mesh", None)), **options)
    return model


class Trained:
    """A model, and tokens on its device, whose loss is not read."""

    def __init__(self, model: Any, optimizer: Any = None) -> None:
        self.model, self.ids = model, tokens(0, dist.get_rank())
        self.optimizer = optimizer or torch.optim.AdamW(model.parameters(), foreach=True)

    def backward(self) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(self.ids).flatten(0, 1), self.ids.flatten())
        loss.backward()
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.backward()
        self.update()


def clipped() -> Step:
    trained = Trained(sharded())

    def step() -> None:
        trained.backward()
        clip_grad_norm_(trained.model.parameters(), 1.0)
        trained.update()

    return step


def without_sync() -> Step:
    """Two backwards without a reduction, then one with it."""
    trained = Trained(sharded())

    def step() -> None:
        trained.model.set_requires_gradient_sync(False)
        for _ in range(2):
            trained.backward()
        trained.model.set_requires_gradient_sync(True)
        trained.step()

    return step


def accumulation() -> Step:
    """Each backward reduces, and adds to ``.grad``."""
    trained = Trained(sharded())

    def step() -> None:
        trained.backward()
        trained.step()

    return step


def evaluation() -> Step:
    trained = Trained(sharded())
    return torch.no_grad()(lambda: trained.model(trained.ids))


def monitored() -> Step:
    trained = Trained(sharded())
    watch = debug.monitor(trained.model, console=False, every=10**6, flops_per_token=1.0, peak_flops=1.0)

    def step() -> None:
        loss = trained.backward()
        trained.update()
        watch.step(loss, tokens=10)

    return step


def eight_bit() -> Step:
    model = sharded(orig_param_policy=adamw8bit_layout(block_size=8, min_numel=16))
    return Trained(model, AdamW8bit(model.named_parameters(), min_numel=16, block_size=8)).step


def muon(skip_nonfinite: bool = False, **options: Any) -> Step:
    model = sharded(**options)
    return Trained(model, Muon(muon_groups(model, verbose=False), skip_nonfinite=skip_nonfinite)).step


def of_llama(model: Any) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    ids, labels = llama.batch(uneven=False)

    def step() -> None:
        model(input_ids=ids, labels=labels).loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def units_of_a_plan() -> Step:
    mesh = llama.make_mesh(dp=dist.get_world_size(), tp=1)
    return of_llama(parallelize(llama.make_llama(), llama_plan(mesh)))


def tensor_parallel() -> Step:
    mesh = llama.make_mesh(dp=1, tp=dist.get_world_size())
    return of_llama(parallelize(llama.make_llama(), plan_zoo.load("llama", mesh)))


def data_and_tensor_parallel() -> Step:
    """Gradients in buckets."""
    mesh = llama.make_mesh(dp=2, tp=2)
    return of_llama(parallelize(llama.make_llama(), plan_zoo.load("llama", mesh)))


def pipeline(schedule: str = "1F1B", splits: Sequence[int] = (2,)) -> Step:
    plan = Plan(pipelines.mesh_of(pp=2))
    plan.pipeline(split_before=[f"blocks.{n}" for n in splits], schedule=schedule, microbatches=4)
    torch.manual_seed(0)
    model = parallelize(pipelines.Net(dropout=0.0), plan)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    batch = {name: torch.ones(8, 6, dtype=torch.int64) for name in ("ids", "labels")}

    def step() -> None:
        model.step(**batch)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


CASES: dict[str, tuple[Callable[[], Step], int]] = {
    "fully_shard": (lambda: Trained(sharded()).step, 2),
    "clipping": (clipped, 2),
    "hybrid": (lambda: Trained(sharded(mesh=(2, 2))).step, 4),
    "no_sync": (without_sync, 2),
    "accumulation": (accumulation, 2),
    "evaluation": (evaluation, 2),
    "monitor": (monitored, 2),
    "AdamW8bit": (eight_bit, 2),
    "Muon": (muon, 2),
    "Muon, replicas": (lambda: muon(mesh=(2, 2)), 4),
    "Muon, skipping": (lambda: muon(skip_nonfinite=True), 2),
    "units of a plan": (units_of_a_plan, 2),
    "tensor parallel": (tensor_parallel, 2),
    "data and tensor parallel": (data_and_tensor_parallel, 4),
    "pipeline": (pipeline, 2),
    "pipeline, interleaved": (lambda: pipeline("Interleaved1F1B", (1, 2, 3)), 2),
    "pipeline, ZBV": (lambda: pipeline("ZBV", (1, 2, 3)), 2),
}
# Once in a step, the answer of the other ranks: a replica may lack a gradient that others have; gradients may not be finite.
EXCEPTIONS = {"Muon, replicas": ("_heartbeat.py",), "Muon, skipping": ("_heartbeat.py", "_is_finite", "_are_finite")}
WARM_UP = 6


def waits(name: str) -> dict[str, Any]:
    """Of three steps after some: places where the host waits, and requests to the store."""
    step = CASES[name][0]()
    for _ in range(WARM_UP):
        step()
    dist.barrier()
    with counted_requests() as requests:
        torch.sim.clear()
        for _ in range(3):
            step()
        found = torch.sim.counts()
    waited = found["host_syncs"]["places"].items()
    known = EXCEPTIONS.get(name, ())
    kept = {place: n for place, n in waited if n > 3 or not any(one in place for one in known)}
    return {"waits": kept, "requests": dict(requests)}


@pytest.mark.parametrize("name", CASES)
def test_a_steady_step_waits_for_nothing(name: str) -> None:
    ranks = RankPools()  # of its own: several models of the same ranks compare whose turn it is
    try:
        for found in ranks.run(everywhere, waits, name, world_size=CASES[name][1], device="sim"):
            assert found == {"waits": {}, "requests": {}}
    finally:
        ranks.close()


def reads(late: int) -> int:
    """How often another thread has run while this one reads a number that waits for a rank which is ``late`` seconds."""
    mesh = mesh_of()
    ticks, ends = [0], threading.Event()

    def tick() -> None:
        while not ends.wait(0.01):
            ticks[0] += 1

    for is_late in (False, True):  # the first call of an op takes another way
        if is_late and dist.get_rank():
            time.sleep(late)
        loss = DTensor.from_local(torch.ones(()), mesh, [Partial()], run_check=False)
        thread = threading.Thread(target=tick)
        if is_late:
            thread.start()
        (loss.redistribute(mesh, [Replicate()]) * 2 + 1).item()
    ends.set()
    thread.join()
    return ticks[0]


def test_other_threads_run_while_a_number_is_waited_for(ranks: RankPools) -> None:
    """Also those that report a collective that hangs."""
    for device in ("sim", "cpu"):
        run = (everywhere, reads) if device == "sim" else (reads,)
        assert ranks.run(*run, 2, world_size=2, device=device)[0] > 20, device
