"""Calls entries of the C++ helpers with arguments that they cannot use. Each is to raise, or to answer; none may crash.

``python -m tests.csrc.wrong_arguments FILE SEED CALLS`` makes ``CALLS`` calls of each entry, and writes before each call to
``FILE`` which one it is: what a crash leaves there is its cause.
"""

from __future__ import annotations

import functools
import gc
import random
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from vescale import Plan, csrc, parallelize

MODULES = ("dispatch", "module_hooks", "patching", "random_fills", "step_marks", "tape")
# These change what the others do, and come last.
SETTERS = re.compile(r"(un)?install|set_.*|observe_writes|answer_mixed_calls|remove_composites|clear")
# These read memory themselves. Where memory has been freed under a tensor, kernels of PyTorch crash.
READERS = re.compile(
    r"step_marks\..*|tape\..*|dispatch\.(take_local_grads|give_grads|gradients_of|are_dtensors_unheld|have_locals)"
)
SEEN: dict[str, list[tuple[Any, ...]]] = {}
"""Arguments that a training step has passed to each entry."""


class Watched:
    """A function of a module, whose arguments are noted."""

    def __init__(self, name: str, function: Any) -> None:
        self.name, self.function = name, function
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        noted = SEEN.setdefault(self.name, [])
        if len(noted) < 8:
            noted.append(args + tuple(kwargs.values()))
        return self.function(*args, **kwargs)


def entries(name: str, module: Any) -> Iterator[tuple[str, Any]]:
    """Functions and classes; methods with their class."""
    for entry, found in vars(module).items():
        if entry.startswith("__") or not callable(found):
            continue
        yield f"{name}.{entry}", found
        if isinstance(found, type):
            for method, function in vars(found).items():
                if callable(function) or isinstance(function, property | staticmethod):
                    yield f"{name}.{entry}.{method}", function


class Draw:
    """Arguments: of a call that was seen with some replaced, or of the kinds that the signature names, or any."""

    def __init__(self, seed: int, model: nn.Module, mesh: Any) -> None:
        self.random = random.Random(seed)
        cut = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)])
        leaf = nn.Parameter(distribute_tensor(torch.randn(4, 6), mesh, [Replicate()]))
        leaf.grad = distribute_tensor(torch.randn(4, 6), mesh, [Replicate()])
        plain = torch.randn(4, 6, requires_grad=True)
        nested: list[Any] = []
        nested.append(nested)
        deep: Any = ()
        for _ in range(20_000):
            deep = (deep,)
        self.dead = torch.randn(64, 64)
        self.dead.untyped_storage().resize_(0)
        self.tensors = [
            plain, plain * 2, cut, leaf, cut.to_local(), cut * 2, torch.ones(3, dtype=torch.int8), torch.tensor(1.0),
            torch.empty(0),
            torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta"), torch.ones(2, 3, dtype=torch.complex64).conj(),
            torch.ones(5).expand(3, 5),
        ]  # fmt: skip
        lists = ([], [1, 2], [plain, cut], [{}, {"a": 1}], [None], nested, [leaf, leaf], [cut._spec, None], ["a"], [[]])
        self.kinds: dict[str, list[Any]] = {
            "Tensor": self.tensors,
            "int": [0, 1, -1, 2, 7, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 2**70, True],
            "str": ["", "a", "\ud800", "x" * 1000],
            "tuple": [(), (1,), (None,) * 3, (cut,), (Shard(0),), ((1, 2), (3, 4)), (-1, "a", None), (0, 5), deep],
            "list": list(lists),
            "dict": [{}, {"a": 1}, {1: cut}, {(): None}, {"x": plain}],
            "object": [
                None, object(), int, torch.Tensor, DTensor, torch.add, weakref.ref(model), model, mesh, cut._spec, 1.5, b"x",
            ],
            "Buffer": [bytearray(64), memoryview(bytearray(4096)), b"", torch.ones(8).numpy(), torch.ones(8, 8).numpy().T],
            "bool": [True, False],
        }  # fmt: skip
        self.kinds["Callable"] = [lambda *_: None, lambda *_: (), lambda *_: cut, len, int, lambda *a: a]

    def value(self, kind: str) -> Any:
        found = self.kinds.get(kind)
        if found is None or self.random.random() < 0.3:
            found = self.random.choice(list(self.kinds.values()))
        return self.random.choice(found)

    def arguments(self, name: str, found: Any) -> list[Any]:
        seen = SEEN.get(name)
        if seen and self.random.random() < 0.7:
            args = list(self.random.choice(seen))
            for _ in range(self.random.randint(1, 2) if args else 0):
                place = self.random.randrange(len(args))
                args[place] = self.changed(args[place])
            return args
        kinds = re.findall(r"(?:arg\d+|\w+): ([\w.]+)", (found.__doc__ or "").split("->")[0])
        if not kinds:
            return [self.value("object") for _ in range(self.random.randint(0, 6))]
        return [self.value({"collections.abc.Buffer": "Buffer"}.get(kind, kind.split(".")[-1])) for kind in kinds]

    def changed(self, value: Any) -> Any:
        """Another value, or an item of it another one."""
        if isinstance(value, list | tuple) and value and self.random.random() < 0.6:
            items = list(value)
            place = self.random.randrange(len(items))
            if self.random.random() < 0.5:
                del items[place]
            else:
                items[place] = self.changed(items[place])
            return items if isinstance(value, list) else tuple(items)
        return self.value(type(value).__name__)


