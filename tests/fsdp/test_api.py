"""The public surface: every method of the installed FSDP2, settings, errors, copies, and what is where in each phase."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule as StockFSDPModule
from torch.distributed.fsdp import UnshardHandle as StockUnshardHandle
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as stock_register_fsdp_forward_method
from torch.distributed.fsdp import share_comm_ctx as stock_share_comm_ctx
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import vescale
from tests.device import device_type
from tests.fsdp.compare import by_block, data, full, mesh_of, resting_memory
from tests.fsdp.models import Net, net_loss, tokens
from tests.ranks import RankPools, run_functions
from vescale.buffer import Allocation
from vescale.comm import record_comms
from vescale.errors import ArgumentTypeError, BufferMismatchError
from vescale.fsdp import (
    FSDPModule,
    ModuleState,
    UnshardHandle,
    fully_shard,
    give_methods,
    register_fsdp_forward_method,
    report,
    share_comm_ctx,
    state_of,
)
from vescale.placements import RaggedShard

# Names that a stock method has and ours need not: private ones.
_METHODS = [name for name, _ in inspect.getmembers(StockFSDPModule, inspect.isfunction) if not name.startswith("_")]


@pytest.mark.parametrize("name", _METHODS)
def test_every_public_method_of_fsdp2_is_there(name: str) -> None:
    stock, ours = getattr(StockFSDPModule, name), getattr(FSDPModule, name, None)
    assert ours is not None, f"FSDPModule.{name} is missing"
    stock_parameters = inspect.signature(inspect.unwrap(stock)).parameters
    our_parameters = inspect.signature(ours).parameters
    assert [(p.name, p.kind, p.default) for p in stock_parameters.values()] == [
        (p.name, p.kind, p.default) for p in our_parameters.values()
    ]


def test_nothing_is_inherited_from_fsdp2() -> None:
    """PyTorch takes a sharded module for one of its own, and all that it could call on it is this engine's."""
    state = object.__new__(ModuleState)
    state.modules = (nn.Linear(1, 1),)
    give_methods(state, for_torch=True)
    made = type(state.modules[0])
    assert issubclass(made, StockFSDPModule) and issubclass(made, FSDPModule)
    members = [
        name for name, member in vars(StockFSDPModule).items() if callable(member) or isinstance(member, property)
    ]
    assert set(_METHODS) < set(members)
    inherited = [name for name in members if inspect.getattr_static(made, name) is vars(StockFSDPModule)[name]]
    assert inherited == []
    state.modules = (nn.Linear(1, 1),)
    give_methods(state)  # a plan's unit, whose gradients are not for PyTorch to accumulate
    assert isinstance(state.modules[0], FSDPModule) and not isinstance(state.modules[0], StockFSDPModule)


def test_functions_of_fsdp2_are_there() -> None:
    assert {"unshard", "reshard", "set_requires_gradient_sync", "set_modules_to_forward_prefetch"} <= set(_METHODS)
    stock = inspect.signature(inspect.unwrap(stock_fully_shard)).parameters
    assert set(stock) <= set(inspect.signature(fully_shard).parameters)
    for name in ("fully_shard", "FSDPModule", "UnshardHandle", "register_fsdp_forward_method", "share_comm_ctx"):
        assert getattr(vescale, name) is getattr(vescale.fsdp, name)
        assert hasattr(torch.distributed.fsdp, name)
    assert issubclass(UnshardHandle, StockUnshardHandle)
    assert UnshardHandle.wait is not StockUnshardHandle.wait


def sharded(**options: Any) -> Any:
    torch.manual_seed(0)
    model = Net()
    by_block(model, fully_shard, mesh_of(), **options)
    return model


