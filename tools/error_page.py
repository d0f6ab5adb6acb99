"""docs/errors.md, from the kinds of mistakes and the docstrings of their classes (``python tools/error_page.py``)."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import vescale
from vescale.errors import CODES, KINDS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "errors.md"
_HEAD = """# Errors

Each error and warning of vescale ends with a code in brackets, such as `[VS0101]`: that of a kind of mistakes, which
does not change. A message says what was found, what was expected, and the edit that repairs it. All classes can be imported
from `vescale.errors`, or from where the API reference lists them. Each is also a `ValueError`, `RuntimeError`, or another
class of Python, so that existing handlers catch it. A message that quotes another error ends with the code of that one.
"""


def modules() -> Iterator[str]:
    """All modules of vescale that can be imported anywhere."""
    for found in pkgutil.walk_packages(vescale.__path__, "vescale."):
        if not re.search(r"\.(starter|csrc|integrations)\b|__main__|_writer_process", found.name):
            yield found.name


def page() -> str:
    for name in modules():
        importlib.import_module(name)
    parts = [_HEAD]
    for code, kind in KINDS.items():
        rows = sorted(
            (cls.__name__, " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())) for cls in CODES[code]
        )
        lines = [f"- `{name}`: {text}" for name, text in dict(rows).items()]
        parts.append("\n".join([f"## {code}: {kind.title}\n", f"**Edit.** {kind.edit}\n", *lines, ""]))
    return "\n".join(parts).replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(page())