def step(model: nn.Module) -> None:
    model(torch.randn(4, 6)).square().mean().backward()


def follow_up(draw: Draw, made: Any) -> None:
    """What is done with what an entry has returned."""
    if isinstance(made, torch.Tensor):
        if made.requires_grad and made.is_floating_point() and not isinstance(made, DTensor):
            made.sum().backward()
        return
    if callable(made):
        made(*(draw.value("object") for _ in range(draw.random.randint(0, 4))))
        type(made)()
        made.__self__  # noqa: B018


def attempt(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception:  # whatever it is: the process goes on
        return None


def main(file: str, seed: int, calls: int) -> None:
    dist.init_process_group("fake", rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    modules = {name: csrc.load_module(name) for name in MODULES}
    functions = {name: dict(entries(name, module)) for name, module in modules.items() if module is not None}
    for name, found in functions.items():
        for entry, function in found.items():
            if entry.count(".") == 1 and not isinstance(function, type):
                setattr(modules[name], entry.partition(".")[2], Watched(entry, function))
    models = []
    for mode in ("eager", "static"):
        model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Dropout(0.1), nn.LayerNorm(6)), nn.Linear(6, 6))
        plan = Plan(mesh)
        plan.shard("0.weight", Shard(0), mesh="tp")
        plan.shard("2.weight", Shard(1), mesh="tp")
        plan.shard("1.<in>", Replicate(), mesh="tp")
        plan.shard("1.<out>", Replicate(), mesh="tp")
        plan.shard("<out>", Replicate(), mesh="tp")
        models.append(parallelize(model, plan, mode=mode))  # type: ignore[arg-type]
        for _ in range(4):
            attempt(lambda: step(models[-1]))
    draw = Draw(seed, models[0], mesh)
    order = [(name, found) for each in functions.values() for name, found in each.items()]
    order.sort(key=lambda entry: bool(SETTERS.fullmatch(entry[0].rpartition(".")[2])))
    objects: list[Any] = []
    with open(file, "w+") as log:
        for name, found in order:
            for number in range(calls):
                args = draw.arguments(name, found)
                if READERS.fullmatch(name) and args and draw.random.random() < 0.1:
                    args[draw.random.randrange(len(args))] = draw.dead
                if name.count(".") == 2 and objects and draw.random.random() < 0.7:
                    args[:1] = [draw.random.choice(objects)]
                log.seek(0)
                log.write(f"{name}: call {number} of seed {seed}: {[type(x).__name__ for x in args]}\n")
                log.flush()
                log.truncate()
                function = found.__func__ if isinstance(found, staticmethod) else found
                if isinstance(function, property):
                    attempt(functools.partial(function.__get__, args[0] if args else None))
                    attempt(functools.partial(function.__set__, args[0] if args else None, draw.value("int")))
                    continue
                made = attempt(functools.partial(function, *args))
                if (made is not None and name.startswith("tape.Tape")) or (
                    name.count(".") == 1 and isinstance(found, type)
                ):
                    objects.append(made)
                attempt(functools.partial(follow_up, draw, made))
            gc.collect()
        log.write("the program goes on\n")
        for model in models:
            attempt(functools.partial(step, model))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
