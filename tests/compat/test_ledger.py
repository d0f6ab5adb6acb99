"""What vescale changes outside of the table of patches is in one ledger: found by reading the package, noted when done."""

from __future__ import annotations

import ast
import functools
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.fresh import run_fresh
from tests.test_house import PACKAGE, sources
from vescale.compat import OTHER_CHANGES, PATCHES, note, noted

# Processes that vescale starts for its own work, and the command: nobody else's program runs in them.
OWN_PROCESSES = ("cli.", "comm._local_ranks", "plan_search._search", "simulation.")
# The mechanism itself, and vescale's own module among the loaded ones.
MECHANISM = ("compat.patching:", "csrc._loader:")

CODE = ("__code__", "__defaults__", "__kwdefaults__")
PROCESS = (
    "atexit.register",
    "faulthandler.dump_traceback_later",
    "faulthandler.enable",
    "gc.disable",
    "gc.freeze",
    "os.environ.setdefault",
    "os.environ.update",
    "os.putenv",
    "os.register_at_fork",
    "set_compiler",
    "signal.signal",
    "sys.setprofile",
    "sys.settrace",
    "threading.setprofile",
    "threading.settrace",
    "torch.set_num_threads",
    "warnings.filterwarnings",
    "warnings.simplefilter",
)
REGISTRATIONS = (
    "addFilter",
    "add_safe_globals",
    "library.Library",
    "library.impl",
    "register_fake",
    "register_module_forward_hook",
    "register_module_forward_pre_hook",
    "register_module_module_registration_hook",
    "register_module_parameter_registration_hook",
    "register_optimizer_step_post_hook",
    "register_optimizer_step_pre_hook",
    "swap_tensors",
    "_library.guard",
)


@functools.cache
def walk(text: str) -> tuple[ast.AST, ...]:
    """What changes something, or says what an object has."""
    wanted = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Attribute, ast.Call, ast.ClassDef, ast.Delete, ast.With)
    return tuple(node for node in ast.walk(ast.parse(text)) if isinstance(node, wanted))


@pytest.fixture(scope="module", autouse=True)
def forget_nodes() -> Iterator[None]:
    yield
    walk.cache_clear()


def text_of(node: ast.expr) -> str:
    """As ``ast.unparse``, which is slow, for dotted names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{text_of(node.value)}.{node.attr}"
    return ast.unparse(node) if isinstance(node, ast.Call) and text_of(node.func) == "vars" else "<expression>"


@functools.cache
def own_attributes() -> frozenset[str]:
    """Private attributes that a class of the package has, or that carry its name."""
    found = set()
    for path in sources():
        for node in walk(path.read_text()):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and text_of(node.value) == "self":
                found.add(node.attr)
            if isinstance(node, ast.ClassDef):
                for one in node.body:
                    if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                        found.add(one.target.id)
    return frozenset(found)


def is_namespace(node: ast.expr) -> bool:
    """``x.__dict__`` and ``vars(x)`` of another object than ``self``."""
    text = text_of(node)
    return (text.endswith(".__dict__") or text.startswith("vars(")) and text not in ("self.__dict__", "vars(self)")


def targets(node: ast.AST) -> list[ast.expr]:
    """What an assignment or a deletion writes to."""
    found: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        found = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        found = [node.target]
    return [one for each in found for one in (each.elts if isinstance(each, ast.Tuple | ast.List) else [each])]


def kinds(text: str) -> Iterator[tuple[int, str]]:
    """(line, kind) of each change that a source file makes to objects of others, the process and PyTorch's registries."""
    muted = {
        id(inner)
        for node in walk(text)
        if isinstance(node, ast.With) and any("catch_warnings" in ast.unparse(one) for one in node.items)
        for inner in ast.walk(node)
    }
    aliases = {
        text_of(one)
        for node in walk(text)
        if isinstance(node, ast.Assign) and is_namespace(node.value)
        for one in node.targets
    }
    for node in walk(text):
        for target in targets(node):
            owner = text_of(target.value) if isinstance(target, ast.Attribute | ast.Subscript) else ""
            if isinstance(target, ast.Subscript):
                if is_namespace(target.value) or owner in aliases:
                    yield node.lineno, "instance"  # type: ignore[attr-defined]
                elif owner in ("os.environ", "sys.modules"):
                    yield node.lineno, "process"  # type: ignore[attr-defined]
            elif isinstance(target, ast.Attribute):
                is_private = target.attr.startswith("_") and not target.attr.startswith(("__", "_vescale"))
                if target.attr == "__class__":
                    yield target.lineno, "class"
                elif target.attr in CODE and owner != "copy":  # of a copy of a function
                    yield target.lineno, "code"
                elif target.attr in ("forward", "__torch_function__") and owner != "self":
                    yield target.lineno, "instance"
                elif owner in ("builtins", "gc", "os", "sys", "threading"):
                    yield target.lineno, "process"
                elif is_private and owner not in ("self", "cls", "ctx") and target.attr not in own_attributes():
                    yield target.lineno, "instance"
        if isinstance(node, ast.Call):
            called = text_of(node.func)
            if (called in ("setattr", "delattr") and ast.unparse(node.args[0]) != "self") or (
                called.endswith(".__dict__.setdefault") and called != "self.__dict__.setdefault"
            ):
                yield node.lineno, "instance"
            elif called in PROCESS and not (called.startswith("warnings.") and id(node) in muted):
                yield node.lineno, "process"
            elif called.endswith(REGISTRATIONS) or called == "Changes":
                yield node.lineno, "torch"


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def found() -> dict[str, list[int]]:
    """By owner and kind, the lines."""
    changes: dict[str, list[int]] = {}
    for path in sources():
        for line, kind in kinds(path.read_text()):
            changes.setdefault(f"{module_of(path)}:{kind}", []).append(line)
    return {key: lines for key, lines in changes.items() if not key.startswith(MECHANISM)}


