"""How many planted faults the daily tests find: ``python tools/mutate.py [--count 150] [--seed 0] [--package comm]``.

A mutant is one small change of one function of ``vescale``: a flipped comparison, another operator or constant, a
dropped statement, swapped branches, a missing return value. Mutants are drawn by seed from all packages. Each is planted
in a temporary copy of the working tree, where the tests that reach its module run until the first one fails. The working
tree itself is only read. A mutant is killed if a test fails that passes without it, or if the tests need several times
the CPU time that they usually need.

The result is a table of survivors, a count for each package, and all of it as JSON (``--json``), which is written after
each mutant. Another run with the same file continues: what was killed is not tried again, and what survived only meets
tests that it has not met, those of a larger ``--budget`` for example.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fnmatch
import hashlib
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mutant_runs import NO_TESTS, Copies, failures
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".pytest_cache"  # not in git
DURATIONS = CACHE / "v" / "vescale" / "durations"  # written by tests/durations.py

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
    """Test files in the order to run them: group by group, quick ones first, until the budget is used up; one at least."""
    chosen: list[str] = []
    total = 0.0
    for group in groups:
        for file in sorted(group, key=lambda file: seconds.get(file, 10.0)):
            if chosen and total + seconds.get(file, 10.0) > budget:
                continue
            chosen.append(file)
            total += seconds.get(file, 10.0)
    return chosen


def seconds_of_files() -> dict[str, float]:
    """The CPU time of each test file when `make test` last ran it."""
    totals: dict[str, float] = defaultdict(float)
    with contextlib.suppress(OSError, ValueError):
        for test, times in json.loads(DURATIONS.read_text()).items():
            totals[test.split("::")[0]] += times["cpu"]
    return totals


def try_mutant(mutant: Mutant, tests: Sequence[str], limit: float, copies: Copies, before: Outcome | None) -> Outcome:
    """Run ``tests`` with the mutant planted; ``before`` is what other tests found."""
    start = time.monotonic()
    met = before.tests if before else ()
    tests = [test for test in tests if test not in met]
    if not tests:
        return before or Outcome(mutant, "untested", "", 0.0, ())
    target = copies.here() / mutant.file
    text = target.read_text()
    while True:
        target.write_text(planted(text, mutant))
        try:
            code, output = copies.run_tests(tests, limit, copies.broken)
        finally:
            target.write_text(text)
        failed = failures(output)
        if code in (None, 0, NO_TESTS) or not failed or copies.passes(failed[0], limit):
            break  # otherwise the first failure is not the mutant's, and the others are yet to be seen
    if code == NO_TESTS:
        status = "survived" if met else "untested"
    else:
        status = "timeout" if code is None else "survived" if code == 0 else "killed"
    seconds = time.monotonic() - start + (before.seconds if before else 0.0)
    return Outcome(mutant, status, failed[0] if failed else "", seconds, (*met, *tests))


def _key(mutant: dict[str, Any]) -> tuple[Any, ...]:
    """What identifies a mutant from one run to the next one: its place, and the file it is in."""
    digest = hashlib.sha256((ROOT / mutant["file"]).read_bytes()).hexdigest()
    return mutant["file"], digest, mutant["start"], mutant["end"], mutant["after"]


def kept_outcomes(path: Path, mutants: Sequence[Mutant]) -> dict[Mutant, Outcome]:
    """What earlier runs found about these mutants. A mutant counts as another one when its file has changed."""
    if not path.exists():
        return {}
    kept = {tuple(entry["key"]): entry for entry in json.loads(path.read_text())["mutants"] if "key" in entry}
    found = {}
    for mutant in mutants:
        entry = kept.get(_key(asdict(mutant)))
        if entry is not None:
            names = ("status", "by", "seconds")
            found[mutant] = Outcome(mutant, *(entry[name] for name in names), tuple(entry["tests"]))
    return found


def save(path: Path, seed: int, drawn: int, budget: float, outcomes: Sequence[Outcome]) -> None:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    result = {
        "commit": commit.stdout.strip(),
        "seed": seed,
        "drawn": drawn,
        "budget": budget,
        "tried": len(outcomes),
        "killed": sum(outcome.is_killed for outcome in outcomes),
        "mutants": [
            {**asdict(outcome), "package": outcome.mutant.package, "key": _key(asdict(outcome.mutant))}
            for outcome in outcomes
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".part")
    written.write_text(json.dumps(result, indent=1))
    written.replace(path)


def show(console: Console, outcomes: Sequence[Outcome], drawn: int) -> None:
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
    console.print(
        f"{killed} of {len(outcomes)} mutants killed ({killed / max(1, len(outcomes)):.0%}), of {drawn} drawn"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=150, help="how many mutants (default: 150)")
    parser.add_argument("--seed", type=int, default=0, help="decides which mutants (default: 0)")
    parser.add_argument("--package", action="append", default=[], help="only of this package; may be repeated")
    parser.add_argument("--files", nargs="+", default=[], help="only of files whose path matches one of these patterns")
    parser.add_argument("--tests", nargs="+", default=[], help="run these tests instead of those that the map gives")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default: 1; each uses up to two cores)")
    parser.add_argument("--budget", type=float, default=240.0, help="CPU seconds of tests for a mutant (default: 240)")
    parser.add_argument("--list", action="store_true", help="print the mutants and their tests, and run nothing")
    parser.add_argument(
        "--json", type=Path, default=ROOT / "out" / "mutants.json", help="the result, from which a run continues"
    )
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

    outcomes = kept_outcomes(arguments.json, mutants)
    # What was not tried yet first, then survivors, which meet further tests only.
    ahead = [m for m in mutants if m not in outcomes] + [m for m in outcomes if not outcomes[m].is_killed]
    with tempfile.TemporaryDirectory(prefix="vescale-mutants-") as folder:
        copies = Copies(ROOT, Path(folder))
        pool = ThreadPoolExecutor(arguments.jobs)
        try:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with Progress(*columns, console=console) as progress:
                task = progress.add_task("mutants", total=len(mutants), completed=len(mutants) - len(ahead))
                limits = {m: 60 + 4 * sum(seconds.get(t, 10.0) for t in plan[m]) for m in ahead}
                waiting = [pool.submit(try_mutant, m, plan[m], limits[m], copies, outcomes.get(m)) for m in ahead]
                for future in as_completed(waiting):
                    outcome = future.result()
                    outcomes[outcome.mutant] = outcome
                    save(arguments.json, arguments.seed, len(mutants), arguments.budget, list(outcomes.values()))
                    survived = sum(not outcome.is_killed for outcome in outcomes.values())
                    progress.update(task, advance=1, description=f"mutants, {survived} survive")
        except KeyboardInterrupt:
            console.print("interrupted; the same command continues")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            copies.stop()
            pool.shutdown(wait=True)
        if copies.broken:
            console.print(f"left out, for they fail without a mutant: {copies.broken}")
    show(console, list(outcomes.values()), len(mutants))
    console.print(f"written to {arguments.json}")
    return 0 if len(outcomes) == len(mutants) else 130


if __name__ == "__main__":
    sys.exit(main())
