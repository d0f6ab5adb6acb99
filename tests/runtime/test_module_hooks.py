"""The forward hooks of modules in C++ and in Python: the same running modules, results, autograd nodes and errors."""

from __future__ import annotations

import copy
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import vescale
from tests.device import device_type
from tests.ranks import RankPools
from vescale import parallelize
from vescale.checks import unchecked
from vescale.compat import clear_sharding_caches, local_of, native_hooks
from vescale.compat.module_calls import GuardedCall
from vescale.plans import Plan, PlanError
from vescale.runtime import _install
from vescale.runtime import _module_calls as _function_mode
from vescale.runtime._activation import activations, current_activation, locate, module_of_node
from vescale.runtime._runtime import ModuleTimeline

SIZES = {"dp": 2, "tp": 2}
PACKAGE = str(Path(vescale.__file__).parent) + os.sep


class Log(list[Any]):
    """Copies of a model write to the same one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Log:
        return self


class Seen(TorchFunctionMode):
    """A mode of the user's: it sees the model's functions, and not what the hooks do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


def note(log: Log, event: str) -> None:
    """What the runtime knows of the running modules."""
    activation = current_activation()
    assert activation is not None
    running = locate()
    assert running is not None and running.frame is activation.frames[-1] and running.phase == "forward"
    frames = [(f.path, type(f.module).__name__, len(f.args), sorted(f.kwargs), f.compiler) for f in activation.frames]
    log.append((event, running.path, frames, [name for name, _ in activation.frames[-1].results]))


class Part(nn.Module):
    """Returns its input in a container."""

    def __init__(self, log: Log, container: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self._log, self._container = log, container

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> Any:
        note(self._log, "part")
        return self._container(x * self.weight * scale)


class Nested(nn.Module):
    """Calls parts, itself, and a part that fails."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.tensor = Part(log, lambda x: x)
        self.pair = Part(log, lambda x: Pair(x, [x + 1, None, 3]))
        self.mapping = Part(log, lambda x: {"x": x, "y": (x * 2,)})
        self.failing = Part(log, lambda x: 1 // 0)
        self._log = log

    def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
        log = self._log
        note(log, "start")
        x = self.tensor(x, scale=2.0)
        note(log, "tensor")
        activation = current_activation()
        assert activation is not None and isinstance(x, DTensor)
        assert activation.frames[-1].results[-1][1] == local_of(x).data_ptr()
        x = self.pair(x).first
        x = self.mapping(x)["y"][0]
        note(log, "containers")
        with pytest.raises(ZeroDivisionError):
            self.failing(x)
        note(log, "failed")
        return self(x, again=False) if again else x


def placed(plan: Plan) -> None:
    plan.shard("nested.tensor.<in:x>", Shard(0), mesh="dp")
    plan.shard("nested.tensor.<out>", Replicate(), mesh="dp")


class Model(nn.Module):
    def __init__(self, log: Log) -> None:
        super().__init__()
        self.nested = Nested(log)
        self.recomputed = Part(log, lambda x: x)
        self._log = log

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.recomputed, self.nested(x), use_reentrant=False)
        return checkpoint(self._plain, y, use_reentrant=False) + 1

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        note(self._log, "checkpointed")
        return x.sin()


@contextmanager
def hooks(native: Any) -> Iterator[None]:
    """Models that are parallelized inside have hooks in C++, or (None) in Python."""
    before = _install.native_hooks
    _install.native_hooks = lambda: native
    try:
        yield
    finally:
        _install.native_hooks = before


def built(native: Any, log: Log) -> nn.Module:
    plan = Plan(init_device_mesh(device_type(), tuple(SIZES.values()), mesh_dim_names=tuple(SIZES)))
    placed(plan)
    with hooks(native):
        return parallelize(Model(log).double(), plan)


def graph_paths(root: torch.Tensor) -> set[tuple[str, str | None]]:
    """Names of autograd nodes, with the modules that made them."""
    found, nodes, seen = set(), [root.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.add((node.name(), module_of_node(node)))
        nodes += [following for following, _ in node.next_functions]
    return found


def events(native: Any) -> tuple[Log, list[Any]]:
    log = Log()
    model = built(native, log)
    values: list[Any] = []
    for each in (model, copy.deepcopy(model)):
        for _ in range(2):
            x = torch.arange(16.0, dtype=torch.float64).view(4, 4).requires_grad_()
            with Seen() as seen:
                y: Any = each(x)
            assert "mul" in seen.names and "is_inference" not in seen.names
            log.append(("functions", seen.names))
            log.append(("nodes", graph_paths(y)))
            y.sum().backward()
            values += [
                y.full_tensor(),
                x.grad,
                *(p.grad.full_tensor() for p in each.parameters() if p.grad is not None),
            ]
            assert activations() == []
            log.append(("outside", module_of_node((x * 2).grad_fn)))
    part = copy.deepcopy(model.nested.tensor)  # called alone
    part(torch.ones(4, 4, dtype=torch.float64)).sum().backward()
    return log, values


def the_same() -> None:
    native, values = events(native_hooks())
    python, expected = events(None)
    assert native == python
    torch.testing.assert_close(values, expected, rtol=0, atol=0)
    assert native[0] == ("start", "nested", [("", "Model", 1, [], None), ("nested", "Nested", 1, [], None)], [])
    inner = [
        ("", "Model", 1, [], None),
        ("nested", "Nested", 1, [], None),
        ("nested.tensor", "Part", 1, ["scale"], None),
    ]
    assert native[1] == ("part", "nested.tensor", inner, [])
    # One DTensor of the first part, two in the pair, two in the mapping.
    assert native[5][3] == ["nested.tensor", *["nested.pair"] * 2, *["nested.mapping"] * 2]
    assert native[7][0] == "failed" and native[7][2] == native[5][2]
    assert native[8][:2] == ("start", "nested") and [path for path, *_ in native[8][2]] == ["", "nested", "nested"]
    nodes = next(found for event, found in (e for e in native if e[0] == "nodes"))
    assert ("MulBackward0", "nested.tensor") in nodes and ("AddBackward0", "") in nodes
    assert ("outside", None) in native
    assert [e[:2] for e in native].count(("checkpointed", "")) == 8  # in forward and in backward


def without_python() -> None:
    """A module without instructions is entered and left without a function of vescale's."""
    called: list[str] = []

    def tracer(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            called.append(frame.f_code.co_qualname)

    class Traced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Identity(), nn.Identity()])
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.weight
            sys.setprofile(tracer)
            for part in self.parts:
                x = part(x)
                x = (part(input=(x, None))[0],)[0]
            sys.setprofile(None)
            return x

    plan = Plan(init_device_mesh(device_type(), tuple(SIZES.values()), mesh_dim_names=tuple(SIZES)))
    model = parallelize(Traced(), plan)
    model(torch.ones(4))
    assert called == []
    with hooks(None):
        model = parallelize(Traced(), plan)
    model(torch.ones(4))
    assert called.count("Enter.__call__") == called.count("Leave.__call__") == 4


