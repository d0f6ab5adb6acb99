"""Argument parsing and exit codes: 0 fine, 1 findings, 2 bad usage or bad input."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from vescale._version import __version__
from vescale.errors import Coded

# sub-command -> (module with ``add_arguments(parser)`` and ``run(args) -> exit code``, one line of help).
# Modules are imported only when their command is called, so that ``vescale --help`` stays instant.
COMMANDS: dict[str, tuple[str, str]] = {
    "attach": ("vescale.cli._attach", "Connect to the prompt of a job that has stopped without a terminal."),
    "ckpt": ("vescale.cli._ckpt", "List, show, verify, compare, convert and export checkpoints of any format."),
    "new": ("vescale.cli._new", "Write a starter project that runs at once: script, plan, configuration."),
    "plan": ("vescale.cli._plan", "Write a first plan for a model: `vescale plan new MODEL --mesh dp=2,tp=2`."),
    "lint": ("vescale.cli._lint", "Check a plan against a model, without starting ranks."),
    "explain": (
        "vescale.cli._explain",
        "Show what a plan does to a model: memory, predicted collectives, hooks, instructions.",
    ),
    "estimate": ("vescale.cli._estimate", "Estimate memory of every rank and seconds of a step, without ranks."),
    "search": ("vescale.cli._search", "Find meshes and plans for a model on a number of devices, the fastest first."),
    "simulate": (
        "vescale.cli._simulate",
        "Run a script as some ranks of a job, without devices: memory, collectives, mismatches, deadlocks.",
    ),
    "diff": ("vescale.cli._diff", "Show what two plans do differently."),
    "verify": ("vescale.cli._verify", "Train on one device and on meshes of local ranks, and compare every value."),
    "zoo": ("vescale.cli._zoo", "List and show the plans that ship with vescale."),
    "env": ("vescale.cli._env", "Show versions, backends and optional helpers."),
}


class UsageError(Coded, Exception, code="VS0001"):
    """Bad arguments or bad input: printed without a traceback, exit code 2."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vescale", description="Train a single-device PyTorch model on any mesh of devices."
    )
    parser.add_argument("--version", action="version", version=f"vescale {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in COMMANDS:
        _parser().parse_args(arguments or ["--help"])  # exits: help, version, or a usage error
        return 2
    module_name, text = COMMANDS[arguments[0]]
    module = importlib.import_module(module_name)
    parser = argparse.ArgumentParser(prog=f"vescale {arguments[0]}", description=text)
    module.add_arguments(parser)
    try:
        code = int(module.run(parser.parse_args(arguments[1:])))
        sys.stdout.flush()
        return code
    except UsageError as error:
        print(f"vescale {arguments[0]}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # who reads has enough: `vescale zoo | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain while it ends
        return 0


# Commands that start no process: they may end without tearing down torch, which takes a third of a second.
_ENDS_AT_ONCE = ("diff", "env", "estimate", "explain", "lint", "new", "plan", "search", "zoo")


def run_and_exit() -> NoReturn:
    """The ``vescale`` command: :func:`main` in a process of its own, which is never searched for garbage."""
    gc.disable()
    code = main()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.stderr.flush()
    if sys.argv[1:2] and sys.argv[1] in _ENDS_AT_ONCE:
        os._exit(code)
    sys.exit(code)
