"""Implicit moves of operands: counted for each site, warned of once, refused in strict mode."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import regex
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.checks import step_checks
from vescale.compat import local_of, tensors_in
from vescale.ir import Redistribute
from vescale.placements import RaggedShard, at_dim, shard_dim
from vescale.plans import MeshAxes
from vescale.runtime._activation import RunningModule, current_activation, locate
from vescale.runtime._implicit_site import (
    ImplicitCommunicationError,
    ImplicitCommunicationWarning,
    ImplicitSite,
    calling_line,
    communicates,
    one_placement_text,
    sent_bytes,
)

# The ops by which a model's own attention uses keys and values, or a window of a cache of them.
_OF_KEYS = ("aten.mm.", "aten.bmm.", "aten.baddbmm.", "aten.slice.")


class RuntimeObserver:
    """The :class:`vescale.ops.ModelObserver` of the runtime: attributes ops to models, and reports moves to them."""

    def running_module(self) -> str | None:
        running = locate()
        return running.path if running is not None else None

    def has_model(self, mesh: DeviceMesh) -> bool:
        return step_checks(mesh) is not None

    def implicit_move(
        self,
        op: str,
        operand: str | None,
        local: torch.Tensor | None,
        source: Sequence[Placement],
        target: Sequence[Placement],
        edit: str | None,
    ) -> None:
        """Count the move and warn of the first one at its site, if it communicates.

        Raises:
            ImplicitCommunicationError: in strict mode; on every rank of the mesh, before the communication.
        """
        running = locate()
        if running is None or not communicates(source, target, tuple(running.runtime.mesh.shape)):
            return
        runtime = running.runtime
        sizes = tuple(runtime.mesh.shape)
        moved = sent_bytes(local.numel() * local.element_size(), source, target, sizes) if local is not None else 0
        edit = edit or _edit_of_keys(running, op, source, target)
        operand, source, target, usual_edit = _name_operand(running, op, operand, local, tuple(source), tuple(target))
        site = ImplicitSite(
            running.path, running.phase, op, operand, source, target, edit or usual_edit, num_bytes=moved
        )
        if runtime.strict:
            raise ImplicitCommunicationError(_with_line(site).message(runtime.axes))
        count = runtime.sites.get(site, 0)
        if count == 0 and runtime.is_first_rank and _is_new(site, runtime.reported_edits):
            _warn(_with_line(site), runtime.axes)
        runtime.sites[site] = count + 1


_EDIT_TARGET = regex.compile(r"`(?:units: )?(.*?)(?:<(in|out).*?)?(?:: \{.*|\])`", regex.DOTALL)


def _is_new(site: ImplicitSite, known: set[tuple[str, str]]) -> bool:
    """Whether no entry has been proposed yet for the tensors that the site's would place. Backward follows from forward: an
    entry for either side of a module places the gradients of both."""
    found = _EDIT_TARGET.search(site.edit)
    path, side = (found[1], found[2] or "") if found is not None else (site.edit, "")
    key = (path, "" if site.phase == "forward" else "backward")
    if (path, "") in known and (site.phase == "backward" or (path, side) in known):
        return False
    if site.phase == "backward" and key in known:
        return False
    known |= {key, (path, side)}
    return True


def _edit_of_keys(
    running: RunningModule, op: str, source: Sequence[Placement], target: Sequence[Placement]
) -> str | None:
    """The plan entry for keys and values if a model attends in its own code, and the plan has a method for it."""
    if running.phase != "forward" or not op.startswith(_OF_KEYS):
        return None
    planned = zip(running.runtime.axes, running.runtime.attention_methods(running.path), source, target)
    moved = ", ".join(f"{axis}: R" for axis, method, own, wanted in planned if method is not None and own != wanted)
    pattern = running.runtime.pattern(running.path)
    return moved and (
        f"write `{pattern}.(k|v)_proj.<out>: {{{moved}}}`, or the same entry for the modules that compute keys and "
        "values, in the plan's shard section: the model implements attention itself, to which attention entries do "
        "not apply"
    )


_Placements = tuple[Placement, ...]


def _name_operand(
    running: RunningModule,
    op: str,
    operand: str | None,
    local: torch.Tensor | None,
    source: _Placements,
    target: _Placements,
) -> tuple[str, _Placements, _Placements, str]:
    """(The name of the operand in the model, its placements and those that are needed, in the dims of what is named, the
    plan entry that would place it before the op)."""
    axis = next((a for a, (s, t) in enumerate(zip(source, target)) if s != t and not s.is_replicate()), None)
    axis = next(a for a, (s, t) in enumerate(zip(source, target)) if s != t) if axis is None else axis
    pattern = running.runtime.pattern(running.path)
    prefix = f"{pattern}." if pattern else ""
    name, key = "an operand" if operand is None else f"its operand '{operand}'", None
    named: torch.Tensor | None = None  # what has the name, where that is known
    if operand is not None:  # a gradient that arrives in backward is that of the module's output
        key = _cut_by(running, axis) or f"<{'out' if operand.startswith('grad') else 'in'}>"
        key = f"{prefix}{key}"
    frame = running.frame
    if local is not None and not local.is_meta and frame is not None:
        pointer = local.data_ptr()  # 0 without elements: what has the same placements then
        for parameter, value in frame.module.named_parameters(recurse=False):
            if (
                isinstance(value, DTensor)
                and local_of(value).data_ptr() == pointer
                and (pointer or value.placements == source)
            ):
                name, key, named = f"the parameter '{parameter}'", f"{prefix}{parameter}", local_of(value)
                outside = _called_outside_of_its_unit() if any(isinstance(p, RaggedShard) for p in source) else None
                if outside is not None:
                    edit = (
                        f"write `units: ['{outside}']` in the plan: the module is called from outside of its unit, "
                        "whose parameters are gathered only while the unit runs"
                    )
                    return name, source, target, edit
        for child, result in frame.results:
            if result == pointer != 0:
                name, key, named = f"the output of '{child}'", f"{running.runtime.pattern(child)}.<out>", None
        for index, value in enumerate((*frame.args, *frame.kwargs.values())):
            for t in tensors_in(value):
                if isinstance(t, DTensor) and local_of(t).data_ptr() == pointer != 0:
                    name, key, named = f"its input {index}", f"{prefix}<in:{index}>", local_of(t)
    if key is None:
        edit = (
            "place its operands in the plan. To avoid it, register a rule for the op, "
            f"`vescale.ops.register_rule(torch.ops.{op}, rule)`; there is none yet for parts of its operands"
        )
        return name, source, target, edit
    wanted = target[axis]
    if named is not None and local is not None:
        dims = _dims_in(named, local)
        if all(shard_dim(p) in dims for p in (*source, *target) if shard_dim(p) is not None):
            source, target = (_in_dims(placements, dims) for placements in (source, target))
            wanted = target[axis]
        else:
            name, named = f"a view of {name}", None
    if isinstance(wanted, Shard) and (named is None or (wanted.dim == 0 and "<" in key)):  # which would cut the batch
        wanted = Replicate()
    if named is None and _is_placed(running, key, axis, wanted):
        edit = (
            f"compute the operand of {op} in a separate module, whose output an entry can place: it is created inside "
            "this module, where no entry can name it"
        )
        return name, source, target, edit
    edit = f"write `{key}: {{{running.runtime.axes.names[axis]}: {one_placement_text(wanted)}}}` in the plan's shard section"
    return name, source, target, edit


def _cut_by(running: RunningModule, axis: int) -> str | None:
    """Of what a module made an operand: an input, else a parameter of its own, that is not whole along ``axis``; None: the
    module does not run, or has neither."""
    if running.frame is None:
        return None
    inputs = [
        (f"<in:{i}>", t)
        for i, x in enumerate((*running.frame.args, *running.frame.kwargs.values()))
        for t in tensors_in(x)
    ]
    for key, x in (*inputs, *running.frame.module.named_parameters(recurse=False)):
        if isinstance(x, DTensor) and not x.placements[axis].is_replicate():
            return "<in>" if key.startswith("<") else key
    return None


def _is_placed(running: RunningModule, key: str, axis: int, wanted: Placement) -> bool:
    """Whether an entry for all inputs, or all outputs, of the running module says so."""
    own = running.runtime.instructions.get(running.path)
    if own is None or not key.endswith(("<in>", "<out>")):
        return False
    ops = [placing.instruction.op for placing in (own.inputs if key.endswith("<in>") else own.outputs)]
    return any(isinstance(op, Redistribute) and op.dst[axis] == wanted for op in ops)


def _dims_in(named: torch.Tensor, view: torch.Tensor) -> dict[int, int]:
    """By dims of a view of ``named`` that begins where that does: the dims there with the same size and stride."""
    own = {(size, stride): dim for dim, (size, stride) in enumerate(zip(named.shape, named.stride()))}
    seen = enumerate(zip(view.shape, view.stride()))
    return {dim: own[key] for dim, key in seen if key in own}


def _in_dims(placements: _Placements, dims: dict[int, int]) -> _Placements:
    return tuple(p if (dim := shard_dim(p)) is None else at_dim(p, dims[dim]) for p in placements)


def _called_outside_of_its_unit() -> str | None:
    """The outermost running module whose parent does not run (lists of modules never do)."""
    activation = current_activation()
    model = activation.runtime.root if activation is not None else None
    if activation is None or model is None:
        return None
    frames = activation.frames
    running = {frame.path for frame in frames}
    for frame in frames[1:]:
        parent = frame.path.rpartition(".")[0]
        while parent and isinstance(_module_at(model, parent), nn.ModuleList | nn.ModuleDict):
            parent = parent.rpartition(".")[0]
        if parent not in running:
            return frame.path
    return None


def _module_at(model: nn.Module, path: str) -> nn.Module | None:
    """None: another module is there now than when the model was parallelized (PEFT wraps them)."""
    module: nn.Module | None = model
    for name in path.split("."):
        module = module._modules.get(name) if module is not None else None
    return module


def _with_line(site: ImplicitSite) -> ImplicitSite:
    return replace(site, line=calling_line() if site.phase == "forward" else "")


def _warn(site: ImplicitSite, axes: MeshAxes) -> None:
    """A warning at the model's line; each site has its own text, so that Python's once-a-line rule hides none."""
    file, _, line = site.line.rpartition(":")
    message = ImplicitCommunicationWarning(site.message(axes))
    warnings.warn_explicit(message, ImplicitCommunicationWarning, file or "<backward>", int(line or 0))
