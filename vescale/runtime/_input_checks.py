"""What a forward of a model is given, compared between ranks before anything is placed (:mod:`vescale.checks`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.checks import (
    GENERATING,
    MADE,
    NUMBERS,
    PARTS,
    SEED,
    STATE,
    UNKNOWN,
    USED,
    WRITTEN,
    InputMismatchError,
    LocalPart,
    RandomStates,
    ScriptGraph,
    StepMismatchError,
    describe,
    describe_draw,
    hash_of,
    is_unchecked,
    parts_text,
    sample,
    step_checks,
    tensor_text,
)
from vescale.compat import (
    DTensorSpec,
    before_backward,
    has_dispatch_modes,
    in_backward,
    in_transform,
    is_computed,
    local_of,
    no_torch_function,
    spec_of,
    tensors_in,
)
from vescale.errors import BoundaryError
from vescale.gradients import GradientReducer
from vescale.ops import running_module
from vescale.placements import local_region, shard_dim
from vescale.rng import default_generator
from vescale.runtime._activation import THREAD
from vescale.runtime._placing import Placing
from vescale.runtime._runtime import Runtime

# What ranks hold in common of a model's parameters and buffers, described before a forward, for them to compare.

_MAX_NAMES = 120
_REQUIRES_GRAD = f"{STATE}requires_grad"


def long_axes(runtime: Runtime) -> tuple[int, ...]:
    return tuple(axis for axis, size in enumerate(runtime.mesh.shape) if size > 1)


def find_replicas(runtime: Runtime, *, looks: bool) -> dict[tuple[int, ...], list[tuple[str, str]]]:
    """By axes along which ranks have the same part: parameters, and what tells their values. On devices whose
    kernels do not repeat their bits, before the first forward only. ``looks``: False: their values are unknown, as a mode
    would see the ops."""
    module, long = runtime.root, long_axes(runtime)
    found: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    if module is None:
        return found
    own = [(n, p) for n, p in module.named_parameters() if isinstance(p, DTensor) and p.device_mesh == runtime.mesh]
    for name, tensor in own:
        add_replica(runtime, found, f"parameter {name!r}", tensor, looks=looks)
    for name, buffer in module.named_buffers():
        # In a region, they may count what the rank has seen.
        if not runtime.is_in_local_region(name) and id(buffer) not in runtime.differ_on_purpose:
            add_replica(runtime, found, f"buffer {name!r}", buffer, looks=looks)
    rows = found.setdefault(long, [])
    if not runtime.has_local_regions:
        rows += _gradients_and_writes(runtime, module)
    rows.append((_REQUIRES_GRAD, runtime.trained.see(own)))
    for path, part in module.named_modules():
        if part.training != module.training:
            rows.append((f"{STATE}training of module {path!r}", str(part.training)))
        if runtime.num_forwards == 1:
            rows += _hyperparameters(path, part)
    return found


def _gradients_and_writes(runtime: Runtime, module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Which parameters have gradients from before, and how often each was written to: of parts that other ranks do not hold,
    nothing else is the same on every rank."""
    names, held = [], 0
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor) or parameter.device_mesh != runtime.mesh:
            continue
        held += 1
        if not parameter.is_leaf or parameter.grad is None:
            names.append(name)
        spec = spec_of(parameter)
        even = all(
            p.is_replicate() or (type(p) is Shard and parameter.shape[p.dim] % spec.mesh.size(axis) == 0)
            for axis, p in enumerate(spec.placements)
        )
        if even and not parameter.is_inference():
            yield f"{WRITTEN}number of writes to {name!r}", str(parameter._version)
    text = ", ".join(names) if len(names) < held else ""
    text = (
        f"all but {text}"
        if text and len(text) < _MAX_NAMES
        else f"{held - len(names)}, {hash_of(text)}"
        if text
        else ""
    )
    yield (
        f"{WRITTEN}which parameters have a gradient from before",
        UNKNOWN if runtime.gradients.has_accumulated else text or ("none" if names else "all"),
    )


