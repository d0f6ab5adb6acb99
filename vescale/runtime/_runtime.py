"""``Runtime``: what one parallelized model keeps beside its parameters."""

from __future__ import annotations

import bisect
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import (
    current_autograd_node,
    local_of,
    node_sequence,
    resume_compiling,
    sequence_number,
    tensors_in,
)
from vescale.ir import Attention, Factory, Program
from vescale.placements import RaggedShard
from vescale.plans import AttentionMethod, MeshAxes, PlanError
from vescale.runtime._active import Activation, Frame, activations, current
from vescale.runtime._sites import (
    ImplicitCommunicationError,
    ImplicitCommunicationWarning,
    ImplicitSite,
    calling_line,
    communicates,
    one_placement_text,
)

if TYPE_CHECKING:
    from vescale.runtime._gradient_hooks import GradientHooks

__all__ = ["Attribution", "Runtime", "Where", "checkpointed", "locate", "path_of_sequence"]

# What a model's own attention does with keys and values, and a cache with a window of them.
_OF_KEYS = ("aten.mm.", "aten.bmm.", "aten.baddbmm.", "aten.slice.")

# Backward looks a node up by its number; older steps than this many module entries are forgotten.
_TIMELINE_LENGTH = 200_000


class Runtime:
    """The state of one parallelized model: its program, and the implicit communication seen so far.

    Attributes:
        mesh: the DeviceMesh of every DTensor in the model.
        program: what was installed.
        strict: raise at the first implicit communication.
        sites: how often each implicit site communicated.
        gradients: of its parameters, and their reducer.
    """

    def __init__(self, program: Program, mesh: DeviceMesh, gradients: GradientHooks, *, strict: bool) -> None:
        self.mesh = mesh
        self.program = program
        self.strict = strict
        self.sites: dict[ImplicitSite, int] = {}
        self.replicated: tuple[Placement, ...] = (Replicate(),) * mesh.ndim
        self._factories = {
            instruction.path: tuple(instruction.op.placements)
            for instruction in program
            if isinstance(instruction.op, Factory)
        }
        self._attention = {i.path: i.op.methods for i in program if isinstance(i.op, Attention)}
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.gradients = gradients
        self._numbers: list[int] = []  # autograd sequence numbers at which the running module changed ...
        self._paths: list[str | None] = []  # ... and to which; None: outside the model
        self._knows_compiler = False
        _RUNTIMES.add(self)

    def adopt(self, module: nn.Module, path: str) -> None:
        """Take ``module``, called ``path`` in the model, with all that is in it: the model, a copy, or a part of one."""
        for name, part in module.named_modules():
            self._names[part] = f"{path}.{name}".strip(".")
        if not path:
            _BY_MODEL[module] = self
        self.gradients.adopt(module, path)
        self.gradients.attach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        """A copied model runs apart from the original; its modules are adopted when they are first called."""
        runtime = Runtime(self.program, self.mesh, self.gradients.of_copy(), strict=self.strict)
        return memo.setdefault(id(self), runtime)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a parallelized model cannot be pickled: its hooks belong to this process and its mesh; save "
            "model.state_dict() (torch.distributed.checkpoint), and parallelize a fresh model before loading"
        )

    @staticmethod
    def of(model: nn.Module) -> Runtime | None:
        """The runtime of a parallelized model."""
        return _BY_MODEL.get(model)

    @property
    def axes(self) -> MeshAxes:
        return self.program.axes

    @property
    def axis_names(self) -> tuple[str, ...]:
        return self.program.axes.names

    def plan_error(self, problem: str) -> PlanError:
        return PlanError(problem)

    def name_of(self, module: nn.Module) -> str:
        return self._names.get(module, type(module).__name__)

    def factory_placements(self) -> tuple[Placement, ...]:
        """Where tensors go that the running module makes: as the entry of the nearest module around it says.

        By name and not by call, so that a recomputed part of a forward finds what its forward found.
        """
        activation = current()
        path = activation.frames[-1].path if activation is not None else ""
        while path and path not in self._factories:
            path = path.rpartition(".")[0]
        placements = self._factories.get(path, self.replicated)
        return tuple(r if p is None else p for p, r in zip(placements, self.replicated))

    def attention_methods(self) -> tuple[AttentionMethod | None, ...]:
        """For each axis how attention works along it in the running module, as the nearest entry around it says."""
        activation = current()
        path = activation.frames[-1].path if activation is not None else ""
        methods: list[AttentionMethod | None] = [None] * self.mesh.ndim
        while True:
            said = self._attention.get(path, ())
            methods = [own if own is not None else outer for own, outer in zip(methods, said)] or methods
            if not path:
                return tuple(methods)
            path = path.rpartition(".")[0]

    # Where the thread is

    def enter(self, module: nn.Module, path: str, arguments: tuple[Any, ...]) -> Activation:
        """A module of this model starts its forward; the outermost one switches the model's function mode on."""
        stack = activations()
        if not stack or stack[-1].runtime is not self:
            if module not in self._names:
                self.adopt(module, path)
            self.gradients.attach()
            stack.append(Activation(self, self._contexts()))
        activation = stack[-1]
        activation.frames.append(Frame(module, path, arguments))
        self._mark(path)
        return activation

    def leave(self, module: nn.Module, output: Any) -> None:
        """The module's forward has ended, also by an exception (also one raised before :meth:`enter`)."""
        stack = activations()
        if not stack or stack[-1].runtime is not self:
            return
        activation = stack[-1]
        if not any(frame.module is module for frame in activation.frames):
            return
        while True:
            frame = activation.frames.pop()
            resume_compiling(frame.compiler)
            if frame.module is module:
                break
        if activation.frames:
            parent = activation.frames[-1]
            own = self.name_of(module)
            parent.results += [
                (own, local_of(t).data_ptr()) for t in tensors_in(output) if isinstance(t, DTensor) and not t.is_meta
            ]
            self._mark(parent.path)
        else:
            self._mark(None)
            stack.pop()
            activation.contexts.close()

    def warn_of_compiler(self, path: str) -> None:
        """Once for a model, on its first rank: the forward of a module is compiled, which has no effect."""
        if not self._knows_compiler and all(c == 0 for c in self.mesh.get_coordinate() or (1,)):
            warnings.warn(
                f"torch.compile around {f'the module {path!r} of ' if path else ''}a parallelized model has no effect: its "
                "forward runs as it is, with the same numbers; compile functions of local tensors inside of it instead",
                stacklevel=2,
            )
        self._knows_compiler = True

    def _contexts(self) -> ExitStack:
        from vescale.runtime._mode import RuntimeMode

        contexts = ExitStack()
        if torch.is_inference_mode_enabled():
            # There, composite ops reach DTensor whole, and its rules for them gather; without gradients they do not.
            contexts.enter_context(torch.inference_mode(False))
            contexts.enter_context(torch.no_grad())
        contexts.enter_context(RuntimeMode(self))
        return contexts

    @contextmanager
    def resumed(self, frame: Frame) -> Iterator[None]:
        """Inside ``frame``'s module again, after its forward: for the recomputation of a checkpointed function."""
        stack = activations()
        if stack and stack[-1].runtime is self:
            yield
            return
        stack.append(Activation(self, self._contexts(), [Frame(frame.module, frame.path, ())]))
        self._mark(frame.path)
        try:
            yield
        finally:
            self._mark(None)
            stack.pop().contexts.close()

    def _mark(self, path: str | None) -> None:
        number = sequence_number()
        if self._numbers and self._numbers[-1] == number:
            self._paths[-1] = path
            return
        self._numbers.append(number)
        self._paths.append(path)
        if len(self._numbers) > _TIMELINE_LENGTH:
            del self._numbers[: _TIMELINE_LENGTH // 2], self._paths[: _TIMELINE_LENGTH // 2]

    def path_of_node(self, number: int) -> str | None:
        """The module whose forward made the autograd node with this sequence number; None: not this model."""
        index = bisect.bisect_right(self._numbers, number) - 1
        if index < 0 or (index == len(self._numbers) - 1 and self._paths[index] is None):
            return None
        return self._paths[index]

    # Implicit communication

    def implicit(
        self,
        where: Where,
        op: str,
        operand: str,
        local: torch.Tensor | None,
        source: Sequence[Placement],
        target: Sequence[Placement],
        edit: str | None = None,
    ) -> None:
        """Count, report or refuse that ``op`` brings an operand from ``source`` to ``target``.

        Raises:
            ImplicitCommunicationError: in strict mode; on every rank of the mesh, before the communication.
        """
        sizes = tuple(self.mesh.shape)
        if not communicates(source, target, sizes):
            return
        operand, usual_edit = self._name_operand(where, operand, local, source, target)
        edit = edit or self._edit_of_keys(where, op, source, target) or usual_edit
        site = ImplicitSite(where.path, where.phase, op, operand, tuple(source), tuple(target), edit)
        if self.strict:
            raise ImplicitCommunicationError(_with_line(site).message(self.axes))
        seen = self.sites.get(site, 0)
        if seen == 0:
            site = _with_line(site)
            if all(c == 0 for c in self.mesh.get_coordinate() or (1,)):
                _warn(site, self.axes)
        self.sites[site] = seen + 1

    def _edit_of_keys(
        self, where: Where, op: str, source: Sequence[Placement], target: Sequence[Placement]
    ) -> str | None:
        """The plan line for keys and values where a model attends in its own code, and the plan has a method for it."""
        if where.phase != "forward" or not op.startswith(_OF_KEYS):
            return None
        planned = zip(self.axes, self.attention_methods(), source, target)
        moved = ", ".join(f"{axis}: R" for axis, method, own, wanted in planned if method is not None and own != wanted)
        return moved and (
            f"write `{where.path}.(k|v)_proj.<out>: {{{moved}}}`, or of whatever makes keys and values, in the plan's shard "
            "section: attention is the model's own code here, to which no method of an attention entry applies"
        )

    def _name_operand(
        self,
        where: Where,
        operand: str,
        local: torch.Tensor | None,
        source: Sequence[Placement],
        target: Sequence[Placement],
    ) -> tuple[str, str]:
        """What the operand is in the model's own words, and the plan line that would place it before the op."""
        changes = [(a, t) for a, s, t in zip(self.axes, source, target) if s != t]
        axis = next((a for a, s, t in zip(self.axes, source, target) if s != t and not s.is_replicate()), changes[0][0])
        placement = one_placement_text(dict(changes)[axis])
        prefix = f"{where.path}." if where.path else ""
        # A gradient that arrives in backward is that of the module's output.
        name, key = f"its operand '{operand}'", f"{prefix}<{'out' if operand.startswith('grad') else 'in'}>"
        frame = where.frame
        if local is not None and not local.is_meta and frame is not None:
            pointer = local.data_ptr()
            for parameter, value in frame.module.named_parameters(recurse=False):
                if isinstance(value, DTensor) and local_of(value).data_ptr() == pointer:
                    name, key = f"the parameter '{parameter}'", f"{prefix}{parameter}"
                    alone = _called_alone() if any(isinstance(p, RaggedShard) for p in source) else None
                    if alone is not None:
                        return name, (
                            f"write `units: ['{alone}']` in the plan: the module is called from outside of the unit that it "
                            "belongs to, whose parameters are whole only while it runs"
                        )
            for child, result in frame.results:
                if result == pointer:
                    name, key = f"the output of '{child}'", f"{child}.<out>"
            for index, value in enumerate(frame.arguments):
                if any(isinstance(t, DTensor) and local_of(t).data_ptr() == pointer for t in tensors_in(value)):
                    name, key = f"its input {index}", f"{prefix}<in:{index}>"
        return name, f"write `{key}: {{{axis}: {placement}}}` in the plan's shard section"


class Where:
    """The model and module that an op belongs to."""

    __slots__ = ("frame", "path", "phase", "runtime")

    def __init__(self, runtime: Runtime, path: str, phase: str, frame: Frame | None) -> None:
        self.runtime, self.path, self.phase, self.frame = runtime, path, phase, frame


def _called_alone() -> str | None:
    """The outermost running module that runs without the one that holds it (lists of modules never run)."""
    activation = current()
    frames = activation.frames if activation is not None else []
    running = {frame.path for frame in frames}
    for frame in frames[1:]:
        holder = frame.path.rpartition(".")[0]
        while holder and isinstance(frames[0].module.get_submodule(holder), nn.ModuleList | nn.ModuleDict):
            holder = holder.rpartition(".")[0]
        if holder not in running:
            return frame.path
    return None


def locate() -> Where | None:
    """Whose op this thread is running; None outside every parallelized model."""
    activation = current()
    if activation is not None:
        frame = activation.frames[-1]
        return Where(activation.runtime, frame.path, "forward", frame)
    node = current_autograd_node()
    if node is not None:
        number = node_sequence(node)
        for runtime in list(_RUNTIMES):
            path = runtime.path_of_node(number)
            if path is not None:
                return Where(runtime, path, "backward", None)
    return None


class Attribution:
    """The observer of :mod:`vescale.ops`: attributes ops to the model that runs them."""

    def running_module(self) -> str | None:
        where = locate()
        return where.path if where is not None else None

    def implicit_move(
        self,
        op: str,
        operand: str,
        local: torch.Tensor | None,
        source: Sequence[Placement],
        target: Sequence[Placement],
        edit: str | None,
    ) -> None:
        where = locate()
        if where is not None:
            where.runtime.implicit(where, op, operand, local, source, target, edit)


def path_of_sequence(number: int) -> str | None:
    """The module of any parallelized model whose forward made the autograd node with this sequence number."""
    return next((path for runtime in list(_RUNTIMES) if (path := runtime.path_of_node(number)) is not None), None)


def checkpointed(function: Callable[..., Any]) -> Callable[..., Any]:
    """What to checkpoint for ``function``: the same, run in the module that checkpoints it, also when recomputed."""
    activation = current()
    if activation is None:
        return function
    runtime, frame = activation.runtime, activation.frames[-1]

    @functools.wraps(function, updated=())
    def inside(*args: Any, **kwargs: Any) -> Any:
        with runtime.resumed(frame):
            return function(*args, **kwargs)

    return inside


def _with_line(site: ImplicitSite) -> ImplicitSite:
    values = {name: getattr(site, name) for name in site.__dataclass_fields__}
    return ImplicitSite(**{**values, "line": calling_line() if site.phase == "forward" else ""})


def _warn(site: ImplicitSite, axes: MeshAxes) -> None:
    """A warning at the model's line; each site is its own, so that Python's once-a-line rule hides none."""
    file, _, line = site.line.rpartition(":")
    message = ImplicitCommunicationWarning(site.message(axes))
    warnings.warn_explicit(message, ImplicitCommunicationWarning, file or "<backward>", int(line or 0))


_BY_MODEL: weakref.WeakKeyDictionary[nn.Module, Runtime] = weakref.WeakKeyDictionary()
# Only for finding the model that a backward node belongs to.
_RUNTIMES: weakref.WeakSet[Runtime] = weakref.WeakSet()
