"""ZeRO by plan phases: parameters that rest ragged and run replicated are units on the engine of ``fully_shard``."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from tests.device import device_type
from tests.examples import NIGHTLY
from tests.fsdp.compare import resting_memory
from tests.ranks import RankPools, run_cases
from tests.runtime.zero import Difference, mesh_of, same_steps, sharded_at_rest
from tests.whole import whole, whole_tensors
from vescale import deferred_init, no_sync, optim, parallelize
from vescale.comm import record_comms
from vescale.fsdp import FSDPModule, report, state_of
from vescale.ir import lower, unit_buckets
from vescale.placements import RaggedShard, StridedRaggedShard
from vescale.plans import INIT, RUN, Plan, PlanError
from vescale.runtime import gradient_reducer

WIDTH = 6


class Block(nn.Module):
    """An odd hidden size, dropout, biases, a scalar; ``how`` it is checkpointed."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.dropout = nn.Dropout(0.2)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how:
            hidden = checkpoint(self.up, self.norm(x), use_reentrant=self.how == "reentrant")
        else:
            hidden = self.up(self.norm(x))
        return x + self.scale * self.dropout(self.down(F.gelu(hidden)))


class Net(nn.Module):
    def __init__(self, num_blocks: int = 2, how: str = "", around: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(how) for _ in range(num_blocks))
        self.last = nn.Linear(WIDTH, 3)
        self.unused = nn.Linear(2, 2)
        self.around = around
        self.times = 1
        self.skip: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            for number, block in enumerate(self.blocks):
                if number == self.skip:
                    continue
                x = checkpoint(block, x, use_reentrant=self.around == "reentrant") if self.around else block(x)
        return self.last(x)


def cut_batch(plan: Plan, *axes: str) -> Plan:
    return plan.shard("<in:x>", {axis: Shard(0) for axis in axes})


def build(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).double()


