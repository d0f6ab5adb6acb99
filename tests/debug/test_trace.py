"""Traces hold every collective, whoever starts it, and nothing is installed when they are over."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from tests.debug.test_hang_report import Net
from tests.ranks import RankPools
from vescale import Plan, parallelize
from vescale.comm import record_comms
from vescale.compat import default_store
from vescale.debug import CommBudgetError, assert_comms, comm_trace
from vescale.fsdp import fully_shard


def planned() -> None:
    """A parallelized model: what its ledger has, with module and phase; budgets hold and are refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = Plan(mesh).shard(r"blocks.\d+.up.(weight|bias)", Shard(0), mesh="tp")
    plan.shard(r"blocks.\d+.down.weight", Shard(1), mesh="tp").shard(r"blocks.\d+.down.<out>", Replicate(), mesh="tp")
    plan.shard("<in:x>", Shard(0), mesh="dp")
    model = parallelize(Net(), plan)
    x = torch.ones(4, 6)
    model(x).backward()
    with comm_trace() as trace, record_comms() as ledger:
        model(x).backward()
    assert [o.op for o in trace.operations] == [r.op.removesuffix("_v") for r in ledger.records if r.num_ranks > 1]
    assert [o.bytes for o in trace.operations] == [r.bytes for r in ledger.records if r.num_ranks > 1]
    assert [o.axes for o in trace.operations] == [r.axes for r in ledger.records if r.num_ranks > 1]
    trace.assert_comms(all_reduce=3, axis="tp")
    found = [(o.module, o.phase) for o in trace.operations if o.axes == "tp"]
    assert found == [("blocks.0.down", "forward"), ("blocks.1.down", "forward"), ("blocks.0.down", "backward")], found
    assert all(o.ended is not None and o.ended >= o.began for o in trace.operations)
    assert trace.bytes("all_reduce", "tp") == sum(r.bytes for r in ledger.records if r.axes == "tp")
    with assert_comms(axis="tp", all_reduce=3, only=True):
        model(x).backward()
    with pytest.raises(CommBudgetError) as error, assert_comms(axis="tp", all_reduce=2):
        model(x).backward()
    text = str(error.value)
    for part in ("ran 3 all_reduce over axis 'tp', expected 2", "blocks.1.down.<out>", "Change the plan entry"):
        assert part in text, text
    with (
        pytest.raises(CommBudgetError, match=r"axes that were used are \['dp', "),
        assert_comms(axis="ep", all_reduce=1),
    ):
        model(x).backward()
    for part in ("blocks.0.down.<out>", "all_reduce", "tp"):
        assert part in str(trace)


def staged() -> None:
    """Of a pipeline: messages and what stages communicate inside name stage and micro-batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    plan = Plan(mesh).shard(r"blocks.\d+.up.(weight|bias)", Shard(0), mesh="tp")
    plan.shard(r"blocks.\d+.down.weight", Shard(1), mesh="tp").shard(r"blocks.\d+.down.<out>", Replicate(), mesh="tp")
    plan.pipeline(split_before=["blocks.1"], microbatches=2, loss="out")
    torch.manual_seed(0)
    model: Any = parallelize(Net(), plan)
    model.step(x=torch.ones(4, 6))
    with comm_trace(mesh) as trace:
        model.step(x=torch.ones(4, 6))
    stage, other = mesh.get_local_rank("pp"), 1 - mesh.get_local_rank("pp")
    messages = [o for o in trace.operations if o.axes == "pp" and o.op in ("send", "recv")]
    found = {(o.op, o.requester) for o in messages}
    words = {"send": "to", "recv": "from"}
    assert found == {
        (op, f"stage {stage}, micro-batch {n}: {word} stage {other}") for op, word in words.items() for n in range(2)
    }, found
    assert {o.peer for o in messages} == {mesh.mesh[other, mesh.get_local_rank("tp")].item()}
    inside = [(o.module, o.phase, o.stage) for o in trace.operations if o.axes == "tp" and o.phase == "forward"]
    assert inside == [(f"blocks.{stage}.down", "forward", f"stage {stage}, micro-batch {n}") for n in range(2)], inside
    assert f"(forward, stage {stage})" in str(trace)
    assert {e["args"]["stage"] for e in trace.events() if e["ph"] == "X"} > {inside[0][2], inside[1][2]}


def sharded() -> None:
    """A reduce-scatter is one, although gloo has none."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for part in model:
        fully_shard(part)
    fully_shard(model)
    model(torch.ones(2, 8)).sum().backward()
    with comm_trace() as trace:
        model(torch.ones(2, 8)).sum().backward()
    assert trace.count("reduce_scatter") == 2 and trace.count("all_gather") >= 2 and not trace.count("broadcast")
    assert {o.requester for o in trace.operations if o.op == "reduce_scatter"} == {"0", "1"}
    for group in {o.group for o in trace.operations}:
        numbers = [o.number for o in trace.operations if o.group == group]
        assert numbers == list(range(len(numbers))), "messages that one consists of have no numbers of their own"
    assert all(o.ended is not None for o in trace.operations), "they tell of their end when they are waited for"


