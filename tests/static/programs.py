"""Small models whose later steps differ from the first ones, in ways that no guard can foresee: a table.

``INSIDE`` has what a model does between two layers, with the activations ``h``, which are cut over ranks, and the input
``x``; what it returns goes through the second layer, or is the model's output, if it is a tuple. Steps from number 3 on are
``late``; where steps take turns, ``now() % 2`` decides. Guards see neither.
"""

# mypy: disable-error-code="func-returns-value"

from __future__ import annotations

import asyncio
import builtins
import collections
import contextlib
import contextvars
import copy
import enum
import functools
import itertools
import math
import os
import random
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

_STEP = "VESCALE_TEST_STEP"  # an environment variable, which no guard compares
Inside = Callable[[Any, Any, Any], Any]


def now() -> int:
    """The number of the step."""
    return int(os.environ[_STEP])


def begin_step(step: int) -> None:
    os.environ[_STEP] = str(step)


def late(then: Any = True, before: Any = False) -> Any:
    return then if now() >= 3 else before


def turns(first: Any, second: Any) -> Any:
    return second if now() % 2 else first


def reset() -> None:
    """What programs keep."""
    KEPT.clear()
    TABLE.clear()
    VARIABLE.set(0)
    vars(LOCAL).clear()
    _counted.steps = Described.steps = 0  # type: ignore[attr-defined]
    CONSTANT.copy_(torch.linspace(0, 1, 16, dtype=torch.float64))
    _positions.cache_clear()
    _dim_of.cache_clear()


class Net(nn.Module):
    def __init__(self, middle: str) -> None:
        super().__init__()
        self.up, self.down, self.other = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 16)
        self.drop, self.bn = nn.Dropout(0.5), nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.register_buffer("count", torch.zeros(3))
        self.middle, self.number, self.act = middle, 2.0, torch.relu
        self.kept: Any = None
        self.held: list[Any] = []
        self.counter, self.config = Counter(), types.SimpleNamespace(dim=1)
        self.torch, self.python = torch.Generator().manual_seed(1), random.Random(1)
        self.numpy, self.array = np.random.default_rng(1), np.zeros(1)
        self.scale.factor = 3.0  # type: ignore[attr-defined]  # as quantizers do

    def forward(self, x: torch.Tensor) -> Any:
        h = self.up(x)
        h = INSIDE.get(self.middle, _nothing)(self, h, x)
        return h[0] if type(h) is Whole else h if isinstance(h, tuple) else self.down(h) * self.scale


