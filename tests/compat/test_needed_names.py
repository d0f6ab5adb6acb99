"""The table of private names is what the source uses, and the self-check names each of them, and each unknown field."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.compat import private_names
from tests.compat.private_names import is_private, names_of_package
from vescale.compat import needs
from vescale.compat.needed_names import NATIVE_NAMES
from vescale.compat.needs import KNOWN, NEEDS, OPTIONAL, Need, Record, lacking, self_check
from vescale.errors import UnsupportedTorchError, UntestedTorchWarning

# Private names that are not torch's.
OF_OTHERS = {
    "Python": {
        *("_asdict", "_codecs", "_current_frames", "_exit", "_fields", "_getframe", "_getval", "_replace"),
        *("_select_frame", "_P"),
    },
    "transformers, diffusers and PEFT": {
        *("_class_name", "_is_hf_initialized", "_keys_to_ignore_on_load_missing", "_pre_injection_hook"),
        *("_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save", "_prepare_cache_for_generation"),
        *("_weight_conversions", "_n_gpu", "_setup_devices"),
    },
    "Lightning": {"_setup_distributed"},
}
# Names of torch that the installed one need not have, and why.
NOT_NEEDED = {
    "_MEM_FORMAT_ENCODING": "in files that torch wrote",
    "_StorageInfo": "in files that torch wrote",
    "_get_layout": "in files that torch wrote",
    "_rebuild_from_type_v2": "in files that torch wrote",
    "_rebuild_parameter": "in files that torch wrote",
    "_rebuild_parameter_with_state": "in files that torch wrote",
    "_rebuild_tensor": "in files that torch wrote",
    "_rebuild_tensor_v2": "in files that torch wrote",
    "_rebuild_tensor_v3": "in files that torch wrote",
    "_utils": "in files that torch wrote",
    "_module_fqn": "of FSDP2's parameter groups, in reports: they name no module without",
    "_checkpoint_wrapped_module": "of wrappers, which names of parameters leave out",
    "_fsdp_wrapped_module": "of wrappers, which names of parameters leave out",
    "_orig_mod": "of wrappers, which names of parameters leave out",
    "_raw": "with _saved_ of autograd's nodes; only their objects have them, and their names are searched",
    "_raw_saved_": "of autograd's nodes; only their objects have them, and their names are searched",
    "_saved_": "of autograd's nodes; only their objects have them, and their names are searched",
}
EXEMPT = set().union(*OF_OTHERS.values(), NOT_NEEDED)

# Strings and attributes of ours that some class or module of torch has, too.
OURS = {
    *(
        "_backward",
        "_bytes",
        "_keeps_memory",
        "_memory_of",
        "_name",
        "_num_assigned",
        "_phases",
        "_pipeline_dtypes",
    ),
    *("_pipeline_gate", "_pipeline_runner", "_weight", "chunks", "finish", "group", "has_backward", "metadata"),
    *("num_shards", "num_stages", "options", "path", "reset", "timeout", "value"),
}

ROWS = NEEDS + OPTIONAL


def paths(need: Need) -> list[str]:
    return [f"{need.module}.{path}" for path in need.path.split("|")]


# Every dotted name of the table with every beginning of it.
LISTED = {".".join(name.split(".")[:end]) for need in ROWS for name in paths(need) for end in range(1, 20)}
PARTS = {part for need in ROWS for name in paths(need) for part in name.split(".")}
PARTS |= {name for need in ROWS for name in (*filter(is_private, need.parameters), *need.uses, *need.locals)}


def members(kind: type) -> set[str]:
    """What objects of a class have."""
    bases = [base for base in kind.__mro__ if base is not object]
    annotated = {name for base in bases for name in vars(base).get("__annotations__", ())}
    return {name for base in bases for name in vars(base)} | annotated | needs._stored(kind)


def private_classes() -> list[type]:
    found = {}
    for need in ROWS:
        owner: Any = importlib.import_module(need.module)
        name = need.path.partition("|")[0].partition(".")[0]
        kind = getattr(owner, name, None)
        if isinstance(kind, type) and is_private(f"{kind.__module__}.{kind.__name__}"):
            found[kind] = None
    dispatcher: Any = DTensor._op_dispatcher
    return [*found, type(dispatcher), type(dispatcher.sharding_propagator), torch.FunctionSchema, torch.Argument]


def members_of_private_classes() -> set[str]:
    """Those that no class has whose names are public."""
    public = (torch.Tensor, DTensor, DeviceMesh, Shard, Replicate, Partial, dist.ProcessGroup, dist.Work, dist.Store)
    others = (
        nn.Module,
        torch.optim.Optimizer,
        FunctionCtx,
        torch._C._FunctionBase,
        Node,
        str,
        list,
        dict,
        tuple,
        set,
        BaseException,
    )
    found = set().union(*map(members, private_classes())) - set().union(*map(members, (*public, *others)))
    return {name for name in found if not name.startswith("_")}


def names_of_torch() -> set[str]:
    """Private names that the loaded modules of torch and their classes define, and of ops."""
    found = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "torch" and isinstance(module, ModuleType):
            for key, value in list(vars(module).items()):
                found.add(key)
                if isinstance(value, type) and value.__module__.startswith("torch"):
                    found |= {*vars(value), *vars(value).get("__annotations__", ())}
    for owner in (nn.Module, DTensor, torch.Tensor, torch.optim.Adam):
        found |= members(owner)
    return {name for name in found if is_private(name)}


def unlisted(names: dict[str, set[str]], listed: set[str]) -> str:
    return "\n".join(f"{name}: {', '.join(sorted(at)[:3])}" for name, at in sorted(names.items()) if name not in listed)


def of_torch(names: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without those that the package gives objects of torch: they begin with its name."""
    return {name: places for name, places in names.items() if "_vescale" not in name}


