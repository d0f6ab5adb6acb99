"""Memory that the writer shares is pinned while it is there, and no longer."""

from __future__ import annotations

import pytest

from vescale.checkpoint import _rank_file

MIB = 2**20


def test_what_is_pinned_is_unpinned_before_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a save needs more, and where the writer is closed; then it can begin anew."""
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(_rank_file, "pin", lambda image: calls.append(("pin", image.nbytes)) or True)
    monkeypatch.setattr(_rank_file, "unpin", lambda image: calls.append(("unpin", image.nbytes)))
    writer = _rank_file.Writer()
    for num_bytes in (1, MIB, 5 * MIB):
        assert writer.image(num_bytes).nbytes >= num_bytes
    writer.close()
    writer.image(1)
    writer.close()
    writer.close()
    assert calls == [(what, size * MIB) for size in (2, 6, 2) for what in ("pin", "unpin")]
