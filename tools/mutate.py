"""How many planted faults the daily tests find: ``python tools/mutate.py [--count 150] [--seed 0] [--package comm]``.

A mutant is one small change of one function of ``vescale``: a flipped comparison, another operator or constant, a
dropped statement, swapped branches, a missing return value. Mutants are drawn by seed from all packages. Each is planted
in a temporary copy of the working tree, where the tests that reach its module run until the first one fails. The working
tree itself is only read. A mutant is killed if a test fails, or if the tests take several times as long as usual.

The result is a table of survivors, a count for each package, and all of it as JSON (``--json``).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fnmatch
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".pytest_cache"  # not in git
DURATIONS = CACHE / "durations.json"  # written by tests/lanes.py
MARK = "VESCALE_MUTANT"  # in the environment of every process of a run, so that all of them are found and ended

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "//",
}


@dataclass(frozen=True)
class Mutant:
    """Characters ``start`` to ``end`` of ``file`` (a path below the root) become ``after``."""

    file: str
    line: int
    start: int
    end: int
    operator: str
    before: str
    after: str

    @property
    def package(self) -> str:
        parts = Path(self.file).parts
        return parts[1] if len(parts) > 2 else "vescale"


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    status: str  # killed, timeout, survived, untested
    by: str  # the first failing test
    seconds: float
    tests: tuple[str, ...]

    @property
    def is_killed(self) -> bool:
        return self.status in ("killed", "timeout")


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Every mutant of a source file, in the order of its text; only code of functions is changed."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        """In characters; ``ast`` counts the bytes of a line."""
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def source(node: ast.AST) -> str:
        first = offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        return f"({text[first : offset(node.end_lineno, node.end_col_offset)]})"  # type: ignore[attr-defined]

    found = []

    def add(node: ast.expr | ast.stmt, operator: str, after: str) -> None:
        start, end = offset(node.lineno, node.col_offset), offset(node.end_lineno or 0, node.end_col_offset or 0)
        found.append(Mutant(file, node.lineno, start, end, operator, text[start:end], after))

    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef):
            for node in _code_of(function):
                _mutate(node, add, source)
    return sorted(set(found), key=lambda mutant: (mutant.start, mutant.end, mutant.after))


def _code_of(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function's body without annotations, docstrings, error messages, and functions within it."""
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    waiting: list[ast.AST] = list(function.body[1:] if is_docstring else function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)):
            continue
        yield node
        if isinstance(node, ast.AnnAssign):
            waiting += [node.value] if node.value is not None else []
        elif isinstance(node, ast.Assert):
            waiting.append(node.test)
        else:
            waiting += ast.iter_child_nodes(node)


def _mutate(node: ast.AST, add, source) -> None:  # type: ignore[no-untyped-def]
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        sign = COMPARISONS[type(node.ops[0])]
        add(node, "comparison", f"({source(node.left)} {sign} {source(node.comparators[0])})")
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        if not any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (node.left, node.right)):
            add(node, "arithmetic", f"({source(node.left)} {ARITHMETIC[type(node.op)]} {source(node.right)})")
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            add(node, "constant", str(not node.value))
        elif isinstance(node.value, (int, float)):
            add(node, "constant", repr(node.value + 1))
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        add(node, "and/or", f"({word.join(map(source, node.values))})")
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        add(node, "negation", source(node.operand))
    elif isinstance(node, (ast.If, ast.While)):
        add(node.test, "condition", f"(not {source(node.test)})")
    elif isinstance(node, ast.IfExp):
        add(node, "branches", f"({source(node.orelse)} if {source(node.test)} else {source(node.body)})")
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        add(node, "return value", "return None")
    elif _is_droppable(node):
        add(node, "dropped statement", "pass")


