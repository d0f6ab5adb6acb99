"""Comparison of plan, program, model and seed of all ranks, through the store, before the first collective."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.agreement import Description, Difference, Round, compare_descriptions
from vescale.errors import ConsensusError
from vescale.ir import Program
from vescale.plans import Phase, Plan, PlanMismatchError, phase_text, placement_text
from vescale.rng import fingerprint, is_deferred

# Sections of the description of a rank, and the edit for ranks that differ in one.
_EDITS = {
    "versions": "install the same versions on every host",
    "mesh": "pass the same mesh on every rank",
    "plan": "build the same plan on every rank",
    "problem": "use the same plan and model on every rank",
    "parameters and buffers": "build the same model, in the same order and dtype, on every rank",
    "program": "build the same model and the same plan on every rank",
    "values": "use the same seed on every rank before the model is built (torch.manual_seed), or load the same "
    "checkpoint",
    "random state": "use the same seed on every rank (torch.manual_seed) before parallelize, and draw numbers that "
    "differ by rank from a separate torch.Generator: ops on DTensors draw from the default one",
}


def preflight(
    model: nn.Module,
    mesh: DeviceMesh | None,
    *,
    plan: Plan | None = None,
    program: Program | None = None,
    problem: Exception | None = None,
) -> None:
    """Compare the ranks. No collective; one round through the rendezvous store.

    Args:
        model: before its parameters are placed.
        mesh: of the ranks that will run the model; None: all ranks.
        plan, program: of this rank, as far as it has them.
        problem: why this rank cannot go on.

    Raises:
        PlanMismatchError: the same on every rank: what differs, how, and on which ranks; or which ranks have not come. Of
            tensors on the meta device, and of DTensors, values are not compared; of deferred ones, how they would be
            computed.
        Exception: ``problem``, when every rank has the same one.
    """
    if _is_shared(mesh):
        ranks = range(dist.get_world_size()) if mesh is None else mesh.mesh.flatten().tolist()
        name = type(model).__name__
        sections: Description = {
            "versions": [("torch", torch.__version__)],
            "mesh": [("axes", _axes_text(mesh, plan, program))],
            "plan": list(_plan_entries(plan)) if plan is not None else [],
            "parameters and buffers": list(_tensors(model)),
            "problem": [("lowering the plan", str(problem) if problem is not None else "possible")],
            "program": list(_instructions(program)) if program is not None else [],
            "values": list(_values(model)) if program is not None else [],
            "random state": list(_random_state(mesh)),
        }
        try:
            found = compare_descriptions(sections, Round(ranks, "parallelize"), lambda: f"parallelize({name}, plan)")
        except ConsensusError as error:
            raise PlanMismatchError(
                f"{error}; call parallelize on every rank of the mesh, the same number of times and in the same order",
                error.ranks,
            ) from None
        if found is not None:
            raise PlanMismatchError(
                f"ranks disagree about parallelize({name}, plan): {_text(found)}; {_EDITS[found.section]}", found.ranks
            ) from problem
    if problem is not None:
        raise problem


def _is_shared(mesh: DeviceMesh | None) -> bool:
    if not dist.is_initialized():
        return False
    return dist.get_world_size() > 1 if mesh is None else mesh.size() > 1 and mesh.get_coordinate() is not None


def _text(found: Difference) -> str:
    return found.text() if found.section != "values" else f"{found.name} has other values: {found.text()}"


def _axes_text(mesh: DeviceMesh | None, plan: Plan | None, program: Program | None) -> str:
    axes = plan.axes if plan is not None else program.axes if program is not None else ""
    return f"{axes}" if mesh is None else f"{axes} over ranks {mesh.mesh.tolist()} on {mesh.device_type}"


def _plan_entries(plan: Plan) -> Iterator[tuple[str, str]]:
    """Entries by kind and path; numbered where a path has several."""
    if plan.pipeline_entry is not None:
        yield "pipeline", plan.pipeline_entry.text()
    seen: Counter[str] = Counter()
    for entry in plan.entries:
        name = f"{type(entry).__name__.removesuffix('Entry').lower()} {entry.path}"
        seen[name] += 1
        options = (
            f"{field.name}={_value_text(getattr(entry, field.name))}"
            for field in fields(entry)
            if field.name not in ("path", "source") and getattr(entry, field.name) not in (None, ())
        )
        yield name if seen[name] == 1 else f"{name} (number {seen[name]})", ", ".join(options)


def _value_text(value: object) -> str:
    if isinstance(value, Phase):
        return phase_text(value)
    if isinstance(value, tuple):
        placements = ((axis, what if isinstance(what, str) else placement_text(what)) for axis, what in value)
        return "{" + ", ".join(f"{axis}: {what}" for axis, what in placements) + "}"
    return str(value)


def _instructions(program: Program) -> Iterator[tuple[str, str]]:
    seen: Counter[str] = Counter()
    for instruction in program:
        target = f"{instruction.target}:{'*' if instruction.index is None else instruction.index}"
        name = f"{instruction.path}.{instruction.hook.value}:{target}".lstrip(".")
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name} (number {seen[name]})", instruction.op.text(program.axes)


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _tensors(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, tensor in _named_tensors(model):
        grad = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ", frozen"
        yield name, f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{grad}"


def _values(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, tensor in _named_tensors(model):
        yield name, f"sum of bits {_sum_of_bits(tensor):x}"


def _random_state(mesh: DeviceMesh | None) -> Iterator[tuple[str, str]]:
    yield "the default generator", _generator_text(torch.initial_seed(), torch.get_rng_state())
    if mesh is not None and mesh.device_type != "cpu":
        module = torch.get_device_module(mesh.device_type)
        state = _generator_text(module.initial_seed(), module.get_rng_state())
        yield f"the default generator ({mesh.device_type})", state


def _generator_text(seed: int, state: torch.Tensor) -> str:
    return f"seed {seed}, state {hashlib.sha256(state.numpy().tobytes()).hexdigest()[:12]}"


def _sum_of_bits(tensor: torch.Tensor) -> int:
    """A number that changes with any one element; sums of bit patterns, so that it costs one pass."""
    if is_deferred(tensor):
        return fingerprint(tensor)
    if tensor.is_meta or isinstance(tensor, DTensor) or tensor.numel() == 0:
        return 0
    if tensor.layout is not torch.strided:
        dense = tensor.detach().to_sparse_coo().coalesce()
        return 31 * _sum_of_bits(dense.indices()) + _sum_of_bits(dense.values())
    with torch.no_grad():
        width = {1: torch.uint8, 2: torch.int16}.get(tensor.element_size(), torch.int32)
        return int(tensor.detach().contiguous().view(-1).view(width).sum(dtype=torch.int64))
