"""What an optimizer holds and sends for each parameter: algorithm, owner, bytes of states and of a step."""

from __future__ import annotations

import math
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from vescale.agreement import Round, compare_descriptions
from vescale.checks import known_names
from vescale.compat import local_of, own_part
from vescale.compat.consoles import Console, Table
from vescale.errors import OptimizerError, OptimizerReportError

# What messages, reports and plans of owners call the parameters of an optimizer.


def shown_names(groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The names of each group's parameters: those that the optimizer was given, else those of the model that ``parallelize``
    or ``fully_shard`` knows, else their places. Where layers were sharded without the model around them, several have one
    name, and are told apart by their places."""
    known = known_names(p for group in groups if not _has_names(group) for p in group["params"])
    count = Counter(name for name, _ in known.values())
    shown = []
    for position, group in enumerate(groups):
        if _has_names(group):
            shown.append(list(group["param_names"]))
            continue
        found = []
        for place, parameter in enumerate(group["params"]):
            name, model = known.get(parameter, ("", ""))
            at = f"group {position}, parameter {place}"
            found.append(at if not name else name if count[name] == 1 else f"{at} ({name} of {model})")
        shown.append(found)
    return shown


def _has_names(group: Mapping[str, Any]) -> bool:
    """A list of parameters that was edited has other places than its names."""
    return bool(group.get("param_names")) and len(group["param_names"]) == len(group["params"])


def compare_parameters(described: Sequence[tuple[Sequence[int], str, str]]) -> None:
    """Compare an optimizer's parameters, ``(ranks that hold it, name, description)`` in its order, between their ranks.

    Communication: through the store, with each set of ranks.

    Raises OptimizerError on all of them where they differ.
    """
    together: dict[tuple[int, ...], list[tuple[str, str]]] = defaultdict(list)
    for ranks, name, text in described:
        if len(ranks) > 1:
            members = together[tuple(sorted(ranks))]
            members.append((f"{name} ({len(members)})", text))
    for ranks, members in sorted(together.items()):
        consensus = Round(ranks, "parameters of an optimizer")
        found = compare_descriptions({"parameters": members}, consensus, lambda: "planning an optimizer")
        if found is not None:
            raise OptimizerError(
                f"the optimizer's {found.text()}; pass the same parameters on every rank, in the same order and "
                "groups, and freeze the same ones"
            )


_WIDE = 100_000  # columns: names are never cut


@dataclass(frozen=True)
class ParameterReport:
    """One parameter of an optimizer, as this rank sees it.

    Attributes:
        name: the parameter's name, as the optimizer was given it (``param_names`` of its group), else as the model that
            ``parallelize`` or ``fully_shard`` knows has it, else its place, ``"group 0, parameter 3"``.
        algorithm: what updates it, for example ``"adamw8bit"``, ``"muon"``.
        owner: the global rank that computes its update whole; several where its blocks have different owners, in the
            blocks' order; None where every rank updates the part that it holds.
        state_bytes: bytes of its states on this rank; before the first step those that it will have.
        step_bytes: bytes that this rank receives for it in one step of the optimizer; 0 where nothing is sent.
    """

    name: str
    algorithm: str
    owner: int | tuple[int, ...] | None
    state_bytes: int
    step_bytes: int


@dataclass(frozen=True)
class OptimizerReport:
    """All parameters of an optimizer, in its order; ``str()`` is a table for people.

    Attributes:
        parameters: one entry for each.
    """

    parameters: tuple[ParameterReport, ...]

    @property
    def state_bytes(self) -> int:
        """Of all states on this rank."""
        return sum(one.state_bytes for one in self.parameters)

    @property
    def step_bytes(self) -> int:
        """What this rank receives in one step of the optimizer."""
        return sum(one.step_bytes for one in self.parameters)

    def table(self) -> Table:
        """The table, for ``rich.print``."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("parameter", "algorithm", "owner", "state bytes", "step bytes"):
            table.add_column(column, justify="right" if "bytes" in column else "left", no_wrap=True)
        for one in self.parameters:
            owner = "each rank's part" if one.owner is None else f"{one.owner}".strip("()")
            table.add_row(one.name, one.algorithm, owner, f"{one.state_bytes:,}", f"{one.step_bytes:,}")
        table.add_row("total", "", "", f"{self.state_bytes:,}", f"{self.step_bytes:,}", style="bold")
        return table

    def __str__(self) -> str:
        console = Console(width=_WIDE, markup=False, highlight=False, emoji=False, no_color=True)
        with console.capture() as capture:
            console.print(self.table())
        return "\n".join(line.rstrip() for line in capture.get().splitlines())


def report(optimizer: Optimizer, *, file: TextIO | None = None) -> OptimizerReport:
    """What ``optimizer`` holds and sends for each parameter; the first rank prints it as a table. No communication.

    Optimizers of :mod:`vescale.optim` report them. For others, existing states are counted, or else those that a step
    with zeros makes (on the meta device, unless the optimizer reads values). Their bytes of a step are 0 if they update
    element by element; for ``torch.optim.Muon``, which
    works on whole matrices, those of gathering each sharded matrix once in bfloat16, the least that it can need.

    Args:
        optimizer: any optimizer.
        file: where to print; None: standard output.

    Raises NotImplementedError for an optimizer without states whose step cannot be tried, for it needs a closure.
    """
    if hasattr(optimizer, "parameter_reports"):
        found = OptimizerReport(tuple(optimizer.parameter_reports()))
    else:
        found = OptimizerReport(tuple(_stock_reports(optimizer)))
    if not dist.is_initialized() or dist.get_rank() == 0:
        console = Console(file=file or sys.stdout, markup=False, highlight=False, emoji=False)
        if not console.is_terminal:
            console.width = _WIDE
        console.print(found.table())
    return found


def _stock_reports(optimizer: Optimizer) -> list[ParameterReport]:
    algorithm, found = type(optimizer).__name__.lower(), []
    for group, names in zip(optimizer.param_groups, shown_names(optimizer.param_groups)):
        for name, p in zip(names, group["params"], strict=True):
            if p in optimizer.state:
                num_bytes = _held_bytes(optimizer.state[p])
            else:
                num_bytes = _planned_bytes(optimizer, group, p) if p.requires_grad else 0
            sent = _gather_bytes(p) if algorithm == "muon" else 0
            found.append(ParameterReport(name, algorithm, None, num_bytes, sent))
    return found


def _held_bytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return own_part(state).nbytes
    if isinstance(state, dict):
        return sum(map(_held_bytes, state.values()))
    return sum(map(_held_bytes, state)) if isinstance(state, list | tuple) else 0


def _planned_bytes(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> int:
    """The states that one step makes for a tensor of this rank's part: on the meta device, or with zeros on the CPU for an
    optimizer that reads values."""
    try:
        return _states_after_step(optimizer, group, parameter, "meta")
    except Exception:  # whatever an optimizer does with tensors without values
        try:
            return _states_after_step(optimizer, group, parameter, "cpu")
        except Exception as error:
            raise OptimizerReportError(
                f"{type(optimizer).__name__} has no states yet, and its step with zeros fails "
                f"({type(error).__name__}: {error}); call report() after the first step"
            ) from error


def _states_after_step(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor, device: str) -> int:
    local = own_part(parameter)
    shape = local.shape if local.ndim == parameter.ndim else (local.numel(), *[1] * (parameter.ndim - 1))
    stand_in = torch.nn.Parameter(torch.zeros(shape, dtype=local.dtype, device=device))
    stand_in.grad = torch.zeros_like(stand_in)
    plain = {"foreach": False, "fused": False, "capturable": False}
    options = {key: plain.get(key, value) for key, value in group.items() if key not in ("params", "param_names")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        copy = type(optimizer)([stand_in], **_accepted(optimizer))
        copy.param_groups[0].update(options)
        copy.step()
    return _held_bytes(copy.state[stand_in])


def _accepted(optimizer: Optimizer) -> dict[str, Any]:
    """Arguments that some constructors demand."""
    return {"lr": 0.0} if "lr" in optimizer.defaults else {}


def _gather_bytes(parameter: torch.Tensor) -> int:
    if not isinstance(parameter, DTensor):
        return 0
    return (math.prod(parameter.shape) - local_of(parameter).numel()) * torch.bfloat16.itemsize


# Dtypes among the options of a group, as names: PyTorch's functions for state dicts gather no objects of other kinds.


def dtype_name(given: object, option: str) -> str:
    """``"float32"`` of ``torch.float32``; of a name the name. Raises ValueError for anything but a floating dtype."""
    name = str(given).removeprefix("torch.")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise OptimizerError(f"{option}={given}; pass a floating-point dtype")
    return name


def named_dtype(name: str | torch.dtype) -> torch.dtype:
    """Also of a dtype, which older state dicts have."""
    found = name if isinstance(name, torch.dtype) else getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
