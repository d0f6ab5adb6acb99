"""Precision entries: FSDP2's numbers on data-parallel plans, those of one device under the same casts on others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard

from tests.device import device_type
from tests.ranks import RankPools
from tests.runtime.hf import quiet
from tests.runtime.llama import make_llama, make_mesh, tensor_parallel
from tests.runtime.test_generate import build
from tests.whole import whole
from vescale import parallelize, plan_zoo
from vescale.ir import Program, Unit, check, lower
from vescale.placements import RaggedShard
from vescale.plans import Plan, PlanError
from vescale.static._forward import static_forward

BF16 = torch.bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """``is_tied``: two layers have one weight."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(8, 16), nn.ModuleList([Block(), Block()]), nn.Linear(16, 8)
        self.other = nn.Linear(16, 8, bias=False)
        if is_tied:
            self.other.weight = self.last.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) + self.other(x).square()


def net(is_tied: bool = True) -> Net:
    torch.manual_seed(0)
    with torch.device("cpu"):  # with its random numbers: how much bfloat16 loses depends on them
        made = Net(is_tied)
    return made.to(device_type())


def batches(steps: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def as_fsdp2(units: bool, reduce: torch.dtype | None) -> None:
    """Two ranks: a sum of two numbers has one order. Without units, gradients of a tied weight are added in float32, by
    FSDP2 in bfloat16."""
    mesh = make_mesh(dp=2)
    reference, model = net(units), net(units)
    plan = Plan(mesh).shard("<in:x>", Shard(0)).precision("", param=BF16, reduce=reduce, output=torch.float32)
    if units:
        plan.shard(".*", RaggedShard(), phase="init").shard(".*", Replicate(), phase="run")
    parallelize(model, plan)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce or BF16, output_dtype=torch.float32)
    fully_shard(reference, mesh=mesh, mp_policy=policy)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (reference, model)]
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    for x, y in batches(2):
        F.mse_loss(reference(x[mine]), y[mine]).backward()
        output = model(x)
        assert output.dtype == torch.float32
        F.mse_loss(output, y).backward()
        for (name, expected), found in zip(reference.named_parameters(), model.parameters(), strict=True):
            assert found.dtype == found.grad.dtype == torch.float32
            assert torch.equal(whole(expected.grad), whole(found.grad)), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("units", [False, True])
def test_numbers_of_fsdp2(ranks: RankPools, units: bool) -> None:
    """Gradients bit-equal in every step, reduced in either dtype and in the default, which is that of the computation."""
    for reduce in (BF16, torch.float32, None):
        ranks.run(as_fsdp2, units, reduce, world_size=2)


def cast_by_hand(model: nn.Module, dtypes: dict[str, torch.dtype]) -> nn.Module:
    """One device under the casts of precision entries for these paths (innermost wins)."""
    for path, module in model.named_modules():
        if path in dtypes:
            module.register_forward_pre_hook(lambda m, args, d=dtypes[path]: tuple(a.to(d) for a in args))
        around = [
            p for p in (path, *(path.rsplit(".", n)[0] for n in range(1, path.count(".") + 1)), "") if p in dtypes
        ]
        if not around:
            continue

        def show(m: nn.Module, args: Any, dtype: torch.dtype = dtypes[around[0]]) -> None:
            for name, parameter in m._parameters.items():
                if parameter is not None:
                    m.__dict__[name] = parameter.to(dtype)

        def hide(m: nn.Module, args: Any, output: Any) -> None:
            for name in m._parameters:
                m.__dict__.pop(name, None)

        module.register_forward_pre_hook(show)
        module.register_forward_hook(hide)
    return model


def nested(mode: str) -> None:
    """An inner entry wins, by regular expression, under tensor parallelism; also while blocks are recomputed."""
    mesh = make_mesh(dp=1, tp=2)
    reference = cast_by_hand(
        net(), {"": BF16, "blocks.0.norm": torch.float32, "blocks.1.norm": torch.float32, "last": torch.float32}
    )
    for block in reference.blocks:
        block.norm.register_forward_hook(lambda m, args, output: output.to(BF16))
    model = net()
    plan = Plan(mesh)
    plan.shard(r"blocks.\d.up.(weight|bias)", Shard(0), mesh="tp")
    plan.shard(r"blocks.\d.down.weight", Shard(1), mesh="tp")
    plan.shard(r"blocks.\d.up.<in>", Replicate(), mesh="tp").shard(r"blocks.\d.down.<out>", Replicate(), mesh="tp")
    plan.precision("", param="bfloat16", reduce="float32")
    plan.precision(r"blocks.\d+.norm", param=torch.float32, output=BF16).precision("last", param=torch.float32)
    parallelize(model, plan, strict=True, mode=mode)
    for x, _ in batches(2):
        for each in (reference, model):
            each.zero_grad()
        expected = reference(x)
        found = model(x)
        assert found.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(whole(found), expected, rtol=2e-2, atol=2e-2)
        expected.square().mean().backward()
        found.square().mean().backward()
        for (name, one), other in zip(reference.named_parameters(), model.parameters(), strict=True):
            assert other.grad.dtype == torch.float32
            scale = one.grad.abs().max().item()
            torch.testing.assert_close(whole(other.grad), one.grad, rtol=0, atol=0.03 * scale, msg=name)
        assert not any(name in vars(module) for module in model.modules() for name in ("weight", "bias"))
    if mode == "static":
        assert static_forward(model).fallbacks["the plan casts parameters, inputs or outputs of modules"] == 2


