"""Ranks and writers that are killed at drawn moments: the last step that was saved is there, and every step that is there is
right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.killing import VICTIMS, Point, check_folder, draw_points, filled, kill_once, measure


def sweep(tmp_path: Path, points: list[Point]) -> dict[str, set[int]]:
    """The newest steps that were there, by victim."""
    durations: dict[tuple[bool, int], float] = {}
    found: dict[str, set[int]] = {victim: set() for victim in VICTIMS}
    for number, point in enumerate(points):
        kind = point.asynchronous, point.size
        if kind not in durations:
            durations[kind] = measure(tmp_path / "run", point)
        found[point.victim].add(kill_once(tmp_path / f"run {number}", point, durations[kind]))
    return found


def test_killed_at_a_few_points(tmp_path: Path) -> None:
    points = [Point(point.victim, point.asynchronous, point.moment, 40, point.delay) for point in draw_points(6, 3)]
    sweep(tmp_path, points)


@pytest.mark.slow
def test_killed_at_a_thousand_points(tmp_path: Path) -> None:
    found = sweep(tmp_path, draw_points(1000, 0))
    assert set.union(*found.values()) == {2, 3, 4, 5}


@pytest.mark.parametrize("change", ["removed", "zeroed"])
def test_the_check_finds_what_is_wrong(tmp_path: Path, change: str) -> None:
    folder = filled(tmp_path / "run")
    data = next((folder / "step-2").glob("data-*.bin"))
    if change == "removed":
        data.unlink()  # ranks know step 2 to be saved, and it is no step any more
    else:
        data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(AssertionError):
        check_folder(folder, 2)
