"""Installing a plan with a pipeline: each rank keeps the model with the parameters of its stages."""

from __future__ import annotations

import functools
import itertools
import weakref
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.comm import name_group
from vescale.compat import note
from vescale.gradients import OtherStages, set_other_stages
from vescale.optim import extend_torch_for_stages
from vescale.pipeline._cut import Cut
from vescale.pipeline._gates import add_gates
from vescale.pipeline._local_inputs import LocalInputs
from vescale.pipeline._runner import Runner
from vescale.pipeline._stage_run import end_forward
from vescale.pipeline._staged_program import StagedProgram, program_of_stages
from vescale.plans import MeshAxes
from vescale.runtime import Runtime, install, run_eagerly

# Of the next pipeline, by the ranks of its mesh, which all make the same pipelines, in each world.
_NUMBERS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, itertools.count[int]]] = weakref.WeakKeyDictionary()


class PipelineModule(nn.Module):
    """The second class of a parallelized model with a pipeline, in addition to its own. Its forward is that of a stage,
    and is not called; its parameters, and ``state_dict()``, are those of this rank's stages, under their names in the
    whole model."""

    def step(self, **batch: Any) -> torch.Tensor:
        """Forward and backward of the whole batch in all stages, by the plan's schedule.

        Args:
            batch: arguments of the model's forward: the global batch, the same on every rank; of inputs that the plan
                says are ``given="local"``, this rank's part. Tensors are split into micro-batches along dim 0.

        Gradients are complete afterwards, and added to what ``.grad`` had: call ``zero_grad()`` where they shall not
        accumulate. Random numbers are those of one device that runs the whole batch.

        Returns the loss of the whole batch, a plain tensor without a graph, the same on every rank.

        Raises PlanError, on every rank and before any communication, for a batch that cannot be split, or a forward
        that the plan's stages do not fit.
        """
        return self._pipeline.step(batch)

    def evaluate(self, **batch: Any) -> torch.Tensor:
        """The loss of the whole batch, without gradients, in evaluation mode; the modes of modules are restored.

        Args:
            batch: arguments as of a step: inputs of the model, and what the loss needs.
        """
        return self._pipeline.evaluate(batch)

    @property
    def _pipeline(self) -> Runner:
        found: Runner = self.__dict__["_pipeline_runner"]
        return found


@functools.cache
def _with_steps(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (PipelineModule, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def install_stages(model: nn.Module, staged: StagedProgram, mesh: DeviceMesh, *, strict: bool = False) -> Runtime:
    """Keep the stages of this rank, install their program on the mesh of one stage, and make ``model`` a
    :class:`PipelineModule`, in place.

    Args:
        mesh: the plan's, with the pipeline's axis.
    """
    entry, cut, schedule, program = staged.entry, staged.cut, staged.schedule, staged.program
    inner = _stage_mesh(mesh, entry.mesh, program.axes)
    group = mesh.get_group(entry.mesh)
    name_group(group, entry.mesh)  # the default group, where stages are on all ranks, has no name of its own
    rank = mesh.get_local_rank(entry.mesh)
    own = frozenset(schedule.stages_of(rank))
    of_stages = program_of_stages(model, program, cut, own)
    names = set(model.state_dict(keep_vars=True))
    _keep_stages(model, cut, own, torch.device(mesh.device_type))
    foreign = tuple(f"{path}." for path, stages in cut.bound.items() if not stages & own)
    set_other_stages(model, OtherStages(frozenset(names - model.state_dict(keep_vars=True).keys()), foreign))
    add_gates(model, cut)
    local_inputs, of_stages = LocalInputs.taken_out(of_stages, inner)
    runtime = install(model, of_stages, inner, strict=strict)
    run_eagerly(runtime, model)
    column = "-".join(map(str, inner.get_coordinate() or ()))
    ranks = f"{zlib.crc32(str(mesh.mesh.tolist()).encode())}"
    world = dist.group.WORLD
    assert world is not None
    number = next(_NUMBERS.setdefault(world, {}).setdefault(ranks, itertools.count()))
    place = f"vescale/pipeline/{ranks}/{number}"
    runner = Runner(model, staged.skeleton, cut, entry, schedule, inner, group, place, column, local_inputs)
    model.__dict__["_pipeline_runner"] = runner
    extend_torch_for_stages()
    note("pipeline._install:class", model)
    model.__class__ = _with_steps(type(model))  # type: ignore[arg-type]
    model.__dict__["forward"] = end_forward(model, model.forward)
    return runtime


def _stage_mesh(mesh: DeviceMesh, axis: str, axes: MeshAxes) -> DeviceMesh:
    """The mesh of the ranks that run one stage. Communication: none, except that a mesh without other axes gets one of size
    1, whose groups every rank makes."""
    if mesh.ndim > 1:
        return mesh[axes.names] if len(axes.names) > 1 else mesh[axes.names[0]]
    wider = DeviceMesh(mesh.device_type, mesh.mesh.unsqueeze(-1), mesh_dim_names=(axis, *axes.names))
    return wider[axes.names[0]]


def _keep_stages(model: nn.Module, cut: Cut, own: frozenset[int], device: torch.device) -> None:
    """Replace parameters and buffers of other stages by placeholders that are no part of the model."""
    others = {name for name, stages in cut.owners.items() if not stages & own}
    by_id = {id(p): name for name, p in model.named_parameters()}
    foreign = tuple(f"{path}." for path, stages in cut.bound.items() if not stages & own)
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and by_id.get(id(parameter)) in others:
                _hide(module, module._parameters, name, parameter, device)
        if f"{path}.".startswith(foreign) and foreign:
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    _hide(module, module._buffers, name, buffer, device)


def _hide(module: nn.Module, table: Any, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """``device``: of the placeholder, which forwards may ask for it, where the tensor has no memory yet."""
    del table[name]
    value = float("nan") if tensor.is_floating_point() else 0
    device = device if tensor.is_meta else tensor.device
    module.__dict__[name] = torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)
