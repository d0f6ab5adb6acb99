"""From a recorded program to what a static forward is made from, after comparing it with the model."""

from __future__ import annotations

import ast
import os
import platform
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale._version import __version__
from vescale.errors import StaticRecordError
from vescale.ir import Program
from vescale.static._actions import Action, Checked, Eager, ReadSizes, TakeSizes
from vescale.static._analysis import FunctionPlan, ModulePlan
from vescale.static._fingerprint import code_digest, state_digest
from vescale.static._function_names import function_named
from vescale.static._patch import Patch, can_be_site
from vescale.static._placing import PlacedTensor
from vescale.static._record_values import (
    RecordedFunction,
    RecordedPatch,
    RecordedSite,
    RecordedStep,
    RecordedType,
)
from vescale.static._recorded import Recorded
from vescale.static._recorded_program import RecordedProgram
from vescale.static._size_functions import SIZE_READERS, SIZE_TAKERS
from vescale.static._source import source_of
from vescale.static._state import own_forward
from vescale.static._tensor_type import TensorType
from vescale.static._units import ModelUnits

VERSIONS = (
    ("vescale", __version__),
    ("torch", str(torch.__version__)),
    ("python", ".".join(platform.python_version_tuple()[:2])),
)
"""Of what a record depends on."""


def program_of(record: RecordedProgram | str | os.PathLike[str]) -> RecordedProgram:
    """What was given as ``record=``. Raises StaticRecordError."""
    found = record if isinstance(record, RecordedProgram) else RecordedProgram.from_yaml(record)
    for (name, ours), (_, theirs) in zip(VERSIONS, found.versions, strict=True):
        if ours != theirs:
            raise StaticRecordError(
                f"the record was made with {name} {theirs}, and this is {ours}; record the model again"
            )
    return found


def read_record(file: str | os.PathLike[str], program: Program) -> RecordedProgram:
    """The record of a lowered plan. Raises StaticRecordError for one of another plan or mesh, or of other versions."""
    record = program_of(file)
    check_program(record, program, None)
    return record


def check_program(record: RecordedProgram, program: Program, mesh: DeviceMesh | None) -> None:
    """Raises StaticRecordError for a record of another mesh or plan."""
    if record.axes != program.axes:
        raise StaticRecordError(
            f"the record is of a mesh {record.axes}, and this is {program.axes}; record the model again"
        )
    if mesh is not None and mesh.device_type != record.device:
        raise StaticRecordError(
            f"the record was made on {record.device}, and the mesh is on {mesh.device_type}; record the model again"
        )
    if record.plan != program.digest():
        raise StaticRecordError(
            "the record was made with another plan, or a model with other parts; give its plan, or record the model again"
        )


def load_step(step: RecordedStep, model: nn.Module, mesh: DeviceMesh) -> Recorded:
    """Raises StaticRecordError for a step that does not fit the model as it is."""
    if step.coordinate is not None and step.coordinate != tuple(mesh.get_coordinate() or ()):
        raise StaticRecordError(
            f"the record has sizes that ranks share unevenly, as of the rank at {step.coordinate}; record on each rank"
        )
    parts, recorded_parts = dict(model.named_modules()), [module.path for module in step.modules]
    if list(parts) != recorded_parts:
        other = next(iter(set(parts) ^ set(recorded_parts)), "the order of its modules")
        raise StaticRecordError(f"the model differs from the recorded one in {other or 'itself'}")
    managed = ModelUnits(model).parameters
    plans: dict[str, ModulePlan] = {}
    for module in step.modules:
        if state_digest(parts[module.path], managed) != module.state:
            raise StaticRecordError(
                f"the source, attributes or parameters of {module.path or 'the model'} differ from the recorded ones"
            )
        if module.ran:
            forward = None
            if module.patch is not None:
                forward = _function_plan(module.patch, _code_of(parts[module.path], module.path), module.path, mesh)
            plans[module.path] = ModulePlan(module.path, module.eager, forward)
    return Recorded(
        plans,
        {
            module.path: (_types(module.inputs, mesh), _types(module.outputs, mesh))
            for module in step.modules
            if module.inputs is not None and module.outputs is not None
        },
        _types(step.inputs, mesh),
        _types(step.outputs, mesh),
        _types(step.hidden, mesh),
        dict(step.grads),
        {
            (module.path, one.entry): tuple(PlacedTensor(_type(a, mesh), _type(b, mesh)) for a, b in one.tensors)
            for module in step.modules
            for one in module.boundaries
        },
        step.draws,
        step.recomputes,
        step=step,
        path=step.path,
    )