def _is_droppable(node: ast.AST) -> bool:
    """A statement without which the function still compiles: a call for its effect, or a write to an object."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
    return isinstance(node, ast.AugAssign)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def planted(text: str, mutant: Mutant) -> str:
    return text[: mutant.start] + mutant.after + text[mutant.end :]


def draw(count: int, seed: int, packages: Sequence[str], files: Sequence[str] = ()) -> list[Mutant]:
    """``count`` mutants, at most one for each line; each package has a share by the root of its size. ``files``: patterns
    of paths below the root, of which one has to match."""
    by_package: dict[str, list[Mutant]] = defaultdict(list)
    for path in sorted((ROOT / "vescale").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if files and not any(fnmatch.fnmatch(file, pattern) for pattern in files):
            continue
        lines: dict[int, list[Mutant]] = defaultdict(list)
        text = path.read_text()
        for mutant in mutants_of(file, text):
            lines[mutant.line].append(mutant)
        rng = random.Random(f"{seed} {file}")
        for choices in lines.values():
            mutant = rng.choice(choices)
            by_package[mutant.package].append(mutant)
    if packages:
        unknown = set(packages) - by_package.keys()
        if unknown:
            raise SystemExit(f"no package {sorted(unknown)}; --package takes one of {sorted(by_package)}")
        by_package = {name: by_package[name] for name in packages}
    weights = {name: len(choices) ** 0.5 for name, choices in by_package.items()}
    chosen: list[Mutant] = []
    rng = random.Random(seed)
    spare: list[Mutant] = []
    for name, choices in sorted(by_package.items()):
        rng.shuffle(choices)
        share = max(1, int(count * weights[name] / sum(weights.values())))
        chosen += choices[:share]
        spare += choices[share:]
    rng.shuffle(chosen)
    rng.shuffle(spare)
    return list(itertools.islice(filter(_compiles, chosen + spare), count))


def _compiles(mutant: Mutant) -> bool:
    try:
        compile(planted((ROOT / mutant.file).read_text(), mutant), mutant.file, "exec")
    except SyntaxError:
        return False
    return True


def modules_imported(path: Path, module: str) -> set[str]:
    """Names of modules (and of names in them, which may be modules) of this project that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *([base] if base else [])])
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] in ("vescale", "tests")}