@pytest.mark.parametrize("mode", ["eager", pytest.param("static", marks=pytest.mark.helper("dispatch"))])
def test_inner_entries_win(ranks: RankPools, mode: str) -> None:
    ranks.run(nested, mode, world_size=2)


def test_as_data() -> None:
    """YAML, programs as JSON, units of the entry's dtypes, and mistakes."""
    mesh = {"dp": 2}
    plan = Plan(mesh).precision(r"blocks.\d", param=BF16, reduce="float32").precision("", output=torch.float32)
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert "blocks.\\d: {param: bfloat16, reduce: float32}" in plan.to_yaml()
    plan.shard(".*", RaggedShard(), phase="init").shard(".*", Replicate(), phase="run").shard("<in:x>", Shard(0))
    program = lower(plan, net())
    assert Program.from_json(program.to_json()) == program
    policies = {i.path: i.op.mp_policy for i in program if isinstance(i.op, Unit)}
    assert policies[""] is None
    assert policies["blocks.0"] == MixedPrecisionPolicy(BF16, torch.float32, cast_forward_inputs=False)
    for wrong, message in (
        ({}, "has no dtype"),
        ({"param": "int8"}, "use a floating-point dtype"),
        ({"reduce": "bf16"}, "use a floating-point dtype"),
    ):
        with pytest.raises(PlanError, match=message):
            Plan(mesh).precision("blocks.0", **wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="'float31' is not one of"):
        Plan.from_yaml("mesh: {dp: 2}\nprecision: {first: {param: float31}}\n")
    found = check(Plan(mesh).precision("frist", param=BF16), net())
    assert [f.rule for f in found if f.severity == "error"] == ["no-match"]
    both = Plan(mesh).precision("first", param=BF16).precision("fir.*", param=torch.float16)
    assert [f.rule for f in check(both, net()) if f.severity == "error"] == ["conflict"]


# Autocast


def autocast(kind: str) -> None:
    """Gradients as near to one device's in bfloat16 as the order of additions allows: some last bits of eight."""
    quiet()
    mesh = make_mesh(dp=1, tp=2)
    inputs: dict[str, Any] = {}
    if kind == "convnet":
        torch.manual_seed(0)
        model: Any = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 4, 3),
            nn.Flatten(),
            nn.Linear(64, 5),
        )
        plan = Plan(mesh).shard("0.weight", Shard(0), mesh="tp").shard("3.weight", Shard(1), mesh="tp")
        plan.shard("0.<in>", Replicate(), mesh="tp").shard("3.<out>", Replicate(), mesh="tp")
        plan.shard("1.(weight|bias|running_mean|running_var)", Shard(0), mesh="tp")
        inputs["input"] = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    else:
        model = make_llama(torch.float32) if kind == "llama" else build(kind).float().eval()
        plan = tensor_parallel(mesh) if kind == "llama" else plan_zoo.load(kind, mesh)
        ids = torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(1))
        inputs.update(input_ids=ids, labels=ids)
    reference = copy.deepcopy(model)
    parallelize(model, plan)
    losses = []
    for each in (reference, model):
        with torch.autocast(device_type(), dtype=BF16):
            output = each(**inputs)
            logits = output if kind == "convnet" else output.logits
            assert logits.dtype == BF16
            loss = logits.float().square().mean() if kind == "convnet" else output.loss
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    for (name, one), other in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert other.grad.dtype == one.grad.dtype == torch.float32
        error = (whole(other.grad) - one.grad).norm() / one.grad.norm().clamp(min=1e-6)
        assert error < 0.05, (name, error)


_SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt2", "mixtral")]


@pytest.mark.parametrize("kind", ["llama", "convnet", *_SLOW])
def test_autocast(ranks: RankPools, kind: str) -> None:
    ranks.run(autocast, kind, world_size=2)
