"""``OpCall``: one call of an op as placement rules see it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import (
    DTensorSpec,
    native_sharding,
    output_meta,
    schema_arguments,
    spec_of_result,
    without_modes,
)

Placements = tuple[Placement, ...]


@dataclass(frozen=True, eq=False)
class OpCall:
    """An op with specs in place of its tensors. Equal calls (op, specs, every other argument) get equal decisions.

    Attributes:
        op: the operator overload.
        args, kwargs: its arguments; tensors are specs, tensor lists lists of specs.
        schema_info: what PyTorch registered about the op's arguments, or None.
        operands: the specs among the arguments, in order; lists are flattened.
        positions: for each operand ``(argument, index in its list or None)``; keyword arguments by name.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    schema_info: Any = None
    operands: tuple[DTensorSpec, ...] = field(init=False)
    positions: tuple[tuple[int | str, int | None], ...] = field(init=False)

    def __post_init__(self) -> None:
        found = list(_locate(self.args, self.kwargs))
        object.__setattr__(self, "operands", tuple(spec for spec, _ in found))
        object.__setattr__(self, "positions", tuple(position for _, position in found))

    @property
    def name(self) -> str:
        """The op's name without namespace and overload: ``add_``, ``_foreach_norm``."""
        return str(self.op.overloadpacket.__name__)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the first operand."""
        return self.operands[0].mesh

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """Identifies the call. Numbers are compared with their type (``1``, ``1.0`` and ``True`` promote differently),
        meshes by identity: decisions hold them, and an equal mesh may belong to destroyed process groups."""
        meshes = frozenset(id(spec.mesh) for spec in self.operands)
        return self.op, meshes, _typed(self.args), tuple((k, _typed(v)) for k, v in sorted(self.kwargs.items()))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpCall) and self.key == other.key

    @functools.cached_property
    def mutated(self) -> tuple[int, ...]:
        """The operands that the op writes to."""
        arguments = schema_arguments(self.op)
        written = dict(arguments) | {index: is_written for index, (_, is_written) in enumerate(arguments)}
        return tuple(index for index, (argument, _) in enumerate(self.positions) if written[argument])

    @functools.cached_property
    def meta(self) -> Any:
        """Global shape, stride and dtype of each result: one ``TensorMeta``, a sequence of them, or None."""
        return output_meta(self.op, self.args, self.kwargs, self.schema_info)

    def argument_name(self, argument: int | str) -> str:
        """The name of ``argument``, an index into ``args`` or a name, in the schema of the op."""
        return argument if isinstance(argument, str) else schema_arguments(self.op)[argument][0]

    def mesh_of_result(self, index: int) -> DeviceMesh:
        """For ops on lists, the mesh of the operands at ``index``: the tensors of a list need not share one."""
        for spec, (_, position) in zip(self.operands, self.positions):
            if position == index:
                return spec.mesh
        return self.mesh

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by its ``name`` in the op's schema; ``default`` if the call leaves it out."""
        if name in self.kwargs:
            return self.kwargs[name]
        for (argument, _), value in zip(schema_arguments(self.op), self.args):
            if argument == name:
                return value
        return default

    def try_out(self) -> None:
        """Raise what one device raises for these dtypes and arguments, on every rank.

        Local functions skip the kernel where a rank holds nothing, so an error of the kernel would be raised on some ranks
        only, and the others would wait for them. Runs the op on tensors of at most two elements in each dim.
        """
        with without_modes():  # for real, also while the program is traced
            tiny = [
                torch.zeros(
                    [min(size, 2) for size in spec.shape],
                    dtype=spec.tensor_meta.dtype if spec.tensor_meta is not None else None,
                    device=spec.mesh.device_type,
                )
                for spec in self.operands
            ]
            args, kwargs = substitute(self.args, self.kwargs, tiny, DTensorSpec)
            self.op(*args, **kwargs)

    def describe(self, index: int) -> str:
        """An operand in an error message."""
        argument, position = self.positions[index]
        name, spec = self.argument_name(argument), self.operands[index]
        where = name if position is None else f"{name}[{position}]"
        return f"operand {where} of shape {tuple(spec.shape)} placed as {placements_text(spec.placements)}"

    def native(self, placements: Sequence[Placements]) -> Any:
        """PyTorch's sharding decision if the operands had these stock ``placements``; None when it has no strategy."""
        specs = [with_placements(spec, wanted) for spec, wanted in zip(self.operands, placements, strict=True)]
        args, kwargs = substitute(self.args, self.kwargs, specs, DTensorSpec)
        return native_sharding(self.op, args, kwargs, self.schema_info)


