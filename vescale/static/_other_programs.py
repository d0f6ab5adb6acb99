"""``OtherPrograms``: programs of a model that are not in use."""

from __future__ import annotations

from vescale.static._program import StaticProgram

__all__ = ["OtherPrograms"]

_MAX_OTHERS = 3  # of each kind of call
_MAX_MISSES = 4  # steps in succession that met what a program has not recorded, after which another one is used


class OtherPrograms:
    """Programs whose guards did not hold when they were used last, or whose steps met what had not been recorded.

    Args:
        programs: those in use, by the kind of call. One for which no other is left is removed: the next step of its kind is
            recorded.
    """

    def __init__(self, programs: dict[str, StaticProgram]) -> None:
        self._programs = programs
        self._others: dict[str, list[StaticProgram]] = {}

    def exchanged(self, key: str, program: StaticProgram) -> StaticProgram | None:
        """A program whose guards hold, in place of one whose do not; None: the next step is recorded. Training and
        evaluation in turns are recorded once each."""
        others = self._others.setdefault(key, [])
        others[:] = [other for other in others if not other.guards.have_replaced()]
        fitting = next((other for other in others if not other.guards.broken()), None)
        return self._exchange(key, program, fitting, is_kept=not program.guards.have_replaced())

    def note_miss(self, key: str, program: StaticProgram, may_record: bool) -> None:
        """A step met what the program in use has not recorded. If that lasts, a program that was in use before takes its
        place; if none is left that has not missed since, the next step is recorded."""
        others = self._others.setdefault(key, [])
        if not program.misses:  # it has run meanwhile, so that others may again
            for other in others:
                other.misses = 0
        program.misses += 1
        if program.misses < _MAX_MISSES or self._programs.get(key) is not program:
            return
        fitting = next((other for other in others if not other.misses and not other.guards.broken()), None)
        if fitting is not None or may_record:
            self._exchange(key, program, fitting, is_kept=True)
        if fitting is not None:
            fitting.misses = _MAX_MISSES - 1  # the next one is tried at once, unless it runs

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
