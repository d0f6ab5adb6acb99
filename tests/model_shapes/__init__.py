"""Parameter shapes of real models, grouped into the units that communicate together (tools/build_shapes.py)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = "(root)"  # path of the unit of all parameters outside repeated blocks


@dataclass(frozen=True)
class Unit:
    """Parameters that share buffers, and how many units like it the model has. ``path`` is that of the first."""

    path: str
    count: int
    parameters: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter, by its name within the unit."""
        return dict(self.parameters)


@dataclass(frozen=True)
class ModelShapes:
    """A model as the planner sees it."""

    name: str
    source: str
    units: tuple[Unit, ...]

    def to_json(self) -> str:
        """One JSON object, a parameter a line."""
        units = []
        for unit in self.units:
            lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(shape)}" for name, shape in unit.parameters)
            units.append(
                f'  {{"path": {json.dumps(unit.path)}, "count": {unit.count}, "parameters": {{\n{lines}\n  }}}}'
            )
        head = {"format": "vescale.shapes", "version": 1, "name": self.name, "source": self.source}
        return json.dumps(head)[:-1] + ', "units": [\n' + ",\n".join(units) + "\n]}\n"


def group_units(shapes: Mapping[str, Iterable[int]]) -> tuple[Unit, ...]:
    """Cut a model into units by parameter names: each repeated block (``path.<number>``) is one, the rest is another.

    Units whose parameters have equal names and shapes are returned once, with their count, in order of appearance.
    """
    found: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        depth = next((i for i, part in enumerate(parts) if part.isdigit()), -1) + 1
        path, rest = ".".join(parts[:depth]), ".".join(parts[depth:])
        found.setdefault(path, []).append((rest or parts[-1], tuple(shape)))
    counts: dict[tuple[tuple[str, tuple[int, ...]], ...], int] = {}
    first: dict[tuple[tuple[str, tuple[int, ...]], ...], str] = {}
    for path, parameters in found.items():
        key = tuple(parameters)
        counts[key] = counts.get(key, 0) + 1
        first.setdefault(key, path)
    return tuple(Unit(first[key] or ROOT, count, key) for key, count in counts.items())


def shape_list_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def shape_list(name: str) -> ModelShapes:
    """A list by its name, such as ``"deepseek-v3"``."""
    data = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    units = tuple(
        Unit(unit["path"], unit["count"], tuple((key, tuple(shape)) for key, shape in unit["parameters"].items()))
        for unit in data["units"]
    )
    return ModelShapes(data["name"], data["source"], units)
