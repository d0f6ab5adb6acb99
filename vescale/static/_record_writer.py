"""A recorded program as YAML text: tables of types, functions and patches, to which modules refer by number."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import yaml

from vescale.plans import MeshAxes
from vescale.static._placement_names import placement_name
from vescale.static._record_values import (
    Placements,
    RecordedBoundary,
    RecordedFunction,
    RecordedModule,
    RecordedPatch,
    RecordedSite,
    RecordedStep,
    RecordedType,
)

FORMAT = 1
THE_MODEL = "<model>"  # in place of its path, which is empty

T = TypeVar("T")


class _Table(Generic[T]):
    """Values that are written once, in the order of their first use."""

    def __init__(self, write: Callable[[T], Any]) -> None:
        self._write = write
        self._numbers: dict[T, int] = {}
        self.rows: list[Any] = []

    def number(self, value: T) -> int:
        found = self._numbers.get(value)
        if found is None:
            row = self._write(value)  # which may add others first
            found = self._numbers[value] = len(self.rows)
            self.rows.append(row)
        return found

    def numbers(self, values: Iterable[T]) -> list[int]:
        return [self.number(value) for value in values]


def record_text(
    axes: MeshAxes, device: str, plan: str, versions: Sequence[tuple[str, str]], steps: Sequence[RecordedStep]
) -> str:
    """Raises StaticRecordError for a placement that has no name."""
    writer = _Writer(axes)
    written = [writer.step(step) for step in steps]
    data: dict[str, Any] = {
        "static_record": FORMAT,
        "made_by": dict(versions),
        "mesh": dict(zip(axes.names, axes.sizes)),
        "device": device,
        "plan": plan,
        "types": writer.types.rows,
        "functions": writer.functions.rows,
        "patches": writer.patches.rows,
        "steps": written,
    }
    data["digest"] = content_digest(data)
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def content_digest(data: Mapping[str, Any]) -> str:
    """Of all but the digest itself: a record that somebody has edited is not run."""
    content = {key: value for key, value in data.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _section_of(action: str) -> str:
    """Where in a record sites with an action stand."""
    return action if action in ("redistribute", "check") else "annotate"


class _Writer:
    def __init__(self, axes: MeshAxes) -> None:
        self._axes = axes
        self.types: _Table[RecordedType] = _Table(self._type)
        self.functions: _Table[RecordedFunction] = _Table(lambda f: _Flow(vars(f)))
        self.patches: _Table[RecordedPatch] = _Table(self._patch)

    def step(self, step: RecordedStep) -> dict[str, Any]:
        grads: dict[Placements, list[str]] = {}
        for name, placements in step.grads:
            grads.setdefault(placements, []).append(name)
        written: dict[str, Any] = {"call": step.call, "draws": step.draws, "recomputes": step.recomputes}
        if step.coordinate is not None:
            written["coordinate"] = _FlowList(step.coordinate)
        for name in ("inputs", "outputs", "hidden"):
            written[name] = _FlowList(self.types.numbers(getattr(step, name)))
        written["grads"] = [{"annotate": self._placements(p), "names": names} for p, names in grads.items()]
        if step.path:
            written["path"] = _FlowList(step.path)
        written["functions"] = _FlowList(self.functions.numbers(step.functions))
        written["modules"] = {module.path or THE_MODEL: self._module(module) for module in step.modules}
        return written

    def _module(self, module: RecordedModule) -> dict[str, Any]:
        written: dict[str, Any] = {"state": module.state}
        if not module.ran:
            written["ran"] = False
        if module.eager:
            written["eager"] = module.eager
        if module.patch is not None:
            written["patch"] = self.patches.number(module.patch)
        for name in ("inputs", "outputs"):
            if getattr(module, name) is not None:
                written[name] = self.types.numbers(getattr(module, name))
        if module.boundaries:
            return {**written, "redistribute": [self._boundary(boundary) for boundary in module.boundaries]}
        return _Flow(written)

    def _boundary(self, boundary: RecordedBoundary) -> dict[str, Any]:
        written: dict[str, Any] = {"entry": boundary.entry}
        written["tensors"] = [self.types.numbers(pair) for pair in boundary.tensors]
        if boundary.communication:
            written["communication"] = list(boundary.communication)
        return _Flow(written)

    def _patch(self, patch: RecordedPatch) -> dict[str, Any]:
        written: dict[str, Any] = {"function": self.functions.number(patch.function)}
        for section in ("redistribute", "check", "annotate"):
            sites = [self._site(site) for site in patch.sites if _section_of(site.action) == section]
            if sites:
                written[section] = sites
        if patch.calls:
            written["calls"] = [
                _Flow(
                    node=node,
                    functions=[
                        [self.functions.number(function), None if inner is None else self.patches.number(inner)]
                        for function, inner in called
                    ],
                )
                for node, called in patch.calls
            ]
        for name in ("refused", "refused_else", "refused_false", "refused_true", "marked"):
            if getattr(patch, name):
                written[name] = _FlowList(getattr(patch, name))
        return written

    def _site(self, site: RecordedSite) -> dict[str, Any]:
        written: dict[str, Any] = {
            "function": site.function,
            "line": site.line,
            "column": site.column,
            "node": site.node,
        }
        if site.action in ("redistribute", "check"):
            written |= {"inputs": self.types.numbers(site.inputs), "outputs": self.types.numbers(site.outputs)}
        if site.action == "redistribute":
            written["reason"] = site.reason
            if site.communication:
                written["communication"] = list(site.communication)
        elif site.action != "check":
            written |= {"action": site.action, "factors": list(site.factors)}
        return _Flow(written)

    def _type(self, kind: RecordedType) -> dict[str, Any]:
        written: dict[str, Any] = {"kind": kind.kinds(self._axes)}
        if kind.placements is not None:
            written["placements"] = self._placements(kind.placements)
        if kind.grad is not None:
            written["grad"] = self._placements(kind.grad)
        written["factors"] = list(kind.factors)
        if kind.sizes:
            written["sizes"] = [list(size) for size in kind.sizes]
        return _Flow(written)

    def _placements(self, placements: Placements) -> dict[str, str]:
        return _Flow(zip(self._axes.names, map(placement_name, placements), strict=True))


class _Flow(dict[str, Any]):
    """A mapping in braces, on one line if it fits."""


class _FlowList(list[Any]):
    """A list in brackets."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    _Flow, lambda dumper, data: dumper.represent_mapping("tag:yaml.org,2002:map", data, flow_style=True)
)
_Dumper.add_representer(
    _FlowList, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)
)
