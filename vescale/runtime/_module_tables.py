"""What the modules of a model hold, to be put back when ``parallelize`` fails in the middle."""

from __future__ import annotations

from typing import Any

from torch import nn

from vescale.compat import note


class ModuleTables:
    """Classes and attributes of a model's modules, and what is in their tables: parameters, buffers, modules, hooks.

    Tables are the same objects after :meth:`restore`. What tensors hold is not kept: ``parallelize`` writes to none that the
    model had before.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept: list[tuple[nn.Module, type[nn.Module], dict[str, Any], list[tuple[Any, Any]]]] = []
        for module in model.modules():
            attributes = dict(vars(module))
            tables = [(value, type(value)(value)) for value in attributes.values() if _is_table(value)]
            self._kept.append((module, type(module), attributes, tables))

    def restore(self) -> None:
        for module, cls, attributes, tables in self._kept:
            if type(module) is not cls:
                note("runtime._module_tables:class", module)
                module.__class__ = cls
            vars(module).clear()
            vars(module).update(attributes)
            for table, before in tables:
                table.clear()
                table.update(before)


def _is_table(value: Any) -> bool:
    """Dicts and sets, also ordered ones, whose copy is made as they are."""
    return type(value).__name__ in ("dict", "OrderedDict", "set")
