"""The prompt: one rank reads commands and requests the stopped ranks to execute them."""

from __future__ import annotations

import abc
import contextlib
import json
import os
import select
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vescale.debug._stopped_ranks import Session

# The console of a prompt: a terminal, or a socket to which ``vescale attach`` connects.

_POLL_SECONDS = 0.1


class Console(abc.ABC):
    """Reads lines and writes text. While ``read_line`` waits, it calls ``poll`` repeatedly, which may raise."""

    def __init__(self) -> None:
        self._typed = b""

    @abc.abstractmethod
    def write(self, text: str) -> None:
        """Show ``text``; ignored if the other end is gone."""

    @abc.abstractmethod
    def close(self) -> None:
        """Restore the terminal, or remove the socket."""

    @abc.abstractmethod
    def _ready(self) -> bool:
        """Whether reading would not block, after a short wait."""

    @abc.abstractmethod
    def _read(self) -> bytes:
        """The input so far; empty if the other end is gone."""

    def read_line(self, prompt: str, poll: Callable[[], None]) -> str | None:
        """The next line; None at the end of input."""
        self.write(prompt)
        while b"\n" not in self._typed:
            poll()
            if not self._ready():
                continue
            try:
                read = self._read()
            except OSError:
                return None
            if not read:
                return None
            self._typed += read
        line, _, self._typed = self._typed.partition(b"\n")
        return line.decode(errors="replace").rstrip("\r")


class TerminalConsole(Console):
    """A terminal, whose mode is not changed: the kernel edits lines and turns Ctrl-C into a signal. It is used even if
    standard input or output are redirected."""

    def __init__(self, path: str) -> None:
        super().__init__()
        import termios

        self._fd = os.open(path, os.O_RDWR | os.O_NOCTTY)
        self._found = termios.tcgetattr(self._fd)

    def write(self, text: str) -> None:
        data = text.encode()
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._fd, data) :]

    def _ready(self) -> bool:
        return bool(select.select([self._fd], [], [], _POLL_SECONDS)[0])

    def _read(self) -> bytes:
        return os.read(self._fd, 4096)

    def close(self) -> None:
        import termios

        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._found)
        os.close(self._fd)


class SocketConsole(Console):
    """A Unix socket in a folder that only this user can enter. It serves one connection at a time; a lost connection
    counts as a lost terminal."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        super().__init__()
        self._folder = tempfile.mkdtemp(prefix=f"vescale-{os.getuid()}-")  # mode 0700
        self.path = os.path.join(self._folder, "breakpoint")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(1)
        self._client: socket.socket | None = None
        self._unseen: list[str] = []
        announce(self.path)

    def write(self, text: str) -> None:
        if self._client is None:
            self._unseen.append(text)
            return
        with contextlib.suppress(OSError):
            self._client.sendall(text.encode())

    def _ready(self) -> bool:
        if self._client is not None:
            return bool(select.select([self._client], [], [], _POLL_SECONDS)[0])
        if select.select([self._listener], [], [], _POLL_SECONDS)[0]:
            self._client, _ = self._listener.accept()
            self.write("".join(self._unseen))
            self._unseen.clear()
        return False

    def _read(self) -> bytes:
        assert self._client is not None
        return self._client.recv(4096)

    def close(self) -> None:
        for one in (self._client, self._listener):
            if one is not None:
                with contextlib.suppress(OSError):
                    one.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)
            os.rmdir(self._folder)


def terminal_of_this_process() -> str | None:
    """The path of the terminal that was passed to this process, or that controls it."""
    candidates: list[Any] = [0, 2, 1]
    for fd in candidates:
        with contextlib.suppress(OSError):
            if os.isatty(fd):
                return os.ttyname(fd)
    with contextlib.suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
        return "/dev/tty"
    return None


def newest_socket() -> str | None:
    """The socket of this user's job on this machine that stopped last."""
    if sys.platform == "win32":
        return None
    found = Path(tempfile.gettempdir()).glob(f"vescale-{os.getuid()}-*/breakpoint")
    return max((str(path) for path in found), key=lambda path: os.stat(path).st_mtime, default=None)