def add_replica(
    runtime: Runtime,
    found: dict[tuple[int, ...], list[tuple[str, str]]],
    name: str,
    tensor: torch.Tensor,
    *,
    looks: bool,
) -> None:
    axes, local = long_axes(runtime), tensor
    if isinstance(tensor, DTensor):
        if tensor.device_mesh != runtime.mesh:
            return
        axes, local = tuple(axis for axis in axes if tensor.placements[axis].is_replicate()), local_of(tensor)
    if axes and (local.is_cpu or runtime.num_forwards == 1):
        text = tensor_text(local.detach(), fully=True) if looks else UNKNOWN
        found.setdefault(axes, []).append((f"{STATE}{name}", text))


def _hyperparameters(path: str, module: torch.nn.Module) -> list[tuple[str, str]]:
    """The numbers among what a module declares as its constants, as PyTorch's own do: probabilities, momenta, epsilons."""
    own = vars(module)
    constants = [(name, own.get(name)) for name in getattr(type(module), "__constants__", ())]
    return [
        (f"{STATE}{name} of module {path!r}", repr(x)) for name, x in constants if isinstance(x, bool | int | float)
    ]


_Named = Callable[[tuple[Any, ...], dict[str, Any]], Iterable[tuple[str, Any, Placing | None]]]


def check_inputs(
    runtime: Runtime,
    model: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    named: _Named,
    *,
    takes_local_parts: bool,
) -> None:
    """Compare this forward of the model ``model``, and its inputs: of ``args`` and ``kwargs``, ``named`` yields name, value
    and the entry that places it; ``takes_local_parts``: some entry takes parts.

    Raises StepMismatchError, and InputMismatchError, on every rank that comes.
    """
    checks, stack = runtime.checks, THREAD.stack
    if not checks.is_on or (stack and stack[-1].runtime is runtime) or is_compiling():
        return
    runtime.num_forwards += 1
    try:
        _compare_forward(runtime, model, args, kwargs, named, takes_local_parts)
    except StepMismatchError:
        runtime.num_forwards -= 1  # it does not run, and those of other ranks may be elsewhere
        raise


def _compare_forward(
    runtime: Runtime, model: str, args: Any, kwargs: dict[str, Any], named: _Named, takes_local_parts: bool
) -> None:
    checks = runtime.checks
    checks.begin_forward(runtime.num_forwards)
    module = runtime.root
    mode = _MODES[module is not None and module.training, torch.is_grad_enabled()]
    with no_torch_function():
        if torch.is_autocast_enabled(runtime.mesh.device_type):
            mode = f"{mode}, under autocast to {torch.get_autocast_dtype(runtime.mesh.device_type)}"
        is_generating = runtime in THREAD.generating  # from global tensors, whatever the plan says of training
        if is_generating:
            mode = f"{mode}{GENERATING}"
            kwargs = {name: _in_order(value) for name, value in kwargs.items()}
        if checks.compares_data and not checks.is_due and (trained := runtime.trained.changed()) is not None:
            checks.note(_REQUIRES_GRAD, trained)
        if checks.samples and (is_generating or not takes_local_parts):
            seen = None if is_unchecked() or has_dispatch_modes() else sample(args, kwargs)
            checks.sampled_forward(model, mode, seen, named, runtime.number)
            return
        inputs: list[tuple[str, str]] = []
        parts: list[LocalPart] = []
        tensors: list[tuple[torch.Tensor, tuple[Placement, ...]]] = []
        replicas: dict[tuple[int, ...], list[tuple[str, str]]] = {}
        watched = has_dispatch_modes()  # by a mode, which would see the ops; maybe on this rank only
        if checks.compares_data:
            fully = checks.is_due
            if fully:
                _refuse_other_meshes(runtime, named(args, kwargs))
                if not watched:
                    _look_at_what_is_made(runtime)
                replicas = find_replicas(runtime, looks=not watched)
                inputs += replicas.pop(long_axes(runtime), [])
            if watched:
                inputs.append(("", UNKNOWN))
            for name, value, placing in named(args, kwargs):
                if fully:
                    for index, tensor in enumerate(tensors_in(value)):
                        if isinstance(tensor, DTensor):
                            add_replica(runtime, replicas, f"input {name!r}, tensor {index}", tensor, looks=not watched)
                if is_generating or placing is None or not placing.takes_local_parts:
                    if not watched:
                        inputs += describe(name, value, fully=fully)
                    continue
                for index, tensor in enumerate(tensors_in(value)):
                    if isinstance(tensor, DTensor):
                        continue
                    placements = placing.planned(tensor)
                    axes = [a for a, p in enumerate(placements) if not p.is_replicate()]
                    text = tensor_text(tensor, fully=fully) if not watched else UNKNOWN
                    parts.append(LocalPart(f"{name}, tensor {index}" if index else name, tensor.shape, text, axes))
                    tensors.append((tensor, placements))
        shapes = checks.forward(model, mode, inputs, parts, runtime.number)
        if watched:
            for name in (MADE, SEED, *NUMBERS, USED):
                checks.note(name, UNKNOWN)
        for alike, rows in sorted(replicas.items()):
            checks.replicas(model, rows, alike)
        if shapes is not None:
            THREAD.global_shapes = {
                id(tensor): _global_shape(runtime, part.name, found, placements)
                for (tensor, placements), part, found in zip(tensors, parts, shapes)
            }


