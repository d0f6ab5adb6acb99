"""``vescale new``: a starter project that runs at once."""

from __future__ import annotations

import argparse
from pathlib import Path

from vescale.cli._main import UsageError

_STARTER = Path(__file__).parent / "starter"
_FILES = ("README.md", "config.yaml", "model.py", "plan.yaml", "train.py", "train_model.py")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", type=Path, metavar="DIR", help="a folder that does not exist yet, or is empty")


def run(args: argparse.Namespace) -> int:
    """Exit code 0: written; 2: the folder has files already, or cannot be written."""
    folder: Path = args.dir
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} exists and is not an empty folder; choose another one (nothing was written)")
        folder.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            (folder / name).write_bytes((_STARTER / name).read_bytes())
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from None
    print(f"written to {folder}: {', '.join(_FILES)}")
    print(f"next: cd {folder} && python train.py")
    print("on four ranks: torchrun --nproc-per-node 4 train.py mesh=dp=2,tp=2")
    return 0
