"""``vescale.debug.monitor``: what it records is what ran, by references that do not use it."""

from __future__ import annotations

import io
import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import vescale
from tests.ranks import RankPools
from tests.runtime.llama import make_mesh
from vescale.comm import Operation
from vescale.comm._observation import METERS, OBSERVERS
from vescale.debug import StepRecord, comm_trace, flops_per_token, monitor
from vescale.debug._monitor import AxisTraffic, CommMeter, ConsoleLines, line_of
from vescale.ops import _conversion


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def parallel() -> nn.Module:
    plan = vescale.Plan(make_mesh(dp=1, tp=2))
    plan.shard("0.(weight|bias)", Shard(0), mesh="tp").shard("2.weight", Shard(1), mesh="tp")
    plan.shard("0.<in>", Replicate(), mesh="tp").shard("2.<out>", Replicate(), mesh="tp")
    return vescale.parallelize(net(), plan, strict=True)


class Kept:
    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.is_closed = False

    def write(self, record: StepRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.is_closed = True


def observed(folder: str) -> None:
    rank = dist.get_rank()
    model, kept = parallel(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))

    def step() -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with comm_trace() as trace:
        reference = [step().item()]
    traced = {axis: (trace.count(axis=axis), trace.bytes(axis=axis)) for axis in {o.axes for o in trace.operations}}
    assert traced, "there is something to observe"
    path = Path(folder) / "steps.jsonl"
    with monitor(model, every=2, jsonl=path, ranks="all", outputs=[kept], console=False, peak_flops=1e6) as watch:
        for _ in range(5):
            loss = step()
            reference.append(loss.item())
            watch.step(loss, tokens=6, lr=0.1)
    assert kept.is_closed and [record.step for record in kept.records] == [0, 1, 2, 3, 4]
    assert [record.loss for record in kept.records] == reference[1:]
    assert [record.comm is not None for record in kept.records] == [True, False, True, False, True]
    for record in kept.records:
        assert record.tokens_per_second == 6 / record.seconds and record.more == {"lr": 0.1}
        assert record.mfu == pytest.approx(6 / record.seconds * 6 * (8 * 16 + 16 * 4) / (1e6 * 2))
        assert record.memory_bytes > 10_000_000
        if record.comm is not None:
            found = {axis: (t.count, t.bytes) for axis, t in record.comm.items()}
            found.pop("all ranks", None)  # a comparison of steps
            assert found == traced
            assert all(t.seconds is not None and 0 < t.seconds <= record.seconds for t in record.comm.values())
            assert record.exposed_seconds is not None and 0 <= record.exposed_seconds <= record.seconds
    written = [json.loads(line) for line in path.with_suffix(f".{rank}.jsonl").read_text().splitlines()]
    assert [entry["loss"] for entry in written] == reference[1:] and written[0]["lr"] == 0.1
    assert written[0]["comm"] == {
        axis: {"count": t.count, "bytes": t.bytes, "seconds": t.seconds}
        for axis, t in (kept.records[0].comm or {}).items()
    }
    assert not (OBSERVERS or METERS), "nothing is observed any more"


def test_records_are_what_ran(ranks: RankPools, tmp_path: Path) -> None:
    ranks.run(observed, str(tmp_path), world_size=2)


def uneven() -> tuple[int, int, list[str]]:
    """Features that the ranks do not divide, and a sequence that is cut: reduce-scatters and all-gathers."""
    plan = vescale.Plan(make_mesh(dp=1, tp=dist.get_world_size()))
    plan.shard("0.(weight|bias)", Shard(0), mesh="tp").shard("2.weight", Shard(1), mesh="tp")
    plan.shard("<in:input>", Shard(0), mesh="tp").shard("0.<in>", Replicate(), mesh="tp")
    plan.shard("2.<out>", Shard(0), mesh="tp").shard("<out>", Replicate(), mesh="tp")
    model = vescale.parallelize(nn.Sequential(nn.Linear(8, 13), nn.ReLU(), nn.Linear(13, 5)), plan, strict=True)
    x = torch.randn(7, 8, generator=torch.Generator().manual_seed(1))

    def step() -> None:
        model(x).square().mean().backward()

    step()
    calls: list[str] = []
    in_python = _conversion._moved_in_python
    _conversion._moved_in_python = lambda *args: calls.append("") or in_python(*args)  # type: ignore[func-returns-value]
    try:
        step()
        before = len(calls)
        meter = CommMeter()
        meter.start()
        step()
        meter.stop()
        assert len(calls) == 2 * before, "collectives stay in C++ while a monitor observes them"
    finally:
        _conversion._moved_in_python = in_python
    with comm_trace() as trace:
        step()
    metered = meter.axes["tp"]
    assert metered.count == trace.count(axis="tp") >= 4
    return metered.bytes, trace.bytes(axis="tp"), sorted(o.op for o in trace.operations)


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_of_uneven_parts(ranks: RankPools, world_size: int) -> None:
    """A monitor counts what calls move, the trace what each rank needs: over all ranks the same, but for padding."""
    metered, traced, ops = zip(*ranks.run(uneven, world_size=world_size))
    assert {"all_gather", "reduce_scatter"} <= set(ops[0])
    assert sum(traced) <= sum(metered) <= 1.2 * sum(traced)


