"""``vescale ckpt``: look at checkpoints of any format, check, compare and convert them; on one machine, without ranks."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import math
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vescale.cli._console import bytes_text, new_console, new_table, print_json
from vescale.cli._inputs import CONFIG_HELP, config_file
from vescale.cli._main import UsageError

if TYPE_CHECKING:
    from vescale.checkpoint import Stored, StoredTensor

_PATH = "a step, a folder of steps, a DCP folder, a torch.save file, a safetensors file or folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("ls", help="list the steps of a folder, or its single checkpoint")
    show = actions.add_parser("show", help="show the tensors and values of a checkpoint")
    show.add_argument(
        "--tensors", metavar="PATTERN", default="*", help="only tensors with these names (* and ? are wildcards)"
    )
    verify = actions.add_parser("verify", help="check every byte that the format has a checksum for; exit 1: damaged")
    for action in (listing, show, verify):
        action.add_argument("path", metavar="PATH", help=_PATH)
    convert = actions.add_parser("convert", help="write a checkpoint in another format")
    convert.add_argument("source", metavar="SOURCE", help=_PATH)
    convert.add_argument("target", metavar="TARGET", help="a folder that does not exist yet")
    convert.add_argument("--to", required=True, choices=("safetensors", "dcp", "vescale"), help="format of TARGET")
    diff = actions.add_parser("diff", help="compare names, shapes, dtypes and values; exit 1: different")
    diff.add_argument("a", metavar="A", help=_PATH)
    diff.add_argument("b", metavar="B", help="the same, in the same or another format")
    diff.add_argument("--no-values", action="store_true", help="compare names, shapes and dtypes only")
    export = actions.add_parser("export", help="write a checkpoint of a model in the form that from_pretrained loads")
    export.add_argument("source", metavar="SOURCE", help=_PATH)
    export.add_argument("target", metavar="TARGET", help="a folder")
    export.add_argument("--model", metavar="CONFIG", required=True, help=CONFIG_HELP)
    for action in (convert, export):
        action.add_argument("--max-shard-size", default="5GB", help="maximum size of a safetensors file (default: 5GB)")
        action.add_argument("--no-verify", action="store_true", help="do not check the source's checksums first")
    for action in (listing, show, verify, convert, diff, export):
        action.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """0: fine, equal; 1: damaged, different; 2: bad usage, or nothing that can be read."""
    from vescale.checkpoint import CheckpointError

    try:
        return _ACTIONS[args.action](args)
    except (CheckpointError, OSError, ValueError) as error:
        raise UsageError(str(error)) from None


def _ls(args: argparse.Namespace) -> int:
    from vescale.checkpoint._step_folder import find_problems, step_name, step_numbers

    path = Path(args.path)
    numbers = step_numbers(str(path)) if path.is_dir() else []
    if (own := re.fullmatch(r"step-(\d+)", path.name)) and path.is_dir():  # one step, complete or not
        path, numbers = path.parent, [int(own[1])]
    rows: list[dict[str, Any]] = []
    for number in numbers:
        problems = find_problems(str(path / step_name(number)))
        row: dict[str, Any] = {"path": str(path / step_name(number)), "format": "vescale", "step": number}
        if problems:
            rows.append({**row, "complete": False, "problems": problems})
        else:
            rows.append({**row, "complete": True, **_summary(_open(path / step_name(number)))})
    if not numbers:
        stored = _open(path)
        rows.append({"path": str(path), "format": stored.format, "complete": True, **_summary(stored)})
    if args.json:
        print_json({"checkpoints": rows})
        return 0
    table = new_table("checkpoint", "format", "tensors", "size", "state", right=("tensors", "size"))
    for row in rows:
        size = bytes_text(row["bytes"]) if row["complete"] else ""
        state = "complete" if row["complete"] else f"incomplete: {row['problems'][0]}"
        table.add_row(row["path"], row["format"], str(row.get("tensors", "")), size, state)
    new_console().print(table)
    return 0


def _show(args: argparse.Namespace) -> int:
    from vescale.checkpoint._convert import num_bytes, plain_values

    stored = _open(Path(args.path))
    names = fnmatch.filter(stored.tensors, args.tensors)
    values = plain_values(stored)
    if args.json:
        tensors = {
            name: {
                "shape": list(t.shape),
                "dtype": _dtype(t),
                "bytes": num_bytes(t),
                "files": sorted({b.file for b in t.boxes}),
            }
            for name, t in ((name, stored.tensors[name]) for name in names)
        }
        print_json({"path": args.path, "format": stored.format, "tensors": tensors, "values": _jsonable(values)})
        return 0
    table = new_table("tensor", "shape", "dtype", "size", "blocks", right=("size", "blocks"))
    for name in names:
        tensor = stored.tensors[name]
        table.add_row(
            name, str(tuple(tensor.shape)), _dtype(tensor), bytes_text(num_bytes(tensor)), str(len(tensor.boxes))
        )
    console = new_console()
    console.print(table)
    total = sum(num_bytes(stored.tensors[name]) for name in names)
    of_all = "" if args.tensors == "*" else f" of {len(stored.tensors)}"
    console.print(f"{len(names)}{of_all} tensors, {bytes_text(total)}, format {stored.format}, {args.path}")
    for name, value in values.items():
        text = str(value)
        rest = f" ... ({len(text):,} characters; --json prints all)" if len(text) > 200 else ""
        console.print(f"{name} = {text[:200]}{rest}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from vescale.checkpoint._safetensors import is_safetensors
    from vescale.checkpoint._verification import verify_any

    path = Path(args.path)
    total = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else _size(path)
    with _progress(args, "verify", total) as advance:
        problems = verify_any(path, advance)
    if args.json:
        print_json({"path": args.path, "sound": not problems, "problems": problems})
        return 1 if problems else 0
    for problem in problems:
        new_console().print(problem)
    if not problems:
        unknown = ""
        if is_safetensors(path):
            unknown = (
                ": headers and sizes checked; safetensors files have no checksums, so that changed values "
                "cannot be detected"
            )
        new_console().print(f"{args.path} is sound{unknown}")
    return 1 if problems else 0


def _convert(args: argparse.Namespace) -> int:
    from vescale.checkpoint._convert import convert

    stored = _open(Path(args.source))
    if _is_damaged(args, stored):
        return 1
    with _progress(args, "convert", _summary(stored)["bytes"]) as advance:
        left = convert(stored, Path(args.target), args.to, max_shard_size=args.max_shard_size, progress=advance)
    if args.json:
        written = _summary(stored, without=left)
        print_json({"source": args.source, "target": args.target, "to": args.to, **written, "left_out": left})
        return 0
    new_console().print(f"{args.target}: {_summary(stored, without=left)['tensors']} tensors in the format {args.to}")
    if left:
        rest = f" and {len(left) - 20} more" if len(left) > 20 else ""
        new_console().print(
            f"left out, because the format can hold only tensors of a model: {', '.join(left[:20])}{rest}"
        )
    return 0


def _diff(args: argparse.Namespace) -> int:
    from vescale.checkpoint._verification import compare_stored

    a, b = _open(Path(args.a)), _open(Path(args.b))
    with _progress(args, "diff", _summary(a)["bytes"]) as advance:
        found = compare_stored(a, b, values=not args.no_values, progress=advance)
    if args.json:
        values = {
            name: {
                "elements": d.elements,
                "largest": d.largest if d.largest is None or math.isfinite(d.largest) else None,
                "first": list(d.first),
            }
            for name, d in found.values.items()
        }
        forms = {name: {"a": one, "b": two} for name, (one, two) in found.forms.items()}
        sides = {"only_in_a": found.only_in_a, "only_in_b": found.only_in_b}
        plain = {"plain_values": found.plain_values, "equal_tensors": found.equal}
        print_json({"equal": not found, **sides, "forms": forms, "values": values, **plain})
        return 1 if found else 0
    console = new_console()
    for name in found.only_in_a:
        console.print(f"- {name}")
    for name in found.only_in_b:
        console.print(f"+ {name}")
    for name, (one, two) in found.forms.items():
        console.print(f"~ {name}: {one}, {two}")
    for name, difference in found.values.items():
        largest = "not a number" if difference.largest is None else f"{difference.largest:.3g}"
        console.print(
            f"~ {name}: elements that differ: {difference.elements}, by at most {largest}; the first: {difference.first}"
        )
    for name in found.plain_values:
        console.print(f"~ {name}, which is not a tensor")
    console.print(f"equal tensors: {found.equal}")
    return 1 if found else 0


def _export(args: argparse.Namespace) -> int:
    from vescale.checkpoint._hf_export import export_stored
    from vescale.cli._inputs import load_model

    config = config_file(args.model)
    if config is None:
        raise UsageError(f"--model {args.model}: expected {CONFIG_HELP}")
    model = load_model(args.model)
    stored = _open(Path(args.source))
    if _is_damaged(args, stored):
        return 1
    with _progress(args, "export", _summary(stored)["bytes"]) as advance:
        written = export_stored(stored, model, Path(args.target), args.max_shard_size, config.parent, advance)
    if args.json:
        print_json({"source": args.source, "target": args.target, "bytes": written})
    else:
        new_console().print(f"{args.target}: {bytes_text(written)} for {type(model).__name__}.from_pretrained")
    return 0


def _open(path: Path) -> Stored:
    from vescale.checkpoint import open_stored

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        stored = open_stored(path)
    for warning in told:  # such as newer steps that are not complete
        print(f"vescale ckpt: {warning.message}", file=sys.stderr)
    return stored


def _is_damaged(args: argparse.Namespace, stored: Stored) -> bool:
    """By its own checksums, told on stderr: checksums of what is written would be right for wrong values."""
    from vescale.checkpoint._verification import verify_any

    if args.no_verify:
        return False
    path = stored.folder if stored.format == "vescale" else Path(args.source)
    with _progress(args, "verify", _summary(stored)["bytes"]) as advance:
        problems = verify_any(path, advance)
    for problem in problems:
        print(f"vescale ckpt: {problem}", file=sys.stderr)
    if problems:
        print(
            f"vescale ckpt: {path} is damaged, and nothing was written: take another step, or another copy; "
            "--no-verify uses the values as they are",
            file=sys.stderr,
        )
    return bool(problems)


def _summary(stored: Stored, without: Collection[str] = ()) -> dict[str, int]:
    from vescale.checkpoint._convert import num_bytes

    tensors = [stored.tensors[name] for name in stored.tensors.keys() - set(without)]
    return {"tensors": len(tensors), "bytes": sum(map(num_bytes, tensors))}


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _dtype(tensor: StoredTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    is_plain = (
        value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
    )
    return value if is_plain else str(value)  # JSON has no NaN and no infinity


@contextlib.contextmanager
def _progress(args: argparse.Namespace, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on the standard error of a terminal; nothing in a pipe."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=args.json or not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "ls": _ls,
    "show": _show,
    "verify": _verify,
    "convert": _convert,
    "diff": _diff,
    "export": _export,
}
