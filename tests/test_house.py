"""The house rules: who may import whom, where private torch names live, how long a file may be, what import changes."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from tests.fresh import run_fresh

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vescale"

# package -> floor; a package imports only strictly lower floors, and the packages of its own floor named in SIDEWAYS.
FLOORS = {
    "errors": 0,
    "csrc": 0,
    "compat": 0,
    "comm": 0,
    "agreement": 1,
    "placements": 1,
    "plans": 2,
    "plan_zoo": 2,
    "rng": 2,
    "buffer": 2,
    "ops": 2,
    "gradients": 3,
    "checks": 3,
    "ir": 3,
    "fsdp": 4,
    "runtime": 5,
    "static": 6,
    "pipeline": 6,
    "checkpoint": 6,
    "optim": 6,
    "_parallelize": 6.5,  # the orchestrator: above all that it orders, and below what simulates whole jobs
    "estimation": 7,
    "debug": 7,
    "integrations": 8,
    "plan_search": 8,
    "simulation": 8,
    "cli": 9,
}
SIDEWAYS = {("comm", "compat"), ("comm", "csrc"), ("compat", "csrc"), ("ops", "rng"), ("plan_zoo", "plans")}
SIDEWAYS |= {("comm", "errors"), ("compat", "errors")}
SIDEWAYS |= {("debug", "estimation"), ("pipeline", "optim")}


def sources() -> list[Path]:
    """Files of the package; what `vescale new` copies is a user's."""
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE / "cli" / "starter")


@functools.cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """All of a source file, its module first; several tests read them."""
    return tuple(ast.walk(ast.parse(text)))


@pytest.fixture(scope="module", autouse=True)
def forget_nodes() -> Iterator[None]:
    yield
    nodes.cache_clear()


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import in a file, also those inside functions and by ``import_module("name")``."""
    for node in nodes(path.read_text()):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full vescale path"
            yield node.lineno, node.module or ""
            for alias in node.names:  # `from vescale import rng` imports the package vescale.rng
                yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and room(node.value) is not None:
            yield node.lineno, node.value


def room(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "vescale" and len(parts) > 1 and parts[1] in FLOORS else None


def test_every_package_has_a_floor() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= set(FLOORS), f"packages without a floor in tests/test_house.py: {sorted(rooms - set(FLOORS))}"


def test_imports_point_down() -> None:
    wrong = []
    for path in sources():
        parts = path.relative_to(PACKAGE).parts
        own = parts[0].removesuffix(".py")
        if own not in FLOORS:  # vescale/__init__.py and __main__.py stand on the top floor
            continue
        for line, module in imports(path):
            other = room(module)
            if other is None or other == own:
                continue
            if FLOORS[other] >= FLOORS[own] and (own, other) not in SIDEWAYS:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {own} (floor {FLOORS[own]}) imports {other}")
    assert not wrong, "\n".join(wrong)


# Words that the project once used in a sense of its own, and the standard terms for them. They are not used in any sense, so
# that the test needs no understanding.
VOCABULARY = {
    "asker": "requester",
    "heard": "notified",
    "lane": "stream",
    "lanes": "streams",
    "lent": "borrowed",
    "lie": "placement",
    "lies": "placements",
    "lying": "placed",
    "quiet": "muted",
    "said": "entry",
    "turning": "ring axis",
    "words": "placements, entries",
}
# file or folder -> words with their standard meaning there
STANDARD_USES = {
    "vescale/rng/_dtensor_fill.py": {"words"},
    "vescale/rng/_mt19937.py": {"words"},
    "vescale/rng/_enable.py": {"words"},
    "vescale/rng/_random_ops.py": {"words"},  # 32-bit outputs of a generator
    "vescale/rng/_philox.py": {"words", "lane", "lanes"},  # positions in a block of Philox
    "vescale/rng/_cuda_engine.py": {"words", "lanes"},
    "docs/internals/rng.md": {"words"},
    "vescale/cli/_env.py": {"words"},  # of textwrap
    "vescale/cli/_zoo.py": {"words"},
    "vescale/plans/_yaml_writer.py": {"words"},
}


def words_of(text: str) -> set[str]:
    """Lower case; names are split at underscores and capitals."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", text)}


