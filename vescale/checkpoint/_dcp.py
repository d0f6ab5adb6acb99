"""The index of folders that ``torch.distributed.checkpoint`` wrote: FSDP2's, DTensor's and FSDP1's sharded state dicts.

``.metadata`` is a pickle that says which chunks each tensor has and where they are. It is read with a list of the classes
that belong there (https://github.com/pytorch/pytorch/pull/191326); so are the records that hold chunks, which are files of
``torch.save`` inside of ``__{rank}_{n}.distcp``, or whole files in the safetensors format.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import torch

from vescale.checkpoint._safetensors import read_header
from vescale.checkpoint._step_folder import open_regular, read_regular
from vescale.checkpoint._stored import Stored, StoredBox, StoredTensor
from vescale.checkpoint._stored_blocks import cover_fault
from vescale.checkpoint._torch_save import (
    PLAIN_NAMES,
    Record,
    TensorRecord,
    load_restricted,
    plain_value,
    read_torch_save,
    record_of,
)
from vescale.errors import DamagedFileError

_METADATA = ".metadata"
_PLACE = "torch.distributed.checkpoint"
_NAMES: Mapping[str, Any] = {
    **PLAIN_NAMES,
    **{
        f"{_PLACE}.metadata.{name}": record_of(name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "ChunkStorageMetadata",
            "TensorStorageMetadata",
            "TensorProperties",
            "BytesStorageMetadata",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    },
    f"{_PLACE}.filesystem._StorageInfo": record_of("_StorageInfo"),
    "torch.Size": lambda sizes=(): tuple(sizes),
    "torch.serialization._get_layout": lambda name: str(name),
    **{f"torch.{name}": value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)},
}


def is_dcp(path: Path) -> bool:
    """A folder with ``.metadata``."""
    return path.is_dir() and (path / _METADATA).is_file()


def open_dcp(path: Path) -> Stored:
    """The index of a folder. Values that are not tensors are read, too, as plain data; nothing is executed.

    Raises CheckpointError for classes that are not on the list, which it names, and for damaged or missing files.
    """
    about = path / _METADATA
    entries, where = _metadata(path)
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, Any] = {}
    with ExitStack() as opened:
        files = _Files(path, opened)
        for name, entry in entries.items():
            kind = entry.name if isinstance(entry, Record) else type(entry).__name__
            if kind == "TensorStorageMetadata":
                tensors[str(name)] = _tensor(files, str(name), entry, where)
            elif kind == "BytesStorageMetadata":
                info = where.get((name, None))
                values[str(name)] = files.value(str(name), info)
            else:
                raise DamagedFileError(f"{about} describes {name} by a {kind}; expected a tensor or bytes")
    return Stored(path, tensors, "dcp", values)


def chunk_places(path: Path) -> list[tuple[str, str, int, int]]:
    """(name, file, first byte, length) of every record of a folder."""
    with ExitStack() as opened:
        files = _Files(path, opened)
        found = []
        for (name, _), info in _metadata(path)[1].items():
            file, _, start, length = files.place(str(name), info)
            found.append((str(name), file, start, length))
    return found


def _metadata(path: Path) -> tuple[dict[Any, Any], dict[tuple[Any, Any], Any]]:
    """The entries of ``.metadata`` by name, and where the record of each (name, offset) is."""
    about = str(path / _METADATA)
    try:
        metadata = load_restricted(read_regular(path / _METADATA), _NAMES, about)
    except OSError as error:
        raise DamagedFileError(f"{about}: {error.strerror or error}") from error
    entries = metadata.get("state_dict_metadata") if isinstance(metadata, Record) else None
    places = metadata.get("storage_data") if isinstance(metadata, Record) else None
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise DamagedFileError(f"{about} is not a metadata file of torch.distributed.checkpoint")
    try:
        return entries, {
            (index.get("fqn"), index.get("offset")): info for index, info in places.items() if isinstance(index, Record)
        }
    except TypeError:
        raise DamagedFileError(f"{about} has an entry without a name") from None


def _tensor(files: _Files, name: str, entry: Record, where: Mapping[Any, Any]) -> StoredTensor:
    shape: Any
    properties, shape, chunks = entry.get("properties"), entry.get("size"), entry.get("chunks")
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, torch.dtype) or not _sizes(shape) or not isinstance(chunks, list):
        raise DamagedFileError(f"{files.folder / _METADATA} has no valid entry for {name}")
    boxes = []
    for chunk in chunks:
        offset: Any
        sizes: Any
        offset, sizes = (chunk.get("offsets"), chunk.get("sizes")) if isinstance(chunk, Record) else (None, None)
        fits = _sizes(offset) and _sizes(sizes) and len(offset) == len(sizes) == len(shape)
        if not fits or any(at + size > total for at, size, total in zip(offset, sizes, shape)):
            raise DamagedFileError(
                f"{files.folder / _METADATA}: {name} of shape {shape} has a chunk {sizes} at {offset}"
            )
        if math.prod(sizes):
            boxes.append(files.box(name, dtype, offset, sizes, where.get((name, offset))))
    wrong = cover_fault(boxes, shape)
    if wrong is not None:
        raise DamagedFileError(f"{files.folder / _METADATA}: the chunks of {name} of shape {shape} {wrong}")
    return StoredTensor(shape, dtype, tuple(boxes))


def _sizes(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(size) is int and size >= 0 for size in value)


class _Files:
    """The files of a folder, each opened once while the folder is indexed."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self.folder, self._opened = folder, opened
        self._files: dict[str, tuple[IO[bytes], int]] = {}

    def box(
        self, name: str, dtype: torch.dtype, offset: tuple[int, ...], sizes: tuple[int, ...], info: Any
    ) -> StoredBox:
        """A chunk of a tensor, as elements of a file."""
        path, file, start, length = self.place(name, info)
        file.seek(start)
        if file.read(4) != b"PK\x03\x04":
            found = self._safetensors(name, path)
        else:
            found = read_torch_save(file, start, length, f"{self.folder / path} at byte {start} ({name})")
        if not isinstance(found, TensorRecord) or found.shape != sizes or found.dtype != dtype:
            described = f"{found.dtype} of shape {found.shape}" if isinstance(found, TensorRecord) else "no tensor"
            raise DamagedFileError(
                f"{self.folder / path}: the record of {name} at {offset} holds {described}; expected {dtype} of shape "
                f"{sizes}"
            )
        return found.box(path, offset)

    def _safetensors(self, name: str, path: str) -> TensorRecord | None:
        """The chunk in a file that ``FileSystemWriter`` wrote as safetensors: one for each name."""
        header = read_header(self.folder / path)
        if name not in header.tensors:
            return None
        dtype, shape, start = header.tensors[name]
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        return TensorRecord(shape, dtype, start, tuple(strides))

    def value(self, name: str, info: Any) -> Any:
        """An entry that is no tensor."""
        path, file, start, length = self.place(name, info)
        about = f"{self.folder / path} at byte {start} ({name})"
        found = read_torch_save(file, start, length, about)
        if isinstance(found, TensorRecord):
            raise DamagedFileError(f"{about} holds a tensor in place of a plain value")
        return plain_value(found, about)

    def place(self, name: str, info: Any) -> tuple[str, IO[bytes], int, int]:
        place = info if isinstance(info, Record) else Record("")
        path, start, length = (place.get(key) for key in ("relative_path", "offset", "length"))
        if not isinstance(path, str) or type(start) is not int or type(length) is not int or start < 0 or length < 0:
            raise DamagedFileError(f"{self.folder / _METADATA} does not contain the location of {name}")
        if place.get("transform_descriptors"):
            raise DamagedFileError(
                f"{self.folder / path}: {name} is stored through {place.get('transform_descriptors')}; only "
                "uncompressed chunks can be read: save it again without extensions"
            )
        if Path(path).is_absolute() or ".." in Path(path).parts or "\0" in path:
            raise DamagedFileError(f"{self.folder / _METADATA} refers to the file {path!r} outside of its folder")
        if path not in self._files:
            try:
                file: IO[bytes] = self._opened.enter_context(os.fdopen(open_regular(self.folder / path), "rb"))
            except OSError as error:
                raise DamagedFileError(
                    f"{self.folder / path}, which holds {name}: {error.strerror or error}"
                ) from error
            self._files[path] = file, os.fstat(file.fileno()).st_size
        file, size = self._files[path]
        if start + length > size:
            raise DamagedFileError(
                f"{self.folder / path} has {size} bytes, but {name} is at {start} to {start + length}: the file is truncated"
            )
        return path, file, start, length
