"""What the blocks of reference pages leave out: the model, the mesh, the data around the lines that a page is about.

``PRELUDES`` has, for a page, the code that stands before its blocks, ``SETUPS`` what stands before a certain block;
``ALONE`` has the blocks that need other code or other ranks than the rest of their page, ``RANKS`` the pages that need
another number of ranks than two.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ALONE", "BY_TESTS", "ELSEWHERE", "PRELUDES", "RANKS", "SETUPS", "WHOLE", "Alone"]


# Pages that are scripts, without a prelude.
WHOLE = ["all", "choose", "coming-from", "from-torchtitan", "how-to", "index", "questions"]
# page -> the test that runs it
ELSEWHERE = {
    "placements": "tests/placements/test_docs.py",
    "internals/upstream": "tests/compat/test_upstream.py",
    "internals/device": "tests/device/test_device.py",
}

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
    "internals/dispatch": _TRAINED
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
    "internals/planner": _COMMON
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

# (page, number of the block): what runs it, where neither of the above does
BY_TESTS = {("debug", 4): "tests/debug/test_breakpoint.py"}  # a terminal, and what is typed there


class Alone(NamedTuple):
    """A block that runs by itself: on how many ranks (0: in a process that starts jobs), behind and before which code."""

    ranks: int
    before: str
    after: str = ""


_LLAMA = """
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
"""

ALONE = {
    ("activation-checkpointing", 0): Alone(
        2,
        _COMMON
        + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x
class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Model()
    def forward(self, x):
        return self.model(x)
def gradients_of(*entry, **options):
    torch.manual_seed(0)
    with torch.random.fork_rng():
        model, whole = Outer(), Plan(mesh).shard("<in:x>", Shard(0), mesh="dp")
    if entry:
        whole.checkpoint(*entry, **options)
    parallelize(model, whole)(x).square().sum().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]
reference, found = gradients_of(), []
class Alternatives:  # a plan refuses several entries for one path: each line is a plan of its own
    def checkpoint(self, *entry, **options):
        found.append(gradients_of(*entry, **options))
plan = Alternatives()
""",
        "assert len(found) == 3 and all(map(torch.equal, sum(found, []), 3 * reference))",
    ),
    ("checkpoint-hf", 0): Alone(
        2,
        _COMMON
        + _LLAMA
        + """
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from vescale import deferred_init
config = LlamaConfig(num_hidden_layers=1, **sizes)
stock = LlamaForCausalLM(config)
if dist.get_rank() == 0:
    stock.save_pretrained("Llama-3-8B")
weights = {name: value.clone() for name, value in stock.state_dict().items()}
fully_shard(stock, mesh=mesh)
optimizer = torch.optim.AdamW(stock.parameters())
stock(input_ids=torch.arange(8).view(1, 8)).logits.sum().backward()
optimizer.step()
save(dict(zip(("model", "optimizer"), get_state_dict(stock, optimizer))), checkpoint_id="fsdp2-checkpoint")
trained = {name: value.full_tensor() for name, value in stock.state_dict().items()}
plan = plan_zoo.load("llama", vescale.init_mesh("dp=1,tp=2"))
built = []
def parallelize(model, plan):
    built.append(vescale.parallelize(model, plan))
    global optimizer
    optimizer = torch.optim.AdamW(model.parameters())
""",
        """
dist.barrier()
exported = LlamaForCausalLM.from_pretrained("trained").state_dict()
for name, value in weights.items():
    assert torch.equal(exported[name], value) and torch.equal(model.state_dict()[name].full_tensor(), trained[name]), name
assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
""",
    ),
    ("internals/dbuffer", 0): Alone(
        2,
        _COMMON
        + """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(8, 8), nn.Linear(8, 8)
block, lr = nn.ModuleDict({"attn": Attention()}), 0.5
for p in block.parameters():
    p.grad = torch.full_like(p, 1.0 + torch.distributed.get_rank())  # another one on each rank
""",
        """
whole = weights.all_gather().wait()
for name, p in block.named_parameters():
    torch.testing.assert_close(whole[name], p.detach() - 0.75)
assert pieces.norm().item() == 1.5 * 12  # of 144 elements
""",
    ),
    ("internals/dbuffer", 1): Alone(
        4,
        _COMMON
        + """
from vescale.buffer import DBuffer, TensorGroup
mesh = vescale.init_mesh("dp=2,cp=2,tp=1")
group = TensorGroup.plan({"weight": (8, 8)}, num_shards=4)
ones, allocate = torch.ones(8, 8), DBuffer.allocate
def filled(buffer):
    allocate(buffer)["weight"].copy_(ones)
    return buffer
DBuffer.allocate = filled
""",
        """
DBuffer.allocate = allocate
assert torch.equal(bucket["weight"], 4 * ones)
""",
    ),
    ("debug", 0): Alone(
        2,
        "import vescale; started = []; start = vescale.debug.hang_report\n"
        "vescale.debug.hang_report = lambda timeout: started.append(start(timeout))",
        "vescale.debug.hang_report = start; started[0].close()",
    ),
    ("debug", 1): Alone(
        2,
        _COMMON
        + """
mesh = vescale.init_mesh("tp=2")
model.blocks.extend(Block() for _ in range(2))  # four: an all-reduce each in forward and in backward
plan = Plan(mesh).shard(r"blocks.\\d.up.(weight|bias)", Shard(0), mesh="tp")
plan.shard(r"blocks.\\d.down.weight", Shard(1), mesh="tp").shard(r"blocks.\\d.down.<out>", Replicate(), mesh="tp")
model, inputs = parallelize(model, plan, strict=True), model
x.requires_grad_()
class Loss:
    def __call__(self, x):
        return inputs(x).sum()
model = Loss()
""",
        "import json; assert json.load(open('trace.json'))['traceEvents'] and 'blocks.3' in str(trace)",
    ),
    ("debug", 3): Alone(
        0,
        """
import vescale
from tests.debug.test_verify import IDS as ids, Net as build, plan_of as plan
""",
        "assert len(found.meshes) == 2",
    ),
    ("optimizers-matrix", 0): Alone(
        2,
        _COMMON
        + """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv_proj, self.c_attn = nn.Linear(8, 6144), nn.Linear(24, 8)
    def forward(self, x):
        return self.c_attn(self.qkv_proj(x)[..., :24])
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.attention, self.lm_head = nn.Embedding(8, 8), Attention(), nn.Linear(8, 8)
    def forward(self, ids):
        return self.lm_head(self.attention(self.embed_tokens(ids)))
model = Model()
before = {name: p.detach().clone() for name, p in model.named_parameters()}
vescale.fully_shard(model)
""",
        """
for p in model.parameters():
    p.grad = torch.ones_like(p)
optimizer.step()
assert not any(torch.equal(p.full_tensor(), before[name]) for name, p in model.named_parameters())
assert {group["algorithm"] for group in optimizer.param_groups} == {"muon", "adamw"}
""",
    ),
    ("pipeline", 0): Alone(
        8,
        _COMMON
        + _LLAMA
        + """
model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=17, **sizes))
ids = torch.arange(128).view(16, 8) % 64
labels = ids
expected = model(input_ids=ids, labels=ids).loss.item()
""",
        """
assert abs(loss.item() - expected) < 1e-5
assert model.step(input_ids=ids, labels=labels).item() < expected
""",
    ),
    ("placements-ops", 0): Alone(
        3,
        _COMMON
        + """
mesh, weight = vescale.init_mesh("dp=3"), torch.randn(8, 4)
parameters = [nn.Parameter(distribute_tensor(weight, mesh, [RaggedShard((0,), (5, 0, 3))]))]
parameters[0].square().sum().backward()
""",
        """
torch.testing.assert_close(y.full_tensor(), (weight * 2 + weight.exp()).clamp(max=1))
torch.testing.assert_close(nn.utils.get_total_norm([parameters[0].grad]).full_tensor(), torch.tensor(1.0))
assert torch.equal(x.flip(0).full_tensor(), weight.flip(0))
""",
    ),
    ("placements-ops", 1): Alone(4, ""),
}