def phases() -> None:
    """Which parameters are registered, what memory there is, and how many collectives there are."""
    torch.manual_seed(0)
    plain = Net()
    model = sharded()
    assert type(model).__name__ == "FSDPNet" and isinstance(model, Net) and isinstance(model, FSDPModule)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    weight = model.blocks[0].up.weight
    assert isinstance(weight, DTensor) and isinstance(weight.placements[0], RaggedShard)
    group = model.blocks[0]._state.groups[0]
    shards = group.buckets[0].shards
    owned = sum(p.to_local().numel() for p in model.blocks[0].parameters())
    assert owned <= shards.numel
    assert resting_memory(model.blocks[0]) == {shards.local.data_ptr(): shards.num_bytes}
    seen: list[bool] = []
    model.blocks[1].up.register_forward_hook(
        lambda *_: seen.append(
            not isinstance(model.blocks[1].up.weight, DTensor)
            and isinstance(model.blocks[0].up.weight, DTensor)
            and not (group.buckets[0].whole.is_allocated and device_type() == "cpu")  # else with a later gather
        )
    )
    with record_comms() as ledger:
        loss = net_loss(model, 0, dist.get_rank())
    assert seen == [True]
    assert [r.op for r in ledger.records if r.requester] and ledger.count("all_gather_v") == 4
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    with record_comms() as ledger:
        loss.backward()
    assert ledger.count("all_gather_v") == 3 and ledger.count("reduce_scatter_v") == 4
    assert isinstance(model.head.weight, DTensor) and model.blocks[0].up.weight is weight
    for bucket in [b for state in model._states(True) for g in state.groups for b in g.buckets]:
        assert not bucket.whole.is_allocated and not bucket.unreduced.buffer.is_allocated
    assert all(isinstance(p.grad, DTensor) and p.grad.placements == p.placements for p in model.parameters())
    with torch.no_grad(), record_comms() as ledger:
        with torch.inference_mode():
            model(tokens(0, 0))
        model(tokens(0, 0))
    assert ledger.count("all_gather_v") == 8  # the root is kept for a backward only
    assert all(isinstance(p, DTensor) for p in model.parameters())
    net_loss(model, 1, dist.get_rank()).backward()


