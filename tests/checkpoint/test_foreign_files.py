"""Files that others wrote: read as they are, refused with a reason, never executed, never wrong."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vescale.checkpoint import load
from vescale.checkpoint._dcp import open_dcp
from vescale.checkpoint._reader import read_tensors
from vescale.checkpoint._safetensors import open_safetensors
from vescale.checkpoint._stored import Stored
from vescale.checkpoint._torch_save import open_torch_save
from vescale.errors import CheckpointError

STATE = {
    "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "a.bias": torch.arange(5).to(torch.bfloat16),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "columns": torch.arange(12.0).view(3, 4).t(),
    "flags": torch.tensor([True, False, True]),
}


def values_of(stored: Stored) -> dict[str, torch.Tensor]:
    found = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in stored.tensors.items()}
    read_tensors(stored, found, share=False)
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name]) for name in expected
    )


def save_safetensors(folder: Path) -> Path:
    from safetensors.torch import save_file

    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in STATE.items()}, path, {"format": "pt"})
    return path


def save_dcp(folder: Path) -> Path:
    dcp.save(
        {"model": STATE, "step": 3, "lr": [0.1, {"x": None}], "blob": b"\x00\x01"}, checkpoint_id=folder, no_dist=True
    )
    return folder


class Nested(OrderedDict[str, Any]):
    pass


def save_torch(folder: Path) -> Path:
    path = folder / "model.pt"
    state = OrderedDict(STATE)
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]  # as nn.Module.state_dict has it
    optimizer = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]}
    parameter = torch.nn.Parameter(torch.arange(3.0))
    torch.save({"model": state, "optimizer": optimizer, "epoch": 3, "parameter": parameter}, path)
    return path


def test_safetensors(tmp_path: Path) -> None:
    path = save_safetensors(tmp_path)
    for place in (path, tmp_path):
        assert same(values_of(open_safetensors(place)), STATE)


def test_dcp_folder(tmp_path: Path) -> None:
    stored = open_dcp(save_dcp(tmp_path))
    assert same(values_of(stored), {f"model.{name}": tensor for name, tensor in STATE.items()})
    assert stored.values["step"] == 3
    assert stored.values["blob"] == {"base64": "AAE="}
    assert stored.values["lr.0"] == 0.1 or stored.values["lr"] == [0.1, {"x": None}]


def test_dcp_folder_of_safetensors(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    writer = dcp.FileSystemWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    state = {name: tensor.contiguous() for name, tensor in STATE.items()}
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert same(values_of(open_dcp(tmp_path)), state)


def test_safetensors_of_ranks(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for rank in range(2):
        offsets = {"w": {"saved_offsets": [2 * rank, 0]}, "b": {"saved_offsets": [0]}}
        held = {"w": torch.arange(12.0).view(4, 3)[2 * rank : 2 * rank + 2].contiguous(), "b": torch.ones(2)}
        save_file(
            held,
            tmp_path / f"shard-0000{rank}-model-00001-of-00001.safetensors",
            {"DCP_SHARDING_INFO": json.dumps(offsets)},
        )
    assert same(values_of(open_safetensors(tmp_path)), {"w": torch.arange(12.0).view(4, 3), "b": torch.ones(2)})


def test_torch_save_file(tmp_path: Path) -> None:
    stored = open_torch_save(save_torch(tmp_path))
    expected = {f"model.{name}": tensor for name, tensor in STATE.items()}
    expected |= {"optimizer.state.0.exp_avg": torch.ones(2), "parameter": torch.arange(3.0)}
    assert same(values_of(stored), expected)
    assert stored.values == {"optimizer.param_groups": [{"lr": 0.1, "betas": [0.9, 0.95]}], "epoch": 3}


def test_torch_save_of_what_weights_only_takes(tmp_path: Path) -> None:
    values = {
        "counter": Counter({"a": 2}),
        "bytes": bytearray(b"\x00\xff"),
        "complex": 1 + 2j,
        "set": {1},
        "dtype": torch.bfloat16,
    }
    torch.save({**values, "w": torch.ones(2)}, tmp_path / "x.pt")
    torch.load(tmp_path / "x.pt", weights_only=True)
    found = load(tmp_path / "x.pt")
    assert found == {
        "counter": {"a": 2},
        "bytes": b"\x00\xff",
        "complex": "(1+2j)",
        "set": [1],
        "dtype": "torch.bfloat16",
    }


class WithExtraState(torch.nn.Linear):
    def __init__(self, scale: Any) -> None:
        super().__init__(2, 3)
        self.scale = scale

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state


@pytest.mark.parametrize("kind", ["torch", "dcp"])
@pytest.mark.parametrize("extra", [{"amax": 3.0, "of": {"a": 1}}, torch.arange(5)], ids=["dict", "tensor"])
def test_what_is_beside_the_model(kind: str, extra: Any, tmp_path: Path) -> None:
    """Plain values are returned, but for those of the optimizer; extra state goes to its module, and does not get lost."""
    source, path = WithExtraState(extra), tmp_path / "x.pt"
    optimizer = torch.optim.AdamW(source.parameters())
    source(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    content = {"model": source.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "note": b"x"}

    def write(content: dict[str, Any]) -> None:
        if kind == "torch":
            torch.save(content, path)
        else:
            shutil.rmtree(path, ignore_errors=True)
            dcp.save(content, checkpoint_id=path, no_dist=True)

    write(content)
    model = WithExtraState(None)
    assert load(path, model=model, optimizer=None) == {"epoch": 3, "note": b"x"}
    assert str(model.scale) == str(extra) and torch.equal(model.weight, source.weight)
    del content["model"]["_extra_state"]
    write(content)
    with pytest.raises(
        CheckpointError,
        match=rf"{path} does not match the model and optimizer:\n  model._extra_state: not in the checkpoint",
    ):
        load(path, model=model)


def test_torch_save_of_one_tensor_and_of_views(tmp_path: Path) -> None:
    base = torch.arange(20.0)
    torch.save({"a": base[3:9].view(2, 3), "b": base[::2]}, tmp_path / "x.pt")
    assert same(values_of(open_torch_save(tmp_path / "x.pt")), {"a": base[3:9].view(2, 3), "b": base[::2]})
    torch.save(base, tmp_path / "y.pt")
    assert same(values_of(open_torch_save(tmp_path / "y.pt")), {"tensor": base})


def test_torch_save_of_values_that_are_not_in_memory(tmp_path: Path) -> None:
    """Read as they lie in the file, these would have the wrong sign."""
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    for name, tensor in {"conj": numbers.conj(), "neg": numbers.conj().imag}.items():
        torch.save({"x": tensor}, tmp_path / "x.pt")
        with pytest.raises(CheckpointError, match=rf"flags \['{name}'\].*resolve_conj"):
            open_torch_save(tmp_path / "x.pt")


def test_torch_save_before_zip(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"before torch 1\.6"):
        open_torch_save(tmp_path / "old.pt")


class Attack:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def _attacked(folder: Path, trap: Path, where: str) -> tuple[Path, Callable[[Path], Stored]]:
    if where == "torch_save":
        torch.save({"x": torch.ones(2), "evil": Attack(trap)}, folder / "x.pt")
        return folder / "x.pt", open_torch_save
    if where == ".distcp":
        dcp.save({"x": torch.ones(2), "evil": Attack(trap)}, checkpoint_id=folder, no_dist=True)
        return folder, open_dcp
    save_dcp(folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Attack(trap)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder, open_dcp


@pytest.mark.parametrize("where", ["torch_save", ".distcp", ".metadata"])
def test_code_is_never_executed(where: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    path, opener = _attacked(tmp_path / "checkpoint", tmp_path / "trap", where)
    with pytest.raises(CheckpointError, match=r"(posix|os|nt)\.system"):
        opener(path)
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize(
    "program",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"c__builtin__\ngetattr\n(ctorch\nSize\nS'__class__'\ntR.",
        b"\x80\x04\x8c\x05torch\x8c\x04load\x93\x8c\x01x\x85R.",
        b"(ios\nsystem\nS'true'\no.",
        b"ctorch\n_utils._rebuild_tensor_v2\n(tR.",
        b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"r\xff\xff\xff\x7f.",
        b"(" * 5000 + b"t" * 5000 + b".",
        b"\x82\x01.",
        b"]" + b"q\x00" + b"h\x00a." * 3,
    ],
)
def test_hostile_programs(program: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(program)
    with pytest.raises(CheckpointError):
        open_dcp(tmp_path)
    path = tmp_path / "x.pt"
    torch.save({"x": torch.ones(2)}, path)
    import zipfile

    with zipfile.ZipFile(path) as old:
        records = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for name, data in records.items():
            new.writestr(name, program if name.endswith("data.pkl") else data)
    with pytest.raises(CheckpointError):
        open_torch_save(path)


def _header(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "fewer than the 8"),
        (struct.pack("<Q", 1 << 40), "more than the"),
        (struct.pack("<Q", 100) + b"{}", "ends inside its header"),
        (_header(b"nonsense"), "not JSON"),
        (_header(b"[" * 100000), "not JSON"),
        (_header([1]), "expected an object"),
        (_header(b'{"a": 1, "a": 2}'), "two entries"),
        (_header({"a": _entry(0, 8, [2])}, b"\0" * 4), "truncated"),
        (_header({"a": _entry(0, 8, [2])}, b"\0" * 9), "extra bytes follow"),
        (_header({"a": _entry(0, 8, [2]), "b": _entry(4, 12, [2])}, b"\0" * 12), "an overlap"),
        (_header({"a": _entry(0, 8, [2]), "b": _entry(12, 20, [2])}, b"\0" * 20), "a hole"),
        (_header({"a": _entry(0, 4, [2])}, b"\0" * 4), "are needed"),
        (_header({"a": _entry(0, 4, [-1])}, b"\0" * 4), "by shape"),
        (_header({"a": _entry(0, 1, [1], "F99")}, b"\0"), "dtype 'F99'"),
        (_header({"a": {"dtype": "F32"}}), "expected dtype"),
        (_header({"__metadata__": {"a": 1}}), "object of strings"),
    ],
)
def test_unsound_safetensors(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        open_safetensors(path)


def test_unsound_indexes(tmp_path: Path) -> None:
    save_safetensors(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for weights, message in [
        ({"a": "../x.safetensors"}, "outside of its folder"),
        ({"a": "/etc/passwd"}, "outside of its folder"),
        ({"a": "gone.safetensors"}, "not in the folder"),
        ({"nobody": "model.safetensors"}, "does not have it"),
        ([], "no weight_map"),
    ]:
        index.write_text(json.dumps({"weight_map": weights}))
        with pytest.raises(CheckpointError, match=message):
            open_safetensors(tmp_path)


_SAVED: dict[str, dict[str, bytes]] = {}


def _saved_once(save: Callable[[Path], Path], folder: Path) -> Path:
    """The same bytes for every example: a checkpoint of DCP has its own path in it."""
    path = save(folder)
    files = _SAVED.setdefault(save.__name__, {file.name: file.read_bytes() for file in folder.iterdir()})
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return path


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=120)
@given(data=st.data())
@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_garbled_files(kind: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Truncated or with bytes changed: our error, or what the header still says; with the index sound, the same names."""
    folder = tmp_path_factory.mktemp(kind)
    save, opener = {
        "safetensors": (save_safetensors, open_safetensors),
        "torch": (save_torch, open_torch_save),
        "dcp": (save_dcp, open_dcp),
    }[kind]
    path = _saved_once(save, folder)
    files = [path] if path.is_file() else sorted(file for file in folder.iterdir())
    file = data.draw(st.sampled_from(files))
    content = bytearray(file.read_bytes())
    if data.draw(st.booleans()):
        file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        with pytest.raises(CheckpointError):
            values_of(opener(path))
        return
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    with contextlib.suppress(CheckpointError):
        values_of(opener(path))


