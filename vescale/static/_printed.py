"""``program``: what a model in static mode runs, as a value to read, and as text."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale._version import __version__
from vescale.errors import StaticRecordError
from vescale.plans import MeshAxes
from vescale.runtime import one_placement_text
from vescale.static._analysis import Eager, ReadSizes, TakeSizes, name_of
from vescale.static._forward import static_forward
from vescale.static._program import SiteOfTape, TapeProgram
from vescale.static._step_records import Boundary
from vescale.static._tensor_type import TensorType, types_of

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class RecordedType:
    """What a local tensor is the part of.

    Attributes:
        placements: of the tensor, for each axis of the mesh; None for a plain tensor, which is the same on every rank.
        grad: of its gradient; None: it has none, or they are unknown.
        factors: global size by local size, for each dim; 0 for a dim that the ranks do not share evenly.
    """

    placements: Placements | None
    grad: Placements | None
    factors: tuple[int, ...]

    def kinds(self, axes: MeshAxes) -> dict[str, str]:
        """``replicated``, ``invariant``, ``varying``, ``partial`` or ``sharded``, by axis of the mesh.

        A tensor that is the same on every rank is invariant if its gradient is the same, too, and replicated if the ranks
        have parts of a sum, or if it is unknown. ``axes`` are the mesh's.
        """
        if self.placements is None:
            return dict.fromkeys(axes.names, "invariant")
        grads = self.grad or (None,) * len(self.placements)
        return {name: _kind(p, g) for name, p, g in zip(axes.names, self.placements, grads, strict=True)}


@dataclass(frozen=True)
class RecordedSite:
    """A call that does not run its function on the local tensors as it is, or an entry of the plan.

    Attributes:
        path: of the module.
        file, line: of the model's code; "" and 0 for an entry of the plan.
        function: name of the torch function, or the entry.
        action: ``redistribute``: it runs on DTensors, or is the entry's conversion; ``read_sizes``: it returns global sizes;
            ``take_sizes``: it is given global sizes of its result.
        inputs, outputs: types of its tensors, for ``redistribute``.
        factors: global by local sizes, for the others.
        reason: why it does not run on the local tensors.
        communication: collectives that the recorded call started in forward, as ``all_reduce over tp``.
    """

    path: str
    file: str
    line: int
    function: str
    action: str
    inputs: tuple[RecordedType, ...] = ()
    outputs: tuple[RecordedType, ...] = ()
    factors: tuple[int, ...] = ()
    reason: str = ""
    communication: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecordedStep:
    """One kind of step.

    Attributes:
        call: the text of what distinguishes kinds of calls: gradient mode, autocast, structure and dtypes of the inputs.
        draws: whether it draws random numbers.
        inputs, outputs: types of the model's tensors; ``hidden``: of those inside objects in its output.
        grads: placements of gradients, by name of the parameter.
        sites: in the order of the step.
        eager: why modules run in eager mode, by path.
    """

    call: str
    draws: bool
    inputs: tuple[RecordedType, ...]
    outputs: tuple[RecordedType, ...]
    hidden: tuple[RecordedType, ...]
    grads: tuple[tuple[str, Placements], ...]
    sites: tuple[RecordedSite, ...]
    eager: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class RecordedProgram:
    """What a model in static mode runs.

    Attributes:
        axes: names and sizes of the mesh's axes.
        device: type of its devices.
        plan: digest of the lowered plan.
        versions: of vescale, torch and Python.
        steps: one for each tape.
    """

    axes: MeshAxes
    device: str
    plan: str
    versions: tuple[tuple[str, str], ...]
    steps: tuple[RecordedStep, ...]

    @property
    def sites(self) -> tuple[RecordedSite, ...]:
        """Those of all steps, each once."""
        return tuple(dict.fromkeys(site for step in self.steps for site in step.sites))

    def to_yaml(self, file: str | os.PathLike[str] | None = None) -> str:
        """The program as YAML text, for readers, and written to ``file``, if there is one. Raises OSError of the file."""
        data = {
            "made_by": dict(self.versions),
            "mesh": dict(zip(self.axes.names, self.axes.sizes, strict=True)),
            "device": self.device,
            "plan": self.plan,
            "steps": [self._step(step) for step in self.steps],
        }
        text: str = yaml.safe_dump(data, sort_keys=False, width=120, allow_unicode=True)
        if file is not None:
            with open(file, "w", encoding="utf-8") as opened:
                opened.write(text)
        return text

    def _step(self, step: RecordedStep) -> dict[str, Any]:
        return {
            "call": step.call,
            "draws": step.draws,
            "inputs": self._types(step.inputs),
            "outputs": self._types(step.outputs),
            "hidden": self._types(step.hidden),
            "grads": {name: self._text(placements) for name, placements in step.grads},
            "eager": dict(step.eager),
            "sites": [self._site(site) for site in step.sites],
        }

    def _site(self, site: RecordedSite) -> dict[str, Any]:
        written: dict[str, Any] = {"module": site.path, "function": site.function, "action": site.action}
        if site.file:
            written["place"] = f"{site.file}:{site.line}"
        if site.action == "redistribute":
            written |= {"inputs": self._types(site.inputs), "outputs": self._types(site.outputs)}
        else:
            written["factors"] = list(site.factors)
        if site.reason:
            written["reason"] = site.reason
        if site.communication:
            written["communication"] = list(site.communication)
        return written

    def _types(self, kinds: Iterable[RecordedType]) -> list[str]:
        return [
            "plain" if k.placements is None else self._text(k.placements) + f", gradient {self._text(k.grad or ())}"
            for k in kinds
        ]

    def _text(self, placements: Placements) -> str:
        texts = [f"{a}: {one_placement_text(p)}" for a, p in zip(self.axes.names, placements, strict=False)]
        return ", ".join(texts) or "none"


def program(model: nn.Module) -> RecordedProgram:
    """What a model in static mode runs: types, calls that are no plain calls of the local tensors, communication. No
    communication.

    A step must have been recorded, with its backward. The value holds for all ranks, except where ranks share sizes
    unevenly: then it is this rank's.

    Raises KeyError for a model that is not in static mode, and StaticRecordError where no step has been recorded.

    Args:
        model: what :func:`~vescale.parallelize` returned.
    """
    forward = static_forward(model)
    forward.finish()
    steps = tuple(_step(key, found) for key, found in forward.programs())
    if not steps:
        raise StaticRecordError("no step of the model has been recorded; run one, with its backward")
    runtime = forward.runtime
    versions = ("vescale", __version__), ("torch", str(torch.__version__)), ("python", platform.python_version())
    return RecordedProgram(
        MeshAxes.of(runtime.mesh), runtime.mesh.device_type, runtime.program.digest(), versions, steps
    )


def _step(call: str, found: TapeProgram) -> RecordedStep:
    return RecordedStep(
        call,
        found.draws,
        _types(found.inputs),
        _types(found.outputs),
        _types(found.hidden),
        tuple(sorted(found.grads.items())),
        tuple(_site(site, found) for site in found.sites),
        tuple(found.eager_modules.items()),
    )


def _site(site: SiteOfTape, found: TapeProgram) -> RecordedSite:
    where = site.module, *site.place
    match site.what:
        case Boundary() as boundary:
            mesh, name = found.runtime.mesh, " ".join(filter(None, boundary.placing.name))
            types = _types(types_of([boundary.input], mesh)), _types(types_of([boundary.output], mesh))
            return RecordedSite(*where, name, "redistribute", *types, communication=tuple(boundary.communication))
        case Eager() as eager:
            types = _types(eager.inputs), _types(eager.outputs)
            return RecordedSite(
                *where, name_of(eager.function), "redistribute", *types, (), eager.reason, eager.communication
            )
        case ReadSizes() as reader:
            return RecordedSite(*where, name_of(reader.function), "read_sizes", factors=reader.factors)
        case TakeSizes() as taker:
            return RecordedSite(*where, name_of(taker.function), "take_sizes", factors=taker.factors)
    raise AssertionError(site.what)


def _types(kinds: Sequence[TensorType]) -> tuple[RecordedType, ...]:
    return tuple(RecordedType(kind.placements, kind.grad, kind.factors) for kind in kinds)


def _kind(placement: Placement, grad: Placement | None) -> str:
    if isinstance(placement, Partial):
        return "partial"
    if isinstance(placement, Shard):
        return "sharded"
    if isinstance(placement, Replicate):
        return "invariant" if isinstance(grad, Replicate) else "replicated"
    return "sharded" if getattr(placement, "is_shard", lambda: False)() else "varying"


# ``report``: what of a model runs static, and why the rest does not.


_PLACED = re.compile(r"(\S.*?\.\w+|<[^>]*>):(\d+):? (.*)", re.DOTALL)


@dataclass(frozen=True)
class Fallback:
    """A module that ran in eager mode.

    Attributes:
        path: of the module; "" for the model.
        file, line: of the model's code; "" and 0 where no single line is the reason.
        reason: why.
        steps: how many forwards of the model ran so.
    """

    path: str
    file: str
    line: int
    reason: str
    steps: int

    def __str__(self) -> str:
        place = f" ({self.file}:{self.line})" if self.file else ""
        return f"{self.path or 'the model'}{place}: {self.reason}; {self.steps} steps"


@dataclass(frozen=True)
class EagerFunction:
    """A torch function of a static module that runs on DTensors."""

    path: str
    function: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path or 'the model'}, {self.function}: {self.reason}"


@dataclass(frozen=True)
class StaticReport:
    """What ran so far, of all recorded kinds of steps.

    Attributes:
        static: paths of the modules whose forward runs on local tensors.
        fallbacks: modules in eager mode, the model itself among them.
        eager_functions: torch functions of static modules that run on DTensors.
        recordings: how many steps were recorded.
        static_steps: how many forwards of the model ran in static mode.
    """

    static: tuple[str, ...]
    fallbacks: tuple[Fallback, ...]
    eager_functions: tuple[EagerFunction, ...]
    recordings: int
    static_steps: int

    def __str__(self) -> str:
        lines = [f"{self.static_steps} static steps, {self.recordings} recordings, {len(self.static)} static modules"]
        lines += [f"  eager: {fallback}" for fallback in self.fallbacks]
        lines += [f"  on DTensors: {function}" for function in self.eager_functions]
        return "\n".join(lines)


def report(model: nn.Module) -> StaticReport:
    """What of a model in static mode runs on local tensors, and why the rest does not. No communication.

    Raises KeyError for a model that is not in static mode.

    Args:
        model: what :func:`~vescale.parallelize` returned.
    """
    forward = static_forward(model)
    fallbacks = [Fallback("", *_split(reason), steps) for reason, steps in forward.fallbacks.items()]
    static: dict[str, None] = {}
    functions: dict[EagerFunction, None] = {}
    for _, program in forward.programs():
        if not program.is_static:
            continue
        static.update(dict.fromkeys(program.static_modules()))
        functions.update({EagerFunction(*call): None for call in program.eager_calls()})
        fallbacks += [Fallback(path, *_split(reason), program.steps) for path, reason in program.eager_modules.items()]
    return StaticReport(tuple(static), tuple(fallbacks), tuple(functions), forward.recordings, forward.static_steps)


def _split(reason: str) -> tuple[str, int, str]:
    """File, line and reason of ``"file:line: reason"`` and ``"file:line reason"``."""
    found = _PLACED.fullmatch(reason)
    return (found[1], int(found[2]), found[3]) if found is not None else ("", 0, reason)
