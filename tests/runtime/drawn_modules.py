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
# In the wide space, beside those above.
MORE_NEW: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda x: x.softmax(-1),
    "cumsum": lambda x: x.cumsum(0),
    "roll": lambda x: x.roll(1, -1),
    "where": lambda x: torch.where(x > 0, x, x * 0.5),
    "cat": lambda x: torch.cat([x[..., 1:], x[..., :1]], -1),
    "no_grad": lambda x: _without_gradient(x),
    "scaled": lambda x: _Scaled.apply(x),
    "hook": lambda x: _hooked(x * 1),
}
MORE_WRITES: dict[str, Callable[[Any], Any]] = {
    "zero_": lambda x: x.zero_(),
    "clamp_": lambda x: x.clamp_(min=-0.5),
    "masked_fill_": lambda x: x.masked_fill_(x > 0.5, 0.125),
    "+= 1": lambda x: x.__iadd__(1),
    "no_grad mul_": lambda x: _write_without_gradient(x),
    "_Doubled": lambda x: _Doubled.apply(x),
    "view.neg_": lambda x: x.view(-1).neg_() if x.is_contiguous() else x.neg_(),
    "chunk[1].mul_": lambda x: x.chunk(2, -1)[-1].mul_(2),
    "unbind[0].add_": lambda x: x.unbind(0)[0].add_(0.5),
    "t.copy_": lambda x: x.transpose(0, -1).copy_(x.transpose(0, -1) * 0.5),
}
MORE_VIEWS: dict[str, tuple[Callable[[Any], Any], Callable[[Shape], Shape | None]]] = {
    "chunk[0]": (lambda x: x.chunk(2, -1)[0], lambda s: (*s[:-1], (s[-1] + 1) // 2) if s[-1] > 1 else None),
    "split[1]": (lambda x: x.split(2)[1], lambda s: (2, *s[1:]) if s[0] == 4 else None),
    "unbind[-1]": (lambda x: x.unbind(0)[-1], lambda s: s[1:] if len(s) > 1 else None),
    "expand": (lambda x: x.unsqueeze(0).expand(2, *x.shape), lambda s: (2, *s) if len(s) < 2 else None),
    "flatten": (lambda x: x.flatten(), lambda s: (math.prod(s),) if len(s) == 2 and math.prod(s) <= 24 else None),
    "unflatten": (
        lambda x: x.unflatten(-1, (2, -1)),
        lambda s: (*s[:-1], 2, s[-1] // 2) if s[-1] % 2 == 0 and len(s) < 3 else None,
    ),
    "narrow": (lambda x: x.narrow(-1, 1, 2), lambda s: (*s[:-1], 2) if s[-1] > 2 else None),
    "select": (lambda x: x.select(x.ndim - 1, -1), lambda s: s[:-1] if len(s) > 1 else None),
    "diagonal": (lambda x: x.diagonal(), lambda s: (min(s),) if len(s) == 2 else None),
    "view_as": (lambda x: x.view_as(x), lambda s: s),
    "squeeze": (lambda x: x.squeeze(0), lambda s: s[1:] if len(s) > 1 and s[0] == 1 else None),
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


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return 3 * gradient * ctx.saved_tensors[0]


class _Doubled(torch.autograd.Function):
    """In place."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return 2 * gradient


def _hooked(x: Any) -> Any:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 1.5)
    return x


def _without_gradient(x: Any) -> Any:
    with torch.no_grad():
        return x * 1.5


def _write_without_gradient(x: Any) -> None:
    with torch.no_grad():
        x.mul_(1.5)


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
        self,
        draw: random.Random,
        shapes: list[Shape],
        depth: int,
        *,
        writes: bool,
        clones: bool,
        by_local: bool,
        wide: bool = False,
    ) -> None:
        super().__init__()
        self.wide = wide
        self.linear = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, bias=draw.random() < 0.5, dtype=torch.float64)
        self.blocks = nn.ModuleList()
        self.inputs, self.statements = list(shapes), []
        self.shapes = list(shapes)
        if wide:
            self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.float64))
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
        kinds += ["buffer", "parameter", "weight view"] if self.wide else []
        made_by = {**NEW, **(MORE_NEW if self.wide else {})}
        viewed_by = {**VIEWS, **(MORE_VIEWS if self.wide else {})}
        written_by = {**WRITES, **(MORE_WRITES if self.wide else {})}
        kind = draw.choice(kinds)
        if kind == "new":
            self._add((kind, draw.choice([*made_by]), index), shape)
        elif kind == "view":
            name = draw.choice([*viewed_by])
            made = viewed_by[name][1](shape)
            if made:
                self._add((kind, name, index), made)
        elif kind == "binary":
            self._add((kind, draw.choice([*BINARY]), index, draw.choice(same)), shape)
        elif kind == "linear" and shape[-1] == WIDTH:
            self._add((kind, index), shape)
        elif kind == "write":
            self._add((kind, draw.choice([*written_by]), index))
        elif kind == "write of":
            self._add((kind, draw.choice([*WRITES_OF]), index, draw.choice(same)))
        elif kind in ("buffer", "parameter") and shape[-1] == WIDTH:
            self._add((kind, index), shape)
        elif kind == "weight view":
            self._add((kind, draw.randrange(WIDTH)), (WIDTH,))
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
            block = Block(
                draw,
                shapes,
                depth - 1,
                writes=True,
                clones=recompute is not None,
                by_local=self.by_local,
                wide=self.wide,
            )
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
            elif kind == "buffer":
                with torch.no_grad():
                    self.seen.add_(x[rest[0]].detach().reshape(-1, WIDTH).sum(0))
                x.append(x[rest[0]] * (1 + self.seen))
            elif kind == "parameter":
                x.append(x[rest[0]] + self.linear.weight[0])
            elif kind == "weight view":
                x.append(self.linear.weight[rest[0]] * 1.5)
            elif kind == "write":
                (WRITES.get(rest[0]) or MORE_WRITES[rest[0]])(x[rest[1]])
            elif kind == "write of":
                require_defined(x[rest[1]], x[rest[2]])
                WRITES_OF[rest[0]](x[rest[1]], x[rest[2]])
            elif kind == "binary":
                x.append(BINARY[rest[0]](x[rest[1]], x[rest[2]]))
            else:
                made = NEW.get(rest[0]) or MORE_NEW.get(rest[0]) if kind == "new" else None
                x.append((made or (VIEWS.get(rest[0]) or MORE_VIEWS[rest[0]])[0])(x[rest[1]]))
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


def draw_model(draw: random.Random, wide: bool = False) -> Block:
    """``wide``: of more ops, views, writes and uses of parameters and buffers; other models for each seed."""
    shapes: list[Shape] = [(ROWS, WIDTH)] * draw.randint(1, 2)
    # Writes to local tensors count for autograd's saved tensors on one device only.
    by_local = draw.random() < 0.2
    while True:
        model = Block(draw, shapes, 2, writes=draw.random() < 0.3, clones=False, by_local=by_local, wide=wide)
        if len(model.blocks):
            break
    if wide:
        _share(model, draw)
    # Ranks that are threads share the default generator, which `parallelize` compares: it draws nothing here.
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.4, 0.4, generator=generator)
    return model


def _share(model: Block, draw: random.Random) -> None:
    """Some weights are tied, and some modules have hooks."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if draw.random() < 0.3:
        first, other = draw.choice(blocks), draw.choice(blocks)
        other.linear.weight = first.linear.weight
    if draw.random() < 0.2:
        draw.choice(blocks).register_forward_hook(lambda module, args, output: tuple(x * 1.25 for x in output))
    if draw.random() < 0.2:
        draw.choice(blocks).linear.register_full_backward_hook(lambda module, given, gone: None)


def draw_plan(model: Block, draw: random.Random, mesh: Any) -> tuple[Plan, list[str]]:
    """Boundaries anywhere, and maybe sharded weights; returns the entries, too."""
    size = math.prod(mesh.shape)
    plan, entries = Plan(mesh), []
    cut: set[torch.Tensor] = set()  # tied weights once

    def fits(length: int) -> bool:
        return model.wide or length % size == 0

    def shard(path: str, options: list[Any], twice: bool = True) -> None:
        """On a mesh of several axes, each axis draws whether it has an entry, and which; ``twice``: two may cut one dim."""
        placements = {mesh.mesh_dim_names[0]: draw.choice(options)}
        for axis in mesh.mesh_dim_names[1:]:
            placement = draw.choice(options)
            if draw.random() < 0.7 and (twice or placement not in placements.values()):
                placements[axis] = placement
        plan.shard(path, placements)
        entries.append(f"{path}: {placements}")

    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, nn.Linear) and draw.random() < 0.3 and module.weight not in cut:
            shard(f"{prefix}weight", [Shard(0), Shard(1)], twice=False)
            cut.add(module.weight)
        if not isinstance(module, Block) or draw.random() < 0.3:
            continue
        for side, shapes in (("in", module.inputs), ("out", [module.shapes[i] for i in module.outputs])):
            if side == "out" and (draw.random() < 0.6 or not name):
                continue
            options: list[Any] = [Replicate()] + [Shard(0)] * 2 * all(fits(shape[0]) for shape in shapes)
            options += [Shard(-1)] * all(fits(shape[-1]) for shape in shapes)
            shard(f"{prefix}<{side}>", options)
    return plan, entries
