"""Matches the entries of a plan with the tensors and modules of one model."""

from __future__ import annotations

import difflib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import regex
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import WRAPPER_MODULES
from vescale.errors import SlowPathError
from vescale.ir._findings import Findings, merge_repeats, name_list
from vescale.ir._model_index import ModelIndex, StateTensor
from vescale.ir._program import Stage
from vescale.placements import from_front, shard_dim
from vescale.plans import (
    ALL,
    BWD,
    FWD,
    INIT,
    RUN,
    AnnotateEntry,
    AttentionEntry,
    AttentionMethod,
    AxisPlacements,
    CheckpointEntry,
    Entry,
    FactoryEntry,
    LocalEntry,
    MeshAxes,
    Path,
    Plan,
    PrecisionEntry,
    RedistributeEntry,
    ShardEntry,
    Source,
    Target,
    UnitEntry,
    placement_text,
)

AnyEntry = TypeVar("AnyEntry", LocalEntry, PrecisionEntry, UnitEntry, CheckpointEntry)

# Matches paths with the tensors and modules of a model within a time budget, and explains paths without a match.

# A match of an honest expression takes a few microseconds; a hostile one grows without bound with the length of a name.
# The budget is CPU time of this thread for a whole plan: a floor, and a hundred times the honest cost. Other threads, and
# other processes of a busy machine, must not spend it.
_FLOOR_SECONDS = 0.5
_SECONDS_PER_MATCH = 300e-6
# Advice is dear: it looks for names that are nearly right. A plan for another model has no use for it on every line.
_MAX_ADVICE = 30


class Matcher:
    """Matches paths against one model; equal expressions are matched once."""

    def __init__(self, index: ModelIndex, findings: Findings) -> None:
        self._index = index
        self._findings = findings
        self._found: dict[tuple[str, bool], tuple[str, ...]] = {}
        self._seconds_left = _FLOOR_SECONDS
        self._advice_left = _MAX_ADVICE

    def states(self, path: Path, what: str, source: Source | None) -> tuple[str, ...]:
        """First names of the parameters and buffers (parameters only for ``.grad``) that match; a finding when none."""
        matched = self._fullmatch(path, source, of_modules=False)
        found = self._first_names(matched, self._index.state_names, self._index.state_aliases)
        if not found:
            self._findings.error("no-match", f"{what} '{path}' {self._no_state(path)}", source)
        return found

    def modules(self, path: Path, what: str, source: Source | None) -> tuple[str, ...]:
        """First names of the modules that match; a finding when none."""
        matched = self._fullmatch(path, source, of_modules=True) if path.pattern else ("",)
        found = self._first_names(matched, self._index.module_names, self._index.module_aliases)
        if not found:
            self._findings.error("no-match", f"{what} '{path}' {self._no_module(path)}", source)
        return found

    @staticmethod
    def _first_names(
        matched: Iterable[str], names: Mapping[str, str], aliases: Mapping[str, tuple[str, ...]]
    ) -> tuple[str, ...]:
        return tuple(dict.fromkeys(n for name in matched for n in ((names[name],) if name in names else aliases[name])))

    def _fullmatch(self, path: Path, source: Source | None, *, of_modules: bool) -> tuple[str, ...]:
        key = (path.pattern, of_modules)
        if key not in self._found:
            index = self._index
            names = (
                (*index.module_names, *index.module_aliases)
                if of_modules
                else (*index.state_names, *index.state_aliases)
            )
            allowance = len(names) * _SECONDS_PER_MATCH
            start = time.thread_time()
            found: list[str] = []
            for name in names:
                seconds_left = self._seconds_left + allowance - (time.thread_time() - start)
                if seconds_left <= 0 or not self._finished(path, name, seconds_left, found):
                    raise SlowPathError(
                        f"the path '{path}' takes too long to match (more than {self._seconds_left + allowance:.1f} s "
                        f"for {len(names)} names); write it without nested repetitions such as (a+)+ or (.*)*",
                        source,
                    )
            self._found[key] = tuple(found)
            self._seconds_left -= max(0.0, time.thread_time() - start - allowance)
        return self._found[key]

    @staticmethod
    def _finished(path: Path, name: str, seconds: float, found: list[str]) -> bool:
        """Add ``name`` to ``found`` if it matches; False when that takes too long."""
        left = seconds
        while left > 0:
            start = time.thread_time()
            try:
                if path.matches(name, timeout=left):
                    found.append(name)
                return True
            except TimeoutError:  # of a clock on the wall, during which this thread may hardly have run
                left -= max(time.thread_time() - start, seconds / 100)
        return False

    def _may_advise(self) -> bool:
        self._advice_left -= 1
        return self._advice_left >= 0

    def _no_state(self, path: Path) -> str:
        model = type(self._index.model).__name__
        text = f"matches no parameter or buffer of {model}"
        if not self._may_advise():
            return text
        modules = [name for name in self._index.module_names if name and self._matches(path, name)]
        if modules:
            own = sorted({n.rpartition(".")[2] for n in self._index.state_names if n.rpartition(".")[0] in modules})
            advice = f"add .{own[0]}" if own else "name a parameter of it, or write .<in> or .<out>"
            return f"{text}; it does match the module {name_list(modules)}: {advice}"
        return f"{text}{_closest(path.pattern, self._index.state_names)}"

    def _no_module(self, path: Path) -> str:
        text = f"matches no module of {type(self._index.model).__name__}"
        if not self._may_advise():
            return text
        states = [name for name in self._index.state_names if self._matches(path, name)]
        if states:
            modules = dict.fromkeys(name.rpartition(".")[0] for name in states)
            return f"{text}, but the tensor {name_list(states)}; name the module: {name_list(modules)}"
        return f"{text}{_closest(path.pattern, self._index.module_names)}"

    def _matches(self, path: Path, name: str) -> bool:
        try:
            return path.matches(name, timeout=0.01)
        except TimeoutError:
            return False