class Block(nn.Module):
    """Two layers share an input, which is moved for neither; the output of the third is a sum over ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.Linear(4, 4, bias=False).double() for _ in range(3))
        self.calls: list[str] = []
        self.is_traced = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def tracer(frame: FrameType, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
                self.calls.append(frame.f_code.co_qualname)

        x = x * 1.0
        sys.setprofile(tracer if self.is_traced else None)
        y = self.last(self.first(x) * self.second(x))
        sys.setprofile(None)
        return y


def block(native: Any) -> nn.Module:
    plan = Plan(init_device_mesh(device_type(), tuple(SIZES.values()), mesh_dim_names=tuple(SIZES)))
    plan.shard("(first|second).<in>", Replicate(), mesh="tp")
    plan.shard("(first|second).weight", Shard(0), mesh="tp")
    plan.shard("last.weight", Shard(1), mesh="tp")
    plan.shard("last.<out>", Replicate(), mesh="tp")
    with hooks(native):
        return parallelize(Block(), plan, strict=True)


def boundaries_without_python() -> None:
    """Entries that move no input, and that place one output, are carried out without a function of vescale's, with the
    results of Python: the two layers get one tensor, whose gradient is reduced once."""
    x = torch.arange(16.0, dtype=torch.float64).view(4, 4)
    found = []
    for native in (native_hooks(), None):
        model = block(native)
        given: list[Any] = []
        for step in range(4):
            handles = [
                each.register_forward_pre_hook(lambda _, args, given=given: given.append(args[0]))
                for each in (model.first, model.second)
                if step == 1  # other hooks run, and go
            ]
            with torch.set_grad_enabled(step != 2):
                model.is_traced = step == 3
                y: Any = model(x)
            for handle in handles:
                handle.remove()
            if step != 2:
                y.sum().backward()
        assert isinstance(given[0], DTensor) and given[0] is given[1]
        assert (model.calls == []) == (native is not None), model.calls
        found.append([y.full_tensor(), *(p.grad.full_tensor() for p in model.parameters() if p.grad is not None)])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    single = Block()
    for _ in range(3):
        single(x).sum().backward()
    torch.testing.assert_close(found[0][1:], [p.grad for p in single.parameters()])


def specs_that_change() -> None:
    """More kinds of inputs than a hook remembers, and tables that are cleared meanwhile."""
    models = [block(native) for native in (native_hooks(), None)]
    for rows in (*range(1, 12), 3, 1):
        x = torch.arange(4.0 * rows, dtype=torch.float64).view(rows, 4)
        results: list[Any] = [model(x) for model in models]
        for result in results:
            result.sum().backward()
        torch.testing.assert_close(*(result.full_tensor() for result in results), rtol=0, atol=0)
        if rows == 5:
            clear_sharding_caches()
    grads: list[list[Any]] = [[p.grad for p in model.parameters()] for model in models]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one.full_tensor(), other.full_tensor(), rtol=0, atol=0)


def noting(seen: list[str], what: str) -> Callable[..., None]:
    return lambda *_: seen.append(what)


def calls_of_modules() -> None:
    """What nn.Module does around a forward, without its Python: other hooks, errors, warnings, and hooks that come late."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.seen: list[str] = []
            self.late: Any = None

        def forward(self, x: torch.Tensor, *, error: BaseException | None = None) -> torch.Tensor:
            if error is not None:
                raise error
            if self.late is not None:
                self.register_forward_hook(self.late)
            return x * self.weight

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
            return self.inner(x, **options)

    mesh = init_device_mesh(device_type(), tuple(SIZES.values()), mesh_dim_names=tuple(SIZES))
    for native in (native_hooks(), None):
        with hooks(native):
            model: Any = parallelize(Outer(), Plan(mesh))
        x, inner = torch.ones(2), model.inner
        assert (type(inner.__dict__.get("_compiled_call_impl")) is GuardedCall) == (native is None)
        error = ValueError("own")
        with pytest.raises(ValueError, match="own") as caught:
            model(x, error=error)
        assert caught.value is error and activations() == []
        handles = [
            inner.register_forward_hook(noting(inner.seen, "after")),
            nn.modules.module.register_module_forward_pre_hook(noting(inner.seen, "all")),
            inner.register_full_backward_hook(noting(inner.seen, "backward")),
        ]
        model(x.requires_grad_()).sum().backward()
        assert inner.seen == ["all", "all", "after", "backward"]
        for handle in handles:
            handle.remove()
        inner.late = lambda module, args, output: output + 1
        assert model(x.detach()).full_tensor().tolist() == [2.0, 2.0]
        inner.late = None
        copied = copy.deepcopy(model)
        assert copied(x.detach()).full_tensor().tolist() == [2.0, 2.0]
        inner.forward = lambda x: x * 7  # replaced by hand
        assert model(x.detach()).full_tensor().tolist() == [8.0, 8.0]


