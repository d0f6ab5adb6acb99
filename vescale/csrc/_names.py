"""Names of the C++ helpers and of their files, for ``setup.py``, which builds them, and for the loader, which finds them.

Imports nothing of vescale and torch: ``setup.py`` runs this file by its path.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# Helpers that include torch's headers, so that each build works with one version of torch only.
USING_TORCH = frozenset(
    {"dispatch", "grads", "hook_gate", "module_hooks", "patching", "random_fills", "step_marks", "tape"}
)


def helper_names() -> list[str]:
    """The helpers, one for each ``NAME.cpp``: installed packages are without these."""
    return sorted({"adamw8bit", "mt19937", "philox", "planner"} | USING_TORCH)


def torch_tag(version: str) -> str:
    """What two versions of torch have in common if the helpers built for one of them work with the other.

    Releases: the version without its local part, because builds of one release for other devices (``+cpu``, ``+cu130``) have
    the same C++ interface. Development builds: the whole version.
    """
    public = version.partition("+")[0]
    return public if re.fullmatch(r"[\d.]+", public) else version


def file_name(name: str, torch_version: str, suffix: str) -> str:
    """The name of a helper's library: of its own, of the torch that it was built for if it uses torch, and Python's suffix.

    Args:
        suffix: of Python's extension modules, such as ``.cpython-311-x86_64-linux-gnu.so``.
    """
    return f"_{name}.torch-{torch_tag(torch_version)}{suffix}" if name in USING_TORCH else f"_{name}{suffix}"


def built_for(name: str) -> set[str]:
    """The versions that a helper's libraries were built for, as people read them: "torch 2.13.0 and Python 3.11"."""
    found = set()
    for path in FOLDER.glob(f"_{name}.*"):
        match = re.fullmatch(rf"_{name}(?:\.torch-(?P<torch>.+))?\.cpython-(?P<python>\d+).*\.(?:so|pyd)", path.name)
        if match:
            torch_version = match["torch"] or "another version"
            python = f"Python {match['python'][0]}.{match['python'][1:]}"
            found.add(f"torch {torch_version} and {python}" if name in USING_TORCH else python)
    return found