def test_the_vocabulary_is_standard() -> None:
    """In names, strings, comments and docs."""
    wrong, used = [], set()
    for path in (*sources(), ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        name = str(path.relative_to(ROOT))
        standard = STANDARD_USES.get(name, set())
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = words_of(line) & VOCABULARY.keys()
            used |= {(name, word) for word in found & standard}
            wrong += [f"{name}:{number}: {word}; write {VOCABULARY[word]!r}" for word in sorted(found - standard)]
    assert not wrong, "\n".join(wrong)
    assert used == {(name, word) for name, words in STANDARD_USES.items() for word in words}, "exceptions without a use"


@pytest.mark.parametrize("text", ["self.heard = 1", "class RingLanes:", "_said", "# it lies there", "A Lane"])
def test_words_are_found_in_names_and_text(text: str) -> None:
    assert words_of(text) & VOCABULARY.keys()


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_files(path: Path, files: Collection[str]) -> set[str]:
    """Of `from a import b` the file is a.b if there is one, else a."""
    found = set()
    for node in nodes(path.read_text()):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            found |= {inner if (inner := f"{base}.{alias.name}") in files else base for alias in node.names}
    return found & set(files)


def circles() -> list[list[str]]:
    """Sets of files that import each other, also for types alone, or inside of functions (Tarjan's algorithm)."""
    files = {module_name(path): path for path in sources()}
    edges = {name: imported_files(path, files) - {name} for name, path in files.items()}
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        numbers[name] = lowest[name] = len(numbers)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in numbers:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], numbers[other])
        if lowest[name] == numbers[name]:
            circle = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for name in files:
        if name not in numbers:
            visit(name)
    return found


def test_files_do_not_import_in_circles() -> None:
    assert not circles(), "\n".join(map(", ".join, circles()))


def is_private(module: str) -> bool:
    parts = module.split(".")
    return parts[0] == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts[1:])


def dotted(node: ast.Attribute) -> str:
    """``a.b.c`` of an attribute of names alone; of calls and subscripts, which have arguments, nothing."""
    inner: ast.expr = node
    while isinstance(inner, ast.Attribute):
        inner = inner.value
    return ast.unparse(node) if isinstance(inner, ast.Name) else ""


