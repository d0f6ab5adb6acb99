"""Mistakes of the first day end in an error that names the edit; scripts that look like them run without a word.

A new script needs no entry anywhere: each file of ``mistakes`` and ``correct`` is a case.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.first_day.jobs import Script, run

FOLDER = Path(__file__).parent


def scripts(kind: str) -> list[object]:
    return [pytest.param(path, id=path.stem) for path in sorted((FOLDER / kind).glob("*.py"))]


@pytest.mark.parametrize("path", scripts("mistakes"))
def test_a_mistake_ends_in_an_error_that_names_the_edit(path: Path, tmp_path: Path) -> None:
    script = Script.read(path)
    assert script.errors, f"{path.name} must say which error it expects"
    result = run(script, tmp_path)
    wrong = script.judge(result)
    assert not wrong, f"{script.title}\n" + "\n".join(wrong) + f"\n{result.text}"


@pytest.mark.parametrize("path", scripts("correct"))
def test_a_correct_script_runs_without_a_word(path: Path, tmp_path: Path) -> None:
    script = Script.read(path)
    result = run(script, tmp_path)
    wrong = script.judge(result)
    assert not wrong, f"{script.title}\n" + "\n".join(wrong) + f"\n{result.text}"