def test_every_change_has_a_row_and_every_row_a_change() -> None:
    of_table = {f"{patch.owner.removeprefix('vescale.')}:torch" for patch in PATCHES} | {"compat.patches:torch"}
    lines = {key: places for key, places in found().items() if key not in of_table or key in OTHER_CHANGES}
    assert {key: places for key, places in lines.items() if key not in OTHER_CHANGES} == {}
    assert OTHER_CHANGES.keys() - lines.keys() == set(), "rows without a change"
    assert all(all(row) for row in OTHER_CHANGES.values())


def test_changes_of_behavior_are_noted() -> None:
    """Attributes of single objects aside, which forwards set on and on."""
    silent = []
    for key in found().keys() & OTHER_CHANGES.keys():
        owner, _, kind = key.partition(":")
        if kind != "instance" and not key.startswith(OWN_PROCESSES):
            text = (PACKAGE / f"{owner.replace('.', '/')}.py").read_text()
            if f'note("{key}"' not in text:
                silent.append(key)
    assert not silent


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("module.__class__ = Other", "class"),
        ("function.__code__ = code", "code"),
        ("function.__kwdefaults__ = {}", "code"),
        ("module.__dict__['_compiled_call_impl'] = call", "instance"),
        ("vars(module)['forward'] = call", "instance"),
        ("attributes = module.__dict__\nattributes['a'] = 1", "instance"),
        ("module.forward = call", "instance"),
        ("del module.forward", "instance"),
        ("setattr(module, name, x)", "instance"),
        ("stage._warmup_backward_result = call", "instance"),
        ("sys.excepthook = hook", "process"),
        ("sys.settrace(hook)", "process"),
        ("threading.settrace(hook)", "process"),
        ("atexit.register(end)", "process"),
        ("signal.signal(number, end)", "process"),
        ("faulthandler.dump_traceback_later(3, exit=True)", "process"),
        ("os.environ['A'] = 'b'", "process"),
        ("warnings.simplefilter('ignore')", "process"),
        ("gc.disable()", "process"),
        ("torch.serialization.add_safe_globals([A])", "torch"),
        ("library.Library('aten', 'IMPL')", "torch"),
        ("register_optimizer_step_pre_hook(f)", "torch"),
        ("logger.addFilter(f)", "torch"),
        ("changes = Changes()", "torch"),
    ],
)
def test_the_scan_finds(line: str, kind: str) -> None:
    assert [each for _, each in kinds(line)] == [kind]


@pytest.mark.parametrize(
    "line",
    [
        "self.__class__.x",
        "self.__dict__['a'] = 1",
        "with warnings.catch_warnings():\n    warnings.simplefilter('ignore')",
    ],
)
def test_the_scan_passes(line: str) -> None:
    assert list(kinds(line)) == []


def test_notes_keep_names_alone() -> None:
    class Layer(nn.Linear):
        def __getattr__(self, name: str) -> Any:
            return "anything" if name == "__qualname__" else super().__getattr__(name)

    before = noted().get("pipeline._gates:class", ())
    layer = Layer(2, 2)
    gone = weakref.ref(layer)
    note("pipeline._gates:class", layer, nn.Linear, "a name")
    del layer
    gc.collect()
    assert gone() is None
    added = set(noted()["pipeline._gates:class"]) - set(before)
    assert {"torch.nn.modules.linear.Linear", "a name"} <= added | set(before)
    assert any(name.endswith("Layer") for name in noted()["pipeline._gates:class"])
    with pytest.raises(AssertionError):
        note("no such change", "x")


def test_what_a_program_does_is_noted() -> None:
    program = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from vescale import compat
from vescale.fsdp import fully_shard
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
assert "fsdp._api:class" not in compat.noted()
fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
assert compat.noted()["fsdp._api:class"] == ("torch.nn.modules.linear.Linear",)
assert "vescale.placements._ragged.RaggedShard" in compat.noted()["placements._checkpoint:torch"]
"""
    done = run_fresh(program)
    assert done.returncode == 0, done.stderr