def names(text: str) -> frozenset[str]:
    """A set of op names, separated by spaces."""
    return frozenset(text.split())


def placements_text(placements: Sequence[Placement]) -> str:
    return "(" + ", ".join(map(repr, placements)) + ")"


def with_placements(spec: DTensorSpec, placements: Placements) -> DTensorSpec:
    return spec_of_result(spec.mesh, placements, spec.tensor_meta, (spec,))


def _locate(args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[DTensorSpec, tuple[int | str, int | None]]]:
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for name, arg in named:
        if isinstance(arg, DTensorSpec):
            yield arg, (name, None)
        elif isinstance(arg, list | tuple):
            for index, item in enumerate(arg):
                if isinstance(item, DTensorSpec):
                    yield item, (name, index)


def substitute(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], values: Sequence[Any], kind: type
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every instance of ``kind`` replaced by the next value, in the order of ``OpCall.operands``."""
    following = iter(values)

    def replace(arg: Any) -> Any:
        if isinstance(arg, kind):
            return next(following)
        if isinstance(arg, list | tuple) and any(isinstance(item, kind) for item in arg):
            return type(arg)([next(following) if isinstance(item, kind) else item for item in arg])
        return arg

    return tuple(replace(arg) for arg in args), {name: replace(arg) for name, arg in kwargs.items()}


def _typed(value: Any) -> Any:
    if isinstance(value, list | tuple) and not isinstance(value, DTensorSpec):
        return tuple(_typed(item) for item in value)
    return (type(value), value) if isinstance(value, bool | int | float | complex) else value


@dataclass(frozen=True)
class Decision:
    """How an op runs: each operand is moved to ``inputs``, something runs on the local tensors, results get ``outputs``.

    Attributes:
        inputs: the placements of each operand while the op runs; an operand that the op writes to must keep its own.
        outputs: the placements of each result, one entry for an op with one; None: results are passed on as they are
            (numbers, nothing).
        local: runs in place of the op, with its arguments and local tensors for operands; None: the op itself.
        local_sizes: for an op whose arguments are a tensor and sizes: the sizes with which the op itself gives, on the local
            tensor, what ``local`` does. Such a decision is cached by DTensor's dispatcher.
        prepare: ``(operand index, function)``: applied to an operand's local tensor after it was moved.
        redispatch: run the op on DTensors with ``inputs`` placements, all stock, instead of local tensors.
        scratch: operands that the op writes to for its own use only, so that a moved copy will do.
        write_back: operands that the op writes to and that have other placements: moved, written to, and moved back.
        fallback: the placements were given up because there is no rule: reported, and refused in strict mode.
    """

    inputs: tuple[Placements, ...]
    outputs: tuple[Placements | None, ...] | None = None
    local: Callable[..., Any] | None = None
    local_sizes: tuple[int, ...] | None = None
    prepare: tuple[tuple[int, Callable[[Any], Any]], ...] = ()
    redispatch: bool = False
    scratch: tuple[int, ...] = ()
    write_back: tuple[int, ...] = ()
    fallback: bool = False


# A pure function of the call; None: the call is left to the next rule.
Rule = Callable[[OpCall], Decision | None]
