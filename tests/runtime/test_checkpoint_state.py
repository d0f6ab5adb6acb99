"""Checkpointed modules with state, and with results that are written to later: random ones against the plan without the
entry, bit by bit, on two ranks. A seed decides everything."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import random
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.examples import NIGHTLY
from tests.ranks import RankPools
from tests.runtime import counting
from tests.runtime.zero import mesh_of
from vescale import INIT, RUN, Plan, RaggedShard, parallelize
from vescale.errors import RecomputationError

WIDTH = 8
POLICIES = ("full", "selective", {"save": ["aten.tanh"]}, "offload")
NOTES = {"number": 0}
NUMBER = 0
DRAWS = torch.Generator()


class Ema(nn.Module):
    """A buffer that is written to in place, or replaced; a large one is copied only if it is known to be written to."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(draw.choice([1, 1100]), WIDTH))
        self.replaces = draw.random() < 0.5

    def forward(self, h: Tensor) -> Tensor:
        new = 0.9 * self.mean + 0.1 * h.detach().abs().mean((0, 1))
        if self.replaces:
            self.mean = new
        elif self.training:
            with torch.no_grad():
                self.mean.copy_(new)
        return torch.tanh(h / self.mean[0].clone())


class Frozen(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.held = {"also": [(torch.ones(WIDTH),)]}

    def forward(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * h.detach().abs().mean((0, 1)))
            self.held["also"][0][0].mul_(0.8)
        return h / self.mean.clone() * self.held["also"][0][0].clone()


class Codebook(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, WIDTH))
        self.register_buffer("number", torch.tensor(0))

    def forward(self, h: Tensor) -> Tensor:
        codes = self.codes.clone()
        nearest = (h.detach().unsqueeze(-2) - codes).square().sum(-1).argmin(-1)
        hits = F.one_hot(nearest, 5).to(h.dtype).flatten(0, 1)
        if self.training:
            self.number += 1
            self.codes.mul_(0.7).add_(0.3 * (hits.t() @ h.detach().flatten(0, 1)))
        return h * (hits @ codes).view(h.shape).detach()