def siblings_rest_when_the_last_has_run() -> None:
    """Modules of one group are gathered for the first one that runs, and rest after the last one."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3))
    fully_shard([model[0], model[1]], mesh=mesh_of())
    fully_shard(model, mesh=mesh_of())
    whole, found = model[0]._state.groups[0].buckets[0], []
    for module in (model[0], model[2]):
        module.register_forward_hook(lambda *_: found.append(whole.whole.is_allocated))
    for _ in range(2):
        model(torch.ones(2, 5)).sum().backward()
    assert found == [True, device_type() != "cpu"] * 2  # there its memory goes with a later gather
    assert not whole.whole.is_allocated and not whole.unreduced.buffer.is_allocated


def one_reduction_in_a_backward() -> None:
    """Of each group, though its modules run twice and other graphs hold calls of them."""
    torch.manual_seed(0)
    model = Net(repeat=2)
    by_block(model, fully_shard, mesh_of())
    losses = [net_loss(model, step, dist.get_rank()) for step in range(2)]
    for number in (1, 0, 0):
        with record_comms() as ledger:
            losses[number].backward(retain_graph=True)
        assert ledger.count("reduce_scatter_v") == 4, (number, ledger)


def unshard_by_hand() -> None:
    model = sharded()
    whole = {name: full(p) for name, p in model.named_parameters()}
    handle = model.blocks[0].unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    handle.wait()
    assert not isinstance(model.blocks[0].up.weight, DTensor)
    assert torch.equal(model.blocks[0].up.weight, whole["blocks.0.up.weight"])
    assert model.blocks[0].unshard() is None
    model.blocks[0].reshard()
    assert isinstance(model.blocks[0].up.weight, DTensor)
    model.unshard()
    state = model.state_dict()  # state dicts are of the sharded parameters, whatever the phase
    assert all(isinstance(value, DTensor) for value in state.values())
    model.head.weight  # noqa: B018
    twin = copy.deepcopy(model)
    assert isinstance(twin, FSDPModule) and twin.blocks[0]._state is not model.blocks[0]._state
    loss = net_loss(model, 0, dist.get_rank())
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    for name, p in twin.named_parameters():
        assert torch.equal(full(p.detach()), whole[name]) and p.grad is None
    assert net_loss(twin, 0, dist.get_rank()) == loss
    twin.reshard()  # the root keeps its parameters until backward
    with torch.no_grad():
        for average, p in zip(twin.parameters(), model.parameters(), strict=True):
            average.lerp_(p, 0.5)
    for name, p in twin.named_parameters():
        expected = whole[name].lerp(full(model.get_parameter(name).detach()), 0.5)  # type: ignore[union-attr]
        torch.testing.assert_close(full(p.detach()), expected)
    net_loss(twin, 0, dist.get_rank()).backward()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    assert isinstance(averaged.module, FSDPModule)
    assert type(model.blocks[:2]) is nn.ModuleList and type(type(model.blocks[0])(7)).__name__ == "Block"


def recovery() -> None:
    """An exception in forward and in backward; then the iteration is forgotten and training goes on."""
    model, same = sharded(), sharded()

    def fail(*_: Any) -> None:
        raise KeyError("on purpose")

    for where in ("forward", "backward"):
        for m in (model,):
            if where == "forward":
                handle = m.blocks[1].up.register_forward_hook(fail)
                with pytest.raises(KeyError, match="on purpose"):
                    m(tokens(0, 0))
            else:
                handle = m.blocks[1].up.register_full_backward_hook(fail)
                with pytest.raises(KeyError, match="on purpose"):
                    net_loss(m, 0, dist.get_rank()).backward()
            handle.remove()
            with pytest.raises(RuntimeError, match="not the root"):
                m.blocks[0].reset_iter_state()
            m.reset_iter_state()
            m.zero_grad()
    for m in (model, same):
        net_loss(m, 1, dist.get_rank()).backward()
    for p, q in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(full(p.grad), full(q.grad))  # type: ignore[arg-type]


def settings() -> None:
    model = sharded()
    calls: list[int] = []
    model.blocks[0].set_all_reduce_hook(lambda piece: calls.append(piece.numel()))
    model.set_gradient_divide_factor(1.0)
    for block in model.blocks:
        block.set_gradient_divide_factor(1.0)
    plain = sharded()
    for m in (model, plain):
        net_loss(m, 0, dist.get_rank()).backward()
    assert len(calls) == 1
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), dist.get_world_size() * full(q.grad))  # type: ignore[operator]

    order: list[str] = []

    class Gather:
        def allocate(self, *_: Any, **__: Any) -> Any: ...

        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
            order.append("gather")
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

    class Scatter(Gather):
        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
            order.append("reduce")
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)

    custom = sharded()
    custom.blocks[0].set_custom_all_gather(Gather())
    custom.blocks[0].set_custom_reduce_scatter(Scatter())
    net_loss(custom, 0, dist.get_rank()).backward()
    assert order == ["gather", "gather", "reduce"]
    for p, q in zip(custom.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), full(q.grad))

    def predict(self: Any, ids: torch.Tensor) -> torch.Tensor:
        return self(ids).argmax(-1)

    Net.scores = lambda self, ids: self.head(self.embed(ids))  # type: ignore[attr-defined]
    other = sharded()
    register_fsdp_forward_method(other, "scores")
    register_fsdp_forward_method(nn.Linear(2, 2), "anything")
    with pytest.raises(ValueError, match="no method 'nothing'"):
        register_fsdp_forward_method(other, "nothing")
    other.scores(tokens(0, dist.get_rank())).sum().backward()
    assert other.head.weight.grad is not None and other.blocks[0].up.weight.grad is None
    share_comm_ctx([model, other])
    share_comm_ctx([])
    assert other.blocks[0]._state.comm is model._state.comm
    for m in (model, other):
        net_loss(m, 1, dist.get_rank()).backward()


def optimizer_in_backward() -> None:
    """Hooks on sharded parameters run when their gradient is complete."""
    model, plain = sharded(), sharded()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda q: (torch.optim.SGD([q], 0.1).step(), q.__setattr__("grad", None)))
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(2):
        for m in (model, plain):
            net_loss(m, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is None and torch.equal(full(p.detach()), full(q.detach()))  # type: ignore[arg-type]


def direct_gradients() -> None:
    models = [sharded(), sharded()]
    models[0].set_direct_linear_gradients()
    kept: list[int] = []
    for step in range(2):
        for m in models:
            m.zero_grad()
            if m is models[0] and step:
                bucket = m.blocks[0]._state.groups[0].buckets[0]
                index = [p.name for p in bucket.parameters].index("blocks.0.up.weight")
                parameter = bucket.parameters[index].unsharded
                parameter.register_hook(
                    lambda g, b=bucket, i=index: kept.append(g.data_ptr() - b.unreduced.buffer.views[i].data_ptr())
                )
            net_loss(m, step, dist.get_rank()).backward()
    assert kept == [0]
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(full(p.grad), full(q.grad))  # type: ignore[arg-type]
    models[0].set_direct_linear_gradients(False)
    assert "forward" not in models[0].head.__dict__


def reports() -> None:
    model = sharded()
    model.blocks[0].up.bias.requires_grad_(False)
    found = report(model)
    assert [one.path for one in found] == ["", "blocks.0", "blocks.1", "blocks.2"]
    block = found[1]
    assert block.num_elements == sum(p.numel() for p in model.blocks[0].parameters())
    world = dist.get_world_size()
    assert block.resting_bytes * world == block.whole_bytes == 4 * (block.num_elements + block.padding_elements)
    with record_comms() as ledger:
        net_loss(model, 0, dist.get_rank())
    assert block.all_gather_bytes in [r.bytes for r in ledger.records if r.requester == "blocks.0"]
    assert len(str(found).splitlines()) == 7


def what_hooks_see() -> None:
    """Zeros where no gradient is: between tensors, and where tensor parallelism leaves this rank less than others."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    allocate = Allocation._allocate

    def poisoned(self: Allocation) -> None:
        is_new = not self.is_allocated
        allocate(self)
        if is_new and self.num_bytes:
            torch.empty(0, device=self.storage.device).set_(self.storage).fill_(torch.nan)  # type: ignore[call-overload]

    for accumulates in (False, True):
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
        fully_shard(model, mesh=mesh["dp"])
        pieces: list[torch.Tensor] = []
        model.set_all_reduce_hook(lambda piece, pieces=pieces: pieces.append(piece.clone()))  # type: ignore[operator]
        with mock.patch.object(Allocation, "_allocate", poisoned):
            for is_last in (False, True) if accumulates else (True,):
                model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
                model(torch.ones(2, 3)).sum().backward()
        gradients = [p.grad.to_local() for p in model.parameters()]  # type: ignore[union-attr]
        (piece,) = pieces
        assert piece.numel() > sum(gradient.numel() for gradient in gradients)
        torch.testing.assert_close(piece.square().sum(), sum(gradient.square().sum() for gradient in gradients))


