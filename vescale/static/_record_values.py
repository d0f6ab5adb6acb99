"""A recorded step as frozen values, without modules, meshes and code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.errors import StaticRecordError
from vescale.plans import MeshAxes
from vescale.static._function_names import function_named

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class RecordedType:
    """What a local tensor is the part of.

    Attributes:
        placements: of the tensor, for each axis of the mesh; None for a plain tensor, which is the same on every rank.
        grad: of its gradient; None: it has none, or nobody knows.
        factors: global size by local size, for each dim; 0 for a dim that the ranks do not share evenly.
        sizes: global sizes as recorded, which count where the factor is 0; empty where there is none.
    """

    placements: Placements | None
    grad: Placements | None
    factors: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for placements in (self.placements, self.grad):
            expect(placements is None or all(isinstance(p, Placement) for p in placements), "placements", placements)
        expect(all(type(f) is int and f >= 0 for f in self.factors), "factors of at least 0", self.factors)
        expect(len(self.sizes) == (0 if all(self.factors) else len(self.factors)), "one size for each dim", self.sizes)

    @property
    def is_even(self) -> bool:
        """Whether all ranks have parts of the same size."""
        return all(self.factors)

    def kinds(self, axes: MeshAxes) -> dict[str, str]:
        """``replicated``, ``invariant``, ``varying``, ``partial`` or ``sharded``, by axis of the mesh.

        A tensor that is the same on every rank is invariant if its gradient is the same, too, and replicated if the ranks
        have parts of a sum, or if nobody knows. ``axes`` are the mesh's.
        """
        if self.placements is None:
            return dict.fromkeys(axes.names, "invariant")
        grads = self.grad or (None,) * len(self.placements)
        return {name: _kind(p, g) for name, p, g in zip(axes.names, self.placements, grads, strict=True)}


@dataclass(frozen=True)
class RecordedFunction:
    """A Python function that the recorded step ran.

    Attributes:
        name: its qualified name.
        file, line: where it is defined; for readers.
        code: digest of the text of its file, its place there and its instructions.
        found: digest of the functions, classes and constants that it finds in its globals.
    """

    name: str
    file: str
    line: int
    code: str
    found: str

    def __post_init__(self) -> None:
        expect(all(type(t) is str for t in (self.name, self.file, self.code, self.found)), "texts", self)
        expect(type(self.line) is int and self.line >= 0, "a line", self.line)


@dataclass(frozen=True)
class RecordedSite:
    """A place in a function where something else runs than the function on the local tensors.

    Attributes:
        node: number of the expression in the function's syntax tree.
        line, column: of the expression, from 1.
        action: ``redistribute``: the function runs on DTensors; ``check``: on the local tensors, unless it is given
            arguments for which it must not; ``read_sizes``: it returns global sizes; ``take_sizes``: it is given global
            sizes of its result.
        function: name of the torch function.
        inputs, outputs: types of its tensors, for ``redistribute`` and ``check``.
        factors: global by local sizes, for the others.
        reason: why it does not run on the local tensors.
        communication: collectives that the recorded call started in forward, as ``all_reduce over tp``.
    """

    node: int
    line: int
    column: int
    action: str
    function: str
    inputs: tuple[RecordedType, ...] = ()
    outputs: tuple[RecordedType, ...] = ()
    factors: tuple[int, ...] = ()
    reason: str = ""
    communication: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        expect(all(type(n) is int and n >= 0 for n in (self.node, self.line, self.column)), "numbers", self.node)
        expect(self.action in ("redistribute", "check", "read_sizes", "take_sizes"), "a known action", self.action)
        expect(all(type(f) is int and f > 0 for f in self.factors), "factors of at least 1", self.factors)
        expect(self.action in ("redistribute", "check") or bool(self.factors), "factors", self.factors)
        function_named(self.function)


@dataclass(frozen=True)
class RecordedPatch:
    """What is changed in a function.

    Attributes:
        calls: the functions that are called at a node, each with its patch; None: it runs as it is.
        refused, refused_else, refused_false, refused_true: nodes of branches that were not taken.
        marked: nodes of which the forward tells when they begin to run.
    """

    function: RecordedFunction
    sites: tuple[RecordedSite, ...] = ()
    calls: tuple[tuple[int, tuple[tuple[RecordedFunction, RecordedPatch | None], ...]], ...] = ()
    refused: tuple[int, ...] = ()
    refused_else: tuple[int, ...] = ()
    refused_false: tuple[int, ...] = ()
    refused_true: tuple[int, ...] = ()
    marked: tuple[int, ...] = ()

    def all_sites(self) -> Iterator[tuple[RecordedFunction, RecordedSite]]:
        """Those of the function, and of those that it calls."""
        for site in self.sites:
            yield self.function, site
        for _, called in self.calls:
            for _, patch in called:
                if patch is not None:
                    yield from patch.all_sites()


@dataclass(frozen=True)
class RecordedBoundary:
    """An entry of the plan at the boundary of a module.

    Attributes:
        entry: the text of the lowered instruction, without the module's path.
        tensors: types before and after, for each tensor that it places.
        communication: collectives that it started in forward, as ``all_gather_v over tp``.
    """

    entry: str
    tensors: tuple[tuple[RecordedType, RecordedType], ...]
    communication: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecordedModule:
    """A module of the model.

    Attributes:
        path: its name in the model; "" for the model.
        state: digest of its class, attributes and parameters; the step fits no other.
        ran: whether its forward ran.
        eager: why it runs in eager mode; "" if it does not.
        patch: of its forward; None where nothing changes.
        inputs, outputs: types of its tensors, if it runs in eager mode.
        boundaries: what entries of the plan do.
    """

    path: str
    state: str
    ran: bool = True
    eager: str = ""
    patch: RecordedPatch | None = None
    inputs: tuple[RecordedType, ...] | None = None
    outputs: tuple[RecordedType, ...] | None = None
    boundaries: tuple[RecordedBoundary, ...] = ()


@dataclass(frozen=True)
class RecordedStep:
    """One kind of step: its modules run so in calls with these settings and this structure of the inputs.

    Attributes:
        call: the text of what distinguishes kinds of calls: gradient mode, autocast, structure and dtypes of the inputs.
        draws: whether it draws random numbers.
        recomputes: whether parts of it run again in backward (activation checkpointing).
        inputs, outputs: types of the model's tensors; ``hidden``: of those inside of objects in its output.
        grads: placements of gradients, by name of the parameter.
        functions: all that ran.
        modules: all of the model.
        coordinate: on the mesh, of the rank that recorded it, where the ranks share a size unevenly; None: it holds for all
            ranks.
        path: what marked nodes told, in order.
    """

    call: str
    draws: bool
    recomputes: bool
    inputs: tuple[RecordedType, ...]
    outputs: tuple[RecordedType, ...]
    hidden: tuple[RecordedType, ...]
    grads: tuple[tuple[str, Placements], ...]
    functions: tuple[RecordedFunction, ...]
    modules: tuple[RecordedModule, ...]
    coordinate: tuple[int, ...] | None = None
    path: tuple[int, ...] = ()

    def types(self) -> Iterator[RecordedType]:
        """All types in it."""
        yield from (*self.inputs, *self.outputs, *self.hidden)
        for module in self.modules:
            yield from (*(module.inputs or ()), *(module.outputs or ()))
            yield from (kind for one in module.boundaries for pair in one.tensors for kind in pair)
            for _, site in module.patch.all_sites() if module.patch is not None else ():
                yield from (*site.inputs, *site.outputs)


@dataclass(frozen=True)
class Site:
    """A place in the model's code where a static step does not run the function on the local tensors.

    Attributes:
        path: of the module.
        file, line, column: of the expression; columns from 1.
        site: what happens there.
    """

    path: str
    file: str
    line: int
    column: int
    site: RecordedSite


def _kind(placement: Placement, grad: Placement | None) -> str:
    if isinstance(placement, Partial):
        return "partial"
    if isinstance(placement, Shard):
        return "sharded"
    if isinstance(placement, Replicate):
        return "invariant" if isinstance(grad, Replicate) else "replicated"
    return "sharded" if getattr(placement, "is_shard", lambda: False)() else "varying"


def expect(holds: bool, what: str, found: Any) -> None:
    """Raises StaticRecordError unless ``holds``."""
    if not holds:
        raise StaticRecordError(f"a record has {found!r} where {what} were expected; record the model again")