def batch(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(size, 5, WIDTH, dtype=torch.float64, generator=generator)
    labels = torch.randint(3, (size, 5), generator=generator)
    labels[: size // 2, :3] = -100  # the first rank has fewer labels
    return x, labels


def one_loss(model: nn.Module, step: int) -> Tensor:
    torch.manual_seed(1000 + step)  # dropout
    x, labels = batch(step)
    loss = F.cross_entropy(model(x).flatten(0, 1), labels.flatten())
    loss.backward()
    return loss


def zero_plan(sizes: dict[str, int], stage: int = 3) -> Plan:
    """Of the stage's lines; over ``dp``, or ``shard`` with copies along ``replicate``."""
    plan = Plan(mesh_of(sizes))
    axis = "dp" if "dp" in sizes else "shard"
    cut_batch(plan, *sizes)
    sharded_at_rest(plan, ".*", axis)
    if stage < 3:
        plan.unit(r"blocks\.\d+", reshard_after_forward=False, reshard_after_backward=None if stage == 2 else False)
        plan.unit("", reshard_after_backward=None if stage == 2 else False)
    return plan


def pair(
    sizes: dict[str, int], make_plan: Callable[[dict[str, int]], Plan] = zero_plan, **options: Any
) -> tuple[Net, Net]:
    reference = build(**options)
    model = copy.deepcopy(reference)
    parallelize(model, make_plan(sizes), strict=True)
    return reference, model


def exact(found: Difference) -> None:
    assert found.loss <= 1e-13 and found.gradient[0] <= 1e-12 and found.parameter[0] <= 1e-11, found


# Stages


def stage(number: int, sizes: dict[str, int]) -> None:
    reference, model = pair(sizes, lambda s: zero_plan(s, number), num_blocks=3)
    exact(same_steps(reference, model, one_loss, num_steps=4))
    assert isinstance(model, FSDPModule) and all(isinstance(block, FSDPModule) for block in model.blocks)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter.placements[-1], RaggedShard), name


@pytest.mark.parametrize("sizes", [{"dp": 4}, {"replicate": 2, "shard": 2}], ids=str)
def test_stages_equal_one_device(ranks: RankPools, sizes: dict[str, int]) -> None:
    ranks.run(run_cases, stage, [(number, sizes) for number in (1, 2, 3)])


def gathers_of_a_step(number: int) -> dict[str, Counter[str]]:
    """Collectives of the engine by group: two microbatches without synchronization, and a third with it."""
    _, model = pair({"dp": 2}, lambda s: zero_plan(s, number), num_blocks=3)
    one_loss(model, 0)
    found: dict[str, Counter[str]] = {}
    for name in ("accumulating", "last"):
        with record_comms() as ledger:
            if name == "accumulating":
                with no_sync(model):
                    one_loss(model, 1)
                    one_loss(model, 2)
            else:
                one_loss(model, 3)
        kept = [r for r in ledger.records if r.requester == "blocks.1"]
        found[name] = Counter(r.op.removesuffix("_v") for r in kept)
    return found


def test_what_the_stages_gather(ranks: RankPools) -> None:
    expected = {3: (4, 2), 2: (2, 1), 1: (1, 0)}
    for number, (accumulating, last) in expected.items():
        for found in ranks.run(gathers_of_a_step, number, world_size=2):
            assert found["accumulating"] == Counter(all_gather=accumulating), (number, found)
            assert found["last"] == Counter(all_gather=last, reduce_scatter=1), (number, found)


def as_stock_fsdp(policy: MixedPrecisionPolicy, offload: OffloadPolicy) -> None:
    """The same steps on PyTorch's FSDP2, each rank with its own part of the batch."""
    sizes = over_all()
    model, stock = build(), build()
    for block in (*model.blocks, *stock.blocks):
        block.scale = nn.Parameter(block.scale.detach().view(1))  # FSDP2 takes no scalars
    mesh = mesh_of(sizes)
    plan = zero_plan(sizes)
    inner = replace(policy, output_dtype=None)
    plan.unit(r"blocks\.\d+", mp_policy=inner, offload_policy=offload)
    plan.unit("", mp_policy=policy, offload_policy=offload)
    parallelize(model, plan, strict=True)
    seen: list[torch.dtype] = []
    close = {"rtol": 1e-6, "atol": 1e-7} if policy.param_dtype else {"rtol": 1e-9, "atol": 1e-11}
    model.blocks[1].up.register_forward_pre_hook(lambda up, args: seen.extend((up.weight.dtype, args[0].dtype)))
    for m in (model, stock):
        m.eval()  # a rank of FSDP2 draws its own dropout
    for block in stock.blocks:
        stock_fully_shard(block, mesh=mesh, mp_policy=inner, offload_policy=offload)
    stock_fully_shard(stock, mesh=mesh, mp_policy=policy, offload_policy=offload)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, stock)]
    for step in range(3):
        x, _ = batch(step)
        output = model(x)
        assert output.dtype == (policy.output_dtype or policy.param_dtype or torch.float64)
        output.square().mean().backward()
        stock(x.chunk(mesh.size())[mesh.get_local_rank()]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        ours, others = (whole_tensors(dict(one.named_parameters())) for one in (model, stock))
        for (name, own), theirs in zip(ours.items(), others.values(), strict=True):
            torch.testing.assert_close(own, theirs, **close, msg=lambda m, n=name: f"{n}: {m}")
    assert set(seen) == {policy.param_dtype or torch.float64}
    bucket = model.blocks[1]._state.groups[0].buckets[0]
    assert bucket.shards.dtype == torch.float64
    # Where the policy names no dtype, FSDP2 reduces in that of the parameters since 2.15; before, in that of the forward.
    unnamed = torch.float64 if torch.torch_version.TorchVersion(torch.__version__) >= "2.15" else bucket.whole.dtype
    assert bucket.unreduced.buffer.dtype == (policy.reduce_dtype or unnamed)


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
NARROW = MixedPrecisionPolicy(param_dtype=torch.float32)


def test_equals_stock_fsdp(ranks: RankPools) -> None:
    policies = (MixedPrecisionPolicy(), NARROW, MIXED)
    cases = [(policy, OffloadPolicy()) for policy in policies]
    ranks.run(run_cases, as_stock_fsdp, [*cases, (MIXED, CPUOffloadPolicy(pin_memory=False))], world_size=2)


def offloaded_with_tensor_parallelism() -> None:
    """Sums over other axes are reduced before gradients leave the device."""
    sizes = {"dp": 2, "tp": 2}

    def plan(offload: OffloadPolicy) -> Plan:
        made = cut_batch(Plan(mesh_of(sizes)), "dp").shard("first.<out>", Shard(1), mesh="tp")  # norms see a part of it
        made.shard(r"blocks.\d+.up.(weight|bias)", Shard(0), mesh="tp")
        made.shard(r"blocks.\d+.down.weight", Shard(1), mesh="tp")
        made.shard(r"blocks.\d+.up.<in>", Replicate(), mesh="tp").shard(r"blocks.\d+.down.<out>", Shard(1), mesh="tp")
        made.shard("last.<in>", Replicate(), mesh="tp")
        sharded_at_rest(made, ".*")
        return made.unit(r"blocks\.\d+", offload_policy=offload)

    reference = build()
    for block in reference.blocks:
        block.up, block.down = nn.Linear(WIDTH, 8).double(), nn.Linear(8, WIDTH, bias=False).double()
    for offload in (CPUOffloadPolicy(pin_memory=False), OffloadPolicy()):
        model, twin = copy.deepcopy(reference), copy.deepcopy(reference)
        parallelize(model, plan(offload), strict=True)
        groups = [g for block in model.blocks for g in state_of(block).groups]  # type: ignore[union-attr]
        assert all(g.at_rest.offloads == isinstance(offload, CPUOffloadPolicy) for g in groups)
        came: list[tuple[Any, frozenset[int]]] = []
        for summand in (p.contribution for g in groups for p in g.parameters if p.name.endswith("norm.weight")):

            def of(gradient: Any, earlier: Any, *, of_one_loss: bool, one: Any = summand, own: Any = summand.of) -> Any:
                found = own(gradient, earlier, of_one_loss=of_one_loss)
                came.append((gradient.placements, one.pending))  # noqa: B023
                return found

            summand.of = of  # type: ignore[method-assign]
        exact(same_steps(twin, model, one_loss, num_steps=2))
        left = frozenset() if isinstance(offload, CPUOffloadPolicy) else frozenset({1})
        assert len(came) == 4 and set(came) == {((Partial(), Partial()), left)}, (left, came)


def test_offloaded_units(ranks: RankPools) -> None:
    ranks.run(offloaded_with_tensor_parallelism)


# What a unit is


def what_is_where() -> None:
    """An unsharded parameter is a DTensor on the whole mesh, Replicate where it was cut, tp's cut as it was."""
    mesh = mesh_of({"dp": 2, "tp": 2})
    plan = cut_batch(Plan(mesh), "dp")
    plan.shard(r"blocks.\d+.up.(weight|bias)", Shard(0), mesh="tp")
    plan.shard(r"blocks.\d+.down.weight", Shard(1), mesh="tp").shard(r"blocks.\d+.down.<out>", Replicate(), mesh="tp")
    sharded_at_rest(plan, r"blocks.*")
    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList(Wide() for _ in range(2))
    model.forward = lambda x: model.blocks[1](model.blocks[0](x))  # type: ignore[method-assign]
    model = model.double()
    reference = copy.deepcopy(model)
    reference.forward = lambda x: reference.blocks[1](reference.blocks[0](x))  # type: ignore[method-assign]
    parallelize(model, plan, strict=True)
    seen: list[tuple[Any, ...]] = []
    block = model.blocks[1]
    block.down.register_forward_pre_hook(
        lambda *_: seen.append(block.up.weight.placements + block.down.weight.placements)
    )
    x, _ = batch(0)
    model(x).square().mean().backward()
    reference(x).square().mean().backward()
    assert seen == [(Replicate(), Shard(0), Replicate(), Shard(1))], seen
    at_rest = block.up.weight.placements
    assert type(at_rest[0]).__name__ == "StridedRaggedShard" and at_rest[1] == Shard(0)
    assert type(block.down.weight.placements[0]) is RaggedShard
    for (name, own), (_, other) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(
            whole(own.grad), other.grad, rtol=1e-12, atol=1e-14, msg=lambda m, n=name: f"{n}: {m}"
        )


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 10)
        self.down = nn.Linear(10, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def test_the_unsharded_parameter_is_on_the_whole_mesh(ranks: RankPools) -> None:
    ranks.run(what_is_where)


def as_planned(sizes: dict[str, int]) -> None:
    """What ``explain`` plans is what runs: the same layouts, names and sizes."""
    plan = zero_plan(sizes)
    model = build(num_blocks=3)
    program = lower(plan, model)
    expected = unit_buckets(program, model)
    parallelize(model, plan)
    with record_comms() as ledger:
        one_loss(model, 0)
    found = {bucket.parameters: bucket for bucket in report(model)}
    assert len(found) == len(expected) == 4
    for bucket in expected:
        own = found[bucket.names]
        assert (own.path, own.digest, own.padding_elements) == (bucket.path, bucket.digest, bucket.padding_elements)
        assert (own.resting_bytes, own.whole_bytes) == (bucket.resting_bytes, bucket.whole_bytes)
        moved = Counter((r.op.removesuffix("_v"), r.bytes) for r in ledger.records if r.requester == bucket.path)
        assert moved == Counter((op, num_bytes) for _, op, _, num_bytes in bucket.collectives), bucket.path


def test_units_are_gathered_as_explained(ranks: RankPools) -> None:
    ranks.run(as_planned, {"dp": 4})
    ranks.run(as_planned, {"replicate": 2, "shard": 2})


def explicit_units() -> None:
    plan = zero_plan({"dp": 4}).unit(r"blocks\.(0|1)").unit(r"blocks\.2\.up", reshard_after_forward=2)
    _, model = pair({"dp": 4}, lambda _: plan, num_blocks=3)
    paths = [path for path, module in model.named_modules() if state_of(module) is not None]
    assert paths == ["", "blocks.0", "blocks.1", "blocks.2", "blocks.2.up"]
    reference, model = pair({"dp": 4}, lambda _: plan, num_blocks=3)
    exact(same_steps(reference, model, one_loss, num_steps=2))
    one = zero_plan({"dp": 4}).unit("")
    reference, model = pair({"dp": 4}, lambda _: one)
    assert [path for path, module in model.named_modules() if state_of(module) is not None] == [""]
    exact(same_steps(reference, model, one_loss, num_steps=2))


def test_units_of_the_plan(ranks: RankPools) -> None:
    ranks.run(explicit_units)


def granularity(placement: RaggedShard, expected_block: int) -> None:
    """What the placement calls a share is never cut."""
    plan = cut_batch(Plan(mesh_of({"dp": 4})), "dp")
    plan.shard(r".*up.weight", placement, mesh="dp", phase=INIT).shard(
        r".*up.weight", Replicate(), mesh="dp", phase=RUN
    )
    reference, model = pair({"dp": 4}, lambda _: plan)
    exact(same_steps(reference, model, one_loss, num_steps=2))
    for block in model.blocks:
        local = block.up.weight.to_local().numel()
        start = sum(whole_lengths(local)[: dist.get_rank()])
        assert start % expected_block == 0, (start, expected_block)


def whole_lengths(length: int) -> list[int]:
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([length]))
    return [int(one) for one in lengths]


