"""What vescale replaces of PyTorch's optimizers and ops on lists takes all that PyTorch's takes: plain tensors, DTensors and
both, in drawn groups and lists, against plain tensors on one device."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.device import device_type
from tests.ranks import RankPools, run_cases
from vescale import Plan, parallelize
from vescale.errors import MixedTensorsError
from vescale.fsdp import fully_shard
from vescale.placements import RaggedShard, distribute_tensor

OPTIMIZERS = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "Adafactor",
)
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adam": [{"amsgrad": True}, {"betas": (0.5, 0.6)}],
    "AdamW": [{"amsgrad": True, "weight_decay": 0.5}],
    "RMSprop": [{"momentum": 0.5, "centered": True}],
    "SGD": [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.5, "dampening": 0.3},
    ],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
}
FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
PLACES: list[Any] = [None, None, Shard(0), Shard(1), Replicate(), RaggedShard((0,), (1, 3))]
SHAPES = ((4, 3), (5, 2), (4,), (4, 1), ())


def mesh_of(installed_by: str) -> DeviceMesh:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    if installed_by == "parallelize":
        parallelize(nn.Linear(2, 2), Plan(mesh))
    else:
        fully_shard(nn.Linear(2, 2), mesh=mesh)
    return mesh


def placed(x: torch.Tensor, mesh: DeviceMesh, place: Any) -> torch.Tensor:
    if place is None or not x.ndim:
        return x.clone()
    if isinstance(place, Shard) and place.dim >= x.ndim:
        place = Shard(0)
    if isinstance(place, RaggedShard) and x.shape[0] != 4:
        place = Replicate()
    return distribute_tensor(x.clone(), mesh, [place], src_data_rank=None)


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


# Optimizers


def groups_of(draw: random.Random, kind: str, mesh: DeviceMesh) -> tuple[list[Any], list[Any]]:
    """Groups of parameters with drawn placements, and the same on one device; the gradients of two steps in ``grads``."""
    own, reference = [], []
    for _ in range(draw.randint(1, 3)):
        options = {"weight_decay": 0.25} if draw.random() < 0.3 else {}
        of_group: tuple[list[Any], list[Any]] = ([], [])
        for _ in range(draw.choice((0, 1, 3))):
            dtype = torch.complex64 if draw.random() < 0.15 else torch.float32
            value = torch.randn(draw.choice(SHAPES), dtype=dtype)
            place = None if kind == "plain" else draw.choice(PLACES if kind == "both" else PLACES[2:])
            of_group[0].append(nn.Parameter(placed(value, mesh, place)))
            of_group[1].append(nn.Parameter(value.clone()))
            has_gradient = [draw.random() < 0.8 for _ in range(3)]
            grads = [torch.randn_like(value) if has else None for has in has_gradient]
            of_group[0][-1].grads = [None if g is None else placed(g, mesh, place) for g in grads]
            of_group[1][-1].grads = grads
        own.append({"params": of_group[0], **options})
        reference.append({"params": of_group[1], **options})
    if not any(group["params"] for group in own):
        return groups_of(draw, kind, mesh)
    return own, reference


def steps(name: str, groups: list[Any], options: dict[str, Any], takes_closure: bool, saves: bool) -> Any:
    """The values of parameters and states after three steps, or the type of the error."""
    try:
        optimizer = getattr(torch.optim, name)(groups, **options)
        for step in range(3):
            for group in groups:
                for p in group["params"]:
                    p.grad = None if p.grads[step] is None else p.grads[step].clone()
            found = optimizer.step((lambda: 1.5) if takes_closure else None)
            assert found == (1.5 if takes_closure else None)
            if saves and step == 0:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return error
    params = [p for group in groups for p in group["params"]]
    return [(whole(p.detach()), {k: whole(v) for k, v in sorted(optimizer.state[p].items())}) for p in params]


def run_optimizers(installed_by: str, kind: str, seeds: list[int]) -> int:
    mesh, num_run = mesh_of(installed_by), 0
    for seed in seeds:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        name = draw.choice(OPTIMIZERS)
        forms: list[dict[str, Any]] = [{}, {"foreach": True}, {"foreach": False}]
        forms += [{"fused": True}] * (name in FUSED)
        options = {**draw.choice([{}, *OPTIONS.get(name, [])]), **draw.choice(forms)}
        options["lr"] = torch.tensor(0.1) if draw.random() < 0.2 else 0.1
        options |= {"maximize": True} if draw.random() < 0.3 else {}
        own, reference = groups_of(draw, kind, mesh)
        more = draw.random() < 0.2, draw.random() < 0.2
        case = f"seed {seed}, {name}({options}), {[[type(p.data).__name__ for p in g['params']] for g in own]}"
        wanted = steps(name, reference, options, *more)
        found = steps(name, own, options, *more)
        if isinstance(wanted, Exception):
            assert isinstance(found, Exception), f"{case}: PyTorch raises {wanted!r}"
            continue
        assert not isinstance(found, Exception), f"{case}: {found!r}"
        num_run += 1
        for (p, state), (q, of_q) in zip(found, wanted, strict=True):
            torch.testing.assert_close(p, q, rtol=2e-5, atol=1e-6, msg=lambda text, case=case: f"{case}: {text}")
            assert state.keys() == of_q.keys(), case
            torch.testing.assert_close(state, of_q, rtol=2e-5, atol=1e-6, msg=lambda text, case=case: f"{case}: {text}")
    return num_run


@pytest.mark.parametrize("installed_by", ["parallelize", "fully_shard"])
@pytest.mark.parametrize("kind", ["plain", "dtensors", "both"])
def test_optimizers(ranks: RankPools, kind: str, installed_by: str) -> None:
    seeds = list(range(40))
    assert min(ranks.run(run_optimizers, installed_by, kind, seeds, world_size=2)) > 20


# Ops on lists


def overloads() -> list[Any]:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::_foreach_")]
    found = []
    for full in sorted(names):
        name, _, overload = full.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, name), overload or "default")
        if "out" not in overload and str(op._schema.arguments[0].type) == "List[Tensor]":
            found.append(op)
    return found


def arguments_of(op: Any, draw: random.Random, count: int, shapes: list[Any]) -> list[Any]:
    """Values on one device, which are positive and no whole numbers."""
    made: list[Any] = []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind == "List[Tensor]":
            made.append([torch.rand(shape) + 0.25 for shape in shapes])
        elif kind == "Tensor":
            made.append(torch.rand(count if argument.name == "scalars" else ()) + 0.25)
        elif kind.startswith("List["):
            made.append([draw.random() + 0.25 for _ in range(count)])
        elif kind == "number" and argument.name not in ("ord",):
            made.append(draw.random() + 0.25)
        elif argument.name == "ord":
            made.append(draw.choice([1, 2, float("inf")]))
        else:
            break
    return made


def run_listed(installed_by: str, seeds: list[int]) -> int:
    mesh, num_run = mesh_of(installed_by), 0
    for seed in seeds:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        for op in overloads():
            count = draw.randint(1, 4)
            shapes = [draw.choice([shape for shape in SHAPES if shape]) for _ in range(count)]
            values = arguments_of(op, draw, count, shapes)
            places = [draw.choice(PLACES) for _ in range(count)]
            given = []
            for value in values:
                if isinstance(value, list) and isinstance(value[0], torch.Tensor):
                    given.append([placed(x, mesh, place) for x, place in zip(value, places)])
                else:
                    given.append(copy.deepcopy(value))
            case = f"seed {seed}, {op}, {places}"
            call: Callable[..., Any] = getattr(torch, op.overloadpacket.__name__, op)
            try:
                wanted = call(*values)
            except (RuntimeError, TypeError, ValueError, NotImplementedError):
                continue
            try:
                found = call(*given)
            except (RuntimeError, TypeError, MixedTensorsError) as error:
                raise AssertionError(f"{case}: {error!r}") from error
            num_run += 1
            if op._schema.is_mutable:
                wanted, found = values[0], given[0]
                assert [isinstance(x, DTensor) for x in found] == [p is not None for p in places], case
            for x, y in zip(found, wanted, strict=True):
                torch.testing.assert_close(whole(x), y, equal_nan=True, msg=lambda text, case=case: f"{case}: {text}")
    return num_run


@pytest.mark.parametrize("installed_by", ["parallelize", "fully_shard"])
def test_ops_on_lists(ranks: RankPools, installed_by: str) -> None:
    seeds = list(range(2))
    assert min(ranks.run(run_listed, installed_by, seeds, world_size=2)) > 60 * len(seeds)


def clip(installed_by: str) -> None:
    """The norm, and the gradients, of a model and a plain head together."""
    mesh = mesh_of(installed_by)
    for clipping in (
        lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.5),
        lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.5, norm_type=1),
        lambda ps: torch.nn.utils.clip_grad_value_(ps, 0.25),
        lambda ps: torch.nn.utils.clip_grads_with_norm_(ps, 0.5, torch.nn.utils.get_total_norm([p.grad for p in ps])),
    ):
        torch.manual_seed(0)
        own, reference = [], []
        for place in (Shard(0), None, Replicate(), None):
            value, grad = torch.randn(4, 3), torch.randn(4, 3)
            own.append(nn.Parameter(placed(value, mesh, place)))
            own[-1].grad = placed(grad, mesh, place)
            reference.append(nn.Parameter(value))
            reference[-1].grad = grad.clone()
        wanted, found = clipping(reference), clipping(own)
        torch.testing.assert_close(whole(found), wanted)
        for p, q in zip(own, reference):
            torch.testing.assert_close(whole(p.grad), q.grad)


def test_clipping_of_a_model_and_a_plain_head(ranks: RankPools) -> None:
    ranks.run(run_cases, clip, [("parallelize",), ("fully_shard",)], world_size=2)
