"""Modules drawn by a seed, in which tensors alias: in-place ops, views, inputs that are shared, returned, and written to.

A block is a list of statements about numbered tensors. It calls other blocks with its tensors, alone, in containers, or one
twice; they return new tensors, their inputs, or views of them. The plan has boundaries anywhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from vescale.compat import tensors_in
from vescale.plans import Plan

__all__ = ["ROWS", "WIDTH", "Block", "UndefinedOnOneDeviceError", "draw_model", "draw_plan"]

ROWS, WIDTH = 4, 6
Shape = tuple[int, ...]

NEW: dict[str, Callable[[Any], Any]] = {
    "sin": lambda x: x.sin(),
    "twice": lambda x: x * 2,
    "plus": lambda x: x + 0.5,
    "clone": lambda x: x.clone(),
    "square": lambda x: x * x,
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "add_": lambda x: x.add_(0.5),
    "mul_": lambda x: x.mul_(1.5),
    "relu_": lambda x: F.relu(x, inplace=True),
    "neg_": lambda x: x.neg_(),
    "tanh_": lambda x: x.tanh_(),
    "x[0] =": lambda x: x.__setitem__(0, 0.25),
    "x[..., 1:] =": lambda x: x.__setitem__((..., slice(1, None)), 0.75),
    "x[0].mul_": lambda x: x[0].mul_(3),
    "x[..., 0].add_": lambda x: x[..., 0].add_(1),
}
VIEWS: dict[str, tuple[Callable[[Any], Any], Callable[[Shape], Shape | None]]] = {
    "[0]": (lambda x: x[0], lambda s: s[1:] if len(s) > 1 else None),
    "[1:3]": (lambda x: x[1:3], lambda s: (2, *s[1:]) if s[0] > 3 else None),
    "[:, 1]": (lambda x: x[:, 1], lambda s: s[:1] if len(s) > 1 else None),
    "[..., 2:]": (lambda x: x[..., 2:], lambda s: (*s[:-1], s[-1] - 2) if s[-1] > 3 else None),
    "t": (lambda x: x.t(), lambda s: s[::-1] if len(s) == 2 else None),
    "[:]": (lambda x: x[:], lambda s: s),
    "unsqueeze": (lambda x: x.unsqueeze(0), lambda s: (1, *s) if len(s) < 3 else None),
    "detach": (lambda x: x.detach(), lambda s: s),
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "x * y": lambda x, y: x * y,
    "x + y": lambda x, y: x + y,
}
WRITES_OF: dict[str, Callable[[Any, Any], Any]] = {
    "mul_(y)": lambda x, y: x.mul_(y),
    "add_(y)": lambda x, y: x.add_(y),
    "copy_(y)": lambda x, y: x.copy_(y),
}


def write_local(x: Any) -> None:
    """By way of the local tensor."""
    with torch.no_grad():
        (x.to_local() if isinstance(x, DTensor) else x).mul_(1.25)


class UndefinedOnOneDeviceError(RuntimeError):
    """``x.mul_(x.t())``: what PyTorch computes depends on the order in which it visits the elements."""


def require_defined(x: Any, y: Any) -> None:
    """Raises where ``y`` has the memory of ``x`` in another order; on one device only, where this can be seen."""
    if (
        isinstance(x, DTensor)
        or isinstance(y, DTensor)
        or x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr()
    ):
        return
    elements = torch.arange(x.untyped_storage().nbytes() // x.element_size())
    one, other = (elements.as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist() for t in (x, y))
    if one != other and {*one} & {*other}:
        raise UndefinedOnOneDeviceError


class Block(nn.Module):
    """See the module's description. ``statements`` can be read, and say all that happens."""

    def __init__(
        self, draw: random.Random, shapes: list[Shape], depth: int, *, writes: bool, clones: bool, by_local: bool
    ) -> None:
        super().__init__()
        self.linear = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, bias=draw.random() < 0.5, dtype=torch.float64)
        self.blocks = nn.ModuleList()
        self.inputs, self.statements = list(shapes), []
        self.shapes = list(shapes)
        self._writes, self.by_local, self.clones = writes, by_local, clones
        if clones:
            for index in range(len(shapes)):
                self._add(("new", "clone", index), shapes[index])
        first = len(shapes) if clones else 0
        for _ in range(draw.randint(1, 5)):
            self._draw(draw, first, depth)
        # A reentrant checkpoint makes inputs that are returned views which must not be written to.
        count = draw.randint(1, min(3, len(self.shapes) - first))
        self.outputs = draw.sample(range(first, len(self.shapes)), count)

    def _add(self, statement: tuple[Any, ...], *shapes: Shape) -> None:
        self.statements.append(statement)
        self.shapes += shapes

    def _draw(self, draw: random.Random, first: int, depth: int) -> None:
        index = draw.randrange(first, len(self.shapes))
        shape = self.shapes[index]
        same = [i for i, s in enumerate(self.shapes) if s == shape and i >= first]
        kinds = ["new", "view", "view", "binary", "linear"]
        kinds += ["write"] * 4 + ["write of"] * 2 + ["local"] * self.by_local if self._writes else []
        kinds += ["call"] * 5 if depth else []
        kind = draw.choice(kinds)
        if kind == "new":
            self._add((kind, draw.choice([*NEW]), index), shape)
        elif kind == "view":
            name = draw.choice([*VIEWS])
            made = VIEWS[name][1](shape)
            if made:
                self._add((kind, name, index), made)
        elif kind == "binary":
            self._add((kind, draw.choice([*BINARY]), index, draw.choice(same)), shape)
        elif kind == "linear" and shape[-1] == WIDTH:
            self._add((kind, index), shape)
        elif kind == "write":
            self._add((kind, draw.choice([*WRITES]), index))
        elif kind == "write of":
            self._add((kind, draw.choice([*WRITES_OF]), index, draw.choice(same)))
        elif kind == "local":
            self._add((kind, index))
        elif kind == "call":
            self._call(draw, first, depth)

    def _call(self, draw: random.Random, first: int, depth: int) -> None:
        indices = [draw.randrange(first, len(self.shapes)) for _ in range(draw.randint(1, 2))]
        how = draw.choice(["positions", "positions", "keyword", "list", "dict"])
        recompute = draw.choice([None, None, None, False, True]) if how == "positions" else None
        callees = [
            i
            for i, block in enumerate(self.blocks)
            if block.inputs == [self.shapes[j] for j in indices] and (recompute is None or block.clones)
        ]
        if callees and draw.random() < 0.5:
            callee = draw.choice(callees)
        else:
            shapes = [self.shapes[i] for i in indices]
            block = Block(draw, shapes, depth - 1, writes=True, clones=recompute is not None, by_local=self.by_local)
            callee = len(self.blocks)
            self.blocks.append(block)
        block = self.blocks[callee]
        self._add(("call", callee, indices, how, recompute), *(block.shapes[i] for i in block.outputs))

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        x = list(tensors_in([args, kwargs]))
        for kind, *rest in self.statements:
            if kind == "call":
                x += self._run(x, *rest)
            elif kind == "linear":
                x.append(self.linear(x[rest[0]]))
            elif kind == "local":
                write_local(x[rest[0]])
            elif kind == "write":
                WRITES[rest[0]](x[rest[1]])
            elif kind == "write of":
                require_defined(x[rest[1]], x[rest[2]])
                WRITES_OF[rest[0]](x[rest[1]], x[rest[2]])
            elif kind == "binary":
                x.append(BINARY[rest[0]](x[rest[1]], x[rest[2]]))
            else:
                x.append(NEW[rest[0]](x[rest[1]]) if kind == "new" else VIEWS[rest[0]][0](x[rest[1]]))
        return tuple(x[index] for index in self.outputs)

    def _run(self, x: list[Any], callee: int, indices: list[int], how: str, recompute: bool | None) -> Any:
        block, given = self.blocks[callee], [x[index] for index in indices]
        if how == "keyword":
            return block(given[0], **{f"y{i}": value for i, value in enumerate(given[1:])})
        if how == "list":
            return block(given)
        if how == "dict":
            return block(values={f"y{i}": value for i, value in enumerate(given)})
        if recompute is not None and torch.is_grad_enabled():
            return checkpoint(block, *given, use_reentrant=recompute)
        return block(*given)

    def text(self, path: str = "") -> Iterator[str]:
        yield f"{path or 'the model'}: inputs {self.inputs}, {self.statements}, outputs {self.outputs}"
        for index, block in enumerate(self.blocks):
            yield from block.text(f"{path}.blocks.{index}".lstrip("."))


