"""The index of files written by ``torch.save``: a zip of stored records, one for each storage, and a restricted pickle."""

from __future__ import annotations

import base64
import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import torch

from vescale.checkpoint._step_folder import open_regular
from vescale.checkpoint._stored import Stored, StoredBox, StoredTensor
from vescale.errors import CheckpointError, DamagedFileError, UnsafePickleError, kind_of

# Pickles of foreign checkpoints, read without running anything that they name. A pickle is a program: it names
# callables and calls them. Here no name is ever imported. Each name on a list stands for a function or class of this
# package that builds plain data; any other name is an error that tells it. Opcodes that only programs of other kinds
# need, or that reserve memory before the bytes are there, are unknown.

_MAX_BYTES = 1 << 30  # of one pickle: it holds names and shapes, not elements


class Record:
    """An instance of a class on the list: its attributes, and no code."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.args: tuple[Any, ...] = ()
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):  # (__dict__, slots)
            state = {**(state[0] or {}), **state[1]}
        self.state = state

    def get(self, attribute: str, default: Any = None) -> Any:
        return self.state.get(attribute, default) if isinstance(self.state, dict) else default

    def _key(self) -> tuple[Any, ...]:
        return (self.name, self.get("fqn"), self.get("offset"))

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and self._key() == other._key()


class _RecordClass:
    """What a class on the list is while a pickle is read: calling it, in whatever way, makes a :class:`Record`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any) -> Record:
        made = Record(self.name)
        made.args = args
        return made


def record_of(name: str) -> Callable[..., Record]:
    """Stands for the class of this name."""
    return _RecordClass(name)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise UnsafePickleError("a pickle encodes something other than bytes")
    return text.encode("latin1")


def _bytes(data: Any = b"", encoding: Any = "latin1") -> bytes:
    if isinstance(data, str) and encoding in ("latin1", "latin-1"):
        return data.encode("latin1")
    if not isinstance(data, bytes):  # a number would reserve as many bytes
        raise UnsafePickleError("a pickle makes a bytearray from something other than bytes")
    return data


def _complex(real: Any, imaginary: Any) -> complex:
    if not isinstance(real, float) or not isinstance(imaginary, float):
        raise UnsafePickleError("a pickle makes a complex number from something other than numbers")
    return complex(real, imaginary)


PLAIN_NAMES: Mapping[str, Any] = {
    "collections.OrderedDict": dict,
    "collections.Counter": dict,
    **{f"{module}.bytearray": _bytes for module in ("builtins", "__builtin__")},
    **{f"{module}.complex": _complex for module in ("builtins", "__builtin__")},
    "builtins.set": list,
    "builtins.frozenset": list,
    "__builtin__.set": list,
    "_codecs.encode": _encode,
    **{
        f"pathlib{part}.{name}": lambda *parts: "/".join(str(part) for part in parts)
        for part in ("", "._local")
        for name in ("PosixPath", "PurePosixPath", "Path", "WindowsPath", "PureWindowsPath")
    },
}
"""Names that every list has: containers and paths, the latter as text."""


