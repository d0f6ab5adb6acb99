"""``OtherPrograms``: programs of a model that are not in use."""

from __future__ import annotations

from vescale.static._program import StaticProgram

__all__ = ["OtherPrograms"]

_MAX_OTHERS = 3  # of each kind of call
_MAX_MISSES = 4  # unrecorded steps in succession, after which a program is replaced


class OtherPrograms:
    """Programs that were replaced: their guards did not hold, or several steps in succession took unrecorded branches.

    Args:
        programs: those in use, by the kind of call. One for which no other is left is removed: the next step of its kind is
            recorded.
    """

    def __init__(self, programs: dict[str, StaticProgram]) -> None:
        self._programs = programs
        self._others: dict[str, list[StaticProgram]] = {}

    def exchanged(self, key: str, program: StaticProgram) -> StaticProgram | None:
        """Replace ``program``, whose guards do not hold. Returns a program whose guards hold, or None if there is none: the
        next step is then recorded. If training and evaluation alternate, each is recorded once."""
        others = self._others.setdefault(key, [])
        others[:] = [other for other in others if not other.guards.have_replaced()]
        fitting = next((other for other in others if not other.guards.broken()), None)
        return self._exchange(key, program, fitting, is_kept=not program.guards.have_replaced())

    def note_miss(self, key: str, program: StaticProgram, may_record: bool) -> None:
        """Count a step that took a branch which ``program`` has not recorded. After several in succession, another program
        is tried. When all have failed, and ``may_record`` is set, the next step is recorded."""
        others = self._others.setdefault(key, [])
        if not program.misses:  # it has succeeded since, so that the others are tried again
            for other in others:
                other.misses = 0
        program.misses += 1
        if program.misses < _MAX_MISSES or self._programs.get(key) is not program:
            return
        fitting = next((other for other in others if not other.misses and not other.guards.broken()), None)
        if fitting is not None or may_record:
            self._exchange(key, program, fitting, is_kept=True)
        if fitting is not None:
            fitting.misses = _MAX_MISSES - 1  # if it fails, the next one is tried at once

    def _exchange(
        self, key: str, program: StaticProgram, fitting: StaticProgram | None, is_kept: bool
    ) -> StaticProgram | None:
        others = self._others[key]
        del self._programs[key]
        if fitting is not None:
            others.remove(fitting)
            self._programs[key] = fitting
        if is_kept:
            others.append(program)
        del others[:-_MAX_OTHERS]
        return fitting
