"""Mistyped calls: each line with a comment is an error for a type checker. Not run; tests/test_types.py reads it."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import vescale
from vescale.agreement import Round  # a private package
from vescale.checkpoint import Checkpointer
from vescale.runtime import device_of  # a private name


class Net(nn.Module):
    width: int = 4


def script(model: Net, mesh: DeviceMesh, plan: vescale.Plan) -> None:
    vescale.init_mseh("dp=2")  # a function's name
    vescale.init_mesh(["dp", 2])  # a list
    vescale.init_mesh("dp=2", devices="cpu")  # an argument's name
    plan.shrad("weight", Shard(0), mesh="dp")  # a method's name
    plan.shard("weight", Shard(0), mehs="dp")  # an argument's name
    plan.shard("weight", 0, mesh="dp")  # a number for a placement
    plan.shard(Shard(0), "weight", mesh="dp")  # swapped
    plan.shard("weight", Replicate(), mesh="dp", phase=1)  # a number for a phase
    plan.pipeline(split_before=["a"], microbatch=2)  # an argument's name
    plan.pipeline(split_before=["a"], microbatches="2")  # text for a number
    plan.checkpoint()  # no path
    plan.attention("a", method="ring", mehs="cp")  # an argument's name
    plan.unit("a", reshard_after=True)  # an argument's name
    plan.to_ymal()  # a method's name
    vescale.Plan.from_ymal("plan.yaml")  # a method's name
    vescale.Plan.from_yaml()  # no file
    vescale.plan_zoo.laod("llama", mesh)  # a function's name
    vescale.parallelize(model)  # no plan
    vescale.parallelize(plan, model)  # swapped
    vescale.parallelize(model, plan, stritc=True)  # an argument's name
    vescale.parallelize(model, plan, mode="statik")  # a value
    vescale.parallelize(model, plan).width.upper()  # the model's class is kept: an int
    vescale.lower(plan)  # no model
    vescale.no_sync()  # no model
    vescale.fully_shard(model, mehs=mesh)  # an argument's name
    vescale.ShardedBatchSampler(range(4), 2, mesh, "dp", shufle=True)  # an argument's name
    vescale.optim.AdamW9bit(model.parameters())  # a class's name
    vescale.optim.clip_grad_norm_(model.parameters(), max_nrom=1.0)  # an argument's name
    Checkpointer("run", kep=2)  # an argument's name
    Checkpointer("run").save(model=model)  # no step
    vescale.estimate(model, plan, btach={})  # an argument's name
    vescale.debug.monitor(model, evry=2)  # an argument's name
    vescale.static.reprot(model)  # a function's name
    vescale.RaggedShard(bloc=2)  # an argument's name
    print(Round, device_of)