def _closest(pattern: str, names: Iterable[str]) -> str:
    """``; closest: ...`` with up to three names like the expression's plainest reading, repeated layers merged."""
    merged = [name for name, _, _ in merge_repeats((name, None) for name in names) if name]
    plain = _plain(pattern)
    inner = {".".join(part for part in name.split(".") if part not in WRAPPER_MODULES): name for name in merged}
    close = [inner[name] for name in difflib.get_close_matches(plain, inner, n=3, cutoff=0.6)]
    if not close:
        ends = {name: _common_end(name, plain) for name in merged}
        longest = max(ends.values(), default=0)
        close = [name for name in merged if ends[name] == longest > 0][:3]
    return f"; closest: {', '.join(close)}" if close else ""


def _common_end(name: str, other: str) -> int:
    """How many parts two dotted names have in common at their ends."""
    pairs = zip(reversed(name.split(".")), reversed(other.split(".")))
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _plain(pattern: str) -> str:
    """A plain name that the expression was probably written for: first alternatives, ``0`` for numbers."""
    text = regex.sub(r"\\d[+*]?|\[0-9\][+*]?", "0", pattern)
    text = regex.sub(r"\((?:\?:|\?P<\w+>)?([^()|]*)(?:\|[^()]*)?\)[?*+]?", r"\1", text)
    return text.replace("\\", "")


# The placements that a plan gives each tensor, axis by axis, each with its entry; entries that disagree become
# findings.


@dataclass(frozen=True)
class PlannedPlacement:
    """A placement on one axis and the entry that asks for it."""

    placement: Placement
    entry: Entry


class PlannedAxes:
    """The planned placement of one tensor on each axis, in one role (at rest, arriving, leaving, ...)."""

    def __init__(self, role: str = "", *, is_phase: bool = False) -> None:
        self._role = role
        self._is_phase = is_phase
        self._by_axis: dict[str, PlannedPlacement] = {}

    def record(self, axis: str, placement: Placement, entry: Entry, name: str, findings: Findings) -> bool:
        """Record a placement. If another one is recorded already, it stays, a finding is added, and False is returned."""
        before = self._by_axis.setdefault(axis, PlannedPlacement(placement, entry))
        if before.placement == placement:
            return True
        in_every_phase = self._is_phase and all(getattr(one, "phase", ALL) == ALL for one in (entry, before.entry))
        role = f" {self._role}" if self._role and not in_every_phase else ""
        findings.error(
            "conflict",
            f"{{names}} on axis {axis!r}{role}: '{entry.path}' says {placement_text(placement)}, but "
            f"'{before.entry.path}'{_at(before.entry.source)} says {placement_text(before.placement)}; keep one of "
            "the two, or make their paths disjoint: '(?!(PATH)$)' in front of one excludes what PATH matches",
            entry.source,
            name,
        )
        return False

    def adopt(self, other: PlannedAxes, name: str, findings: Findings) -> None:
        """Record the placements of ``other``, too."""
        for axis, choice in other._by_axis.items():
            self.record(axis, choice.placement, choice.entry, name, findings)

    def get(self, axis: str) -> PlannedPlacement | None:
        return self._by_axis.get(axis)

    def items(self) -> Mapping[str, PlannedPlacement]:
        return self._by_axis

    def __bool__(self) -> bool:
        return bool(self._by_axis)

    def stage(self, axes: MeshAxes) -> Stage:
        """None on axes without a placement."""
        return tuple(self._by_axis[axis].placement if axis in self._by_axis else None for axis in axes)

    def complete(self, axes: MeshAxes) -> tuple[Placement, ...]:
        """Replicate on axes without a placement."""
        return tuple(placement if placement is not None else Replicate() for placement in self.stage(axes))


