"""Training with fully_shard against one device and PyTorch's FSDP2: gradients, losses and parameters of every step."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Shard

from tests.device import device_type
from tests.examples import daily_sample
from tests.fsdp.compare import by_block, compare, mesh_of
from tests.fsdp.models import Adapted, Block, Net, dense_loss, net_loss
from tests.ranks import RankPools, run_cases
from vescale.fsdp import CPUOffloadPolicy as OurCPUOffloadPolicy
from vescale.fsdp import FSDPModule
from vescale.fsdp import fully_shard as our_fully_shard

assert OurCPUOffloadPolicy is CPUOffloadPolicy  # the same class: policies of a user's script are taken as they are


def options(**given: Any) -> Callable[..., None]:
    return functools.partial(by_block, **given)


def prefetching(model: Any, fully_shard: Callable[..., Any], mesh: DeviceMesh) -> None:
    by_block(model, fully_shard, mesh)
    blocks = list(model.blocks)
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    model.set_modules_to_forward_prefetch(blocks[:2])


def frozen(build: Callable[[], Any], *names: str) -> nn.Module:
    model = build()
    for name, parameter in model.named_parameters():
        if any(part in name for part in names):
            parameter.requires_grad_(False)
    return model


class Strange(nn.Module):
    """A parameter that is never used; with ``scalar`` also a 0-dim one, which FSDP2 does not take, and an empty one, which
    it does not reduce."""

    def __init__(self, dim: int, scalar: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5) if scalar else torch.tensor([1.5]))
        self.empty = nn.Parameter(torch.zeros(0, dim)) if scalar else None
        self.unused = nn.Parameter(torch.randn(3, 5))
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.scale
        return y if self.empty is None else y + self.empty.sum()


class Experts(nn.Module):
    """Each rank and step routes to one of three experts; the last one is never chosen.

    The choice is coarse: where it hung on the last bits of ``x``, models that are equal up to rounding would choose apart.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts[int(x.detach().sum().abs() * 2) % 3](x)


class Ios(nn.Module):
    """Takes and gives nested containers, keyword arguments, views, and writes to its input."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, pair: tuple[torch.Tensor, dict[str, Any]], *, scale: torch.Tensor) -> dict[str, Any]:
        x, more = pair
        y = self.first(x * scale) + more["y"][0]
        y.add_(1)
        return {"out": [self.second(y)[:, 1:-1]], "number": 3, "none": None}


class UsesIos(nn.Module):
    """Also writes to the outputs of its blocks, which are views; not so with ``writes=False``."""

    def __init__(self, dim: int = 7, writes: bool = True) -> None:
        super().__init__()
        self.writes = writes
        self.lift = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList([Ios(dim), Ios(dim)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lift(x)
        for block in self.blocks:
            out = block((x.t().t(), {"y": [x[:, :]]}), scale=x.mean())["out"][0]
            if self.writes:
                out += 1  # a view: its own hooks are lost with its history
            else:
                out = out + 1
            x = nn.functional.pad(out, (1, 1))
        return x


class CastsItself(Block):
    """Gets its inputs in the dtype that they have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        return super().forward(x.to(self.up.weight.dtype)).float()


class Siblings(nn.Module):
    def __init__(self, dim: int = 7) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(dim)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks[0](x)))


def siblings(model: Any, fully_shard: Callable[..., Any], mesh: DeviceMesh) -> None:
    fully_shard([model.norm, model.head], mesh=mesh)
    by_block(model, fully_shard, mesh)


