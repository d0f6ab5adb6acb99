"""``vescale explain --profile``: what a step of the first rank costs the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vescale.cli._console import new_console, print_json, working
from vescale.cli._main import UsageError

if TYPE_CHECKING:
    from torch import nn

    from vescale.plans import Plan


def print_profile(model: nn.Module, plan: Plan, inputs: Mapping[str, Any], as_json: bool) -> int:
    """0: profiled. Raises UsageError for what cannot be profiled."""
    from vescale.debug import profile_host
    from vescale.errors import DebugOptionError

    if not inputs:
        raise UsageError(
            "--profile runs the forward, and the shapes of its inputs are not known; give --input NAME=SHAPE[:DTYPE]"
        )
    try:
        with working("running some steps"):
            found = profile_host(model, plan, inputs)
    except DebugOptionError as error:
        raise UsageError(f"--profile: {error}") from None
    if as_json:
        ops = [{**vars(op), "fallbacks": dict(op.fallbacks)} for op in found.dispatch.ops]
        times = ("first_step_seconds", "forward_seconds", "backward_seconds")
        print_json({name: getattr(found, name) for name in times} | {"is_native": found.dispatch.is_native, "ops": ops})
        return 0
    console = new_console()
    console.print(
        f"A step of the first rank takes {_ms(found.forward_seconds + found.backward_seconds)} of processor time "
        f"(forward {_ms(found.forward_seconds)}, backward {_ms(found.backward_seconds)}), the first one "
        f"{_ms(found.first_step_seconds)}; collectives cost nothing here"
    )
    print(found.dispatch)
    return 0


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