def errors_of_instructions() -> None:
    """An output that cannot be placed: the plan's error, and nothing stays switched on; the module's own error wins."""
    for native in (native_hooks(), None):
        log = Log()
        plan = Plan(init_device_mesh(device_type(), tuple(SIZES.values()), mesh_dim_names=tuple(SIZES)))
        plan.shard("nested.pair.<out>", Shard(3), mesh="tp")
        plan.shard("nested.pair.<in:x>", Shard(2), mesh="dp")
        with hooks(native):
            model = parallelize(Model(log).double(), plan)
        x = torch.ones(4, 4, dtype=torch.float64)
        with pytest.raises(PlanError, match=r"nested\.pair\.<in:x> has shape \(4, 4\), but the plan shards its dim 2"):
            model(x)
        assert activations() == []
        with pytest.raises(
            PlanError, match=r"nested\.pair\.<out> has shape \(4, 4, 4\), but the plan shards its dim 3"
        ):
            model(torch.ones(4, 4, 4, dtype=torch.float64))
        assert activations() == [] and not isinstance(torch.zeros(2), DTensor)


def threads() -> None:
    """Forwards of two models on two threads at a time, with hooks of both kinds. Communication of real ranks would need an
    order that is the same on all of them."""
    logs = [Log(), Log()]
    models = [built(native, log) for native, log in zip((native_hooks(), None), logs)]
    x = torch.ones(4, 4, dtype=torch.float64)
    for model in models:
        model(x)
    barrier = threading.Barrier(2)

    def work(model: nn.Module) -> None:
        barrier.wait()
        for _ in range(5):
            model(x)
        assert activations() == []

    expected = [*logs[0]] * 6
    workers = [threading.Thread(target=work, args=(model,)) for model in models]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert logs == [expected, expected]


