"""``verify``: the same model on one device and on meshes of local ranks, compared value by value."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vescale.comm import messages
from vescale.debug._verify_job import Divergence, Job, run_mesh, run_one_device
from vescale.debug._watchdog import hang_report
from vescale.errors import ProcessFailed, VerifyError
from vescale.plans import MeshAxes, Plan

MeshSizes = str | Mapping[str, int] | MeshAxes


@dataclass(frozen=True)
class MeshVerification:
    """The result on one mesh.

    Attributes:
        axes: the mesh.
        compared: the number of compared values of each kind on a rank.
        worst: for each kind, the largest difference in units of its bound.
        divergence: the first value that differs from one device's.
        error: why the ranks did not finish, if they did not.
        note: what of the plan was not run.
    """

    axes: MeshAxes
    compared: Mapping[str, int]
    worst: Mapping[str, float]
    divergence: Divergence | None = None
    error: str = ""
    note: str = ""

    @property
    def is_equal(self) -> bool:
        return self.divergence is None and not self.error

    def text(self) -> str:
        note = f". {self.note}" if self.note else ""
        if self.error:
            return f"{self.axes}: FAILED: {self.error}{note}"
        if self.divergence is not None:
            return f"{self.axes}: DIFFERENT: the first difference is {self.divergence.text()}{note}"
        counts = ", ".join(f"{count} {_plural(kind)}" for kind, count in self.compared.items())
        worst = max(self.worst.values(), default=0.0)
        explained = f"the largest difference is {worst:.2f} of the difference that the order of additions explains"
        return f"{self.axes}: EQUAL: {counts}; {explained}{note}"

    def to_json(self) -> dict[str, Any]:
        return {
            "mesh": dict(zip(self.axes.names, self.axes.sizes)),
            "verdict": "equal" if self.is_equal else "failed" if self.error else "different",
            "compared": dict(self.compared),
            "largest_difference_in_bounds": {
                kind: ratio if math.isfinite(ratio) else None for kind, ratio in self.worst.items()
            },
            "divergence": _finite(self.divergence.to_json()) if self.divergence is not None else None,
            "error": self.error or None,
            "note": self.note or None,
        }


@dataclass(frozen=True)
class Verification:
    """The results of one call of :func:`verify`; true if all meshes equal one device.

    Attributes:
        meshes: the result of each mesh.
    """

    meshes: tuple[MeshVerification, ...]

    @property
    def is_equal(self) -> bool:
        """Whether all meshes equal one device."""
        return all(mesh.is_equal for mesh in self.meshes)

    def __bool__(self) -> bool:
        return self.is_equal

    def __str__(self) -> str:
        return "\n".join(mesh.text() for mesh in self.meshes)

    def to_json(self) -> dict[str, Any]:
        """The results as plain data, as ``vescale verify --json`` prints them."""
        return {
            "verdict": "equal" if self.is_equal else "different",
            "meshes": [mesh.to_json() for mesh in self.meshes],
        }


def verify(
    model_fn: Callable[[], nn.Module],
    plan: Plan | Callable[[Any], Plan],
    batch: Any,
    meshes: Sequence[MeshSizes] | None = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    optimizer_fn: Callable[[Any], torch.optim.Optimizer] | None = None,
    steps: int = 2,
    seed: int = 0,
    timeout: float = 60.0,
) -> Verification:
    """Train on one device and on each mesh (local gloo processes), and compare every value.

    ===============================================  ==================================================================
    must be equal bit for bit                        within the bound
    ===============================================  ==================================================================
    initial parameters and buffers; the generator's  outputs of all modules, the loss, gradients of all modules' inputs
    state before and after each module's forward     and outputs, and of parameters; state of the optimizer and
    and each step; masks of dropout modules          parameters and buffers after each step
    ===============================================  ==================================================================

    Each rank compares gathered values with one device's, so that replicas that differ are found on their rank. The bound
    is derived from the model, see ``docs/debug.md``. All values of one step are kept: use a small batch, and a small
    configuration of a large model.

    Args:
        model_fn: builds the model; a function of a module that other processes can import (not a lambda).
        plan: the plan, whose axes are the meshes'; or a function of a module that returns one for a DeviceMesh.
        batch: arguments of the forward: a tensor, a tuple, or a dict of keywords.
        meshes: ``"dp=2,tp=2"``, ``{"tp": 4}``; axes that are left out have one rank. None: the plan's own.
        loss_fn: of the model's output; by default its loss, or a sum with a different gradient for every element.
        optimizer_fn: of a list of parameters; by default SGD with momentum.
        steps: of training; the second one sees the effects of the first.
        timeout: seconds after which a hanging collective ends the run on a mesh.
        seed: of parameters, data and dropout.

    Raises ValueError for meshes and plans that do not fit each other, TypeError for functions that other processes cannot
    import.
    """
    if steps < 1:
        raise VerifyError(f"verify: steps is {steps}; expected at least 1")
    own = plan.axes if isinstance(plan, Plan) else None
    chosen = [_axes(mesh, own) for mesh in (meshes if meshes is not None else [own] if own is not None else [])]
    if not chosen:
        raise VerifyError("verify: no mesh is given; pass meshes=['tp=2'], or a plan with sizes")
    for what, function in (
        ("model_fn", model_fn),
        ("loss_fn", loss_fn),
        ("optimizer_fn", optimizer_fn),
        ("plan", plan),
    ):
        if not isinstance(function, Plan):
            _check_importable(what, function)
    entries = plan.entries if isinstance(plan, Plan) else plan
    given = (batch,) if isinstance(batch, torch.Tensor) else batch
    with tempfile.TemporaryDirectory(prefix="vescale-verify-") as folder:
        job = Job(model_fn, entries, given, chosen[0], loss_fn, optimizer_fn, steps, seed, timeout)
        job = replace(job, reference=os.path.join(folder, "one device.pt"))
        runs = [_run(replace(job, axes=axes), folder) for axes in chosen]
    entry = plan.pipeline_entry if isinstance(plan, Plan) else None
    if entry is None:
        return Verification(tuple(runs))
    note = f"The plan's pipeline was not run: every rank of {entry.mesh!r} trained all layers, with one batch"
    return Verification(tuple(replace(one, note=note) for one in runs))


def _run(job: Job, folder: str) -> MeshVerification:
    first: tuple[int, Divergence] | None = None
    compared: dict[str, int] = {}
    worst: dict[str, float] = {}
    try:
        if not os.path.exists(job.reference):
            with contextlib.closing(messages(_one_device, 0, job, preload=("vescale.runtime",))) as received:
                for _ in received:
                    pass
        with contextlib.closing(
            messages(_mesh, math.prod(job.axes.sizes), job, preload=("vescale.runtime",))
        ) as received:
            for _, (found,) in received:
                compared = found.counts
                worst = {kind: max(ratio, worst.get(kind, 0.0)) for kind, ratio in found.worst.items()}
                if found.divergence is not None and (first is None or _before(found.divergence, first)):
                    first = found.divergence
    except ProcessFailed as failure:
        reports = sorted(Path(folder).glob("vescale-hang-*"))
        message = reports[-1].read_text().partition("\n")[0] if reports else str(failure).strip().rpartition("\n")[2]
        return MeshVerification(job.axes, compared, worst, error=message)
    return MeshVerification(job.axes, compared, worst, first[1] if first is not None else None)


def _before(a: tuple[int, Divergence], b: tuple[int, Divergence]) -> bool:
    return (a[0], a[1].rank) < (b[0], b[1].rank)


def _one_device(job: Job, rank: int, send: Any) -> None:
    run_one_device(job)


def _mesh(job: Job, rank: int, send: Any) -> None:
    if rank >= 0:
        hang_report(job.timeout, folder=os.path.dirname(job.reference))
        send((run_mesh(job, rank),))


def _axes(mesh: MeshSizes, own: MeshAxes | None) -> MeshAxes:
    found = MeshAxes.parse(mesh) if isinstance(mesh, str) else MeshAxes.of(mesh)
    if own is None:
        return found
    unknown = [name for name in found.names if name not in own.names]
    if unknown:
        raise VerifyError(f"verify: the plan has no axis {unknown[0]!r}; pass sizes of {', '.join(own.names)}")
    sizes = dict(zip(found.names, found.sizes))
    return MeshAxes.of({name: sizes.get(name, 1) for name in own.names})


def _check_importable(what: str, function: Any) -> None:
    import pickle

    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise VerifyError(
            f"verify: {what} is {function!r}, which other processes cannot import ({error}); define it at the top level of a "  # noqa: E501
            "module"
        ) from None


def _plural(kind: str) -> str:
    known = {
        "loss": "losses",
        "optimizer": "states of the optimizer",
        "generator": "generator states",
        "stepped": "parameters and buffers after a step",
    }
    return known.get(kind, f"{kind}s")


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
