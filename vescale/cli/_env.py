"""``vescale env``: versions, what this torch can do, which helpers were built, what is changed in PyTorch. For bug reports.

The changes are listed as they are: every part is installed for that, and taken back.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
import textwrap
from pathlib import Path
from typing import Any

from vescale._version import __version__
from vescale.cli._console import print_json
from vescale.cli._inputs import add_json
from vescale.errors import torch_promise

_PACKAGES = ("torch", "numpy", "pyyaml", "jsonschema", "regex", "rich", "transformers", "tokenizers", "safetensors")
_WIDTH = 80  # columns
_ALIKE = ("features", "helpers")  # one line if all are in the same state
_LISTS = ("patches", "other changes")
_NUM_EXAMPLES = 3  # of the changes of a group


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "also list each feature and helper, and what is changed in PyTorch, and why"
    parser.add_argument("--patches", action="store_true", help=text)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """1 when something that vescale needs is missing."""
    data = _collect()
    if args.json:
        print_json(data)
    else:
        for section, values in data.items():
            if section in _LISTS and not args.patches:
                continue
            print(section)
            if section in _ALIKE and len(values) > 1 and len(alike := set(values.values())) == 1 and not args.patches:
                values = {f"all {len(values)}": alike.pop()}
            for name, value in values.items():
                print("\n".join(_row(name, _shown(value))))
    needed = [name for name in _PACKAGES[:6] if data["packages"][name] is None]
    return 1 if needed or data["torch"]["compat"] != "ok" else 0


def _collect() -> dict[str, dict[str, Any]]:
    torch = _torch()
    is_complete = torch["compat"] == "ok"
    return {
        "vescale": {"version": __version__, "folder": str(Path(__file__).parent.parent)},
        "python": {"version": platform.python_version(), "executable": sys.executable, "platform": platform.platform()},
        "packages": {name: _version(name) for name in _PACKAGES},
        "torch": torch,
        "features": _features() if is_complete else {},
        **(_changes() if is_complete else {"patches": {}, "other changes": {}}),
        "helpers": _helpers(),
        "machine": {"cpus": os.cpu_count(), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else torch.get_device_module(accelerator.type)
    name_of = getattr(module, "get_device_name", lambda index: f"{accelerator}:{index}")
    devices = [name_of(index) for index in range(torch.accelerator.device_count())]
    return {
        "promise": torch_promise(torch.__version__),
        "compat": _compat(),
        "distributed": dist.is_available(),
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "mpi": dist.is_available() and dist.is_mpi_available(),
        "accelerator": None if accelerator is None else accelerator.type,
        "devices": devices,
    }


def _compat() -> str:
    """Whether every private name of torch that vescale cannot do without is there."""
    try:
        importlib.import_module("vescale.compat").self_check()
    except (ImportError, AttributeError) as error:
        return str(error)
    return "ok"


def _features() -> dict[str, str]:
    """What is optional, and whether this torch has what it needs."""
    needs = importlib.import_module("vescale.compat.needs")
    missing = {feature: needs.lacking(feature) for feature in dict.fromkeys(need.feature for need in needs.OPTIONAL)}
    return {name: f"unavailable: torch lacks {', '.join(lacks)}" if lacks else "ok" for name, lacks in missing.items()}


def _changes() -> dict[str, dict[str, Any]]:
    """Everything that vescale changes in PyTorch while all parts are installed, by purpose, and what it changes besides."""
    compat = importlib.import_module("vescale.compat")
    parts = {patch.part for patch in compat.PATCHES}
    before = {part for part in parts if compat.is_installed(part)}
    problem = _install_everything(compat)
    states = compat.patch_states()
    for part in parts - before:
        compat.uninstall_part(part)
    groups = {
        one.patch.purpose: {
            "state": one.state,
            "part": one.patch.part,
            "owner": one.patch.owner,
            "reason": one.patch.reason,
            "issue": one.patch.issue,
            "torch": one.patch.torch,
            "changes": list(one.changes),
        }
        for one in states
    }
    num_changes = sum(len(group["changes"]) for group in groups.values())
    others = {
        key: {"owner": f"vescale.{key.partition(':')[0]}", "kind": key.partition(":")[2], **row._asdict()}
        for key, row in compat.OTHER_CHANGES.items()
    }
    counts: dict[str, Any] = {
        "patches": f"{num_changes} in {len(groups)} groups",
        "other": f"{len(others)} kinds",
    }
    if problem:
        counts["problem"] = problem
    return {"changes": counts, "patches": groups, "other changes": others}


def _install_everything(compat: Any) -> str:
    """The error that an installation raises, in which case the other parts are listed alone; "" if there is none."""
    runtime, rng, optim = (importlib.import_module(f"vescale.{name}") for name in ("runtime", "rng", "optim"))
    problem = ""
    for install in (
        compat.extend_dtensor,
        runtime.install_handlers,
        rng.enable,
        optim.extend_torch_for_stages,
        lambda: compat.install_part("observation", lambda name, group, inputs, outputs, call: call(None)[0]),
    ):
        try:
            install()
        except Exception as error:  # not lost: it is what a bug report is about
            problem = problem or f"{type(error).__name__}: {error}"
    return problem


def _helpers() -> dict[str, str]:
    """The optional C++ helpers: built, or their Python fallback is used."""
    from vescale import csrc

    return csrc.helper_states()


def _row(name: str, value: str) -> list[str]:
    """One line if it fits, otherwise the name with the value below it."""
    line = f"  {name:<16} {value}"
    return [line] if len(name) <= 16 and len(line) <= _WIDTH else [*_wrapped(name, 2), *_wrapped(value, 6)]


def _wrapped(text: str, indent: int) -> list[str]:
    """Lines of at most 80 columns; names of Python that are longer end a line after a dot."""
    left = " " * indent
    width = _WIDTH - indent - 2  # of a line that is not the first
    long = {word: word[: word[:width].rfind(".") + 1] for word in text.split() if len(word) > width}
    for word, head in long.items():
        text = text.replace(word, f"{head} {word[len(head) :]}")
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=left,
        subsequent_indent=f"{left}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        is_change = "kind" in value
        return f"{value['target']}: {value['reason']} ({value['until']})" if is_change else _shown_group(value)
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return str(value)


def _shown_group(group: dict[str, Any]) -> str:
    """The count and the first names; ``--json`` has all of them."""
    issue = "" if group["issue"] == "none" else f"; {group['issue']}"
    changes = group["changes"]
    examples = ", ".join(name.replace("torch.distributed.tensor.", "") for name in changes[:_NUM_EXAMPLES])
    more = ", ..." if len(changes) > _NUM_EXAMPLES else ""
    found = f"{len(changes)} changed ({examples}{more})" if changes else group["state"]
    return f"{found}, {group['part']}, torch{group['torch']}{issue}: {group['reason']}"