def exposed() -> None:
    """A rank that comes 0.2 s late: the other one waits for it, and is told so."""
    rank, kept = dist.get_rank(), Kept()
    with monitor(net(), every=1, console=False, outputs=[kept]) as watch:
        dist.barrier()
        watch.step()
        if rank == 1:
            time.sleep(0.2)
        dist.all_reduce(torch.ones(4))
        watch.step()
    waiting = kept.records[1]
    assert waiting.comm is not None and waiting.exposed_seconds is not None
    if rank == 0:
        seconds = next(iter(waiting.comm.values())).seconds
        assert waiting.exposed_seconds > 0.15 and seconds is not None and seconds > 0.15


def test_what_is_hidden_behind_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """By clocks of the test: two collectives overlap for 6 s, of which the thread computes for 4; one takes 3 s."""
    now, meter = {"wall": 0.0, "cpu": 0.0}, CommMeter()
    monkeypatch.setattr("vescale.debug._monitor.time.perf_counter", lambda: now["wall"])
    meter._clock, meter._cpu = 1, lambda: now["cpu"]  # type: ignore[method-assign]
    first, second, third = (
        Operation("all_reduce", n, "g", (0, 1), axis, 8) for n, axis in enumerate(["dp", "tp", "dp"])
    )

    def later(wall: float, cpu: float) -> None:
        now["wall"], now["cpu"] = now["wall"] + wall, now["cpu"] + cpu

    meter.started(first)
    later(2, 2)
    meter.started(second)
    later(2, 1)
    meter.ended(first)
    later(2, 1)
    meter.ended(second)
    meter.ended(second)  # by another thread
    later(5, 5)
    meter.started(third)
    later(3, 0)
    meter.stop()  # still under way
    meter.ended(third)
    assert meter.exposed_seconds() == (6 - 4) + 3
    assert {axis: (t.count, t.bytes, t.seconds) for axis, t in meter.axes.items()} == {
        "dp": (2, 16, 7.0),
        "tp": (1, 8, 4.0),
    }
    on_device = CommMeter(is_timed=False)
    on_device.started(Operation("all_reduce", 0, "g", (0, 1), "dp", 8))
    on_device.started(Operation("all_reduce", 0, "g", (0,), "tp", 8))  # of one rank
    assert on_device.exposed_seconds() is None and on_device.axes == {"dp": AxisTraffic(1, 8, None)}


def paused() -> None:
    model, kept = parallel(), Kept()
    x = torch.randn(6, 8)
    with monitor(model, console=False, outputs=[kept], every=1, ranks="all") as watch:
        for is_evaluated in (False, True):
            model(x).sum().backward()
            if is_evaluated:
                with watch.pause():
                    with watch.pause():
                        time.sleep(2.0)
                    model(x)
            watch.step()
    first, second = kept.records
    assert second.comm is not None and first.comm is not None
    assert {name: axis.count for name, axis in second.comm.items()} == {n: a.count for n, a in first.comm.items()}
    assert second.seconds < 2.0


def test_an_evaluation_is_left_out(ranks: RankPools) -> None:
    ranks.run(paused, world_size=2)


