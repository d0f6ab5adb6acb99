"""``manifest.json``: its text, with the checksum of itself, and how the parts of all ranks become one.

The standard library only.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from vescale.errors import ManifestError

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
