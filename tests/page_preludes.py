"""What the blocks of reference pages leave out: the model, the mesh, the data around the lines that a page is about.

``PRELUDES`` has, for a page, the code that stands before its blocks, ``SETUPS`` what stands before a certain block;
``NOT_RUN`` has the blocks that are only compiled, and why. ``RANKS``: pages that need another number of ranks than two.
"""

from __future__ import annotations

__all__ = ["ELSEWHERE", "NOT_RUN", "PRELUDES", "RANKS", "SETUPS", "WHOLE"]

# Pages that are scripts, without a prelude.
WHOLE = ["all", "choose", "coming-from", "how-to", "index", "questions"]
# page -> the test that runs it
ELSEWHERE = {"placements": "tests/placements/test_docs.py"}

_COMMON = """
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.data import DataLoader
import vescale
from vescale import ALL, INIT, RUN, InterleavedShard, Plan, RaggedShard, lower, parallelize, plan_layout, plan_zoo
from vescale.placements import distribute_tensor

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

torch.manual_seed(0)
mesh = vescale.init_mesh("dp=-1")
x = torch.randn(8, 8)
model = Net()
"""
_PLANNED = """
plan = Plan(mesh)
plan.shard("<in:x>", Shard(0), mesh="dp")
"""
_TRAINED = (
    _COMMON
    + _PLANNED
    + """
model = parallelize(model, plan)
optimizer = torch.optim.AdamW(model.parameters())
"""
)

PRELUDES = {
    "search": "",
    "checkpoint": _TRAINED
    + """
from vescale.optim import EMA
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
ema = EMA(model, 0.9)
batches = vescale.ShardedBatchSampler(range(64), 8, mesh, "dp")
range = lambda first, last: iter([first])
""",
    "checks": _COMMON
    + """
class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 8)
    def forward(self, tokens):
        return self.embed(tokens).sum()
dataset = torch.arange(128).view(64, 2) % 8
plan = Plan(mesh)
model = Embedded()
""",
    "dispatch": _TRAINED
    + """
def train_step():
    model(x).sum().backward()
    optimizer.step()
""",
    "estimate": "",
    "fsdp": _COMMON,
    "gradients": _COMMON
    + """
from types import SimpleNamespace
batches = [SimpleNamespace(first=x, second=x)]
optimizer = torch.optim.AdamW(model.parameters())
def loss(model, x):
    return model(x).square().mean()
""",
    "optimizers": _COMMON
    + """
from types import SimpleNamespace
class Loss(Net):
    def forward(self, x):
        return SimpleNamespace(loss=super().forward(x).square().mean())
model = Loss()
batches = [x]
def evaluate(model):
    model(x)
""",
    "planner": _COMMON
    + """
layer = nn.ModuleDict({"mlp": nn.ModuleDict({"up_proj": nn.Linear(256, 512, bias=False)})})
""",
    "plans": _COMMON,
    "rng": _COMMON
    + """
dtensor = distribute_tensor(x, mesh, [Shard(0)])
""",
    "static": _COMMON + _PLANNED,
    "debug": _TRAINED
    + """
loader, scheduler, loss = [x, x], torch.optim.lr_scheduler.ConstantLR(optimizer), torch.tensor(1.0)
""",
    "pipeline": _COMMON
    + """
from vescale.pipeline import make_schedule
class Loss(Net):
    def forward(self, x):
        return {"loss": super().forward(x).square().mean()}
model, batch = Loss(), {"x": x}
plan = Plan({"pp": 2})
""",
    "placements-checkpoint": _COMMON
    + """
import torch.distributed.checkpoint as dcp
values, other_mesh = torch.randn(12, 8), vescale.init_mesh("dp=2,tp=2")
""",
    "zoo": _COMMON
    + """
from torch.distributed.device_mesh import init_device_mesh
""",
}

# (page, number of the block): code before it
SETUPS = {
    ("plans", 2): 'mesh = {"dp": 2, "cp": 4}',
    ("zoo", 1): """
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from vescale.ir import coverage
mesh = vescale.init_mesh("dp=2,tp=2")
sizes = {"hidden_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 1, "num_experts": 4, "vocab_size": 64}
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8))
""",
    ("zoo", 2): "model = Net()",
    ("zoo", 3): """
mesh = {"dp": 1, "ep": 2, "tp": 2}
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8))
names = ("gate_up_proj", "down_proj")
model.get_parallel_plan = lambda: {"ep": {f"model.layers.*.mlp.experts.{name}": Shard(0) for name in names}}
""",
    ("zoo", 4): """
gate, rate = nn.Linear(2, 2), 0.01
gate.num_experts, gate.e_score_correction_bias = 4, torch.zeros(4)
counts = {gate: torch.arange(4)}
""",
}

RANKS = {"placements-checkpoint": 4, "zoo": 4}

# (page, number of the block): only compiled
NOT_RUN = {
    ("activation-checkpointing", 0): "three alternatives for one path, which a plan refuses together",
    ("checkpoint-hf", 0): "needs the weights of Llama-3-8B; tests/checkpoint/test_hf.py runs these calls",
    ("dbuffer", 0): "leaves out where gradients come from; tests/buffer/test_dbuffer.py",
    ("dbuffer", 1): "three axes; tests/buffer/test_dbuffer.py",
    ("debug", 0): "starts a watch for the rest of the process; tests/debug/test_hang_report.py",
    ("debug", 1): "counts the collectives of a larger model; tests/debug/test_trace.py",
    ("debug", 3): "starts jobs of its own; tests/debug/test_verify.py",
    ("debug", 4): "waits for a person; tests/debug/test_breakpoint.py",
    ("optimizers-matrix", 0): "needs a model with these names; tests/optim/test_muon.py",
    ("pipeline", 0): "eight devices; docs/tutorial/5-four-axes.md runs the same on two and four ranks",
    ("placements-ops", 0): "the uneven cut is one for three ranks; tests/ops",
    ("placements-ops", 1): "four ranks; tests/ops/test_register_rule.py runs it",
}