HELP = """vescale: the job is stopped. Beside pdb's own commands, which apply to the rank in the prompt:
  rank R        put another rank into the prompt; rank all: every command applies to each
  all EXPR      EXPR on every rank
  diff EXPR     how EXPR differs between ranks: shapes, placements, the first element
  full EXPR     a DTensor, gathered, with its placement; all ranks of its mesh take part
  where         module, plan entries and pending collectives of the frame, and the stack
  n, s, r, unt  all stopped ranks go on together, and stop again
  c             all ranks go on            q, Ctrl-C, Ctrl-D    end every rank
"""

RESUMES = frozenset({"n", "next", "s", "step", "r", "return", "unt", "until", "c", "cont", "continue"})
GOES_ON = frozenset({"c", "cont", "continue"})
QUITS = frozenset({"q", "quit", "exit", "EOF"})
_FORBIDDEN = frozenset(
    {"interact", "debug", "run", "restart", "j", "jump"}
)  # they would separate this rank from the others
_GATHER_SECONDS = 1.0


class Prompt:
    """Reads commands on the rank that was elected."""

    def __init__(self, session: Session, console: Console, rank: int | None) -> None:
        self._session, self._console = session, console
        self.current = rank
        """The rank in the prompt; None: all."""
        self._last = ""
        self._before: dict[int, int] = {}  # how often ranks had stopped when they were told to go on
        self._beat = 0.0
        self._says_help = True

    def run(self, local: Callable[[str, str], Any]) -> str:
        """Read and execute commands until one resumes this rank, and return that command. ``local(kind, text)`` answers
        for this rank."""
        self._local = local
        self.await_others()
        if self._says_help:
            self._console.write("\n" + HELP)
            self._says_help = False
        self._show_places()
        while True:
            line = self.read(self.poll)
            command = line.partition(" ")[0]
            if command in QUITS:
                self.quit()
            elif command in RESUMES:
                if command in GOES_ON:
                    self._session.close()
                self.resume(line)
                return line
            elif command:
                self.execute(line)

    def read(self, poll: Callable[[], None]) -> str:
        """A line that was typed; the last one again if it is empty."""
        name = "all" if self.current is None else str(self.current)
        line = self._console.read_line(f"(rank {name}) ", poll)
        if line is None:
            self._session.end("the prompt was closed")
            raise AssertionError("unreachable")
        self._last = line.strip() or self._last
        return self._last

    def resume(self, line: str) -> None:
        """Have the other stopped ranks execute a command that lets them go on."""
        ranks = [rank for rank in self._session.stopped() if rank != self._session.rank]
        self._before = {rank: self._session.statuses()[rank]["stops"] for rank in ranks}
        self._session.send(ranks, "resume", line)

    def execute(self, line: str) -> None:
        """A command that resumes nobody."""
        command, _, rest = line.partition(" ")
        self.write(self._do(command, rest.strip(), line))

    def quit(self) -> None:
        """End all ranks. Does not return."""
        self.write("ending all ranks\n")
        self._console.close()
        self._session.end("quit at the prompt")

    def write(self, text: str) -> None:
        self._console.write(text)

    def close(self) -> None:
        self._console.close()

    # Commands

    def _do(self, command: str, rest: str, line: str) -> str:
        if command == "rank":
            return self._change_rank(rest)
        if command in ("all", "diff", "full"):
            if not rest:
                return f"*** {command} needs an expression, such as: {command} loss\n"
            return str(getattr(self, f"_{command}")(rest))
        if command == "where":
            answers = self._ask("where", "", self._chosen())
            stacks = self._ask("pdb", "bt", self._chosen())
            return "".join(f"{_labelled(r, a)}{stacks.get(r, {}).get('text', '')}" for r, a in answers.items())
        if command in ("h", "help", "?") and not rest:
            return HELP + self._text(self._ask("pdb", "help", self._session.stopped()[:1]))
        if command in _FORBIDDEN:
            return f"*** {command} would separate this rank from the others; use ! statements, or c\n"
        return self._text(self._ask("pdb", line, self._chosen()))

    def _change_rank(self, text: str) -> str:
        stopped = self._session.stopped()
        if text == "all":
            self.current = None
            return ""
        if not text.isdecimal() or int(text) not in stopped:
            return f"*** rank {text or '?'} is not stopped here; the stopped ranks are {stopped}\n"
        self.current = int(text)
        return f"rank {text} is at {self._session.statuses()[int(text)]['place']}\n"

    def _all(self, expression: str) -> str:
        answers = self._ask("all", expression, self._session.stopped())
        return "".join(f"{rank:>4}  {_text_of(answer)}\n" for rank, answer in answers.items()) + self._absent()

    def _diff(self, expression: str) -> str:
        answers = self._ask("summary", expression, self._session.stopped())
        errors = [f"{rank:>4}  {a['error']}\n" for rank, a in answers.items() if "error" in a]
        if errors:
            return "".join(errors)
        lines = []
        for what in ("type", "text", "shape", "dtype", "placements", "requires_grad"):
            found = {rank: a.get(what) for rank, a in answers.items() if a.get(what) is not None}
            if len({json.dumps(value) for value in found.values()}) > 1:
                lines += [f"{what} differs:\n", *(f"{rank:>4}  {value}\n" for rank, value in found.items())]
        tensors = {rank: a for rank, a in answers.items() if "checksum" in a}
        if not lines and tensors:
            first = next(iter(tensors.values()))
            text = f"shape {tuple(first['shape'])}, {first['dtype']}" + (
                f", {first['placements']}" if first["placements"] else ""
            )
            if "P(" in first["placements"] or "Partial" in first["placements"]:
                return f"{text}: each rank has its part of a sum\n" + self._absent()
            lines = self._diff_values(expression, tensors)
            if not lines:
                same = "parts that ranks share are equal" if any(a["part"] not in ("", "[]") for a in
                tensors.values()) \
                    else "equal on all ranks"  # fmt: skip
                return f"{same}: {text}\n" + self._absent()
        return ("".join(lines) or f"equal on all ranks: {next(iter(answers.values()))['text']}\n") + self._absent()

    def _diff_values(self, expression: str, tensors: dict[int, dict[str, Any]]) -> list[str]:
        """Compared with the first rank that has the same part: the first element that differs."""
        lines: list[str] = []
        firsts: dict[tuple[str, tuple[int, ...]], int] = {}
        for rank, summary in tensors.items():
            first = firsts.setdefault((summary["part"], tuple(summary["local shape"])), rank)
            if summary["checksum"] == tensors[first]["checksum"]:
                continue
            index, values = self._first_difference(expression, first, rank, summary["numel"])
            shape = summary["local shape"]
            place = []
            for size in reversed(shape):
                place.append(index % size)
                index //= size
            lines.append(
                f"values differ: element {place[::-1]} of {tuple(shape)} is {values[0]} on rank {first} and {values[1]} on "
                f"rank {rank}\n"
            )
        return lines

    def _first_difference(self, expression: str, first: int, other: int, numel: int) -> tuple[int, tuple[str, str]]:
        begin, end = 0, numel
        while True:
            request = json.dumps({"expression": expression, "range": [begin, end]})
            a, b = (answer for _, answer in sorted(self._ask("blocks", request, sorted({first, other})).items()))
            if first > other:
                a, b = b, a
            key = "values" if "values" in a else "sums"
            place = next((i for i, (x, y) in enumerate(zip(a[key], b[key])) if x != y), 0)
            if key == "values":
                return begin + place, (a[key][place], b[key][place])
            begin, end = begin + place * a["size"], min(end, begin + (place + 1) * a["size"])

    def _full(self, expression: str) -> str:
        stopped = self._session.stopped()
        answers = self._ask("specification", expression, stopped)
        own = answers.get(self.current if self.current is not None else self._session.rank, {})
        if "error" in own:
            return f"*** {own['error']}\n"
        missing = [rank for rank in own["ranks"] if rank not in stopped]
        if missing:
            return f"*** ranks {missing} of the tensor's mesh are not stopped here, and gathering needs all of them\n"
        different = [
            r for r in own["ranks"] if answers[r].get("text") != own["text"] or answers[r].get("ranks") != own["ranks"]
        ]
        if different:
            return f"*** not gathered: ranks {different} have a different value; see: diff {expression}\n"
        gathered = self._ask("full", expression, own["ranks"])
        shown = self.current if self.current in gathered else own["ranks"][0]
        return f"{own['text']}\n{_text_of(gathered[shown])}\n"

    # Asking

    def _chosen(self) -> list[int]:
        return self._session.stopped() if self.current is None else [self.current]

    def _ask(self, kind: str, text: str, ranks: list[int]) -> dict[int, Any]:
        """Answers by rank; this rank computes its own while it waits for the others."""
        others = [rank for rank in ranks if rank != self._session.rank]
        number = self._session.send(others, kind, text) if others else -1
        found = {}
        if self._session.rank in ranks:
            found[self._session.rank] = self._local(kind, text)
        if others:
            found.update(self._session.replies(number, others))
        return {rank: found.get(rank, {"error": "this rank is dead"}) for rank in sorted(ranks)}

    def _text(self, answers: dict[int, Any]) -> str:
        if self.current is not None or len(answers) == 1:
            return "".join(_text_of(answer) for answer in answers.values())
        return "".join(_labelled(rank, answer) for rank, answer in answers.items())

    def _absent(self) -> str:
        absent = sorted(set(range(self._session.size)) - set(self._session.stopped()))
        return f"(not stopped here: ranks {absent})\n{self._running_lines(absent)}" if absent else ""

    def _running_lines(self, ranks: Sequence[int]) -> str:
        statuses = self._session.statuses()
        return "".join(
            f"  rank {rank} is still running {statuses[rank]['place']}\n" for rank in ranks if rank in statuses
        )

    def running_text(self) -> str:
        """Which ranks run which line, and which have stopped, while the prompt's rank is running."""
        stopped = self._session.stopped()
        running = [rank for rank in range(self._session.size) if rank not in stopped]
        places = {rank: self._session.statuses()[rank]["place"] for rank in stopped}
        text = "\n" + self._running_lines(running)
        text += "".join(f"  rank {rank} has stopped at {place}\n" for rank, place in places.items())
        if stopped:
            text += (
                "a line that waits for other ranks (a collective, a read of a sharded value) ends when they run it, "
                "too: n lets the stopped ranks continue\n"
            )
        return text

    def await_others(self) -> None:
        """Wait for ranks that come to the same line, or finish the same step, at about the same time."""
        deadline = time.monotonic() + _GATHER_SECONDS
        while self._num_back() < self._session.size and time.monotonic() < deadline:
            self.poll()
            time.sleep(0.02)

    def _num_back(self) -> int:
        """How many ranks have stopped, since they were told to go on."""
        found = self._session.statuses().items()
        return sum(status["stopped"] and status["stops"] > self._before.get(rank, 0) for rank, status in found)

    def _show_places(self) -> None:
        places = {r: s["place"] for r, s in self._session.statuses().items() if s["stopped"]}
        most = Counter(places.values()).most_common(1)[0][0]
        self._console.write(f"> {most}\n")
        for rank, place in places.items():
            if place != most:
                self._console.write(f"  rank {rank} is at {place}\n")
        self._console.write(self._absent())

    def poll(self) -> None:
        """Regularly while the prompt waits."""
        self._session.look()
        if time.monotonic() - self._beat > 1.0:
            self._beat = time.monotonic()
            self._session.beat()


def _text_of(answer: dict[str, Any]) -> str:
    return f"*** {answer['error']}" if "error" in answer else str(answer["text"])


def _labelled(rank: int, answer: dict[str, Any]) -> str:
    text = _text_of(answer)
    return f"rank {rank}: {text}" + ("" if text.endswith("\n") else "\n")
