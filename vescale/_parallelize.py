"""``parallelize(model, plan)``: a single-device model becomes one that runs on a mesh, in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from vescale.checks import RegisteredParameters, adopt_optimizers, check_optimizers, listed_optimizers
from vescale.comm import release_at_end
from vescale.errors import ArgumentTypeError, ParallelizeError, kind_of
from vescale.ir import Unit, lower, refuse_part_of_replicas
from vescale.plans import MeshAxes, Plan
from vescale.runtime import MissingValues, ModuleTables, Runtime, install, preflight, refuse_wrapped, run_eagerly
from vescale.static import StaticMode

M = TypeVar("M", bound=nn.Module)


def parallelize(
    model: M,
    plan: Plan,
    *,
    mesh: DeviceMesh | None = None,
    strict: bool = False,
    mode: Literal["eager", "static"] = "eager",
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
) -> M:
    """Changes ``model`` in place, so that all ranks of a mesh together compute what one device would compute.

    ===========  ===========================================================================================
    of the       after ``parallelize``
    ===========  ===========================================================================================
    parameters   ``nn.Parameter`` of a DTensor with the plan's placements; names, ties and ``requires_grad`` are unchanged
    inputs       ordinary tensors are taken as global, the same on every rank (with ``given="local"``, as each rank's
                 part), and get the plan's placements, or Replicate without an entry; DTensors are used as they are
    outputs      DTensors; ordinary global tensors if an ``<out>`` entry of the model makes them Replicate on all axes
    gradients    complete when ``backward()`` returns, with the placements of their parameters
    ===========  ===========================================================================================

    With a pipeline, each rank keeps the parameters of its stages, and the model is a
    :class:`~vescale.pipeline.PipelineModule`, which has ``.step(**batch)``.

    Create the optimizer afterwards, or pass an existing one as ``optimizer``. Anything else that holds the replaced
    parameters, and steps, clips or averages them, gets a :class:`ReplacedParameterError`. Ranks compare their models and
    plans once, through the rendezvous store; no collective is run.

    Args:
        model: an ordinary model on one device; a model built under ``deferred_init``, of which each rank computes only its
            own part; or a model on the meta device, whose parameters need values before the first forward (a
            MissingValuesWarning names them). Every rank builds it with the same seed.
        plan: of placements on a mesh, or on axis names and sizes (from a YAML file).
        mesh: the DeviceMesh, if the plan has only names and sizes; by default it is made from them.
        strict: raise an error at the first communication that no entry of the plan asks for, instead of a warning.
        mode: ``"eager"``, or ``"static"`` to run the model on local tensors after one recorded step
            (:mod:`vescale.static`).
        optimizer: an optimizer of the model's parameters, or several. Their parameter groups get the new parameters in
            place, so that schedulers keep working. States with the shape of a parameter are sharded like it.

    Returns the model.

    Raises:
        PlanMismatchError: ranks have different plans, programs, models, seeds or versions, or do not arrive; on every rank,
            with what differs on which ranks.
        PlanError: the plan does not fit the model, with all findings of ``lower``; or the model is parallelized already.
        ValueError: an optimizer has none of the parameters, or states of other shapes.

    After an error, the model is as it was before the call.
    """
    static = _static_mode(mode)
    optimizers = listed_optimizers(optimizer, "parallelize")
    if not isinstance(plan, Plan):
        raise ArgumentTypeError(f"plan is {kind_of(plan)}; pass a vescale.Plan (Plan.from_yaml reads a file)")
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model is {kind_of(model)}; pass a torch.nn.Module")
    _refuse(model, plan, static, optimizers)
    registered = RegisteredParameters([model])
    registered.refuse_hooks("parallelize")
    missing, known = MissingValues(model), mesh if mesh is not None else plan.mesh
    missing.warn()

    try:
        check_optimizers(optimizers, model.named_parameters(), "parallelize")
        if known is not None and MeshAxes.of(known) != plan.axes:
            raise ParallelizeError(
                f"the plan is for axes {plan.axes}, but the mesh has {MeshAxes.of(known)}; pass the plan's mesh"
            )
        program = lower(plan, model)
        staged = None
        if plan.pipeline_entry is not None:
            from vescale.pipeline import StagedProgram, install_stages  # PyTorch's pipelines load its compiler

            staged = StagedProgram.of(plan, model, program)
            if staged.problem is not None:
                raise staged.problem
        if plan.mesh is None and known is not None:  # else lower has looked at it
            for unit in (instruction.op for instruction in program if isinstance(instruction.op, Unit)):
                refuse_part_of_replicas(known, unit.shard)
        if static is not None:
            static.check()
    except Exception as problem:
        preflight(model, known, plan=plan, problem=problem)
        raise
    preflight(model, known, plan=plan, program=program)
    release_at_end()  # PyTorch's own collectives of DTensors, too

    before = ModuleTables(model)
    try:
        own_mesh = known if known is not None else _new_mesh(plan, model)
        if staged is not None:
            runtime = install_stages(model, staged, own_mesh, strict=strict)
        else:
            runtime = install(model, program, own_mesh, strict=strict)
            run_eagerly(runtime, model) if static is None else static.install(runtime, model)
        runtime.missing_values = missing
        registered.mark_replaced("parallelize")
        adopt_optimizers(optimizers)
    except BaseException:
        before.restore()
        raise
    return model


def _static_mode(mode: str) -> StaticMode | None:
    """None: eager mode."""
    if mode == "static":
        return StaticMode()
    if mode != "eager":
        raise ParallelizeError(f"mode={mode!r} is not one of 'eager', 'static'; leave it out for 'eager'")
    return None


def _refuse(model: nn.Module, plan: Plan, static: StaticMode | None, optimizers: list[Optimizer]) -> None:
    """Raises for arguments that do not go together, and for a model that is no single-device one."""
    if Runtime.of(model) is not None:
        raise ParallelizeError(
            f"this {type(model).__name__} has already been parallelized; build a new model, or copy it before the "
            "first call of parallelize"
        )
    for path, module in model.named_modules():
        other = Runtime.around(module)
        if other is not None:
            raise ParallelizeError(
                f"{path!r} of this {type(model).__name__} is part of another parallelized model, "
                f"{type(other.root).__name__}, by whose plan its parameters are placed and its gradients reduced. "
                "Parallelize one module that holds both models (nn.ModuleDict, or a class with a forward that calls "
                "either), or pass a copy of it here (copy.deepcopy)"
            )
    refuse_wrapped(model)
    entry = plan.pipeline_entry
    if entry is not None and static is not None:
        raise ParallelizeError(
            "pipeline: mode='static' records a step of the whole model, but each rank has only some of its stages; "
            "remove mode= from the call of parallelize, or the pipeline from the plan",
            entry.source,
        )
    if entry is not None and optimizers:
        raise ParallelizeError(
            "with a pipeline, each rank keeps only the parameters of its stages: create the optimizer after "
            "parallelize, from model.parameters()",
            entry.source,
        )


def _new_mesh(plan: Plan, model: nn.Module) -> DeviceMesh:
    devices = [p.device.type for p in model.parameters() if p.device.type != "meta"]
    return init_device_mesh(devices[0] if devices else "cpu", plan.axes.sizes, mesh_dim_names=plan.axes.names)
