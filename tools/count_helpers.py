"""Print each C++ helper of this tree with its state in the installed vescale: ``python tools/count_helpers.py all``.

The exit code is 0 if ``all`` of them are built, or ``none`` is: what the CI expects with a compiler, and without one. It may
run in any folder; the vescale that is looked at is the one that Python finds there.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["main"]

SOURCES = Path(__file__).parent.parent / "vescale" / "csrc"


def main(expected: str) -> int:
    import vescale
    from vescale import csrc

    states = csrc.helper_states()
    names = sorted(source.stem for source in SOURCES.glob("*.cpp"))
    print(vescale.__file__)
    for name in names:
        print(f"{name:<16} {states.get(name, 'its source is not there')}")
    built = [name for name in names if states.get(name) == "built"]
    print(f"{len(built)} of {len(names)} are built, {expected} should be")
    return 0 if built == (names if expected == "all" else []) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