def test_private_torch_names_live_in_compat() -> None:
    wrong = []
    for path in sources():
        if path.relative_to(PACKAGE).parts[0] == "compat":
            continue
        wrong += [
            f"{path.relative_to(ROOT)}:{line}: imports {module}" for line, module in imports(path) if is_private(module)
        ]
        for node in nodes(path.read_text()):
            if isinstance(node, ast.Attribute) and is_private(dotted(node)):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: uses {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


# What reaches the job's store: ranks agree through ``vescale.agreement``, whose requests are counted.
_STORES = ("default_store", "own_connection")
# Packages and files that have a store of their own business: why.
ALLOWED_STORES = {
    "agreement": "it is what others use",
    "compat": "it reads PyTorch's name of the store",
    "debug/_stopped_ranks.py": "people who have stopped a job talk to its ranks",
    "debug/_watchdog.py": "reports of ranks that hang, from a thread with a connection of its own",
}


def test_the_store_is_reached_through_agreement() -> None:
    wrong, met = [], set()
    for path in sources():
        name = str(path.relative_to(PACKAGE))
        owner = next((each for each in ALLOWED_STORES if name == each or name.startswith(f"{each}/")), None)
        for node in nodes(path.read_text()):
            is_store = isinstance(node, ast.Name) and node.id in _STORES
            is_store |= isinstance(node, ast.Attribute) and node.attr in _STORES
            if is_store and owner is not None:
                met.add(owner)
            elif is_store:
                wrong.append(f"vescale/{name}:{node.lineno}: use vescale.agreement")
    assert not wrong, "\n".join(wrong)
    assert met == set(ALLOWED_STORES) - {"compat"} | (met & {"compat"}), "the table names files that reach no store"


# Calls that can run what they are given.
_RUNS_DATA = {"eval", "exec", "compile", "__import__", "breakpoint"}
_RUNS_DATA |= {f"pickle.{name}" for name in ("load", "loads", "Unpickler")}
_RUNS_DATA |= {f"marshal.{name}" for name in ("load", "loads")} | {"shelve.open", "code.interact", "runpy.run_path"}
_RUNS_DATA |= {f"yaml.{name}" for name in ("load", "load_all", "unsafe_load", "full_load", "Loader", "UnsafeLoader")}
_RUNS_DATA |= {f"os.{name}" for name in ("system", "popen")} | {"subprocess.getoutput", "subprocess.getstatusoutput"}
_RUNS_DATA |= {"torch.load", "importlib.import_module", "torch.hub.load"}
# (file, call): why it may be there. What is read from a plan, a checkpoint or a socket never reaches one of these.
ALLOWED_CALLS = {
    ("__init__.py", "importlib.import_module"): "the package's own modules, when they are first used",
    ("buffer/__init__.py", "importlib.import_module"): "the package's own modules, when they are first used",
    ("integrations/__init__.py", "importlib.import_module"): "the package's own modules, when they are first used",
    ("cli/_env.py", "importlib.import_module"): "the package's own compat",
    ("cli/_main.py", "importlib.import_module"): "the package's own commands",
    ("cli/_inputs.py", "importlib.import_module"): "MODEL, pkg.module:factory, is code that the user asks to run",
    ("simulation/_rank.py", "runpy.run_path"): "SCRIPT is code that the user asks to run",
    ("compat/needs.py", "importlib.import_module"): "names of torch's modules, from a table",
    ("checkpoint/__init__.py", "importlib.import_module"): "the package's own modules, when they are first used",
    ("pipeline/_headers.py", "pickle.loads"): "from ranks of this job, as torch's object collectives do",
    ("gradients/_agreed_parameters.py", "pickle.loads"): "from ranks of this job, as torch's object collectives do",
}


def source_of(node: ast.expr) -> str:
    """The source of an expression; ``ast.unparse`` of a name takes ten times as long."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{source_of(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ast.unparse(node)


def calls(path: Path) -> Iterator[tuple[int, str, ast.Call]]:
    """(line, dotted name, call) of every call in a file; names imported from a module have it before them."""
    origin = {
        alias.asname or alias.name: f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        for node in nodes(path.read_text())
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    for node in nodes(path.read_text()):
        if isinstance(node, ast.Call):
            first, dot, rest = source_of(node.func).partition(".")
            yield node.lineno, origin.get(first, first) + dot + rest, node


NAMES_A_DEVICE = {
    "compat/devices.py": "the device table",
    "compat/needed_names.py": "private names of torch that the kernels need",
    "compat/cuda_kernels.py": "kernels of random numbers",
    "rng/_cuda_engine.py": "kernels of random numbers",
}


def names_of_one_device(path: Path) -> list[int]:
    """Lines whose code, apart from docstrings and imports of modules of vescale, names one kind of accelerator."""
    found, own = [], {line for line, module in imported_modules(path) if module.startswith("vescale")}
    docstrings = {
        id(node.body[0].value)
        for node in nodes(path.read_text())
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in nodes(path.read_text()):
        text = ""
        if isinstance(node, ast.Name):
            text = node.id
        elif isinstance(node, ast.Attribute):
            text = node.attr
        elif isinstance(node, ast.alias):
            text = node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            text = node.value
        line = getattr(node, "lineno", 0)
        if re.search(r"(?<![A-Z])cuda(?!_engine)", text) and line not in own:
            found.append(line)
    return found


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    for node in nodes(path.read_text()):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.lineno, node.module or ""


def test_code_names_no_kind_of_accelerator() -> None:
    """It asks ``torch.accelerator``, the module of a tensor's device, or the table of what they lack."""
    found = {str(path.relative_to(PACKAGE)): names_of_one_device(path) for path in sources()}
    assert {file: lines for file, lines in found.items() if lines and file not in NAMES_A_DEVICE} == {}
    assert not {file for file in NAMES_A_DEVICE if not found[file]}, "exceptions that are none any more"


@pytest.mark.parametrize(
    "line", ["x.is_cuda", "torch.cuda.current_stream()", "torch.device('cuda')", "from torch import cuda"]
)
def test_names_of_one_device_are_seen(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.py"
    path.write_text(f'"""On cuda."""\n{line}\n')
    assert names_of_one_device(path) == [2]


def test_nothing_runs_what_it_reads() -> None:
    """No eval, exec, pickle or unsafe loading, except where the table says why."""
    wrong, met = [], set()
    for path in sources():
        name = str(path.relative_to(PACKAGE))
        for line, call, node in calls(path):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if call == "torch.load" and given.get("weights_only") == "True":
                continue
            runs = call in _RUNS_DATA or given.get("shell") == "True" or given.get("allow_pickle") == "True"
            if runs and (name, call) in ALLOWED_CALLS:
                met.add((name, call))
            elif runs:
                wrong.append(f"vescale/{name}:{line}: {ast.unparse(node)[:80]}")
    assert not wrong, "\n".join(wrong)
    assert met == set(ALLOWED_CALLS), "the table names calls that are not there"


@pytest.mark.parametrize(
    "code",
    [
        "eval('1')",
        "import pickle as p\np.loads(b'')",
        "from pickle import loads as read\nread(b'')",
        "import torch\ntorch.load('x', weights_only=False)",
        "import yaml\nyaml.load('', Loader=yaml.Loader)",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ],
)
def test_what_runs_data_is_seen(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new.py"
    path.write_text(code)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    with pytest.raises(AssertionError, match=r"vescale/new.py:\d"):
        test_nothing_runs_what_it_reads()


@pytest.mark.parametrize("late", ["    from vescale.two import b", "if TYPE_CHECKING:\n    import vescale.two"])
def test_circles_are_seen(late: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "vescale"
    package.mkdir()
    (package / "one.py").write_text(f"def a():\n{late}" if late.startswith(" ") else late)
    (package / "two.py").write_text("from vescale.three import c")
    (package / "three.py").write_text("from vescale import one")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", package)
    assert circles() == [["vescale.one", "vescale.three", "vescale.two"]]


def test_files_are_short() -> None:
    lengths = {str(p.relative_to(PACKAGE)): len(p.read_text().splitlines()) for p in sources()}
    long = {name: count for name, count in lengths.items() if count > 800}
    assert not long, f"files over 800 lines (one noun per file): {long}"


_SNAPSHOT = """
import sys, time, types
import torch, torch._dynamo, torch.distributed.tensor, torch.distributed.checkpoint, torch.distributed.fsdp

import warnings
warnings.simplefilter("ignore")  # looking at a deprecated name warns

def attributes():
    dispatcher = torch.distributed.tensor.DTensor._op_dispatcher
    found = {("dispatcher", "", key): id(value) for key, value in vars(dispatcher).items()}
    found.update({("handlers", "", op): id(handler) for op, handler in dispatcher._custom_op_handlers.items()})
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "torch" and isinstance(module, types.ModuleType):
            for key, value in vars(module).items():
                found[name, key] = id(value)
                if isinstance(value, type) and value.__module__.startswith("torch"):
                    found.update({(name, key, k): id(v) for k, v in vars(value).items()})
    return found

# Placements tell torch.load that they are safe to read, by torch's own function for that, and distribute_tensor, whose name
# Python looks up before it constructs the placements among its arguments, of themselves.
allowed = {("torch._weights_only_unpickler", "_marked_safe_globals_set")}
before = attributes()
distribute_tensor = id(torch.distributed.tensor.distribute_tensor)
start = time.process_time()
import vescale
seconds = time.process_time() - start
import vescale.compat, vescale.comm, vescale.errors, vescale.csrc
loaded = attributes()  # of modules of torch that were not loaded, there is more
assert all(loaded.get(key) == value for key, value in before.items()), "nothing without the placements"
assert not vescale.compat.is_installed()
for name in vescale.__all__:
    getattr(vescale, name)
import vescale.debug, vescale.fsdp, vescale.rng
after = attributes()
allowed |= {key for key, value in before.items() if value == distribute_tensor}
changed = [key for key in before if before[key] != after.get(key) and key not in allowed]
known = {key[:2] for key in before}  # modules that are new give their packages names; classes must not get any
added = [key for key in after if key not in before and len(key) == 3 and key[:2] in known]
assert not changed and not added, (changed[:20], added[:20])
assert list(vescale.compat.patching.HOOKS) == ["entry"]
own = vescale.compat.stock().distribute_tensor
assert id(own) == distribute_tensor and torch.distributed.tensor.distribute_tensor.__wrapped__ is own
vescale.compat.uninstall()
assert torch.distributed.tensor.distribute_tensor is own and not vescale.compat.is_installed()
print(seconds)
"""


def test_import_changes_nothing_in_torch() -> None:
    """Neither does importing the package, any public name, nor a module that programs import, but for one function, which
    the import of the placements replaces; ``parallelize`` and the first placement install the rest. Half a second at most,
    of processor time, so that a loaded machine does not turn this red."""
    done = run_fresh(_SNAPSHOT)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.5


def test_imports_draw_nothing() -> None:
    """What a program draws after ``parallelize``, which loads most of the package, is what it draws without."""
    done = run_fresh(
        "import random, torch, numpy; random.seed(0); torch.manual_seed(0); numpy.random.seed(0)\n"
        "states = lambda: (random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist())\n"
        "before = states()\n"
        "import vescale.pipeline, vescale.debug, vescale.optim, vescale.static, vescale.checkpoint, vescale.estimation\n"
        "assert states() == before"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "statement, left_out",
    [
        ("import vescale", ("torch", "transformers", "jsonschema")),
        ("import vescale.cli", ("torch", "transformers", "jsonschema")),
        ("import vescale; vescale.parallelize, vescale.fully_shard", ("torch._dynamo", "torch.distributed.pipelining")),
        ("import vescale.cli._lint, vescale.cli._explain", ("torch._dynamo",)),
    ],
)
def test_imports_are_cheap(statement: str, left_out: tuple[str, ...]) -> None:
    """vescale itself loads neither torch nor anything that torch does not load: its names arrive on first use. What most
    programs do not use costs them nothing: the compiler of torch takes as long as a third of torch."""
    code = f"import sys; {statement}; print([m for m in {left_out} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def torch_names(nodes: tuple[ast.AST, ...]) -> set[str]:
    """Local names of torch's modules, classes and functions in a file."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {
                alias.asname or alias.name.partition(".")[0] for alias in node.names if alias.name.startswith("torch")
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def writes_to_torch(path: Path) -> list[str]:
    """Assignments to attributes and entries of torch's modules and classes, and registrations of kernels."""
    found = nodes(path.read_text())
    names = torch_names(found)
    wrong = []
    for node in found:
        targets: list[ast.expr] = []
        if not isinstance(node, ast.stmt | ast.expr):
            continue
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.Call):
            called = source_of(node.func)
            if called in ("setattr", "delattr") and root(node.args[0]) in names:
                wrong.append(f"{path.name}:{node.lineno}: {ast.unparse(node)[:80]}")
            if called.endswith(("library.Library", "library.impl", "register_fake", "_custom_op_handlers.update")):
                wrong.append(f"{path.name}:{node.lineno}: {ast.unparse(node)[:80]}")
        targets = [t for target in targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
        for target in targets:
            if isinstance(target, ast.Attribute | ast.Subscript) and root(target) in names:
                wrong.append(f"{path.name}:{node.lineno}: {ast.unparse(target)}")
            code = isinstance(target, ast.Attribute) and target.attr in ("__code__", "__defaults__", "__kwdefaults__")
            if code and root(target) != "copy":  # of a copy of a function (runtime/_mode.py)
                wrong.append(f"{path.name}:{node.lineno}: {ast.unparse(target)}")
    return wrong


def test_nothing_but_the_table_writes_to_torch() -> None:
    # A row of the table registers kernels, a new process group is entered among PyTorch's, and estimates run attention of
    # another device, which is undone at the end of their step.
    registered = {"collective_kernels.py", "process_groups.py", "attention_kernels.py"}
    for path in sorted(PACKAGE.rglob("*.py")):
        found = writes_to_torch(path)
        assert not found or path.name in registered, found


@pytest.mark.parametrize(
    "line",
    [
        "torch.nn.init.zeros_ = None",
        "setattr(torch.nn, 'Linear', None)",
        "torch.sum.__code__ = None",
        "del DTensor.item",
    ],
)
def test_the_scan_finds_writes(tmp_path: Path, line: str) -> None:
    file = tmp_path / "file.py"
    file.write_text(f"import torch\nfrom torch.distributed.tensor import DTensor\n{line}\n")
    assert writes_to_torch(file)


def test_what_git_tracks_is_small_and_no_cache() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("an unpacked archive: what git tracks can be asked in a clone only")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in tracked.stdout.split("\0") if name]
    large = [path for path in files if path.is_file() and path.stat().st_size > 1_000_000]
    assert not large, "not above 1 MB"
    assert not [path for path in files if any("_cache" in part for part in path.relative_to(ROOT).parts[:-1])]