class _Unpickler(pickle._Unpickler):
    # Pickle's reader in Python: its memo is a dict, where the one in C reserves memory for any index that a pickle names.

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    for _opcode in (
        *(pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.INST, pickle.OBJ, pickle.PERSID),
        *(pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
    ):
        dispatch.pop(_opcode[0], None)

    def __init__(
        self, file: IO[bytes], names: Mapping[str, Any], persistent: Callable[[Any], Any] | None, about: str
    ) -> None:
        super().__init__(file)
        self._names, self._persistent, self._about = names, persistent, about
        self._callables = {id(value) for value in names.values()}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in self._names:
            raise UnsafePickleError(
                f"{self._about} names {full}, which is not on the list of what a checkpoint may contain; none of it "
                "was run. If you trust the file, load it with PyTorch and save the tensors again"
            )
        return self._names[full]

    def persistent_load(self, identity: Any) -> Any:
        if self._persistent is None:
            raise UnsafePickleError(f"{self._about} refers to data outside the file")
        return self._persistent(identity)

    def load_build(self) -> None:
        stack = self.stack  # type: ignore[attr-defined]
        state = stack.pop()
        if isinstance(stack[-1], Record):
            stack[-1].__setstate__(state)
        elif not isinstance(stack[-1], dict):  # attributes of an OrderedDict (_metadata of a state dict) are left out
            raise UnsafePickleError(f"{self._about} sets attributes of {kind_of(stack[-1])}")

    dispatch[pickle.BUILD[0]] = load_build

    def load_reduce(self) -> None:
        stack = self.stack  # type: ignore[attr-defined]
        args = stack.pop()
        stack[-1] = self._call(stack[-1], args)

    dispatch[pickle.REDUCE[0]] = load_reduce

    def load_newobj(self) -> None:
        self.load_reduce()

    dispatch[pickle.NEWOBJ[0]] = load_newobj

    def load_newobj_ex(self) -> None:
        stack = self.stack  # type: ignore[attr-defined]
        keywords = stack.pop()
        if keywords:
            raise UnsafePickleError(f"{self._about} calls a function with keyword arguments")
        self.load_reduce()

    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex

    def _call(self, function: Any, args: Any) -> Any:
        """Only what the list gave is called; a pickle may put other objects into the place of a callable."""
        if not isinstance(args, tuple) or id(function) not in self._callables:
            raise UnsafePickleError(f"{self._about} calls {kind_of(function)}, which is not on the list")
        return function(*args)


def load_restricted(
    data: bytes, names: Mapping[str, Any], about: str, persistent: Callable[[Any], Any] | None = None
) -> Any:
    """The value of a pickle in which only ``names`` (``module.name`` -> what stands for it) are known.

    Raises CheckpointError, beginning with ``about``, for another name, which it tells, and for damaged data.
    """
    if len(data) > _MAX_BYTES:
        raise UnsafePickleError(f"{about} is a pickle of {len(data)} bytes; expected at most {_MAX_BYTES}")
    try:
        return _Unpickler(io.BytesIO(data), names, persistent, about).load()
    except CheckpointError:
        raise
    except Exception as error:  # whatever garbled opcodes lead to
        raise UnsafePickleError(f"{about} is damaged: {type(error).__name__}: {str(error)[:200]}") from None


_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}


@dataclass(frozen=True)
class _Storage:
    """A record of the zip: its first byte in the file and its length, and the dtype its elements have by default."""

    start: int
    num_bytes: int
    dtype: torch.dtype