def test_dotted_names_are_listed() -> None:
    assert not (found := unlisted(names_of_package().chains, LISTED)), found


def test_attributes_are_listed() -> None:
    attributes = names_of_package().foreign_attributes()
    private = of_torch({name: places for name, places in attributes.items() if is_private(name)})
    assert len(private) > 40
    assert not (found := unlisted(private, PARTS | EXEMPT)), found


def test_attributes_of_private_classes_are_listed() -> None:
    attributes = names_of_package().foreign_attributes()
    inner = {name: attributes[name] for name in members_of_private_classes() & attributes.keys()}
    assert {"op", "args_schema", "flat_args_schema", "sub_actions"} <= inner.keys()
    assert not (found := unlisted(inner, PARTS | OURS)), found


def test_attributes_that_our_classes_have_too_are_listed() -> None:
    shared, known = names_of_package().of_others, set().union(*map(members, (DTensor, nn.Module, nn.Parameter)))
    both = {name: shared[name] for name in known & shared.keys() if is_private(name)}
    assert {"_spec", "_local_tensor", "_parameters"} <= both.keys()
    assert not (found := unlisted(both, PARTS | EXEMPT)), found


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of names that torch has for old programs
def test_strings_are_listed() -> None:
    names, known = names_of_package(), names_of_torch()
    texts = {name: places for name, places in names.strings.items() if name in known} | names.looked_up
    files = {path.stem for path in private_names.PACKAGE.rglob("*.py")}
    ours = {name for name in texts if any(name in defined for defined in names.defined.values()) and name not in known}
    assert len(texts) > 50
    assert not (found := unlisted(of_torch(texts), PARTS | EXEMPT | OURS | files | ours)), found


def test_local_variables_are_listed() -> None:
    found = names_of_package().frame_variables.keys()
    assert found == {name for need in ROWS for name in need.locals} != set()


def test_names_of_cpp_are_listed() -> None:
    listed = set()
    for line in NATIVE_NAMES.strip().replace("\n    ", " ").splitlines():
        space, _, inner = line.partition(": ")
        listed |= {f"{space}{'' if space == 'THP' else '::'}{name}" for name in inner.split(", ")}
    found = private_names.native_names(private_names.native_text())
    assert found == listed, f"not listed: {sorted(found - listed)}; not used: {sorted(listed - found)}"
    strings = private_names.native_strings(private_names.native_text())
    assert "_backward_hooks" in strings
    assert strings <= PARTS, strings - PARTS


def test_everything_that_is_listed_is_used() -> None:
    assert len(set(ROWS)) == len(ROWS)
    names = names_of_package()
    used = {part for name in names.chains for part in name.split(".")} | names.imported
    used |= names.attributes.keys() | {name.removesuffix("Backward") for name in names.strings}
    used |= names.functions  # in the place of torch's
    used |= names.defined["compat"]  # what classes of ours override
    used |= private_names.native_strings(private_names.native_text())
    idle = [
        f"{need.module}.{need.path}"
        for need in ROWS
        if not any(path.rpartition(".")[2] in used for path in need.path.split("|"))
        and not used.intersection(need.uses)
    ]
    assert not idle, idle
    assert not (EXEMPT | OURS) - used - names.strings.keys()