def test_chunks_that_overlap(tmp_path: Path) -> None:
    """As many elements as the tensor has, but some twice and others never."""
    dcp.save({"x": torch.arange(8.0)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    (index, info), *_ = metadata.storage_data.items()
    entry = metadata.state_dict_metadata["x"]
    entry.size = torch.Size([16])
    metadata.storage_data[type(index)("x", torch.Size([4]))] = info
    entry.chunks.append(type(entry.chunks[0])(offsets=torch.Size([4]), sizes=torch.Size([8])))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="overlap"):
        open_dcp(tmp_path)


def test_io_of_streams_is_not_needed() -> None:
    """A record that is part of a larger file, as in ``.distcp``, has positions in the whole file."""
    from vescale.checkpoint._torch_save import TensorRecord, read_torch_save

    buffer = io.BytesIO(b"x" * 100)
    buffer.seek(100)
    inner = io.BytesIO()
    torch.save(torch.arange(4.0), inner)
    buffer.write(inner.getvalue() + b"tail")
    record = read_torch_save(buffer, 100, len(inner.getvalue()), "here")
    assert isinstance(record, TensorRecord)
    assert torch.frombuffer(
        bytearray(buffer.getvalue()), dtype=torch.float32, count=4, offset=record.start
    ).tolist() == [0, 1, 2, 3]