@dataclass(frozen=True)
class TensorRecord:
    """A tensor of a ``torch.save`` file.

    Attributes:
        start: position of its first element in the file, in bytes.
        strides: in elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    strides: tuple[int, ...]

    def box(self, file: str, offset: tuple[int, ...] | None = None) -> StoredBox:
        """The tensor as a box of a larger one that begins there, or of itself."""
        return StoredBox(offset or (0,) * len(self.shape), self.shape, file, self.start, self.strides)


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any = False, hooks: Any = (), flags: Any = None
) -> TensorRecord:
    _refuse_flags(flags)
    return _made(storage, storage.dtype if isinstance(storage, _Storage) else None, offset, shape, strides)


def _tensor_of_dtype(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    flags: Any = None,
) -> TensorRecord:
    _refuse_flags(flags)
    return _made(storage, dtype, offset, shape, strides)


def _refuse_flags(flags: Any) -> None:
    """Of tensors whose values are not those in memory: ``x.conj()``, and the imaginary part of one."""
    if flags:
        raise DamagedFileError(
            f"a tensor is stored with the flags {sorted(map(str, flags))}: its values are computed when they are used; save "
            "tensor.resolve_conj().resolve_neg()"
        )


def _made(storage: Any, dtype: Any, offset: Any, shape: Any, strides: Any) -> TensorRecord:
    shape, strides = tuple(shape), tuple(strides)
    counts = (offset, *shape, *strides)
    if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype) or len(shape) != len(strides):
        raise DamagedFileError("a tensor without storage, dtype or strides")
    if not all(type(count) is int and 0 <= count < 1 << 62 for count in counts):
        raise DamagedFileError(f"a tensor of shape {shape}, strides {strides} and offset {offset}")
    if 0 not in shape:
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides)) + 1
        if last * dtype.itemsize > storage.num_bytes:
            raise DamagedFileError(
                f"a tensor of shape {shape}, strides {strides} and {dtype} reaches {last * dtype.itemsize} bytes of a "
                f"storage of {storage.num_bytes}"
            )
    return TensorRecord(shape, dtype, storage.start + offset * dtype.itemsize, strides)


def _parameter(data: Any, *rest: Any) -> Any:
    return data


def _of_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """``torch.Tensor`` and ``Parameter`` with attributes of their own, which are left out."""
    if function not in (_tensor, _tensor_of_dtype) or kind is not _parameter:
        raise DamagedFileError("a tensor of a custom class")
    return function(*args)


_NAMES: Mapping[str, Any] = {
    **PLAIN_NAMES,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.nn.parameter.Parameter": _parameter,
    "torch.Tensor": _parameter,
    "torch._tensor.Tensor": _parameter,
    "torch.Size": lambda sizes=(): tuple(sizes),
    "torch.device": lambda *args: ":".join(str(arg) for arg in args),
    "torch.serialization._get_layout": lambda name: str(name),
    **{f"torch.{name}": dtype for name, dtype in _STORAGES.items()},
    "torch.storage.UntypedStorage": torch.uint8,
    **{f"torch.{name}": value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)},
}


class FilePart(io.RawIOBase):
    """Bytes ``[start, start + length)`` of a file, as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("before the first byte")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        rest = max(0, self._length - self._at)
        size = rest if size is None or size < 0 else min(size, rest)
        self._file.seek(self._start + self._at)
        found = self._file.read(size)
        self._at += len(found)
        return found


def read_torch_save(file: IO[bytes], start: int, length: int, about: str) -> Any:
    """What ``torch.save`` wrote to a part of a file: containers and plain values as they are, each tensor as a
    :class:`TensorRecord` with positions in the whole file.

    Raises CheckpointError for names that are not on the list, for files of the form before torch 1.6, and for damaged ones.
    """
    part = FilePart(file, start, length)
    if part.read(4) != b"PK\x03\x04":
        raise DamagedFileError(
            f"{about} is not a zip file, but a torch.save file from before torch 1.6 or something else; load it with "
            "torch.load(weights_only=True) and save the result again"
        )
    try:
        records = {info.filename: info for info in zipfile.ZipFile(part).infolist()}
    except Exception as error:  # zipfile raises many kinds for garbled files
        raise DamagedFileError(f"{about} is truncated or damaged: {error}") from None
    pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise DamagedFileError(
            f"{about} is a zip file without a single data.pkl; expected a file written by torch.save"
        )
    root = pickles[0].removesuffix("data.pkl")

    def find(name: str) -> tuple[int, int]:
        info = records.get(root + name)
        if info is None:
            raise DamagedFileError(f"{about}: the record {name} is missing")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise DamagedFileError(f"{about}: the record {name} is compressed or encrypted")
        if info.header_offset < 0:
            raise DamagedFileError(f"{about} is damaged: the directory places {name} before its first byte")
        part.seek(info.header_offset)
        local = part.read(30)
        if len(local) < 30 or local[:4] != b"PK\x03\x04":
            raise DamagedFileError(f"{about} is damaged: no record {name} where the directory says")
        begin = info.header_offset + 30 + sum(struct.unpack("<HH", local[26:30]))
        if begin + info.file_size > length:
            raise DamagedFileError(f"{about} is truncated: the record {name} ends past the end of the file")
        return begin, info.file_size

    def bytes_of(name: str) -> bytes:
        begin, size = find(name)
        part.seek(begin)
        return part.read(size)

    if root + "byteorder" in records and bytes_of("byteorder") != b"little":
        raise DamagedFileError(f"{about} was written on a machine with a different byte order")

    def storage(identity: Any) -> _Storage:
        if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
            raise DamagedFileError(f"{about} refers to data by {str(identity)[:200]}")
        _, dtype, key, _, _ = identity
        if not isinstance(dtype, torch.dtype) or not isinstance(key, str):
            raise DamagedFileError(f"{about} has a storage that is not a torch storage")
        begin, size = find(f"data/{key}")
        return _Storage(start + begin, size, dtype)

    return load_restricted(bytes_of("data.pkl"), _NAMES, about, storage)