def test_shares_are_not_cut(ranks: RankPools) -> None:
    cases = [(RaggedShard(), WIDTH), (RaggedShard(block=4), 4), (RaggedShard((0, 1)), 1), (RaggedShard(()), 7 * WIDTH)]
    ranks.run(run_cases, granularity, cases)


def given_cut(placement: Any, sizes: dict[str, int]) -> None:
    """A cut that the plan gives is what lies there at rest: uneven, with an empty rank, of an inner dim."""
    plan = sharded_at_rest(Plan(mesh_of(sizes)).shard("<in:input>", Shard(0), mesh="dp"), r".*down.*")
    if "tp" in sizes:
        plan.shard(r".*up.(weight|bias)", Shard(0), mesh="tp")
        plan.shard(r".*down.weight", Shard(1), mesh="tp").shard(r".*down.<out>", Replicate(), mesh="tp")
    plan.shard(r".*up.weight", placement, mesh="dp", phase=INIT).shard(
        r".*up.weight", Replicate(), mesh="dp", phase=RUN
    )
    torch.manual_seed(0)
    reference = nn.Sequential(*(Wide() for _ in range(2))).double()
    model = copy.deepcopy(reference)
    parallelize(model, plan, strict=True)
    shard = model[1].up.weight
    assert isinstance(shard, DTensor)
    if isinstance(placement, RaggedShard):
        assert shard.placements[0].local_units == placement.local_units
        assert type(shard.placements[0]) is (StridedRaggedShard if "tp" in sizes else RaggedShard)
    else:
        assert shard.placements[0] == placement

    def step(m: nn.Module, number: int) -> Tensor:
        loss = (m(batch(number)[0]) * 3).sin().square().mean()
        loss.backward()
        return loss

    exact(same_steps(reference, model, step, num_steps=2))


