"""Scripts as ``torchrun --nproc-per-node=2`` runs them: an environment with the address of a store, and nothing else."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.debug.jobs import JobResult, run_processes

__all__ = ["Script", "run"]

_LIMIT = 60.0
"""Seconds after which a script counts as hanging: six times its ``VESCALE_TIMEOUT``."""

_TRACEBACK = re.compile(r"^(\[rank\d\]: )?Traceback \(most recent.*\n(?:(?:\[rank\d\]: )? .*\n)+", re.MULTILINE)
"""Frames of a traceback, which quote the script's own lines: they say nothing."""


@dataclass(frozen=True)
class Script:
    """A script of this folder and what its docstring says.

    Attributes:
        errors: class names, one of which an error of the script (or a base class) has; ``hang``: the hang report ends it.
        open: why the mistake is not found yet; empty: it is.
        says: texts that the output of the ranks has, each one as alternatives.
    """

    path: Path
    title: str
    errors: tuple[str, ...]
    says: tuple[tuple[str, ...], ...]
    open: str

    @classmethod
    def read(cls, path: Path) -> Script:
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        lines = dict(line.split(": ", 1) for line in text.splitlines()[1:] if ": " in line)
        errors = tuple(name.strip() for name in lines.get("error", "").split("|") if name.strip())
        says = tuple(tuple(text.strip().split("|")) for text in lines.get("says", "").split(" | ") if text.strip())
        return cls(path, text.splitlines()[0], errors, says, lines.get("open", ""))

    def judge(self, result: JobResult) -> list[str]:
        """What is wrong with how the script ended; empty: nothing."""
        if not self.errors:
            noise = [line for line in result.text.splitlines() if "Warning" in line or "Traceback" in line]
            return ([f"exit codes {result.codes}"] if any(result.codes) else []) + noise
        wrong = []
        if None in result.codes:
            wrong.append(f"hangs for {_LIMIT:.0f} s")
        elif not any(result.codes):
            wrong.append("ends with 0 on all ranks")
        if any(code is not None and code < 0 for code in result.codes):
            wrong.append(f"is killed by a signal: exit codes {result.codes}")
        found = {name for line in result.text.splitlines() if line.startswith("raised: ") for name in line.split()[1:]}
        if "VESCALE_TIMEOUT" in result.text:
            found.add("hang")
        if not found & set(self.errors):
            wrong.append(f"raises {sorted(found)}, and not one of {list(self.errors)}")
        said = _TRACEBACK.sub("", result.text)
        wrong += [
            f"does not say {' or '.join(words)}" for words in self.says if not any(word in said for word in words)
        ]
        return wrong


def run(script: Script, folder: Path, world_size: int = 2) -> JobResult:
    """Run a script on ranks that are forked with torch loaded, with a ``VESCALE_TIMEOUT`` of ten seconds."""
    env = {"VESCALE_TIMEOUT": "10"}
    return run_processes(_script, folder, str(script.path), world_size=world_size, limit=_LIMIT, env=env)


def _script(path: str) -> None:
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")
