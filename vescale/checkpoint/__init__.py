"""Checkpoints that survive crashes, load on any mesh, and go to and from Hugging Face.

The names are imported on first use: the process that writes asynchronous saves runs modules of this package without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from vescale.errors import CheckpointError, CheckpointWarning

if TYPE_CHECKING:
    from vescale.checkpoint._checkpointer import Checkpointer
    from vescale.checkpoint._hf_export import export_hf
    from vescale.checkpoint._hf_load import load_hf
    from vescale.checkpoint._one_shot import load, open_stored, save
    from vescale.checkpoint._reader import read_tensors
    from vescale.checkpoint._simulated import leave_files_alone
    from vescale.checkpoint._stored import Stored, StoredBox, StoredTensor
    from vescale.checkpoint._verification import verify

_FILES = {
    "_checkpointer": "Checkpointer",
    "_hf_export": "export_hf",
    "_hf_load": "load_hf",
    "_one_shot": "load save open_stored",
    "_reader": "read_tensors",
    "_simulated": "leave_files_alone",
    "_stored": "Stored StoredBox StoredTensor",
    "_verification": "verify",
}
_MODULES = {name: file for file, names in _FILES.items() for name in names.split()}

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "Checkpointer",
    "Stored",
    "export_hf",
    "load",
    "load_hf",
    "open_stored",
    "read_tensors",
    "save",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(importlib.import_module(f"vescale.checkpoint.{_MODULES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'vescale.checkpoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
