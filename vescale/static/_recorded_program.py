"""``RecordedProgram``: recorded steps of a model as data, which another process can run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from vescale.errors import MeshAxesError, PlanError, StaticRecordError
from vescale.plans import Document, MeshAxes, YamlLimits, load_yaml
from vescale.static._placement_names import placement_named
from vescale.static._record_values import (
    Placements,
    RecordedBoundary,
    RecordedFunction,
    RecordedModule,
    RecordedPatch,
    RecordedSite,
    RecordedStep,
    RecordedType,
    Site,
    expect,
)
from vescale.static._record_writer import FORMAT, THE_MODEL, content_digest, record_text

# YAML text back to a recorded program. Nothing in it is executed; each mistake is an error with line and column.

_LIMITS = YamlLimits("record", 50_000_000, 2_000_000, "it was not written by RecordedProgram.to_yaml()")

T = TypeVar("T")


def read_record(
    file: str | os.PathLike[str],
) -> tuple[MeshAxes, str, str, tuple[tuple[str, str], ...], tuple[RecordedStep, ...]]:
    """Raises StaticRecordError.

    Args:
        file: a path, or the text (with a line break).
    """
    try:
        document = load_yaml(file, _LIMITS)
    except StaticRecordError:
        raise
    except PlanError as problem:
        raise StaticRecordError(problem.problem, problem.source) from None
    root = _Part(document, (), document.data)
    if not isinstance(root.data, dict) or "static_record" not in root.data:
        raise root.wrong("a record of static mode, with static_record: at its beginning")
    if root["static_record"].number() != FORMAT:
        raise root["static_record"].wrong(f"{FORMAT}, the format of this version of vescale")
    root.only("static_record", "made_by", "mesh", "device", "plan", "types", "functions", "patches", "steps", "digest")
    if root["digest"].text() != content_digest(root.data):
        raise root["digest"].error(
            "the record was edited after it was written; change the plan, and record the model again"
        )
    sizes = {name: size.number() for name, size in root["mesh"].items()}
    try:
        axes = MeshAxes.of(sizes)
    except MeshAxesError as problem:
        raise root["mesh"].error(str(problem.args[0])) from None
    versions = tuple((name, version.text()) for name, version in root["made_by"].items())
    reader = _Reader(root, axes)
    steps = tuple(map(reader.step, root["steps"]))
    return axes, root["device"].text(), root["plan"].text(), versions, steps


class _Part:
    """A part of the document, with its position."""

    def __init__(self, document: Document, place: tuple[str | int, ...], data: Any) -> None:
        self._document, self._place, self.data = document, place, data

    def error(self, problem: str) -> StaticRecordError:
        return StaticRecordError(problem, self._document.at(self._place))

    def wrong(self, expected: str) -> StaticRecordError:
        found = "nothing" if self.data is None else f"{str(self.data)[:60]!r}"
        return self.error(f"{found} where {expected} was expected; record the model again")

    def __getitem__(self, key: str) -> _Part:
        if not isinstance(self.data, dict):
            raise self.wrong("a mapping")
        if key not in self.data:
            raise self.error(f"{key}: is missing; record the model again")
        return _Part(self._document, (*self._place, key), self.data[key])

    def get(self, key: str, read: Callable[[_Part], T], default: T) -> T:
        return read(self[key]) if isinstance(self.data, dict) and key in self.data else default

    def only(self, *keys: str) -> None:
        for key, part in self.items():
            if key not in keys:
                raise part.error(f"{key!r} is not a key of a record; record the model again")

    def items(self) -> Iterator[tuple[str, _Part]]:
        if not isinstance(self.data, dict):
            raise self.wrong("a mapping")
        for key in self.data:
            yield key, self[key]

    def __iter__(self) -> Iterator[_Part]:
        if not isinstance(self.data, list):
            raise self.wrong("a list")
        for index, value in enumerate(self.data):
            yield _Part(self._document, (*self._place, index), value)

    def text(self) -> str:
        if not isinstance(self.data, str):
            raise self.wrong("a text")
        return self.data

    def number(self) -> int:
        if type(self.data) is not int:
            raise self.wrong("a whole number")
        return self.data

    def flag(self) -> bool:
        if type(self.data) is not bool:
            raise self.wrong("true or false")
        return self.data

    def numbers(self) -> tuple[int, ...]:
        return tuple(part.number() for part in self)

    def of(self, make: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """A value, whose own checks get the position of this part."""
        try:
            return make(*args, **kwargs)
        except StaticRecordError as problem:
            if problem.source is not None:
                raise
            raise self.error(problem.problem) from None


# Of sites, with their keys.
_SECTIONS = {
    "redistribute": ("inputs", "outputs", "reason", "communication"),
    "check": ("inputs", "outputs"),
    "annotate": ("action", "factors"),
}


class _Reader:
    """Reads the tables in the order in which they were written: a row refers to earlier ones only."""

    def __init__(self, root: _Part, axes: MeshAxes) -> None:
        self._axes = axes
        self._types = [self._type(part) for part in root["types"]]
        self._functions = [self._function(part) for part in root["functions"]]
        self._patches: list[RecordedPatch] = []
        for part in root["patches"]:
            self._patches.append(self._patch(part))

    def step(self, part: _Part) -> RecordedStep:
        part.only(
            "call",
            "draws",
            "recomputes",
            "coordinate",
            "inputs",
            "outputs",
            "hidden",
            "grads",
            "path",
            "functions",
            "modules",
        )
        grads = []
        for row in part["grads"]:
            row.only("annotate", "names")
            placements = self._placements(row["annotate"])
            grads += [(name.text(), placements) for name in row["names"]]
        return part.of(
            RecordedStep,
            part["call"].text(),
            part["draws"].flag(),
            part["recomputes"].flag(),
            *(self._types_at(part[name]) for name in ("inputs", "outputs", "hidden")),
            tuple(grads),
            tuple(_row(self._functions, one) for one in part["functions"]),
            tuple(self._module(path, one) for path, one in part["modules"].items()),
            part.get("coordinate", _Part.numbers, None),
            tuple(one.number() for one in _list(part, "path")),
        )

    def _module(self, path: str, part: _Part) -> RecordedModule:
        part.only("state", "ran", "eager", "patch", "inputs", "outputs", "redistribute")
        return part.of(
            RecordedModule,
            "" if path == THE_MODEL else path,
            part["state"].text(),
            part.get("ran", _Part.flag, True),
            part.get("eager", _Part.text, ""),
            part.get("patch", lambda one: _row(self._patches, one), None),
            part.get("inputs", self._types_at, None),
            part.get("outputs", self._types_at, None),
            tuple(self._boundary(one) for one in _list(part, "redistribute")),
        )

    def _boundary(self, part: _Part) -> RecordedBoundary:
        part.only("entry", "tensors", "communication")
        tensors = []
        for pair in part["tensors"]:
            types = self._types_at(pair)
            if len(types) != 2:
                raise pair.wrong("a type before and a type after")
            tensors.append((types[0], types[1]))
        communication = tuple(one.text() for one in _list(part, "communication"))
        return part.of(RecordedBoundary, part["entry"].text(), tuple(tensors), communication)

    def _patch(self, part: _Part) -> RecordedPatch:
        refusals = ("refused", "refused_else", "refused_false", "refused_true", "marked")
        part.only("function", *_SECTIONS, "calls", *refusals)
        sites = [self._site(one, section) for section in _SECTIONS for one in _list(part, section)]
        return part.of(
            RecordedPatch,
            _row(self._functions, part["function"]),
            tuple(sites),
            tuple(self._call(one) for one in _list(part, "calls")),
            *(tuple(one.number() for one in _list(part, name)) for name in refusals),
        )

    def _call(self, part: _Part) -> tuple[int, tuple[tuple[RecordedFunction, RecordedPatch | None], ...]]:
        part.only("node", "functions")
        called = []
        for one in part["functions"]:
            pair = list(one)
            if len(pair) != 2:
                raise one.wrong("a function and its patch, or null")
            patch = None if pair[1].data is None else _row(self._patches, pair[1])
            called.append((_row(self._functions, pair[0]), patch))
        return part["node"].number(), tuple(called)

    def _site(self, part: _Part, section: str) -> RecordedSite:
        part.only("function", "line", "column", "node", *_SECTIONS[section])
        places = [part[name].number() for name in ("node", "line", "column")]
        name = part["function"].text()
        if section == "redistribute":
            return part.of(
                RecordedSite,
                *places,
                section,
                name,
                self._types_at(part["inputs"]),
                self._types_at(part["outputs"]),
                reason=part["reason"].text(),
                communication=tuple(one.text() for one in _list(part, "communication")),
            )
        if section == "check":
            types = self._types_at(part["inputs"]), self._types_at(part["outputs"])
            return part.of(RecordedSite, *places, section, name, *types)
        return part.of(RecordedSite, *places, part["action"].text(), name, factors=part["factors"].numbers())

    def _function(self, part: _Part) -> RecordedFunction:
        part.only("name", "file", "line", "code", "found")
        name, file, code, found = (part[key].text() for key in ("name", "file", "code", "found"))
        return part.of(RecordedFunction, name, file, part["line"].number(), code, found)

    def _type(self, part: _Part) -> RecordedType:
        part.only("kind", "placements", "grad", "factors", "sizes")
        placements, grad = part.get("placements", self._placements, None), part.get("grad", self._placements, None)
        sizes = [one.numbers() for one in _list(part, "sizes")]
        if any(len(size) != 2 for size in sizes):
            raise part["sizes"].wrong("pairs of sizes")
        kind = part.of(
            RecordedType, placements, grad, part["factors"].numbers(), tuple((size[0], size[1]) for size in sizes)
        )
        named = {name: one.text() for name, one in part["kind"].items()}
        if named != kind.kinds(self._axes):
            raise part["kind"].wrong(f"{kind.kinds(self._axes)}, for these placements,")
        return kind

    def _types_at(self, part: _Part) -> tuple[RecordedType, ...]:
        return tuple(_row(self._types, one) for one in part)

    def _placements(self, part: _Part) -> Placements:
        named = dict(part.items())
        if tuple(named) != self._axes.names:
            raise part.wrong(f"a placement for each of the axes {', '.join(self._axes.names)}")
        return tuple(one.of(placement_named, one.text()) for one in named.values())


def _row(table: list[T], part: _Part) -> T:
    number = part.number()
    if not 0 <= number < len(table):
        raise part.wrong(f"a number below {len(table)}")
    return table[number]


def _list(part: _Part, key: str) -> list[_Part]:
    return list(part[key]) if key in part.data else []


@dataclass(frozen=True)
class RecordedProgram:
    """What a model in static mode runs, as a value: for reading, for a YAML file, and for ``parallelize(record=...)``.

    Attributes:
        axes: names and sizes of the mesh's axes.
        device: type of its devices.
        plan: digest of the lowered plan.
        versions: of vescale, torch and Python.
        steps: one for each kind of step.
    """

    axes: MeshAxes
    device: str
    plan: str
    versions: tuple[tuple[str, str], ...]
    steps: tuple[RecordedStep, ...]

    def __post_init__(self) -> None:
        num_axes = len(self.axes.names)
        for step in self.steps:
            for kind in step.types():
                for placements in (kind.placements, kind.grad):
                    is_fitting = placements is None or len(placements) == num_axes
                    expect(is_fitting, f"one placement for each of {num_axes} axes", placements)
            if not all(kind.is_even for kind in step.types()):
                is_given = step.coordinate is not None and len(step.coordinate) == num_axes
                expect(is_given, "the coordinate of the rank, for sizes are uneven", step.coordinate)
        calls = [step.call for step in self.steps]
        expect(len(set(calls)) == len(calls), "one step for each kind of call", calls)

    @property
    def sites(self) -> tuple[Site, ...]:
        """The places in the model's code where something else runs than its functions on the local tensors, in the order of
        modules; each once."""
        found: dict[Site, None] = {}
        for step in self.steps:
            for module in step.modules:
                if module.patch is not None and not module.eager:
                    for function, site in module.patch.all_sites():
                        if site.action != "check":
                            found[Site(module.path, function.file, site.line, site.column, site)] = None
        return tuple(found)

    def to_yaml(self, file: str | os.PathLike[str] | None = None) -> str:
        """The program as YAML text, and written to ``file``, if there is one. :meth:`from_yaml` reads it back equal.

        Raises StaticRecordError for placements and functions that have no name; OSError of the file.
        """
        text = record_text(self.axes, self.device, self.plan, self.versions, self.steps)
        if file is not None:
            with open(file, "w", encoding="utf-8") as opened:
                opened.write(text)
        return text

    @classmethod
    def from_yaml(cls, file: str | os.PathLike[str]) -> RecordedProgram:
        """Read what :meth:`to_yaml` wrote; nothing in it is executed.

        Raises StaticRecordError with line and column.

        Args:
            file: a path, or the text (with a line break).
        """
        return cls(*read_record(file))
