"""Scripts, unmodified, as some ranks of jobs that do not exist. All run in one call, which loads torch once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from vescale.checkpoint import Checkpointer, verify
from vescale.simulation import Job, Simulation, simulate_jobs

_HEAD = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
assert (rank, world) == (dist.get_rank(), dist.get_world_size())
x = torch.full((4,), float(rank), device="cuda")
"""

SCRIPTS = {
    # Values that programs branch on: of ranks that run, and of rank 0, which is run because others need it.
    "values": """
dist.all_reduce(x)
objects = [None] * world
dist.all_gather_object(objects, {"rank": rank})
box = [{"seed": 17} if rank == 0 else None]
dist.broadcast_object_list(box, src=0)
flag = torch.tensor([rank])
dist.all_reduce(flag, op=dist.ReduceOp.MAX)
if rank == 62:
    dist.send(torch.tensor([7]), 63)
message = torch.zeros(1, dtype=torch.long)
if rank == 63:
    dist.recv(message, 62)
print(json.dumps([x.tolist(), objects[rank], objects[62], box, flag.item(), message.item()]) if rank >= 62 else "")
""",
    "branch": "if rank == 0:\n    dist.all_reduce(x)\ndist.barrier()\n",
    "orders": """
a = init_device_mesh("cuda", (2, 32), mesh_dim_names=("dp", "tp"))
b = init_device_mesh("cuda", (2, 32), mesh_dim_names=("pp", "cp"))
meshes = [a, b] if rank < 32 else [b, a]
for mesh in meshes:
    dist.all_reduce(x, group=mesh.get_group(0))
""",
    "leaves": "for step in range(3 if rank else 2):\n    dist.all_reduce(x)\n",
    "raises": "if rank == 1:\n    raise ValueError('no data')\ndist.barrier()\n",
    "sleeps": "import time\nif rank == 1:\n    time.sleep(600)\ndist.barrier()\n",
    "key": "dist.distributed_c10d._get_default_store().get('from nobody')\n",
    "sizes": "model = torch.nn.Linear(8192, 8192, bias=False).cuda()\noptimizer = torch.optim.AdamW(model.parameters())\n"
    "for _ in range(3):\n    model(torch.ones(2, 8192, device='cuda')).sum().backward()\n    optimizer.step()\n"
    "    optimizer.zero_grad()\n",
    "sharded": """
import vescale
mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("dp",))
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(2)])
for layer in model:
    vescale.fully_shard(layer, mesh=mesh)
vescale.fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 1024)).sum().backward()
optimizer.step()
""",
    "bytes": """
x = torch.randn(1 << 19)
dist.all_reduce(x)
dist.all_gather([torch.empty(1 << 19) for _ in range(world)], x)
dist.all_gather_into_tensor(torch.empty(world << 19), x)
dist.reduce_scatter_tensor(torch.empty(1 << 19), torch.randn(world << 19))
dist.all_to_all_single(torch.empty(1 << 19), x)
dist.broadcast(x, 0)
""",
    "checkpoints": """
import torch.distributed.checkpoint as dcp
import vescale
folder = sys.argv[1]
mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("dp",))
model = torch.nn.Linear(64, 64)
vescale.fully_shard(model, mesh=mesh)
with vescale.checkpoint.Checkpointer(folder) as checkpoints:
    found = checkpoints.restore(model=model)
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
    checkpoints.save(8, model=model, note="simulated")
vescale.checkpoint.save(folder + "/step-7", model=model, overwrite=True)
torch.save(model.state_dict(), folder + "/model.pt")
dcp.save({"model": model.state_dict()}, checkpoint_id=folder + "/dcp")
dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder + "/dcp").result()
dcp.load({"model": model.state_dict()}, checkpoint_id=folder + "/dcp")
print(json.dumps(folder))
print(json.dumps([found, checkpoints.steps()]))
""",
    "stages": """
import vescale
mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("pp",))
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
def loss(output, batch):
    return output.sum(), output.numel()
plan = vescale.Plan(mesh).pipeline(split_before=["1", "2", "3"], mesh="pp", schedule="1F1B", microbatches=4, loss=loss)
model = vescale.parallelize(model, plan)
model.step(input=torch.ones(8, 512))
""",
}
SCRIPTS["groups"] = """
if rank == 0:
    dist.new_group([0, 1])
own = [dist.new_group([r, r + 1]) for r in (0, 2)][rank // 2]
dist.all_reduce(x, group=own)
"""
SCRIPTS["own groups"] = "dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1])\n"
SCRIPTS["all groups"] = "for r in (0, 2):\n    dist.new_group([r, r + 1])\ndist.new_group([rank])\n"
SCRIPTS["one gathers"] = """
made = [torch.empty(2) for _ in range(world)] if rank == 0 else None
dist.gather(torch.ones(2), made, dst=0)
objects = [None] * world if rank == 0 else None
dist.gather_object({"rank": rank}, objects, dst=0)
print(json.dumps(objects))
"""
SCRIPTS["from anybody"] = """
for _ in range(2 if rank == 0 else 0):
    assert dist.recv(x) != rank
if rank in (1, 2):
    dist.send(x, 0)
"""
SCRIPTS["replicas"] = """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    with model.no_sync() if step == 0 else contextlib.nullcontext():
        model(torch.ones(2, 64)).sum().backward()
"""
SCRIPTS["fewer batches"] = SCRIPTS["replicas"].replace("range(3)", "range(3 if rank else 2)")
SCRIPTS["plans"] = """
import vescale
from torch.distributed.tensor import Shard
mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("tp",))
plan = vescale.Plan(mesh).shard("weight", Shard(0 if rank != 1 else 1), mesh="tp")
vescale.parallelize(torch.nn.Linear(32, 32), plan)
"""
JOBS = {
    "plans": (4, [0, 1, 2]),
    "replicas": (64, [0, 63]),
    "fewer batches": (64, [0, 63]),
    "one gathers": (3, [0, 1, 2]),
    "from anybody": (4, [0, 1, 2, 3]),
    "groups": (4, [0, 1, 2, 3]),
    "own groups": (4, [0, 1, 2, 3]),
    "all groups": (4, [0, 1, 2, 3]),
    "values": (64, [62, 63]),
    "branch": (64, [0, 1, 63]),
    "orders": (64, [0, 32]),
    "leaves": (4, [0, 1, 2, 3]),
    "raises": (2, [0, 1]),
    "sleeps": (2, [1]),
    "key": (2, [1]),
    "sizes": (1, [0]),
    "sharded": (1024, [0, 511]),
    "bytes": (4, [0, 1]),
    "checkpoints": (64, [0, 63]),
    "stages": (4, [3]),
}


