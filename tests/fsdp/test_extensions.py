"""Tensor subclasses with all-gather hooks, against one device and PyTorch's FSDP2."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from tests.device import device_type
from tests.examples import NIGHTLY
from tests.fsdp.compare import by_block, compare, data, full, gradients_of, mesh_of, parameters_of
from tests.fsdp.extended import CALLS, Codes, MixedBlock, Rounded
from tests.fsdp.models import Net, net_loss, tokens
from tests.ranks import RankPools, run_cases, run_functions
from vescale import INIT, RUN, Plan, RaggedShard, deferred_init, parallelize
from vescale.buffer import Allocation, DBuffer
from vescale.comm import record_comms
from vescale.errors import ShardingMismatchError
from vescale.fsdp import fully_shard, report
from vescale.fsdp._api import _move_to_device
from vescale.fsdp._bucket import HookGather


def options(**given: Any) -> Callable[..., None]:
    return functools.partial(by_block, **given)


def accumulating(model: Any, micro: int) -> None:
    model.set_requires_gradient_sync(micro == 1)


def together(model: Any, fully_shard: Callable[..., Any], mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


class Case(NamedTuple):
    """``hidden``: rows of ``up``. FSDP2 wants every input of an uneven shard to be of the shard's padded shape."""

    hidden: int = 16
    dim: int = 8
    frozen: bool = True
    ways: tuple[str, str] = ("int8", "bfloat16")
    options: Mapping[str, Any] = MappingProxyType({})
    more: Mapping[str, Any] = MappingProxyType({})
    shard: Callable[..., None] | None = None
    recompute: bool | None = None
    world_sizes: tuple[int, ...] = (2, 4)


LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES = {
    "mixed unit": Case(),
    "kept after forward": Case(options={"reshard_after_forward": False}),
    "resharded, the root, too": Case(options={"reshard_after_forward": True}),
    "kept in part": Case(options={"reshard_after_forward": 2}, more={"stock": False}, world_sizes=(4,)),
    "uneven, padded": Case(hidden=11, dim=6, frozen=False, ways=("bfloat16", "bfloat16")),
    "uneven, scales, too": Case(hidden=11, dim=6, more={"stock": False}, frozen=False),
    "a rank without rows": Case(hidden=5, dim=5, ways=("bfloat16", "bfloat16"), frozen=False),
    "fewer rows than ranks": Case(hidden=3, dim=1, more={"stock": False}, frozen=False),
    "hybrid": Case(more={"mesh_shape": (2, 2)}, world_sizes=(4,)),
    "low precision": Case(options={"mp_policy": LOW}, more={"reference": False, "tolerance": 1e-3}),
    "reduced in float64": Case(options={"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}),
    "offloaded": Case(options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "accumulation": Case(more={"around": accumulating, "microbatches": 2}),
    "one group": Case(shard=together),
    "recomputed": Case(recompute=False),
}


def train(name: str) -> None:
    case = CASES[name]

    def build() -> nn.Module:
        block = functools.partial(MixedBlock, hidden=case.hidden, frozen=case.frozen, ways=case.ways)
        return Net(case.dim, 2, block=block, recompute=case.recompute)

    CALLS.clear()
    shard = case.shard or options(**case.options)
    model: Any = compare(build, net_loss, shard, steps=3, **case.more)
    assert CALLS["refill"] > 2 * CALLS["post"] > 0
    weight = model.blocks[0].up.weight
    assert isinstance(weight, DTensor) and weight.placements[-1] == Shard(0)
    assert isinstance(weight.to_local(), Rounded) and type(weight.grad.to_local()) is torch.Tensor
    assert weight.grad.placements == weight.placements and weight.grad._spec is weight._spec


def train_all(names: list[str]) -> int:
    return run_cases(train, [(name,) for name in names])


@pytest.mark.parametrize("world_size", [2, 4])
def test_trains_like_one_device_and_fsdp2(ranks: RankPools, world_size: int) -> None:
    sizes = {name: case.world_sizes if NIGHTLY else case.world_sizes[:1] for name, case in CASES.items()}
    names = [name for name in CASES if world_size in sizes[name]]
    assert ranks.run(train_all, names, world_size=world_size, timeout=600) == [len(names)] * world_size


def sharded(seed: int = 0, shard: Any = fully_shard, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: Any = Net(8, 2, block=MixedBlock)
    by_block(model, shard, mesh_of(), **options)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    optimizer.zero_grad()
    loss = net_loss(model, number, dist.get_rank())
    loss.backward()
    optimizer.step()
    return loss.detach()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in parameters_of(model).items()}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    first, second = values(one), values(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def memory(block: Any) -> dict[str, list[torch.UntypedStorage]]:
    """What the hooks of a block have made, by what it is: once it has been gathered."""
    found: dict[str, list[torch.UntypedStorage]] = {"outputs": [], "unsharded": []}
    (group,) = block._state.groups
    for bucket in group.buckets:
        if not isinstance(bucket.gathering, HookGather):
            found.setdefault("plain", []).append(bucket.whole.local.untyped_storage())
            continue
        gathered = bucket.gathering.exchange
        assert gathered is not None
        found["outputs"] += [t.untyped_storage() for outputs in gathered.outputs for t in outputs]
        for parameter in bucket.parameters:
            unsharded = parameter.unsharded
            parts = [unsharded.codes, unsharded.affine] if isinstance(unsharded, Codes) else [unsharded]
            found["unsharded"] += [part.untyped_storage() for part in parts]  # type: ignore[union-attr]
    return found


def phases() -> None:
    """What is registered and what memory there is, and how many collectives of how many bytes."""
    exchanges: list[DBuffer] = []
    fresh = DBuffer.fresh

    def noted(self: DBuffer) -> DBuffer:
        made = fresh(self)
        if self.dtype == torch.uint8:
            exchanges.append(made)
        return made

    world = dist.get_world_size()
    model, optimizer = sharded()
    block, seen = model.blocks[0], []
    rest = [p.to_local() for p in (block.up.weight, block.fixed.weight)]
    assert isinstance(rest[0], Rounded) and rest[0].master.shape == (16 // world, 8)
    assert isinstance(rest[1], Codes) and rest[1].affine.shape == (8 // world, 2)
    assert rest[0].master.untyped_storage().nbytes() == rest[0].master.nbytes

    def look(*_: Any) -> None:
        assert type(block.up.weight) is nn.Parameter and block.up.weight.shape == (16, 8)
        assert isinstance(block.fixed.weight, Codes) and block.fixed.weight.codes.shape == (8, 8)
        seen.append({kind: [s.nbytes() for s in found] for kind, found in memory(block).items()})

    block.down.register_forward_hook(look)
    at_once = device_type() == "cpu"  # memory goes; else with a later gather
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DBuffer, "fresh", noted)
        for number in range(3):
            with record_comms() as ledger:
                loss = net_loss(model, number, dist.get_rank())
            assert not (at_once and any(s.nbytes() for found in memory(block).values() for s in found))
            # the trainable subclasses, the frozen one, the plain trainable parameters, and the frozen plain one
            assert sum(r.requester == "blocks.0" for r in ledger.records) == 4
            loss.backward()
            assert not (at_once and any(s.nbytes() for found in memory(block).values() for s in found))
            optimizer.step()
            optimizer.zero_grad()
    # int8 codes and float32 scales of `up`, bfloat16 of `down`; uint8 codes, float16 scale and offset of `fixed`
    expected = {"outputs": [16 * 8, 16 * 4, 8 * 16 * 2, 8 * 8, 8 * 2 * 2], "unsharded": [512, 512, 8 * 8, 8 * 2 * 2]}
    assert [{kind: one[kind] for kind in expected} for one in seen] == [expected] * 3, seen
    assert len(exchanges) == 2 * 2 * 2 * 3 and not any(one.is_allocated for one in exchanges)
    buckets = {one.parameters: one for one in report(model) if one.path == "blocks.0"}
    found = buckets["blocks.0.up.weight", "blocks.0.down.weight"]
    assert found.resting_bytes == 2 * 512 // world and found.padding_elements == 0
    assert found.whole_bytes >= 16 * 8 + 16 * 4 + 8 * 16 * 2 and found.whole_bytes < 2 * 512
    assert rest[0].master.data_ptr() == block.up.weight.to_local().master.data_ptr()  # the optimizer has written to it

    model.set_reshard_after_backward(False)
    before = memory(block)
    step(model, optimizer, 3)
    assert [s.nbytes() for s in before["outputs"]] == expected["outputs"]  # the same storages
    model.reshard()
    for one in model.blocks:
        one.reshard()
    assert not (at_once and any(s.nbytes() for s in (*before["outputs"], *before["unsharded"])))


def test_what_is_where(ranks: RankPools) -> None:
    ranks.run(phases, world_size=2)


def states(folder: str) -> None:
    model, optimizer = sharded()
    for number in range(2):
        step(model, optimizer, number)
    # into other values in place, and assigned
    for assign in (False, True):
        other, _ = sharded(seed=1)
        other.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=assign)
        assert_same(other, model)
        assert torch.equal(net_loss(other, 5, 0), net_loss(model, 5, 0))
        assert isinstance(other.blocks[0].up.weight.to_local(), Rounded)
    # on the disk, and back
    dcp.save({"model": {k: v for k, v in model.state_dict().items() if "fixed" not in k}}, checkpoint_id=folder)
    other, _ = sharded(seed=1)
    wanted = {k: v for k, v in other.state_dict().items() if "fixed" not in k}
    with torch.serialization.safe_globals([Rounded]):
        dcp.load({"model": wanted}, checkpoint_id=folder)
    other.load_state_dict(wanted, strict=False)
    for name, value in values(other).items():
        assert "fixed" in name or torch.equal(value, values(model)[name]), name
    # a whole parameter in a sharded one's place is cut
    torch.manual_seed(3)
    weight = torch.randn(16, 8)
    model.blocks[0].up.weight = nn.Parameter(Rounded(weight.clone()))
    model.blocks[0].down.weight = nn.Parameter(
        distribute_tensor(weight.t().contiguous(), mesh_of(), [Shard(0)], src_data_rank=None)
    )
    with pytest.raises(ValueError, match=r"'blocks.0.down.weight' was a tensor subclass .* replaced by a Tensor since"):
        model(tokens(0, 0))
    local = model.blocks[0].down.weight.to_local()
    model.blocks[0].down.weight = nn.Parameter(DTensor.from_local(Rounded(local, "bfloat16"), mesh_of(), [Shard(0)]))
    net_loss(model, 6, dist.get_rank()).backward()
    assert torch.equal(full(model.blocks[0].up.weight.detach()), weight)  # type: ignore[arg-type]
    assert torch.equal(full(model.blocks[0].down.weight.detach()), weight.t())  # type: ignore[arg-type]


def test_state_dicts(ranks: RankPools, tmp_path: Path) -> None:
    ranks.run(states, str(tmp_path / "saved"), world_size=2)


def copies() -> None:
    """An average of weights is a copy with memory of its own."""
    model, optimizer = sharded()
    step(model, optimizer, 0)
    before = values(model)
    twin = copy.deepcopy(model)
    step(model, optimizer, 1)
    assert all(torch.equal(value, before[name]) for name, value in values(twin).items())
    assert isinstance(twin.blocks[0].fixed.weight.to_local(), Codes)
    with torch.no_grad():
        for p, q in zip(twin.parameters(), model.parameters(), strict=True):
            if p.requires_grad:
                p.copy_(q)
    assert_same(twin, model)
    assert torch.equal(net_loss(twin, 4, 0), net_loss(model, 4, 0))


def meta() -> None:
    """Built on the meta device, given memory, and initialized: as one device would have."""
    with torch.device("meta"):
        model: Any = Net(8, 2, block=functools.partial(MixedBlock, frozen=False))
    by_block(model, fully_shard, mesh_of())
    assert model.blocks[0].up.weight.is_meta and isinstance(model.blocks[0].up.weight.to_local(), Rounded)
    with pytest.raises(RuntimeError, match="are on the meta device"):
        model(tokens(0, 0))
    model.to_empty(device=device_type())
    plain: Any = Net(8, 2, block=functools.partial(MixedBlock, frozen=False))
    for one in (model, plain):
        torch.manual_seed(5)
        for p in one.parameters():
            nn.init.normal_(p.master if isinstance(p, Rounded) else p, std=0.3)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(p.detach()), q.master if isinstance(q, Rounded) else q), name  # type: ignore[arg-type]
    torch.testing.assert_close(net_loss(model, 0, 0), net_loss(plain, 0, 0))


def clipped() -> None:
    """The norm of all gradients, and another dtype."""
    torch.manual_seed(0)
    plain: Any = Net(8, 2, block=MixedBlock)
    model = copy.deepcopy(plain)
    by_block(model, fully_shard, mesh_of())
    world = dist.get_world_size()
    net_loss(model, 0, dist.get_rank()).backward()
    torch.stack([net_loss(plain, 0, rank) for rank in range(world)]).mean().backward()
    norms = [
        torch.nn.utils.clip_grad_norm_([p for p in one.parameters() if p.requires_grad], 0.01) for one in (model, plain)
    ]
    torch.testing.assert_close(full(norms[0]), norms[1])
    for (name, gradient), q in zip(gradients_of(model).items(), plain.parameters(), strict=True):
        if q.requires_grad:
            torch.testing.assert_close(gradient, q.grad, msg=name)
    model.zero_grad()
    model.double()
    local = model.blocks[0].up.weight.to_local()
    assert isinstance(local, Rounded) and local.dtype == torch.float64 == local.master.dtype
    net_loss(model, 1, 0).backward()
    assert model.blocks[0].up.weight.grad.dtype == torch.float64
    alone = lone(Rounded(torch.ones(4, 2)))
    fully_shard(alone, mesh=mesh_of(), reshard_after_forward=True)
    alone(torch.ones(1, 2)).sum().backward()
    alone.zero_grad()
    alone.double()(torch.ones(1, 2).double()).sum().backward()
    assert alone.weight.grad.dtype == torch.float64  # type: ignore[union-attr]


def thawed() -> None:
    """Frozen and thawed between steps; gathered by somebody else's collective; evaluated in inference mode first."""
    calls = []

    class Gather:
        def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool) -> Any:
            calls.append(output_tensor.dtype)
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op=async_op)

    torch.manual_seed(0)
    plain: Any = Net(8, 2, block=MixedBlock)
    model = copy.deepcopy(plain)
    by_block(model, fully_shard, mesh_of())
    model.blocks[1].set_custom_all_gather(Gather())
    with torch.inference_mode():
        model(tokens(0, 0))
    assert calls.count(torch.uint8) == 2
    for number, trains in enumerate([True, False, True]):
        for one in (model, plain):
            one.zero_grad()
            one.blocks[0].up.weight.requires_grad_(trains)
        net_loss(model, number, dist.get_rank()).backward()
        torch.stack([net_loss(plain, number, rank) for rank in range(dist.get_world_size())]).mean().backward()
        for (name, gradient), q in zip(gradients_of(model).items(), plain.parameters(), strict=True):
            assert (gradient is None) == (q.grad is None), name
            if q.grad is not None:
                torch.testing.assert_close(gradient, q.grad, msg=name)


class Tall(nn.Module):
    """A matrix that tensor parallelism has cut, of a subclass inside of it."""

    def __init__(self, weight: torch.Tensor, mesh: DeviceMesh | None, how: str) -> None:
        super().__init__()
        self.proj = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        if mesh is None:
            self.proj.weight = nn.Parameter(Rounded(weight, how))
        else:
            local = weight.chunk(mesh.size())[mesh.get_local_rank()].clone()
            self.proj.weight = nn.Parameter(DTensor.from_local(Rounded(local, how), mesh, [Shard(0)], run_check=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.proj(x)
        return y.full_tensor() if isinstance(y, DTensor) else y


def parallel() -> None:
    world = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(2))
    models: list[Any] = [Tall(weight.clone(), world["tp"], "bfloat16") for _ in range(2)]
    for model, shard in zip(models, (fully_shard, stock_fully_shard), strict=True):
        shard(model, mesh=world["dp"], reshard_after_forward=True)
    plain = Tall(weight.clone(), None, "bfloat16")
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in (*models, plain)]
    for number in range(3):
        for model, optimizer in zip((*models, plain), optimizers, strict=True):
            optimizer.zero_grad()
            mine = world.get_local_rank("dp")
            inputs = [data((3, 6), number, rank) for rank in ((0, 1) if model is plain else (mine,))]
            for one in inputs:
                x = one if model is plain else distribute_tensor(one, world["tp"], src_data_rank=None)
                (model(x).square().mean() / len(inputs)).backward()
            optimizer.step()
        ours, theirs = (model.proj.weight for model in models)
        assert ours.placements == theirs.placements
        torch.testing.assert_close(ours.grad.to_local(), theirs.grad.to_local())
        assert torch.equal(ours.to_local().master, theirs.to_local().master)
        torch.testing.assert_close(full(ours.grad), plain.proj.weight.grad)


class Pair(TwoTensor):
    """Used as it is, so that activations and gradients are of the class, too, those of plain parameters included."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
        return (self.a, self.b), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (Pair(*outputs), outputs)


def pairs() -> None:
    torch.manual_seed(0)
    models: list[Any] = []
    for shard in (fully_shard, stock_fully_shard):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        for layer in model:
            layer.weight = nn.Parameter(Pair(layer.weight.detach(), 2 * layer.weight.detach()))
            shard(layer, mesh=mesh_of())
        shard(model, mesh=mesh_of())
        models.append(model)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in models]
    for number in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            y = model(data((3, 4), number, dist.get_rank()))
            assert isinstance(y, Pair)
            y.square().sum().backward()
            optimizer.step()
        for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert torch.equal(full(p.grad), full(q.grad)), name  # type: ignore[arg-type]
            if "weight" in name:
                p, q = p.to_local(), q.to_local()
                assert torch.equal(p.a, q.a) and torch.equal(p.b, q.b), name


class Careless(Rounded):
    """Its hook writes to the tensor that autograd has saved, as if that changed it."""

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        if out is None:
            full = outputs[0].float()
            return full, (full,)
        return out.copy_(outputs[0])


def careless() -> None:
    model = lone(Careless(torch.arange(16.0).view(8, 2), "bfloat16"))
    fully_shard(model, mesh=mesh_of(), reshard_after_forward=True)
    x = torch.ones(1, 2, requires_grad=True)
    model(x).sum().backward()
    assert torch.equal(x.grad, torch.tensor([[56.0, 64.0]]))  # type: ignore[arg-type]
    assert torch.equal(full(model.weight.grad), torch.ones(8, 2))  # type: ignore[arg-type]


def others() -> int:
    return run_functions([copies, meta, clipped, thawed, pairs, careless])


def test_like_plain_parameters(ranks: RankPools) -> None:
    ranks.run(others, world_size=2)


def test_tensor_parallelism(ranks: RankPools) -> None:
    ranks.run(parallel, world_size=4)


class Half(Rounded):
    """One hook."""

    fsdp_post_all_gather = property()  # type: ignore[assignment]  # an AttributeError: there is none


class Bare(Rounded):
    """No hook."""

    fsdp_pre_all_gather = fsdp_post_all_gather = property()  # type: ignore[assignment]


class Answers(Rounded):
    """Hooks that do what ``how`` says."""

    def fsdp_pre_all_gather(self, *given: Any) -> Any:  # type: ignore[override]
        match self.how:
            case "bare tensor":
                return self.master, None
            case "raises on rank 1" if dist.get_rank() == 1:
                raise LookupError("no scale")
            case "changes" if CALLS["pre"] > 1:
                return (self.master.double(),), None
        CALLS["pre"] += 1
        return (self.master,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        match self.how:
            case "post, no inner":
                return outputs[0].clone()
            case "post, small":
                return outputs[0][1:], outputs
            case "post, fails once" if CALLS["failed"] < 1:
                CALLS["failed"] += 1
                raise LookupError("not yet")
        return None if out is not None else (outputs[0], outputs)


class FewArguments(Rounded):
    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any) -> Any:  # type: ignore[override]
        return (self.master,), None


def lone(weight: Rounded) -> nn.Linear:
    model = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    model.weight = nn.Parameter(weight)
    return model


def refused() -> None:
    """Errors on all ranks alike, before the collective; afterwards the ranks are in step."""
    mesh, values, x = mesh_of(), torch.arange(12.0).view(6, 2), torch.ones(1, 2)
    with pytest.raises(ValueError, match=r"'weight' .* is a Half with fsdp_pre_all_gather and without fsdp_post"):
        fully_shard(lone(Half(values)), mesh=mesh)
    with pytest.raises(NotImplementedError, match=r"has the placement S\(1\); .* return Shard\(0\) or None"):
        fully_shard(lone(Rounded(values)), mesh=mesh, shard_placement_fn=lambda p: Shard(1))
    fully_shard(lone(Rounded(values)), mesh=mesh, shard_placement_fn=lambda p: Shard(0))
    with deferred_init():
        deferred = MixedBlock(4, frozen=False)
    with pytest.raises(NotImplementedError, match=r"'up.weight' .* is a Rounded that wraps deferred tensors"):
        fully_shard(deferred, mesh=mesh)
    with pytest.raises(
        NotImplementedError,
        match=r"must not be divided inside blocks of 4 elements; .*leave it out of "
        r"orig_param_policy",
    ):
        fully_shard(lone(Rounded(torch.zeros(world_size() * 3, 2))), mesh=mesh, orig_param_policy=lambda *_: 4)
    fully_shard(lone(Rounded(torch.zeros(world_size() * 2, 2))), mesh=mesh, orig_param_policy=lambda *_: 4)

    def first_forward(weight: Rounded) -> nn.Linear:
        model = lone(weight)
        fully_shard(model, mesh=mesh)
        model(x)
        return model

    with pytest.raises(NotImplementedError, match=r"'weight' is a Bare of local shape .* Define both in the class"):
        first_forward(Bare(values))
    with pytest.raises(TypeError, match=r"fsdp_pre_all_gather\(self, mesh.*takes 2 arguments"):
        first_forward(FewArguments(values))
    with pytest.raises(TypeError, match=r"returned \(Tensor, NoneType\); expected \(a tuple of tensors, metadata\)"):
        first_forward(Answers(values, "bare tensor"))
    raised = (
        r"is answering on ranks \[0, 2, 3\] and raising LookupError: no scale on rank 1"
        if dist.get_rank() != 1
        else "no scale"
    )
    with pytest.raises((ShardingMismatchError, LookupError), match=raised):
        first_forward(Answers(values, "raises on rank 1"))
    uneven = torch.zeros(3 * world_size() - 1, 2)
    with pytest.raises(
        ShardingMismatchError, match=r"torch.int8 \(3, 2\), .* and torch.int8 \(2, 2\), .*: pad what a rank"
    ):
        first_forward(Rounded(uneven, pads=False))
    with pytest.raises(TypeError, match=r"fsdp_post_all_gather of parameter 'weight' returned Tensor the first time"):
        first_forward(Answers(torch.ones(8, 2), "post, no inner"))
    with pytest.raises(ValueError, match=r"returned a tensor of shape \(7, 2\), strides \(2, 1\); expected \(8, 2\)"):
        first_forward(Answers(torch.ones(8, 2), "post, small"))
    CALLS.clear()
    model = lone(Answers(torch.ones(8, 2), "changes"))
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    model(x)
    model(x)
    with pytest.raises(RuntimeError, match=r"returned tensors torch.float64 .* at the first gather torch.float32"):
        model(x)
    model = lone(Answers(torch.ones(8, 2), "post, fails once"))
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    with pytest.raises(LookupError, match="not yet"):
        model(x)
    assert torch.equal(model(x), torch.full((1, 8), 2.0))
    plain = nn.Linear(2, 4)
    fully_shard(plain, mesh=mesh)
    plain.weight.to_local().fsdp_pre_all_gather = plain.weight._local_tensor.fsdp_pre_all_gather = lambda *_: None  # type: ignore[operator, attr-defined]
    with pytest.raises(NotImplementedError, match="local tensor of parameter 'weight' is a plain tensor with fsdp_pre"):
        plain(x)


def planned() -> None:
    """A plan's unit takes plain parameters."""
    model = nn.Sequential(lone(Rounded(torch.ones(4, 2))))
    plan = Plan(mesh_of()).shard(r"0\.weight", RaggedShard(), mesh="dp", phase=INIT)
    plan.shard(r"0\.weight", Replicate(), mesh="dp", phase=RUN)
    with pytest.raises(NotImplementedError, match=r"'0.weight' of shape \(4, 2\) is a tensor subclass, Rounded"):
        parallelize(model, plan)
    assert isinstance(model[0].weight, Rounded)


def world_size() -> int:
    return dist.get_world_size()


def test_refusals(ranks: RankPools) -> None:
    ranks.run(refused, world_size=4)
    ranks.run(planned, world_size=2)


def test_memory_is_freed_together() -> None:
    """What is attached to an allocation comes and goes with it; twice attached is once."""
    allocation = Allocation("cpu")
    allocation.allocate()
    own, none = torch.ones(5), torch.ones(0)
    for storage in (own.untyped_storage(), own[2:].untyped_storage(), none.untyped_storage()):
        allocation.attach(storage)
    for _ in range(2):
        allocation.free()
        assert own.untyped_storage().nbytes() == none.untyped_storage().nbytes() == 0
        allocation.allocate()
        assert own.untyped_storage().nbytes() == 20 and own.fill_(3).sum() == 15


def test_moving_to_the_device() -> None:
    """The parameter stays the object that an optimizer may have."""
    model = lone(Rounded(torch.ones(4, 2)))
    weight = model.weight.requires_grad_(False)
    _move_to_device([model], [weight], torch.device("meta"))
    assert model.weight is weight and weight.is_meta and isinstance(weight, Rounded) and weight.master.is_meta
    assert isinstance(weight, nn.Parameter) and not weight.requires_grad


def hooked_later() -> None:
    """As in FSDP2, local tensors of a subclass may get their hooks before the first forward; a hook that only knows the
    mesh gets the shard axis."""
    meshes = []

    def pre(self: Any, mesh: DeviceMesh) -> Any:
        meshes.append(mesh)
        return (self.master,), None

    def post(self: Any, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)

    values = torch.arange(16.0).view(8, 2)
    model: Any = lone(Bare(values))
    mesh = mesh_of((2, 2))
    fully_shard(model, mesh=mesh)
    local = model.weight._local_tensor
    for name, function in (("pre", pre), ("post", post)):
        setattr(type(local), f"fsdp_{name}_all_gather", property(lambda self, f=function: f.__get__(self)))
    assert torch.equal(model(torch.ones(1, 2)), values.sum(1)[None])
    assert meshes[0] == mesh["shard"] and model.weight.shape == (8, 2)


def test_hooks_of_local_tensors(ranks: RankPools) -> None:
    ranks.run(hooked_later, world_size=4)
