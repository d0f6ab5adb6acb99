"""What scripts do between and beside steps: exceptions, second derivatives, forwards that no backward follows, weights
written in between. The numbers are those of one device, also where PyTorch's FSDP2 has older weights or fails."""

from __future__ import annotations

import contextlib
import copy
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.fsdp.compare import by_block, data, gradients_of, mesh_of, parameters_of, same_gradients, train_step
from tests.fsdp.models import Block, Net, net_loss, tokens
from tests.fsdp.test_streams import on_device_path
from tests.ranks import RankPools, run_cases
from vescale.comm import record_comms
from vescale.fsdp import fully_shard, register_fsdp_forward_method, state_of


def sharded(build: Callable[[], nn.Module] = Net, **options: Any) -> Any:
    torch.manual_seed(0)
    model = build()
    by_block(model, fully_shard, mesh_of(), **options)
    return model


def break_off(model: Any) -> None:
    """A backward that a hook ends with an exception."""

    def fail(*_: Any) -> None:
        raise KeyError("on purpose")

    handle = model.blocks[1].up.register_full_backward_hook(fail)
    with pytest.raises(KeyError, match="on purpose"):
        net_loss(model, 1, dist.get_rank()).backward()
    handle.remove()


def broken_off(reset: bool) -> None:
    """After an exception in backward the next step is that of a model that had none, with and without a reset."""
    model, same = sharded(), sharded()
    optimizers = [torch.optim.SGD(one.parameters(), 0.0) for one in (model, same)]
    net_loss(model, 0, dist.get_rank()).backward()

    break_off(model)
    if reset:
        model.reset_iter_state()
    for step in (2, 3):
        for one, optimizer in zip((model, same), optimizers, strict=True):
            optimizer.zero_grad()
            net_loss(one, step, dist.get_rank()).backward()
        same_gradients([model, same], f"step {step} after an exception")


def muted_hooks() -> None:
    """A gradient that its parameter holds until that is resharded needs no hook; those that add up over backwards do. One
    that ``torch.autograd.grad`` returns begins nothing."""
    model, world = sharded(), list(range(dist.get_world_size()))
    torch.manual_seed(0)
    plain = Net()
    buckets = [b for module in (*model.blocks, model) for group in state_of(module).groups for b in group.buckets]
    for step, (syncs, is_muted) in enumerate([(True, True), (False, False), (True, False), (True, True)]):
        model.set_requires_gradient_sync(syncs)
        loss = net_loss(model, 100 * step, dist.get_rank())
        if not syncs:
            torch.autograd.grad(loss, [p.unsharded for p in buckets[-1].parameters], retain_graph=True)
            assert not any(bucket.unreduced.has_any for bucket in buckets)
        loss.backward()
        train_step(plain, step, net_loss, world)
        for parameter in (parameter for bucket in buckets for parameter in bucket.parameters):
            assert len(parameter.unsharded._backward_hooks) == 1
            assert bool(parameter.unsharded._post_accumulate_grad_hooks) != is_muted, (step, parameter.name)
        if syncs:
            for (name, own), expected in zip(gradients_of(model).items(), plain.parameters(), strict=True):
                torch.testing.assert_close(own, expected.grad, msg=f"step {step}: {name}")
            model.zero_grad()
            plain.zero_grad()