@pytest.mark.parametrize(
    ("code", "kind", "name"),
    [
        ("from torch._inner import thing", "chains", "torch._inner.thing"),
        ("import torch\ntorch._C._new()", "chains", "torch._C._new"),
        ("from torch import nn as n\nx = n._hidden\nx.part", "chains", "torch.nn._hidden.part"),
        ("import torch\ndef f():\n    x = torch._C\n    return x.new", "chains", "torch._C.new"),
        ("def f(x):\n    return x._hidden", "attributes", "_hidden"),
        ("def f(x, g):\n    g(_hidden=x)", "attributes", "_hidden"),
        ("def f(x):\n    return getattr(x, '_hidden', None)", "looked_up", "_hidden"),
        ("def f(x):\n    return '_hidden' in x.__dict__", "looked_up", "_hidden"),
        ("def f(x):\n    return vars(x)['_hidden']", "looked_up", "_hidden"),
        ("NAMES = ('_hidden',)", "strings", "_hidden"),
        ("f(x.f_locals)\ndef f(held):\n    return held['hidden']", "frame_variables", "hidden"),
    ],
)
def test_names_are_seen(code: str, kind: str, name: str) -> None:
    assert name in getattr(private_names.collect({"compat/new.py": code}), kind)


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Take a name away: from its module or class, from what makes the objects of the class, or with the object that has it,
    where a class in C++ keeps its names."""

    def hide(module: str, path: str) -> None:
        *outer, last = path.split(".")
        owners: list[Any] = [importlib.import_module(module)]
        for part in outer:
            owners.append(getattr(owners[-1], part))
        owner = owners[-1]
        for holder in (owner, type(owner), *getattr(owner, "__mro__", ())):  # an instance, its class, or a base
            if last in getattr(holder, "__dict__", {}) and holder is not type:
                try:
                    monkeypatch.delattr(holder, last)
                except TypeError:
                    break
        if isinstance(owner, type) and needs._resolve(owners[0], path) is not needs._MISSING:
            for base in owner.__mro__[:-1]:
                for name in ("__init__", "__post_init__"):
                    if hasattr(vars(base).get(name), "__code__"):
                        monkeypatch.setattr(base, name, lambda self: None)
            if dataclasses.is_dataclass(owner):
                monkeypatch.setattr(owner, "__dataclass_fields__", {})
        if needs._resolve(owners[0], path) is not needs._MISSING:
            monkeypatch.setattr(owners[-2], outer[-1], object())

    yield hide
    monkeypatch.undo()


@pytest.mark.parametrize("need", ROWS, ids=lambda need: f"{need.module}.{need.path}")
def test_a_missing_name_is_named(need: Need, hide: Callable[[str, str], None]) -> None:
    for path in need.path.split("|"):
        if needs._resolve(importlib.import_module(need.module), path) is not needs._MISSING:
            hide(need.module, path)
    name = f"{need.module}.{need.path}"
    found = needs._lack(need)
    assert found == name or (
        found and found.startswith(name) and name.endswith(("__init__", "__new__"))
    )  # object has one
    if need.feature:
        assert found in lacking(need.feature)
        return
    with pytest.raises(UnsupportedTorchError) as caught:
        self_check()
    assert f"\n  {found}\n" in str(caught.value) and torch.__version__ in str(caught.value)


@pytest.mark.parametrize(
    "need", [need for need in ROWS if need.uses or need.locals or need.parameters], ids=lambda need: need.path
)
def test_another_function_is_named(need: Need, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has neither the parameters, nor calls and keeps what vescale relies on."""
    module = importlib.import_module(need.module)
    *outer, last = next(
        path for path in need.path.split("|") if needs._resolve(module, path) is not needs._MISSING
    ).split(".")
    owner: Any = module
    for part in outer:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, last, staticmethod(lambda: None) if isinstance(owner, type) else lambda: None)
    found = needs._lack(need)
    assert found is not None and found.startswith(f"{need.module}.{need.path}: ")
    for name in need.uses + need.locals or need.parameters:
        assert name in found


def add_field(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = getattr(importlib.import_module(record.module), record.name)
    if hasattr(kind, "_fields"):
        monkeypatch.setattr(kind, "_fields", (*kind._fields, "novel"))
    elif "__slots__" in vars(kind):
        monkeypatch.setattr(kind, "__slots__", [*kind.__slots__, "novel"])
    elif dataclasses.is_dataclass(kind):
        monkeypatch.setattr(kind, "__dataclass_fields__", {**kind.__dataclass_fields__, "novel": None})
    else:

        def __init__(self: Any) -> None:
            self.novel = 1

        monkeypatch.setattr(kind, "__init__", __init__)


@pytest.mark.parametrize("record", KNOWN, ids=lambda record: record.name)
def test_an_unknown_field_is_refused(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    add_field(record, monkeypatch)
    # Functions of this class that the table lists may be gone with its __init__.
    monkeypatch.setattr(needs, "NEEDS", ())
    with pytest.raises(UnsupportedTorchError, match=rf"{record.module}\.{record.name}: fields novel\n"):
        self_check()
    monkeypatch.setattr(needs, "_WARNED", [])
    monkeypatch.setenv("VESCALE_ALLOW_TORCH", "1")
    with pytest.warns(UntestedTorchWarning, match=rf"{record.name}: fields novel"):
        self_check()
    self_check()  # says it once


def test_decisions_are_left_to_torch_where_its_rules_have_unknown_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the script goes on at its own risk."""
    from vescale.compat.needed_names import EXACT_MATCHES

    assert not lacking(EXACT_MATCHES)
    record = next(record for record in KNOWN if record.name == "_SingleDimStrategyInfo")
    add_field(record, monkeypatch)
    assert lacking(EXACT_MATCHES) == [f"{record.module}.{record.name}: fields novel"]


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_programs_may_replace_what_makes_modules(is_wrapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As libraries do while they make a model without memory."""
    original = torch.nn.Module.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "__init__", functools.wraps(original)(__init__) if is_wrapped else __init__)
    self_check()