def _at(source: Source | None) -> str:
    return f" ({source})" if source is not None else ""


@dataclass
class PlannedState:
    """The planned placements of a parameter or buffer at rest, in forward and in backward, and of its gradient."""

    init: PlannedAxes = field(default_factory=lambda: PlannedAxes("at rest", is_phase=True))
    forward: PlannedAxes = field(default_factory=lambda: PlannedAxes("while it runs", is_phase=True))
    backward: PlannedAxes = field(default_factory=lambda: PlannedAxes("in the backward", is_phase=True))
    annotated: PlannedAxes = field(default_factory=PlannedAxes)
    grad: PlannedAxes = field(default_factory=lambda: PlannedAxes("for the gradient"))
    grad_annotated: PlannedAxes = field(default_factory=lambda: PlannedAxes("for the gradient"))

    def running_at(self, axis: str) -> PlannedPlacement | None:
        """The planned placement on one axis while the module computes."""
        return self.forward.get(axis) or self.init.get(axis)

    def running(self, axes: MeshAxes) -> tuple[Placement, ...]:
        """Complete placements while the module computes: those at rest unless the plan gives others."""
        return tuple(
            choice.placement if (choice := self.running_at(axis)) is not None else Replicate() for axis in axes
        )


@dataclass
class PlannedBoundary:
    """The planned placements of an input or output of a module."""

    dst: PlannedAxes = field(default_factory=PlannedAxes)
    src: PlannedAxes = field(default_factory=lambda: PlannedAxes("as source"))
    grad_src: PlannedAxes = field(default_factory=lambda: PlannedAxes("as source of the gradient"))
    grad_dst: PlannedAxes = field(default_factory=lambda: PlannedAxes("for the gradient"))
    annotated: PlannedAxes = field(default_factory=PlannedAxes)
    entries: list[Entry] = field(default_factory=list)

    def adopt(self, other: PlannedBoundary, name: str, findings: Findings) -> None:
        """Record what the plan gives for all inputs (or outputs) of the module."""
        for mine, theirs in zip(self._roles(), other._roles()):
            mine.adopt(theirs, name, findings)
        self.entries += [entry for entry in other.entries if entry not in self.entries]

    def _roles(self) -> tuple[PlannedAxes, ...]:
        return self.dst, self.src, self.grad_src, self.grad_dst, self.annotated


# ``Resolution``: what a plan says of one model.

# (module, "<in>" or "<out>", index)
Boundary = tuple[str, str, int | str | None]


class Resolution:
    """What a plan says of one model.

    Attributes:
        states: first name of each parameter and buffer -> its planned placements (empty if there are none).
        boundaries: those of inputs and outputs; the ones of a single input include those of all inputs of the module.
        given: inputs of the model -> the entry that says whether the caller passes local parts.
        factories: module -> placements of tensors that its forward makes.
        attention: module -> axis -> how attention works along it, and the entry that says so.
        locals: module -> the entry that runs it on local tensors.
        units: module -> the entry that groups its parameters.
        precisions: module -> the entry that gives its dtypes.
        checkpoints: module -> the entry that says what its forward saves.
        matches: ``id`` of an entry -> what it matched, as names of parameters, buffers, modules, inputs and outputs.
    """

    def __init__(self, index: ModelIndex) -> None:
        self.states = {name: PlannedState() for name in index.states}
        self.boundaries: dict[Boundary, PlannedBoundary] = {}
        self.given: dict[Boundary, ShardEntry] = {}
        self.factories: dict[str, PlannedAxes] = {}
        self.attention: dict[str, dict[str, tuple[AttentionMethod, AttentionEntry]]] = {}
        self.locals: dict[str, LocalEntry] = {}
        self.units: dict[str, UnitEntry] = {}
        self.precisions: dict[str, PrecisionEntry] = {}
        self.checkpoints: dict[str, CheckpointEntry] = {}
        self.matches: dict[int, tuple[str, ...]] = {}