class Norms(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)
        make = draw.choice([nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
        self.linear = make(nn.Linear(WIDTH, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return self.linear(self.batch(h.reshape(-1, WIDTH)).reshape(h.shape))


class Counters(nn.Module):
    """In attributes, containers, objects with and without a dictionary, globals, iterators, a closure, a hook."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.number, self.list, self.queue = 0, [], collections.deque(maxlen=2)
        self.array, self.iterator, self.object = np.zeros(2), itertools.count(), _Slots()
        self.kinds = draw.sample(range(8), 3)
        self.last: Tensor | None = None
        seen: list[int] = []
        self.seen, self.linear = seen, nn.Linear(WIDTH, WIDTH)
        self.linear.register_forward_hook(lambda *_: seen.append(1))

    def forward(self, h: Tensor) -> Tensor:
        global NUMBER
        self.number += 1
        NUMBER += 1
        NOTES["number"] += 1
        self.list.append(h.detach().mean())
        self.queue.append(len(self.list))
        self.array += 1
        self.object.number += 1
        h = self.linear(h)
        counts = (self.number, NUMBER, NOTES["number"], len(self.list), sum(self.queue), float(self.array[0]))
        counts = (*counts, self.object.number, next(self.iterator))
        before, self.last = self.last, h.tanh()
        h = h if before is None else h + before.detach()
        return torch.tanh(h * (1 + 0.1 * sum(counts[n] for n in self.kinds)))


class _Slots:
    __slots__ = ("lock", "number")

    def __init__(self) -> None:
        self.number, self.lock = 0, threading.Lock()


CALLS, SHARED, FLAGS = 0, [0], {"calls": 0}


class Log:
    """A class that is used as a place for numbers."""

    calls = 0
    all_calls: ClassVar[list[int]] = []

    @classmethod
    def add(cls) -> int:
        cls.calls += 1
        return cls.calls


def counted() -> int:
    global CALLS
    CALLS += 1
    return CALLS


def through_another() -> int:
    SHARED[0] += 1
    Log.all_calls.append(1)

    def inner() -> int:
        FLAGS["calls"] += 1
        return FLAGS["calls"]

    return inner() + SHARED[0] + len(Log.all_calls)


class Shared(nn.Module):
    """State that belongs to classes and to modules of the program, which helpers read and write."""

    number = 0
    numbers: ClassVar[dict[str, int]] = {"calls": 0}

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.kind = draw.randrange(6)

    @property
    def count(self) -> int:
        type(self).number += 1
        return type(self).number

    def _helper(self) -> int:
        Shared.numbers["calls"] += 1
        return Shared.numbers["calls"]

    @staticmethod
    def _other() -> int:
        return counted()

    def forward(self, h: Tensor) -> Tensor:
        ways = (lambda: self.count, self._helper, self._other, through_another, Log.add, counting.count)
        return torch.tanh(h * (1 + 0.1 * ways[self.kind]()))

    @classmethod
    def reset(cls) -> None:
        global CALLS
        CALLS = cls.number = cls.numbers["calls"] = Log.calls = FLAGS["calls"] = SHARED[0] = counting.NUMBER = 0
        Log.all_calls.clear()

    @classmethod
    def counts(cls) -> Tensor:
        found = [CALLS, cls.number, cls.numbers["calls"], Log.calls, FLAGS["calls"], SHARED[0], counting.NUMBER]
        return torch.tensor([*found, len(Log.all_calls)])


class Draws(nn.Module):
    """Of generators: of its own, of the program, of Python and numpy, the default one."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.generator, self.random = torch.Generator().manual_seed(3), random.Random(1)
        self.numbers, self.kind = np.random.default_rng(0), draw.randrange(4)

    def forward(self, h: Tensor) -> Tensor:
        if self.kind == 0:
            return h * torch.rand(h.shape, generator=self.generator) + torch.rand(WIDTH, generator=DRAWS)
        if self.kind == 1:
            return h.tanh() if random.random() + self.random.random() < 1 else h * h
        return h * (self.numbers.random() + np.random.randn()) if self.kind == 2 else F.dropout(h, 0.4, self.training)


class Given(nn.Module):
    """What the caller sets before each call."""

    scale: Any = 1.0

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.dropout(h) * self.scale)


class WrittenLater(nn.Module):
    """A product, and a write to it by way of a tensor that shares its memory, but maybe not its version."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=draw.random() < 0.5)
        self.down = nn.Linear(2 * WIDTH, 2 * WIDTH, bias=draw.random() < 0.5)
        self.weight = nn.Parameter(torch.randn(2 * WIDTH, 2 * WIDTH) / 4)
        self.rnn = draw.choice([nn.GRU, nn.LSTM])(2 * WIDTH, 2 * WIDTH, batch_first=True)
        self.how, self.alias, self.write = draw.randrange(3), draw.randrange(3), draw.randrange(4)

    def forward(self, h: Tensor) -> Tensor:
        h = torch.tanh(self.up(h))
        y = (self.down(h), h @ self.weight, self.rnn(h)[0])[self.how]
        if self.alias == 2 and self.how != 2:  # a recurrent layer's result is not contiguous
            part = y.view(-1, 2 * WIDTH)
        else:
            part = y.unsafe_chunk(2, -1)[0] if self.alias == 1 and self.how != 2 else y
        if self.write == 0:
            part.mul_(0.5)
        elif self.write == 1:
            part += 1
        elif self.write == 2:
            part[..., :2] = 0
        else:
            part.add_(part.detach())
        first, second = y.chunk(2, -1)
        return torch.tanh(first) * second


def later() -> list[tuple[int, int, int, str]]:
    """Every pair of a product and a way to what is written to, under each policy that keeps results."""
    wrong, plan = [], Plan(mesh_of({"dp": 1, "tp": 2}))
    plan.shard(r".*\.up\.weight", Shard(0), mesh="tp").shard(r".*\.down\.weight", Shard(1), mesh="tp")
    plan.shard(r".*\.down\.<out>", Replicate(), mesh="tp")
    x = torch.randn(3, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for number, (how, alias) in enumerate(itertools.product(range(3), range(3))):
        expected: list[Tensor] = []
        for policy in (None, "full", "selective"):
            torch.manual_seed(0)
            net = nn.Sequential(WrittenLater(random.Random(number))).double()
            net[0].how, net[0].alias, net[0].write = how, alias, number % 4
            of_policy = Plan(plan.mesh)
            for entry in plan.entries:
                of_policy.add(entry)
            model = parallelize(net, of_policy.checkpoint("0", policy) if policy else of_policy)
            model(x).square().mean().backward()
            grads = [p.grad.to_local() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
            if policy is None:
                expected = grads
            elif not all(map(torch.equal, grads, expected)):
                wrong.append((how, alias, number % 4, policy))
    return wrong


@pytest.mark.filterwarnings("ignore")
def test_kept_results_that_are_written_to_later(ranks: RankPools) -> None:
    assert ranks.run(later, world_size=2) == [[], []]


class WrittenLast(nn.Module):
    """Writes to what backward reads by way of a tensor without its version, maybe after all of it has been saved."""

    def __init__(self, function: str, how: int, last: int) -> None:
        super().__init__()
        self.up, self.function, self.how, self.last = nn.Linear(WIDTH, WIDTH), getattr(torch, function), how, last

    def forward(self, x: Tensor) -> Tensor:
        y = self.function(self.up(x))
        if self.how == 0:
            y.data.mul_(0.5).add_(0.1)
        elif self.how == 1:
            y.detach().data.clamp_(max=0.3)
        elif self.how == 2:
            y.to_local().data.mul_(0.5)  # type: ignore[attr-defined]
        elif self.how == 3:
            with torch.no_grad():
                y.unsafe_chunk(2, -1)[0][..., 0] = 0.3
        os.environ["ENDS"] += "."
        return y @ self.up.weight if self.last == 2 else x + y if self.last else y


class Local(WrittenLast):
    """The same in a local region."""

    def forward(self, y: Tensor) -> Tensor:
        y = self.function(y)
        y.data.mul_(0.5)
        return y


def last() -> list[Any]:
    wrong: list[Any] = []
    x = torch.randn(3, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for number, (how, where) in enumerate(itertools.product(range(6), range(3))):
        function, expected = ("tanh", "exp", "sigmoid", "relu")[number % 4], []
        for policy in (
            None,
            "full",
            ("selective", {"save": ["aten.addmm"]}, {"save": ["aten." + function]})[number % 3],
        ):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(WIDTH, WIDTH), WrittenLast(function, how, where)).double()
            plan = Plan(mesh_of({"dp": 1, "tp": 2}))
            if how == 5:
                net[1] = nn.Sequential(nn.Linear(WIDTH, WIDTH), Local(function, how, where)).double()
                plan.local("1.1", inputs={}, outputs={})
            else:
                plan.shard(r"1\.up\.weight", Shard(0), mesh="tp")
            model, os.environ["ENDS"] = parallelize(net, plan.checkpoint("1", policy) if policy else plan), ""
            model(x).square().mean().backward()
            grads = [p.grad.to_local() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
            if policy is None:
                expected = grads
            elif not all(map(torch.equal, grads, expected)):
                wrong.append((function, how, where, policy))
            elif policy == "full" and how == 4 and (os.environ["ENDS"] == "..") != (where == 2):
                wrong.append((function, where, os.environ["ENDS"]))
    return wrong


def test_writes_after_the_last_saved_tensor(ranks: RankPools) -> None:
    assert ranks.run(last, world_size=2) == [[], []]


class Beside(nn.Module):
    """State of modules that a block reaches, and does not contain, and of what it makes in its first forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.calls = kind, nn.Linear(WIDTH, WIDTH), 0
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.blocks = nn.ModuleList(_InBeside(kind) for _ in range(2))
        for block in self.blocks:
            if kind == "hook":
                block.linear.register_forward_hook(self._count)  # type: ignore[union-attr]
            block.others = [self if kind == "parent" else self.norm]  # type: ignore[assignment]

    def _count(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.calls += 1
        return output * self.calls

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for block in self.blocks:
            x = block(x)
        return x * (1 + self.calls)


class _InBeside(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(WIDTH, WIDTH)
        self.others: list[Any] = []
        self.taken = (torch.full((1,), 1.0 / (i + 1), dtype=torch.float64) for i in range(99))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        (other,) = self.others
        if self.kind == "module":
            h = other(h.flatten(0, 1)).view(h.shape)
        elif self.kind == "parent":
            other.calls += 1
            with torch.no_grad():
                other.mean += h.mean((0, 1))
            h = torch.tanh(h - other.mean.clone()) / other.calls
        elif self.kind == "made":
            if not hasattr(self, "scale"):
                self.register_buffer("scale", torch.ones(WIDTH, dtype=x.dtype))
            self.scale.mul_(0.9)
            h = h * self.scale.clone()
        elif self.kind == "generator":
            h = h * next(self.taken)
        elif self.kind == "own checkpoint":
            h = checkpoint(lambda y: torch.tanh(self.linear(y)) * y, h, use_reentrant=False)
        return x + h


def beside() -> list[Any]:
    wrong: list[Any] = []
    kinds = ("module", "parent", "hook", "made", "own checkpoint", "generator")
    for kind, policy in itertools.product(kinds, ("full", {"save": ["aten.addmm"]})):
        expected: list[Any] = []
        for entry in (False, True):
            torch.manual_seed(0)
            plan = Plan(mesh_of({"dp": 1, "tp": 2}))
            plan.shard(r".*linear\.weight", Shard(0), mesh="tp")
            net = Beside(kind).double()
            model = parallelize(net, plan.checkpoint(r"blocks\.\d+", policy) if entry else plan)
            found = []
            try:
                for step in range(2):
                    x = torch.randn(3, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
                    model(x).square().mean().backward()
                    found += [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
                    found += [b.to_local() if isinstance(b, DTensor) else b.clone() for b in model.buffers()]
            except RecomputationError as error:
                if kind != "generator" or "a generator (a function with yield)" not in str(error):
                    raise
                continue
            if not entry:
                expected = found
            elif kind == "generator" or len(found) != len(expected) or not all(map(torch.equal, found, expected)):
                wrong.append((kind, policy))
    return wrong


def test_state_beside_the_module(ranks: RankPools) -> None:
    assert ranks.run(beside, world_size=2) == [[], []]


def toggled() -> list[Any]:
    """Parameters of a unit are frozen around a forward, or after it."""
    wrong = []
    for first, policy in itertools.product((True, False), ("full", "selective")):
        expected: list[Any] = []
        for entry in (False, True):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(random.Random(3)), nn.Linear(WIDTH, WIDTH)).double()
            plan = Plan(mesh_of({"dp": 2})).shard("<in>", Shard(0))
            plan.shard(r".*\.(weight|bias)", RaggedShard(), phase=INIT)
            plan.shard(r".*\.(weight|bias)", Replicate(), phase=RUN).unit("1")
            model = parallelize(net, plan.checkpoint("1", policy) if entry else plan)
            model[1].linear.requires_grad_(not first)
            loss = model(torch.randn(4, 3, WIDTH, dtype=torch.float64)).square().mean()
            model[1].linear.requires_grad_(first)
            loss.backward()
            found = [p.grad.to_local() if p.grad is not None else torch.zeros(()) for p in model.parameters()]
            if not entry:
                expected = found
            elif not all(map(torch.equal, found, expected)):
                wrong.append((first, policy))
    return wrong


def test_parameters_of_units_that_are_frozen(ranks: RankPools) -> None:
    assert ranks.run(toggled, world_size=2) == [[], []]


class WrittenAround(nn.Module):
    """What the parent writes to what a block has been given, or has returned, without a version that tells."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.how = nn.Linear(WIDTH, WIDTH), how
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            early, y = x.data if self.how == "before" else x, block(x)
            if self.how == "before":
                early.mul_(0.9)
            elif self.how == "data":
                x.data.mul_(0.9)
                y.data[..., 0] = 0.1
            elif self.how == "numpy":
                x.detach().numpy()[:] *= 0.9
                y.detach().numpy()[:] *= 0.9
            elif isinstance(y, DTensor):
                y.view(-1, WIDTH).to_local().data.mul_(0.9)
            else:
                y.data.mul_(0.9)
            x = y
        return x


def around() -> list[Any]:
    wrong, x = [], torch.randn(3, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for how in ("before", "data", "numpy", "local"):
        torch.manual_seed(0)
        expected = WrittenAround(how).double()
        expected(x).square().mean().backward()
        for policy in ("full", "selective", {"save": ["aten.tanh"]}):
            torch.manual_seed(0)
            plan = Plan(mesh_of({"dp": 1, "tp": 2})).checkpoint(r"blocks\.\d", policy)
            model = parallelize(WrittenAround(how).double(), plan)
            loss = model(x).square().mean()
            loss.backward(retain_graph=True)
            for again in range(2):
                for parameter, one in zip(model.parameters(), expected.parameters(), strict=True):
                    if not torch.allclose(parameter.grad.to_local(), one.grad, rtol=1e-12, atol=1e-14):
                        wrong.append((how, policy, again))
                    parameter.grad = None
                if not again:
                    loss.backward()
    return wrong


def test_writes_around_the_module(ranks: RankPools) -> None:
    assert ranks.run(around, world_size=2) == [[], []]


@contextlib.contextmanager
def set_around(kind: str) -> Iterator[None]:
    default = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    with contextlib.ExitStack() as stack:
        if kind == "dtype":
            torch.set_default_dtype(torch.float64)
        elif kind == "kernel":
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        elif kind == "precision":
            torch.set_float32_matmul_precision("high")
        elif kind == "deterministic":
            torch.use_deterministic_algorithms(True, warn_only=True)
        else:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        yield
    torch.set_default_dtype(default[0])
    torch.set_float32_matmul_precision(default[1])
    torch.use_deterministic_algorithms(False)


class ReadsSettings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x).double() * torch.full((), 1 / 3) + torch.full((), 1 / 7))
        if torch.get_float32_matmul_precision() == "high":
            x = torch.tanh(3 * x)
        if torch.is_deterministic_algorithms_warn_only_enabled():
            x = torch.tanh(2 * x)
        return x + F.scaled_dot_product_attention(x, x, x)


def settings() -> list[tuple[str, Any]]:
    """What is set around a forward holds in its recomputations, and not after them."""
    wrong, x = [], torch.randn(3, 4, WIDTH, dtype=torch.float64)
    for kind, policy in itertools.product(
        ("dtype", "kernel", "precision", "deterministic", "autocast"), ("full", {"save": ["aten.addmm"]})
    ):
        found = []
        for entry in (False, True):
            torch.manual_seed(0)
            net = nn.Sequential(ReadsSettings(), ReadsSettings()).double()
            plan = Plan(mesh_of({"dp": 1, "tp": 2})).shard(r".*linear\.weight", Shard(0), mesh="tp")
            model = parallelize(net, plan.checkpoint(r"\d", policy) if entry else plan)
            with set_around(kind):
                loss = model(x).square().mean()
            loss.backward()
            assert torch.get_default_dtype() == torch.float32 and torch.backends.cuda.flash_sdp_enabled()
            found.append([p.grad.to_local() for p in model.parameters()])
        if not all(map(torch.equal, *found)):
            wrong.append((kind, policy))
    return wrong


def test_settings_around_the_forward(ranks: RankPools) -> None:
    assert ranks.run(settings, world_size=2) == [[], []]


KINDS = [Ema, Frozen, Codebook, Norms, Counters, Shared, Draws, Given, WrittenLater, WrittenLater]


class Block(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(draw.choice(KINDS)(draw) for _ in range(draw.randint(1, 3)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        for part in self.parts:
            h = part(h)
        return x + h.tanh()


class Net(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(draw) for _ in range(2))
        self.given_tensor, self.writes = draw.random() < 0.5, draw.random() < 0.3

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            for part in block.parts:
                if isinstance(part, Given):
                    part.scale = x.mean() + 1.5 if self.given_tensor else number + float(x.abs().sum()) % 1
            x = block(x)
            if self.writes:
                x.mul_(0.9)
        return x


def steps(seed: int, policy: Any) -> list[Tensor]:
    """Losses, gradients, buffers and states of generators over three steps."""
    global NUMBER
    draw = random.Random(seed)
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed), DRAWS.manual_seed(seed)
    NUMBER = NOTES["number"] = 0
    Shared.reset()
    plan, net = Plan(mesh_of({"dp": 1, "tp": 2})), Net(draw).double()
    if any(isinstance(part, WrittenLater) for part in net.modules()):
        plan.shard(r".*\.up\.weight", Shard(0), mesh="tp").shard(r".*\.down\.weight", Shard(1), mesh="tp")
        plan.shard(r".*\.down\.<out>", Replicate(), mesh="tp")
    chosen = draw.choice(POLICIES)
    model = parallelize(net, plan.checkpoint(r"blocks\.\d+", chosen) if policy else plan)
    how, found = draw.choice(["", "two", "eval", "frozen", "twice"]), []
    for step in range(3):
        made = torch.Generator().manual_seed(step)
        xs = [torch.randn(3, 4, WIDTH, dtype=torch.float64, generator=made) for _ in range(2)]
        model.blocks[0].linear.requires_grad_(how != "frozen")
        loss = sum(model(x).square().mean() for x in (xs if how == "two" else xs[:1]))
        model.blocks[0].linear.requires_grad_(True)
        model.train(how != "eval")
        loss.backward(retain_graph=how == "twice")
        if how == "twice":
            loss.backward()
        model.train()
        of_host = torch.tensor([NUMBER, NOTES["number"], random.getstate()[1][-1], int(np.random.get_state()[2])])
        counts = [len(part.list) + len(part.seen) for part in model.modules() if isinstance(part, Counters)]
        tensors = [loss.detach(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
        found += [x.to_local().clone() if isinstance(x, DTensor) else x.clone() for x in tensors]
        found += [of_host, Shared.counts(), torch.tensor(counts), torch.get_rng_state(), DRAWS.get_state()]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    return found


def drawn(first: int, last: int) -> list[str]:
    """Seeds that differ. Where the program without the entry is an error (autograd's, about a write in place), nothing is
    compared."""
    torch.manual_seed(0)
    wrong, num_compared = [], 0
    for seed in range(first, last):
        try:
            expected = steps(seed, False)
        except RuntimeError:
            continue
        num_compared += 1
        try:
            actual = steps(seed, True)
        except RuntimeError as error:
            wrong.append(f"{seed}: {type(error).__name__}: {error}")
            continue
        if len(actual) != len(expected) or not all(map(torch.equal, actual, expected)):
            wrong.append(f"{seed}: other bits")
    assert num_compared > (last - first) / 2
    return wrong


def of_classes() -> list[tuple[int, str]]:
    """Each way to state of classes and of modules of the program, under each policy."""
    wrong, x = [], torch.randn(3, 4, WIDTH, dtype=torch.float64)
    for kind, policy in itertools.product(range(6), ("full", "selective")):
        found = []
        for entry in (False, True):
            Shared.reset()
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Shared(random.Random(0)), nn.Linear(WIDTH, WIDTH)).double()
            net[1].kind, plan = kind, Plan(mesh_of({"dp": 2}))
            model = parallelize(net, plan.checkpoint("1", policy) if entry else plan)
            sum(model(x).square().mean() for _ in range(2)).backward()
            found.append([Shared.counts(), *(p.grad.to_local() for p in model.parameters())])
        if not all(map(torch.equal, *found)):
            wrong.append((kind, policy))
    return wrong


def test_state_of_classes_and_of_helpers(ranks: RankPools) -> None:
    assert ranks.run(of_classes, world_size=2) == [[], []]


@pytest.mark.parametrize("first", range(0, 300, 10) if NIGHTLY else [0])
@pytest.mark.filterwarnings("ignore")
def test_random_modules(ranks: RankPools, first: int) -> None:
    assert ranks.run(drawn, first, first + 10, world_size=2) == [[], []]


class WritesAtLast(nn.Module):
    """Writes to a large buffer, but not in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("large", torch.ones(5000, WIDTH))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            self.large.mul_(2)
        return self.linear(x) * self.large[0].clone()


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        by = os.environ.get("SWITCHED_BY")  # not known of
        if by == "input":
            x.mul_(2)
        h = self.linear(x)
        return h[:, :2].tanh() if by == "columns" else h.tanh()


def named() -> None:
    """Errors of a recomputation name the module."""
    for policy in ("full", {"save": [], "recompute_communication": True}):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Switched(), nn.Linear(WIDTH, 2))
        model = parallelize(model, Plan(mesh_of({"dp": 2})).checkpoint("1", policy))
        loss = model(torch.ones(2, WIDTH)).sum()
        os.environ["SWITCHED_BY"] = "columns"
        with pytest.raises(
            RecomputationError, match="the checkpointed module '1' computes different results when it is recomputed"
        ):
            loss.backward()
        os.environ["SWITCHED_BY"] = "input"
        with pytest.raises(RecomputationError, match="an input of the checkpointed module '1' was written to in place"):
            model(torch.ones(2, WIDTH)).sum().backward()
        del os.environ["SWITCHED_BY"]
        hooked = model[1].register_forward_hook(lambda module, args, output: (args[0].mul_(2), output)[1])
        with pytest.raises(RecomputationError, match="an input of the checkpointed module '1' was written to in place"):
            model(torch.ones(2, WIDTH)).sum().backward()
        hooked.remove()


def test_errors_name_the_module(ranks: RankPools) -> None:
    ranks.run(named, world_size=2)


def late() -> None:
    plan = Plan(mesh_of({"dp": 2})).checkpoint("0", "full")
    model = parallelize(nn.Sequential(WritesAtLast(), nn.Linear(WIDTH, 2)), plan)
    model(torch.ones(2, WIDTH)).sum().backward()
    with pytest.raises(
        RecomputationError, match="module '0' writes to 'large' in place, which its first forward did not"
    ):
        model(torch.ones(2, WIDTH))


def test_what_is_not_known_of_is_refused(ranks: RankPools) -> None:
    ranks.run(late, world_size=2)
