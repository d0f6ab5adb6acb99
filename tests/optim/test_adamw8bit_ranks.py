"""AdamW8bit on gloo ranks: engines, plans, gradients that are missing or not finite, checkpoints onto other meshes."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.device import device_type
from tests.optim.meshes import communicated
from tests.optim.small_llama import small_llama
from tests.optim.test_adamw8bit import assert_same, gradient
from tests.ranks import RankPools
from tests.whole import whole_tensors
from vescale import parallelize
from vescale.comm import record_comms
from vescale.fsdp import fully_shard
from vescale.optim import AdamW8bit, adamw8bit_layout, clip_grad_norm_, report
from vescale.placements import RaggedShard, distribute_tensor
from vescale.plans import INIT, RUN, Plan


class Net(nn.Module):
    """Large and small parameters, a head of one row, a tied one, a frozen one, one without a dim, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 96)
        self.up = nn.Linear(96, 512)
        self.down = nn.Linear(512, 96, bias=False)
        self.out = nn.Linear(96, 64, bias=False)
        self.out.weight = self.embed.weight
        self.score = nn.Linear(96, 1)
        self.frozen = nn.Parameter(torch.randn(96, 64), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Linear(96, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.scale * self.down(torch.tanh(self.up(x)))
        logits = self.out(x)
        return logits.logsumexp(-1).mean() + self.score(x).square().mean() - logits.diagonal(dim1=-2, dim2=-1).mean()


def run_all(cases: list[Any]) -> None:
    for case, arguments in cases:
        try:
            case(*arguments)
        except Exception as error:
            error.add_note(f"case {case.__name__}{arguments}")
            raise


def model_of() -> Net:
    torch.manual_seed(0)
    return Net()


def sharded(kind: str, model: Any = None) -> Any:
    model, world = model if model is not None else model_of(), dist.get_world_size()
    policy = adamw8bit_layout()
    if kind == "plain":
        return model
    if kind == "hsdp":
        mesh = init_device_mesh(device_type(), (2, world // 2), mesh_dim_names=("replicate", "shard"))
        for module in (model.up, model.down, model):
            fully_shard(module, mesh=mesh, orig_param_policy=policy)
    elif kind == "tp":
        mesh = init_device_mesh(device_type(), (2, world // 2), mesh_dim_names=("fsdp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for module in (model.up, model.down, model):
            fully_shard(module, mesh=mesh["fsdp"], orig_param_policy=policy)
    elif kind == "stock":  # 64 rows of 96, 512 rows of 96, 96 of 512: chunks of whole blocks
        stock_fully_shard(model, mesh=init_device_mesh(device_type(), (world,)), ignored_params={model.scale})
    elif kind == "plan":
        mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("dp",))
        plan = Plan(mesh)
        plan.shard(".*", RaggedShard(block=256), mesh="dp", phase=INIT)
        plan.shard(".*", Replicate(), mesh="dp", phase=RUN)
        parallelize(model, plan)
    else:
        mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("dp",))
        fully_shard(model, mesh=mesh, orig_param_policy=policy)
    return model


def set_gradients(model: nn.Module, step: int) -> None:
    """The same on every mesh; the unused layer has none."""
    for name, p in model.named_parameters():
        if not p.requires_grad or "unused" in name:
            continue
        whole = gradient(tuple(p.shape), step)
        if isinstance(p, DTensor):
            p.grad = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
        else:
            p.grad = whole


def everything(model: nn.Module, optimizer: AdamW8bit) -> dict[Any, Any]:
    found = {name: p.detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            found[f"{name}.{key}"] = value
    return {name: value.clone() for name, value in whole_tensors(found).items()}  # type: ignore[union-attr]


def train(model: nn.Module, steps: range, **options: Any) -> AdamW8bit:
    optimizer = AdamW8bit(model.named_parameters(), lr=1e-2, **options)
    for step in steps:
        set_gradients(model, step)
        clip_grad_norm_(model.parameters(), 1e3)
        with record_comms() as ledger:
            optimizer.step()
        assert not communicated(ledger)
    return optimizer


def equal_gradients(kind: str) -> None:
    one = model_of()
    expected = everything(one, train(one, range(20)))
    model = sharded(kind)
    assert_same(expected, everything(model, train(model, range(20))))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(torch.randint(64, (4, 64), generator=torch.Generator().manual_seed(step)))


def real_gradients(kind: str, steps: int) -> None:
    """Losses of the same batches; every rank has a quarter of each under ``fully_shard``."""
    one, model = model_of(), sharded(kind)
    optimizers = [
        AdamW8bit(one.parameters(), lr=1e-3, weight_decay=0.1),
        AdamW8bit(model.parameters(), lr=1e-3, weight_decay=0.1),
    ]
    for step in range(steps):
        losses = [loss_of(one, step), loss_of(model, step)]
        for loss, optimizer in zip(losses, optimizers):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found = losses[1].full_tensor() if isinstance(losses[1], DTensor) else losses[1]
        assert abs(float(found) - float(losses[0])) < 1e-4, (step, found, losses[0])


def test_engines_on_four_ranks(ranks: RankPools) -> None:
    ranks.run(
        run_all,
        [(equal_gradients, (kind,)) for kind in ("fsdp", "hsdp", "tp", "stock", "plan")]
        + [(real_gradients, (kind, 10)) for kind in ("tp", "plan")],
        world_size=4,
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_engines(ranks: RankPools, world_size: int) -> None:
    ranks.run(run_all, [(equal_gradients, (kind,)) for kind in ("fsdp", "plan")], world_size=world_size)


def save(kind: str, folder: str) -> None:
    model = sharded(kind)
    optimizer = train(model, range(3))
    dcp.save(
        {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=folder,
    )


def load(kind: str, folder: str) -> None:
    one = model_of()
    expected = train(one, range(3))
    model = sharded(kind)
    optimizer = AdamW8bit(model.named_parameters(), lr=1e-2)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert_same(everything(one, expected), everything(model, optimizer))
    for step in range(3, 6):
        for module, chosen in ((one, expected), (model, optimizer)):
            set_gradients(module, step)
            chosen.step()
    assert_same(everything(one, expected), everything(model, optimizer))


def full_state_dicts(kind: str) -> None:
    model = sharded(kind)
    optimizer = train(model, range(2))
    options = StateDictOptions(full_state_dict=True)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    other = sharded(kind)
    set_model_state_dict(other, get_model_state_dict(model, options=options), options=options)
    resumed = AdamW8bit(other.named_parameters(), lr=1e-2)
    set_optimizer_state_dict(other, resumed, saved, options=options)
    assert_same(everything(model, optimizer), everything(other, resumed))
    assert resumed.state[other.get_parameter("down.weight")]["exp_avg"].dtype == torch.uint8
    third = AdamW8bit(other.named_parameters(), lr=1e-2)
    third.load_state_dict(optimizer.state_dict())
    assert_same(everything(model, optimizer), everything(other, third))


@pytest.mark.parametrize(
    "first, second", [(("tp", 4), ("fsdp", 3)), (("fsdp", 3), ("hsdp", 4)), (("plan", 2), ("tp", 4))]
)
def test_checkpoints_onto_other_meshes(ranks: RankPools, tmp_path: Path, first: Any, second: Any) -> None:
    ranks.run(save, first[0], str(tmp_path), world_size=first[1])
    ranks.run(load, second[0], str(tmp_path), world_size=second[1])


def test_full_state_dicts(ranks: RankPools) -> None:
    ranks.run(run_all, [(full_state_dicts, (kind,)) for kind in ("fsdp", "stock", "plan")], world_size=2)


def missing_gradients() -> None:
    """Zeros where they are missing, if one rank has one; nothing where none has."""
    mesh, rank = init_device_mesh(device_type(), (4,)), dist.get_rank()
    torch.manual_seed(0)
    values = [torch.randn(64, 64), torch.randn(64, 64), torch.randn(6)]
    plain = [nn.Parameter(v.clone()) for v in values]
    params = [nn.Parameter(distribute_tensor(v.clone(), mesh, [Shard(0)], src_data_rank=None)) for v in values]
    optimizers = AdamW8bit(plain), AdamW8bit(params)
    for step in range(6):
        for index, (p, q) in enumerate(zip(plain, params)):
            whole = gradient(p.shape, step)
            part = distribute_tensor(whole.clone(), mesh, [Shard(0)], src_data_rank=None)
            absent: set[int] = set()
            if index == 0:
                absent = {step % 4}
            elif index == 1 and step in (2, 4):
                absent = {0, 1, 2, 3}
            elif index == 2 and step == 3:
                absent = {0, 1, 2}
            q.grad = None if rank in absent else part
            rows = torch.zeros_like(whole)
            for other in {0, 1, 2, 3} - absent:
                size = -(-len(whole) // 4)
                rows[other * size : (other + 1) * size] = whole[other * size : (other + 1) * size]
            p.grad = None if len(absent) == 4 else rows
        with record_comms() as ledger:
            for optimizer in optimizers:
                optimizer.step()
        assert not communicated(ledger)
        for p, q in zip(plain, params):
            assert torch.equal(q.full_tensor(), p), step
            assert optimizers[0].state[p]["step"] == optimizers[1].state[q]["step"]


def missing_on_replicas() -> None:
    mesh = init_device_mesh(device_type(), (2, 2))
    p = nn.Parameter(distribute_tensor(torch.randn(64, 64), mesh, [Replicate(), Shard(0)], src_data_rank=None))
    before = p.to_local().clone()
    optimizer = AdamW8bit([("w", p)])
    if mesh.get_coordinate()[0] == 0:
        p.grad = distribute_tensor(torch.ones(64, 64), mesh, p.placements, src_data_rank=None)
        optimizer.step()
        assert not torch.equal(p.to_local(), before)
    else:
        with pytest.raises(
            ValueError, match=r"parameter w of shape \(64, 64\).*no gradient on rank [23].*on ranks \[[01]\]"
        ):
            optimizer.step()
        assert torch.equal(p.to_local(), before)


def pending_gradients() -> None:
    """Contributions are summed first, those of ranks without a gradient are zero."""
    mesh, rank = init_device_mesh(device_type(), (4,)), dist.get_rank()
    p = nn.Parameter(distribute_tensor(torch.ones(64, 64), mesh, [Replicate()], src_data_rank=None))
    q = nn.Parameter(torch.ones(64, 64))
    optimizers = AdamW8bit([p]), AdamW8bit([q])
    from torch.distributed.tensor import Partial

    if rank != 2:
        p.grad = DTensor.from_local(torch.full((64, 64), float(rank)), mesh, [Partial()])
    q.grad = torch.full((64, 64), 4.0)
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(p.to_local(), q)


def nonfinite_gradients() -> None:
    mesh, rank = init_device_mesh(device_type(), (4,)), dist.get_rank()
    torch.manual_seed(0)
    params = [
        nn.Parameter(distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)], src_data_rank=None)),
        nn.Parameter(distribute_tensor(torch.randn(3), mesh, [Shard(0)], src_data_rank=None)),
    ]
    optimizer = AdamW8bit(params, skip_nonfinite=True)
    for step in range(4):
        for p in params:
            p.grad = distribute_tensor(gradient(p.shape, step), mesh, [Shard(0)], src_data_rank=None)
        bad = step in (1, 3)
        if bad and rank == step:
            params[0].grad.to_local()[0, 0] = math.nan if step == 1 else -math.inf
        before = [[p.detach().to_local().clone() for p in params], copy.deepcopy(optimizer.state_dict()["state"])]
        with record_comms() as ledger:
            optimizer.step()
        assert [(record.op, record.bytes <= 8) for record in communicated(ledger)] == [("all_reduce", True)]
        after = [[p.to_local() for p in params], optimizer.state_dict()["state"]]
        if bad:
            for name in ("exp_avg", "exp_avg_max"):
                assert torch.equal(before[1][0][name].to_local(), after[1][0][name].to_local())
        same = all(torch.equal(a, b) for a, b in zip(before[0], after[0]) if a.numel())
        assert same == bad
        assert optimizer.state[params[0]]["step"] == (1, 1, 2, 2)[step]


def test_gradients_that_are_missing_or_bad(ranks: RankPools) -> None:
    ranks.run(
        run_all,
        [(missing_gradients, ()), (missing_on_replicas, ()), (pending_gradients, ()), (nonfinite_gradients, ())],
        world_size=4,
    )


def accumulation_and_late_parameters() -> None:
    """Two backwards before a step; a parameter group that is added later; what was frozen is trained."""
    one, model = model_of(), sharded("plan")
    optimizers = [AdamW8bit(m.embed.parameters(), lr=1e-2) for m in (one, model)]
    for m, optimizer in zip((one, model), optimizers):
        optimizer.add_param_group({"params": list(m.up.parameters()), "lr": 1e-3})
        optimizer.add_param_group({"params": [m.frozen]})
    for step in range(4):
        for m, optimizer in zip((one, model), optimizers):
            if step == 2:
                m.frozen.requires_grad_()
            set_gradients(m, step)
            kept = [p.grad.clone() for p in m.parameters() if p.grad is not None]
            set_gradients(m, step + 100)
            for p, g in zip([p for p in m.parameters() if p.grad is not None], kept):
                p.grad += g
            optimizer.step()
    assert_same(everything(one, optimizers[0]), everything(model, optimizers[1]))
    assert float(optimizers[1].state[model.frozen]["step"]) == 2


def state_bytes() -> None:
    model = sharded("fsdp")
    optimizer = AdamW8bit(model.named_parameters())
    planned = report(optimizer).parameters
    for p, one in zip(optimizer.param_groups[0]["params"], planned, strict=True):
        state = optimizer.state.get(p, {})
        held = sum((v.to_local() if isinstance(v, DTensor) else v).nbytes for v in state.values())
        assert one.state_bytes == held and one.step_bytes == 0 and one.owner is None
    assert [one.name for one in planned] == [name for name, _ in model.named_parameters()]


def test_interface_on_ranks(ranks: RankPools) -> None:
    ranks.run(run_all, [(accumulation_and_late_parameters, ()), (state_bytes, ())], world_size=2)


def same_error_everywhere() -> None:
    model = model_of()
    fully_shard(model, mesh=init_device_mesh(device_type(), (3,)))
    with pytest.raises(ValueError, match="must not be divided") as error:
        AdamW8bit(model.named_parameters())
    texts: list[Any] = [None] * 3
    dist.all_gather_object(texts, str(error.value))
    assert len(set(texts)) == 1
    fully_shard(again := model_of(), mesh=init_device_mesh(device_type(), (3,)), orig_param_policy=adamw8bit_layout())
    AdamW8bit(again.parameters())


def test_cut_blocks_are_refused_on_all_ranks(ranks: RankPools) -> None:
    ranks.run(same_error_everywhere, world_size=3)


def llama_losses(steps: int) -> None:
    """A small Llama on one device and with a unit for each layer, trained on the same tokens."""
    vocab_size = 1024
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    one, model = small_llama(vocab_size), small_llama(vocab_size)
    plan = Plan(mesh)
    plan.shard("<in:input_ids>", Shard(0), mesh="dp")
    plan.shard("<in:labels>", Shard(0), mesh="dp")
    plan.shard(".*", RaggedShard(block=256), mesh="dp", phase=INIT)
    plan.shard(".*", Replicate(), mesh="dp", phase=RUN)
    parallelize(model, plan)
    # With eps=1e-8 a last bit of a gradient that moves a code to zero shows (docs/optimizers.md).
    optimizers = [AdamW8bit(m.parameters(), lr=3e-5, eps=1e-6) for m in (one, model)]
    for step in range(steps):
        starts = torch.randint(vocab_size, (4, 1), generator=torch.Generator().manual_seed(step))
        ids = (starts + 3 * torch.arange(32)) % vocab_size
        losses = []
        for m, optimizer in zip((one, model), optimizers):
            optimizer.zero_grad()
            loss = m(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses.append(float(loss.full_tensor() if isinstance(loss, DTensor) else loss))
        assert abs(losses[0] - losses[1]) < 1e-4, (step, losses)


@pytest.mark.slow
def test_losses_of_a_llama(ranks: RankPools) -> None:
    ranks.run(llama_losses, 200, world_size=2)
