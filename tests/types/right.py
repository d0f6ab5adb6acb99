"""A script without mistakes, for a type checker. Not run; tests/test_types.py reads it."""

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import vescale
from vescale.checkpoint import Checkpointer
from vescale.fsdp import MixedPrecisionPolicy, fully_shard


class Net(nn.Module):
    width: int = 4


def script() -> int:
    mesh = vescale.init_mesh("dp=-1,tp=2")
    plan = vescale.Plan(mesh)
    plan.shard("<in:x>", Shard(0), mesh="dp").shard("up.weight", {"tp": Shard(0), "dp": Replicate()})
    plan.shard(".*", vescale.RaggedShard(), mesh="dp", phase=vescale.INIT)
    plan.checkpoint("up", "full")
    with vescale.deferred_init():
        model = Net()
    model = vescale.parallelize(model, plan, strict=True, mode="static")
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer("run", keep=2) as checkpoints, vescale.no_sync(model):
        checkpoints.save(1, model=model, optimizer=optimizer)
        found = checkpoints.restore(model=model, optimizer=optimizer)
    norm: torch.Tensor = vescale.optim.clip_grad_norm_(model.parameters(), 1.0)
    fully_shard(Net(), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    text: str = vescale.lower(plan, model).to_text()
    print(found, norm, text, vescale.plan_zoo.names(), vescale.report(model))
    return model.width
