"""YAML to :class:`Plan`: schema, variables and entries; each error has its line and column."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import regex
import yaml
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from vescale.errors import MissingMeshError, PlanError, Source, YamlPlanError, did_you_mean, kind_of
from vescale.plans._entries import MAX_EXPRESSION
from vescale.plans._mesh_axes import MeshAxes
from vescale.plans._placement_text import parse_placement, shown_text
from vescale.plans._plan_entries import PlanEntries

# YAML text to plain data with the position of every value, within limits.
#
# Only strings, integers, booleans, nulls, lists and mappings are built. Limits are applied while the text is
# composed, before anything traverses the result: an alias bomb is small until it is expanded.


MAX_BYTES = 500_000  # of a plan and all that it includes
MAX_DEPTH = 20
MAX_NODES = 10_000
MAX_TEXT = 20_000  # characters of one value: the units of a ragged placement over thousands of ranks


_ADVICE = "write one entry, with a path that matches many tensors"

# The keys and indices that lead to a value from the document's root.
Place = tuple[str | int, ...]

_SCALARS = {"tag:yaml.org,2002:" + name for name in ("str", "int", "bool", "null")}
_INTEGER = regex.compile(r"[-+]?(?:0|[1-9]\d{0,17})")
_FRACTION = regex.compile(r"[0-9]{1,18}\.[0-9]{1,30}")


@dataclass
class Document:
    """Plain data and the position of each part in the text; ``fits_schema`` once that has been checked."""

    name: str
    num_characters: int = 0
    data: Any = None
    keys: dict[Place, Source] = field(default_factory=dict)
    values: dict[Place, Source] = field(default_factory=dict)
    fits_schema: bool = False

    def at(self, place: Place) -> Source:
        """The source of a key (of a mapping's entry) or value; of the nearest enclosing one that is known."""
        while True:
            found = self.keys.get(place) or self.values.get(place)
            if found is not None or not place:
                return found or Source(self.name, 1, 1)
            place = place[:-1]


def load_yaml(file: str | os.PathLike[str]) -> Document:
    """Read a file, or text (a str with a line break). Raises PlanError with line and column.

    The same text, under the same name, as at an earlier call gives the same document, which must not be changed.
    """
    if isinstance(file, str) and "\n" in file:
        text, name = file, "<yaml>"
        if len(text) > MAX_BYTES:
            raise _too_large(name)
    else:
        text, name = _text_of(Path(file)), str(file)
    return _document_of(text, name)


@functools.lru_cache(maxsize=32)
def _document_of(text: str, name: str) -> Document:
    document = Document(name, num_characters=len(text))
    try:
        loader = _BoundedLoader(text, name)
        try:
            node = loader.get_single_node()
            document.data = None if node is None else _build(node, (), document, loader)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Source(name, mark.line + 1, mark.column + 1) if mark else Source(name, 1, 1)
        detail = error.problem or error.context or "not YAML"
        raise YamlPlanError(f"not YAML: {detail}{_advice(detail)}", place) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        raise YamlPlanError(
            f"not YAML: the character #x{error.character:04x} is not allowed in text; remove it, or write it escaped",
            Source(name, line, column),
        ) from None
    return document


def _text_of(path: Path) -> str:
    is_special = False
    with contextlib.suppress(OSError, ValueError):  # the error is raised below
        is_special = path.exists() and not path.is_file() and not path.is_dir()
    if is_special:  # a pipe's writer may never come, and a device has no end
        raise YamlPlanError(f"cannot read the plan {str(path)!r}: it is a pipe or device; pass the path of a YAML file")
    try:
        with path.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise YamlPlanError(
            f"cannot read the plan {str(path)!r}: {error.strerror}; pass the path of a YAML file"
        ) from None
    except ValueError as error:  # a null character in the path
        raise YamlPlanError(f"cannot read the plan {str(path)!r}: {error}; pass the path of a YAML file") from None
    if len(data) > MAX_BYTES:
        raise _too_large(str(path))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise YamlPlanError(
            f"the plan is not UTF-8 text: {error.reason} at byte {error.start}", Source(str(path), 1, 1)
        ) from None


def _too_large(name: str) -> PlanError:
    return YamlPlanError(f"the plan has more than {MAX_BYTES} bytes; {_ADVICE}", Source(name, 1, 1))


def _advice(detail: str) -> str:
    if "\\t" in detail:
        return "; indent with spaces"
    if "cannot start any token" in detail or "did not find expected" in detail or "expected <block end>" in detail:
        return "; quote paths that hold special characters, for example '<in:input_ids>': {dp: S(0)}"
    if "found undefined alias" in detail or "while scanning an alias" in detail:
        return "; quote a path that begins with *"
    return ""


class _BoundedLoader(yaml.SafeLoader):
    """Composes nodes within the limits of a plan: depth, number and length of nodes, no aliases, no tags."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self._document_name = name
        self._depth = 0
        self._num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()
        problem = self._problem(event)
        if problem is not None:
            mark = event.start_mark
            raise YamlPlanError(problem, Source(self._document_name, mark.line + 1, mark.column + 1))
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def _problem(self, event: Any) -> str | None:
        self._num_nodes += 1
        if self._depth >= MAX_DEPTH:
            return f"the plan is nested deeper than {MAX_DEPTH} levels"
        if self._num_nodes > MAX_NODES:
            return f"the plan has more than {MAX_NODES} parts; {_ADVICE}"
        if isinstance(event, yaml.AliasEvent):
            return (
                f"alias *{str(event.anchor)[:40]}: plans cannot contain aliases; use vars: and ${{name}} to share text"
            )
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_TEXT:
            return f"a text of {len(event.value)} characters; at most {MAX_TEXT} are allowed: write several entries"
        tag: str | None = getattr(event, "tag", None)
        if tag is not None and not (isinstance(event, yaml.ScalarEvent) and tag in _SCALARS):
            return f"tag {tag[:80]!r}: plans cannot contain tags; write a plain value"
        return None


def _build(node: yaml.Node, place: Place, document: Document, loader: yaml.SafeLoader) -> Any:
    start = node.start_mark
    document.values[place] = Source(document.name, start.line + 1, start.column + 1)
    if isinstance(node, yaml.MappingNode):
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            mark = key_node.start_mark
            source = Source(document.name, mark.line + 1, mark.column + 1)
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                raise YamlPlanError("a key is not text; write name: value", source)
            if key in data:
                first = document.keys[(*place, key)]
                raise YamlPlanError(
                    f"key {key!r} is repeated (first on line {first.line}); keep one of the two", source
                )
            document.keys[(*place, key)] = source
            data[key] = _build(value_node, (*place, key), document, loader)
        return data
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, (*place, index), document, loader) for index, item in enumerate(node.value)]
    if node.tag == "tag:yaml.org,2002:int":  # YAML reads 010 as 8 and 1:30 as 90
        if _INTEGER.fullmatch(node.value) is None:
            raise YamlPlanError(
                f"{node.value[:40]!r} is not a plain number of up to 18 digits; write such a number, or quote it if "
                "it is text",
                document.at(place),
            )
        return int(node.value)
    is_cost = place[:-1] == ("pipeline", "costs")
    if (is_cost or place[-1:] in (("budget_gib",), ("memory_gib",))) and _FRACTION.fullmatch(node.value) is not None:
        return float(node.value)
    if node.tag in _SCALARS:
        return loader.construct_object(node)
    return node.value  # other fractions, dates and the like are text, because plans have none


# Plans that include others: files of one folder, each read before the file that includes it.

_MAX_FILES = 20


@dataclass(frozen=True)
class PlanFile:
    """A checked file and its values of ``${name}``: its own variables, overridden by those of the including file."""

    document: Document
    data: Mapping[str, Any]
    variables: Mapping[str, str]


def read_files(file: str | os.PathLike[str], check: Callable[[Document], Mapping[str, Any]]) -> list[PlanFile]:
    """The file and all that it includes, in the order in which their entries count; the file itself is the last.

    An ``include`` names files by their path relative to the including file. After links are followed, they must be in the
    folder of ``file`` or below it. ``check`` returns the data of a document, or raises. Raises PlanError for an include that
    leaves the folder, that includes itself, or that cannot be read, and if all files together are too large.
    """
    files: list[PlanFile] = []
    num_characters = 0

    def visit(document: Document, chain: tuple[Path, ...], outer: Mapping[str, str]) -> None:
        nonlocal num_characters
        num_characters += document.num_characters
        data = check(document)
        variables = {**(data.get("vars") or {}), **outer}
        for index, path in enumerate(_includes(document, data, chain)):
            source = document.at(("include", index))
            if path in chain:
                raise YamlPlanError(f"{path.name} includes itself; remove one of the includes between", source)
            if len(files) + len(chain) >= _MAX_FILES:
                raise YamlPlanError(f"more than {_MAX_FILES} files are included; merge some of them", source)
            try:
                included = load_yaml(path)
            except PlanError as error:
                if error.source is not None:
                    raise
                raise YamlPlanError(error.problem, source) from None
            if num_characters + included.num_characters > MAX_BYTES:
                raise YamlPlanError(f"the plan and all that it includes have more than {MAX_BYTES} bytes", source)
            visit(included, (*chain, path), variables)
        files.append(PlanFile(document, data, variables))

    is_text = isinstance(file, str) and "\n" in file
    visit(load_yaml(file), () if is_text else (Path(file).resolve(),), {})
    return files


def _includes(document: Document, data: Mapping[str, Any], chain: tuple[Path, ...]) -> Iterator[Path]:
    for index, text in enumerate(data.get("include") or []):
        source = document.at(("include", index))
        if not chain:
            raise YamlPlanError(
                f"include {text!r}: a plan that is passed as text has no folder; pass the path of a file", source
            )
        folder = chain[0].parent
        try:
            path = (chain[-1].parent / text).resolve()
            is_file = path.is_file()  # not a pipe, whose reader may wait forever
        except (OSError, ValueError, RuntimeError) as error:  # a name too long, a null character, a circle of links
            raise YamlPlanError(
                f"cannot include {text[:80]!r}: {error}; pass the path of a YAML file", source
            ) from None
        if Path(text).is_absolute() or not path.is_relative_to(folder):
            raise YamlPlanError(
                f"include {text!r} is outside the folder of the plan, {folder}; copy the file into it, and write its "
                "path relative to the file that includes it",
                source,
            )
        if not is_file:
            raise YamlPlanError(f"cannot include {text!r}: {path} is not a file; pass the path of a YAML file", source)
        yield path


_P = TypeVar("_P", bound=PlanEntries)

_VARIABLE = regex.compile(r"\$\{([^{}]*)\}")
_SECTIONS = (
    "version",
    "description",
    "include",
    "mesh",
    "vars",
    "shard",
    "redistribute",
    "annotate",
    "factory",
    "attention",
    "local",
    "units",
    "precision",
    "pipeline",
    "checkpoint",
)


@functools.cache
def plan_schema() -> dict[str, Any]:
    """The JSON Schema of a plan file, for editors and checks."""
    return json.loads(resources.files("vescale.plans").joinpath("plan.schema.json").read_text())


def read_plan(
    file: str | os.PathLike[str],
    mesh: DeviceMesh | Mapping[str, int] | MeshAxes | None,
    new_plan: Callable[[DeviceMesh | MeshAxes], _P],
) -> _P:
    """See :meth:`Plan.from_yaml`; ``new_plan`` makes an empty plan for a mesh."""
    if not isinstance(file, str | os.PathLike):
        raise YamlPlanError(f"file is {file!r}, {kind_of(file)}; pass the path of a YAML file, or YAML text")
    files = read_files(file, _checked)
    if files[-1].document.data is None:
        raise YamlPlanError(
            f"the plan is empty; write its sections ({', '.join(_SECTIONS)}), as `vescale zoo show llama` prints them",
            files[-1].document.at(()),
        )
    plan = new_plan(_mesh(files, mesh))
    for each in files:
        _add_entries(plan, each)
    return plan


def _checked(document: Document) -> Mapping[str, Any]:
    data = document.data if document.data is not None else {}
    if not isinstance(data, dict):
        raise YamlPlanError(
            f"a plan is a mapping of sections ({', '.join(_SECTIONS)}), not {_kind(data)}", document.at(())
        )
    if not document.fits_schema:
        _check_schema(data, document)
        document.fits_schema = True
    return data


def _add_entries(plan: PlanEntries, file: PlanFile) -> None:
    document, data = file.document, file.data
    reader = _Reader(plan, document, file.variables)
    for path, value in (data.get("shard") or {}).items():
        reader.shard(path, value)
    for path, value in (data.get("redistribute") or {}).items():
        reader.redistribute(path, value)
    for section, add in (("annotate", plan.annotate), ("factory", plan.factory)):
        for path, value in (data.get(section) or {}).items():
            place: Place = (section, path)
            expanded = reader.expand(path, place)
            for item, where in _items(value, place):
                add(expanded, reader.axes(item, where), source=document.at(where))
    for path, value in (data.get("attention") or {}).items():
        place = ("attention", path)
        for axis in value:
            reader.check_axis(axis, (*place, axis))
        plan.attention(reader.expand(path, place), value, source=document.at(place))
    for path, value in (data.get("local") or {}).items():
        reader.local(path, value)
    for path, value in (data.get("precision") or {}).items():
        place = ("precision", path)
        plan.precision(reader.expand(path, place), **value, source=document.at(place))
    for path, value in (data.get("checkpoint") or {}).items():
        reader.checkpoint(path, value)
    for index, unit in enumerate(data.get("units") or []):
        path, options = (
            (unit, {}) if isinstance(unit, str) else (unit["path"], {k: unit[k] for k in unit if k != "path"})
        )
        plan.unit(reader.expand(path, ("units", index)), **options, source=document.at(("units", index)))
    if data.get("pipeline"):
        reader.pipeline(data["pipeline"])


class _Reader:
    """Adds the entries of a checked document to a plan."""

    def __init__(self, plan: PlanEntries, document: Document, variables: Mapping[str, str]) -> None:
        self.plan, self.document, self.variables = plan, document, variables
        self._values: dict[str, str] = {}  # of variables, with the variables in them
        self._expanding: list[str] = []
        self._num_characters = 0

    def expand(self, text: str, place: Place) -> str:
        """Replace every ``${name}``."""

        def value(found: regex.Match[str]) -> str:
            name = found[1]
            if name in self._values:
                return self._counted(self._values[name], place)
            if name in self._expanding:
                circle = " -> ".join((*self._expanding[self._expanding.index(name) :], name))
                raise YamlPlanError(
                    f"variables refer to each other: {circle}; write out the value of one of them",
                    self.document.at(place),
                )
            if name not in self.variables:
                known = ", ".join(itertools.islice(self.variables, 20)) or "none are defined"
                raise YamlPlanError(
                    f"${{{name}}} is not defined under vars: ({known}){did_you_mean(name, self.variables)}",
                    self.document.at(place),
                )
            self._expanding.append(name)
            self._values[name] = self.expand(str(self.variables[name]), place)
            self._expanding.pop()
            return self._counted(self._values[name], place)

        if not self._expanding:
            self._num_characters = 0
        return self._counted(_VARIABLE.sub(value, text), place)

    def _counted(self, text: str, place: Place) -> str:
        """The text, if what a path has become so far is not too long: variables may contain variables."""
        self._num_characters += len(text)
        if len(text) > MAX_EXPRESSION or self._num_characters > 20 * MAX_EXPRESSION:
            raise YamlPlanError(
                f"the path has more than {MAX_EXPRESSION} characters after its variables are expanded: write several "
                "entries",
                self.document.at(place),
            )
        return text

    def placement(self, text: str, place: Place) -> Placement:
        try:
            return parse_placement(text)
        except ValueError as error:
            raise YamlPlanError(str(error), self.document.at(place)) from None

    def axes(self, value: Mapping[str, str], place: Place) -> dict[str, Placement]:
        found = {}
        for axis, text in value.items():
            self.check_axis(axis, (*place, axis))
            found[axis] = self.placement(text, (*place, axis))
        return found

    def check_axis(self, axis: str, place: Place) -> None:
        try:
            self.plan.axes.index(axis)
        except ValueError as error:
            raise YamlPlanError(str(error), self.document.at(place)) from None

    def shard(self, path: str, value: Any) -> None:
        place: Place = ("shard", path)
        expanded = self.expand(path, place)
        for item, where in _items(value, place):
            phase, given = item.get("phase", "all"), item.get("given", "global")
            by_phase: dict[str, dict[str, Placement]] = {}
            for axis, text in item.items():
                if axis in ("phase", "given"):
                    continue
                self.check_axis(axis, (*where, axis))
                phases = {phase: text} if isinstance(text, str) else text
                if isinstance(text, dict) and "phase" in item:
                    raise YamlPlanError(
                        f"axis {axis!r} has a placement for each phase, but the entry also has a phase; keep one of "
                        "the two",
                        self.document.at((*where, axis)),
                    )
                for name, placement in phases.items():
                    deeper = (*where, axis) if isinstance(text, str) else (*where, axis, name)
                    by_phase.setdefault(name, {})[axis] = self.placement(placement, deeper)
            if not by_phase:
                raise YamlPlanError("no axis is given; write {axis: placement}", self.document.at(where))
            for name, placements in by_phase.items():
                self.plan.shard(expanded, placements, phase=name, given=given, source=self.document.at(where))

    def pipeline(self, value: Mapping[str, Any]) -> None:
        place: Place = ("pipeline",)
        options = dict(value)
        if "split_before" in options:
            options["split_before"] = [self.expand(path, place) for path in options["split_before"]]
        if "stages" in options:
            options["stages"] = [[self.expand(path, place) for path in stage] for stage in options["stages"]]
        if "costs" in options:
            options["costs"] = {self.expand(path, place): cost for path, cost in options["costs"].items()}
        self.plan.pipeline(**options, source=self.document.at(place))  # type: ignore[attr-defined]  # of Plan

    def redistribute(self, path: str, value: Any) -> None:
        place: Place = ("redistribute", path)
        expanded = self.expand(path, place)
        for item, where in _items(value, place):
            sides = {side: self.axes(item[side], (*where, side)) for side in item}
            self.plan.redistribute(
                expanded,
                sides["src"],
                sides["dst"],
                grad_src=sides.get("grad_src"),
                grad_dst=sides.get("grad_dst"),
                source=self.document.at(where),
            )

    def local(self, path: str, value: Any) -> None:
        place: Place = ("local", path)
        expanded = self.expand(path, place)
        for item, where in _items(value, place):
            self.plan.local(
                expanded,
                kind=item.get("kind"),
                dispatch=item.get("dispatch"),
                inputs=self.axes(item.get("in") or {}, (*where, "in")),
                outputs=self.axes(item.get("out") or {}, (*where, "out")),
                source=self.document.at(where),
            )

    def checkpoint(self, path: str, value: Any) -> None:
        place: Place = ("checkpoint", path)
        options = {"save": value} if isinstance(value, str) else dict(value)
        budget: Any = options.pop("budget_gib", None)
        policy: Any = options.get("save", "full")
        if isinstance(policy, list):
            policy = [self.expand(name, place) for name in policy]
        if options.keys() - {"save"} or isinstance(policy, list):
            policy = {**options, "save": [] if policy == "full" else policy}
        self.plan.checkpoint(self.expand(path, place), policy, budget, source=self.document.at(place))


def _items(value: Any, place: Place) -> list[tuple[Any, Place]]:
    """The entries of a path: one, or a list of them; an empty one is empty."""
    if isinstance(value, list):
        return [(item or {}, (*place, index)) for index, item in enumerate(value)]
    return [(value or {}, place)]


def _mesh(files: Sequence[PlanFile], mesh: DeviceMesh | Mapping[str, int] | MeshAxes | None) -> DeviceMesh | MeshAxes:
    """The mesh given by the caller, checked against the files'; otherwise that of the file, or of the first include with
    one."""
    with_mesh = [file for file in (files[-1], *files[:-1]) if file.data.get("mesh")]
    if mesh is None:
        sizes: dict[str, int | None] = with_mesh[0].data["mesh"] if with_mesh else {}
        open_axes = [axis for axis, size in sizes.items() if size is None]
        if not sizes or open_axes:
            missing = f"the sizes of {', '.join(open_axes)}" if open_axes else "a mesh section"
            raise MissingMeshError(
                f"the plan does not contain {missing}; pass mesh=, or write mesh: {{dp: 2, tp: 2}}",
                (with_mesh or files)[0].document.at(("mesh",)),
            )
        mesh = {axis: size for axis, size in sizes.items() if size is not None}
    axes = MeshAxes.of(mesh)
    for file in with_mesh:
        for axis in file.data["mesh"]:
            if axis not in axes:
                added = MeshAxes.of({**dict.fromkeys(file.data["mesh"], 1), **dict(zip(axes.names, axes.sizes))})
                is_part = all(name in file.data["mesh"] for name in axes)
                hint = f"add the missing axis with one rank, as in {str(added).replace(' ', '')}" if is_part else ""
                hint = hint or f"rename the axis in one of the two{did_you_mean(axis, axes.names)}"
                raise YamlPlanError(
                    f"the plan is for axes {', '.join(file.data['mesh'])}, but the mesh has {', '.join(axes.names)}; "
                    f"{hint}",
                    file.document.at(("mesh", axis)),
                )
    return mesh if isinstance(mesh, DeviceMesh) else axes


def _check_schema(data: Any, document: Document) -> None:
    import jsonschema

    def position(error: Any) -> tuple[int, int]:  # jsonschema's own order is that of a set
        source = document.at(_culprit(error, tuple(error.absolute_path)))
        return source.line, source.column or 0

    errors = jsonschema.Draft202012Validator(plan_schema()).iter_errors(data)
    first = min((_deepest(error) for error in errors), key=position, default=None)
    if first is not None:
        place: Place = tuple(first.absolute_path)
        raise YamlPlanError(_explain(first, place), document.at(_culprit(first, place)))


def _deepest(error: Any) -> Any:
    """The error of an alternative that is deepest in the data: its alternative is the one that the user meant."""
    while error.context:
        error = max(error.context, key=lambda e: (len(e.absolute_path), e.validator != "type"))
    return error


def _culprit(error: Any, place: Place) -> Place:
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        unknown = [key for key in error.instance if key not in error.schema.get("properties", {})]
        if unknown:
            return (*place, unknown[0])
    return place


def _explain(error: Any, place: Place) -> str:
    where = ".".join(map(str, place[:-1])) or "the plan"
    if error.validator == "additionalProperties":
        unknown = [key for key in error.instance if key not in error.schema["properties"]]
        known = list(error.schema["properties"])
        inside = ".".join(map(str, place)) or "a plan"
        return f"{unknown[0]!r} is not part of {inside} ({', '.join(known)}){did_you_mean(unknown[0], known)}"
    if error.validator == "pattern" and "R, S(dim)" in error.schema.get("description", ""):
        return f"{shown_text(error.instance)} is not a placement; expected {error.schema['description']}"
    if error.validator == "enum":
        options = [str(option) for option in error.validator_value]
        return (
            f"{_shown(error.instance)} is not one of {', '.join(options)}{did_you_mean(str(error.instance), options)}"
        )
    if error.validator == "const":
        return f"version {_shown(error.instance)}; this version of vescale reads version {error.validator_value}"
    if error.validator == "required":
        missing = [name for name in error.validator_value if name not in error.instance]
        return f"{'.'.join(map(str, place))} lacks {', '.join(missing)}"
    if error.validator == "type":
        expected = error.validator_value
        wanted = expected if isinstance(expected, str) else " or ".join(expected)
        names = {"object": "a mapping", "array": "a list", "string": "text", "integer": "an integer"}
        found = place[-1] if place else "the plan"
        return f"{found!r} in {where} is {_kind(error.instance)}; expected {names.get(wanted, wanted)}"
    if error.validator == "minProperties":
        return f"{place[-1]!r} in {where} is empty; name at least one axis, {{axis: placement}}"
    return f"{place[-1] if place else 'the plan'!r} in {where}: {error.message[:300]}"


def _shown(value: Any) -> str:
    return shown_text(value) if isinstance(value, str) else repr(value)[:100]


def _kind(value: Any) -> str:
    if value is None:
        return "empty"
    return {dict: "a mapping", list: "a list", str: "text", bool: "true/false", int: "a number", float: "a number"}.get(
        type(value), type(value).__name__
    )
