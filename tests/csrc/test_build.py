"""Where there is a compiler, the C++ helpers are built, all of them, and of these sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.compiler import compiler
from vescale import csrc
from vescale.csrc import rebuild_command
from vescale.csrc._names import helper_names

FOLDER = Path(csrc.__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.cpp"))


def included(name: str) -> list[Path]:
    """The headers of ours that a source includes, directly or by way of another one."""
    found: list[Path] = []
    sources = [FOLDER / f"{name}.cpp"]
    while sources:
        for header in re.findall(r'^#include "(.*)"', sources.pop().read_text(), re.MULTILINE):
            if (path := FOLDER / header) not in found:
                found.append(path)
                sources.append(path)
    return found


def test_there_is_a_name_for_each_source() -> None:
    assert helper_names() == NAMES


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler, so that nothing is to be built")
@pytest.mark.parametrize("name", NAMES)
def test_helpers_are_built_where_a_compiler_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of a helper are skipped where it is missing: without this one, a broken build would go unnoticed."""
    monkeypatch.delenv("VESCALE_NO_NATIVE", raising=False)
    library = csrc.load(name)
    assert library is not None, f"{csrc.helper_states()[name]}; {rebuild_command()}"
    built = Path(library._name).stat().st_mtime
    stale = [path.name for path in (FOLDER / f"{name}.cpp", *included(name)) if path.stat().st_mtime > built]
    assert not stale, f"{stale} changed after the build; {rebuild_command()}"