def test_cuts_that_the_plan_gives(ranks: RankPools) -> None:
    over_four = [RaggedShard((0,), (1, 6, 0, 3)), RaggedShard((0, 1), (7, 0, 50, 3)), Shard(0), Shard(1)]
    ranks.run(run_cases, given_cut, [(placement, {"dp": 4}) for placement in over_four])
    both = [RaggedShard((0,), (1, 4)), RaggedShard((0,), (5, 0))]
    ranks.run(run_cases, given_cut, [(placement, {"dp": 2, "tp": 2}) for placement in both])


def part_of_replicas() -> None:
    """The trap: the sharded axis alone, taken from a mesh whose other axis holds replicas. An error on every rank, before
    anything is placed."""
    mesh = mesh_of({"replicate": 2, "shard": 2})
    sizes = Plan({"shard": 2})
    for plan, given in ((Plan(mesh["shard"]), None), (sizes, mesh["shard"])):
        sharded_at_rest(cut_batch(plan, "shard"), ".*", "shard")
        model = build()
        with pytest.raises(PlanError, match=r"the replicas along 'replicate' would never exchange gradients"):
            parallelize(model, plan, mesh=given)
        assert not any(isinstance(p, DTensor) for p in model.parameters())
    pipeline = mesh_of({"pp": 2, "dp": 2})
    reference = build()
    model = copy.deepcopy(reference)
    parallelize(model, sharded_at_rest(cut_batch(Plan(pipeline["dp"]), "dp")), strict=True)  # stages are no replicas
    exact(same_steps(reference, model, one_loss, num_steps=2))