@pytest.fixture(scope="module")
def simulations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Simulation]:
    folder = tmp_path_factory.mktemp("scripts")
    with Checkpointer(folder / "kept") as checkpoints:
        checkpoints.save(7, model=nn.Linear(64, 64), note="real")
    (folder / "kept" / "model.pt").write_text("real")
    jobs = []
    for name, (world_size, ranks) in JOBS.items():
        path = folder / f"{name}.py"
        path.write_text(_HEAD + "import contextlib, json\n" + SCRIPTS[name])
        jobs.append(Job(path, (str(folder / "kept"),), world_size, ranks, timeout=6.0 if name == "sleeps" else 300.0))
    return dict(zip(JOBS, simulate_jobs(jobs)))


def texts(simulation: Simulation) -> str:
    return "\n".join([*(f.text for f in simulation.findings), *simulation.logs.values()])


def test_values_of_simulated_ranks(simulations: dict[str, Simulation]) -> None:
    found = simulations["values"]
    assert not found.findings, texts(found)
    assert sorted(found.ranks) == [0, 62, 63]  # rank 0 broadcasts objects
    last = json.loads(found.logs[63].strip().splitlines()[-1])
    assert last[1:] == [{"rank": 63}, {"rank": 62}, [{"seed": 17}], 63, 7]
    assert [one.op for one in found.ranks[63].collectives][-1] == "recv"