def map_of_tests() -> dict[str, list[list[str]]]:
    """For each source file its test files in groups, the most specific first.

    The groups are: files that import the module itself, files of the mirrored package, and files that reach the package
    through what they import. Kept in ``.pytest_cache`` under a digest of all sources and tests.
    """
    sources = sorted([*(ROOT / "vescale").rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
    digest = hashlib.sha256(b"".join(str(path).encode() + path.read_bytes() for path in sources)).hexdigest()
    cache = CACHE / "mutation-map.json"
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(cache.read_text())
        if kept["digest"] == digest:
            return kept["map"]
    names = {_module_name(path): path for path in sources}
    imported = {name: modules_imported(path, name) & names.keys() for name, path in names.items()}
    tests = [name for name, path in names.items() if path.name.startswith("test_") and name.startswith("tests.")]
    direct = {test: _through_helpers(test, imported) for test in tests}
    packages = {test: _packages_below(direct[test], imported) for test in tests}
    found = {}
    for name, path in names.items():
        if not name.startswith("vescale"):
            continue
        package = name.split(".")[1] if "." in name else ""
        groups: list[list[str]] = [[], [], []]
        for test in tests:
            if name in direct[test]:
                rank = 0
            elif package and test.split(".")[1] == package:
                rank = 1
            elif package in packages[test]:
                rank = 2
            else:
                continue
            groups[rank].append(str(names[test].relative_to(ROOT)))
        found[str(path.relative_to(ROOT))] = groups
    CACHE.mkdir(exist_ok=True)
    cache.write_text(json.dumps({"digest": digest, "map": found}))
    return found


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _through_helpers(test: str, imported: dict[str, set[str]]) -> set[str]:
    """Modules of ``vescale`` that a test or the helpers it imports name."""
    seen, waiting = {test}, [test]
    while waiting:
        for name in imported[waiting.pop()] - seen:
            seen.add(name)
            if name.startswith("tests."):
                waiting.append(name)
    return {name for name in seen if name.startswith("vescale")}


def _packages_below(modules: set[str], imported: dict[str, set[str]]) -> set[str]:
    """Packages whose code may run: those of ``modules``, and all that these import in their turn."""
    seen, waiting = set(modules), list(modules)
    while waiting:
        for name in imported[waiting.pop()] - seen:
            seen.add(name)
            waiting.append(name)
    return {name.split(".")[1] for name in seen if "." in name}


def select(groups: Sequence[Sequence[str]], seconds: dict[str, float], budget: float) -> list[str]:
    """Test files in the order to run them: group by group, quick ones first, until the budget is used up.

    The first group runs whatever it costs, and so does at least one file.
    """
    chosen: list[str] = []
    total = 0.0
    for number, group in enumerate(groups):
        for file in sorted(group, key=lambda file: seconds.get(file, 10.0)):
            if number and chosen and total + seconds.get(file, 10.0) > budget:
                continue
            chosen.append(file)
            total += seconds.get(file, 10.0)
    return chosen


def seconds_of_files() -> dict[str, float]:
    """What each test file took when `make test` last ran it."""
    totals: dict[str, float] = defaultdict(float)
    with contextlib.suppress(OSError, ValueError):
        for test, times in json.loads(DURATIONS.read_text()).items():
            totals[test.split("::")[0]] += times["seconds"]
    return totals


class Copies:
    """Temporary copies of the working tree, one for each job, and the processes that run in them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._local = threading.local()
        self._lock = threading.Lock()
        self._count = 0
        self._running: dict[str, subprocess.Popen[str]] = {}
        self.stopped = False

    def here(self) -> Path:
        """The copy of the calling thread."""
        if not hasattr(self._local, "copy"):
            with self._lock:
                self._count += 1
                copy = self._folder / f"copy{self._count}"
            listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
            files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
            built = [str(path.relative_to(ROOT)) for path in (ROOT / "vescale" / "csrc").glob("*.so")]
            for file in filter(None, [*files, *built]):
                if (ROOT / file).is_file():
                    (copy / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / file, copy / file)
            self._local.copy = copy
        return self._local.copy

    def run_tests(self, tests: Sequence[str], timeout: float, more: Sequence[str] = ()) -> tuple[int | None, str]:
        """Exit code of pytest (None after ``timeout`` seconds) and its output; ends every process it started."""
        copy = self.here()
        token = f"{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
        environment = {name: value for name, value in os.environ.items() if name != "VESCALE_NIGHTLY"}
        environment |= {"PYTHONPATH": str(copy), MARK: token, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "not slow",
            "-p",
            "no:cacheprovider",
            "--tb=line",
            *more,
            *tests,
        ]
        with tempfile.TemporaryFile("w+") as output:
            with self._lock:
                if self.stopped:
                    raise KeyboardInterrupt
                process = subprocess.Popen(
                    command, cwd=copy, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
                self._running[token] = process
            try:
                code: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end(process, token)
                self._running.pop(token, None)
            output.seek(0)
            return code, output.read()

    def stop(self) -> None:
        with self._lock:
            self.stopped = True
            for token, process in self._running.items():
                end(process, token)


def end(process: subprocess.Popen[str], token: str) -> None:
    """Kill the process, its group, and whatever else was started with its environment."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    mark = f"{MARK}={token}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def try_mutant(mutant: Mutant, tests: Sequence[str], limit: float, broken: Sequence[str], copies: Copies) -> Outcome:
    start = time.monotonic()
    if not tests:
        return Outcome(mutant, "untested", "", 0.0, ())
    target = copies.here() / mutant.file
    text = target.read_text()
    target.write_text(planted(text, mutant))
    try:
        without = [word for test in broken for word in ("--deselect", test)]
        code, output = copies.run_tests(tests, limit, ["-x", *without])
    finally:
        target.write_text(text)
    failed = failures(output)
    if code == 5:
        status = "untested"
    else:
        status = "timeout" if code is None else "survived" if code == 0 else "killed"
    return Outcome(mutant, status, failed[0] if failed else "", time.monotonic() - start, tuple(tests))


def failures(output: str) -> list[str]:
    """Tests (or files, where the collection failed) that pytest's summary names."""
    words = [line.split() for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return [parts[1] for parts in words if len(parts) > 1]


def show(console: Console, outcomes: Sequence[Outcome]) -> None:
    survivors = Table(Column("where", overflow="fold"), "operator", "before", "after", title="survivors")
    for outcome in sorted((o for o in outcomes if not o.is_killed), key=lambda o: (o.mutant.file, o.mutant.line)):
        mutant = outcome.mutant
        cells = [" ".join(text.split())[:60] for text in (mutant.before, mutant.after)]
        note = " (no test)" if outcome.status == "untested" else ""
        survivors.add_row(f"{mutant.file}:{mutant.line}", mutant.operator + note, *cells)
    packages = Table("package", "mutants", "killed", title="by package")
    names = sorted({outcome.mutant.package for outcome in outcomes})
    for name in names:
        own = [outcome for outcome in outcomes if outcome.mutant.package == name]
        packages.add_row(name, str(len(own)), str(sum(outcome.is_killed for outcome in own)))
    if any(not outcome.is_killed for outcome in outcomes):
        console.print(survivors)
    console.print(packages)
    killed = sum(outcome.is_killed for outcome in outcomes)
    console.print(f"{killed} of {len(outcomes)} mutants killed ({killed / max(1, len(outcomes)):.0%})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=150, help="how many mutants (default: 150)")
    parser.add_argument("--seed", type=int, default=0, help="decides which mutants (default: 0)")
    parser.add_argument("--package", action="append", default=[], help="only of this package; may be repeated")
    parser.add_argument("--files", nargs="+", default=[], help="only of files whose path matches one of these patterns")
    parser.add_argument("--tests", nargs="+", default=[], help="run these tests instead of those that the map gives")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default: 1; each uses up to two cores)")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds of tests for a mutant (default: 240)")
    parser.add_argument("--list", action="store_true", help="print the mutants and their tests, and run nothing")
    parser.add_argument("--json", type=Path, default=ROOT / "out" / "mutants.json", help="where the result goes")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    console = Console()
    mutants = draw(arguments.count, arguments.seed, arguments.package, arguments.files)
    seconds, tests_of = seconds_of_files(), map_of_tests()
    plan = {
        mutant: list(arguments.tests) or select(tests_of[mutant.file], seconds, arguments.budget) for mutant in mutants
    }
    if arguments.list:
        for mutant, tests in plan.items():
            print(f"{mutant.file}:{mutant.line} {mutant.operator}: {len(tests)} files of tests, {tests[:3]}")
        return 0
    if not seconds:
        console.print("no durations yet (`make test` records them): the budget counts 10 s for each file")

    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="vescale-mutants-") as folder:
        copies = Copies(Path(folder))
        pool = ThreadPoolExecutor(arguments.jobs)
        try:
            every = sorted({test for tests in plan.values() for test in tests})
            with console.status(f"{len(every)} test files without a mutant"):
                start = time.monotonic()
                code, output = pool.submit(copies.run_tests, every, 7200.0).result()
                whole = time.monotonic() - start
            broken = failures(output)
            if code not in (0, 1):
                console.print(output[-3000:])
                raise SystemExit(f"the tests do not run without a mutant either: exit code {code}")
            if broken:
                console.print(f"left out, for they fail without a mutant: {broken}")
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with Progress(*columns, console=console) as progress:
                task = progress.add_task("mutants", total=len(mutants))
                limits = {m: 60 + min(3 * whole, 4 * sum(seconds.get(t, 10.0) for t in plan[m])) for m in mutants}
                waiting = [pool.submit(try_mutant, m, plan[m], limits[m], broken, copies) for m in mutants]
                for future in as_completed(waiting):
                    outcomes.append(future.result())
                    survived = sum(not outcome.is_killed for outcome in outcomes)
                    progress.update(task, advance=1, description=f"mutants, {survived} survive")
        except KeyboardInterrupt:
            console.print("interrupted; the result counts the mutants that were tried")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            copies.stop()
            pool.shutdown(wait=True)
    show(console, outcomes)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    result = {
        "commit": commit.stdout.strip(),
        "seed": arguments.seed,
        "count": len(outcomes),
        "killed": sum(outcome.is_killed for outcome in outcomes),
        "mutants": [{**asdict(outcome), "package": outcome.mutant.package} for outcome in outcomes],
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1))
    console.print(f"written to {arguments.json}")
    return 0 if len(outcomes) == len(mutants) else 130


if __name__ == "__main__":
    sys.exit(main())