def test_a_slice_of_replicas_is_refused(ranks: RankPools) -> None:
    ranks.run(part_of_replicas)


# Gradients


def accumulated(sizes: dict[str, int], number: int) -> None:
    def micro(model: nn.Module, step: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for part in range(3):
            is_last = part == 2
            if isinstance(model, FSDPModule) and not is_last:
                with no_sync(model):
                    total = total + whole(one_loss(model, 10 * step + part).detach())
                pending = [p.grad for p in model.blocks.parameters()]
                assert all(isinstance(g, DTensor) and any(p.is_partial() for p in g.placements) for g in pending)
            else:
                total = total + whole(one_loss(model, 10 * step + part).detach())
        return total

    reference, model = pair(sizes, lambda s: zero_plan(s, number))
    exact(same_steps(reference, model, micro, num_steps=2))

    def several(model: nn.Module, step: int) -> Tensor:
        """Backwards that all synchronize."""
        return one_loss(model, 2 * step) + one_loss(model, 2 * step + 1)

    exact(same_steps(reference, model, several, num_steps=2))


def test_accumulation(ranks: RankPools) -> None:
    meshes = {"dp": 4}, {"replicate": 2, "shard": 2}
    cases = itertools.product(meshes, (1, 3)) if NIGHTLY else zip(meshes, (1, 3))
    ranks.run(run_cases, accumulated, list(cases))


def over_all() -> dict[str, int]:
    return {"dp": dist.get_world_size()}


def clipped() -> None:
    norms: dict[int, list[float]] = {0: [], 1: []}

    def clip(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        is_ours = isinstance(model, FSDPModule)
        function = optim.clip_grad_norm_ if is_ours else nn.utils.clip_grad_norm_
        norms[is_ours].append(float(whole(function(model.parameters(), 0.05))))

    reference, model = pair(over_all())
    exact(same_steps(reference, model, one_loss, num_steps=2, around=clip))
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-12, atol=0)


def test_clipping(ranks: RankPools) -> None:
    ranks.run(clipped, world_size=2)


def not_cut() -> None:
    """The batch is not cut over the axis: every rank has all of each gradient, and it counts once."""

    def plan(sizes: dict[str, int]) -> Plan:
        return sharded_at_rest(Plan(mesh_of(sizes)))

    reference, model = pair(over_all(), plan)
    exact(same_steps(reference, model, one_loss, num_steps=2))


def mixed_arrivals() -> None:
    """The gradients of microbatches arrive differently: cut batches, and a whole one."""

    def step(model: nn.Module, number: int) -> Tensor:
        model.eval()
        total = torch.zeros((), dtype=torch.float64)
        for part in range(3):
            x, _ = batch(3 * number + part)
            if part == 1 and isinstance(model, FSDPModule):
                mesh = model.first.weight.device_mesh
                x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim)
            loss = model(x).square().mean()
            if part < 2 and isinstance(model, FSDPModule):
                with no_sync(model):
                    loss.backward()
            else:
                loss.backward()
            total = total + whole(loss.detach())
        return total

    for sizes in ({"dp": 4}, {"replicate": 2, "shard": 2}):
        reference, model = pair(sizes)
        exact(same_steps(reference, model, step, num_steps=2))