def freed() -> None:
    """A model and its arguments are freed, also by the garbage collector; a frame that somebody kept holds its own."""
    log = Log()
    model = built(native_hooks(), log)
    x = torch.ones(4, 4, dtype=torch.float64)
    model(x)
    references = [weakref.ref(model), weakref.ref(model.nested)]
    copied = copy.deepcopy(model)
    copied(x)
    assert [hook.path for hook in copied.nested.pair._forward_pre_hooks.values()] == ["nested.pair"]
    references += [weakref.ref(copied)]
    del model, copied
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def functions() -> None:
    """Functions whose replacement does nothing for a call are asked once, and bypass the mode's Python then."""
    seen: list[str] = []
    original = _function_mode.RuntimeMode.__torch_function__

    def counted(self: Any, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func.__name__)
        return original(self, func, kinds, args, kwargs)

    class Functions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole, self.rows = nn.Embedding(8, 4), nn.Embedding(8, 4)

        def forward(self, ids: torch.Tensor, smoothing: float, sharded: bool) -> Any:
            x = self.whole(ids)
            y = torch.cat((x, -x), -1) if not sharded else torch.cat((x, -x), dim=0)
            empty = torch.cat([x.new_zeros(0), x])  # as a key/value cache begins
            rows = self.rows(ids)
            loss = F.cross_entropy(x.flatten(0, 1), ids.flatten() % 4, label_smoothing=smoothing)
            return y, empty, rows, loss

    torch.manual_seed(0)
    reference = Functions().double()
    model = copy.deepcopy(reference)
    plan = Plan(init_device_mesh(device_type(), tuple(SIZES.values()), mesh_dim_names=tuple(SIZES)))
    plan.shard("<in:ids>", Shard(0), mesh="dp")
    plan.shard("rows.weight", Shard(0), mesh="tp")
    parallelize(model, plan)
    _function_mode.RuntimeMode.__torch_function__ = counted  # type: ignore[method-assign]
    try:
        for smoothing, sharded in [(0.0, False), (0.1, False), (0.0, True), (0.0, False)] * 2:
            ids = torch.arange(16).view(4, 4) % 8
            seen.clear()
            with unchecked():  # a forward that ranks compare call by call shows the mode all calls
                outputs = model(ids, smoothing, sharded)
            for own, expected in zip(outputs, reference(ids, smoothing, sharded), strict=True):
                torch.testing.assert_close(own.full_tensor(), expected)
            called = [name for name in seen if name in ("cat", "embedding", "cross_entropy")]
            if native_hooks() is not None:
                assert called == [*["cat"] * (1 + sharded), "embedding", *["cross_entropy"] * bool(smoothing)], called
    finally:
        _function_mode.RuntimeMode.__torch_function__ = original  # type: ignore[method-assign]


@pytest.mark.helper("module_hooks")
def test_cpp_does_what_python_does(ranks: RankPools) -> None:
    ranks.run(each, the_same, without_python, boundaries_without_python, specs_that_change, calls_of_modules)


@pytest.mark.helper("module_hooks")
def test_hooks_on_two_threads() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        threads()
    finally:
        dist.destroy_process_group()


def test_hooks(ranks: RankPools) -> None:
    ranks.run(each, errors_of_instructions, freed, functions)


def each(*cases: Callable[[], None]) -> None:
    for case in cases:
        case()