def _nothing(n: Any, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return h.tanh()


class Whole(tuple[Any]):
    """The one thing in it is the output."""


class Counter:
    def __init__(self) -> None:
        self.steps = 0

    def next(self) -> int:
        self.steps += 1
        return self.steps


class Reads:
    """Attributes of which nothing is known before they are read."""

    @functools.cached_property
    def cached(self) -> int:
        return late(2, 1)

    @property
    def dim(self) -> int:
        return late(2, 1)

    def __getattr__(self, name: str) -> Any:
        return late(torch.tanh, torch.relu)

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        return h.cumsum(late(2, 1))

    def __get__(self, owner: Any, kind: Any = None) -> int:
        return late(2, 1)

    def __getitem__(self, key: Any) -> Any:
        return late(2, 1)

    def __enter__(self) -> int:
        return late(2, 1)

    def __exit__(self, *_: Any) -> None: ...


class Described:
    dim = Reads()
    steps = 0


class Addict(dict[str, Any]):
    """Answers every attribute, as addict.Dict and mocks do."""

    def __getattr__(self, name: str) -> Any:
        return self.setdefault(name, Addict())


class Dim(enum.IntEnum):
    ROWS = 1
    COLUMNS = 2


class Output:
    def __init__(self, *tensors: torch.Tensor) -> None:
        self.first, self.others = tensors[0], [{"rest": list(tensors[1:])}]

    def __iter__(self) -> Any:
        return iter((self.first, *self.others[0]["rest"]))


class Slotted:
    __slots__ = ("tensors",)

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = list(tensors)

    def __iter__(self) -> Any:
        return iter(self.tensors)


class Identity(torch.autograd.Function):
    """No torch function is called in its forward."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        return h

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * grad.sum()


class Tripled(Identity):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        return h.tanh()


class Scaled(TorchFunctionMode):
    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * 2 if getattr(func, "__name__", "") == "tanh" else made


class Sums(TorchDispatchMode):
    """Makes tanh depend on all of its elements."""

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * args[0].sum() if func is torch.ops.aten.tanh.default else made


HELPERS, SETTINGS = types.ModuleType("helpers"), types.ModuleType("settings")
REPLACED: dict[
    str, Any
] = {  # by a training loop, in late steps: where, under which name, with what before, with what then
    "function of a module": (HELPERS, "act", torch.relu, lambda h: h.softmax(-1)),
    "number of a module": (SETTINGS, "dim", 1, 2),
    "function of torch": (F, "relu", F.relu, lambda h: torch.softmax(h, -1)),
    "forward of a class": (nn.Linear, "forward", nn.Linear.forward, lambda m, x: F.linear(x.tanh(), m.weight, m.bias)),
    # PyTorch's own calls of it go on.
    "a builtin": (builtins, "max", max, lambda *args, _max=max, **kw: 1 if args == (2, 1) else _max(*args, **kw)),
    "method of torch.Tensor": (torch.Tensor, "relu", torch.Tensor.tanh, torch.Tensor.sigmoid),
    "attribute of torch.Tensor": (torch.Tensor, "mT", property(lambda t: t.tanh()), property(lambda t: t.sigmoid())),
    "defaults": (None, "__defaults__", (1,), (2,)),
    "code": (None, "__code__", (lambda h, dim=1: h.softmax(dim)).__code__, (lambda h, dim=1: h.softmax(2)).__code__),
}


def _softmax(h: torch.Tensor, dim: int = 1) -> torch.Tensor:
    return h.softmax(dim)


REPLACED["defaults"] = (_softmax, *REPLACED["defaults"][1:])
REPLACED["code"] = (_softmax, *REPLACED["code"][1:])
KEPT: list[Any] = []
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE", default=0)
LOCAL = threading.local()
CONSTANT = torch.linspace(0, 1, 16, dtype=torch.float64)
TABLE: dict[str, Any] = {}


@functools.lru_cache(maxsize=1)
def _dim_of(number: int) -> int:
    return number + 1


@functools.lru_cache
def _positions(length: int) -> torch.Tensor:
    return torch.linspace(0, 1, length, dtype=torch.float64)


async def _async(h: torch.Tensor) -> torch.Tensor:
    await asyncio.sleep(0)
    return h.softmax(late(2, 1))


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _counted(dim: int = 0) -> int:
    """Counts in a context variable, a thread's own object, a table and an attribute of a function."""
    VARIABLE.set(VARIABLE.get() + 1)
    LOCAL.steps = getattr(LOCAL, "steps", 0) + 1
    TABLE["steps"] = TABLE.get("steps", 0) + 1
    _counted.steps = getattr(_counted, "steps", 0) + 1  # type: ignore[attr-defined]
    return VARIABLE.get() + LOCAL.steps + TABLE["steps"] + _counted.steps  # type: ignore[attr-defined]


def _drawn(n: Any) -> Any:
    n.array += 1
    return n.array[0] * n.python.random() * n.numpy.random() * torch.rand(1, generator=n.torch).item()


def _parts(h: torch.Tensor) -> Any:
    for dim in late((2, 1), (1, 2)):
        yield h.sum(dim, keepdim=True) + dim


def _keep(value: Any) -> Any:
    KEPT.append(value)
    return value


def _written(x: torch.Tensor, value: Any) -> torch.Tensor:
    with torch.no_grad():
        x.copy_(value)
    return x


def _set_data(n: Any, factor: float) -> None:
    n.scale.data = n.scale.data * factor


def _loop(h: torch.Tensor, rounds: int) -> torch.Tensor:
    for _ in range(rounds):
        h = h * h.sigmoid()
    return h


def _caught(function: Callable[[], Any], other: Callable[[], Any], kind: Any = Exception) -> Any:
    try:
        return function()
    except kind:
        return other()


def _raise(problem: BaseException) -> Any:
    raise problem


def unless(is_on: bool, problem: BaseException, value: Any) -> Any:
    if is_on:
        raise problem
    return value


def _with(context: Any, function: Callable[[], Any]) -> Any:
    with context:
        return function()


def _hooked(h: torch.Tensor, is_on: bool = True) -> torch.Tensor:
    if is_on:
        h.register_hook(lambda grad: grad * grad.sum())
    return h


def _hooked_node(h: torch.Tensor, is_on: bool = True) -> torch.Tensor:
    if is_on:
        h.grad_fn.register_prehook(lambda grads: (grads[0] * grads[0].sum(),))  # type: ignore[union-attr]
    return h


def quantized(h: torch.Tensor) -> Any:
    """What autograd saves depends on all elements."""
    return torch.autograd.graph.saved_tensors_hooks(
        lambda x: (x / x.abs().sum(), x.abs().sum()), lambda p: p[0] * p[1] * 1.5
    )


def _replace_module(n: Any) -> None:
    n.other = nn.Linear(16, 16, dtype=torch.float64)


def _product(h: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.softmax(h, dim) * h


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    _scripted = torch.jit.script(_product)


class _Lookup:
    def __eq__(self, other: object) -> bool:
        return bool(late())

    def __hash__(self) -> int:
        return 0


def _write_to(tensor: torch.Tensor, index: Any, value: float) -> torch.Tensor:
    tensor[index] = value
    return tensor


def tensors_of(result: Any) -> list[torch.Tensor]:
    """Of an output of any kind."""
    if isinstance(result, torch.Tensor):
        return [result, *([result.aux] if hasattr(result, "aux") else [])]
    if isinstance(result, types.SimpleNamespace):
        return [result.tensors, result.later()]
    if result is None or isinstance(result, int | float):
        return [] if result is None else [torch.tensor(float(result))]
    return [x for one in result for x in tensors_of(one)]


def _once(change: Callable[[Any], Any], value: Callable[[Any, torch.Tensor], Any]) -> Inside:
    """A change in the first late step, before it takes a way that was not recorded; a value that depends on it."""

    def run(n: Any, h: torch.Tensor, x: torch.Tensor) -> Any:
        if now() == 3:
            change(n)
        return value(n, h.softmax(late(2, 1)))

    return run


def _increase(item: Any, name: str) -> None:
    setattr(item, name, getattr(item, name) + 1)


# fmt: off
INSIDE: dict[str, Inside] = {
    # What Python reads
    "function of a module": lambda n, h, x: HELPERS.act(h),
    "number of a module": lambda n, h, x: h * h.sum(SETTINGS.dim, keepdim=True),
    "function of torch": lambda n, h, x: F.relu(h),
    "forward of a class": lambda n, h, x: n.other(h),
    "method of torch.Tensor": lambda n, h, x: h.relu(),
    "attribute of torch.Tensor": lambda n, h, x: h.mT,
    "module that is made": lambda n, h, x: nn.LayerNorm(16).to(h.dtype)(h),
    "module that is made later": lambda n, h, x: nn.LayerNorm(16).double()(h) if late() else h,
    "tensor without values": lambda n, h, x: h * torch.empty(3, device="meta").numel(),
    "a builtin": lambda n, h, x: h.softmax(max(2, 1)),
    "defaults": lambda n, h, x: _softmax(h),
    "code": lambda n, h, x: _softmax(h),
    "other method": lambda n, h, x: getattr(h, late("softmax", "log_softmax"))(-1),
    "name from a table": lambda n, h, x: turns(torch.tanh, functools.partial(torch.softmax, dim=-1))(h),
    "closure": lambda n, h, x: (lambda dim: lambda: h.sum(dim, keepdim=True) * h)(late(1, 2))(),
    "property": lambda n, h, x: h.flip(Reads().dim),
    "cached property": lambda n, h, x: h.flip(Reads().cached),
    "any attribute": lambda n, h, x: Reads().anything(h),
    "descriptor": lambda n, h, x: h.softmax(Described().dim),
    "called object": lambda n, h, x: Reads()(h),
    "item of an object": lambda n, h, x: h.softmax(Reads()[0]),
    "equality of objects": lambda n, h, x: h.softmax(1 + (_Lookup() == 0)),
    "context manager": lambda n, h, x: _with(Reads(), lambda: h) * h.softmax(Reads().__enter__()),
    "addict": lambda n, h, x: h * (1.0 if Addict().any.thing else 2.0),
    "random dim": lambda n, h, x: h * h.mean(random.choice([1, 2]), keepdim=True),
    "random order":
        lambda n, h, x: (lambda p: p[0] * p[0].sum(-1, keepdim=True) + 0 * p[1])(
            [h, x.repeat(1, 1, 2)][:: 1 if np.random.random() > 0.5 else -1]),
    "context variable": lambda n, h, x: (VARIABLE.set(now() // 3), h.softmax(1 + VARIABLE.get()))[1],
    "asynchronous": lambda n, h, x: asyncio.run(_async(h)),
    "generator": lambda n, h, x: (lambda a, b: h * a - b)(*_parts(h)),
    "cache": lambda n, h, x: h.sum(_dim_of(now() // 3), keepdim=True) + h,
    "cached tensor": lambda n, h, x: h * _positions(late(16, 8)).sum(),
    "enumeration": lambda n, h, x: h.softmax(late(Dim.COLUMNS, Dim.ROWS)),
    "numpy number": lambda n, h, x: h.softmax(np.int64(late(2, 1))),
    "numpy of sizes": lambda n, h, x: h.reshape(int(np.prod(h.shape[:2])), -1).view(*np.array(h.shape).tolist()),
    "numpy sizes": lambda n, h, x: h.reshape(*np.array(h.shape)) * np.prod(h.shape),
    "mathematics of sizes": lambda n, h, x: h / math.sqrt(h.size(-1)) * math.prod(h.shape),
    "attribute of a parameter": lambda n, h, x: h * getattr(n.scale, "factor", 1.0),
    "kind of a parameter": lambda n, h, x: h * (2.0 if isinstance(n.scale, nn.Parameter) else 3.0),
    "leaves": lambda n, h, x: h * (2.0 if n.scale.is_leaf else 3.0) * (5.0 if h.is_leaf else 7.0),
    "gradients on": lambda n, h, x: h * (2.0 if n.scale.requires_grad and h.requires_grad else 3.0),
    "gradient of a parameter": lambda n, h, x: h * (2.0 if n.scale.grad is None else 3.0),
    "gradient of a parameter later": lambda n, h, x: h * (2.0 if late() and n.scale.grad is None else 3.0),
    "attribute of a tensor": lambda n, h, x: (setattr(h, "mark", 2.0 + now()), h * getattr(h, "mark", 1.0))[1],
    "number of a hash": lambda n, h, x: h * len({h: 1, x: 2, n.scale: 3}),
    "sizes as numbers": lambda n, h, x: h * (h.shape[-1] + h.numel() + len(h) + h.size(1) + h.nelement()),
    "strides as numbers": lambda n, h, x: h * (h.stride(0) + h.stride()[1] + h.storage_offset() + h.dim() + h.ndim),
    "bytes as numbers": lambda n, h, x: h * (h.element_size() + h.nbytes + h.itemsize),
    "text of a tensor": lambda n, h, x: (str(h.shape), h * len(str(h.size())))[1],
    "configuration": lambda n, h, x: (setattr(n.config, "dim", late(2, 1)), h.softmax(n.config.dim))[1],
    "nested list": lambda n, h, x: (TABLE.update(dims=[late(2, 1)]), h.softmax(TABLE["dims"][0]))[1],
    "attribute of a class":
        lambda n, h, x: (setattr(Described, "size", late(2, 1)), h.softmax(Described.size))[1],  # type: ignore[attr-defined]
    # Which functions run
    "data": lambda n, h, x: h.softmax(-1) if x.sum() > 0 else h.relu(),
    "rounds": lambda n, h, x: _loop(h, int(x[0, 0, 0].item() > 0) + 1),
    "early return": lambda n, h, x: h if late() else h.softmax(-1),
    "later end": lambda n, h, x: h.relu().softmax(-1) if late() else h.relu(),
    "module is skipped": lambda n, h, x: h if late() else h + n.up(x),
    "module is new": lambda n, h, x: n.other(h) if late() else h,
    "modules by turns": lambda n, h, x: turns(n.drop, nn.Identity())(h),
    "module is made": lambda n, h, x: nn.Softmax(late(2, 1))(h),
    "module is replaced inside": lambda n, h, x: (late() and _replace_module(n), h.tanh())[1],
    "forward is replaced":
        lambda n, h, x: (setattr(n.other, "forward", lambda y: y.softmax(-1) * 2) if now() == 3 else None,
            n.other(h))[1],
    "caught exception":
        lambda n, h, x: _caught(lambda: unless(late(), KeyError("late"), h).softmax(-1), lambda: h.tanh(), KeyError),
    "caught everything":
        lambda n, h, x: h * _caught(lambda: late(2, 1) * h.tanh().sum(late(2, 1)).mean().item(), lambda: 5.0,
            BaseException),
    "caught a draw":
        lambda n, h, x: (h.tanh(), setattr(n, "number", _caught(lambda: torch.rand(3).sum().item() if late() else 1.0,
            lambda: 5.0, BaseException)))[0],
    "caught error of torch":
        lambda n, h, x: _caught(lambda: h.view(*late((-1, 5), (-1,))).view_as(h), lambda: h * 3, RuntimeError),
    "uncaught exception": lambda n, h, x: unless(late(), OSError("late"), h.tanh()),
    "uncaught value error": lambda n, h, x: unless(now() == 3, ValueError("late"), h.tanh()),
    "error of torch": lambda n, h, x: h.view(late(-1, 64), late(5, 16)).view_as(h),
    "other sizes broadcast": lambda n, h, x: h + x[..., :late(8, 1)],
    "sizes that broadcast": lambda n, h, x: h + x.repeat(1, 1, 2)[..., :late(1, 16)],
    # Which tensors they get
    "other operand": lambda n, h, x: (lambda g: h * late(g, h))(h.tanh()),
    "cut or whole": lambda n, h, x: turns(h, x.repeat(1, 1, 2)).sum(-1, keepdim=True) * h,
    "swapped operands": lambda n, h, x: (lambda a, b: late(a - b, b - a))(h.relu(), h.tanh()),
    "swapped in where": lambda n, h, x: torch.where(h > 0, *late((h.tanh(), h.relu()), (h.relu(), h.tanh()))),
    "swapped outputs": lambda n, h, x: (lambda a, b: late((b, a), (a, b)))(n.down(h), n.down(h.relu())),
    "output is the input": lambda n, h, x: (n.down(h), late(x, x + 0)),
    "output twice": lambda n, h, x: (lambda y: (y, late(y, y + 0)))(n.down(h)),
    "kept for later": lambda n, h, x: (now() == 3 and KEPT.append(h.detach()), h + KEPT[-1] if now() > 3 else h)[1],
    "kept before": lambda n, h, x: (KEPT.append(h.detach()), h + KEPT[-2] if len(KEPT) > 1 else h)[1],
    "kept without a call":
        lambda n, h, x: (now() == 3 and KEPT.append(h), h + KEPT[-1].detach() if now() > 3 else h.tanh())[1],
    "kept in a module":
        lambda n, h, x: (now() == 3 and setattr(n, "kept", h.detach()), h + n.kept if now() > 3 else h)[1],
    "output is kept":
        lambda n, h, x: (lambda g: (KEPT.append(g), (g, h + KEPT[0].detach() if len(KEPT) > 3 else h +
            0))[1])(h.tanh()),
    "output is kept later":
        lambda n, h, x: (lambda g: (now() == 3 and KEPT.append(g), (g, h + KEPT[0].detach().sum(-1,
            keepdim=True) if now() > 3 else h + 0))[1])(h.tanh()),
    "output is kept by a module":
        lambda n, h, x: (lambda g: (now() == 3 and n.held.append(g), (g, h + n.held[0].detach().sum(-1,
            keepdim=True) if now() > 3 else h + 0))[1])(h.tanh()),
    "input is kept": lambda n, h, x: (KEPT.append(x), h * KEPT[max(len(KEPT) - 3, 0)].sum())[1],
    "input is kept later":
        lambda n, h, x: (now() == 3 and KEPT.append(x), h * KEPT[0].mean() if now() > 3 else h.tanh())[1],
    "parameter is kept later":
        lambda n, h, x: (now() == 3 and KEPT.append(n.up.weight), h.softmax(-1) *
            KEPT[0].sum() if now() > 3 else h.tanh())[1],
    "kept by an output": lambda n, h, x: (lambda y: (setattr(y, "aux", h), Whole((y,)))[1])(n.down(h)),
    "kept by an output later": lambda n, h, x: (lambda y: (late() and setattr(y, "aux", h), Whole((y,)))[1])(n.down(h)),
    "weak references": lambda n, h, x: (lambda r: h * (2.0 if r() is h else 3.0))(weakref.ref(h)),
    "copies": lambda n, h, x: copy.copy(h) * 2 + copy.deepcopy(x.detach()).sum(),
    "other thread":
        lambda n, h, x: h + late(lambda: in_thread(lambda: h.detach().tanh()), lambda: h.detach().tanh())(),
    "plain from a thread":
        lambda n, h, x: h * in_thread(lambda: late(lambda: h.detach().sum((0, 1)), lambda: CONSTANT * 2)()).sum(),
    "parameter of a plain tensor":
        lambda n, h, x: h * nn.Parameter(late(lambda: h.detach().sum((0, 1)), lambda: CONSTANT)()).sum(),
    "from numpy": lambda n, h, x: h * torch.from_numpy(np.arange(3.0) + now()).sum(),
    "to numpy": lambda n, h, x: h * float(np.sum(late(x, x * 2).detach().numpy())),
    "other constant": lambda n, h, x: h * late(CONSTANT, CONSTANT * 2).sum(),
    "compiled by torch.jit": lambda n, h, x: _scripted(h, late(2, 1)),
    "item of a list": lambda n, h, x: (lambda parts: parts[late(1, 0)].softmax(-1))([h, h.tanh(), x]),
    "popped item":
        lambda n, h,
            x: (lambda parts: parts.popitem(last=bool(late()))[1].softmax(-1))(collections.OrderedDict(a=h.tanh(),
            b=h)),
    # What else they get
    "other dim": lambda n, h, x: h * torch.sum(h, dim=late(2, 1), keepdim=True),
    "other slice": lambda n, h, x: F.pad(h[..., :late(8, 16)], (0, late(8, 0))),
    "other chunks": lambda n, h, x: torch.cat(h.chunk(late(4, 2), dim=-1)[::-1], -1),
    "other shape": lambda n, h, x: h.view(*h.shape[:2], late(8, 4), late(2, 4)).softmax(-1).reshape(h.shape),
    "other flag": lambda n, h, x: h - late(h.mean(-1, keepdim=True), h.mean(1, True)),
    "other text": lambda n, h, x: h * F.mse_loss(h, h.detach() + 1, reduction=late("sum", "mean")),
    "other dtype": lambda n, h, x: h.to(late(torch.float32, torch.float64)).to(torch.float64),
    "other probability": lambda n, h, x: F.dropout(h, late(0.0, 0.5)),
    "other index": lambda n, h, x: h * h[..., now() * 5 % 16].unsqueeze(-1),
    "other index tensor": lambda n, h, x: h * h[..., torch.tensor([late(15, 1)])],
    "other mask": lambda n, h, x: h.masked_fill(x.repeat(1, 1, 2) > late(0.5, 0.0), late(-1.0, 0.0)).relu(),
    "other fraction": lambda n, h, x: h * (0.5 + now()),
    "other scalar": lambda n, h, x: h * late(np.float64(now()), now()),
    "other norm": lambda n, h, x: h / h.norm(late(1.0, 2.0), -1, keepdim=True),
    "infinite norm": lambda n, h, x: h / h.norm(late(float("inf"), 2.0), -1, keepdim=True),
    "written in place": lambda n, h, x: (lambda g: late(g.mul_, g.mul)(2))(h * 2),
    "written item": lambda n, h, x: _write_to(h * 2, (..., late(3, slice(None))), 0.5),
    "normalize": lambda n, h, x: F.normalize(h, dim=late(2, 1)),
    "filled index": lambda n, h, x: h.index_fill(late(2, 1), torch.tensor([0, 3]), 0.5),
    "joined":
        lambda n, h, x: (lambda y: y.narrow(late(2, 1), 0, h.shape[late(2, 1)]))(torch.cat([h, h.tanh()], late(2, 1))),
    "number of dims": lambda n, h, x: h.reshape(late((2, 2, 4, 16), (4, 4, 16))).softmax(-2).reshape(h.shape),
    "through ops": lambda n, h, x: torch.ops.aten.softmax.int(h, late(2, 1)),
    "other equation":
        lambda n, h, x: torch.einsum(late("bij,bkj->bik", "bji,bjk->bik"), h, h).sum((-1, -2))[:, None, None] * h,
    "sparse": lambda n, h, x: h * x[0].to_sparse().to_dense().sum(),
    "normal": lambda n, h, x: h * torch.normal(x.detach(), 1.0).mean(),
    "poisson": lambda n, h, x: h * torch.poisson(x.detach().abs()).mean(),
    "draw of columns": lambda n, h, x: h * torch.rand_like(h).mean(late(2, 1), keepdim=True),
    "draws before another way": lambda n, h, x: F.dropout(h, 0.5).softmax(late(2, 1)),
    "seed inside": lambda n, h, x: (late() and torch.manual_seed(5), h * torch.rand(16, dtype=h.dtype).sum())[1],
    "default dtype": lambda n, h, x: h * torch.ones(4, dtype=late(torch.float32, torch.float64)).mean(),
    # What is written
    "attribute that counts": lambda n, h, x: h.softmax(late(2, 1)) * n.counter.next(),
    "counters that count": lambda n, h, x: (_counted(), h.softmax(late(2, 1)) * _counted())[1],
    "generators that draw": lambda n, h, x: h.softmax(late(2, 1)) * _drawn(n),
    "attribute of a class that counts":
        lambda n, h, x: (setattr(Described, "steps", Described.steps + 1), h.softmax(late(2, 1)) * Described.steps)[1],
    "iterator":
        lambda n, h, x: (n.held or n.held.append(itertools.count()), h.softmax(late(2, 1)) * next(n.held[0]))[1],
    "parameter is set": lambda n, h, x: (late() and _set_data(n, 1.5), h)[1],
    "parameter is always set": lambda n, h, x: (_set_data(n, 1.5), h)[1],
    "parameter is written": lambda n, h, x: (_written(n.scale, n.scale * late(1.5, 1.25)), h)[1],
    "data of a parameter is written": lambda n, h, x: (n.scale.data.mul_(1.5), h.softmax(late(2, 1)))[1],
    "data of a parameter is written later": lambda n, h, x: (late() and n.scale.data.mul_(1.5), h.softmax(1))[1],
    "buffer is counted": lambda n, h, x: (setattr(n, "count", n.count.add_(1)), h * n.count.sum())[1],
    "buffer is replaced": lambda n, h, x: (setattr(n, "count", n.count + 1), h * n.count.sum())[1],
    "buffer is counted before another way": lambda n, h, x: (n.count.add_(1), h.softmax(late(2, 1)) * n.count.sum())[1],
    "data of a buffer is counted": lambda n, h, x: (n.count.data.add_(1), h.softmax(late(2, 1)) * n.count.sum())[1],
    "batch norm before another way": lambda n, h, x: (n.bn(x).sum() * h).softmax(late(2, 1)),
    "batch norm later": lambda n, h, x: (late() and n.bn(x), h.tanh())[1],
    "input is written":
        lambda n, h, x: (_written(x, x * 2), (h.detach().softmax(late(2, 1)) * n.other.bias * x.sum(),))[1],
    "constant is written": lambda n, h, x: (CONSTANT.data.add_(1), h.softmax(late(2, 1)) * CONSTANT.sum())[1],
    "written through numpy":
        lambda n, h, x: (np.add(CONSTANT.numpy(), 1, out=CONSTANT.numpy()), h.softmax(late(2, 1)) * CONSTANT.sum())[1],
    # What is changed before the first step that leaves
    "attribute once": _once(lambda n: _increase(n, "number"), lambda n, h: h * n.number),
    "attribute of a part once": _once(lambda n: _increase(n.bn, "eps"), lambda n, h: h * n.bn.eps),
    "attribute of an object once": _once(lambda n: n.counter.next(), lambda n, h: h * (1 + n.counter.steps)),
    "configuration once": _once(lambda n: _increase(n.config, "dim"), lambda n, h: h * n.config.dim),
    "attribute of a class once": _once(lambda n: _increase(Described, "steps"), lambda n, h: h * (1 + Described.steps)),
    "list once": _once(lambda n: n.held.append(1), lambda n, h: h * (1 + len(n.held))),
    "table once":
        _once(lambda n: TABLE.update(k=1 + TABLE.get("k", 0)), lambda n, h: h * (1 + TABLE.get("k", 0))),
    "array once": _once(lambda n: n.array.__iadd__(1), lambda n, h: h * (1 + n.array[0])),
    "buffer once": _once(lambda n: _increase(n, "count"), lambda n, h: h * n.count.sum()),
    "hook once": _once(lambda n: n.other.register_forward_hook(lambda m, a, out: out * 2), lambda n, h: n.other(h)),
    "hook before once":
        _once(lambda n: n.other.register_forward_pre_hook(lambda m, a: a[0] * 2), lambda n, h: n.other(h)),
    "backward hook once":
        _once(lambda n: n.other.register_full_backward_hook(lambda m, grads, outs: (grads[0] * 2,)),
            lambda n, h: n.other(h)),
    # Outputs
    "output object": lambda n, h, x: Whole((Output(n.down(h), h, h.tanh()),)),
    "output with slots": lambda n, h, x: Whole((Slotted(n.down(h), h, h.tanh()),)),
    "output changes its order": lambda n, h, x: Whole((Slotted(*[n.down(h), h, h.tanh()][::late(-1, 1)]),)),
    "output becomes an object": lambda n, h, x: Whole((late(Slotted, Output)(n.down(h), h),)),
    "output becomes a list": lambda n, h, x: Whole((late(list, tuple)((n.down(h), h)),)),
    "output is a generator": lambda n, h, x: Whole(((y * 2 for y in (n.down(h), h)),)),
    "output becomes a generator": lambda n, h, x: Whole((late(iter, list)([n.down(h), h]),)),
    "output is a function": lambda n, h, x: Whole((types.SimpleNamespace(tensors=n.down(h), later=lambda: h),)),
    "output with None": lambda n, h, x: Whole(((n.down(h), late(None, h)),)),
    "output is a number": lambda n, h, x: Whole(((n.down(h), late(2.0, 3.0)),)),
    # Gradients
    "without gradients": lambda n, h, x: h + _with(torch.set_grad_enabled(not late()), lambda: h.tanh()),
    "detached": lambda n, h, x: (lambda g: h + late(g.detach(), g))(h.tanh()),
    "hook": lambda n, h, x: _hooked(h.tanh()),
    "hook later": lambda n, h, x: _hooked(h.tanh(), late()),
    "hook of a node": lambda n, h, x: _hooked_node(h.tanh()),
    "hook of a node later": lambda n, h, x: _hooked_node(h.tanh(), late()),
    "kept gradient": lambda n, h, x: (lambda g: (late() and g.retain_grad(), g)[1])(h.tanh()),
    "autocast":
        lambda n, h, x: h * _with(torch.autocast("cpu", torch.bfloat16, enabled=late()),
            lambda: torch.matmul(h.float(), h.float().mT)).double().sum(-1, True),
    "own backward": lambda n, h, x: Tripled.apply(h) if late() else h.tanh(),
    "own backward always": lambda n, h, x: Tripled.apply(h),
    "own backward of an identity": lambda n, h, x: Identity.apply(h).tanh() if late() else h.tanh(),
    "own backward of the output": lambda n, h, x: (n.down(h), late(Identity.apply, lambda g: g)(h.tanh())),
    "gradients inside": lambda n, h, x: h * torch.autograd.grad(h.square().sum(), h, retain_graph=True)[0].detach(),
    "gradients inside later":
        lambda n, h, x: h * late(lambda: torch.autograd.grad(h.square().sum(), h, retain_graph=True)[0].detach(),
            lambda: h)(),
    "saved tensors": lambda n, h, x: _with(quantized(h), lambda: h.tanh() * h),
    "saved tensors later":
        lambda n, h, x: _with(quantized(h) if late() else contextlib.nullcontext(), lambda: h.tanh() * h),
    "checkpoint": lambda n, h, x: checkpoint(lambda g: g.softmax(late(2, 1)), h, use_reentrant=False),
    "checkpoint later": lambda n, h, x: checkpoint(torch.tanh, h, use_reentrant=False) if late() else h.tanh(),
    "reentrant checkpoint": lambda n, h, x: checkpoint(lambda g: g.softmax(2), h, use_reentrant=True),
    # Modes and transforms
    "mode inside": lambda n, h, x: _with(Scaled(), h.tanh),
    "mode inside later": lambda n, h, x: _with(Scaled() if late() else contextlib.nullcontext(), h.tanh),
    "dispatch mode": lambda n, h, x: _with(Sums(), h.tanh),
    "dispatch mode later": lambda n, h, x: _with(Sums() if late() else contextlib.nullcontext(), h.tanh),
    "transform":
        lambda n, h, x: h * torch.func.grad(lambda y: y.square().sum())(late(x.detach(), x.detach() * 2)).sum(),
    "vmap": lambda n, h, x: torch.func.vmap(lambda y: y.softmax(late(1, 0)))(h),
    "inference": lambda n, h, x: h * _with(torch.inference_mode(late()), lambda: x.sum().item()),
}
# fmt: on


# What runs static from the second step on, on tp; and what reports say of others.
STATIC = {
    *("addict", "numpy of sizes", "numpy sizes", "mathematics of sizes", "attribute of a parameter"),
    *("kind of a parameter", "gradients on", "attribute of a tensor", "number of a hash", "sizes as numbers"),
    *("strides as numbers", "bytes as numbers", "text of a tensor", "sizes that broadcast", "plain"),
}
REASONS = {
    "iterator": "may advance the iterator",
    "compiled by torch.jit": "comes from another thread, another step, or compiled code",
    "own backward always": "the backward of this function",
    "function mode around": "a TorchFunctionMode is on",
    "dispatch mode around": "a TorchDispatchMode is on",
    "dispatch mode": "under a TorchDispatchMode",
    "saved tensors": "hooks for saved tensors",
    "penalty": "create_graph",
    "penalty later": "create_graph=True) was called on a model in static mode",
    "reentrant checkpoint": "use_reentrant=True",
    "other dim": "in place of",
    "input is kept": "keeps tensors",
    "kept before": "keeps tensors",
}