def penalty() -> None:
    """A loss that reads parameters at rest: their gradients come from autograd and from the engine."""

    def step(model: nn.Module, number: int) -> Tensor:
        torch.manual_seed(number)
        x, labels = batch(number)
        loss = F.cross_entropy(model(x).flatten(0, 1), labels.flatten())
        for parameter in model.blocks.parameters():
            loss = loss + 0.1 * parameter.square().sum()
        loss.backward()
        return loss

    for sizes in ({"dp": 4}, {"replicate": 2, "shard": 2}):
        reference, model = pair(sizes)
        exact(same_steps(reference, model, step, num_steps=2))


def frozen() -> None:
    reference = build()
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_("up" in name or "blocks.1" in name)
    model = copy.deepcopy(reference)
    parallelize(model, zero_plan(over_all()), strict=True)
    exact(same_steps(reference, model, one_loss, num_steps=2))
    assert sum(p.requires_grad for p in model.parameters()) == sum(p.requires_grad for p in reference.parameters())
    for m in (reference, model):  # and thawed
        m.blocks[0].down.weight.requires_grad_(True)
        m.blocks[1].up.weight.requires_grad_(False)
    exact(same_steps(reference, model, one_loss, num_steps=2))


def unused() -> None:
    """A block that a step leaves out has no gradient there, and one afterwards."""
    reference, model = pair(over_all())
    for skip in (1, None, 0):
        reference.skip = model.skip = skip
        exact(same_steps(reference, model, one_loss, num_steps=2))


def several_calls() -> None:
    reference, model = pair(over_all())
    reference.times = model.times = 3
    exact(same_steps(reference, model, one_loss, num_steps=2))


