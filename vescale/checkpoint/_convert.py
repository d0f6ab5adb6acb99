"""A checkpoint in another format: streamed, in one process, into a folder that appears as a whole."""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from vescale._version import __version__
from vescale.checkpoint._data_file import align, write_data_file
from vescale.checkpoint._hf_conversion import copy_beside
from vescale.checkpoint._safetensors import create_file, index_of, plan_files, write_block
from vescale.checkpoint._saving import dtype_name
from vescale.checkpoint._step_folder import commit, pack_part
from vescale.checkpoint._step_format import decode
from vescale.checkpoint._stored import Stored, StoredTensor
from vescale.checkpoint._stored_blocks import BLOCK_BYTES, block_shapes, block_values, blocks_of
from vescale.checkpoint._torch_save import with_bytes
from vescale.compat import bytes_of
from vescale.errors import ConvertError

Progress = Callable[[int], None]


def num_bytes(tensor: StoredTensor) -> int:
    """Of a tensor's elements."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def plain_values(stored: Stored) -> dict[str, Any]:
    """What a checkpoint holds beside its tensors, by name."""
    if stored.format != "vescale":
        return dict(stored.values)
    saved = stored.values.get("values") or {}
    found = {"step": stored.values["step"]} if stored.values.get("step") is not None else {}
    found |= {key: decode(value, str) for key, value in (saved.get("beside") or {}).items()}
    for name, optimizer in (saved.get("optimizers") or {}).items():
        found[f"{name}.param_groups"] = decode(optimizer["param_groups"], str)
    return found


def convert(
    stored: Stored,
    target: Path,
    to: str,
    *,
    max_shard_size: int | str = "5GB",
    progress: Progress = lambda count: None,
) -> list[str]:
    """Write a checkpoint to the folder ``target``, which must not exist, in the format ``to``; returns what was left out.

    Names of tensors stay as they are, except that vescale's own format has the prefix ``model.`` where the source has none
    (``safetensors``); to safetensors the prefix is removed. Memory: 64 MiB and the index. ``progress`` is called with
    numbers of bytes.

    Raises CheckpointError where the target exists, or cannot hold what the source has; the target is then not there.
    """
    if os.path.lexists(target):
        raise ConvertError(f"{target} already exists; choose a new folder, or remove it")
    temporary = target.parent / f"{target.name}.tmp-{uuid.uuid4().hex[:16]}"
    try:
        temporary.mkdir(parents=True)
        left = TARGETS[to](stored, temporary, progress, max_shard_size)
        if to == "vescale":  # commits itself: the manifest is last
            return left
        for path in temporary.rglob("*"):
            if path.is_file():
                _sync(path)
        _sync(temporary)
        os.rename(temporary, target)
        _sync(target.parent)
    except OSError as error:
        raise ConvertError(f"{target}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return left


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _own(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Each stored tensor under one name: tied ones have several in vescale's format."""
    kept: dict[int, str] = {}
    for name, tensor in tensors.items():
        kept.setdefault(id(tensor), name)
    return {name: tensors[name] for name in kept.values()}


def _to_safetensors(stored: Stored, folder: Path, progress: Progress, max_shard_size: int | str) -> list[str]:
    tensors = _own(stored.tensors)
    model = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    # In vescale's own format a model's tensors, and only these, have the prefix.
    chosen = model if stored.format == "vescale" else tensors
    if not chosen:
        raise ConvertError(
            f"{stored.folder} holds no tensors of a model, and safetensors files can hold nothing else; expected a "
            "checkpoint of a model"
        )
    new = {name: name.removeprefix("model.") if stored.format == "vescale" else name for name in chosen}
    files = plan_files({new[name]: (t.shape, t.dtype) for name, t in chosen.items()}, max_shard_size)
    where = {name: file for file in files for name in file.tensors}
    for file in files:
        create_file(folder / file.name, file)
    for name in sorted(chosen, key=lambda name: where[new[name]].name):
        file = where[new[name]]
        descriptor = os.open(folder / file.name, os.O_WRONLY)
        try:
            for offset, values in blocks_of(stored, name):
                progress(write_block(descriptor, file.tensors[new[name]], offset, values))
        finally:
            os.close(descriptor)
    if len(files) > 1:
        (folder / "model.safetensors.index.json").write_text(index_of(files), encoding="utf-8")
    if stored.format == "safetensors":
        copy_beside(stored.folder, folder, configuration=True)
    return sorted((tensors.keys() - chosen.keys()) | (plain_values(stored).keys() - {"metadata"}))