def only_root(model: Any, fully_shard: Callable[..., Any], mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


def nested(model: Any, fully_shard: Callable[..., Any], mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block.up, mesh=mesh)
        fully_shard(block.down, mesh=mesh, reshard_after_forward=False)
    by_block(model, fully_shard, mesh)


def no_sync(model: Any, micro: int) -> None:
    model.set_requires_gradient_sync(micro == 2)


def no_sync_keeping(model: Any, micro: int) -> None:
    model.set_requires_gradient_sync(micro == 2)
    model.set_reshard_after_backward(micro == 2)
    model.set_is_last_backward(micro == 2)


def no_all_reduce(model: Any, micro: int) -> None:
    model.set_requires_all_reduce(micro == 2)


def zeros_for_unused(model: Any, fully_shard: Callable[..., Any], mesh: DeviceMesh) -> None:
    by_block(model, fully_shard, mesh)
    model.set_reduce_scatter_unused_params(True)


def setters(model: Any, fully_shard: Callable[..., Any], mesh: DeviceMesh) -> None:
    by_block(model, fully_shard, mesh)
    model.set_reshard_after_forward(True)
    model.set_reduce_scatter_max_input_buffers(3)
    model.set_force_sum_reduction_for_comms(True)
    model.blocks[0].set_unshard_in_backward(True)
    if isinstance(
        model, FSDPModule
    ):  # PyTorch names the group by how many a rank has seen: it hangs where those differ
        model.set_separate_reduce_scatter_group(True)
    model.set_allocate_memory_from_process_group_for_comm(True)


def doubles_apart(model: Any, fully_shard: Callable[..., Any], mesh: DeviceMesh) -> None:
    """FSDP2 takes one dtype in a group."""
    fully_shard([model.blocks[1].inner.up, model.blocks[1].inner.down], mesh=mesh)
    by_block(model, fully_shard, mesh)


def without_some(model: Any, fully_shard: Callable[..., Any], mesh: DeviceMesh) -> None:
    """Ignored parameters stay as they are; the loss is one that gives them the same gradient everywhere."""
    ignored = {model.blocks[0].down.weight, model.head.bias}
    by_block(model, fully_shard, mesh, ignored_params=ignored)
    assert ignored == {p for p in model.parameters() if not isinstance(p, DTensor)}


def mixed_dtypes() -> nn.Module:
    model = Net()
    model.blocks[1].double()
    model.blocks[1].norm.float()

    class Cast(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner.down(torch.relu(self.inner.up(self.inner.norm(x).double()))).float()

    model.blocks[1] = Cast(model.blocks[1])
    return model


def cast_at_the_end(model: Any, fully_shard: Callable[..., Any], mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
    assert model.blocks[0].up.weight.dtype == torch.float32


def not_cast(model: Any, fully_shard: Callable[..., Any], mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False))
    fully_shard(model, mesh=mesh)


def blocks_of_rows(model: Any, fully_shard: Callable[..., Any], mesh: DeviceMesh) -> None:
    """Two rows of a matrix, and three elements of a vector, stay on one rank."""

    def policy(name: str, parameter: nn.Parameter) -> int:
        return 2 * parameter.shape[1] if parameter.ndim == 2 else 3

    ours = fully_shard is our_fully_shard
    by_block(model, fully_shard, mesh, **({"orig_param_policy": policy} if ours else {}))
    for name, parameter in model.named_parameters() if ours else ():
        size = policy(name, parameter)
        assert parameter.to_local().numel() % size == 0 or holds_the_end(parameter), name


def holds_the_end(parameter: Any) -> bool:
    """Whether this rank has the last element of a ragged parameter: only that piece may end inside of a block."""
    units = parameter.placements[0].local_units
    return not any(units[parameter.device_mesh.get_local_rank() + 1 :])


MESHES_OF_THEIR_OWN = hasattr(_fsdp_common, "ShardPlacementResult")  # since 2.12


def own_mesh_for_some(model: Any, fully_shard: Callable[..., Any], mesh: DeviceMesh) -> None:
    """Some weights are sharded over two ranks and replicated over two; all others over four."""
    grid = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard"))
    info = _fsdp_common.HSDPMeshInfo(grid, shard_mesh_dim=1, replicate_mesh_dim=0)

    def placement(parameter: nn.Parameter) -> Any:
        return _fsdp_common.ShardPlacementResult(Shard(0), info) if parameter.ndim == 2 else None

    by_block(model, fully_shard, mesh, shard_placement_fn=placement)
    assert {parameter.device_mesh.ndim for parameter in model.blocks[0].parameters()} == {1, 2}


def same_data_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return net_loss(model, step, 0)


class Case(NamedTuple):
    name: str
    arguments: dict[str, Any]
    stock_fails: str | None = None
    """What FSDP2 says, or that it hangs or is wrong, where it cannot do this."""


def case(
    name: str,
    build: Callable[..., nn.Module] = Net,
    loss: Any = net_loss,
    shard: Any = by_block,
    stock_fails: str | None = None,
    **rest: Any,
) -> Case:
    return Case(name, {"build": build, "loss": loss, "shard": shard, "stock": stock_fails is None, **rest}, stock_fails)


NOT_USED_EVERYWHERE = "hangs, or mixes up gradients: each rank reduces what it has used"
"""Not tried: a rank would be lost. With zeros for unused parameters FSDP2 can do it, and is compared with."""

NARROW = {"tolerance": 2e-3, "device_tolerance": 6e-2}
"""For half precision: against FSDP2, which rounds at the same places, and against float32 on one device."""
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

CASES = [
    case("by block"),
    case("only the root", shard=only_root),
    case("modules in modules", shard=nested),
    case("keep after forward", shard=options(reshard_after_forward=False)),
    case("reshard to two ranks", shard=options(reshard_after_forward=2)),
    case("explicit prefetch", shard=prefetching),
    case("SGD with momentum", optimizer=functools.partial(torch.optim.SGD, momentum=0.9)),
    case("HSDP", mesh_shape=(2, 2)),
    case("HSDP, also the root resharded", mesh_shape=(2, 2), shard=options(reshard_after_forward=True)),
    case("only replicas", mesh_shape=(4, 1)),
    case("setters", shard=setters),
    case("frozen block", functools.partial(frozen, Net, "blocks.1.")),
    case("frozen parts of blocks", functools.partial(frozen, Net, "up.weight", "norm.bias", "embed")),
    case("accumulation without sync", microbatches=3, around=no_sync),
    case("accumulation, parameters kept", microbatches=3, around=no_sync_keeping),
    case("accumulation with sync", microbatches=3),
    case("accumulation without all-reduce", microbatches=3, around=no_all_reduce, mesh_shape=(2, 2)),
    case("bfloat16", shard=options(mp_policy=BFLOAT16), **NARROW),
    case("bfloat16, output", shard=cast_at_the_end, **NARROW),
    case("bfloat16, no sync", shard=options(mp_policy=BFLOAT16), **NARROW, microbatches=3, around=no_sync),
    case("bfloat16, HSDP, no all-reduce", shard=options(mp_policy=BFLOAT16), **NARROW, microbatches=3,
         around=no_all_reduce, mesh_shape=(2, 2)),
    case("bfloat16, inputs as they are", functools.partial(Net, block=CastsItself), shard=not_cast, **NARROW),
    case("offload", shard=options(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    case("offload, HSDP, no sync", shard=options(offload_policy=CPUOffloadPolicy(pin_memory=False)), microbatches=3,
         around=no_sync, mesh_shape=(2, 2)),
    case("LoRA", functools.partial(Net, block=Adapted)),
    case("LoRA, bfloat16", functools.partial(Net, block=Adapted), shard=options(mp_policy=BFLOAT16), **NARROW),
    case("ignored parameters", loss=same_data_loss, shard=without_some),
    case("scalar, empty and unused parameters", functools.partial(Net, block=Strange),
         stock_fails="doesn't support scalar parameters"),
    case("unused parameters", functools.partial(Net, block=functools.partial(Strange, scalar=False))),
    case("unused as zeros", functools.partial(Net, block=functools.partial(Strange, scalar=False)), shard=zeros_for_unused,
         reference=False),
    case("experts that some ranks use", functools.partial(Net, block=Experts), steps=5,
         stock_fails=NOT_USED_EVERYWHERE),
    case("experts, unused as zeros", functools.partial(Net, block=Experts), steps=5, shard=zeros_for_unused,
         reference=False),
    case("experts, two microbatches, unused as zeros", functools.partial(Net, block=Experts), shard=zeros_for_unused,
         microbatches=3, around=no_sync, reference=False),
    case("experts, two microbatches", functools.partial(Net, block=Experts), microbatches=3, around=no_sync,
         stock_fails=NOT_USED_EVERYWHERE),
    case("experts, HSDP", functools.partial(Net, block=Experts), microbatches=3, around=no_all_reduce,
         mesh_shape=(2, 2), stock_fails=NOT_USED_EVERYWHERE),
    case("tied weights in one group", functools.partial(Net, tied=True)),
    case("modules that run twice", functools.partial(Net, repeat=2)),
    case("modules that run twice, kept", functools.partial(Net, repeat=2), shard=options(reshard_after_forward=False)),
    case("checkpointing, non-reentrant", functools.partial(Net, recompute=False)),
    case("checkpointing, reentrant", functools.partial(Net, recompute=True)),
    case("checkpointing, run twice", functools.partial(Net, recompute=False, repeat=2)),
    case("checkpointing, reentrant, run twice", functools.partial(Net, recompute=True, repeat=2),
         stock_fails="gradients of the first call are lost"),
    case("nested inputs and outputs, views", functools.partial(UsesIos, writes=False), dense_loss),
    case("nested inputs and outputs, views, writes", UsesIos, dense_loss, stock_fails="out of bounds for storage of size 0"),
    case("siblings in one group", Siblings, dense_loss, siblings),
    case("Shard(0)", shard=options(shard_placement_fn=lambda p: Shard(0))),
    case("Shard(last) for matrices", functools.partial(Net, 8), shard=options(
        shard_placement_fn=lambda p: Shard(-1) if p.ndim == 2 and p.shape[-1] % 4 == 0 else None)),
    *([case("a mesh of their own for some", shard=own_mesh_for_some)] if MESHES_OF_THEIR_OWN else []),
    case("blocks of rows", shard=blocks_of_rows),
    case("Shard(last), uneven", shard=options(shard_placement_fn=lambda p: Shard(-1) if p.ndim else None),
         stock_fails="does not support uneven sharding on dim 1"),
    case("mixed dtypes", mixed_dtypes, stock_fails="expects uniform original parameter dtype"),
    case("mixed dtypes in groups of their own", mixed_dtypes, shard=doubles_apart),
    case("LSTM", functools.partial(Net, block=lambda dim: Recurrent(dim))),
]  # fmt: skip


LOST = next(one for one in CASES if one.stock_fails == "gradients of the first call are lost")
REFUSED = [one for one in CASES if one.stock_fails not in (None, NOT_USED_EVERYWHERE, LOST.stock_fails)]


def stock_fails(name: str) -> None:
    """FSDP2 cannot do what the case does: then, and only then, there is nothing to compare with."""
    one = next(one for one in CASES if one.name == name)
    torch.manual_seed(0)
    model = one.arguments["build"]()
    if one is LOST:
        with pytest.raises(AssertionError, match="stock: Tensor-likes are not close"):
            compare(**{**one.arguments, "stock": True})
        return
    assert one.stock_fails is not None
    with pytest.raises((ValueError, RuntimeError, NotImplementedError, AssertionError), match=one.stock_fails):
        one.arguments["shard"](model, stock_fully_shard, mesh_of())
        one.arguments["loss"](model, 0, dist.get_rank()).backward()


def stock_fails_everywhere() -> int:
    return run_cases(stock_fails, [(one.name,) for one in [LOST, *REFUSED]])


def test_what_fsdp2_is_not_compared_with_it_cannot_do(ranks: RankPools) -> None:
    # On the CPU: on a device, what FSDP2 has gathered before it raises is waited for by nobody.
    ranks.run(stock_fails_everywhere, world_size=4, device="cpu")


class Recurrent(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(dim, dim, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


def run(name: str) -> None:
    found = {one.name: one for one in CASES}[name]
    compare(**found.arguments)


def run_all(names: list[str]) -> int:
    return run_cases(run, [(name,) for name in names])


@pytest.mark.parametrize("start", range(0, len(CASES), 10))
def test_trains_like_one_device_and_fsdp2(ranks: RankPools, start: int) -> None:
    names = daily_sample(one.name for one in CASES[start : start + 10])
    assert len({one.name for one in CASES}) == len(CASES)
    assert ranks.run(run_all, names, world_size=4, timeout=600) == [len(names)] * 4


def reduced_several_times() -> None:
    """With reentrant checkpointing each call of a unit is reduced apart; which experts the ranks have used differs."""

    def build() -> nn.Module:  # 90 choices a step: in float32 one of them would differ now and then
        return Net(block=Experts, recompute=True, repeat=3).double()

    compare(build, net_loss, steps=5, stock=False, microbatches=2)


def test_experts_of_a_unit_that_is_reduced_several_times(ranks: RankPools) -> None:
    ranks.run(reduced_several_times, world_size=2)


def finalized_by_hand(async_op: bool) -> None:
    """What two backwards without sync have left is reduced by one call, which has nothing to do before and afterwards."""
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
    reference, model = Net().double(), Net().double()
    model.load_state_dict(reference.state_dict())
    by_block(model, our_fully_shard, mesh)
    sharded: Any = model
    sharded.set_manual_backward_finalization(True)
    assert sharded.finalize_backward() is None
    for step in range(2):
        sharded.set_requires_gradient_sync(False)
        for micro in (2 * step, 2 * step + 1):
            for rank in range(dist.get_world_size()):
                (net_loss(reference, micro, rank) / dist.get_world_size()).backward()
            net_loss(model, micro, dist.get_rank()).backward()
        sharded.set_requires_gradient_sync(True)
        for _ in range(2):
            handle = sharded.finalize_backward(async_op=async_op)
            assert (handle is not None) is async_op
            if handle is not None:
                handle.wait()
                handle.wait()
        for (name, own), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert isinstance(own.grad, DTensor) and wanted.grad is not None
            torch.testing.assert_close(own.grad.full_tensor(), wanted.grad, msg=name)
        net_loss(model, 9, dist.get_rank()).backward()  # reduces at its end
        for rank in range(dist.get_world_size()):
            (net_loss(reference, 9, rank) / dist.get_world_size()).backward()
        assert sharded.finalize_backward() is None
        model.zero_grad()
        reference.zero_grad()
    with pytest.raises(NotImplementedError, match="one buffer"):
        sharded.set_keep_unsharded_storage(True)
    sharded.set_keep_unsharded_storage(False)


def all_finalized() -> int:
    return run_cases(finalized_by_hand, [(False,), (True,)])


def test_backward_is_finalized_by_hand(ranks: RankPools) -> None:
    ranks.run(all_finalized, world_size=2)


NARROW = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
# PyTorch 2.15 reduces in the parameters' own dtype by default, and has this option.
OVERRIDES = "param_dtype_override_fn" in MixedPrecisionPolicy.__dataclass_fields__


def bits_of_fsdp2(keeps_vectors: bool) -> None:
    """Two ranks: a sum of two numbers has one order."""
    policy: Any = NARROW
    if keeps_vectors:
        policy = MixedPrecisionPolicy(
            torch.bfloat16,
            param_dtype_override_fn=lambda p: p.dtype if p.ndim == 1 else None,  # type: ignore[call-arg]
        )
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)]
    models: list[Any] = [copy.deepcopy(nn.Sequential(*layers)) for _ in range(2)]
    mesh = mesh_of()
    for model, fully_shard in zip(models, (stock_fully_shard, our_fully_shard), strict=True):
        for layer in model:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    dtypes = []
    models[1][0][1].register_forward_pre_hook(lambda m, _: dtypes.append(m.weight.dtype))
    for micro in range(3):
        torch.manual_seed(dist.get_rank() + 2 * micro)
        x = torch.randn(4, 8, device=device_type())
        for model in models:
            model.set_requires_gradient_sync(micro > 0)
            with torch.autocast(device_type(), dtype=torch.bfloat16, enabled=keeps_vectors):
                model(x).float().square().mean().backward()
        stock, own = ([p.grad for p in model.parameters()] for model in models)
        for expected, found in zip(stock, own, strict=True):
            assert micro == 0 or torch.equal(expected.full_tensor(), found.full_tensor())
    assert dtypes[0] == (torch.float32 if keeps_vectors else torch.bfloat16)


def test_default_dtype_of_reductions_is_that_of_the_installed_pytorch(ranks: RankPools) -> None:
    for keeps_vectors in (False, *([True] if OVERRIDES else [])):
        ranks.run(bits_of_fsdp2, keeps_vectors, world_size=2)


@dataclasses.dataclass
class State:
    h: torch.Tensor
    num_calls: int = 0
    seen: list[torch.Tensor] = dataclasses.field(default_factory=list)


class WritesToContainers(nn.Module):
    """What it is given belongs to its caller, who reads it afterwards."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, state: State, cache: dict[str, Any], queue: tuple[list[Any]]) -> State:
        h = torch.tanh(self.linear(state.h)) * queue[0].pop(0)
        state.seen.append(state.h)
        state.h, state.num_calls = state.h + h, state.num_calls + 1
        cache["last"] = cache["last"] * 0.5 + h
        cache.setdefault("all", []).append(h.mean())
        return state


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WritesToContainers(4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, given = State(x), x * 2
        cache: dict[str, Any] = {"last": given, "first": given}
        queue = [x.mean(), 0.5, x.sum()]
        for block in self.blocks:
            assert block(state, cache=cache, queue=(queue,)) is state
        assert cache["first"] is given and state.seen[0] is x and len(queue) == 1
        return state.h.sum() * state.num_calls + sum(cache["all"]) + cache["last"].mean() * queue[0]


def containers() -> float:
    largest = 0.0
    torch.manual_seed(0)
    models = [Caller().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for block in models[1].blocks:
        our_fully_shard(block, mesh=mesh_of((2,)))
    our_fully_shard(models[1], mesh=mesh_of((2,)))
    for step in range(2):
        x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).requires_grad_()
        losses = [model(x * 1) for model in models]
        for loss in losses:
            loss.backward()
        pairs = zip(models[0].parameters(), models[1].parameters())
        found = [(p.grad, q.grad.full_tensor()) for p, q in pairs]  # type: ignore[union-attr]
        largest = max([largest, *(float((a - b).detach().abs().max()) for a, b in [*found, losses])])  # type: ignore
    return largest


def test_containers_of_the_caller(ranks: RankPools) -> None:
    assert max(ranks.run(containers, world_size=2)) < 1e-12