def recomputed(how: str, around: str) -> None:
    reference, model = pair(over_all(), how=how, around=around)
    exact(same_steps(reference, model, one_loss, num_steps=2))


def looked_at() -> None:
    """Forwards between a backward and the optimizer's step leave nothing gathered that the step makes stale."""
    for number in (1, 2, 3):
        reference, model = pair(over_all(), lambda s, number=number: zero_plan(s, number))

        def step(m: nn.Module, number: int) -> Tensor:
            loss = one_loss(m, number)
            m(batch(number)[0])  # with gradients, and without a backward
            with torch.no_grad():
                m(batch(number)[0])
            return loss

        exact(same_steps(reference, model, step, num_steps=2))


def stale() -> None:
    """A forward whose backward never comes leaves units gathered; what the optimizer's step makes old is not used."""
    for number in (1, 2, 3):
        reference, model = pair(over_all(), lambda s, number=number: zero_plan(s, number))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (reference, model)]
        for m, optimizer in zip((reference, model), optimizers, strict=True):
            m.eval()
            one_loss(m, 0)
            m(batch(1)[0])
            optimizer.step()
        torch.testing.assert_close(whole(model(batch(2)[0])), reference(batch(2)[0]), rtol=1e-12, atol=1e-14)


def evaluated() -> None:
    """Forwards without gradients between steps, a backward of a part, and one that never comes."""
    reference, model = pair(over_all())

    def step(m: nn.Module, number: int) -> Tensor:
        x, _ = batch(50 + number)
        with torch.no_grad():
            m(x)
        with torch.inference_mode():
            m(x)
        m(x)  # nobody calls its backward
        return one_loss(m, number)

    exact(same_steps(reference, model, step, num_steps=2))