def as_torch_sees_it() -> None:
    """PyTorch finds the module and its state, and does not do to it what is for its own engine alone."""
    model, mesh = sharded(), mesh_of()
    assert isinstance(model, StockFSDPModule) and isinstance(model.blocks[0], StockFSDPModule)
    assert not isinstance(model.blocks, StockFSDPModule) and not isinstance(model.head, FSDPModule)
    found = [fully_shard.state(module) for module in (model, *model.blocks)]  # type: ignore[attr-defined]
    assert len(set(found)) == 4 and found[0] is state_of(model) and isinstance(found[0], ModuleState)
    assert found == [stock_fully_shard.state(module) for module in (model, *model.blocks)]  # type: ignore[attr-defined]
    assert found[1] is model.blocks[0]._get_fsdp_state()
    for shard in (fully_shard, stock_fully_shard):
        assert shard.state(model.blocks) is None and shard.state(nn.Linear(1, 1)) is None  # type: ignore[attr-defined]
    pair = [nn.Linear(2, 2), nn.Linear(2, 2)]
    fully_shard(pair, mesh=mesh)  # type: ignore[arg-type]
    assert stock_fully_shard.state(pair[0]) is stock_fully_shard.state(pair[1]) is state_of(pair[0])  # type: ignore[attr-defined]
    twin = copy.deepcopy(model)
    assert stock_fully_shard.state(twin) is state_of(twin) is not found[0]  # type: ignore[attr-defined]
    with pytest.raises(ArgumentTypeError, match=r"mesh is 7\.5, a float; pass a DeviceMesh"):
        fully_shard(nn.Linear(2, 2), mesh=7.5)  # type: ignore[call-overload]
    with pytest.raises(AssertionError, match="can only be applied to a module once"):
        stock_fully_shard(model, mesh=mesh)
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(model)
    theirs = nn.Linear(3, 3)
    stock_fully_shard(theirs, mesh=mesh)
    with pytest.raises(
        ValueError, match=r"given a FSDPLinear that torch\.distributed\.fsdp\.fully_shard has sharded; use"
    ):
        fully_shard(theirs, mesh=mesh)
    with pytest.raises(ValueError, match=r"given '0', a FSDPLinear that torch\.distributed\.fsdp\.fully_shard has"):
        fully_shard(nn.Sequential(theirs), mesh=mesh)
    with pytest.raises(AttributeError, match=r"ModuleState has no '_comm_ctx'.*use.*vescale\.fsdp's share_comm_ctx"):
        stock_share_comm_ctx([model, twin])
    stock_register_fsdp_forward_method(twin, "get_extra_state")
    with pytest.raises(AttributeError, match=r"no '_pre_forward'.*use.*register_fsdp_forward_method"):
        twin.get_extra_state()
    with pytest.raises(NotImplementedError, match=r"_set_unshard_async_op.*Delete this call"):
        model._set_unshard_async_op(True)
    net_loss(model, 0, dist.get_rank()).backward()


