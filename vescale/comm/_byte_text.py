"""``bytes_text``: numbers of bytes in messages."""

from __future__ import annotations

__all__ = ["bytes_text"]


def bytes_text(num_bytes: int) -> str:
    """``96 B``, ``1.5 KiB``, ``3.0 GiB``."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