def check_generate(runtime: Runtime, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before ``generate``, which looks at each token anyway: ranks wait for each other, and compare all values that it is
    given, wherever they are.

    Raises InputMismatchError, on every rank.
    """
    checks = runtime.checks
    if checks.compares_data:
        given = {**{f"argument {index}": value for index, value in enumerate(args)}, **kwargs}
        rows = sorted(row for name, value in given.items() for row in describe(name, value, fully=True))
        checks.agree(f"{type(model).__name__}{GENERATING}", rows if not has_dispatch_modes() else [("", UNKNOWN)])


def _in_order(value: Any) -> Any:
    """A dict with its names in one order. transformers makes masks by kind of layer from a set, whose order differs between
    processes. (What a script passes may be computed with in its order.)"""
    return dict(sorted(value.items())) if type(value) is dict and all(type(key) is str for key in value) else value


def _refuse_other_meshes(runtime: Runtime, named: Iterable[tuple[str, Any, Placing | None]]) -> None:
    for name, value, _ in named:
        for tensor in tensors_in(value):
            if isinstance(tensor, DTensor) and tensor.device_mesh != runtime.mesh:
                raise BoundaryError(
                    f"the input {name!r} is a DTensor on {tensor.device_mesh}, and the model is on {runtime.mesh}: "
                    "ops need tensors on the same mesh. Pass a plain tensor, which the plan shards, or create the "
                    "DTensor on the model's mesh (vescale.shard_batch(batch, model))"
                )


_MODES = {
    (training, grad): f"in {'training' if training else 'evaluation'}, {'with' if grad else 'without'} gradients"
    for training in (True, False)
    for grad in (True, False)
}


def _global_shape(
    runtime: Runtime, name: str, found: Mapping[int, tuple[int, ...]], placements: tuple[Placement, ...]
) -> tuple[int, ...]:
    """The shape of an input whose ranks give parts of different sizes.

    Raises InputMismatchError where the parts are not those that the placements cut of any tensor.
    """
    mesh = runtime.mesh
    mesh_shape = tuple(mesh.shape)
    coordinates = [tuple(index) for index in (mesh.mesh >= 0).nonzero().tolist()]
    shape: list[int] = []
    for dim in range(min(len(each) for each in found.values())):
        axes = {axis for axis, p in enumerate(placements) if shard_dim(p) == dim}
        along = [i for i, c in enumerate(coordinates) if not any(x for axis, x in enumerate(c) if axis not in axes)]
        shape.append(sum(found[index][dim] for index in along))
    fits = len({len(each) for each in found.values()}) == 1
    for index, coordinate in enumerate(coordinates):
        fits = fits and local_region(tuple(shape), placements, mesh_shape, coordinate).local_shape == found[index]
    if not fits:
        ranks = mesh.mesh.flatten().tolist()
        sizes = {rank: found[index] for index, rank in enumerate(ranks)}
        whole = [dim for dim in range(len(shape)) if not any(shard_dim(p) == dim for p in placements)]
        uneven = [dim for dim in whole if len({each[dim] for each in found.values()}) > 1]
        edit = (
            f"No axis shards dim {uneven[0]}: use the same size on all ranks, for example by padding to the longest "
            "sequence of the global batch"
            if uneven
            else "Pass the parts into which torch.chunk splits the batch (as ShardedBatchSampler does), or drop the "
            "last batch (drop_last=True)"
        )
        raise InputMismatchError(
            f'the parts of the input {name!r}, which each rank passes (given="local"), have shapes {sizes} by rank: '
            "these are not the shards of any tensor with placements "
            f"{placements}. {edit}",
            ranks,
        )
    return tuple(shape)


def note_random_state(runtime: Runtime) -> None:
    """After a forward whose values are compared, or a part of it: generators that it has drawn from are compared, too."""
    before, runtime.random_states, runtime.compares_made = runtime.random_states, None, False
    if before is not None:
        unknown = [(name, UNKNOWN) for name in (SEED, *NUMBERS, USED)]
        for name, text in unknown if has_dispatch_modes() else before.drawn_since():
            runtime.checks.note(name, text)


@contextmanager
def draws_of_this_rank(runtime: Runtime) -> Iterator[None]:
    """Inside, this rank alone may draw, and make tensors: the experts of a rank that has tokens for them do."""
    is_compared = runtime.random_states is not None
    if is_compared:
        note_random_state(runtime)
    yield
    if is_compared:
        _look_at_what_is_made(runtime)


def _look_at_what_is_made(runtime: Runtime) -> None:
    runtime.random_states = RandomStates(names_state=not runtime.has_local_regions, sees_calls=runtime.runs_alike)
    runtime.compares_made = runtime.runs_alike


def note_made(runtime: Runtime, what: str, path: str, tensor: torch.Tensor) -> None:
    """Of a forward whose values are compared: a tensor that it has made of numbers, arrays or texts."""
    if has_dispatch_modes():
        runtime.checks.note(MADE, UNKNOWN)
    elif not in_backward() and not in_transform():
        where = f"{what} in {path!r}" if path else f"{what} in the model's forward"
        runtime.checks.note(f"{MADE}{where}", tensor_text(tensor, fully=True))


def note_draw(spec: DTensorSpec, what: str, generator: torch.Generator | None) -> None:
    """Of an initialization and the like, outside of models: which numbers are drawn, before they are; compared with the next
    event."""
    checks = step_checks(spec.mesh)
    if checks is None or not checks.compares_data or in_backward() or running_module() is not None:
        return
    if generator is None:
        generator = default_generator(torch.device(spec.mesh.device_type))
    checks.note(*describe_draw(spec.shape, what, generator))


def watch_backward(runtime: Runtime, model: str, outputs: Any) -> None:
    """Have ranks compare when a backward that reduces gradients reaches the outputs of a forward."""
    checks = runtime.checks
    if not (checks.is_on and torch.is_grad_enabled()):
        return
    graph: ScriptGraph | None = None
    if checks.is_due:
        graph = ScriptGraph(checks)
    else:
        ScriptGraph.end(checks)
    for tensor in (outputs,) if type(outputs) is DTensor else tensors_in(outputs):
        if is_computed(tensor):
            step, reducer = checks.await_backward(model, runtime.number), runtime.gradients.reducer
            before_backward(tensor, functools.partial(_begin_backward, runtime, reducer, graph, model, step))
            return


def _begin_backward(
    runtime: Runtime, reducer: GradientReducer | None, graph: ScriptGraph | None, model: str, step: int
) -> None:
    if reducer is None or reducer.syncs:
        for name, text in graph.take() if graph is not None else ():
            runtime.checks.note(name, text)
        runtime.one_backward.enter(lambda: model)
        runtime.checks.backward(model, step, runtime.number)


def check_read(tensor: DTensor, how: str) -> None:
    """Before the value of a DTensor is gathered for Python, also inside of a forward, by the ranks along the axes over
    which it is cut."""
    spec = spec_of(tensor)
    _check_move(spec, (Replicate(),) * spec.mesh.ndim, how)


def check_move(spec: DTensorSpec, target: Sequence[Placement], how: str) -> None:
    """Before a DTensor is moved to other placements outside of models: by the ranks along the axes that communicate."""
    _check_move(spec, target, how, outside=True)


def _check_move(spec: DTensorSpec, target: Sequence[Placement], how: str, outside: bool = False) -> None:
    """``outside``: unless a model's forward or backward runs."""
    mesh, placements = spec.mesh, spec.placements
    checks = step_checks(mesh)
    if checks is None or not checks.is_on or in_backward():
        return
    axes = [a for a, (p, wanted) in enumerate(zip(placements, target)) if not p.is_replicate() and p != wanted]
    axes = [axis for axis in axes if mesh.size(axis) > 1] if len(target) == len(placements) else []
    if axes and not (outside and running_module() is not None):
        checks.read(f"{how}, a DTensor of shape {tuple(spec.shape)} placed as {tuple(placements)}", axes)


def note_plain_value(op: str, name: str, tensor: torch.Tensor, mesh: Any) -> None:
    """Of labels and the like that meet a model's outputs outside of the model; compared with the next step."""
    checks = step_checks(mesh)
    if checks is None or not checks.compares_data or in_backward() or running_module() is not None:
        return
    text = UNKNOWN if has_dispatch_modes() else tensor_text(tensor, fully=checks.is_due)
    checks.note(f"{name} of {op.removeprefix('aten.').partition('.')[0]}", text)


def check_loaded(module: Any, state: Mapping[str, Any], prefix: str) -> None:
    """Before tensors are loaded into a model: plain ones are the same on every rank, and parts are this rank's.

    Raises InputMismatchError, on every rank.
    """
    runtime = Runtime.of(module)
    if runtime is None or not runtime.checks.is_on:
        return
    own = (*module.named_parameters(prefix.rstrip(".")), *module.named_buffers(prefix.rstrip(".")))
    if is_unchecked():
        runtime.differ_on_purpose.update(id(tensor) for name, tensor in own if name in state)
    found = [(name, state.get(name)) for name, tensor in own if isinstance(tensor, DTensor)]
    rows = [
        (name, tensor_text(value, fully=True))
        for name, value in found
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    ]
    loaded = [(n, v) for n, v in found if isinstance(v, DTensor) and v.device_mesh is not runtime.mesh]
    other = [(name, place) for name, value in loaded if (place := _part_of_another_rank(value)) is not None]
    if loaded:
        rows.append((PARTS, f"{other[0][0]!r} of {other[0][1]}" if other else "this rank's"))
    if rows:
        runtime.checks.agree(f"load_state_dict of {type(module).__name__}", rows)
    if other:
        text = parts_text(f"load_state_dict of {type(module).__name__}", f"{other[0][0]!r} of {other[0][1]}")
        raise InputMismatchError(text, [dist.get_rank()])


def _part_of_another_rank(loaded: DTensor) -> str | None:
    """The place of the rank that has written ``loaded`` to a file, if this rank holds another part of it; a mesh is pickled
    with the coordinate of the rank that does it."""
    mesh, written = loaded.device_mesh, loaded.device_mesh.get_coordinate()
    own = (mesh.mesh == dist.get_rank()).nonzero().tolist() if dist.is_initialized() else []
    if written is None or not own:
        return None
    cut = [a for a, p in enumerate(loaded.placements) if not p.is_replicate() and written[a] != own[0][a]]
    return f"the rank at {tuple(written)} of the mesh" if cut else None