def test_a_branch_of_one_rank_is_a_mismatch(simulations: dict[str, Simulation]) -> None:
    (finding,) = simulations["branch"].findings
    assert finding.kind == "mismatch" and finding.ranks == [0, 1, 63]
    assert "rank 0 calls all_reduce" in finding.text and "branch.py:11" in finding.text
    assert "ranks [1, 63] call barrier" in finding.text and "branch.py:12" in finding.text


def test_groups_in_another_order_are_a_deadlock(simulations: dict[str, Simulation]) -> None:
    """Two meshes of one shape are kept apart: their groups span the same ranks."""
    (finding,) = simulations["orders"].findings
    assert finding.kind == "deadlock", texts(simulations["orders"])


def test_plans_that_differ(simulations: dict[str, Simulation]) -> None:
    """Ranks of a run compare plans before the first collective, and all of them raise."""
    (finding,) = simulations["plans"].findings
    assert finding.kind == "mismatch" and "parallelize(Linear, plan) of ranks [0, 1, 2, 3]" in finding.text
    assert "they differ: 'shard weight' of plan is placements={tp: S(0)}" in finding.text
    assert "on ranks [0, 2] and placements={tp: S(1)}" in finding.text and finding.text.endswith("on rank 1")


def test_data_parallel_of_torch(simulations: dict[str, Simulation]) -> None:
    found = simulations["replicas"]
    assert not found.findings, texts(found)
    buckets = [one.bytes for one in found.ranks[0].collectives if one.op == "all_reduce"]
    assert buckets == [2 * 63 * (64 * 64 + 64) * 4 // 64] * 2, "none in no_sync()"
    (finding,) = simulations["fewer batches"].findings
    assert finding.kind == "never-comes" and "rank 0 ended without it" in finding.text


def test_what_one_rank_gathers(simulations: dict[str, Simulation]) -> None:
    found = simulations["one gathers"]
    assert not found.findings, texts(found)
    assert json.loads(found.logs[0].strip().splitlines()[-1]) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


def test_receives_from_any_rank(simulations: dict[str, Simulation]) -> None:
    assert not simulations["from anybody"].findings


def test_groups_that_some_ranks_make(simulations: dict[str, Simulation]) -> None:
    """gloo and NCCL connect the ranks of a group by its name, which counts the groups that a rank has made."""
    finding = simulations["groups"].findings[0]
    assert "rank 0 calls new_group of ranks [0, 1] at" in finding.text and "on all ranks" in finding.text
    (finding,) = simulations["own groups"].findings
    assert finding.kind == "mismatch" and "their groups have the same name" in finding.text
    assert not simulations["all groups"].findings
    assert all(not one.collectives for one in simulations["all groups"].ranks.values())


def test_a_rank_that_leaves_early(simulations: dict[str, Simulation]) -> None:
    (finding,) = simulations["leaves"].findings
    assert finding.kind == "never-comes" and "rank 0 ended without it" in finding.text


def test_an_error_names_line_and_waiters(simulations: dict[str, Simulation]) -> None:
    (finding,) = simulations["raises"].findings
    assert finding.kind == "error" and finding.ranks == [1] and "raises.py:11" in finding.at
    assert "ValueError: no data" in finding.text and "rank 0 would wait for it in barrier" in finding.text


def test_a_rank_that_does_not_end(simulations: dict[str, Simulation]) -> None:
    (finding,) = simulations["sleeps"].findings
    assert finding.kind == "error" and "has not ended after 6 seconds" in finding.text and "sleeps.py:12" in finding.at


def test_a_key_that_nobody_sets(simulations: dict[str, Simulation]) -> None:
    (finding,) = simulations["key"].findings
    assert finding.kind == "never-comes" and "from nobody" in finding.text and "key.py:10" in finding.at


def test_bytes_of_large_collectives(simulations: dict[str, Simulation]) -> None:
    """Those that a rank receives, and where in the script, though nothing of these tensors is computed or moved."""
    found = simulations["bytes"].to_json()
    assert not found["findings"]
    size = 4 << 19
    for rank in ("0", "1"):
        calls = found["ranks"][rank]["collectives"]
        assert [c["bytes"] for c in calls] == [3 * size // 2, 3 * size, 3 * size, 3 * size, 3 * size // 4, size]
        assert [Path(c["site"].split()[0]).name for c in calls] == [f"bytes.py:{n}" for n in range(12, 18)]


def test_memory_by_category(simulations: dict[str, Simulation]) -> None:
    """Those of the estimator."""
    found = simulations["sizes"]
    assert not found.findings, texts(found)
    categories, weight = found.ranks[0].categories, 8192 * 8192 * 4
    assert categories["parameters"] == categories["gradients"] == weight
    assert 2 * weight <= categories["optimizer"] < 2 * weight + 1024
    assert sum(categories.values()) == found.ranks[0].peak_bytes


def test_fully_shard(simulations: dict[str, Simulation]) -> None:
    found = simulations["sharded"]
    assert not found.findings, texts(found)
    record = found.ranks[511]
    ops = [one.op for one in record.collectives]
    assert ops.count("all_gather") >= 2 and ops.count("reduce_scatter") == 2, ops
    weight = 1024 * 1024 * 4
    assert {one.bytes for one in record.collectives if one.op == "all_gather"} == {weight * 1023 // 1024}
    assert record.collectives[0].axis == "dp" and len(record.collectives[0].ranks) == 1024
    assert record.categories["unsharded"] >= weight and record.categories["parameters"] == 2 * weight // 1024
    assert record.host_seconds > 0


def test_pipelines(simulations: dict[str, Simulation]) -> None:
    """A stage learns what it receives from the one before, which is simulated, too."""
    found = simulations["stages"]
    assert not found.findings, texts(found)
    assert sorted(found.ranks) == [0, 1, 2, 3]
    kinds = [one.op for one in found.ranks[1].collectives]
    assert kinds.count("send") == kinds.count("recv") >= 8  # four micro-batches, two directions
    whole = 4 * 513 * 512 * 4  # bytes of the model before parallelize, whose trace is no forward
    assert all(one.peak_bytes < whole and one.peak_at.startswith("backward") for one in found.ranks.values())


def test_checkpoints_of_real_runs_are_left_alone(simulations: dict[str, Simulation]) -> None:
    found = simulations["checkpoints"]
    assert not found.findings, texts(found)
    for log in found.logs.values():
        assert json.loads(log.splitlines()[-1]) == [{"step": 7, "note": "real"}, [7]]
    folder = Path(json.loads(next(iter(found.logs.values())).splitlines()[-2]))
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) == [
        "latest",
        "model.pt",
        "step-7",
    ]
    assert verify(folder) == [] and (folder / "model.pt").read_text() == "real"
    with Checkpointer(folder) as checkpoints:
        found = checkpoints.restore()
    assert found == {"step": 7, "note": "real"}
    gathers = [c.op for c in simulations["checkpoints"].ranks[0].collectives]
    assert gathers.count("barrier") == 3  # of DCP's three calls, for which every rank has to come


def test_json(simulations: dict[str, Simulation]) -> None:
    data = json.loads(json.dumps(simulations["branch"].to_json()))
    assert list(data) == ["ranks", "findings"] and list(data["ranks"]) == ["0", "1", "63"]
    rank = data["ranks"]["0"]
    assert {"collectives", "peak_bytes", "host_seconds"} <= rank.keys()
    assert list(rank["collectives"][0]) == ["op", "axis", "ranks", "bytes", "site"]
    assert list(data["findings"][0]) == ["kind", "ranks", "at", "text"]


def test_wrong_jobs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no script"):
        simulate_jobs([Job(tmp_path / "no.py")])
    (tmp_path / "a.py").write_text("")
    with pytest.raises(ValueError, match=r"ranks \[4\] are not ranks of a job of 4"):
        simulate_jobs([Job(tmp_path / "a.py", world_size=4, ranks=[4])])