def draw_model(draw: random.Random) -> Block:
    shapes: list[Shape] = [(ROWS, WIDTH)] * draw.randint(1, 2)
    # Writes to local tensors count for autograd's saved tensors on one device only.
    by_local = draw.random() < 0.2
    while True:
        model = Block(draw, shapes, 2, writes=draw.random() < 0.3, clones=False, by_local=by_local)
        if len(model.blocks):
            break
    # Ranks that are threads share the default generator, which `parallelize` compares: it draws nothing here.
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.4, 0.4, generator=generator)
    return model


def draw_plan(model: Block, draw: random.Random, mesh: Any) -> tuple[Plan, list[str]]:
    """Boundaries anywhere, and maybe sharded weights; returns the entries, too."""
    size = math.prod(mesh.shape)
    plan, entries = Plan(mesh), []

    def shard(path: str, placement: Any) -> None:
        plan.shard(path, placement)
        entries.append(f"{path}: {placement}")

    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, nn.Linear) and draw.random() < 0.3:
            shard(f"{prefix}weight", Shard(draw.randint(0, 1)))
        if not isinstance(module, Block) or draw.random() < 0.3:
            continue
        for side, shapes in (("in", module.inputs), ("out", [module.shapes[i] for i in module.outputs])):
            if side == "out" and (draw.random() < 0.6 or not name):
                continue
            options: list[Any] = [Replicate()] + [Shard(0)] * 2 * all(shape[0] % size == 0 for shape in shapes)
            options += [Shard(-1)] * all(shape[-1] % size == 0 for shape in shapes)
            shard(f"{prefix}<{side}>", draw.choice(options))
    return plan, entries
