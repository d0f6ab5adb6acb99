"""Every error has a stable code, and docs/errors.md a section for each."""

from __future__ import annotations

import ast
import builtins
import importlib
import pickle
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.tensor import Replicate

import vescale
from vescale.errors import CODES, CheckpointError, Coded, NotParallelizedError, PlanError, Source

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "errors.md"

# Classes of Python that may be raised: by function, with the reason.
PLAIN = {
    "__getattr__": "Python's protocol",
    "__setattr__": "Python's protocol",
    "_check_index": "Python's protocol of sequences",
    "shard_slices": "Python's protocol of sequences",
    "global_index": "Python's protocol of sequences",
    "seek": "Python's protocol of files",
    "_native": "no memory",
    "_batch_norm": "PyTorch's text",
    "_nll_loss": "PyTorch's text",
    "redistribute": "PyTorch's text",
    "_arguments": "PyTorch's text",
    "distribute_tensor": "PyTorch's text",
    "_build": "caught by parse_placement",
    "_without_duplicates": "caught by read_header",
    "_cat": "caught by the conversion",
    "_open": "caught by the lock",
    "commit": "crosses to the job's process as text",
    "write_data_file": "an invariant of the writer",
    "partition": "an invariant of balanced_splits",
    "_ranks_of": "caught by make_schedule",
    "_job": "becomes a UsageError",
    "write_page": "becomes a UsageError",
    "_slots": "caught by the recorder",
    "_positive": "argparse's protocol",
}
# Classes that never reach a user.
INTERNAL = {
    "JobEnded",
    "NotAnIndexMapError",
    "StageEnd",
    "SystemExit",
    "UnrecordedError",
    "_InPythonError",
    "_OutOfWork",
}


def modules() -> Iterator[str]:
    for found in pkgutil.walk_packages(vescale.__path__, "vescale."):
        if (
            not re.search(r"\.(starter|csrc)\b", found.name)
            and "__main__" not in found.name
            and "_writer_process" not in found.name
        ):
            yield found.name


@pytest.fixture(scope="module")
def codes() -> dict[str, str]:
    for name in modules():
        importlib.import_module(name)
    return {code: kind.__name__ for code, kind in CODES.items()}


def sections() -> dict[str, tuple[str, str]]:
    """By code: the class's name, and the section."""
    found = re.findall(r"^### (VS\d{4}) `(\w+)`\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.M | re.S)
    return {code: (name, text) for code, name, text in found}


def test_the_page_has_the_codes(codes: dict[str, str]) -> None:
    assert {code: name for code, (name, _) in sections().items()} == codes
    for code, (_, text) in sections().items():
        assert "**Edit.**" in text, code


def test_every_class_has_a_code_of_its_own(codes: dict[str, str]) -> None:
    def kinds(base: type) -> Iterator[type]:
        for kind in base.__subclasses__():
            yield kind
            yield from kinds(kind)

    found = [kind for kind in kinds(Coded) if kind.__module__.startswith("vescale.")]
    assert {kind.__name__ for kind in found} == set(codes.values())
    assert [kind for kind in found if "code" not in vars(kind)] == []


def is_exception(name: str) -> bool:
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, BaseException)


def plain_raises(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, function, class) where a class of Python is raised with a message."""
    functions: list[str] = []

    def visit(node: ast.AST) -> Iterator[tuple[int, str, str]]:
        inside = isinstance(node, ast.FunctionDef)
        if isinstance(node, ast.FunctionDef):
            functions.append(node.name)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            name = node.exc.func.id
            if is_exception(name) and name != "AssertionError" and name not in INTERNAL:
                yield node.lineno, functions[-1] if functions else "", name
        for child in ast.iter_child_nodes(node):
            yield from visit(child)
        if inside:
            functions.pop()

    yield from visit(ast.parse(path.read_text()))


def test_what_is_raised_has_a_code() -> None:
    folder = ROOT / "vescale"
    found = [
        f"{path.relative_to(ROOT)}:{line}: {function} raises a {name}; raise a class of vescale.errors"
        for path in sorted(folder.rglob("*.py"))
        if path.parent.name != "starter"
        for line, function, name in plain_raises(path)
        if function not in PLAIN
    ]
    assert not found, "\n".join(found)


def test_messages() -> None:
    error = PlanError("no", Source("plan.yaml", 3))
    assert str(error) == "plan.yaml:3: no [VS0100]" and error.problem == "no"
    copy = pickle.loads(pickle.dumps(CheckpointError("gone")))
    assert type(copy) is CheckpointError and str(copy) == "gone [VS0900]"
    assert str(CheckpointError(f"a step: {copy}")) == "a step: gone [VS0900]"
    assert str(NotParallelizedError("this Net")) == "this Net [VS0205]"
    with pytest.raises(AssertionError, match="VS0100"):
        type("Other", (Coded, ValueError), {"code": "VS0100"})


def bad_path() -> None:
    vescale.Plan({"dp": 2}).shard("", {"dp": Replicate()})


def bad_phase() -> None:
    vescale.Plan({"dp": 2}).shard("a", {"dp": Replicate()}, phase="forward")


def bad_keep() -> None:
    from vescale.checkpoint import Checkpointer

    Checkpointer("nowhere", keep=1)


def bad_microbatches() -> None:
    vescale.Plan({"pp": 2}).pipeline(split_before=["a"], microbatches=0)


@pytest.mark.parametrize(
    ("code", "mistake"),
    [("VS0101", bad_path), ("VS0102", bad_phase), ("VS0902", bad_keep), ("VS0112", bad_microbatches)],
)
def test_examples_of_the_page(code: str, mistake: Callable[[], None]) -> None:
    with pytest.raises(ValueError) as caught:
        mistake()
    example = re.search(r"```text\n(.*?)```", sections()[code][1], re.S)
    assert example is not None

    def plain(text: str) -> str:
        return re.sub(r"^\S+\.py:\d+: ", "", " ".join(text.split()))

    assert plain(str(caught.value)) == plain(example[1])
