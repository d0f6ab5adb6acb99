"""Matches paths with the tensors and modules of a model within a time budget, and explains paths without a match."""

from __future__ import annotations

import difflib
import itertools
import time
from collections.abc import Iterable, Mapping

import regex

from vescale.compat import WRAPPER_MODULES
from vescale.errors import SlowPathError
from vescale.ir._findings import Findings, merge_repeats, name_list
from vescale.ir._model_index import ModelIndex
from vescale.plans import Path, Source

# A match of an honest expression takes a few microseconds; a hostile one grows without bound with the length of a name.
# The budget is CPU time of this thread for a whole plan: a floor, and a hundred times the honest cost. Other threads, and
# other processes of a busy machine, must not spend it.
_FLOOR_SECONDS = 0.5
_SECONDS_PER_MATCH = 300e-6
# Advice is dear: it looks for names that are nearly right. A plan for another model has no use for it on every line.
_MAX_ADVICE = 30


class Matcher:
    """Matches paths against one model; equal expressions are matched once."""

    def __init__(self, index: ModelIndex, findings: Findings) -> None:
        self._index = index
        self._findings = findings
        self._found: dict[tuple[str, bool], tuple[str, ...]] = {}
        self._seconds_left = _FLOOR_SECONDS
        self._advice_left = _MAX_ADVICE

    def states(self, path: Path, what: str, source: Source | None) -> tuple[str, ...]:
        """First names of the parameters and buffers (parameters only for ``.grad``) that match; a finding when none."""
        matched = self._fullmatch(path, source, of_modules=False)
        found = self._first_names(matched, self._index.state_names, self._index.state_aliases)
        if not found:
            self._findings.error("no-match", f"{what} '{path}' {self._no_state(path)}", source)
        return found

    def modules(self, path: Path, what: str, source: Source | None) -> tuple[str, ...]:
        """First names of the modules that match; a finding when none."""
        matched = self._fullmatch(path, source, of_modules=True) if path.pattern else ("",)
        found = self._first_names(matched, self._index.module_names, self._index.module_aliases)
        if not found:
            self._findings.error("no-match", f"{what} '{path}' {self._no_module(path)}", source)
        return found

    @staticmethod
    def _first_names(
        matched: Iterable[str], names: Mapping[str, str], aliases: Mapping[str, tuple[str, ...]]
    ) -> tuple[str, ...]:
        return tuple(dict.fromkeys(n for name in matched for n in ((names[name],) if name in names else aliases[name])))

    def _fullmatch(self, path: Path, source: Source | None, *, of_modules: bool) -> tuple[str, ...]:
        key = (path.pattern, of_modules)
        if key not in self._found:
            index = self._index
            names = (
                (*index.module_names, *index.module_aliases)
                if of_modules
                else (*index.state_names, *index.state_aliases)
            )
            allowance = len(names) * _SECONDS_PER_MATCH
            start = time.thread_time()
            found: list[str] = []
            for name in names:
                seconds_left = self._seconds_left + allowance - (time.thread_time() - start)
                if seconds_left <= 0 or not self._finished(path, name, seconds_left, found):
                    raise SlowPathError(
                        f"the path '{path}' takes too long to match (over {self._seconds_left + allowance:.1f} s for "
                        f"{len(names)} names); write it without nested repetitions such as (a+)+ or (.*)*",
                        source,
                    )
            self._found[key] = tuple(found)
            self._seconds_left -= max(0.0, time.thread_time() - start - allowance)
        return self._found[key]

    @staticmethod
    def _finished(path: Path, name: str, seconds: float, found: list[str]) -> bool:
        """Add ``name`` to ``found`` if it matches; False when that takes too long."""
        left = seconds
        while left > 0:
            start = time.thread_time()
            try:
                if path.matches(name, timeout=left):
                    found.append(name)
                return True
            except TimeoutError:  # of a clock on the wall, during which this thread may hardly have run
                left -= max(time.thread_time() - start, seconds / 100)
        return False

    def _may_advise(self) -> bool:
        self._advice_left -= 1
        return self._advice_left >= 0

    def _no_state(self, path: Path) -> str:
        model = type(self._index.model).__name__
        text = f"matches no parameter or buffer of {model}"
        if not self._may_advise():
            return text
        modules = [name for name in self._index.module_names if name and self._matches(path, name)]
        if modules:
            own = sorted({n.rpartition(".")[2] for n in self._index.state_names if n.rpartition(".")[0] in modules})
            advice = f"add .{own[0]}" if own else "name a parameter of it, or write .<in> or .<out>"
            return f"{text}; it does match the module {name_list(modules)}: {advice}"
        return f"{text}{_closest(path.pattern, self._index.state_names)}"

    def _no_module(self, path: Path) -> str:
        text = f"matches no module of {type(self._index.model).__name__}"
        if not self._may_advise():
            return text
        states = [name for name in self._index.state_names if self._matches(path, name)]
        if states:
            modules = dict.fromkeys(name.rpartition(".")[0] for name in states)
            return f"{text}, but the tensor {name_list(states)}; name the module: {name_list(modules)}"
        return f"{text}{_closest(path.pattern, self._index.module_names)}"

    def _matches(self, path: Path, name: str) -> bool:
        try:
            return path.matches(name, timeout=0.01)
        except TimeoutError:
            return False


def _closest(pattern: str, names: Iterable[str]) -> str:
    """``; closest: ...`` with up to three names like the expression's plainest reading, repeated layers merged."""
    merged = [name for name, _, _ in merge_repeats((name, None) for name in names) if name]
    plain = _plain(pattern)
    inner = {".".join(part for part in name.split(".") if part not in WRAPPER_MODULES): name for name in merged}
    close = [inner[name] for name in difflib.get_close_matches(plain, inner, n=3, cutoff=0.6)]
    if not close:
        ends = {name: _common_end(name, plain) for name in merged}
        longest = max(ends.values(), default=0)
        close = [name for name in merged if ends[name] == longest > 0][:3]
    return f"; closest: {', '.join(close)}" if close else ""


def _common_end(name: str, other: str) -> int:
    """How many parts two dotted names have in common at their ends."""
    pairs = zip(reversed(name.split(".")), reversed(other.split(".")))
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _plain(pattern: str) -> str:
    """A plain name that the expression was probably written for: first alternatives, ``0`` for numbers."""
    text = regex.sub(r"\\d[+*]?|\[0-9\][+*]?", "0", pattern)
    text = regex.sub(r"\((?:\?:|\?P<\w+>)?([^()|]*)(?:\|[^()]*)?\)[?*+]?", r"\1", text)
    return text.replace("\\", "")
