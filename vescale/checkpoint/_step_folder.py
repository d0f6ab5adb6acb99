"""Folders of steps: which are complete, how one becomes so, and which are removed; the standard library only.

``FOLDER/step-N`` is complete if its manifest parses and all files have the listed sizes. It gets this name by one rename,
when everything in it is on the disk. ``FOLDER/latest`` has the name of the step that was saved last. Names with something
behind the number are no steps: ``.tmp-ID`` is being written, ``.old-ID`` being removed, ``.aside-ID`` was put aside for
the user.
"""

from __future__ import annotations

import base64
import errno
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vescale.checkpoint import _disk
from vescale.errors import ManifestError

# ``manifest.json``: its text, with the checksum of itself, and how the parts of all ranks become one.
#
# The standard library only.


FORMAT = "vescale-checkpoint"
VERSION = 1
_NEEDED = ("values", "files", "tensors")
_SHOWN = 5


def serialize(manifest: Mapping[str, Any]) -> bytes:
    """JSON text whose last entry is the CRC-32 of everything before it."""
    text = json.dumps(manifest, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    body = (text[:-1] + ',"crc32":"').encode()
    return body + f'{zlib.crc32(body):08x}"}}\n'.encode()


def parse(data: bytes) -> dict[str, Any]:
    """Raises ManifestError for a manifest that is cut off, changed in any bit, or of a later version."""
    body, ending = data[:-11], data[-11:]
    if len(data) < 12 or ending != f'{zlib.crc32(body):08x}"}}\n'.encode():
        raise ManifestError("the checksum of the manifest differs: it was damaged, truncated, or edited by hand")
    found = json.loads(data)
    if found.get("format") != FORMAT:
        raise ManifestError(f"its format is {found.get('format')!r}, expected {FORMAT!r}")
    if found.get("version") != VERSION:
        raise ManifestError(
            f"it has version {found.get('version')!r} of the format, and this vescale reads version {VERSION}; "
            "install the vescale that wrote it, or a later one"
        )
    if lacking := [key for key in _NEEDED if key not in found]:
        raise ManifestError(f"it lacks {', '.join(lacking)}; it was not written by vescale")
    return found


def merge_parts(head: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """(the manifest, warnings) from what the ranks have written, in rank order.

    A part has ``file`` (or None), ``tensors`` ({name: [shape, dtype, [[offset, sizes, start, crc32], ...]]}), ``samples``
    ({name: checksum of some elements} of tensors that every holder has whole), ``buffers``: those that may differ,
    perhaps ``values``, to be added to those of ``head``, and perhaps ``optimizers`` (names) and ``lacks_optimizer``.

    Raises ManifestError if boxes do not cover their tensor, ranks have one name for different tensors, or whole tensors
    differ between ranks.
    """
    _compare_optimizers(parts)
    warnings = _compare_samples(parts)
    files: list[dict[str, Any]] = []
    tensors: dict[str, dict[str, Any]] = {}
    seen: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
    sums: dict[tuple[str, tuple[int, ...]], int] = {}
    buffers = {name for part in parts for name in part["buffers"]}
    by: dict[str, int] = {}
    for rank, part in enumerate(parts):
        if part["file"] is not None:
            files.append(
                {key: part["file"][key] for key in ("name", "bytes")} | {"crc32": f"{part['file']['crc32']:08x}"}
            )
        for name, (shape, dtype, boxes) in part["tensors"].items():
            entry = tensors.setdefault(name, {"shape": shape, "dtype": dtype, "boxes": []})
            first = by.setdefault(name, rank)
            if entry["shape"] != shape or entry["dtype"] != dtype:
                raise ManifestError(
                    f"{name} is {entry['dtype']}{entry['shape']} on rank {first}, and {dtype}{shape} on rank {rank}; "
                    "tensors with the same name must be parts of one tensor: make it a DTensor, or use different "
                    "names"
                )
            known = seen.setdefault(name, {})
            for offset, sizes, start, checksum in boxes:
                is_copy = tuple(offset) in known
                if known.setdefault(tuple(offset), tuple(sizes)) != tuple(sizes):
                    raise ManifestError(
                        f"{name}: ranks have written different boxes at {offset}: {sizes} on rank {rank}"
                    )
                if sums.setdefault((name, tuple(offset)), checksum) != checksum and name not in buffers:
                    raise ManifestError(
                        f"{name}: rank {rank} and an earlier rank have written different values of the same elements, "
                        f"at {offset} of sizes {sizes}; ranks that hold the same part of a tensor must have the same "
                        "values: use a different name on each rank, or broadcast the tensor"
                    )
                if is_copy:
                    files[-1].setdefault("copies", []).append([name, sizes, start, f"{checksum:08x}"])
                else:
                    entry["boxes"].append([offset, sizes, len(files) - 1, start, f"{checksum:08x}"])
    for name, entry in tensors.items():
        written = sum(math.prod(sizes) for sizes in seen[name].values())
        if written != math.prod(entry["shape"]):
            raise ManifestError(
                f"{name}: ranks have written {written} of the {math.prod(entry['shape'])} elements of shape "
                f"{entry['shape']}; the rank that should have written the others does not have the tensor: the states "
                "of an optimizer must exist on all ranks, or on none. The next save compares the ranks again"
            )
    values = head["values"]
    for part in parts:
        _add_values(values, part.get("values"))
    states = [entry["boxes"][0][4] for name, entry in tensors.items() if name.startswith("rng.")]
    head = {**head, "same_random_state": len(set(states)) == 1}
    manifest = {"format": FORMAT, "version": VERSION, **head, "files": files, "tensors": dict(sorted(tensors.items()))}
    return manifest, warnings


def _add_values(values: Any, others: Mapping[str, Any] | None) -> None:
    """What only another rank has: modules and optimizers of another pipeline stage."""
    if others is None:
        return
    if others["model"] is not None:
        mine = values["model"] or {"aliases": {}, "extra": {}}
        values["model"] = {key: others["model"][key] | mine[key] for key in ("aliases", "extra")}
    for name, theirs in others["optimizers"].items():
        own = values["optimizers"].setdefault(name, theirs | {"param_groups": [], "state": {}})
        own["state"] = theirs["state"] | own["state"]
        known = {parameter for group in own["param_groups"] for parameter in group["params"]}
        same = own["param_groups"][: len(theirs["param_groups"])]  # a group of which each stage has a part
        for index, group in enumerate(theirs["param_groups"]):
            new = [parameter for parameter in group["params"] if parameter not in known]
            if index < len(same) and same[index]["options"] == group["options"]:
                same[index]["params"] += new
            elif new:
                own["param_groups"].append({"params": new, "options": group["options"]})


def _compare_optimizers(parts: Sequence[Mapping[str, Any]]) -> None:
    """A rank without one would leave out the states of what it alone holds, and nobody would miss them."""
    having = [rank for rank, part in enumerate(parts) if part.get("optimizers")]
    lacking = [rank for rank, part in enumerate(parts) if part.get("lacks_optimizer")]
    if having and lacking:
        raise ManifestError(
            f"rank {having[0]} saves an optimizer, and rank {lacking[0]} saves none; pass the optimizer on every rank"
        )


def _compare_samples(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    first: dict[str, tuple[int, str]] = {}
    different: dict[str, tuple[int, int]] = {}
    buffers: set[str] = set()
    for rank, part in enumerate(parts):
        buffers.update(part["buffers"])
        for name, sample in part["samples"].items():
            at, known = first.setdefault(name, (rank, sample))
            if known != sample:
                different.setdefault(name, (at, rank))
    wrong = [name for name in different if name not in buffers]
    if wrong:
        listed = ", ".join(f"{name} (ranks {different[name][0]} and {different[name][1]})" for name in wrong[:_SHOWN])
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ManifestError(
            f"plain tensors with the same name have different values on several ranks: {listed}{more}. One of them "
            "would be saved and the others lost. Make them DTensors (parts of one tensor), or use a different name "
            "on each rank"
        )
    if different:
        listed = ", ".join(sorted(different)[:_SHOWN])
        return [
            f"buffers differ between ranks, and those of the first rank that has them are saved: {listed}"
            + (f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else "")
        ]
    return []


# Files are opened for reading only if they are regular ones; the standard library only. Opening a named pipe blocks
# until another process opens it for writing, and a device may have no end.


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor. Raises OSError, which says what is there instead of a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "named pipe", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
        kind = kinds.get(stat.S_IFMT(mode), "special file")
        raise OSError(errno.EINVAL, f"it is a {kind}, expected a regular file")
    return descriptor


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """The whole file. Raises OSError as :func:`open_regular` does."""
    with open(open_regular(path), "rb") as file:
        return file.read()


MANIFEST = "manifest.json"
POINTER = "latest"
_STEP = re.compile(r"step-(\d+)")
_UNFINISHED = re.compile(r"(?:step-\d+|latest|probe)\.(?:tmp|old)-[0-9a-f]{16}")


def step_name(step: int) -> str:
    return f"step-{step}"


def step_numbers(folder: str) -> list[int]:
    """Steps by name, ascending, complete or not; none if there is no folder."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(
        int(match[1]) for name in names if (match := _STEP.fullmatch(name)) and name == f"step-{int(match[1])}"
    )


def read_manifest(step_folder: str) -> dict[str, Any]:
    """Raises ManifestError, with the path, if there is none or it is damaged."""
    path = os.path.join(step_folder, MANIFEST)
    try:
        return parse(read_regular(path))
    except (OSError, ValueError) as error:
        raise ManifestError(f"{path}: {error}") from error


def find_problems(step_folder: str) -> list[str]:
    """Why a step is not complete; nothing if it is. Reads the manifest, and sizes of files."""
    try:
        manifest = read_manifest(step_folder)
    except ManifestError as error:
        return [str(error)]
    found = []
    for file in manifest["files"]:
        path = os.path.join(step_folder, file["name"])
        try:
            size = os.stat(path).st_size
        except OSError as error:
            found.append(f"{path}: {error.strerror}")
            continue
        if size != file["bytes"]:
            found.append(f"{path} has {size} bytes, expected {file['bytes']}")
    return found


def complete_steps(folder: str, tell: Callable[[int, list[str]], None] = lambda step, problems: None) -> list[int]:
    """Ascending. ``tell`` is called with each step that is not complete, and its problems."""
    found = []
    for step in step_numbers(folder):
        problems = find_problems(os.path.join(folder, step_name(step)))
        if problems:
            tell(step, problems)
        else:
            found.append(step)
    return found


@dataclass(frozen=True)
class Retention:
    """Which steps stay: the newest ``keep`` (None: all), each multiple of ``keep_every``, and that with the best metric."""

    keep: int | None
    keep_every: int | None = None
    best: str | None = None
    largest_is_best: bool = False

    def surplus(self, folder: str, steps: list[int], saved: str) -> list[int]:
        """Of these complete steps, ascending, those that may go; never ``saved``, which may be older than all others."""
        if self.keep is None:
            return []
        staying = {*steps[-self.keep :], *(step for step in steps if step_name(step) == saved)}
        if self.keep_every:
            staying |= {step for step in steps if step % self.keep_every == 0}
        if self.best is not None:
            values = {step: self._metric(os.path.join(folder, step_name(step))) for step in steps}
            known = [(value, step) for step, value in values.items() if value is not None]
            if known:
                staying.add(max(known)[1])
        return [step for step in steps if step not in staying]

    def _metric(self, step_folder: str) -> float | None:
        """Such that larger is better."""
        metric = read_manifest(step_folder).get("metric")
        if not metric or metric["name"] != self.best or metric["value"] is None:
            return None
        return float(metric["value"]) if self.largest_is_best else -float(metric["value"])


def commit(job: Mapping[str, Any]) -> dict[str, Any]:
    """Make a temporary folder, in which all ranks have written their files, a complete step.

    Each line below is on the disk before the next begins, and nothing that was there before is touched until the new step is
    complete: manifest, names in the folder, the folder's own name, the pointer. Then steps that are not kept are removed.

    Args (a JSON object): ``parent``, ``temporary`` and ``name`` (folder, names in it), ``head`` and ``parts`` (see
    :func:`merge_parts`), ``id``, ``replace`` (an existing folder of that name), ``points`` (write the pointer),
    ``retention`` (fields of :class:`Retention`, or None), ``aside`` (steps to put aside).

    Returns ``{"warnings": [...], "is_new": whether ranks have to agree anew who writes what}``.

    Raises OSError and ManifestError; the step is then not there. What fails behind it (the pointer, removing) is a warning.
    """
    parent, temporary = job["parent"], os.path.join(job["parent"], job["temporary"])
    final = os.path.join(parent, job["name"])
    parts = [unpack_part(part) for part in job["parts"]]
    manifest, warnings = merge_parts(job["head"], parts)
    _write(os.path.join(temporary, MANIFEST), serialize(manifest))
    _disk.sync_folder(temporary)
    old = f"{final}.old-{job['id']}"
    if not os.path.lexists(final):
        _disk.rename(temporary, final)
    else:
        if not job["replace"]:
            raise FileExistsError(
                f"{final} already exists: another job saves to this folder, or this job was not restored from it; use "
                "another folder, or remove that step"
            )
        if _disk.exchange(temporary, final):
            _disk.rename(temporary, old)
        else:  # a reader between the two finds the steps before; clean() takes an interrupted replacement back
            _disk.rename(final, old)
            _disk.rename(temporary, final)
    _disk.sync_folder(parent)
    if job["points"]:
        try:
            _point(parent, job["name"], job["id"])
        except OSError as error:  # the new step is there, and readers look for it themselves
            warnings.append(f"{os.path.join(parent, POINTER)} could not be replaced: {error}")
    _disk.remove_tree(old)
    for step in job["aside"]:
        source = os.path.join(parent, step_name(step))
        if os.path.isdir(source):
            _disk.rename(source, f"{source}.aside-{job['id']}")
            warnings.append(
                f"{source} is newer than the step that was restored, and has been renamed to {source}.aside-{job['id']}"
            )
    if job["retention"] is not None:
        try:
            retention = Retention(**job["retention"])
            complete = complete_steps(parent)
            newer = [step for step in complete if step > job["head"]["step"]]
            if newer:
                warnings.append(
                    f"{parent} has steps {newer}, which are newer than {job['name']}: restore() takes step "
                    f"{newer[-1]}. If they belong to an earlier run, use another folder, or first restore the step "
                    "that this run continues from"
                )
            for step in retention.surplus(parent, complete, job["name"]):
                _remove(parent, step_name(step), job["id"])
        except (OSError, ManifestError) as error:  # the new step is there
            warnings.append(f"steps that are no longer kept could not be removed: {error}")
    return {"warnings": warnings, "is_new": any(part["is_new"] for part in parts)}


def pack_part(part: Mapping[str, Any]) -> str:
    """A part as short text, to be sent to the rank that commits."""
    return base64.b85encode(zlib.compress(json.dumps(part, separators=(",", ":")).encode(), 1)).decode()


def unpack_part(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b85decode(text)))
    return found


def clean(folder: str, living: Collection[str] = ()) -> list[str]:
    """Remove what jobs that have ended left unfinished, but nothing of the ids that are ``living``; the paths. An unfinished
    replacement of a step, whose name is missing, is taken back first."""
    removed = []
    for name in sorted(os.listdir(folder)):
        if not _UNFINISHED.fullmatch(name) or name.rpartition("-")[2] in living:
            continue
        path = os.path.join(folder, name)
        base = name.rsplit(".", 1)[0]
        is_away = f"{base}.old-" in name and _STEP.fullmatch(base) and not os.path.lexists(os.path.join(folder, base))
        if is_away and not find_problems(path) and not _is_pruned(folder, base):
            _disk.rename(path, os.path.join(folder, base))
            continue
        _disk.remove_tree(path)
        removed.append(path)
    return removed


def remove_unfinished(folder: str, own: str) -> None:
    """What was written under this id and is no step yet."""
    for name in os.listdir(folder):
        if name.endswith(f".tmp-{own}"):
            _disk.remove_tree(os.path.join(folder, name))


def _is_pruned(folder: str, name: str) -> bool:
    """A step older than another complete one was on its way out."""
    match = _STEP.fullmatch(name)
    assert match is not None
    return any(step > int(match[1]) for step in complete_steps(folder))


def _remove(parent: str, name: str, own: str) -> None:
    """First the name: a step that is half removed is no step."""
    path = os.path.join(parent, name)
    _disk.rename(path, f"{path}.old-{own}")
    _disk.sync_folder(parent)
    _disk.remove_tree(f"{path}.old-{own}")


def _point(parent: str, name: str, own: str) -> None:
    """Replace the pointer."""
    made = os.path.join(parent, f"{POINTER}.tmp-{own}")
    _disk.remove_tree(made)
    try:
        _write(made, f"{name}\n".encode())
        _disk.rename(made, os.path.join(parent, POINTER))
    except OSError:
        _disk.remove_tree(made)
        raise
    _disk.sync_folder(parent)


def _write(path: str, data: bytes) -> None:
    descriptor = _disk.create(path)
    try:
        _disk.write(descriptor, data)
        _disk.sync(descriptor)
    finally:
        _disk.close(descriptor)
