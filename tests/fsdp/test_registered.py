"""What a script does to parameters and gradients between, and inside of, forwards and backwards: one device's numbers.

Programs are drawn: steps of actions that touch parameters through the module, on plans with units, on ``fully_shard`` with
every ``reshard_after_forward``, on replicas, and on one device in float64.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from tests.device import device_type
from tests.ranks import RankPools, run_cases
from tests.whole import whole, whole_tensors
from vescale import INIT, RUN, Plan, RaggedShard, no_sync, parallelize
from vescale.checks import StepMismatchError
from vescale.errors import FullyShardStateError, UnsupportedParameterError
from vescale.fsdp import fully_shard

DIM, ROWS = 7, 4


class Layer(nn.Linear):
    """Gives a part of its weight away, and itself."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(super().forward(x)), self.weight[1:3], self.weight


class Averaged(nn.Module):
    """A momentum encoder beside a trained one; writes to the former, and limits the latter, inside of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.average = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM).requires_grad_(False)
        self.writes = "lerp"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for of, to in zip(self.trained.parameters(), self.average.parameters(), strict=True):
                if self.writes == "lerp":
                    to.lerp_(of, 0.5)
                elif self.writes == "copy":
                    to.copy_(of)
                elif self.writes == "data":
                    to.data = to.data * 0.5 + of.data * 0.5
                elif self.writes == "limit":
                    of.clamp_(-0.3, 0.3)
                elif self.writes == "data in place":
                    to.data.lerp_(of.data, 0.5)
                elif self.writes == "view of data":
                    to.data.view(-1)[1:].mul_(0.5)
                elif self.writes == "out of data":
                    torch.renorm(to.data.view(-1, 1), 2, 0, 0.2, out=to.data.view(-1, 1))
        return self.trained(x) - 0.1 * self.average(x)


class Model(nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.averaged, self.head = Averaged(), nn.Linear(DIM, 3)
        self.log_std = nn.Parameter(torch.full((3,), 0.3))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = []
        for layer in self.layers:
            x, part, weight = layer(x)
            given += [part, weight]
        x = checkpoint(self._middle, x, use_reentrant=False) if self.recomputes else self._middle(x)
        return self.head(x), self.log_std.expand(x.shape[0], 3), self.head.weight.t(), *given

    def _middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.head.weight.sum() * 0.01 + self.averaged(x))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise KeyError("on purpose")


class Run:
    """One model, and what a program does to it; ``seen`` is what it has read."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.draw = kind, random.Random(seed)
        torch.manual_seed(seed)
        model = Model(self.draw.random() < 0.3).double()
        model.averaged.writes = self.draw.choice(["none", "lerp", "copy", "data", "limit"])
        self.model: Any = _on(kind, model)
        self.seen: list[torch.Tensor] = []
        self.step = 0
        self.new_optimizer()

    def new_optimizer(self) -> None:
        self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=0.1)

    def input(self, number: int) -> torch.Tensor:
        x = torch.randn(ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        return x.chunk(dist.get_world_size())[dist.get_rank()] if self.kind.startswith("fsdp") else x

    def outputs(self, number: int) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = self.model(self.input(number))
        return found

    def loss(self, number: int, uses_std: bool = True) -> torch.Tensor:
        y, std, head, part, weight, *_ = self.outputs(number)
        if not uses_std:
            return y.pow(2).mean()
        return (y / std.exp()).pow(2).mean() + 0.1 * head.pow(2).sum() + part.sum() + 0.01 * weight.sum()

    def see(self, *values: torch.Tensor | None) -> None:
        self.seen += [torch.zeros(()) if v is None else v.detach().clone() for v in values]

    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    # Between a forward and its backward, and between steps

    def clear(self) -> None:
        self.model.zero_grad()

    def clear_one_by_one(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def clear_by_optimizer(self) -> None:
        self.optimizer.zero_grad()

    def read_gradients(self) -> None:
        self.see(*(p.grad for p in self.trainable()))

    def hold(self) -> None:
        """Outputs stay what they are, whatever comes."""
        self.held = getattr(self, "held", [])
        with torch.no_grad():
            found = self.outputs(50)[1:]
        self.held.append((found, [value.detach().clone() for value in found]))

    # Between steps

    def probe(self) -> None:
        self.see(self.outputs(60)[0][:1].sum() * 0)

    def evaluate(self) -> None:
        with torch.no_grad():
            self.see(*(value.mean() for value in self.outputs(70)[1:]))

    def write(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.9)

    def write_data(self) -> None:
        for parameter in self.model.parameters():
            parameter.data.add_(0.01)

    def initialize(self) -> None:
        nn.init.constant_(self.model.head.bias, 0.05 * (1 + self.step))

    def freeze(self) -> None:
        self.model.head.bias.requires_grad_(not self.model.head.bias.requires_grad)
        self.model.head.bias.grad = None
        self.new_optimizer()

    def start_over(self) -> None:
        self.new_optimizer()

    def copy(self) -> None:
        self.see(*copy.deepcopy(self.model).parameters())

    def clip(self) -> None:
        if all(p.grad is not None for p in self.trainable()):
            self.see(nn.utils.clip_grad_norm_(self.trainable(), 0.5))

    def break_off(self) -> None:
        y = self.outputs(80)[0]
        with contextlib.suppress(KeyError):
            Fails.apply(y).sum().backward()  # type: ignore[no-untyped-call]
        self.check_registered()
        self.clear_one_by_one()

    def interrupt(self) -> None:
        def stop(*_: Any) -> None:
            raise KeyboardInterrupt

        handle = self.model.averaged.trained.register_forward_hook(stop)
        with contextlib.suppress(KeyboardInterrupt):
            self.outputs(90)
        handle.remove()
        assert type(torch.zeros(2)) is torch.Tensor

    def accumulate(self) -> None:
        """A backward that reduces nothing, which may be cleared, and one that does."""
        clears = self.draw.choice([self.clear, self.clear_one_by_one, self.read_gradients])
        with self.unreduced(over_replicas_only=self.draw.random() < 0.5):
            self.loss(self.step + 200).backward()
        clears()

    @contextlib.contextmanager
    def unreduced(self, over_replicas_only: bool) -> Any:
        if self.kind == "plan":
            with no_sync(self.model):
                yield
            return
        if self.kind == "device":
            yield
            return
        leaves = over_replicas_only and self.kind == "fsdp replicas"
        sync = self.model.set_requires_all_reduce if leaves else self.model.set_requires_gradient_sync
        sync(False)
        yield
        sync(True)

    def check_registered(self) -> None:
        if self.kind != "device":
            assert all(isinstance(p, DTensor) for p in self.model.parameters())

    def run_step(self) -> None:
        between_steps = [self.clear, self.clear_one_by_one, self.clear_by_optimizer, self.read_gradients, self.hold]
        between_steps += [
            self.probe,
            self.evaluate,
            self.write,
            self.write_data,
            self.initialize,
            self.freeze,
            self.copy,
        ]
        between_steps += [self.start_over, self.clip, self.break_off, self.interrupt, self.accumulate]
        for _ in range(self.draw.randrange(4)):
            self.draw.choice(between_steps)()
            self.check_registered()
        loss = self.loss(self.step)
        for _ in range(self.draw.randrange(3)):
            # A forward that writes to parameters between another one and its backward is an error on one device.
            self.draw.choice(between_steps[: 5 if self.model.averaged.writes == "none" else 4])()
            self.check_registered()
        loss.backward()
        self.check_registered()
        self.optimizer.step()
        if self.draw.random() < 0.7:
            self.optimizer.zero_grad()
        self.step += 1


def _mesh(kind: str) -> DeviceMesh:
    if kind == "fsdp replicas":
        return init_device_mesh(device_type(), (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "dp"))
    return init_device_mesh(device_type(), (dist.get_world_size(),), mesh_dim_names=("dp",))


def _on(kind: str, model: Model) -> nn.Module:
    if kind == "device":
        return model
    mesh = _mesh(kind)
    if kind == "plan":
        plan = Plan(mesh)
        plan.shard("<in:x>", Shard(0), mesh="dp").shard("<out>", Replicate(), mesh="dp")
        plan.shard(".*", RaggedShard(), mesh="dp", phase=INIT).shard(".*", Replicate(), mesh="dp", phase=RUN)
        return parallelize(model, plan)
    options = {"fsdp kept": {"reshard_after_forward": False}, "fsdp": {"reshard_after_forward": True}}.get(kind, {})
    for part in (*model.layers, model.averaged):
        fully_shard(part, mesh=mesh, **options)  # type: ignore[arg-type]
    return fully_shard(model, mesh=mesh, **options)  # type: ignore[arg-type]


def same_as_one_device(kind: str, seed: int) -> None:
    runs = [Run(kind, seed), Run("device", seed)]
    for step in range(4):
        for one in runs:
            one.run_step()
        ours, device = (whole_tensors(dict(one.model.named_parameters())) for one in runs)
        for name, value in ours.items():
            torch.testing.assert_close(
                value, device[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=(step, name): f"{n}: {m}"
            )
        own, wanted = (whole_tensors(dict(enumerate(one.seen))) for one in runs)
        assert own.keys() == wanted.keys()
        for index, value in own.items():
            assert value is not None
            torch.testing.assert_close(value.double(), wanted[index].double(), rtol=1e-9, atol=1e-9)
    for found, values in getattr(runs[0], "held", []):
        for value, before in zip(found, values, strict=True):
            assert torch.equal(*map(_whole, (value, before)))


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


# What programs ask of parameters by name


def _trained(kind: str) -> tuple[Any, Callable[..., torch.Tensor]]:
    torch.manual_seed(0)
    model = _on(kind, Model(recomputes=False).double())
    of = Run.__new__(Run)
    of.kind, of.model = kind, model
    return model, of.loss


def asked(kind: str) -> None:
    """``torch.autograd.grad`` and ``backward(inputs=)`` by registered parameters."""
    found = []
    for one in (kind, "device"):
        model, loss = _trained(one)
        weight, bias = model.head.weight, model.averaged.trained.bias
        given = torch.autograd.grad(loss(0), [weight, bias])
        assert weight.grad is None
        torch.autograd.backward(loss(1), inputs=[weight])
        assert model.log_std.grad is None
        (of_weight, of_unused) = torch.autograd.grad(
            loss(2, uses_std=False), [weight, model.log_std], allow_unused=True
        )
        assert of_unused is None
        given = (*given, of_weight)
        found.append([_whole(value) for value in (*given, weight.grad)])
    for own, wanted in zip(*found, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-9, atol=1e-9)
    model, loss = _trained(kind)
    with pytest.raises(UnsupportedParameterError, match=r"create_graph=True.* of parameter 'head.weight'"):
        torch.autograd.grad(loss(0), [model.head.weight], create_graph=True)


def hooked(kind: str) -> None:
    """``register_hook`` sees the gradient of this backward, and may change it, before it is accumulated."""
    found, mask = [], (torch.arange(3 * DIM).view(3, DIM) % 2).double()
    for one in (kind, "device"):
        model, loss = _trained(one)
        weight, seen = model.head.weight, []
        own_mask = mask if one == "device" else distribute_tensor(mask, weight.device_mesh, weight.placements)
        weight.register_hook(lambda grad, m=own_mask: grad * m)
        model.log_std.register_hook(lambda grad: grad * 2)
        handle = model.log_std.register_hook(lambda grad, seen=seen: seen.append(grad.clone()))
        weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.clone()))
        for number in range(3):
            loss(number).backward()
            if number == 1:
                handle.remove()
        assert len(seen) == 5
        found.append(
            [_whole(value) for value in (weight.grad, model.log_std.grad, *sorted(seen, key=lambda g: -g.numel()))]
        )
    for own, wanted in zip(*found, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-9, atol=1e-9)


def parts_apart(kind: str) -> None:
    """A part of the root runs outside of its forward, in chunks, with one backward or with one each."""
    found = []
    for one in (kind, "device"):
        model, _ = _trained(one)
        x = torch.randn(ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        x = x.chunk(dist.get_world_size())[dist.get_rank()] if one != "device" else x
        for _ in range(3):
            hidden = model(x)[0] @ torch.ones(3, DIM, dtype=torch.float64)
            cut = hidden.detach().requires_grad_()
            for scale in (1.0, 0.5):
                (scale * model.head(cut).pow(2).mean()).backward()
            hidden.backward(cut.grad)
        found.append(whole_tensors({name: p.grad for name, p in model.named_parameters()}))
    for name, own in found[0].items():
        if own is not None and found[1][name] is not None:
            torch.testing.assert_close(own, found[1][name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def refused_writes() -> None:
    """Ranks that write different values learn it with their next step; a rounded copy is not written to."""
    model, loss = _trained("fsdp")
    model.averaged.writes = "none"

    def write(module: nn.Module, _: Any) -> None:
        with torch.no_grad():
            module.average.weight.mul_(1 + dist.get_rank())  # type: ignore[union-attr, operator]

    model.averaged.register_forward_pre_hook(write)
    with pytest.raises(
        StepMismatchError,
        match=r"different values to parameter 'averaged.average.weight' in the forward",
    ):
        for number in range(2):
            loss(number).backward()
    torch.manual_seed(0)
    low = Model(recomputes=False)
    for part in (low.averaged, low):
        fully_shard(part, mesh=_mesh("fsdp"), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with pytest.raises(FullyShardStateError, match=r"'averaged.average.weight' of averaged, of torch.float32"):
        low(torch.randn(2, DIM))


def written_by_data(kind: str, how: str) -> None:
    """``.data`` has a version of its own; what it is used to write counts."""
    found = []
    for one in (kind, "device"):
        model, loss = _trained(one)
        model.averaged.writes = how
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            loss(number).backward()
            optimizer.step()
        found.append(whole_tensors(dict(model.named_parameters())))
    for name, own in found[0].items():
        torch.testing.assert_close(own, found[1][name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def kept_aliases(kind: str) -> None:
    """What a forward has put aside is the parameter until its memory is freed; then its use is an error."""
    model, loss = _trained(kind)
    kept: list[torch.Tensor] = []
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        torch.Tensor.detach,
        lambda p: p.data,
        lambda p: p.data[1:],
        torch.t,
    ]
    model.averaged.trained.register_forward_hook(lambda m, *_: kept.extend(view(m.weight) for view in views))
    loss(0).backward()
    assert len(kept) == 4
    for alias in kept:
        assert alias.shape  # needs no memory
        for use in (torch.clone, torch.sum, str, lambda x: x.detach().mul_(2)):
            with pytest.raises(RuntimeError, match=r"shares memory with a parameter of .* has since been freed.*clone"):
                use(alias)


def by_name() -> int:
    run_cases(written_by_data, list(itertools.product(KINDS, ("data in place", "view of data", "out of data"))))
    run_cases(asked, [(kind,) for kind in KINDS])
    run_cases(hooked, [(kind,) for kind in KINDS])
    run_cases(parts_apart, [("fsdp",), ("fsdp root",)])
    return run_cases(refused_writes, [()])


def test_parameters_by_name(ranks: RankPools) -> None:
    ranks.run(by_name, world_size=2)


def aliases() -> int:
    return run_cases(kept_aliases, [("fsdp",), ("fsdp root",)])


@pytest.mark.helper("grads")
# The error is set on a storage while its memory is freed, and cleared when the memory is back. PyTorch 2.11 has no call that
# clears it (StorageImpl::clear_data_ptr_access_error_msg_), so none is set there, as docs/compatibility.md says.
@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.12",
    reason="PyTorch 2.11 has no call that ends such an error, so vescale sets none: docs/compatibility.md",
)
def test_aliases_of_freed_memory(ranks: RankPools) -> None:
    ranks.run(aliases, world_size=2)


KINDS = ("plan", "fsdp", "fsdp root", "fsdp kept")


def programs(kinds: tuple[str, ...], seeds: range) -> int:
    return run_cases(same_as_one_device, [(kind, seed) for kind in kinds for seed in seeds])


def test_drawn_programs(ranks: RankPools) -> None:
    ranks.run(programs, KINDS, range(12), world_size=2)


def cleared_before_replicas_add() -> None:
    """What has been reduced over the shards, and is pending over the replicas, is ``.grad``, and is cleared with it."""
    found = []
    for one in ("fsdp replicas", "device"):
        model, loss = _trained(one)
        for number, clears in enumerate((False, True, False)):
            if one != "device":
                model.set_requires_all_reduce(False)
            loss(number).backward()
            found.append(_whole(model.head.weight.grad).clone())
            if clears:
                model.zero_grad()
        if one != "device":
            model.set_requires_all_reduce(True)
        loss(3).backward()
        found.append(_whole(model.head.weight.grad).clone())
    for own, wanted in zip(found[:4], found[4:], strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-9, atol=1e-9)


def read_beside_reduced(kind: str, zeros: bool, only_replicas: bool) -> None:
    """``.grad`` is all that backwards have left, reduced or not, and what is written to it counts."""
    found = []
    for one in (kind, "device"):
        model, loss = _trained(one)
        of = Run.__new__(Run)
        of.kind, of.model = one, model
        for number in range(7):
            uses_std = number != 2  # where one has no gradient, they are not taken all at once
            if number % 3 == 0:
                loss(number).backward()
            else:
                with of.unreduced(only_replicas):
                    loss(number, uses_std).backward()
            grads = whole_tensors({name: p.grad for name, p in model.named_parameters()})
            found.append({name: grad if grad is None else grad.clone() for name, grad in grads.items()})
            if zeros and number in (0, 4):
                model.zero_grad(set_to_none=False)
            for parameter in model.parameters():
                if parameter.grad is not None and number in (1, 5):
                    parameter.grad.mul_(0.5)
    for number, (ours, device) in enumerate(zip(found[:7], found[7:], strict=True)):
        for name, own in ours.items():
            wanted = device[name]
            assert (own is None) == (wanted is None), (number, name)
            if own is not None and wanted is not None:
                torch.testing.assert_close(
                    own, wanted, rtol=1e-9, atol=1e-9, msg=lambda m, n=(number, name): f"{n}: {m}"
                )


def reads_beside_reduced(kinds: Sequence[str]) -> int:
    cases = itertools.product(kinds, (False, True), (False, True))
    return run_cases(read_beside_reduced, list(cases))


def test_gradients_are_read_beside_reduced_ones(ranks: RankPools) -> None:
    ranks.run(reads_beside_reduced, KINDS, world_size=2)
    ranks.run(reads_beside_reduced, ("fsdp replicas",), world_size=4)


def test_what_is_pending_over_replicas_is_cleared(ranks: RankPools) -> None:
    ranks.run(cleared_before_replicas_add, world_size=4)


def test_drawn_programs_on_replicas(ranks: RankPools) -> None:
    ranks.run(programs, ("fsdp replicas",), range(4), world_size=4)


@pytest.mark.slow
def test_many_drawn_programs(ranks: RankPools) -> None:
    ranks.run(programs, KINDS, range(12, 212), world_size=2, timeout=3000)


def small_and_parallel(kind: str) -> tuple[Any, Any, torch.Tensor]:
    """A model on one device, the same one over two ranks, and a batch."""
    torch.manual_seed(0)
    one = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    model, x = copy.deepcopy(one), torch.randn(4, 4)
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    if kind == "fsdp":
        fully_shard(model, mesh=mesh)
    else:
        plan = Plan(mesh).shard("<in>", Shard(0), mesh="dp")
        parallelize(model, plan.zero(3) if kind == "zero" else plan)
    return one, model, x


def derivatives_of_reduced_gradients(kind: str) -> None:
    """One device differentiates the penalty; where a gradient is reduced over ranks, what does so raises, and what does not
    is right."""
    one, model, x = small_and_parallel(kind)

    def loss(each: Any) -> torch.Tensor:
        found: torch.Tensor = each(x).square().mean()
        return found

    for _ in range(2):
        for each in (one, model):
            each.zero_grad()
            loss(each).backward(create_graph=True)
        for p, q in zip(one.parameters(), model.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            torch.testing.assert_close(whole(q.grad.detach()), p.grad.detach())
    gradients, parameters = [p.grad for p in model.parameters()], list(model.parameters())

    def penalty() -> Any:
        return sum(gradient.square().sum() for gradient in gradients)

    for differentiate in (
        lambda: penalty().backward(),
        lambda: (penalty() if kind == "fsdp" else loss(model) + penalty()).backward(),
        lambda: torch.autograd.grad(gradients, parameters, [torch.ones_like(p) for p in parameters]),
        lambda: torch.autograd.grad(gradients[0].sum(), parameters[2], allow_unused=True),
    ):
        with pytest.raises(UnsupportedParameterError, match=r"is differentiated.*torch\.autograd\.grad"):
            differentiate()
    for each in (one, model):
        each[2].bias.grad.mul_(2)  # written to as on one device, where a gradient with a graph is no leaf
    torch.testing.assert_close(whole(model[2].bias.grad.detach()), one[2].bias.grad.detach())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (one, model)]
    for set_to_none in (False, True, True):
        for each, optimizer in zip((one, model), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss(each).backward()
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            optimizer.step()
    for p, q in zip(one.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(q.detach()), p.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["fsdp", "zero", "plan"])
def test_derivatives_of_reduced_gradients_are_refused(ranks: RankPools, kind: str) -> None:
    ranks.run(derivatives_of_reduced_gradients, kind, world_size=2)


def cleared_after_an_exception(kind: str) -> None:
    """Gradients are there, a second backward raises between two layers, and zero_grad() clears all that there is."""
    one, model, x = small_and_parallel(kind)

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("a hook fails")

    for set_to_none in (True, False):
        for each in (one, model):
            each(x).square().mean().backward()
            handle = each[1].register_forward_hook(lambda module, given, output: output.register_hook(fail) and None)
            with pytest.raises(ValueError, match="a hook fails"):
                each(x).square().mean().backward()
            handle.remove()
            each.zero_grad(set_to_none=set_to_none)
            each(x).square().mean().backward()
        for p, q in zip(one.parameters(), model.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            torch.testing.assert_close(whole(q.grad), p.grad)


@pytest.mark.parametrize("kind", ["fsdp", "zero", "plan"])
def test_gradients_are_cleared_after_an_exception(ranks: RankPools, kind: str) -> None:
    ranks.run(cleared_after_an_exception, kind, world_size=2)