class _CalledFunctions(Mapping[CodeType, FunctionPlan | None]):
    """Plans of the functions that are called at a place, by their code, which is known when they are called."""

    def __init__(
        self, called: tuple[tuple[RecordedFunction, RecordedPatch | None], ...], path: str, mesh: DeviceMesh
    ) -> None:
        self._by_digest = {function.code: patch for function, patch in called}
        self._path, self._mesh = path, mesh
        self._made: dict[CodeType, FunctionPlan | None] = {}

    def __getitem__(self, code: CodeType | None) -> FunctionPlan | None:
        if code is None:  # of what is no Python function
            raise KeyError(code)
        if code not in self._made:
            patch = self._by_digest[code_digest(code)]  # KeyError: another function
            self._made[code] = None if patch is None else _function_plan(patch, code, self._path, self._mesh)
        return self._made[code]

    def __iter__(self) -> Iterator[CodeType]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    @property
    def has_sites(self) -> bool:
        """Whether something is changed in one of the functions, or in those that they call."""
        return any(_has_sites(patch) for patch in self._by_digest.values() if patch is not None)


def _has_sites(patch: RecordedPatch) -> bool:
    return any(site.action != "check" for _, site in patch.all_sites())


def _code_of(module: nn.Module, path: str) -> CodeType:
    function = own_forward(module, path)
    while isinstance(function, MethodType):
        function = function.__func__
    if not isinstance(function, FunctionType):
        raise StaticRecordError(f"the forward of {path or 'the model'} is not a Python function")
    return function.__code__


def _function_plan(patch: RecordedPatch, code: CodeType, path: str, mesh: DeviceMesh) -> FunctionPlan:
    source = source_of(code)
    name = f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
    if source is None or code_digest(code) != patch.function.code:
        raise StaticRecordError(f"{name} has changed since it was recorded")
    for site in patch.sites:
        if site.node >= len(source.nodes) or not can_be_site(source.nodes[site.node], source.nodes):
            raise StaticRecordError(f"{name} has no expression {site.node} that can be replaced")
    for node, _ in patch.calls:
        if node >= len(source.nodes) or not isinstance(source.nodes[node], ast.Call):
            raise StaticRecordError(f"{name} has no call {node}")
    swaps = {node: _CalledFunctions(called, path, mesh) for node, called in patch.calls}
    return FunctionPlan(
        code,
        source,
        Patch(
            tuple(site.node for site in patch.sites),
            tuple(swaps),
            patch.refused,
            patch.refused_else,
            patch.refused_false,
            patch.refused_true,
            patch.marked,
        ),
        {site.node: _action(site, mesh) for site in patch.sites},
        swaps,
        _has_sites(patch),
    )


def _action(site: RecordedSite, mesh: DeviceMesh) -> Action:
    function = function_named(site.function)
    if site.action == "read_sizes" and function in SIZE_READERS:
        return ReadSizes(function, site.factors)
    if site.action == "take_sizes" and function in SIZE_TAKERS:
        return TakeSizes(function, site.factors)
    if site.action == "check":
        return Checked(function, _types(site.inputs, mesh), _types(site.outputs, mesh))
    if site.action != "redistribute":
        raise StaticRecordError(f"{site.function} does not read or take sizes")
    return Eager(function, _types(site.inputs, mesh), _types(site.outputs, mesh), site.reason, site.communication)


def _types(kinds: tuple[RecordedType, ...], mesh: DeviceMesh) -> tuple[TensorType, ...]:
    return tuple(_type(kind, mesh) for kind in kinds)


def _type(kind: RecordedType, mesh: DeviceMesh) -> TensorType:
    return TensorType(mesh, kind.placements, kind.grad, kind.factors, kind.sizes)