def ticked(timeline: Any) -> list[Any]:
    """What a timeline says of nodes of models that run one inside of the other, on two threads, and of old ones."""
    nodes: list[Any] = []

    def forward(paths: list[str | None]) -> None:
        x = torch.ones(1, requires_grad=True)
        for index, path in enumerate(paths):
            timeline.mark(path)
            nodes.extend((x * 2).grad_fn for _ in range(index % 3))  # none: the next mark replaces this one

    forward(["a", "b", "", "a", "", "b", None, "c", "c", None])
    thread = threading.Thread(target=forward, args=(["t", "u", "t", None],))
    thread.start()
    thread.join()
    forward(["a", "b", None])
    return [timeline.of_node(node) for node in nodes]


@pytest.mark.helper("module_hooks")
def test_timeline() -> None:
    made = native_hooks().Timeline
    first, other, last = ["b", "", "", "", "b", "b", "c", "c", "c"], ["u", "t", "t"], ["b", None, None]
    assert ticked(made(1000)) == first + other + last
    # The numbers of two threads may be equal, which Python does not tell apart; the thread that asks comes first.
    python = ticked(ModuleTimeline(1000))
    assert python[: len(first)] == first and python[-len(last) :] == last


@pytest.mark.helper("module_hooks")
def test_a_timeline_knows_nodes_of_forwards_that_run() -> None:
    """Another thread may evaluate them, as on a device."""
    for timeline in (ModuleTimeline(1000), native_hooks().Timeline(1000)):
        timeline.mark("a")
        node = (torch.ones(1, requires_grad=True) * 2).grad_fn
        with ThreadPoolExecutor(1) as other:
            assert other.submit(timeline.of_node, node).result() == "a"
        timeline.mark(None)


@pytest.mark.helper("module_hooks")
def test_equal_forwards_share_what_a_timeline_keeps() -> None:
    def forward(timeline: Any, paths: list[Any]) -> Any:
        x = torch.ones(1, requires_grad=True)
        nodes = []
        for path in paths:
            timeline.mark(path)
            nodes.append((x * 2).grad_fn)
        timeline.mark(None)
        return nodes[0]

    paths = [object() for _ in range(100)]
    for timeline in (ModuleTimeline(1000), native_hooks().Timeline(1000)):
        first = forward(timeline, paths[::-1])
        oldest = forward(timeline, paths)
        nodes = [forward(timeline, paths) for _ in range(500)]
        assert len(timeline) == 702
        assert timeline.of_node(first) is paths[-1] and all(timeline.of_node(node) is paths[0] for node in nodes)
        for _ in range(400):
            last = forward(timeline, paths)
        assert len(timeline) <= 1000 and timeline.of_node(first) is None and timeline.of_node(oldest) is None
        assert timeline.of_node(last) is paths[0]
        for index in range(20):  # all different
            last = forward(timeline, paths[index:])
        assert len(timeline) <= 1000 and timeline.of_node(last) is paths[19]


def test_the_node_that_runs() -> None:
    """In backward the module is asked for while a node is evaluated; outside of it there is none. Numbers before all
    forwards belong to no module."""
    timeline, x, found = ModuleTimeline(1000), torch.ones(1, requires_grad=True), []
    before = (x * 2).grad_fn
    for path in ("a", "b"):
        timeline.mark(path)
        y = x * 3
        x = y * 2
        y.register_hook(lambda grad: found.append(timeline.of_current_node()))
        timeline.mark(None)
    assert timeline.of_current_node() is None and timeline.of_node(before) is None
    x.sum().backward()
    assert found == ["b", "a"]


@pytest.mark.helper("module_hooks")
def test_what_a_full_timeline_forgets() -> None:
    """The oldest forwards, with their marks when no other forward has these; never the newest one."""

    def forward(timeline: Any, paths: str) -> Any:
        x = torch.ones(1, requires_grad=True)
        for path in paths:
            timeline.mark(path)
            node = (x * 2).grad_fn
        timeline.mark(None)
        return node

    for timeline in (ModuleTimeline(12), native_hooks().Timeline(12)):
        for paths in ("abcde", "abcde", "abcde", "fgh", "ij"):
            last = forward(timeline, paths)
        assert len(timeline) == 3 + 1 + 2 + 1 and timeline.of_node(last) == "j"
        last = forward(timeline, "klmnopqrstuvwxyz")  # more than fits
        assert len(timeline) == 16 + 1 and timeline.of_node(last) == "z"
