"""Parameters in all placements beside their twins on one device, and equal gradients for both."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.placements.on_ranks import make_mesh
from tests.whole import whole
from vescale.comm import CommRecord, Ledger
from vescale.compat import StridedShard
from vescale.placements import InterleavedShard, RaggedShard, distribute_tensor, local_region, normalize_placements

__all__ = ["GRIDS", "LINES", "Case", "assert_equal", "build", "communicated", "missing_gradients", "set_gradients"]

R, S, G = Replicate, Shard, RaggedShard
Case = tuple[Any, tuple[int, ...], tuple[Any, ...], Any]
"""ranks of the mesh, shape, placements, blocks"""


def lines(num_ranks: int) -> list[Case]:
    """On a mesh of one axis: even and uneven, rows and columns, empty shards, stacks, packed rows."""
    ranks = tuple(range(num_ranks))
    first = (4, *[0] * (num_ranks - 1))
    cases: list[tuple[tuple[int, ...], Any, Any]] = [
        ((16, 12), S(0), None),
        ((7, 19), S(0), None),
        ((13, 24), S(1), None),
        ((1, 20), S(0), None),
        ((40, 5), G((0, 1)), None),
        ((24, 10), G((0,), block=7), (4, 12, 8)),
        ((16, 6), G((0,), first), None),
        ((12, 8), InterleavedShard(0, 3), 3),
        ((9, 14), R(), None),
        ((10, 12), S(0), ("dim", 1, [3, 9])),
        ((5, 6, 8), S(0), None),
        ((4, 9, 6), G((0,), block=1), 3),
        ((6, 10, 4), S(2), ("dim", 1, 2)),
        ((4, 6, 6), G((0,), block=36), None),
    ]
    return [(ranks, shape, (placement,), blocks) for shape, placement, blocks in cases]


LINES = {n: lines(n) for n in (1, 2, 3, 4)}
FSDP_TP = ((0, 1), (2, 3))
GRIDS: list[Case] = [
    (FSDP_TP, (16, 12), (G(), S(0)), None),  # strided ragged
    (FSDP_TP, (12, 16), (G(block=4), S(1)), None),
    (FSDP_TP, (16, 8), (S(0), S(0)), 2),
    (FSDP_TP, (16, 9), (StridedShard(0, split_factor=2), S(0)), None),
    (FSDP_TP, (7, 5), (S(1), S(0)), None),
    (FSDP_TP, (14, 10), (R(), G()), None),  # HSDP
    (FSDP_TP, (18, 10), (R(), S(0)), 3),
    (FSDP_TP, (11, 4), (R(), R()), None),
    (FSDP_TP, (4, 6, 8), (S(0), G((0,), block=1)), None),  # EP x FSDP
    (FSDP_TP, (4, 6, 8), (S(0), G()), None),
    (FSDP_TP, (12, 10), (R(), S(1)), None),
    ((0, 1, 2, 3), (10, 10), (G((0,), (1, 0, 5, 4)),), None),
    (None, (6, 8), (), None),  # plain
]


def build(cases: list[Case], dtype: torch.dtype = torch.float32) -> tuple[list[Any], list[Any]]:
    """(groups of parameters on meshes, the same on one device), a group for each case"""
    own, reference = [], []
    for seed, (ranks, shape, placements, blocks) in enumerate(cases):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        tensor: torch.Tensor = values.clone() if ranks is None else on_mesh(values, make_mesh(ranks), placements)
        for groups, each in ((own, tensor), (reference, values)):
            groups.append({"params": [(f"p{seed}", nn.Parameter(each))], "blocks": blocks})
    return own, reference


def on_mesh(values: torch.Tensor, mesh: DeviceMesh, placements: Any) -> DTensor:
    wanted = normalize_placements(placements, values.shape, mesh)
    return distribute_tensor(values, mesh, wanted, src_data_rank=None)


def communicated(ledger: Ledger) -> list[CommRecord]:
    """What a step has communicated, apart from the byte by which ranks tell each other that they have come to it."""
    arrivals = [record for record in ledger.records if record.requester == "step of AdamW8bit"]
    assert all(record.op == "all_reduce" and record.bytes <= 2 for record in arrivals), ledger
    return [record for record in ledger.records if record not in arrivals]


def set_gradients(own: list[Any], reference: list[Any], step: int, missing: Any = lambda index: False) -> None:
    """Equal gradients; ``missing(index)`` says for which parameters this rank has none, where the reference has zeros."""
    for index, (group, other) in enumerate(zip(own, reference)):
        for parameter, twin in zip(group["params"], other["params"]):
            generator = torch.Generator().manual_seed(1000 * step + index)
            twin.grad = torch.randn(twin.shape, generator=generator).to(twin.dtype)
            parameter.grad = twin.grad.clone()
            if isinstance(parameter, DTensor):
                parameter.grad = on_mesh(twin.grad, parameter.device_mesh, parameter.placements)
            if missing(index):
                parameter.grad = None


def missing_gradients(kind: Any, options: dict[str, Any]) -> None:
    """On four ranks: a gradient that one rank lacks counts as zeros there; a parameter without one on all ranks is skipped:
    no decay, no state. Every parameter has both, in steps of its own, some in the first one."""
    cases, lacking = [*LINES[4], *GRIDS], 2
    own, reference = build(cases)
    optimizer, alone = kind(own, **options), kind(reference, **options)
    for step in range(5):

        def nobody(index: int, step: int = step) -> bool:
            return (index + step) % 5 == 0

        def one(index: int, step: int = step) -> bool:
            return (index + step) % 5 == 1

        set_gradients(own, reference, step, lambda i: nobody(i) or (one(i) and rank() == lacking))
        for index, group in enumerate(reference):
            for twin, parameter in zip(group["params"], own[index]["params"]):
                if nobody(index) or (one(index) and cases[index][0] is None and rank() == lacking):  # plain: its own
                    twin.grad = None
                elif one(index) and cases[index][0] is not None:
                    twin.grad = _without_rank(parameter, twin.grad, lacking)
        untouched = {i: copy.deepcopy(_values(alone, i)) for i in range(len(cases)) if nobody(i)}
        optimizer.step()
        alone.step()
        for index, before in untouched.items():
            for name, value in _values(alone, index).items():
                same = torch.equal(value, before[name]) if isinstance(value, torch.Tensor) else value == before[name]
                assert same, f"{name} of parameter {index} has changed in step {step}"
    assert_equal(optimizer, alone)


def _values(optimizer: torch.optim.Optimizer, index: int) -> dict[str, Any]:
    """The only parameter of a group, and its state."""
    (parameter,) = optimizer.param_groups[index]["params"]
    return {"parameter": parameter.detach(), **optimizer.state[parameter]}


def _without_rank(parameter: Any, gradient: torch.Tensor, lacking: int) -> torch.Tensor:
    """The gradient with zeros in the part of one rank, unless another rank has it, too."""
    mesh = parameter.device_mesh
    if any(p.is_replicate() for p in parameter.placements):
        return gradient
    (place,) = (mesh.mesh == lacking).nonzero().tolist()
    found = gradient.clone()
    for box in local_region(parameter.shape, parameter.placements, tuple(mesh.shape), tuple(place)).boxes:
        found[tuple(slice(o, o + n) for o, n in zip(box.offset, box.sizes))] = 0
    return found


def assert_equal(optimizer: torch.optim.Optimizer, reference: torch.optim.Optimizer) -> None:
    """Parameters and states, bit for bit, on all ranks. All are gathered before the first comparison."""
    found = []
    for group, other in zip(optimizer.param_groups, reference.param_groups):
        for parameter, twin in zip(group["params"], other["params"]):
            what = f"{tuple(parameter.shape)} {getattr(parameter, 'placements', None)} on rank {rank()}"
            states, others = optimizer.state[parameter], reference.state[twin]
            found.append((f"states of {what}", list(states), list(others)))
            found.append((what, whole(parameter), twin))
            found += [(f"{name} of {what}", whole(value), others.get(name)) for name, value in states.items()]
    for what, value, expected in found:
        if isinstance(value, torch.Tensor):
            assert value.dtype == expected.dtype and torch.equal(value, expected), what
        else:
            assert value == expected, what


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
