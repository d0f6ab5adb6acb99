"""A model's copy without memory, and a batch of the sizes that are asked for."""

from __future__ import annotations

import inspect
import types
import typing
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, get_args, get_origin

import torch
import typing_extensions
from torch import nn

from vescale.errors import ArgumentTypeError, EstimateError, did_you_mean, kind_of
from vescale.estimation._compare import EstimateWarning
from vescale.estimation._rehearsal import Rehearsal, is_of_parameters
from vescale.ir import Repeats, copy_model, dtype_of_input, random_inputs
from vescale.rng import is_deferred
from vescale.runtime import Runtime

# Check of the names in a batch, for models whose forward takes any name by ``**kwargs``.

_UNPACK = (typing.Unpack, typing_extensions.Unpack)  # different objects in Python 3.11; torch requires the package


def check_names(model: nn.Module, names: Iterable[str]) -> None:
    """Check that the model reads the inputs ``names``.

    Raises TypeError for an unknown name if the forward declares all names that it takes, by its parameters or by
    ``**kwargs: Unpack[...]``. If its ``**kwargs`` have no such annotation, warns (EstimateWarning) of names that no module
    reads: other code may read them.
    """
    parameters = inspect.signature(model.forward).parameters
    unknown = [name for name in names if name not in parameters]
    if not unknown:
        return
    forward = f"{type(model).__name__}.forward"
    rest = next((p for p in parameters.values() if p.kind is p.VAR_KEYWORD), None)
    if rest is None:
        raise ArgumentTypeError(f"batch: {forward} takes no {unknown[0]!r}; it takes {', '.join(parameters)}")
    known = set(_names_in(model))
    for name in unknown:
        if name in known:
            continue
        near = did_you_mean(name, [p for p in parameters if p != rest.name])
        if _declared(rest):
            raise ArgumentTypeError(
                f"batch: {forward} takes {name!r} by **{rest.name}, which does not declare it{near}"
            )
        warnings.warn(
            f"batch: {forward} takes {name!r} by **{rest.name}, but no module reads it, so that the estimate does not "
            f"include it{near}",
            EstimateWarning,
            stacklevel=4,
        )


def _names_in(model: nn.Module) -> Iterator[str]:
    """Names that a forward in the model takes as a parameter, declares in an annotation, or has as a constant in its code,
    as in ``kwargs["x"]``."""
    for kind in {type(module) for module in model.modules()}:
        forward = inspect.unwrap(kind.forward)
        for parameter in inspect.signature(forward).parameters.values():
            yield parameter.name
            yield from _declared(parameter)
        code = getattr(forward, "__code__", None)
        if isinstance(code, types.CodeType):
            yield from (constant for constant in code.co_consts if isinstance(constant, str))


def _declared(parameter: inspect.Parameter) -> tuple[str, ...]:
    """The names of ``**kwargs: Unpack[SomeTypedDict]``; none for other parameters."""
    annotation: Any = parameter.annotation
    if parameter.kind is not parameter.VAR_KEYWORD or get_origin(annotation) not in _UNPACK:
        return ()
    (declared,) = get_args(annotation)
    return tuple(declared.__annotations__)


def skeleton_of(model: nn.Module, without: Iterable[nn.Module] = ()) -> nn.Module:
    """A copy whose parameters are on the meta device, and buffers, unless they have values and are small. Modules of
    ``without`` become empty ones.

    Raises PlanError for a model that has been parallelized.
    """
    if Runtime.of(model) is not None:
        raise EstimateError(
            f"this {type(model).__name__} has been parallelized: estimate with a model that has not been (on the meta "
            "device, it takes no memory), and compare with estimate.compare(model)"
        )
    memo: dict[int, Any] = {id(module): nn.Module() for module in without}
    for parameter in model.parameters():
        meta = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        if buffer.is_meta or is_deferred(buffer) or buffer.device.type != "cpu" or buffer.numel() > 1 << 20:
            memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    return copy_model(model, memo)


