"""Plans that include others: files of one folder, each read before the file that includes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vescale.errors import IncludeError, PlanError
from vescale.plans._yaml_nodes import MAX_BYTES, Document, load_yaml

__all__ = ["PlanFile", "read_files"]

_MAX_FILES = 20


@dataclass(frozen=True)
class PlanFile:
    """A checked file and its values of ``${name}``: its own variables, overridden by those of the including file."""

    document: Document
    data: Mapping[str, Any]
    variables: Mapping[str, str]


def read_files(file: str | os.PathLike[str], check: Callable[[Document], Mapping[str, Any]]) -> list[PlanFile]:
    """The file and all that it includes, in the order in which their entries count; the file itself is the last.

    An ``include`` names files by their path relative to the including file. After links are followed, they must be in the
    folder of ``file`` or below it. ``check`` returns the data of a document, or raises. Raises PlanError for an include that
    leaves the folder, that includes itself, or that cannot be read, and if all files together are too large.
    """
    files: list[PlanFile] = []
    num_characters = 0

    def visit(document: Document, chain: tuple[Path, ...], outer: Mapping[str, str]) -> None:
        nonlocal num_characters
        num_characters += document.num_characters
        data = check(document)
        variables = {**(data.get("vars") or {}), **outer}
        for index, path in enumerate(_includes(document, data, chain)):
            source = document.at(("include", index))
            if path in chain:
                raise IncludeError(f"{path.name} includes itself; remove one of the includes between", source)
            if len(files) + len(chain) >= _MAX_FILES:
                raise IncludeError(f"more than {_MAX_FILES} files are included; write larger ones", source)
            try:
                included = load_yaml(path)
            except PlanError as error:
                if error.source is not None:
                    raise
                raise IncludeError(error.problem, source) from None
            if num_characters + included.num_characters > MAX_BYTES:
                raise IncludeError(f"the plan and all that it includes have more than {MAX_BYTES} bytes", source)
            visit(included, (*chain, path), variables)
        files.append(PlanFile(document, data, variables))

    is_text = isinstance(file, str) and "\n" in file
    visit(load_yaml(file), () if is_text else (Path(file).resolve(),), {})
    return files


def _includes(document: Document, data: Mapping[str, Any], chain: tuple[Path, ...]) -> Iterator[Path]:
    for index, text in enumerate(data.get("include") or []):
        source = document.at(("include", index))
        if not chain:
            raise IncludeError(
                f"include {text!r}: a plan that is no file has no folder; give the path of the file", source
            )
        folder = chain[0].parent
        try:
            path = (chain[-1].parent / text).resolve()
            is_file = path.is_file()  # not a pipe, whose reader may wait forever
        except (OSError, ValueError, RuntimeError) as error:  # a name too long, a null character, a circle of links
            raise IncludeError(f"cannot include {text[:80]!r}: {error}; give the path of a YAML file", source) from None
        if Path(text).is_absolute() or not path.is_relative_to(folder):
            raise IncludeError(
                f"include {text!r} leaves the folder of the plan, {folder}; copy the file into it, and write its path from "
                "the file that includes it",
                source,
            )
        if not is_file:
            raise IncludeError(f"cannot include {text!r}: {path} is no file; give the path of a YAML file", source)
        yield path