def beside_replicate() -> None:
    """What PyTorch's ``replicate`` has is not sharded, and it has nothing of what is."""
    mesh, rank = mesh_of(), dist.get_rank()
    models: list[Any] = []
    for kind in ("inside", "outside", "one device"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
        models.append(model)
        if kind == "inside":
            replicate(model[2])
            with pytest.raises(ValueError, match="given a DDPLinear to which replicate has been applied"):
                fully_shard(model[2], mesh=mesh)
            fully_shard(model, mesh=mesh)
        if kind == "outside":
            fully_shard(model[0], mesh=mesh)
            replicate(model)
    for model in models[:2]:
        assert [isinstance(p, DTensor) for p in model.parameters()] == [True, True, False, False]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            ranks = range(dist.get_world_size()) if model is models[2] else [rank]
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)  # of parameters that nothing reduces
                loss = torch.stack([model(data((2, 5), step, one)).square().sum() for one in ranks]).mean()
            loss.backward()
            optimizer.step()
    for name, expected in models[2].named_parameters():
        for model in models[:2]:
            torch.testing.assert_close(full(model.get_parameter(name).detach()), expected.detach())


def marks() -> None:
    """What is said of each module to torch.compile, and to those who ask whether all ranks must run alike."""
    models: list[Any] = [
        nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)) for _ in range(2)
    ]
    for model, shard in zip(models, (stock_fully_shard, fully_shard), strict=True):
        shard(model[1], mesh=mesh_of())
        shard(model, mesh=mesh_of())
    stock, ours = ([vars(module) for module in model.modules()] for model in models)
    for attribute in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
        assert [one.get(attribute) for one in ours] == [one.get(attribute) for one in stock] == [True] * 5


PARTS = {  # by the number of ranks
    2: (
        phases,
        siblings_rest_when_the_last_has_run,
        one_reduction_in_a_backward,
        unshard_by_hand,
        recovery,
        settings,
        optimizer_in_backward,
        direct_gradients,
        reports,
        as_torch_sees_it,
        beside_replicate,
        marks,
    ),
    4: (what_hooks_see,),
}


@pytest.mark.parametrize("num_ranks", PARTS)
def test_engine(ranks: RankPools, num_ranks: int) -> None:
    assert ranks.run(run_functions, PARTS[num_ranks], world_size=num_ranks) == [len(PARTS[num_ranks])] * num_ranks


def errors() -> None:
    mesh = mesh_of()
    with pytest.raises(ValueError, match="has no forward for which"):
        fully_shard(nn.ModuleList([nn.Linear(2, 2)]), mesh=mesh)
    model = Net(tied=True)
    fully_shard(model.embed, mesh=mesh)
    with pytest.raises(ValueError, match=r"'head.weight' of Net is tied to 'weight' of Embedding"):
        fully_shard(model, mesh=mesh)
    grid = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    uneven = parallelize_module(nn.Linear(5, 2), grid["tp"], RowwiseParallel())
    unequal = r"'weight' of shape \(2, 5\).*divides the 5 indices of dim 1 into 2 parts of unequal length"
    with pytest.raises(NotImplementedError, match=unequal):  # on all ranks, whatever they hold
        fully_shard(uneven, mesh=grid["dp"])
    linear = nn.Linear(3, 3)
    fully_shard(linear, mesh=mesh)
    with pytest.raises(ValueError, match=r"already been called for this .*; pass each module once"):
        fully_shard(linear, mesh=mesh)
    with pytest.raises(ValueError, match="divides the 4 ranks"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, reshard_after_forward=3)
    with pytest.raises(ValueError, match="expected None, or Shard"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, shard_placement_fn=lambda p: RaggedShard())
    with pytest.raises(ValueError, match="expected a bool"):
        linear.set_reshard_after_forward(2)  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="expected an int"):
        linear.set_reduce_scatter_max_input_buffers(True)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="expected at least 1"):
        linear.set_reduce_scatter_max_input_buffers(0)  # type: ignore[attr-defined]
    with pytest.raises(NotImplementedError, match="symmetric memory"):
        linear.set_symm_mem_for_comm()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="fully_shard has been applied, got Linear"):
        linear.set_modules_to_forward_prefetch([nn.Linear(1, 1)])  # type: ignore[attr-defined, list-item]
    with torch.device("meta"):
        on_meta = Net()
    by_block(on_meta, fully_shard, mesh)
    with pytest.raises(RuntimeError, match="on the meta device; materialize"):
        on_meta(tokens(0, 0))
    wrong = Net(7 if dist.get_rank() != 2 else 8)
    by_block(wrong, fully_shard, mesh)
    expected = r"is \(11, 7\) float32 on ranks \[0, 1, 3\] and \(11, 8\) float32 on rank 2; every rank must"
    with pytest.raises(BufferMismatchError, match=expected):
        wrong(tokens(0, 0))


def test_errors_are_raised_on_every_rank(ranks: RankPools) -> None:
    ranks.run(errors, world_size=4)
