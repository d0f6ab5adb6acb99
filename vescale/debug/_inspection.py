"""Requests to a stopped rank: values of expressions, checksums of their parts, and the rank's location."""

from __future__ import annotations

import json
import sys
import types
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale.compat import bytes_of, local_of, no_torch_function
from vescale.debug._hang_report import the_watch
from vescale.debug._locations import place_of_frames
from vescale.errors import kind_of

__all__ = ["Inspector"]

_SHOWN = 400  # characters of a value in a table
_NUM_BLOCKS = 64


class Inspector:
    """Answers requests about one frame, whose debugger evaluates expressions. Every answer is JSON."""

    def __init__(self, evaluate: Callable[[str], Any], frames: list[tuple[types.FrameType, int]]) -> None:
        self._value, self._frames = evaluate, frames

    def answer(self, kind: str, text: str) -> Any:
        """``{"error": ...}`` if the expression raises."""
        try:
            with no_torch_function(), torch.no_grad():
                return getattr(self, f"_{kind}")(text)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _all(self, expression: str) -> Any:
        text = repr(self._value(expression))
        return {"text": text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."}

    def _summary(self, expression: str) -> Any:
        value = self._value(expression)
        if not isinstance(value, torch.Tensor):
            return {"type": type(value).__name__, "text": repr(value)[:_SHOWN]}
        local = local_of(value) if isinstance(value, DTensor) else value
        found = {
            "type": type(value).__name__,
            "shape": list(value.shape),
            "local shape": list(local.shape),
            "dtype": str(value.dtype),
            "requires_grad": value.requires_grad,
            "part": "",
            "placements": "",
            "checksum": zlib.crc32(_bytes(local)),
            "numel": local.numel(),
        }
        if isinstance(value, DTensor):
            names = value.device_mesh.mesh_dim_names or tuple(map(str, range(value.device_mesh.ndim)))
            coordinate = value.device_mesh.get_coordinate() or [0] * len(names)
            found["placements"] = ", ".join(f"{name}={p}" for name, p in zip(names, value.placements))
            # Ranks that differ only on axes that replicate hold the same elements.
            found["part"] = str([c for c, p in zip(coordinate, value.placements) if not p.is_replicate()])
        return found

    def _blocks(self, text: str) -> Any:
        """Checksums of equal parts of a range of a tensor's elements; the elements themselves if they are few."""
        request = json.loads(text)
        value = self._value(request["expression"])
        local = (local_of(value) if isinstance(value, DTensor) else value).detach().reshape(-1)
        begin, end = request["range"]
        if end - begin <= _NUM_BLOCKS:
            return {"values": [repr(x) for x in local[begin:end].tolist()]}
        size = -(-(end - begin) // _NUM_BLOCKS)
        return {
            "size": size,
            "sums": [zlib.crc32(_bytes(local[i : min(i + size, end)])) for i in range(begin, end, size)],
        }

    def _specification(self, expression: str) -> Any:
        value = self._value(expression)
        if not isinstance(value, DTensor):
            return {"error": f"{expression} is {kind_of(value)}, not a DTensor; use p, or all"}
        mesh = value.device_mesh
        names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        placements = ", ".join(f"{name}={p}" for name, p in zip(names, value.placements))
        return {
            "ranks": mesh.mesh.flatten().tolist(),
            "text": f"shape {tuple(value.shape)}, {value.dtype}, {placements}",
        }

    def _full(self, expression: str) -> Any:
        """Collective: all ranks of the tensor's mesh call it."""
        return {"text": str(self._value(expression).full_tensor())}

    def _where(self, _: str) -> Any:
        place = place_of_frames(self._frames)
        program = None
        if "vescale.runtime" in sys.modules:
            from vescale.runtime import locate

            where = locate()
            if where is not None:
                program = where.runtime.program
                place = type(place)(where.path, where.phase, place.line, place.stage)
        lines = [f"at {place.text()}"]
        if program is not None:
            own = [i for i in program if i.path == place.module]
            lines += [f"  plan: {i.text(program.axes)}" + (f"  ({i.source})" if i.source else "") for i in own]
            if not own:
                lines.append("  plan: nothing for this module")
        watch = the_watch()
        if watch is None:
            lines.append("  pending collectives: not known (they are while vescale.debug.hang_report() is on)")
        else:
            pending = watch.pending()
            lines += [f"  pending: {text}" for text in pending] or ["  pending collectives: none"]
        return {"text": "\n".join(lines)}


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(bytes_of(tensor.detach().cpu()).numpy().tobytes())