def others() -> None:
    """Stock DTensor, functional collectives, DDP's C++ reducer, FSDP2, and user code, as CommDebugMode counts them."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ring",))
    x = torch.ones(4, 4, requires_grad=True)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    stock = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for part in (*stock, stock):
        stock_fully_shard(part, mesh=mesh)
    stock(x).sum().backward()
    with comm_trace(mesh) as trace:
        placed = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)], src_data_rank=None)
        placed.redistribute(placements=[Replicate()])
        functional.all_reduce(torch.ones(3), "sum", mesh.get_group()).sum().item()
        dist.all_reduce(torch.ones(2, dtype=torch.float64))
        dist.barrier()
        dist.broadcast(torch.ones(5), 0)
        ops = [o.op for o in trace.operations]
        assert ops == ["all_gather", "all_reduce", "all_reduce", "barrier", "broadcast"], ops
        assert [o.bytes for o in trace.operations] == [96, 18, 24, 0, 20]
        assert all("test_trace.py" in o.line and "(others)" in o.line for o in trace.operations)
        begin = len(ops)
        ddp(x).sum().backward()
        assert {o.op for o in trace.operations[begin:]} == {"all_reduce"}, "the reducer is C++"
        begin = len(trace.operations)
        stock(x).sum().backward()
        assert {o.op for o in trace.operations[begin:]} == {"all_gather", "reduce_scatter"}
        assert {o.module for o in trace.operations[begin:]} >= {"0", "1"}, [o.module for o in trace.operations[begin:]]
    begin_waiting = time.monotonic()
    trace.wait()
    assert time.monotonic() - begin_waiting < 5.0, "gloo's reduce-scatter never tells that it has ended"
    ended = [o.ended is not None for o in trace.operations[begin:]]
    assert all(ended[:-1]), "it has when the next one begins"
    with CommDebugMode() as stock_count, comm_trace(mesh) as trace:
        placed.redistribute(placements=[Replicate()])
        stock(x).sum().backward()
    assert trace.count() == stock_count.get_total_counts()


def off() -> None:
    """After the last trace no kernel is left, and nothing is collected."""
    key = "BackendSelect"
    with comm_trace() as outer:
        with comm_trace() as inner:
            dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
        assert torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", key)
    assert (outer.count(), inner.count()) == (2, 1)
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", key)
    dist.all_reduce(torch.ones(1))
    assert outer.count() == 2
    try:
        with comm_trace():
            raise ValueError
    except ValueError:
        pass
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", key)


def saved(path: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.barrier()  # other ranks may still be making the mesh's groups, with keys of theirs
    before = default_store().num_keys()
    dist.barrier()
    with comm_trace(mesh, save=path) as trace:
        for axis in range(2):
            dist.all_reduce(torch.ones(3), group=mesh.get_group(axis))
    assert trace.count(axis="dp") == trace.count(axis="tp") == 1
    dist.barrier()
    assert default_store().num_keys() <= before + 1


@pytest.mark.parametrize("case", [planned, staged, sharded, others, off], ids=lambda case: case.__name__)
def test_traces(ranks: RankPools, case: object) -> None:
    ranks.run(case)  # type: ignore[arg-type]


def test_one_timeline_of_all_ranks(ranks: RankPools, tmp_path: Path) -> None:
    path = tmp_path / "out" / "trace.json"
    ranks.run(saved, str(path))
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert sorted({event["pid"] for event in spans}) == [0, 1, 2, 3] and len(spans) == 8
    assert min(event["ts"] for event in spans) == 0 and all(event["dur"] >= 0 for event in spans)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert all(names[e["pid"], e["tid"]] == f"axis {e['args']['axis']}" for e in spans)
    # The two ranks of a tp group are in the same collective at some moment.
    tp = {e["pid"]: (e["ts"], e["ts"] + e["dur"]) for e in spans if e["args"]["axis"] == "tp"}
    assert max(tp[0][0], tp[1][0]) <= min(tp[0][1], tp[1][1])
