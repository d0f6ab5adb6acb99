"""When a placement holds."""

from __future__ import annotations

import enum

from vescale.errors import PhaseError

__all__ = ["ALL", "BWD", "FWD", "INIT", "RUN", "Phase", "parse_phase", "phase_text"]


class Phase(enum.Flag):
    """A set of phases of training.

    ========  =====================================================================
    ``INIT``  at rest: initialization, optimizer step, checkpoint
    ``FWD``   while the module computes its forward
    ``BWD``   while its backward runs; for ``<in>`` and ``<out>``, the gradient
    ``RUN``   ``FWD | BWD``
    ``ALL``   everything; what an entry without a phase means
    ========  =====================================================================
    """

    INIT = enum.auto()
    FWD = enum.auto()
    BWD = enum.auto()
    RUN = FWD | BWD
    ALL = INIT | RUN


INIT, FWD, BWD, RUN, ALL = Phase.INIT, Phase.FWD, Phase.BWD, Phase.RUN, Phase.ALL

_NAMES = {"init": INIT, "fwd": FWD, "bwd": BWD, "run": RUN, "all": ALL}


def parse_phase(text: str) -> Phase:
    """``init``, ``fwd``, ``bwd``, ``run`` or ``all``, in any case. Raises ValueError naming the choices."""
    try:
        return _NAMES[text.lower()]
    except KeyError:
        raise PhaseError(f"phase {text!r} is not one of {', '.join(_NAMES)}") from None


def phase_text(phase: Phase) -> str:
    """The name of a phase as :func:`parse_phase` reads it; sets without a name of their own are joined with ``|``."""
    for name, value in _NAMES.items():
        if value == phase:
            return name
    return "|".join(name for name, value in _NAMES.items() if name in ("init", "fwd", "bwd") and value in phase)
