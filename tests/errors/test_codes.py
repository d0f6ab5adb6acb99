"""Every error has the stable code of its kind, and docs/errors.md a section for each."""

from __future__ import annotations

import ast
import builtins
import importlib
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.tensor import Replicate

import vescale
from tools import error_page
from vescale.errors import CODES, KINDS, CheckpointError, Coded, NotParallelizedError, PlanError, Source

ROOT = Path(__file__).parent.parent.parent

# Where a class of Python may be raised: file:function, with the reason.
PLAIN = {
    "__init__.py:__getattr__": "Python's protocol of modules",
    "buffer/__init__.py:__getattr__": "Python's protocol of modules",
    "checkpoint/__init__.py:__getattr__": "Python's protocol of modules",
    "debug/__init__.py:__getattr__": "Python's protocol of modules",
    "integrations/__init__.py:__getattr__": "Python's protocol of modules",
    "placements/_custom_placement.py:__setattr__": "Python's protocol of frozen values",
    "buffer/_layout.py:_check_index": "Python's protocol of sequences",
    "buffer/_layout.py:shard_slices": "Python's protocol of sequences",
    "placements/_region.py:global_index": "Python's protocol of sequences",
    "checkpoint/_torch_save.py:seek": "Python's protocol of files",
    "buffer/_shard_size_search.py:_native": "no memory",
    "ops/norms.py:_batch_norm": "PyTorch's text",
    "ops/losses.py:_nll_loss": "PyTorch's text",
    "placements/_redistribute.py:redistribute": "PyTorch's text",
    "placements/_local_conversion.py:_arguments": "PyTorch's text",
    "placements/_local_conversion.py:distribute_tensor": "PyTorch's text",
    "plans/_placement_text.py:_build": "caught by parse_placement",
    "checkpoint/_safetensors.py:_without_duplicates": "caught by read_header",
    "checkpoint/_index_map.py:_cat": "caught by the conversion",
    "checkpoint/_saving.py:_open": "caught by the lock",
    "checkpoint/_step_folder.py:open_regular": "caught by readers",
    "checkpoint/_step_folder.py:commit": "crosses to the job's process as text",
    "checkpoint/_data_file.py:write_data_file": "an invariant of the writer",
    "pipeline/_balance.py:partition": "an invariant of balanced_splits",
    "pipeline/_schedule.py:_ranks_of": "caught by make_schedule",
    "cli/_explain.py:write_page": "becomes a UsageError",
    "static/_hidden_tensors.py:_slots": "caught by the recorder",
}
# Exceptions of vescale that are caught inside of it, and reach no user.
INTERNAL = {
    "JobEnded",
    "KeyNeverComes",
    "NotAnIndexMapError",
    "StageEnd",
    "UnknownResultError",
    "UnknownValueError",
    "UnrecordedError",
    "_Stopped",
    "_InPythonError",
    "_OutOfTime",
    "_OutOfWork",
}


@pytest.fixture(scope="module")
def classes() -> set[type]:
    for name in error_page.modules():
        importlib.import_module(name)
    return {cls for found in CODES.values() for cls in found}


@pytest.mark.usefixtures("classes")
def test_the_page_is_that_of_the_classes() -> None:
    assert error_page.PAGE.read_text() == error_page.page(), "run python tools/error_page.py"
    assert set(KINDS) == set(CODES), "kinds without a class"
    assert len(KINDS) <= 45


def kinds_of(base: type) -> Iterator[type]:
    """The classes of vescale that derive from one, at any depth."""
    for kind in base.__subclasses__():
        if kind.__module__.startswith("vescale."):
            yield kind
        yield from kinds_of(kind)


def test_every_class_has_a_kind(classes: set[type]) -> None:
    found = set(kinds_of(Coded))
    assert found == classes
    assert [kind for kind in found if kind.code not in KINDS or not kind.__doc__] == []
    assert {kind.__name__ for kind in set(kinds_of(BaseException)) - found} == INTERNAL


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
            if is_exception(name) and name != "AssertionError":
                yield node.lineno, functions[-1] if functions else "", name
        for child in ast.iter_child_nodes(node):
            yield from visit(child)
        if inside:
            functions.pop()

    yield from visit(ast.parse(path.read_text()))


def test_what_is_raised_has_a_code() -> None:
    folder, wrong, used = ROOT / "vescale", [], set()
    for path in sorted(folder.rglob("*.py")):
        if path.parent.name == "starter":
            continue
        for line, function, name in plain_raises(path):
            place = f"{path.relative_to(folder)}:{function}"
            used.add(place)
            if place not in PLAIN:
                wrong.append(f"{path}:{line}: {function} raises a {name}; raise a class of vescale.errors")
    assert not wrong, "\n".join(wrong)
    assert used == set(PLAIN), f"nothing is raised in {set(PLAIN) - used}"


def test_messages() -> None:
    error = PlanError("no", Source("plan.yaml", 3))
    assert str(error) == "plan.yaml:3: no [VS0100]" and error.problem == "no"
    copy = pickle.loads(pickle.dumps(CheckpointError("gone")))
    assert type(copy) is CheckpointError and str(copy) == "gone [VS0900]"
    assert str(CheckpointError(f"a step: {copy}")) == "a step: gone [VS0900]"
    assert str(NotParallelizedError("this Net")) == "this Net [VS0204]"
    with pytest.raises(AssertionError, match="VS9999"):
        type("Other", (Coded, ValueError), {}, code="VS9999")


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
    [("VS0101", bad_path), ("VS0100", bad_phase), ("VS0001", bad_keep), ("VS0100", bad_microbatches)],
)
def test_messages_end_with_the_code_of_their_kind(code: str, mistake: Callable[[], None]) -> None:
    with pytest.raises(ValueError, match=rf"\[{code}\]$"):
        mistake()
