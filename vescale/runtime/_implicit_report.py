"""Implicit moves of operands: counted for each site, warned of once, refused in strict mode."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import regex
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.checks import step_checks
from vescale.compat import local_of, tensors_in
from vescale.placements import RaggedShard
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
        operand, usual_edit = _name_operand(running, op, operand, local, source, target)
        edit = edit or _edit_of_keys(running, op, source, target) or usual_edit
        sizes = tuple(runtime.mesh.shape)
        moved = sent_bytes(local.numel() * local.element_size(), source, target, sizes) if local is not None else 0
        site = ImplicitSite(
            running.path, running.phase, op, operand, tuple(source), tuple(target), edit, num_bytes=moved
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
        f"write `{pattern}.(k|v)_proj.<out>: {{{moved}}}`, or of whatever makes keys and values, in the plan's shard "
        "section: attention is the model's own code here, to which no method of an attention entry applies"
    )


def _name_operand(
    running: RunningModule,
    op: str,
    operand: str | None,
    local: torch.Tensor | None,
    source: Sequence[Placement],
    target: Sequence[Placement],
) -> tuple[str, str]:
    """(The name of the operand in the model, the plan entry that would place it before the op)."""
    changes = [(a, t) for a, s, t in zip(running.runtime.axes, source, target) if s != t]
    moving = (a for a, s, t in zip(running.runtime.axes, source, target) if s != t and not s.is_replicate())
    axis = next(moving, changes[0][0])
    wanted = dict(changes)[axis]
    placement = one_placement_text(wanted)
    pattern = running.runtime.pattern(running.path)
    prefix = f"{pattern}." if pattern else ""
    # A gradient that arrives in backward is that of the module's output.
    if operand is None:
        name, key = "an operand", None
    else:
        name, key = f"its operand '{operand}'", f"{prefix}<{'out' if operand.startswith('grad') else 'in'}>"
    frame = running.frame
    if local is not None and not local.is_meta and frame is not None:
        pointer = local.data_ptr()
        for parameter, value in frame.module.named_parameters(recurse=False):
            if isinstance(value, DTensor) and local_of(value).data_ptr() == pointer:
                name, key = f"the parameter '{parameter}'", f"{prefix}{parameter}"
                outside = _called_outside_of_its_unit() if any(isinstance(p, RaggedShard) for p in source) else None
                if outside is not None:
                    return name, (
                        f"write `units: ['{outside}']` in the plan: the module is called from outside of the unit that it "
                        "belongs to, whose parameters are whole only while it runs"
                    )
        for child, result in frame.results:
            if result == pointer:
                name, key = f"the output of '{child}'", f"{running.runtime.pattern(child)}.<out>"
        for index, value in enumerate((*frame.args, *frame.kwargs.values())):
            if any(isinstance(t, DTensor) and local_of(t).data_ptr() == pointer for t in tensors_in(value)):
                name, key = f"its input {index}", f"{prefix}<in:{index}>"
    if key is None:
        return name, (
            "place what it takes in the plan. To avoid it: give the op a rule, "
            f"`vescale.ops.register_rule(torch.ops.{op}, rule)`; none tells how it runs on parts of its operands"
        )
    if isinstance(wanted, Shard) and wanted.dim == 0 and "<" in key:  # DTensor's choice; it would cut the batch
        placement = "R"
    return name, f"write `{key}: {{{axis}: {placement}}}` in the plan's shard section"


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
