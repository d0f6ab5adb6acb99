"""The sites of a record of static mode, beside the lines of the model's source."""

from __future__ import annotations

import linecache
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from vescale.static import RecordedProgram, RecordedType, Site

_ACTIONS = {"read_sizes": "returns global sizes", "take_sizes": "gets local sizes", "redistribute": "runs on DTensors"}


def sites_as_dicts(record: RecordedProgram) -> list[dict[str, Any]]:
    """One for each place, in the order of modules."""
    return [
        {
            "module": site.path,
            "file": site.file,
            "line": site.line,
            "column": site.column,
            "source": _line(site),
            "function": site.site.function,
            "action": site.site.action,
            "inputs": [kind.kinds(record.axes) for kind in site.site.inputs],
            "outputs": [kind.kinds(record.axes) for kind in site.site.outputs],
            "reason": site.site.reason,
            "communication": list(site.site.communication),
        }
        for site in record.sites
    ]


def print_sites(console: Console, record: RecordedProgram) -> None:
    """Sites of repeated layers as one."""
    from vescale.ir import merge_repeats

    sites = [(site.path, replace(site, path="")) for site in record.sites]
    if not sites:
        console.print("none: the functions of the model run on local tensors as they are")
    for path, site, count in merge_repeats(sites):
        number = f", {count} modules" if count > 1 else ""
        console.print(f"{path or '(the model)'}{number}: {site.file}:{site.line}:{site.column}", style="bold")
        text = _line(site)
        if text:
            indent = len(text) - len(text.lstrip())
            console.print(f"    {text.strip()}")
            console.print(f"    {' ' * max(0, site.column - 1 - indent)}^")
        console.print(
            f"    {site.site.function.removesuffix('.__get__')} {_ACTIONS[site.site.action]}{_detail(record, site)}"
        )


def _detail(record: RecordedProgram, site: Site) -> str:
    if site.site.action != "redistribute":
        shares = ", ".join(f"dim {dim}: {factor} ranks" for dim, factor in enumerate(site.site.factors) if factor > 1)
        return f" ({shares})"

    def texts(kinds: tuple[RecordedType, ...]) -> str:
        return ", ".join(_kinds_text(kind.kinds(record.axes)) for kind in kinds) or "nothing"

    moved = f"; {', '.join(site.site.communication)}" if site.site.communication else ""
    return f": {texts(site.site.inputs)} -> {texts(site.site.outputs)}{moved}; {site.site.reason}"


def _kinds_text(kinds: dict[str, str]) -> str:
    return f"({', '.join(f'{axis}: {kind}' for axis, kind in kinds.items())})"


def _line(site: Site) -> str:
    """The line of source; "" where the file is not found."""
    folders = [""] if os.path.isabs(site.file) else sys.path
    found = next(
        (path for path in (os.path.join(folder, site.file) for folder in folders) if os.path.isfile(path)), None
    )
    return linecache.getline(found, site.line).rstrip() if found is not None else ""
