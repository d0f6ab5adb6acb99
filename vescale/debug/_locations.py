"""Where a rank is: module, phase and line, from the stack of a thread, of a starting collective, or of a traceback."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
import traceback
import types
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import typing_extensions
from torch import nn

from vescale.compat import current_autograd_node

_PACKAGE = str(Path(__file__).parent.parent)
_TORCH = str(Path(torch.__file__).parent)
_DEPRECATIONS = str(Path(typing_extensions.__file__))  # wrappers around functions of torch
_STDLIB = sysconfig.get_paths()["stdlib"]


@dataclass(frozen=True)
class Place:
    """A point of a training program.

    Attributes:
        module: path in the model of the module whose forward, or its gradient, runs; "" for the model itself, None outside.
        phase: ``forward``, ``backward``, ``optimizer``, ``checkpoint`` or "".
        line: ``file:line (function)`` of the program, outside of torch and this library.
        stage: ``stage 1, micro-batch 0``, of a pipeline; "" outside.
    """

    module: str | None
    phase: str
    line: str
    stage: str = ""

    def text(self) -> str:
        inside = ""
        if self.module is not None:
            inside = f" in {self.phase or 'forward'} of {self.module or 'the model'}"
        elif self.phase:
            inside = f" in {self.phase}"
        return f"{self.line or 'an unknown line'}{inside}{f' ({self.stage})' if self.stage else ''}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def running_place() -> Place:
    """The location of the code that this thread runs."""
    where = None
    if "vescale.runtime" in sys.modules:
        from vescale.runtime import locate

        where = locate()
    frames = _frames(sys._getframe(1))
    found = place_of_frames(frames)
    if where is not None:
        return Place(where.path, where.phase, found.line, found.stage)
    if found.phase in ("", "forward") and current_autograd_node() is not None:
        return Place(found.module, "backward", found.line, found.stage)
    return found


def running_stage(frame: types.FrameType) -> tuple[str, list[int]]:
    """The stage and micro-batch of a pipeline in which the code of ``frame`` runs, "" outside, and the ranks that run it."""
    found: types.FrameType | None = frame
    while found is not None:
        code = found.f_code
        if code.co_name in _OF_STAGES and code.co_argcount:
            stage = found.f_locals.get(code.co_varnames[0])
            if hasattr(stage, "stage_index"):
                mesh = getattr(stage, "mesh", None)
                return _stage_text(found, stage), mesh.mesh.flatten().tolist() if mesh is not None else []
        found = found.f_back
    return "", []


def _stage_text(frame: types.FrameType, stage: Any) -> str:
    return f"stage {stage.stage_index}, micro-batch {frame.f_locals.get(frame.f_code.co_varnames[1])}"


def place_of_traceback(trace: types.TracebackType | None) -> Place:
    """The location of the innermost frame of a traceback."""
    frames = []
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return place_of_frames(frames[::-1])


def main_thread_stack() -> tuple[Place, str]:
    """The location of the main thread, and its stack as text; call it on another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return Place(None, "", ""), ""
    return place_of_frames(_frames(frame)), "".join(traceback.format_stack(frame))


def main_thread_waits() -> bool:
    """Whether the main thread is in a call of ``torch.distributed``, or in a ``wait()``; call it on another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return False
    path = frame.f_code.co_filename
    return path.startswith(f"{_TORCH}/distributed/") or ".wait(" in linecache.getline(path, frame.f_lineno)


def _frames(frame: types.FrameType | None) -> list[tuple[types.FrameType, int]]:
    found = []
    while frame is not None:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return found


def place_of_frames(frames: list[tuple[types.FrameType, int]]) -> Place:
    """``frames``: innermost first, with their current lines."""
    line, phase, module, stage = "", "", None, ""
    owners: list[nn.Module] = []
    for frame, number in frames:
        code = frame.f_code
        is_library = code.co_filename.startswith((_PACKAGE, _TORCH, _DEPRECATIONS, "<"))
        if not is_library and not line and _is_program(code):
            line = f"{code.co_filename}:{number} ({code.co_name})"
        if "torch/distributed/checkpoint" in code.co_filename or "vescale/checkpoint" in code.co_filename:
            phase = "checkpoint"
        elif "torch/optim/" in code.co_filename or "vescale/optim/" in code.co_filename:
            phase = phase or "optimizer"
        if not code.co_argcount:
            continue
        first = frame.f_locals.get(code.co_varnames[0])
        if code.co_name in _OF_STAGES and hasattr(first, "stage_index"):
            stage = _stage_text(frame, first)
        if isinstance(first, nn.Module):
            if code.co_name in ("forward", "_call_impl"):
                owners.append(first)
        elif isinstance(first, torch.autograd.function.FunctionCtx) and code.co_name == "backward" and module is None:
            phase, module = "backward", _module_of_node(first)
        elif module is None and isinstance(found := getattr(first, "_module_fqn", None), str):
            module = found  # PyTorch's FSDP, which runs between modules
        if code.co_name == "backward" and not phase and code.co_filename.startswith(_TORCH):
            phase = "backward"
    if module is None and owners:
        module = _path_in(owners[-1], owners[0])
        phase = phase or "forward"
    return Place(module, phase, line, stage)


# Methods of torch.distributed.pipelining's stages; their second argument is the number of the micro-batch.
_OF_STAGES = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


def _is_program(code: types.CodeType) -> bool:
    """Whether a file is neither Python's own nor a launcher's."""
    return not code.co_filename.startswith(_STDLIB) or "site-packages" in code.co_filename


# Paths of modules by the outermost module that ran.
_PATHS: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()


def _path_in(root: nn.Module, module: nn.Module) -> str:
    known = _PATHS.get(root, {})
    if id(module) not in known:
        known = _PATHS[root] = {id(part): name for name, part in root.named_modules()}
    return known.get(id(module), type(module).__name__)


def _module_of_node(node: Any) -> str | None:
    """The module of a parallelized model in whose forward an autograd node was made."""
    if "vescale.runtime" not in sys.modules:
        return None
    from vescale.runtime import module_of_node

    return module_of_node(node)