def resolve(plan: Plan, index: ModelIndex, findings: Findings) -> Resolution:
    """Match every entry; conflicts, paths that match nothing and impossible phases become findings.

    Raises PlanError for a path whose matching takes too long.
    """
    resolver = _Resolver(index, findings)
    for entry in plan.entries:
        getattr(resolver, type(entry).__name__.removesuffix("Entry").lower())(entry)  # the method of this kind
    resolver.spread_unindexed()
    return resolver.resolution


def shown_name(state: StateTensor) -> str:
    """A parameter's name for messages, with the names it is tied to."""
    return f"{state.name} (tied to {', '.join(state.names[1:])})" if len(state.names) > 1 else state.name


class _Resolver:
    def __init__(self, index: ModelIndex, findings: Findings) -> None:
        self.index, self.findings = index, findings
        self.matcher = Matcher(index, findings)
        self.resolution = Resolution(index)

    # Entries

    def shard(self, entry: ShardEntry) -> None:
        if entry.path.target is Target.STATE:
            for name in self._of_phase(entry, self._states(entry, "shard")):
                planned = self.resolution.states[name]
                roles = ((INIT, planned.init), (FWD, planned.forward), (BWD, planned.backward))
                self._record_state(
                    [role for phase, role in roles if phase in entry.phase], name, entry.placements, entry
                )
        elif entry.path.target is Target.GRAD:
            for name in self._gradients(entry, "shard"):
                self._record_state([self.resolution.states[name].grad], name, entry.placements, entry)
        else:
            self._shard_boundary(entry)

    def _shard_boundary(self, entry: ShardEntry) -> None:
        if not entry.phase & RUN:
            self.findings.error(
                "phase",
                f"shard '{entry.path}' has phase=init, but inputs and outputs exist only while the model runs; remove "
                "the phase, or write fwd or bwd",
                entry.source,
            )
            return
        for boundary, planned, shown in self._boundaries(entry, "shard"):
            # The gradient follows the boundary rule, unless an entry is for the backward alone.
            role = planned.dst if FWD in entry.phase else planned.grad_dst
            for axis, placement in entry.placements:
                role.record(axis, placement, entry, shown, self.findings)
            if _is_model_input(boundary):
                self._check_given(boundary, entry, shown)

    def redistribute(self, entry: RedistributeEntry) -> None:
        for boundary, planned, shown in self._boundaries(entry, "redistribute"):
            sides = (
                (planned.src, entry.src),
                (planned.dst, entry.dst),
                (planned.grad_src, entry.grad_src or ()),
                (planned.grad_dst, entry.grad_dst or ()),
            )
            for role, placements in sides:
                for axis, placement in placements:
                    role.record(axis, placement, entry, shown, self.findings)
            if _is_model_input(boundary):
                self.resolution.given.setdefault(boundary, ShardEntry(entry.path, entry.src, source=entry.source))

    def annotate(self, entry: AnnotateEntry) -> None:
        if entry.path.target is Target.STATE:
            for name in self._states(entry, "annotate"):
                self._record_state([self.resolution.states[name].annotated], name, entry.placements, entry)
        elif entry.path.target is Target.GRAD:
            for name in self._gradients(entry, "annotate"):
                self._record_state([self.resolution.states[name].grad_annotated], name, entry.placements, entry)
        else:
            for boundary, planned, shown in self._boundaries(entry, "annotate"):
                for axis, placement in entry.placements:
                    planned.annotated.record(axis, placement, entry, shown, self.findings)
                if _is_model_input(boundary):
                    local = ShardEntry(entry.path, entry.placements, given="local", source=entry.source)
                    self._check_given(boundary, local, shown)

    def factory(self, entry: FactoryEntry) -> None:
        for path in self._modules(entry, "factory"):
            planned = self.resolution.factories.setdefault(path, PlannedAxes("for tensors it makes"))
            for axis, placement in entry.placements:
                planned.record(axis, placement, entry, path, self.findings)

    def attention(self, entry: AttentionEntry) -> None:
        for path in self._modules(entry, "attention"):
            methods = self.resolution.attention.setdefault(path, {})
            for axis, method in entry.methods:
                before, first = methods.setdefault(axis, (method, entry))
                if before != method:
                    self.findings.error(
                        "conflict",
                        f"{{names}} on axis {axis!r}: attention '{entry.path}' says {method}, but '{first.path}' "
                        f"({first.source}) says {before}; keep one of the two",
                        entry.source,
                        path,
                    )

    def local(self, entry: LocalEntry) -> None:
        self._keep(self.resolution.locals, entry, "local", "differ", lambda before: before == entry)

    def precision(self, entry: PrecisionEntry) -> None:
        self._keep(
            self.resolution.precisions,
            entry,
            "precision",
            "give different dtypes",
            lambda before: _alike(before, entry),
        )

    def unit(self, entry: UnitEntry) -> None:
        differ = "have different settings of resharding, mixed precision or offload"
        self._keep(self.resolution.units, entry, "unit", differ, lambda before: _alike(before, entry))

    def checkpoint(self, entry: CheckpointEntry) -> None:
        def is_same(before: CheckpointEntry) -> bool:
            return (before.policy, before.budget_gib) == (entry.policy, entry.budget_gib)

        self._keep(self.resolution.checkpoints, entry, "checkpoint", "differ", is_same)

    def _keep(
        self, table: dict[str, AnyEntry], entry: AnyEntry, what: str, differ: str, is_same: Callable[[AnyEntry], bool]
    ) -> None:
        """The first entry for each module that is called; others have to say the same."""
        for path in self._called_modules(entry, what):
            before = table.setdefault(path, entry)
            if before is not entry and not is_same(before):
                self.findings.error(
                    "conflict",
                    f"{{names}}: {what} '{entry.path}' and {what} '{before.path}' ({before.source}) both match, and "
                    f"{differ}; keep one of the two",
                    entry.source,
                    path,
                )

    def spread_unindexed(self) -> None:
        """What entries give for all inputs of a module holds for those with entries of their own, too."""
        for (path, side, index), planned in self.resolution.boundaries.items():
            everywhere = self.resolution.boundaries.get((path, side, None))
            if index is None or everywhere is None:
                continue
            planned.adopt(everywhere, _shown_boundary((path, side, index)), self.findings)
            entry = self.resolution.given.get((path, side, None))
            if entry is not None:
                self._check_given((path, side, index), entry, _shown_boundary((path, side, index)))

    # Names

    def _states(self, entry: Entry, what: str) -> tuple[str, ...]:
        found = self.matcher.states(entry.path, what, entry.source)
        self.resolution.matches[id(entry)] = found
        return found

    def _of_phase(self, entry: ShardEntry, names: tuple[str, ...]) -> tuple[str, ...]:
        """An entry for a part of the phases that names parameters and buffers is about the parameters: buffers are small,
        and modules write to them."""
        parameters = tuple(name for name in names if self.index.states[name].is_parameter)
        return parameters if parameters and entry.phase != ALL else names

    def _modules(self, entry: Entry, what: str) -> tuple[str, ...]:
        found = self.matcher.modules(entry.path, what, entry.source)
        self.resolution.matches[id(entry)] = found
        return found

    def _gradients(self, entry: Entry, what: str) -> tuple[str, ...]:
        found = self._states(entry, what)
        parameters = tuple(name for name in found if self.index.states[name].is_parameter)
        if found and not parameters:
            self.findings.error(
                "no-match", f"{what} '{entry.path}' names a buffer, which has no gradient", entry.source
            )
        return parameters

    def _called_modules(self, entry: Entry, what: str) -> tuple[str, ...]:
        """Matching modules whose forward runs; a finding when there is none."""
        path, source = entry.path, entry.source
        found = self._modules(entry, what)
        called = tuple(name for name in found if self.index.is_called(name))
        if found and not called:
            name = found[0]
            container = type(self.index.modules[name]).__name__
            children = [n for n in self.index.modules if n.rpartition(".")[0] == name and n and self.index.is_called(n)]
            advice = rf"name its items: {path.pattern}.\d+" if children else "name a module that is called"
            self.findings.error(
                "not-called",
                f"{what} '{path}' matches {name or 'the model'}, a {container} whose forward never runs, so that the "
                f"entry would have no effect; {advice}",
                source,
            )
        return called

    def _boundaries(
        self, entry: ShardEntry | RedistributeEntry | AnnotateEntry, what: str
    ) -> list[tuple[Boundary, PlannedBoundary, str]]:
        side = "<in>" if entry.path.target is Target.IN else "<out>"
        found = []
        for path in self._called_modules(entry, what):
            key = entry.path.key
            keys: Sequence[int | str | None] = [key]
            if side == "<in>" and key is not None:
                keys = self._inputs(path, key, entry, what)
            for each in keys:
                boundary = (path, side, each)
                planned = self.resolution.boundaries.setdefault(boundary, PlannedBoundary())
                planned.entries.append(entry)
                found.append((boundary, planned, _shown_boundary(boundary)))
        return found

    def _inputs(
        self, path: str, key: int | str, entry: ShardEntry | RedistributeEntry | AnnotateEntry, what: str
    ) -> list[int | str]:
        """The inputs that ``key`` names: one, or all whose names match an expression; none, and a finding, otherwise."""
        if entry.path.key_expression is None:
            one = self._input(path, key, entry, what)
            return [] if one is None else [one]
        names = self.index.inputs(path).names
        matching = [name for name in names if entry.path.matches_key(name)]
        if not matching:
            self.findings.error(
                "unknown-input",
                f"{what} '{entry.path}' on {{names}} matches none of the inputs that the forward names ({', '.join(names)})",
                entry.source,
                path,
            )
        return list(matching)

    def _input(
        self, path: str, key: int | str, entry: ShardEntry | RedistributeEntry | AnnotateEntry, what: str
    ) -> int | str | None:
        """The input's name in the forward's signature, or its position where that has no name; None and a finding for an
        input that ``forward`` does not take."""
        inputs = self.index.inputs(path)
        if isinstance(key, int):
            if key < len(inputs.positional):
                return inputs.positional[key]
            if inputs.more_positions:
                return key
            problem = f"position {key}, but the forward takes {len(inputs.positional)} inputs by position"
        else:
            close = difflib.get_close_matches(key, inputs.names, n=3, cutoff=0.8 if inputs.more_names else 0.5)
            if key in inputs.names or (inputs.more_names and not close):
                return key
            problem = f"the input {key!r}, which the forward does not take"
            if close:
                problem += f"; closest: {', '.join(close)}"
        known = f" ({', '.join(inputs.names)})" if inputs.names else ""
        self.findings.error(
            "unknown-input", f"{what} '{entry.path}' on {{names}} names {problem}{known}", entry.source, path
        )
        return None

    # Placements

    def _record_state(
        self, roles: Sequence[PlannedAxes], name: str, placements: AxisPlacements, entry: ShardEntry | AnnotateEntry
    ) -> None:
        state = self.index.states[name]
        for axis, placement in placements:
            counted = self._from_front(placement, state, axis, entry)
            if counted is None:
                continue
            for role in roles:
                if not role.record(axis, counted, entry, shown_name(state), self.findings):
                    break  # one conflict is not told again for every phase

    def _from_front(
        self, placement: Placement, state: StateTensor, axis: str, entry: ShardEntry | AnnotateEntry
    ) -> Placement | None:
        """The placement with its dim counted from the front; None and a finding when the tensor has no such dim."""
        dim = shard_dim(placement)
        if state.shape is None:
            self.findings.error(
                "lazy",
                "{names} has no shape yet, because its module is lazy; call the model once on one device before "
                "parallelize",
                entry.source,
                state.name,
            )
            return None
        if dim is None:
            return placement
        ndim = len(state.shape)
        if not -ndim <= dim < ndim:
            allowed = f"a dim in [{-ndim}, {ndim})" if ndim else "R: it has no dim to shard"
            self.findings.error(
                "dim",
                f"'{entry.path}' shards dim {dim} ({placement_text(placement)} on {axis}), but {{names}} has shape "
                f"{state.shape}; use {allowed}",
                entry.source,
                state.name,
            )
            return None
        return from_front(placement, ndim)

    def _check_given(self, boundary: Boundary, entry: ShardEntry, shown: str) -> None:
        before = self.resolution.given.setdefault(boundary, entry)
        if before.given != entry.given:
            self.findings.error(
                "conflict",
                f"{{names}}: '{entry.path}' says given={entry.given}, but '{before.path}' ({before.source}) says "
                f"given={before.given}; an input is either global or local",
                entry.source,
                shown,
            )


def _alike(before: PrecisionEntry | UnitEntry, entry: PrecisionEntry | UnitEntry) -> bool:
    return replace(before, path=entry.path) == entry


def _is_model_input(boundary: Boundary) -> bool:
    return boundary[:2] == ("", "<in>")


def _shown_boundary(boundary: Boundary) -> str:
    path, side, index = boundary
    shown = side if index is None else f"{side[:-1]}:{index}>"
    return f"{path}.{shown}" if path else shown
