"""``vescale attach``: the prompt of a job that has stopped at a breakpoint and has no terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import socket
import sys

from vescale.cli._main import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        nargs="?",
        metavar="SOCKET",
        help="as the job prints it; default: the one of your jobs on this host that stopped last",
    )


def run(args: argparse.Namespace) -> int:
    """0: the job resumed, or was ended from here; 2: there is no job to attach to."""
    path = args.path or _newest()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; is the job still running?") from None
    typing = [sys.stdin.fileno()]
    with (
        connection,
        contextlib.suppress(KeyboardInterrupt, OSError),
    ):  # leaving closes the connection, which ends the job
        while True:
            ready, _, _ = select.select([connection, *typing], [], [])
            if connection in ready:
                data = connection.recv(65536)
                if not data:
                    break
                sys.stdout.write(data.decode(errors="replace"))
                sys.stdout.flush()
            elif typed := os.read(typing[0], 4096):
                connection.sendall(typed)
            else:  # no more commands: the output of the last ones is still to come
                connection.shutdown(socket.SHUT_WR)
                typing.clear()
    print()
    return 0


def _newest() -> str:
    from vescale.debug import newest_socket  # loads torch, which a given path does not need

    path = newest_socket()
    if path is None:
        raise UsageError("none of your jobs has stopped on this host; run the command on the host that the job names")
    return path
