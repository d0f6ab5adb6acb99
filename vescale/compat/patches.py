"""What puts the table of patches (:mod:`vescale.compat.patch_table`) in place and takes it back.

The patches of a *part* are put in place together, when the part is first used:

==============  ==================================================================================
``entry``       when ``vescale.placements`` is imported, as most of vescale does: one function, which does what it did
                until a placement is constructed
``placements``  the first placement that stock DTensor does not know (also :func:`fully_shard`)
``models``      :func:`vescale.parallelize`
``ops``         with the first of these two
``stages``      :func:`vescale.parallelize` of a plan with a pipeline
``random``      :func:`vescale.rng.enable`, which ``parallelize``, ``fully_shard`` and ``deferred_init`` call
``observation`` while collectives are observed (hang report, trace, ``verify``)
==============  ==================================================================================
"""

from __future__ import annotations

import os
import threading
import warnings
from typing import Any, NamedTuple

import torch.distributed as dist

from vescale import csrc
from vescale._model_parts import install_placement_parts
from vescale.compat.native_dispatch import IS_STOCK
from vescale.compat.needs import lacking, self_check
from vescale.compat.patch_table import PATCHES as PATCHES
from vescale.compat.patch_table import Patch as Patch
from vescale.compat.patching import HOOKS, Changes, rebind, undo
from vescale.compat.sharding_caches import clear_sharding_caches
from vescale.errors import MissingHelpersWarning, StaticHelpersError

# What a user is told about C++ helpers that are not there, or were built for another torch.

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


class PatchState(NamedTuple):
    """A group of the table in this process.

    Attributes:
        patch: the group.
        state: ``installed``, ``not installed`` or ``unavailable: `` and what is missing.
        changes: the name of each single thing that it has changed; empty unless it is installed.
    """

    patch: Patch
    state: str
    changes: tuple[str, ...]


# Parts that a program asks for by name, and those that come with them.
_ON_DTENSORS = ("placements", "models")
_COME_ALONG = ("entry", "ops")
# Parts that no sharding decision depends on: they come and go while a model trains, and decisions take longer than a step.
_WITHOUT_DECISIONS = frozenset({"entry", "observation", "stages"})
_LOCK = threading.RLock()
_APPLIED: list[tuple[Patch, Changes]] = []
# Hooks of the parts that the last uninstall() removed.
_REMOVED: dict[str, Any] = {}


def extend_entry() -> None:
    """Install the part ``entry``. For the module that placements are imported from: Python looks a function up before it
    constructs the placements among its arguments."""
    install_part("entry", None)


def extend_dtensor() -> None:
    """Install the parts ``entry`` and ``placements``, once in a process.

    Raises UnsupportedTorchError when this torch lacks something that it builds on; nothing is changed then.
    """
    if "placements" not in HOOKS:
        install_placement_parts()


def install() -> None:
    """Install again what :func:`uninstall` removed; in a program that has installed nothing, the part ``placements``.

    Does nothing when that has been done. Raises UnsupportedTorchError when this torch lacks something that the patches
    build on; nothing is changed then.
    """
    with _LOCK:
        if _REMOVED:
            _install({"entry": None, **_REMOVED})
            _REMOVED.clear()
    if HOOKS.keys() <= {"entry"}:
        extend_dtensor()


def install_part(part: str, hooks: Any) -> None:
    """Put the patches of a part in place, with what they run; does nothing when they are. All of them, or none."""
    with _LOCK:
        if part not in HOOKS:
            _install({part: hooks})
            _REMOVED.pop(part, None)


def _install(parts: dict[str, Any]) -> None:
    is_checked = parts.keys() <= _WITHOUT_DECISIONS and not HOOKS.keys() <= {"entry"}  # for what is installed
    if not is_checked and parts.keys() != {"entry"}:  # which is one public function
        self_check()
    new = {part: hooks for part, hooks in parts.items() if part not in HOOKS}
    if not new.keys().isdisjoint(_ON_DTENSORS):
        new.update((part, None) for part in _COME_ALONG if part not in HOOKS)
    num_before = len(_APPLIED)
    HOOKS.update(new)
    try:
        for patch in PATCHES:
            if patch.part in new and not (patch.feature and lacking(patch.feature)):
                _APPLIED.append((patch, Changes()))
                patch.apply(_APPLIED[-1][1], new[patch.part])
        rebind(*[changes for _, changes in _APPLIED[num_before:]])
        if not new.keys() <= _WITHOUT_DECISIONS:
            clear_sharding_caches()  # of decisions that were made without these parts
    except BaseException:
        _take_back(_APPLIED[num_before:])
        for part in new:
            del HOOKS[part]
        raise
    warn_of_missing_helpers()


def uninstall() -> None:
    """Leave PyTorch as it was found: every attribute, table entry and kernel is the very object that it was.

    Parallelized models and DTensors with vescale's placements must not be used until they are installed again, by
    :func:`install` or by the next ``parallelize`` or placement. Does nothing when nothing is installed.
    """
    with _LOCK:
        _take_back(list(_APPLIED))
        _REMOVED.update((part, hooks) for part, hooks in HOOKS.items() if part not in _COME_ALONG)
        HOOKS.clear()


def uninstall_part(part: str) -> None:
    """Take the patches of one part back, for good."""
    with _LOCK:
        _take_back([applied for applied in _APPLIED if applied[0].part == part])
        HOOKS.pop(part, None)
        _REMOVED.pop(part, None)


def _take_back(applied: list[tuple[Patch, Changes]]) -> None:
    undo(*[changes for _, changes in applied])
    for each in applied:
        _APPLIED.remove(each)
    if not {patch.part for patch, _ in applied} <= _WITHOUT_DECISIONS:
        clear_sharding_caches()


def is_installed(part: str | None = None) -> bool:
    """Whether the part, or any, is installed."""
    return part in HOOKS if part is not None else bool(HOOKS)


def patch_states() -> tuple[PatchState, ...]:
    """Each group of the table, with its state and each single thing that it has changed."""
    installed = {id(patch): changes for patch, changes in _APPLIED}

    def state(patch: Patch) -> PatchState:
        missing = lacking(patch.feature) if patch.feature else []
        if missing:
            return PatchState(patch, f"unavailable: torch lacks {', '.join(missing)}", ())
        if id(patch) not in installed:
            return PatchState(patch, "not installed", ())
        return PatchState(patch, "installed", tuple(installed[id(patch)].names()))

    return tuple(map(state, PATCHES))
