"""Training loops of other libraries on a mesh: transformers' Trainer (and trainers made of it), accelerate, Lightning.

Nothing of these libraries is imported before one of the names is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vescale.integrations._lightning_strategy import MeshStrategy
    from vescale.integrations._one_process import hide_ranks, stay_on_device
    from vescale.integrations._trainer import MeshTrainer

_FILES = {
    "MeshStrategy": "_lightning_strategy",
    "MeshTrainer": "_trainer",
    "hide_ranks": "_one_process",
    "stay_on_device": "_one_process",
}

__all__ = ["MeshStrategy", "MeshTrainer", "hide_ranks", "stay_on_device"]


def __getattr__(name: str) -> Any:
    if name in _FILES:
        value = getattr(importlib.import_module(f"vescale.integrations.{_FILES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'vescale.integrations' has no attribute {name!r}")
