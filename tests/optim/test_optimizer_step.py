"""Optimizer steps on the local tensors: the numbers, states and side effects of the step that DTensor dispatches."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device import device_type
from vescale.compat import make_dtensor, make_spec, optimizers
from vescale.optim import clip_grad_norm_
from vescale.placements import InterleavedShard, RaggedShard, distribute_tensor

OPTIMIZERS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "AdamW": (torch.optim.AdamW, [{"weight_decay": 0.1}, {"amsgrad": True, "maximize": True}]),
    "Adam": (torch.optim.Adam, [{}, {"weight_decay": 0.1, "amsgrad": True}]),
    "SGD": (torch.optim.SGD, [{"lr": 0.1}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}]),
    "Adagrad": (torch.optim.Adagrad, [{"lr_decay": 0.1, "weight_decay": 0.1}]),
    "RMSprop": (torch.optim.RMSprop, [{}, {"momentum": 0.5, "centered": True, "maximize": True}]),
    "Adadelta": (torch.optim.Adadelta, [{"weight_decay": 0.1}]),
    "Adamax": (torch.optim.Adamax, [{"maximize": True}]),
    "NAdam": (torch.optim.NAdam, [{"decoupled_weight_decay": True, "weight_decay": 0.1}]),
    "RAdam": (torch.optim.RAdam, [{"weight_decay": 0.1}]),
    "ASGD": (torch.optim.ASGD, [{}]),
    "Rprop": (torch.optim.Rprop, [{}]),
}
FORMS: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
CASES = [
    (name, form, options)
    for (name, (_, variants)), form in itertools.product(OPTIMIZERS.items(), FORMS)
    for options in variants
    if form != "fused" or name in ("AdamW", "Adam", "SGD", "Adagrad")
]


@pytest.fixture(scope="module")
def meshes() -> Iterator[tuple[DeviceMesh, DeviceMesh]]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh(device_type(), (4,)), init_device_mesh(device_type(), (2, 2))
    dist.destroy_process_group()


def layouts(meshes: tuple[DeviceMesh, DeviceMesh]) -> list[tuple[DeviceMesh, tuple[int, ...], Any, Any]]:
    """mesh, shape, placements of the parameter and of its gradient"""
    line, square = meshes
    alike: list[tuple[DeviceMesh, tuple[int, ...], Any]] = [
        (line, (8, 3), [Shard(0)]),
        (line, (5, 4), [Shard(1)]),
        (line, (1, 4), [Shard(0)]),  # nothing on this rank
        (line, (6,), [Replicate()]),
        (line, (8, 2), [RaggedShard((0,), (1, 3, 0, 4))]),
        (line, (24, 2), [InterleavedShard(0, 3)]),
        (line, (), [RaggedShard((), (0, 1, 0, 0))]),
        (square, (5, 7), [Shard(0), Shard(1)]),
        (square, (6, 4), [Replicate(), Shard(0)]),
        (square, (8, 6), [RaggedShard((0,), (1, 3)), Shard(0)]),
    ]
    return [(mesh, shape, placements, placements) for mesh, shape, placements in alike]


def apart(meshes: tuple[DeviceMesh, DeviceMesh]) -> list[tuple[DeviceMesh, tuple[int, ...], Any, Any]]:
    line, square = meshes
    return [
        (line, (8, 3), [Shard(0)], [Replicate()]),
        (line, (6,), [Replicate()], [Partial()]),
        (square, (8, 4), [Shard(0), Replicate()], [Shard(0), Partial()]),
    ]


def parameters(where: list[tuple[DeviceMesh, tuple[int, ...], Any, Any]]) -> list[torch.nn.Parameter]:
    found = []
    for seed, (mesh, shape, placements, _) in enumerate(where):
        torch.manual_seed(seed)
        found.append(torch.nn.Parameter(place(torch.randn(shape), mesh, placements)))
    return found


def place(full: torch.Tensor, mesh: DeviceMesh, placements: Any) -> DTensor:
    if any(placement.is_partial() for placement in placements):
        spec = make_spec(mesh, placements, full.shape, full.stride(), full.dtype)
        kept = [Replicate() if placement.is_partial() else placement for placement in placements]
        return make_dtensor(distribute_tensor(full, mesh, kept, src_data_rank=None).to_local(), spec)
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def set_gradients(params: list[torch.nn.Parameter], where: list[Any], step: int) -> None:
    for seed, (param, (mesh, shape, _, placements)) in enumerate(zip(params, where)):
        torch.manual_seed(100 * step + seed)
        param.grad = None if step == 1 and seed == 0 else place(torch.randn(shape), mesh, placements)


def local(tensor: Any) -> Any:
    return tensor.detach()._local_tensor if isinstance(tensor, DTensor) else tensor


def plain_twin(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(local(param).clone()) for param in params]


def assert_equal(found: Any, expected: Any) -> None:
    assert torch.equal(local(found), local(expected)) and found.dtype == expected.dtype
    if isinstance(expected, DTensor):
        assert found._spec == expected._spec  # mesh, placements, shape, strides, dtype


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a step as DTensor dispatches it."""

    def run(step: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(optimizers, "_is_watched", lambda: True)
            step()

    return run


@pytest.mark.parametrize("name,form,options", CASES)
def test_equals_dispatched_and_plain_steps(
    meshes: tuple[DeviceMesh, DeviceMesh], dispatched: Any, name: str, form: str, options: dict[str, Any]
) -> None:
    """Bit for bit: parameters and states; plain parameters in the same group."""
    kind, options = OPTIMIZERS[name][0], {**options, **FORMS[form]}
    where = layouts(meshes)
    ours, theirs = parameters(where), parameters(where)
    plain = plain_twin(ours)
    # SGD makes its buffers in the first step, which DTensor dispatches: without plain tensors.
    extra = [torch.nn.Parameter(torch.ones(3)) for _ in range(0 if "momentum" in options and name == "SGD" else 2)]
    optimizer, alone = kind([*ours, *extra[:1]], **options), kind([*plain, *extra[1:]], **options)
    reference = kind(theirs, **options)
    for step in range(3):
        set_gradients(ours, where, step)
        set_gradients(theirs, where, step)
        for twin, param in zip(plain, ours):
            twin.grad = None if param.grad is None else local(param.grad).clone()
        for param in extra:
            param.grad = torch.full((3,), 0.5)
        if name != "Rprop":  # DTensor assigns no number at a mask
            dispatched(reference.step)
        versions = [param._version for param in ours]
        optimizer.step()
        alone.step()
        for param, version in zip(ours, versions):
            assert param.grad is None or param._version > version or step == 0
    for found, twin in zip([*ours, *extra[:1]], [*plain, *extra[1:]]):
        assert torch.equal(local(found), twin.detach())
        for key, state in alone.state[twin].items():
            kept = optimizer.state[found][key]
            if (
                not isinstance(kept, DTensor) or kept.placements == found.placements
            ):  # SGD's buffer without dims is whole
                assert torch.equal(local(kept), state), key
    for found, expected in zip(ours, theirs if name != "Rprop" else []):
        assert_equal(found, expected)
        assert optimizer.state[found].keys() == reference.state[expected].keys()
        for key, state in reference.state[expected].items():
            assert type(optimizer.state[found][key]) is type(state)
            assert_equal(optimizer.state[found][key], state)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_with_other_placements_are_dispatched(
    meshes: tuple[DeviceMesh, DeviceMesh], dispatched: Any, form: str
) -> None:
    where = [*layouts(meshes), *apart(meshes)]
    ours, theirs = parameters(where), parameters(where)
    optimizer, reference = (torch.optim.AdamW(params, **FORMS[form]) for params in (ours, theirs))
    for step in range(2):
        for params in (ours, theirs):
            set_gradients(params, where, step)
        optimizer.step()
        dispatched(reference.step)
    for found, expected in zip(ours, theirs):
        assert_equal(found, expected)


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.lists: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_foreach_lerp_" in func.__name__:
            self.lists += map(type, args[0])
        return func(*args, **(kwargs or {}))


def small(meshes: tuple[DeviceMesh, DeviceMesh], **options: Any) -> tuple[list[torch.nn.Parameter], Any]:
    where = layouts(meshes)[:2]
    params = parameters(where)
    set_gradients(params, where, 0)
    return params, torch.optim.AdamW(params, **options)


def test_modes_see_the_ops_on_dtensors(meshes: tuple[DeviceMesh, DeviceMesh]) -> None:
    _, optimizer = small(meshes, foreach=True)
    optimizer.step()
    with _Seen() as seen:
        optimizer.step()
    assert DTensor in seen.lists


def test_a_default_device_is_no_mode_that_watches(meshes: tuple[DeviceMesh, DeviceMesh]) -> None:
    with torch.no_grad(), torch.device("cpu"):
        assert not optimizers._is_watched()
    with torch.no_grad(), torch.overrides.TorchFunctionMode():
        assert optimizers._is_watched()


def test_backward_refuses_parameters_that_a_step_has_changed(meshes: tuple[DeviceMesh, DeviceMesh]) -> None:
    params, optimizer = small(meshes)
    optimizer.step()
    loss = params[0].square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_retained(meshes: tuple[DeviceMesh, DeviceMesh], form: str) -> None:
    """Over 60 steps with clipping; PyTorch keeps a DTensorSpec of each parameter for every fused or foreach step."""
    where = layouts(meshes)
    params = parameters(where)
    optimizer = torch.optim.AdamW(params, **FORMS[form])

    def steps(number: int) -> None:
        for _ in range(number):
            set_gradients(params, where, 0)
            clip_grad_norm_(params, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()

    steps(3)
    before = len(gc.get_objects())
    steps(60)
    assert len(gc.get_objects()) <= before + 20


def test_fused_step_with_a_scale_and_an_infinity(meshes: tuple[DeviceMesh, DeviceMesh]) -> None:
    params, optimizer = small(meshes, fused=True)
    plain = plain_twin(params)
    alone = torch.optim.AdamW(plain, fused=True)
    for infinite in (0.0, 1.0):
        for param, twin in zip(params, plain):
            twin.grad = local(param.grad).clone()
        for each in (optimizer, alone):
            each.grad_scale, each.found_inf = torch.tensor(4.0), torch.tensor(infinite)
            each.step()
        for param, twin in zip(params, plain):
            assert torch.equal(local(param), twin.detach())
    assert all(state["step"] == 1 for state in optimizer.state.values())


def test_what_surrounds_a_step(meshes: tuple[DeviceMesh, DeviceMesh], dispatched: Any) -> None:
    """Closures, hooks, schedules, groups added later, state dicts loaded, subclasses and copies."""

    class Subclass(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    def train(run: Any) -> tuple[list[torch.nn.Parameter], Any]:
        where = layouts(meshes)
        params = parameters(where)
        optimizer = Subclass(params[:4], lr=0.1, momentum=0.9, foreach=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer.register_step_pre_hook(lambda *_: kinds.append(type(params[0].grad)))

        def closure() -> torch.Tensor:
            set_gradients(params, where, 0)
            return torch.tensor(1.0)

        for step in range(4):
            run(lambda: optimizer.step(closure))
            schedule.step()
            if step == 1:
                optimizer.add_param_group({"params": params[4:], "lr": 0.01})
            if step == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return params, optimizer

    kinds: list[type] = []
    ours, optimizer = train(lambda step: step())
    theirs, reference = train(dispatched)
    for found, expected in zip(ours, theirs):
        assert_equal(found, expected)
        assert_equal(optimizer.state[found]["momentum_buffer"], reference.state[expected]["momentum_buffer"])
    assert set(kinds) == {DTensor, type(None)}


def test_differentiable_steps_take_the_general_path(meshes: tuple[DeviceMesh, DeviceMesh]) -> None:
    mesh, _ = meshes
    leaf = distribute_tensor(torch.randn(8, 2), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    scale = torch.ones((), requires_grad=True)
    param = leaf.clone()
    param.grad = leaf.detach() * DTensor.from_local(scale, mesh, [Replicate()])
    torch.optim.SGD([param], lr=0.1, differentiable=True).step()
    param.sum().backward()
    assert scale.grad is not None
    torch.testing.assert_close(scale.grad, -0.1 * local(leaf).sum())


def test_init_group_collects_what_pytorch_collects(meshes: tuple[DeviceMesh, DeviceMesh]) -> None:
    where = layouts(meshes)
    for name, (kind, variants) in OPTIMIZERS.items():
        for options in variants:
            params = parameters(where)
            optimizer = kind(params, **options)
            for step in (0, 1):  # one gradient is None in the second
                set_gradients(params, where, step)
                optimizer.step()
            found, expected = ([[] for _ in range(len(spec_of(kind)) + 2)] for _ in range(2))
            group = optimizer.param_groups[0]
            with torch.no_grad():
                answers = (
                    optimizer._init_group(group, *found),
                    kind._init_group.__wrapped__(optimizer, group, *expected),
                )
            assert answers[0] == answers[1], name
            assert [list(map(id, column)) for column in found] == [list(map(id, column)) for column in expected], name


def spec_of(kind: Any) -> Any:
    (found,) = [known for known in optimizers._OPTIMIZERS if known.name in [base.__name__ for base in kind.__mro__]]
    return found.states
