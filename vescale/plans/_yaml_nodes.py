"""YAML text to plain data with the position of every value, within limits.

Only strings, integers, booleans, nulls, lists and mappings are built. Limits are applied while the text is composed,
before anything traverses the result: an alias bomb is small until it is expanded.
"""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import regex
import yaml

from vescale.errors import PlanError, Source, YamlPlanError

MAX_BYTES = 500_000  # of a plan and all that it includes
MAX_DEPTH = 20
MAX_NODES = 10_000
MAX_TEXT = 20_000  # characters of one value: the units of a ragged placement over thousands of ranks


@dataclass(frozen=True)
class YamlLimits:
    """What a text may have at most; ``noun`` and ``advice`` are for the error."""

    noun: str = "plan"
    num_bytes: int = MAX_BYTES
    num_nodes: int = MAX_NODES
    advice: str = "write one entry, with a path that matches many tensors"


_OF_PLANS = YamlLimits()

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


def load_yaml(file: str | os.PathLike[str], limits: YamlLimits = _OF_PLANS) -> Document:
    """Read a file, or text (a str with a line break). Raises PlanError with line and column.

    The same text, under the same name, as at an earlier call gives the same document, which must not be changed.
    """
    if isinstance(file, str) and "\n" in file:
        text, name = file, "<yaml>"
        if len(text) > limits.num_bytes:
            raise _too_large(name, limits)
    else:
        text, name = _text_of(Path(file), limits), str(file)
    return _document_of(text, name, limits)


@functools.lru_cache(maxsize=32)
def _document_of(text: str, name: str, limits: YamlLimits) -> Document:
    document = Document(name, num_characters=len(text))
    try:
        loader = _BoundedLoader(text, name, limits)
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


def _text_of(path: Path, limits: YamlLimits) -> str:
    is_special = False
    with contextlib.suppress(OSError, ValueError):  # the error is raised below
        is_special = path.exists() and not path.is_file() and not path.is_dir()
    if is_special:  # a pipe's writer may never come, and a device has no end
        raise YamlPlanError(
            f"cannot read the {limits.noun} {str(path)!r}: it is a pipe or device; pass the path of a YAML file"
        )
    try:
        with path.open("rb") as opened:
            data = opened.read(limits.num_bytes + 1)
    except OSError as error:
        raise YamlPlanError(
            f"cannot read the {limits.noun} {str(path)!r}: {error.strerror}; pass the path of a YAML file"
        ) from None
    except ValueError as error:  # a null character in the path
        raise YamlPlanError(
            f"cannot read the {limits.noun} {str(path)!r}: {error}; pass the path of a YAML file"
        ) from None
    if len(data) > limits.num_bytes:
        raise _too_large(str(path), limits)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise YamlPlanError(
            f"the {limits.noun} is not UTF-8 text: {error.reason} at byte {error.start}", Source(str(path), 1, 1)
        ) from None


def _too_large(name: str, limits: YamlLimits) -> PlanError:
    return YamlPlanError(
        f"the {limits.noun} has more than {limits.num_bytes} bytes; {limits.advice}", Source(name, 1, 1)
    )


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

    def __init__(self, text: str, name: str, limits: YamlLimits) -> None:
        super().__init__(text)
        self._document_name, self._limits = name, limits
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
            return f"the {self._limits.noun} is nested deeper than {MAX_DEPTH} levels"
        if self._num_nodes > self._limits.num_nodes:
            return f"the {self._limits.noun} has more than {self._limits.num_nodes} parts; {self._limits.advice}"
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