def make_batch(model: nn.Module, batch: Mapping[str, Any], *, with_labels: bool = True) -> dict[str, Any]:
    """Tensors for ``batch``, whose values are tensors (on any device), shapes, or anything else that the forward takes.

    Raises TypeError for a batch that is no mapping, and for names that the model cannot use (:func:`check_names`).

    Args:
        model: which forward takes them.
        batch: by name.
        with_labels: add labels for models of transformers, which have a loss with them. False where the caller computes the
            loss: the model's own would take time and memory that the run does not.
    """
    if not isinstance(batch, Mapping):
        raise ArgumentTypeError(
            f"batch is {kind_of(batch)}; pass a mapping from names of the forward's inputs to shapes"
        )
    check_names(model, batch)
    parameters = inspect.signature(model.forward).parameters
    found = {name: _tensor(name, value) for name, value in batch.items()}
    config = getattr(model, "config", None)
    if with_labels and config is not None and "labels" in parameters and "labels" not in found and "input_ids" in found:
        found["labels"] = torch.empty_like(found["input_ids"])
    if config is not None and "use_cache" in parameters:
        found.setdefault("use_cache", False)
    meta = {n: v for n, v in found.items() if isinstance(v, torch.Tensor) and v.is_meta}
    return {**found, **random_inputs(meta, model, 0)}


def _tensor(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.device.type == "cpu" else torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, tuple | list) and value and all(type(n) is int for n in value):
        return torch.empty(value, dtype=dtype_of_input(name), device="meta")
    return value


def loss_of(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """The model's own loss, else the mean of its first floating-point output."""
    own = getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    values = (
        list(output.values())
        if isinstance(output, Mapping)
        else list(output)
        if isinstance(output, tuple | list)
        else [output]
    )
    first = next((x for x in values if isinstance(x, torch.Tensor) and x.is_floating_point()), None)
    if first is None:
        raise ArgumentTypeError(
            f"the forward returns {type(output).__name__} without a loss; pass loss=, a function of the output and "
            "the batch"
        )
    return first.float().mean()


# Repeated blocks of a model: one stands for several equal ones that follow each other.


def first_and_last_of(model: nn.Module, repeats: tuple[Repeats, ...]) -> nn.Module:
    """A copy of ``model`` without memory and without the modules of the runs between the first and the last; the rest keep
    their names."""
    left_out = [(run.path, name) for run in repeats for name in run.names[1:-1]]
    found = skeleton_of(model, [getattr(model.get_submodule(path), name) for path, name in left_out])
    for path, name in left_out:
        del found.get_submodule(path)._modules[name]
    return found


def typical_runs(repeats: tuple[Repeats, ...], seen: Rehearsal) -> tuple[Repeats, ...]:
    """The same runs, each without its first module if that one is not like the others: parts of it were called from
    elsewhere, or it communicated otherwise than the last one. The second one then stands for those that are left out.

    Args:
        repeats: runs of equal modules, of which the first and the last ones have run.
        seen: what they did.
    """
    return tuple(
        replace(run, names=run.names[1:]) if len(run.names) > 3 and _is_special(run, seen) else run for run in repeats
    )


def _is_special(run: Repeats, seen: Rehearsal) -> bool:
    """Whether the first module is."""
    first, last = (_what_it_did(run, name, seen) for name in (run.names[0], run.names[-1]))
    is_inside = [(path, caller) for path, caller in seen.calls if run.holds(path) and path != run.stand_in]
    return first != last or any(not run.holds(caller) for _, caller in is_inside)


def _what_it_did(run: Repeats, name: str, seen: Rehearsal) -> Counter[Any]:
    """Collectives of activations of one module, and how its gradients are reduced beside a unit."""
    own = f"{run.path}.{name}.".lstrip(".")
    moved = (one for one in seen.collectives if not is_of_parameters(one.requester))
    found = Counter(
        (one.op, one.axes, one.bytes, one.requester.replace(own, "")) for one in moved if own in one.requester
    )
    gradients = (one for one in seen.in_buckets if one.name.startswith(own))
    return found + Counter((one.name.removeprefix(own), one.axes, one.is_scattered) for one in gradients)
