"""``report``: what of a model runs static, and why the rest does not."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

from vescale.static._install import static_forward

_PLACED = re.compile(r"(\S.*?\.\w+|<[^>]*>):(\d+):? (.*)", re.DOTALL)


@dataclass(frozen=True)
class Fallback:
    """A module that ran in eager mode.

    Attributes:
        path: of the module; "" for the model.
        file, line: of the model's code; "" and 0 where no single line is the reason.
        reason: why.
        steps: how many forwards of the model ran so.
    """

    path: str
    file: str
    line: int
    reason: str
    steps: int

    def __str__(self) -> str:
        place = f" ({self.file}:{self.line})" if self.file else ""
        return f"{self.path or 'the model'}{place}: {self.reason}; {self.steps} steps"


@dataclass(frozen=True)
class EagerFunction:
    """A torch function of a static module that runs on DTensors."""

    path: str
    function: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path or 'the model'}, {self.function}: {self.reason}"


@dataclass(frozen=True)
class StaticReport:
    """What ran so far, of all recorded kinds of steps.

    Attributes:
        static: paths of the modules whose forward runs on local tensors.
        fallbacks: modules in eager mode, the model itself among them.
        eager_functions: torch functions of static modules that run on DTensors.
        recordings: how many steps were recorded.
        static_steps: how many forwards of the model ran in static mode.
    """

    static: tuple[str, ...]
    fallbacks: tuple[Fallback, ...]
    eager_functions: tuple[EagerFunction, ...]
    recordings: int
    static_steps: int

    def __str__(self) -> str:
        lines = [f"{self.static_steps} static steps, {self.recordings} recordings, {len(self.static)} static modules"]
        lines += [f"  eager: {fallback}" for fallback in self.fallbacks]
        lines += [f"  on DTensors: {function}" for function in self.eager_functions]
        return "\n".join(lines)


def report(model: nn.Module) -> StaticReport:
    """What of a model in static mode runs on local tensors, and why the rest does not. No communication.

    Raises KeyError for a model that is not in static mode.

    Args:
        model: what :func:`~vescale.parallelize` returned.
    """
    forward = static_forward(model)
    fallbacks = [Fallback("", *_split(reason), steps) for reason, steps in forward.fallbacks.items()]
    static: dict[str, None] = {}
    functions: dict[EagerFunction, None] = {}
    for _, program in forward.programs():
        if not program.is_static:
            continue
        static.update(dict.fromkeys(program.static_modules()))
        functions.update({EagerFunction(*call): None for call in program.eager_calls()})
        fallbacks += [Fallback(path, *_split(reason), program.steps) for path, reason in program.eager_modules.items()]
    return StaticReport(tuple(static), tuple(fallbacks), tuple(functions), forward.recordings, forward.static_steps)


def _split(reason: str) -> tuple[str, int, str]:
    """File, line and reason of ``"file:line: reason"`` and ``"file:line reason"``."""
    found = _PLACED.fullmatch(reason)
    return (found[1], int(found[2]), found[3]) if found is not None else ("", 0, reason)
