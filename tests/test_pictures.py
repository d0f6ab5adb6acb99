"""The pictures of the documentation are those that the tool draws, and pages use them."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.test_house import FLOORS
from tools.pictures import FOLDER, pictures

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_pictures_are_up_to_date() -> None:
    """Among them the schedules that a pipeline runs; `python tools/pictures.py` writes them."""
    drawn = pictures()
    assert {path.name for path in FOLDER.glob("*.svg")} == set(drawn)
    for name, text in drawn.items():
        assert (FOLDER / name).read_text() == text, name
        assert ElementTree.fromstring(text).find("{http://www.w3.org/2000/svg}title") is not None
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), "assets of others"


def test_every_picture_is_used_and_described() -> None:
    used = set()
    for page in (ROOT / "docs").rglob("*.md"):
        for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text()):
            assert len(words) > 20 and (page.parent / target).exists(), f"{page.name}: {target}"
            used.add(Path(target).name)
    assert used == {path.name for path in FOLDER.glob("*.svg")}


def test_the_picture_of_the_packages() -> None:
    """Of CONTRIBUTING: every package, on rows from the top floor down."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Structure of the code")[2]
    rows = [line[:36].split() for line in text.split("```")[1].splitlines()]  # without what stands beside them
    floors = [FLOORS[word] for row in rows for word in row if word in FLOORS]
    assert sorted(word for row in rows for word in row) == sorted(FLOORS)
    assert floors == sorted(floors, reverse=True)
