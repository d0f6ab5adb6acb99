"""What a user is told about C++ helpers that are not there, or were built for another torch."""

from __future__ import annotations

import os
import warnings

import torch.distributed as dist

from vescale import csrc
from vescale.compat.native_dispatch import IS_STOCK
from vescale.errors import MissingHelpersWarning, StaticHelpersError

__all__ = ["require_native_static", "warn_of_missing_helpers"]

_has_looked = False


def warn_of_missing_helpers() -> None:
    """Tell once in a process, on rank 0, which helpers are missing, why, what it costs, and the command that builds them.

    Nothing where all of them are there, or ``VESCALE_NO_NATIVE`` switches them off.
    """
    global _has_looked
    if _has_looked:
        return
    _has_looked = True
    missing = csrc.missing_helpers()
    if missing and _rank() == 0:
        cost = "an op takes 3 to 5 times the host time" if "dispatch" in missing else "they take more host time"
        warnings.warn(
            f"{len(missing)} of {len(csrc.helper_states())} C++ helpers are missing; Python gives the same results, but "
            f"{cost}. {_reasons(missing)}. Build them with a C++ compiler: {csrc.rebuild_command()}; or set "
            "VESCALE_NO_NATIVE=1 to run without them",
            MissingHelpersWarning,
            stacklevel=2,
        )


def require_native_static() -> None:
    """Raises StaticHelpersError where static mode cannot run, because the C++ dispatcher is missing or switched off."""
    if not IS_STOCK and csrc.dispatcher() is not None:
        return
    missing = csrc.missing_helpers()
    if "dispatch" in missing:
        why = f"{_reasons(missing)}. Build them with a C++ compiler: {csrc.rebuild_command()}"
    else:
        setting = "VESCALE_DISPATCH=stock" if IS_STOCK else "VESCALE_NO_NATIVE=1"
        why = f"{setting} switched them off when vescale was imported; unset it"
    raise StaticHelpersError(f"mode='static' needs the C++ helpers; {why}; or leave out mode=")


def _reasons(missing: dict[str, str]) -> str:
    """Helpers with one reason together."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in missing.items():
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())


def _rank() -> int:
    """Of this process; before there is a process group, by ``torchrun``'s variable. 0: there is only this one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0
