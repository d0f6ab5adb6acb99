"""Runs of equal modules in lists: the layers of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Repeats:
    """Equal modules of a list that follow each other.

    Attributes:
        path: of the list.
        names: of the modules in it. The first stands for all but the last one.
    """

    path: str
    names: tuple[str, ...]

    @property
    def stand_in(self) -> str:
        return f"{self.path}.{self.names[0]}".lstrip(".")

    @property
    def count(self) -> int:
        """How many modules the first stands for."""
        return len(self.names) - 1

    def holds(self, module: str | None) -> bool:
        """Whether a module is the first one, or inside of it."""
        return module is not None and (module == self.stand_in or module.startswith(f"{self.stand_in}."))

    def paths(self) -> Iterator[str]:
        """Of the modules that the first stands for."""
        return (f"{self.path}.{name}".lstrip(".") for name in self.names[:-1])


def repeats_of(model: nn.Module, least: int = 4, apart: Collection[str] = ()) -> tuple[Repeats, ...]:
    """Runs of at least ``least`` equal modules in lists, those of a list in a list with the outer one alone.

    ``apart``: paths of modules with which a new run begins, as stages of a pipeline do.
    """

    def visit(module: nn.Module, path: str) -> Iterator[Repeats]:
        runs = list(_runs(module, path, least, apart)) if isinstance(module, nn.ModuleList) else []
        yield from runs
        repeated = {name for run in runs for name in run.names}
        for name, child in module.named_children():
            if name not in repeated:
                yield from visit(child, f"{path}.{name}" if path else name)

    return tuple(visit(model, ""))


def _runs(modules: nn.ModuleList, path: str, least: int, apart: Collection[str]) -> Iterator[Repeats]:
    run: list[str] = []
    kind: Any = None
    for name, child in modules.named_children():
        own = _kind(child)
        if own != kind or f"{path}.{name}".lstrip(".") in apart:
            if len(run) >= least:
                yield Repeats(path, tuple(run))
            run, kind = [], own
        run.append(name)
    if len(run) >= least:
        yield Repeats(path, tuple(run))


def _kind(module: nn.Module) -> Any:
    """Equal for modules whose forwards use the same memory."""
    return (
        tuple((name, type(part)) for name, part in module.named_modules()),
        tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters(remove_duplicate=False)),
    )
