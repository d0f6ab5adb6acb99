"""Pickles of foreign checkpoints, read without running anything that they name.

A pickle is a program: it names callables and calls them. Here no name is ever imported. Each name on a list stands for a
function or class of this package that builds plain data; any other name is an error that tells it. Opcodes that only
programs of other kinds need, or that reserve memory before the bytes are there, are unknown.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import IO, Any, ClassVar

from vescale.errors import CheckpointError, UnsafePickleError, kind_of

__all__ = ["PLAIN_NAMES", "Record", "load_restricted", "record_of"]

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
        raise UnsafePickleError("a pickle encodes something else than bytes")
    return text.encode("latin1")


def _bytes(data: Any = b"", encoding: Any = "latin1") -> bytes:
    if isinstance(data, str) and encoding in ("latin1", "latin-1"):
        return data.encode("latin1")
    if not isinstance(data, bytes):  # a number would reserve as many bytes
        raise UnsafePickleError("a pickle makes a bytearray of something else than bytes")
    return data


def _complex(real: Any, imaginary: Any) -> complex:
    if not isinstance(real, float) or not isinstance(imaginary, float):
        raise UnsafePickleError("a pickle makes a complex number of something else than numbers")
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
                f"{self._about} names {full}, which is not on the list of what a checkpoint may hold; nothing of it was "
                "run. If you trust the file, load it with PyTorch and save the tensors again"
            )
        return self._names[full]

    def persistent_load(self, identity: Any) -> Any:
        if self._persistent is None:
            raise UnsafePickleError(f"{self._about} refers to data outside of itself")
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
            raise UnsafePickleError(f"{self._about} calls something with keywords")
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
