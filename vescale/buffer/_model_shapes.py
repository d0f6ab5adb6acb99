"""Parameter shapes of a model, grouped into the units that communicate together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from vescale.buffer._layout import integers
from vescale.errors import LayoutTextError, UnknownTensorError

_FORMAT = "vescale.shapes"
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

    def full_name(self, name: str) -> str:
        """The name in the model of the first such unit's parameter."""
        return name if self.path == ROOT else f"{self.path}.{name}"


@dataclass(frozen=True)
class ModelShapes:
    """A model as the planner sees it."""

    name: str
    source: str
    units: tuple[Unit, ...]

    def to_json(self) -> str:
        """One JSON object, a parameter a line; :meth:`from_json` reads it."""
        units = []
        for unit in self.units:
            lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(shape)}" for name, shape in unit.parameters)
            units.append(
                f'  {{"path": {json.dumps(unit.path)}, "count": {unit.count}, "parameters": {{\n{lines}\n  }}}}'
            )
        head = {"format": _FORMAT, "version": 1, "name": self.name, "source": self.source}
        return json.dumps(head)[:-1] + ', "units": [\n' + ",\n".join(units) + "\n]}\n"

    @classmethod
    def from_json(cls, text: str) -> ModelShapes:
        """Read :meth:`to_json`'s text.

        Raises:
            ValueError: the text is not a shape list.
        """
        try:
            data: Any = json.loads(text)
            if data["format"] != _FORMAT:
                raise LayoutTextError(f"format is {data['format']!r}")
            units = tuple(
                Unit(
                    path=str(unit["path"]),
                    count=integers("count", [unit["count"]], at_least=1)[0],
                    parameters=tuple((name, integers(name, shape)) for name, shape in unit["parameters"].items()),
                )
                for unit in data["units"]
            )
            return cls(str(data["name"]), str(data["source"]), units)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LayoutTextError(
                f"not a shape list ({type(error).__name__}: {error}); expected the text of ModelShapes.to_json with "
                f"format {_FORMAT!r}. Build it with tools/build_shapes.py."
            ) from error


def group_units(shapes: Mapping[str, Iterable[int]]) -> tuple[Unit, ...]:
    """Cut a model into units by parameter names: each repeated block (``path.<number>``) is one, the rest is another.

    Units whose parameters have equal names and shapes are returned once, with their count, in order of appearance.
    """
    found: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        depth = next((i for i, part in enumerate(parts) if part.isdigit()), -1) + 1
        path, rest = ".".join(parts[:depth]), ".".join(parts[depth:])
        found.setdefault(path, []).append((rest or parts[-1], integers(name, shape)))
    counts: dict[tuple[tuple[str, tuple[int, ...]], ...], int] = {}
    first: dict[tuple[tuple[str, tuple[int, ...]], ...], str] = {}
    for path, parameters in found.items():
        key = tuple(parameters)
        counts[key] = counts.get(key, 0) + 1
        first.setdefault(key, path)
    return tuple(Unit(first[key] or ROOT, count, key) for key, count in counts.items())


def shape_list_names() -> tuple[str, ...]:
    """Names of the shape lists that are shipped."""
    folder = resources.files("vescale.buffer") / "shapes"
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")))


def shape_list(name: str) -> ModelShapes:
    """A shipped shape list, e.g. ``"deepseek-v3"``.

    Raises:
        KeyError: there is no list of this name.
    """
    if name not in shape_list_names():
        raise UnknownTensorError(f"no shape list {name!r}; there are {', '.join(shape_list_names())}.")
    return ModelShapes.from_json((resources.files("vescale.buffer") / "shapes" / f"{name}.json").read_text("utf-8"))