class Broken(nn.Module):
    """Raises in the forward or the backward of the block it is put into, when asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.when = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "forward":
            raise ArithmeticError
        if self.when == "backward" and x.requires_grad:
            x.register_hook(self._refuse)
        return x

    def _refuse(self, gradient: Tensor) -> None:
        raise ArithmeticError


def broken_off() -> None:
    """An exception in forward or backward leaves nothing behind: the next steps are those of one device."""
    for number in (2, 3):
        reference = build(num_blocks=3)
        reference.blocks[1].dropout = Broken()
        model = copy.deepcopy(reference)
        parallelize(model, zero_plan(over_all(), number), strict=True)

        def step(m: nn.Module, number: int) -> Tensor:
            if isinstance(m, FSDPModule):
                m.blocks[1].dropout.when = ("forward", "backward", "backward", "forward")[number]
                with pytest.raises(ArithmeticError):
                    one_loss(m, 0)
                m.blocks[1].dropout.when = ""
                m.zero_grad()
            return one_loss(m, number)

        exact(same_steps(reference, model, step, num_steps=4))


@pytest.mark.parametrize(
    "case",
    [broken_off, looked_at, stale, clipped, not_cut, mixed_arrivals, penalty, frozen, unused, several_calls, evaluated],
    ids=lambda f: f.__name__,
)
def test_training(ranks: RankPools, case: Callable[[], None]) -> None:
    ranks.run(case, world_size=4 if case in (mixed_arrivals, penalty) else 2)


def test_checkpointing(ranks: RankPools) -> None:
    kinds = ("", "reentrant", "non-reentrant")
    ranks.run(
        run_cases, recomputed, [(how, around) for how in kinds for around in kinds if how or around], world_size=2
    )


# The life of a model


def copied() -> None:
    """An EMA beside the model: a copy of its own, which trains apart."""
    reference, model = pair({"replicate": 2, "shard": 2})
    exact(same_steps(reference, model, one_loss, num_steps=2))
    averages = [copy.deepcopy(m) for m in (reference, model)]
    exact(same_steps(reference, model, one_loss, num_steps=2))
    with torch.no_grad():
        for average, m in zip(averages, (reference, model), strict=True):
            for mean, parameter in zip(average.parameters(), m.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
    exact(same_steps(averages[0], averages[1], one_loss, num_steps=2))
    exact(same_steps(reference, model, one_loss, num_steps=1))
    assert gradient_reducer(model) is not gradient_reducer(averages[1])


def deferred() -> None:
    torch.manual_seed(0)
    reference = Net()
    torch.manual_seed(0)
    with deferred_init():
        model = Net()
    parallelize(model, zero_plan(over_all()), strict=True)
    drawn: Any = whole_tensors(dict(model.named_parameters()))
    for (name, own), (_, expected) in zip(drawn.items(), reference.named_parameters(), strict=True):
        assert torch.equal(own, expected), name
    assert sum(resting_memory(model).values()) == report(model).resting_bytes


def from_meta() -> None:
    """Built on the meta device, and loaded afterwards."""
    reference = build()
    with torch.device("meta"):
        model = Net().double()
    parallelize(model, zero_plan(over_all()))
    assert all(p.is_meta and isinstance(p.placements[0], RaggedShard) for p in model.parameters())
    model.to_empty(device=device_type())
    model.load_state_dict(reference.state_dict())
    exact(same_steps(reference, model, one_loss, num_steps=2))


def loaded() -> None:
    """A state dict of one device, before and between steps, also while parameters are whole."""
    reference, model = pair(over_all(), lambda s: zero_plan(s, 2))
    other = build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    x, _ = batch(0)
    model(x)  # gathered, and no backward
    for m in (reference, model):
        m.load_state_dict(other.state_dict())
    exact(same_steps(reference, model, one_loss, num_steps=2))
    state = model.state_dict()
    assert all(isinstance(value.placements[0], RaggedShard) for value in state.values())
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(whole(state[key]), value)


@pytest.mark.parametrize("case", [copied, deferred, from_meta, loaded], ids=lambda f: f.__name__)
def test_life(ranks: RankPools, case: Callable[[], None]) -> None:
    ranks.run(case, world_size=4 if case is copied else 2)


class Beside(nn.Module):
    """Results that a unit does not return, or not all of them, and a number of its class."""

    calls = 0

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how, self.kept = nn.Linear(WIDTH, WIDTH), how, []
        self.last: Any = None

    def forward(self, x: Tensor, found: Any) -> Tensor | None:
        type(self).calls += 1
        y = torch.tanh(self.linear(x) * (1 + 0.1 * type(self).calls))
        also = F.linear(y, self.linear.weight).square().mean()
        if self.how == "attribute":
            self.last = also
        elif self.how == "attribute, list":
            self.kept[:] = [also]
        elif self.how == "list":
            found["list"].append(also)
        elif self.how == "detached":
            found["list"].append(also + y.sum())
            return y.detach()
        else:
            found["x"] = y + also
            return None
        return y


class OfBeside(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Beside(how) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, found = self.first(x), {"list": []}
        for block in self.blocks:
            y = block(x, found)
            x = found["x"] if y is None else y
        kept: Any = [*found["list"], *(x for b in self.blocks for x in (b.last, *b.kept) if x is not None)]
        return x.square().mean() + 3 * sum(kept)


def beside_outputs() -> list[str]:
    wrong = []
    for how in ("attribute", "attribute, list", "list", "detached", "nothing"):
        found = []
        for is_sharded in (False, True):
            torch.manual_seed(0)
            Beside.calls, model = 0, OfBeside(how).double()
            if is_sharded:
                plan = zero_plan({"dp": 2}).unit(r"blocks\.\d")
                model = parallelize(model, plan)
            for step in range(3):
                loss = model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).double())
                loss.backward()
            grads = [whole(p.grad) if p.grad is not None else torch.zeros(()) for p in model.parameters()]
            found.append([torch.tensor(Beside.calls), whole(loss.detach()), *grads])
        if not all(torch.allclose(*pair, rtol=1e-12, atol=1e-14) for pair in zip(*found, strict=True)):
            wrong.append(how)
    return wrong


def test_results_that_a_unit_does_not_return(ranks: RankPools) -> None:
    assert ranks.run(beside_outputs, world_size=2) == [[], []]
