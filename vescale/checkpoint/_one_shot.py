"""``save`` and ``load``: one checkpoint at a path."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from vescale.checkpoint._dcp import is_dcp, open_dcp
from vescale.checkpoint._hf_conversion import is_transformers_model
from vescale.checkpoint._hf_load import load_hf
from vescale.checkpoint._loading import load_stored
from vescale.checkpoint._replicas import together
from vescale.checkpoint._safetensors import is_safetensors, open_safetensors
from vescale.checkpoint._saving import Saver, Target
from vescale.checkpoint._snapshot import take_snapshot
from vescale.checkpoint._step_format import is_step, is_step_folder, open_newest_step, open_step
from vescale.checkpoint._stored import Stored
from vescale.checkpoint._torch_save import is_torch_save, open_torch_save
from vescale.errors import SaveFailedError, UnknownFormatError

# Open a checkpoint, whatever wrote it.


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


def save(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Any = None,
    overwrite: bool = False,
    **more: Any,
) -> None:
    """Save to ``path``, which becomes a folder like a step of :class:`Checkpointer`; returns when it is on the disk.

    Called by every rank. Arguments, errors and communication are those of ``Checkpointer.save``. The folder appears, or with
    ``overwrite=True`` is exchanged, as a whole.

    Raises CheckpointError if ``path`` already exists, or, with ``overwrite=True``, is not a checkpoint.

    Args:
        model, optimizer, more: what to save, as of ``Checkpointer.save``.
    """
    found = Path(os.path.abspath(path))
    with together("save"):
        snapshot = take_snapshot(model, optimizer, more)
        if os.path.lexists(found) and not (overwrite and is_step(found)):
            expected = (
                "a checkpoint to overwrite"
                if overwrite
                else "a path that does not exist; pass overwrite=True to replace a checkpoint"
            )
            raise SaveFailedError(f"{found} already exists; expected {expected}")
    saver = Saver(str(found.parent), "save", asynchronous=False, locks=False)
    try:
        saver.save(lambda: (snapshot, Target(found.name, replace=overwrite)))
    finally:
        saver.close()


def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Any = None,
    strict: bool = True,
    rng: bool = True,
    cast: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Fill model and optimizer in place from a checkpoint of any known format; see ``Checkpointer.restore``.

    ``path``: what :func:`save` wrote, a step, a folder of steps (the newest that is complete), or a foreign checkpoint,
    whose names may begin with ``model.`` or ``module.``. No code in it is executed. Called by every rank. Safetensors for a
    model of transformers are loaded by :func:`load_hf`, with its names and conversions; values are then cast to the
    model's.

    Returns the other saved values, as ``Checkpointer.restore`` does. Of a ``torch.save`` file or a DCP folder these are
    plain values without those of optimizers, as JSON has them: keys of dicts are text, tuples are lists.

    Raises CheckpointError for a path that is no checkpoint, and for what does not fit; on every rank, before anything is
    changed.

    Args:
        model, optimizer, strict, rng, cast, more: as of ``Checkpointer.restore``.
    """
    with together("load"):
        try:
            stored = open_stored(path)
        except OSError as error:
            raise UnknownFormatError(f"{path}: {error}") from error
    if stored.format == "safetensors" and model is not None and optimizer is None and is_transformers_model(model):
        different = load_hf(model, path, strict=strict)
        return {} if strict else {"not_loaded": different.as_dict()}
    return load_stored(lambda: stored, model, optimizer, more, strict=strict, rng=rng, cast=cast, call="load")