def failed_forward(where: str, first: bool) -> None:
    """After an exception in forward the parameters are the sharded ones, and what is written to them is used."""
    model = sharded()
    torch.manual_seed(0)
    plain = Net()
    if not first:
        net_loss(model, 0, dist.get_rank()).backward()
        model.zero_grad()

    def fail(*_: Any) -> None:
        raise KeyError("on purpose")

    handle = model.get_submodule(where).register_forward_hook(fail)
    with pytest.raises(KeyError, match="on purpose"):
        net_loss(model, 1, dist.get_rank())
    handle.remove()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    for one in (model, plain):
        stepped(list(one.parameters()))
    train_step(model, 2, net_loss, [dist.get_rank()])
    train_step(plain, 2, net_loss, list(range(dist.get_world_size())))
    for (name, own), expected in zip(gradients_of(model).items(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, expected.grad, msg=lambda m, name=name: f"{name}: {m}")


def failed_method() -> None:
    """The same of a method that gathers as forward does."""

    class Scoring(Net):
        def scores(self, ids: torch.Tensor) -> torch.Tensor:
            raise KeyError("on purpose")

    model = sharded(Scoring)
    register_fsdp_forward_method(model, "scores")
    with pytest.raises(KeyError, match="on purpose"):
        model.scores(tokens(0, 0))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    net_loss(model, 0, dist.get_rank()).backward()


def three_blocks(options: dict[str, Any]) -> tuple[Any, Any, torch.Tensor]:
    """Plain ones, the same in groups, and an input whose gradient is differentiated."""
    torch.manual_seed(0)
    plain: Any = nn.Module()
    plain.blocks = nn.ModuleList(Block(7) for _ in range(3))
    plain.forward = types.MethodType(lambda self, x: [x := block(x) for block in self.blocks][-1], plain)
    model = copy.deepcopy(plain)
    by_block(model, fully_shard, mesh_of(), **options)
    return plain, model, data((4, 7), 0, 7).requires_grad_()


def penalty(options: dict[str, Any]) -> None:
    """A gradient penalty: the backward is differentiated, for which parameters stay gathered by themselves."""
    plain, model, x = three_blocks(options)
    for step in range(2):
        for one in (plain, model):
            one.zero_grad()
            y = torch.tanh(one(x)).square().sum()
            (gradient,) = torch.autograd.grad(y, x, create_graph=True)
            (gradient.square().sum() + (y if step else 0)).backward()
        for (name, own), expected in zip(gradients_of(model).items(), plain.parameters(), strict=True):
            torch.testing.assert_close(own, expected.grad, msg=lambda m, name=name: f"{name}: {m}")
        assert all(isinstance(p, DTensor) for p in model.parameters())


def backwards_before_that_of_a_gradient(options: dict[str, Any]) -> None:
    """Plain ones, drawn, between a gradient that has a graph and the backward that differentiates it."""
    draw = random.Random(repr(options))
    for _ in range(6):
        kinds = draw.sample(["the same loss", "another forward", "a part", "evaluation"], draw.randint(1, 3))
        plain, model, x = three_blocks(options)
        for one in (plain, model):
            y = torch.tanh(one(x)).square().sum()
            (gradient,) = torch.autograd.grad(y, x, create_graph=True)
            for kind in kinds:
                if kind == "the same loss":
                    y.backward(retain_graph=True)
                elif kind == "evaluation":
                    with torch.no_grad():
                        one(x.detach())
                else:
                    (
                        one(x.detach()) if kind == "another forward" else one.blocks[1](x.detach())
                    ).square().sum().backward()
            gradient.square().sum().backward()
        for (name, own), expected in zip(gradients_of(model).items(), plain.parameters(), strict=True):
            torch.testing.assert_close(
                own, expected.grad, msg=lambda m, name=name, kinds=kinds: f"{kinds}: {name}: {m}"
            )
        del gradient, y
        model(x.detach()).sum().backward()
        assert all(isinstance(p, DTensor) for p in model.parameters())


class Hidden:
    """An object that no library looks into."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class HidingBlock(Block):
    def forward(self, x: Any) -> Any:
        return Hidden(super().forward(x.tensor if isinstance(x, Hidden) else x))


class HidingNet(Net):
    def __init__(self) -> None:
        super().__init__(block=HidingBlock)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return Hidden(self.head(x.tensor))


def hidden_outputs() -> None:
    """Outputs inside of an object: nothing tells when a backward begins, so that parameters stay until it is over."""

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        ids = tokens(step, rank)
        return nn.functional.cross_entropy(model(ids).tensor.flatten(0, 1), ids.roll(1).flatten())

    torch.manual_seed(0)
    plain, model = HidingNet(), sharded(HidingNet)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (plain, model)]
    for step in range(3):
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            ranks = list(range(dist.get_world_size())) if one is plain else [dist.get_rank()]
            train_step(one, step, loss, ranks)
            optimizer.step()
            optimizer.zero_grad()
        for (name, own), expected in zip(parameters_of(model).items(), plain.parameters(), strict=True):
            torch.testing.assert_close(own, expected, msg=lambda m, name=name: f"{name}: {m}")


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(tokens(9, 0))


def evaluate_with_graph(model: nn.Module) -> None:
    model(tokens(9, 0))


def halved(parameters: list[Any]) -> None:
    with torch.no_grad():
        for p in parameters:
            p.mul_(0.5)


def averaged(parameters: list[Any]) -> None:
    """Weights of an average, swapped in through ``.data``, as evaluation scripts do."""
    for p in parameters:
        p.data.copy_(p.data * 0.5)


def stepped(parameters: list[Any]) -> None:
    for p in parameters:
        p.grad = torch.ones_like(p)
    torch.optim.SGD(parameters, 0.1).step()
    for p in parameters:
        p.grad = None


def loaded(model: Any, assign: bool = False) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=assign)


def by_hand(model: Any) -> None:
    for block in model.blocks:
        block.unshard()
        block.reshard()
    model.unshard()
    model.reshard()


def failing(model: Any) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("on purpose")

    handle = model.blocks[1].up.register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        model(tokens(9, 0))
    handle.remove()


def loaded_after(forward: Callable[[nn.Module], None], assign: bool, options: dict[str, Any]) -> None:
    """What is loaded after a forward that no backward follows, such as one that warms up, the next forward uses."""
    model = sharded(**options)
    net_loss(model, 0, dist.get_rank()).backward()
    model.zero_grad()
    torch.manual_seed(0)
    plain = Net()
    forward(model)
    for one in (model, plain):
        loaded(one, assign)
    ids = tokens(1, dist.get_rank())
    torch.testing.assert_close(model(ids), plain(ids))


def written_after(
    forward: Callable[[nn.Module], None], write: Callable[[list[Any]], None], options: dict[str, Any]
) -> None:
    """What an optimizer, say, writes to its parameters after a forward that no backward follows, the next forward uses."""
    model = sharded(**options)
    parameters = list(model.parameters())
    evaluate(model)  # the root is known
    forward(model)
    if forward is evaluate and options.get("reshard_after_forward") is not False:
        assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    write(parameters)
    torch.manual_seed(0)
    plain = Net()
    write(list(plain.parameters()))
    ids = tokens(1, dist.get_rank())
    torch.testing.assert_close(model(ids), plain(ids))


def kept_on_request() -> None:
    """A forward without gradients leaves what the user asked to keep, and one after it uses that, unless parameters have
    been written to. The registered ones are the sharded ones."""
    model = sharded(reshard_after_forward=False)
    num_groups = sum(len(state.groups) for state in model._states(True))
    for write, expected in ((False, num_groups), (False, 0), (True, 1), (False, 0)):
        if write:
            with torch.no_grad():
                model.blocks[0].up.weight.data.mul_(2)
        with record_comms() as ledger:
            evaluate(model)
        assert ledger.count("all_gather_v") == expected
        assert all(isinstance(p, DTensor) for p in model.parameters())


FORWARDS = (evaluate, evaluate_with_graph, by_hand, failing)
WRITES = (halved, averaged, stepped)
CASES: list[tuple[Any, ...]] = [
    (muted_hooks,),
    (broken_off, False),
    (broken_off, True),
    *((failed_forward, where, first) for where in ("blocks.1.up", "head") for first in (False, True)),
    (failed_method,),
    (penalty, {}),
    (penalty, {"reshard_after_forward": False}),
    (penalty, {"reshard_after_forward": 2}),
    (backwards_before_that_of_a_gradient, {}),
    (backwards_before_that_of_a_gradient, {"reshard_after_forward": 2}),
    (hidden_outputs,),
    *((written_after, forward, write, {}) for forward in (evaluate, evaluate_with_graph) for write in WRITES),
    *((written_after, forward, stepped, {"reshard_after_forward": 2}) for forward in (evaluate, evaluate_with_graph)),
    (written_after, evaluate, halved, {"reshard_after_forward": False}),
    (kept_on_request,),
    *((written_after, forward, write, {}) for forward in (by_hand, failing) for write in WRITES),
    *((loaded_after, forward, assign, {}) for forward in FORWARDS for assign in (False, True)),
    *((loaded_after, forward, False, {"reshard_after_forward": False}) for forward in FORWARDS),
]


def run_case(part: Callable[..., None], *arguments: Any) -> None:
    part(*arguments)


def cases_on(num_ranks: int) -> list[tuple[Any, ...]]:
    """Gathers over two ranks need four, so that they are a part."""
    return [case for case in CASES if (case[-1] == {"reshard_after_forward": 2}) == (num_ranks == 4)]


def run(num_ranks: int, on_device: bool) -> int:
    with on_device_path() if on_device else contextlib.nullcontext():
        return run_cases(run_case, cases_on(num_ranks))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_between_steps(ranks: RankPools, num_ranks: int, on_device: bool) -> None:
    assert ranks.run(run, num_ranks, on_device, world_size=num_ranks) == [len(cases_on(num_ranks))] * num_ranks
