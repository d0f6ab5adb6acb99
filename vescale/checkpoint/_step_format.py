"""The format of vescale's own checkpoints, as an index: a step, or the folder of steps."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from vescale.checkpoint._manifest_text import ManifestError
from vescale.checkpoint._step_folder import (
    MANIFEST,
    complete_steps,
    find_problems,
    read_manifest,
    step_name,
    step_numbers,
)
from vescale.checkpoint._stored import Stored, StoredBox, StoredTensor
from vescale.errors import CheckpointWarning, DamagedFileError, NoSuchStepError, UnknownDtypeError

__all__ = ["is_step", "is_step_folder", "open_newest_step", "open_step"]


def is_step(path: Path) -> bool:
    """Also one that has lost its manifest."""
    return (path / MANIFEST).is_file() or (path.name.startswith("step-") and any(path.glob("data-*.bin")))


def is_step_folder(path: Path) -> bool:
    return bool(step_numbers(str(path)))


def open_newest_step(path: Path) -> Stored:
    """Of a folder of steps. Newer ones that are not complete are passed by with a warning. Raises CheckpointError if none is
    complete, with the reasons."""
    problems: dict[int, list[str]] = {}
    steps = complete_steps(str(path), problems.__setitem__)
    if not steps:
        found = "; ".join(text for texts in problems.values() for text in texts)
        raise NoSuchStepError(f"{path} has no complete step: {found}")
    for step, texts in sorted(problems.items()):
        if step > steps[-1]:
            text = f"step {step} is passed by, because it is not complete: {'; '.join(texts[:5])}"
            warnings.warn(text, CheckpointWarning, stacklevel=3)
    return open_step(path / step_name(steps[-1]))


def open_step(path: Path, *, check_sizes: bool = True) -> Stored:
    """``values`` is the manifest without its index of files and tensors. Raises CheckpointError for damaged ones, and files
    of other sizes."""
    if check_sizes and (problems := find_problems(str(path))):
        raise DamagedFileError(f"{path} is not complete: {'; '.join(problems)}")
    try:
        manifest = read_manifest(str(path))
    except ManifestError as error:
        raise DamagedFileError(str(error)) from error
    files = [file["name"] for file in manifest["files"]]
    for name in files:
        if os.path.basename(name) != name:
            raise DamagedFileError(f"{path}: the manifest names a file {name!r} outside of the step")
    values = {key: value for key, value in manifest.items() if key not in ("files", "tensors")}
    return Stored(path, _Tensors(manifest["tensors"], files, values["values"]), "vescale", values)


class _Tensors(Mapping[str, StoredTensor]):
    """Entries become values when they are asked for: there may be a million boxes. Tied tensors have all of their names."""

    def __init__(self, entries: Mapping[str, Any], files: list[str], values: Mapping[str, Any]) -> None:
        self._entries, self._files = entries, files
        aliases = (values["model"] or {"aliases": {}})["aliases"]
        self._names = {name: name for name in entries}
        self._names |= {
            f"model.{alias}": f"model.{name}" for alias, name in aliases.items() if f"model.{name}" in entries
        }
        self._made: dict[str, StoredTensor] = {}

    def __getitem__(self, name: str) -> StoredTensor:
        own = self._names[name]
        if own not in self._made:
            entry = self._entries[own]
            if any(not 0 <= file < len(self._files) for _, _, file, *_ in entry["boxes"]):
                raise DamagedFileError(f"{name}: the manifest places it in a file that it does not list")
            boxes = tuple(
                StoredBox(tuple(offset), tuple(sizes), self._files[file], start)
                for offset, sizes, file, start, _ in entry["boxes"]
            )
            dtype = getattr(torch, entry["dtype"], None)
            if not isinstance(dtype, torch.dtype):
                raise UnknownDtypeError(f"{name} has dtype {entry['dtype']!r}, which this torch does not know")
            self._made[own] = StoredTensor(tuple(entry["shape"]), dtype, boxes)
        return self._made[own]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