class _StreamingPlanner(DefaultSavePlanner):
    """Chunks of bounded size, each read when it is written."""

    def __init__(self, stored: Stored, values: Mapping[str, Any], progress: Progress) -> None:
        super().__init__(flatten_state_dict=False)
        self._stored, self._values, self._progress = stored, values, progress

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, tensor in _own(self._stored.tensors).items():
            shapes = list(block_shapes(tensor.shape, BLOCK_BYTES // tensor.dtype.itemsize))
            for offset, sizes in shapes or [((0,) * len(tensor.shape), tensor.shape)]:
                chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))
                data = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape))
                items.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._values]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._values[index.fqn]

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.tensor_data is None:
            return super().resolve_data(write_item)
        chunk = write_item.tensor_data.chunk
        values = block_values(self._stored, write_item.index.fqn, chunk.offsets, chunk.sizes)
        self._progress(values.nbytes)
        return values


def _to_dcp(stored: Stored, folder: Path, progress: Progress, max_shard_size: int | str) -> list[str]:
    values = {name: with_bytes(value) for name, value in plain_values(stored).items() if name not in stored.tensors}
    planner = _StreamingPlanner(stored, values, progress)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
        dcp.save({}, storage_writer=dcp.FileSystemWriter(folder), planner=planner, no_dist=True)
    return []


def _to_vescale(stored: Stored, temporary: Path, progress: Progress, max_shard_size: int | str) -> list[str]:
    tensors = _own(stored.tensors)
    new = {name: f"model.{name}" if stored.format == "safetensors" else name for name in tensors}
    layout, position = [], 0
    for name, tensor in tensors.items():
        if num_bytes(tensor):
            layout.append((name, align(position)))
            position = align(position) + num_bytes(tensor)

    def chunks(name: str) -> Iterator[Any]:
        for _, values in blocks_of(stored, name):
            progress(values.nbytes)
            yield bytes_of(values).numpy().data

    boxes = ((start, num_bytes(tensors[name]), chunks(name)) for name, start in layout)
    written = write_data_file(str(temporary / "data-00000.bin"), boxes)
    entries: dict[str, Any] = {new[name]: [list(t.shape), dtype_name(t.dtype), []] for name, t in tensors.items()}
    for (name, start), checksum in zip(layout, written["boxes"]):
        shape = tensors[name].shape
        entries[new[name]][2].append([[0] * len(shape), list(shape), start, checksum])
    file = {key: written[key] for key in ("name", "bytes", "crc32")}
    part = {"file": file, "tensors": entries, "buffers": [], "samples": {}, "is_new": False}
    beside, head = _head(stored, list(entries))
    target = temporary.name.rsplit(".tmp-", 1)
    commit(
        {
            "parent": str(temporary.parent),
            "temporary": temporary.name,
            "name": target[0],
            "id": target[1],
            "head": head,
            "parts": [pack_part(part)],
            "replace": False,
            "points": False,
            "retention": None,
            "aside": [],
        }
    )
    return sorted(name for name in plain_values(stored) if name not in beside and stored.format in ("dcp", "torch"))


def _head(stored: Stored, names: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    if stored.format == "vescale":
        keys = ("step", "time", "versions", "world_size", "meshes", "program", "metric", "values")
        return {}, {key: stored.values.get(key) for key in keys}
    beside = {} if stored.format == "safetensors" else json.loads(json.dumps(plain_values(stored)))
    head: dict[str, Any] = dict.fromkeys(("step", "time", "world_size", "program", "metric"))
    head["world_size"], head["meshes"] = 1, []
    head["versions"] = {"vescale": __version__, "torch": torch.__version__}
    step = beside.get("step")
    head["step"] = step if type(step) is int else None
    head["values"] = {
        "model": {"aliases": {}, "extra": {}},
        "optimizers": _optimizers(names),
        "beside": {key: value for key, value in beside.items() if "param_groups" not in key},
    }
    return beside, head


def _optimizers(names: list[str]) -> dict[str, Any]:
    """States that are named ``optimizer.state.PARAMETER.STATE``, as torch's ``get_optimizer_state_dict`` has them."""
    parameters = sorted((n.removeprefix("model.") for n in names if n.startswith("model.")), key=len, reverse=True)
    state: dict[str, dict[str, Any]] = {}
    for name in names:
        rest = name.removeprefix("optimizer.state.")
        owner = next((each for each in parameters if rest != name and rest.startswith(f"{each}.")), None)
        if owner is not None:
            state.setdefault(owner, {})[rest.removeprefix(f"{owner}.")] = {"$tensor": name}
    if not state:
        return {}
    return {"optimizer": {"param_groups": [{"params": sorted(parameters), "options": {}}], "state": state}}


TARGETS: dict[str, Callable[[Stored, Path, Progress, int | str], list[str]]] = {
    "safetensors": _to_safetensors,
    "dcp": _to_dcp,
    "vescale": _to_vescale,
}
"""Formats that can be written."""
