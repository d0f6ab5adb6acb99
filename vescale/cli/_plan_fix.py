"""``vescale lint --fix``: entries that make implicit communication explicit, written into the plan's file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import regex

if TYPE_CHECKING:
    from vescale.plans import Plan

_EDIT = regex.compile(r"write `([^`]+?): \{(\w+): ([^`]+)\}` in the plan's shard section")
_SECTION = regex.compile(r"^shard:\s*(?:#.*)?$", regex.MULTILINE)


def fix_plan(file: Path, load: Callable[[Path], Plan], look: Callable[[Plan], Sequence[str]]) -> list[str]:
    """Write the entries that reports propose into ``file``, each one only if the plan is still valid with it, and has fewer
    reports than before. Returns the lines that were written.

    Args:
        load: the plan in a file.
        look: the reports of a plan; raises if the plan does not fit.
    """
    written: list[str] = []
    reports = list(look(load(file)))
    tried: set[tuple[str, str, str]] = set()
    while True:
        edits = [(found[1], found[2], found[3]) for report in reports if (found := _EDIT.search(report)) is not None]
        edit = next((each for each in edits if each not in tried), None)
        if edit is None:
            return written
        tried.add(edit)
        for text, line in _candidates(file, load(file), *edit):
            with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".yaml", delete=False) as new:
                new.write(text)
            path = Path(new.name)
            try:
                after = list(look(load(path)))
            except Exception:  # the entry does not fit: it is not written
                path.unlink()
                continue
            if len(after) < len(reports):
                os.chmod(path, file.stat().st_mode & 0o7777)
                path.replace(file)
                written.append(line)
                reports = after
                break
            path.unlink()


def _candidates(file: Path, plan: Plan, path: str, axis: str, placement: str) -> list[tuple[str, str]]:
    """(text of the file, changed line): an entry that says otherwise is changed, else one is added."""
    lines = file.read_text().splitlines(keepends=True)
    found = []
    for entry in plan.entries:
        source = entry.source
        if entry.path.text == path and source is not None and Path(source.file) == file and source.line <= len(lines):
            number = source.line - 1
            changed = regex.sub(rf"(\b{axis}:\s*)[^,}}\n]+", rf"\g<1>{placement}", lines[number], count=1)
            if changed != lines[number]:
                found.append(("".join([*lines[:number], changed, *lines[number + 1 :]]), changed.strip()))
    text = "".join(lines)
    quoted = "'" + path.replace("'", "''") + "'"
    key = path if regex.fullmatch(r"[\w<][\w.:<>()|\\+*-]*", path) else quoted
    entry_line = f"{key}: {{{axis}: {placement}}}"
    section = _SECTION.search(text)
    if section is None:
        if not regex.search(r"^shard:", text, regex.MULTILINE):  # else a mapping in one line
            found.append((text.rstrip("\n") + f"\nshard:\n  {entry_line}\n", entry_line))
        return found
    following = regex.compile(r"^([ \t]+)[^\s#]", regex.MULTILINE).search(text, section.end())
    indent = following[1] if following is not None else "  "
    end = section.end()
    found.append((f"{text[:end]}\n{indent}{entry_line}{text[end:]}", entry_line))
    return found