def flattened(value: Any, about: str) -> tuple[dict[str, TensorRecord], dict[str, Any]]:
    """Tensors and other values of nested dicts and lists, by names joined with dots; names of dicts may have dots."""
    tensors: dict[str, TensorRecord] = {}
    values: dict[str, Any] = {}

    def visit(name: str, value: Any, depth: int) -> None:
        if depth > 100:
            raise DamagedFileError(f"{about} is nested more than 100 deep at {name[:100]}")
        if isinstance(value, (dict, list, tuple)) and value and _has_tensor(value):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                visit(f"{name}.{key}" if name else str(key), item, depth + 1)
            return
        if name in tensors or name in values:
            raise DamagedFileError(f"{about} has two values named {name}")
        if isinstance(value, TensorRecord):
            tensors[name or "tensor"] = value
        else:
            values[name or "value"] = plain_value(value, f"{about}: {name}")

    if isinstance(value, dict):
        for key, item in value.items():
            visit(str(key), item, 1)
    else:
        visit("", value, 0)
    return tensors, values


def _has_tensor(value: Any) -> bool:
    stack, seen = [value], set()
    while stack:
        found = stack.pop()
        if isinstance(found, TensorRecord):
            return True
        if isinstance(found, (dict, list, tuple)) and id(found) not in seen:
            seen.add(id(found))
            stack.extend(found.values() if isinstance(found, dict) else found)
    return False


def plain_value(value: Any, about: str) -> Any:
    """What JSON can hold: bytes as ``{"base64": ...}``, dtypes and complex numbers as text, keys of dicts as text."""

    def convert(value: Any, depth: int) -> Any:
        if depth > 100:
            raise DamagedFileError(f"{about} is nested more than 100 deep")
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, bytes):
            return {"base64": base64.b64encode(value).decode()}
        if isinstance(value, dict):
            return {str(key): convert(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [convert(item, depth + 1) for item in value]
        if isinstance(value, (torch.dtype, complex)):
            return str(value)
        raise DamagedFileError(f"{about} holds {kind_of(value)}; expected tensors and plain data")

    return convert(value, 0)


def with_bytes(value: Any) -> Any:
    """Bytes again, where :func:`plain_value` has made them text."""
    if isinstance(value, dict):
        if value.keys() == {"base64"} and isinstance(value["base64"], str):
            return base64.b64decode(value["base64"])
        return {key: with_bytes(item) for key, item in value.items()}
    return [with_bytes(item) for item in value] if isinstance(value, list) else value


def is_torch_save(path: Path) -> bool:
    """A file with one of the usual suffixes, or one that begins as a zip."""
    if not path.is_file():
        return False
    if path.suffix in _SUFFIXES:
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError:
        return False


def open_torch_save(path: Path) -> Stored:
    """The index of a ``torch.save`` file. Nested dicts become names joined with dots; nothing is executed.

    Raises CheckpointError as :func:`read_torch_save` does.
    """
    file, about = path.name, str(path)
    with _opened(path) as stream:
        value = read_torch_save(stream, 0, os.fstat(stream.fileno()).st_size, about)
    tensors, values = flattened(value, about)
    found = {name: _whole(record, file) for name, record in tensors.items()}
    return Stored(path.parent, found, "torch", values, path)


def _whole(record: TensorRecord, file: str) -> StoredTensor:
    return StoredTensor(record.shape, record.dtype, (record.box(file),) if 0 not in record.shape else ())


def _opened(path: Path) -> IO[bytes]:
    try:
        return open(open_regular(path), "rb")
    except OSError as error:
        raise DamagedFileError(f"{path}: {error.strerror or error}") from error
