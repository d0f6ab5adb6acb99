"""``RecordedProgram``: recorded steps of a model as data, which another process can run."""

from __future__ import annotations

import os
from dataclasses import dataclass

from vescale.plans import MeshAxes
from vescale.static._record_reader import read_record
from vescale.static._record_values import RecordedStep, Site, expect
from vescale.static._record_writer import record_text

__all__ = ["RecordedProgram"]


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
