"""YAML text to plain data with the place of every value; bounded, so that no file can hurt.

Only strings, numbers, booleans, nulls, lists and mappings are built. Limits are applied while the text is composed,
before anything walks the result: an alias bomb is small until something expands it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vescale.plans._errors import PlanError, Source

__all__ = ["Document", "Place", "load_yaml"]

MAX_BYTES = 1_000_000
MAX_DEPTH = 20
MAX_NODES = 50_000

# The keys and indices that lead to a value from the document's root.
Place = tuple[str | int, ...]

_SCALARS = {
    "tag:yaml.org,2002:str",
    "tag:yaml.org,2002:int",
    "tag:yaml.org,2002:float",
    "tag:yaml.org,2002:bool",
    "tag:yaml.org,2002:null",
}


@dataclass
class Document:
    """Plain data and where each part of it stands in the text."""

    name: str
    data: Any = None
    keys: dict[Place, Source] = field(default_factory=dict)
    values: dict[Place, Source] = field(default_factory=dict)

    def at(self, place: Place) -> Source:
        """The source of a key (of a mapping's entry) or value; of the nearest one around it that is known."""
        while True:
            found = self.keys.get(place) or self.values.get(place)
            if found is not None or not place:
                return found or Source(self.name, 1, 1)
            place = place[:-1]


def load_yaml(file: str | os.PathLike[str]) -> Document:
    """Read a file, or text (a str with a line break). Raises PlanError with line and column."""
    text, name = _text_of(file)
    document = Document(name)
    if len(text) > MAX_BYTES:
        raise PlanError(f"the plan has {len(text)} bytes; at most {MAX_BYTES} are read", Source(name, 1, 1))
    loader = yaml.SafeLoader(text)
    try:
        _check_events(text, document)
        node = loader.get_single_node()
        document.data = None if node is None else _build(node, (), document, loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Source(name, mark.line + 1, mark.column + 1) if mark else Source(name, 1, 1)
        detail = error.problem or error.context or "not YAML"
        raise PlanError(f"not YAML: {detail}{_advice(detail)}", place) from None
    except yaml.reader.ReaderError as error:
        raise PlanError(f"not YAML text: {error.reason} at character {error.position}", Source(name, 1, 1)) from None
    finally:
        loader.dispose()
    return document


def _text_of(file: str | os.PathLike[str]) -> tuple[str, str]:
    if isinstance(file, str) and "\n" in file:
        return file, "<yaml>"
    path = Path(file)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise PlanError(
                f"the plan has {path.stat().st_size} bytes; at most {MAX_BYTES} are read", Source(str(path), 1)
            )
        return path.read_text(encoding="utf-8"), str(path)
    except OSError as error:
        raise PlanError(f"cannot read the plan {str(file)!r}: {error.strerror}; give the path of a YAML file") from None
    except UnicodeDecodeError as error:
        raise PlanError(
            f"the plan is not UTF-8 text: {error.reason} at byte {error.start}", Source(str(path), 1)
        ) from None


def _advice(detail: str) -> str:
    if "\\t" in detail:
        return "; indent with spaces"
    if "cannot start any token" in detail or "did not find expected" in detail or "expected <block end>" in detail:
        return "; quote paths that hold special characters, for example '<in:input_ids>': {dp: S(0)}"
    if "found undefined alias" in detail or "while scanning an alias" in detail:
        return "; quote a path that begins with *"
    return ""


def _check_events(text: str, document: Document) -> None:
    """Depth, size, aliases and tags, on the event stream: nothing is built yet."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        mark: Any = event.start_mark
        place = Source(document.name, mark.line + 1, mark.column + 1)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise PlanError(f"the plan is nested deeper than {MAX_DEPTH} levels", place)
        if count > MAX_NODES:
            raise PlanError(f"the plan has more than {MAX_NODES} parts", place)
        if isinstance(event, yaml.AliasEvent):
            raise PlanError(
                f"alias *{event.anchor}: plans have no aliases; use vars: and ${{name}} to share text", place
            )
        tag = getattr(event, "tag", None)
        if tag is not None and not (isinstance(event, yaml.ScalarEvent) and tag in _SCALARS):
            raise PlanError(f"tag {tag!r}: plans have no tags; write a plain value", place)


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
                raise PlanError("a key is not text; write name: value", source)
            if key in data:
                first = document.keys[(*place, key)]
                raise PlanError(
                    f"key {key!r} stands here again (first on line {first.line}); keep one of the two", source
                )
            document.keys[(*place, key)] = source
            data[key] = _build(value_node, (*place, key), document, loader)
        return data
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, (*place, index), document, loader) for index, item in enumerate(node.value)]
    if node.tag not in _SCALARS:  # dates and the like: a plan has none, so it is text
        return node.value
    return loader.construct_object(node)
