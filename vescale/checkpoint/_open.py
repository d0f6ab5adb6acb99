"""Open a checkpoint, whatever wrote it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vescale.checkpoint._dcp import is_dcp, open_dcp
from vescale.checkpoint._safetensors import is_safetensors, open_safetensors
from vescale.checkpoint._step_format import is_step, is_step_folder, open_newest_step, open_step
from vescale.checkpoint._stored import Stored
from vescale.checkpoint._torch_save import is_torch_save, open_torch_save
from vescale.errors import UnknownFormatError


@dataclass(frozen=True)
class Format:
    """How checkpoints of one format are recognized and indexed.

    Attributes:
        name: ``Stored.format``.
        matches: whether a path (a folder or a file, which exists) is one of this format; looks at names only.
        open: the index of such a path; executes no code from it. Raises CheckpointError where it is damaged.
    """

    name: str
    matches: Callable[[Path], bool]
    open: Callable[[Path], Stored]


FORMATS: tuple[Format, ...] = (
    Format("vescale", is_step, open_step),
    Format("vescale", is_step_folder, open_newest_step),
    Format("dcp", is_dcp, open_dcp),
    Format("safetensors", is_safetensors, open_safetensors),
    Format("torch", is_torch_save, open_torch_save),
)
"""In the order in which they are tried."""


def open_stored(path: str | os.PathLike[str]) -> Stored:
    """The index of a checkpoint: a step of :class:`Checkpointer` or its folder (then the newest complete step), or any other
    format of ``FORMATS``. No communication; only headers are read.

    Raises CheckpointError where nothing is there, or nothing that is known.

    Args:
        path: a folder or a file.
    """
    found = Path(path)
    if not found.exists():
        raise UnknownFormatError(f"{found} does not exist; expected the folder or file of a checkpoint")
    for known in FORMATS:
        if known.matches(found):
            return known.open(found)
    expected = ", ".join(dict.fromkeys(known.name for known in FORMATS))
    raise UnknownFormatError(f"{found} is not a checkpoint in a known format; expected one of: {expected}")