def staged() -> set[str]:
    """Stages on all ranks: their messages go through the default group, which has no name of its own."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    plan = vescale.Plan(mesh).pipeline(
        split_before=["2"], microbatches=2, loss=lambda out, batch: (out.sum(), out.numel())
    )
    model: Any = vescale.parallelize(net(), plan)
    with warnings.catch_warnings(action="ignore"), monitor(model, console=False, every=1) as watch:
        loss = model.step(input=torch.ones(4, 8))
        watch.step(loss)
    assert watch.last is not None and watch.last.comm is not None
    return set(watch.last.comm)


def test_messages_between_stages_have_an_axis(ranks: RankPools) -> None:
    assert ranks.run(staged, world_size=2) == [{"pp"}, {"pp"}]


def test_exposed_communication(ranks: RankPools) -> None:
    ranks.run(exposed, world_size=2)


def test_one_process_without_a_process_group(capsys: pytest.CaptureFixture[str]) -> None:
    with monitor(net(), peak_flops="measure", every=2) as watch:
        assert watch.step(torch.tensor(2.5), tokens=10).loss == 2.5
        watch.step(1.5, tokens=10, step=7)
        watch.step()
    assert watch.last is not None and watch.last.loss is None and watch.last.step == 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("step 0  loss 2.5000") and "MFU" in lines[0]
    watch.close()  # again


def test_the_line_of_a_step() -> None:
    record = StepRecord(
        20, 2.34125, 0.1, 1000, 10_000.0, 0.412, 3 << 30, {"tp": AxisTraffic(24, 3 << 19, 0.0031)}, 0.002
    )
    record.more = {"lr": 0.001}
    output = io.StringIO()
    ConsoleLines(Console(file=output, markup=False, highlight=False, soft_wrap=True)).write(record)
    speed = "step 20  loss 2.3413  lr 0.001  10,000 tokens/s  MFU 41.2 %  3.0 GiB"
    assert output.getvalue() == f"{speed}  tp 24x 1.5 MiB 3.1 ms  exposed 2.0 ms (2 %)\n"
    later = io.StringIO()
    lines = ConsoleLines(Console(file=later, markup=False, highlight=False, soft_wrap=True), seconds=0.05)
    record.comm = None
    lines.write(record)  # neither observed, nor late
    assert not later.getvalue()
    time.sleep(0.06)
    lines.write(record)
    lines.write(record)
    assert later.getvalue() == f"{speed}\n"
    record.comm, record.exposed_seconds = {"tp": AxisTraffic(24, 100, None)}, None  # on a device
    assert line_of(record).endswith("tp 24x 100 B")


def test_an_exception_leaves_what_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with pytest.raises(RuntimeError, match="stop"), monitor(net(), console=False, jsonl=path) as watch:
        watch.step(1.0)
        raise RuntimeError("stop")
    with monitor(net(), console=False, jsonl=path) as watch:  # goes on in the same file
        watch.step(2.0, step=1)
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [1.0, 2.0]


def test_bad_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="every=0; pass the interval of observed steps"):
        monitor(net(), every=0)
    with pytest.raises(ValueError, match="ranks='some'"):
        monitor(net(), ranks="some")  # type: ignore[arg-type]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        monitor(net(), tensorboard="x")
    with monitor(net(), console=False) as watch, pytest.raises(ValueError, match=r"loss has shape \(3,\)"):
        watch.step(torch.ones(3))


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with monitor(net(), console=False, tensorboard=tmp_path) as watch:
        for step in range(3):
            watch.step(float(step), tokens=5, lr=0.5)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.value for event in events.Scalars("train/loss")] == [0.0, 1.0, 2.0]
    assert {"speed/tokens_per_second", "memory/bytes", "train/lr"} <= set(events.Tags()["scalars"])


def counted(model: nn.Module, *args: Any, **kwargs: Any) -> float:
    """Forward and backward by PyTorch's own counter."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        found = model(*args, **kwargs)
        (found.loss if hasattr(found, "loss") else found.sum()).backward()
    return counter.get_total_flops()


def test_operations_of_a_token() -> None:
    model = net()
    x = torch.randn(32, 8, requires_grad=True)  # so that the first layer's input needs a gradient, too
    assert flops_per_token(model) * 32 == counted(model, x)
    model[0].weight.requires_grad_(False)
    assert flops_per_token(model) * 32 == counted(model, x)


def test_operations_of_transformers_models() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    ids = torch.randint(64, (2, 16))
    for kind, more in (("Llama", {"tie_word_embeddings": True}), ("Mixtral", {"num_local_experts": 4})):
        config = getattr(transformers, f"{kind}Config")(**sizes, **more)
        config._attn_implementation = config._experts_implementation = "eager"  # whose products are counted
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        found = flops_per_token(model, 16) * ids.numel()
        assert found == pytest.approx(counted(model, input_ids=ids, labels=ids), rel=0.02), kind


def test_operations_that_are_not_known() -> None:
    with pytest.raises(ValueError, match=r"0\.weight is a convolution with windows of \(3,\)"):
        flops_per_token(nn.Sequential(nn.Conv1d(2, 2, 3)))
    experts = nn.ModuleDict({"experts": nn.Linear(4, 4)})
    with pytest.raises(ValueError, match="pass flops_per_token="):
        flops_per_token(experts)
    with pytest.warns(UserWarning, match="monitor omits MFU: experts.weight"):
        monitor(experts, peak_flops=1.0, console=False).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor(experts, peak_flops=1.0, flops_per_token=3.0, console=False).close()
        monitor(experts, console=False).close()  # nobody knows this device's peak


def decisions_kept() -> None:
    """Observing, from its beginning to its end, makes no op be decided anew."""
    from vescale.compat import patches

    model, x = parallel(), torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    cleared, clear = [], patches.clear_sharding_caches
    patches.clear_sharding_caches = lambda: cleared.append(clear())  # type: ignore[assignment]
    try:
        with comm_trace() as trace:
            model(x).sum().backward()
    finally:
        patches.clear_sharding_caches = clear
    assert trace.operations and not cleared


def test_observing_keeps_sharding_decisions(ranks: RankPools) -> None:
    ranks.run(decisions_kept, world_size=2)
