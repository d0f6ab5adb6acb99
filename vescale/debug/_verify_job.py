"""The processes of ``verify``: one device, which computes the bounds, and the ranks of a mesh, which compare their
values."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from vescale._parallelize import parallelize
from vescale.checks import unchecked
from vescale.compat import map_tensors, no_torch_function, tensors_in
from vescale.errors import ArgumentTypeError, kind_of
from vescale.ir import Local, Program, lower
from vescale.plans import Entry, MeshAxes, Plan

# Records what a training step computes, tensor by tensor, in the order of execution, with the same names on one device
# and on a mesh.


class Value:
    """A recorded value.

    Attributes:
        step: of the training.
        kind: ``parameter``, ``buffer``, ``generator``, ``output``, ``dropout``, ``loss``, ``gradient``,
            ``parameter gradient``, ``optimizer`` or ``stepped`` (a parameter or buffer after the step).
        module: path of the module that it belongs to.
        what: its name in the module: ``<out:0>``, the name of a parameter.
        op: the op that computed it, if known.
    """

    __slots__ = ("kind", "module", "op", "step", "what")

    def __init__(self, step: int, kind: str, module: str, what: str, op: str = "") -> None:
        self.step, self.kind, self.module, self.what, self.op = step, kind, module, what, op

    @property
    def key(self) -> str:
        return f"{self.step}|{self.kind}|{self.module}|{self.what}"

    @property
    def is_exact(self) -> bool:
        """Whether it must be equal bit for bit, because no sum over ranks has contributed to it."""
        return self.kind in ("generator", "dropout") or (self.step == 0 and self.kind in ("parameter", "buffer"))


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

Take = Callable[[Value, torch.Tensor], None]


class Recorder:
    """Hooks on a model that pass each whole value to ``take``. On a mesh, this communicates."""

    def __init__(
        self, model: nn.Module, take: Take, *, perturb: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        self.step = 0
        self._take, self._perturb = take, perturb
        self._calls: Counter[str] = Counter()
        self._handles = []
        for path, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._before(path), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(path)))

    def remove(self) -> None:
        """Take the hooks away: some packages share modules (activations) among all models of a process."""
        for handle in self._handles:
            handle.remove()

    def begin(self, step: int) -> None:
        self.step = step
        self._calls.clear()

    def take(self, kind: str, module: str, what: str, tensor: torch.Tensor, op: str = "") -> None:
        with no_torch_function(), torch.no_grad():
            self._take(Value(self.step, kind, module, what, op), whole(tensor))

    def take_generator(self, module: str, what: str) -> None:
        digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).digest()[:8]
        with no_torch_function():  # no tensor of the model
            made = torch.tensor(list(digest), dtype=torch.uint8)
        self.take("generator", module, what, made)

    def _before(self, path: str) -> Callable[..., Any]:
        """Inputs that need a gradient are replaced by views, so that gradients of other uses of the same tensor are not
        included."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            call, views = _text(self._calls[path]), {}

            def view(tensor: torch.Tensor) -> torch.Tensor:
                if not (torch.is_grad_enabled() and tensor.requires_grad and tensor.is_floating_point()):
                    return tensor
                if id(tensor) not in views:  # models compare inputs by identity
                    with no_torch_function():
                        views[id(tensor)] = tensor, tensor.view_as(tensor)
                    self._watch(path, f"<in:{len(views) - 1}>{call}", views[id(tensor)][1])
                return views[id(tensor)][1]

            return map_tensors(view, args), map_tensors(view, kwargs)

        return hook

    def _after(self, path: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            call = self._calls[path]
            self._calls[path] += 1
            if self._perturb is not None:
                perturb = self._perturb
                with no_torch_function():
                    output = map_tensors(lambda t: perturb(t) if t.is_floating_point() else t, output)
            for index, tensor in enumerate(tensors_in(output)):
                what = f"<out:{index}>{_text(call)}"
                op = tensor.grad_fn.name() if tensor.grad_fn is not None else type(module).__name__
                if isinstance(module, _DROPOUTS) and module.training:
                    with no_torch_function(), torch.no_grad():
                        self.take("dropout", path, what, (whole(tensor) == 0) & (whole(args[0]) != 0), op)
                self.take("output", path, what, tensor, op)
                self._watch(path, what, tensor)
            self.take_generator(path, f"after call {call}")
            return output if self._perturb is not None else None

        return hook

    def _watch(self, path: str, what: str, tensor: torch.Tensor) -> None:
        """Record the gradient of a tensor when it is complete."""
        if not (torch.is_grad_enabled() and tensor.requires_grad and tensor.is_floating_point()):
            return

        def took(grad: torch.Tensor) -> torch.Tensor | None:
            self.take("gradient", path, f"gradient of {what}", grad)
            if self._perturb is not None:
                return self._perturb(grad)
            return None

        with no_torch_function():
            tensor.register_hook(took)


def run_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recorder: Recorder,
    step: int,
    batch: Any,
    loss_fn: Callable[[Any], torch.Tensor] | None,
) -> None:
    """One step of training, of which every value is passed to the recorder."""
    recorder.begin(step)
    if step == 0:
        for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in tensors:
                module, _, own = name.rpartition(".")
                recorder.take(kind, module, own, tensor)
    recorder.take_generator("", "before the step")
    optimizer.zero_grad()
    with torch.enable_grad():
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
        loss = loss_of(output, loss_fn)
    recorder.take("loss", "", "loss", loss.detach())
    loss.backward()
    named = list(model.named_parameters())
    for name, parameter in reversed(named):
        if parameter.grad is not None:
            module, _, own = name.rpartition(".")
            recorder.take("parameter gradient", module, f"{own}.grad", parameter.grad)
    optimizer.step()
    for name, parameter in named:
        module, _, own = name.rpartition(".")
        for what, tensor in _tensor_state(optimizer, parameter):
            recorder.take("optimizer", module, f"{own} {what}", tensor)
    for name, tensor in (*named, *model.named_buffers()):
        module, _, own = name.rpartition(".")
        recorder.take("stepped", module, f"{own} after the step", tensor)
    recorder.take_generator("", "after the step")


def loss_of(output: Any, loss_fn: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    """The scalar to differentiate: ``loss_fn(output)``; else the output's loss; else a scalar output; else a sum with a
    different gradient for every element.

    Raises TypeError if there is no tensor to start from.
    """
    if loss_fn is not None:
        return loss_fn(output)
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    tensors = [tensor for tensor in tensors_in(output) if tensor.is_floating_point() and tensor.requires_grad]
    if not tensors:
        raise ArgumentTypeError(
            f"the model returns {kind_of(output)} without a floating point tensor that needs a gradient; pass loss_fn="
        )
    if tensors[0].ndim == 0:
        return tensors[0]
    return (tensors[0] * tensors[0].sin() + tensors[0]).mean()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The global tensor as a plain one; collective for a DTensor that is not replicated."""
    found = tensor.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found


def _tensor_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for what, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, torch.Tensor):
            yield what, value


def _text(call: int) -> str:
    return "" if call == 0 else f" of call {call}"


_SAFETY = 4.0
_SAMPLES = 2


@dataclass(frozen=True)
class Job:
    """One verification; picklable. ``entries`` are a plan's, or a function of the mesh that returns the plan."""

    model_fn: Callable[[], nn.Module]
    entries: tuple[Entry, ...] | Callable[[Any], Plan]
    batch: Any
    axes: MeshAxes
    loss_fn: Callable[[Any], torch.Tensor] | None
    optimizer_fn: Callable[[Any], torch.optim.Optimizer] | None
    num_steps: int
    seed: int
    timeout: float
    reference: str = ""
    """File with what one device computed, written by the first verification of several."""


@dataclass(frozen=True)
class Divergence:
    """The first value, in the order of execution, that differs from one device's.

    Attributes:
        step: of the training, from 0.
        kind, module, what, op: see :class:`vescale.debug.Value`.
        rank: the first rank on which it differs.
        index: of the first element that differs.
        found, expected: that element; or the shapes or dtypes, if those differ.
        difference, bound: the largest absolute difference, and the largest that another order of additions explains.
        entries: instructions and plan entries that govern the value, with their source.
    """

    step: int
    kind: str
    module: str
    what: str
    op: str
    rank: int
    index: tuple[int, ...]
    found: str
    expected: str
    difference: float
    bound: float
    entries: tuple[str, ...] = ()

    def text(self) -> str:
        where = f"{self.module}.{self.what}" if self.module else self.what
        op = f" ({self.op})" if self.op else ""
        limit = "must be bit-equal" if self.bound == 0 else f"a different order of additions explains {self.bound:.1e}"
        governed = "; ".join(self.entries) or "no entry of the plan: Replicate"
        return (
            f"{self.kind} {where}{op} of step {self.step}, on rank {self.rank}: element {list(self.index)} is {self.found}, "
            f"expected {self.expected}; the largest difference is {self.difference:.1e}, and {limit}. "
            f"Governed by {governed}"
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "index": list(self.index), "entries": list(self.entries)}


@dataclass(frozen=True)
class Comparison:
    """The result of one rank: the first divergence, if there is one, with its position in the order of execution; the
    number of compared values of each kind; the largest difference of each kind, in units of its bound."""

    divergence: tuple[int, Divergence] | None
    counts: dict[str, int]
    worst: dict[str, float]


def _start(job: Job) -> tuple[nn.Module, Any]:
    torch.manual_seed(job.seed)
    model = job.model_fn()
    model.train()
    return model, map_tensors(torch.Tensor.clone, job.batch)


def _optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if job.optimizer_fn is not None:
        return job.optimizer_fn(parameters)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def run_one_device(job: Job) -> None:
    """Write the values of one device to ``job.reference``, with a bound for each value.

    The bound is the change of the value if every output and every gradient of a module is perturbed by one unit of
    rounding (the maximum of some samples: how the model amplifies errors), times the error of adding as many numbers as
    its longest sum has in another order, about sqrt(n) units, times a safety factor of 4.
    """
    values: dict[str, torch.Tensor] = {}
    order: list[tuple[int, str, str, str, str]] = []

    def keep(value: Value, tensor: torch.Tensor) -> None:
        order.append((value.step, value.kind, value.module, value.what, value.op))
        values[value.key] = tensor.clone()

    _train(job, keep)
    moved: dict[str, float] = {}
    for sample in range(_SAMPLES):
        noise = torch.Generator().manual_seed(sample)

        def compare(value: Value, tensor: torch.Tensor) -> None:
            known = values.get(value.key)
            if known is not None and known.shape == tensor.shape and known.is_floating_point():
                moved[value.key] = max(moved.get(value.key, 0.0), _largest(tensor, known))

        def perturb(tensor: torch.Tensor, noise: torch.Generator = noise) -> torch.Tensor:
            signs = torch.randint(0, 2, tensor.shape, generator=noise).to(tensor.dtype) * 2 - 1
            return tensor * (1 + torch.finfo(tensor.dtype).eps * signs)

        _train(job, compare, perturb)
    longest = _longest_sum(values, job.batch)
    bounds = {}
    for key, tensor in values.items():
        if tensor.is_floating_point():
            unit = torch.finfo(tensor.dtype).eps
            size = float(tensor.abs().max()) if tensor.numel() else 0.0
            size = size if math.isfinite(size) else 0.0
            bounds[key] = _SAFETY * math.sqrt(longest) * (moved.get(key, 0.0) + unit * size)
    torch.save({"order": order, "values": values, "bounds": bounds}, job.reference)


def _train(job: Job, take: Any, perturb: Any = None) -> None:
    model, batch = _start(job)
    recorder = Recorder(model, take, perturb=perturb)
    optimizer = _optimizer(job, model)
    for step in range(job.num_steps):
        run_step(model, optimizer, recorder, step, batch, job.loss_fn)
    recorder.remove()


def _longest_sum(values: dict[str, torch.Tensor], batch: Any) -> int:
    """The length of the longest sum in the model: a dim of a parameter, or the rows of a batch."""
    dims = [max(tensor.shape, default=1) for key, tensor in values.items() if "|parameter|" in key]
    rows = [tensor.numel() for tensor in tensors_in(batch)]
    return max([1, *dims, *rows])


def run_mesh(job: Job, rank: int) -> Comparison:
    """Train as one rank, and compare with one device."""
    reference = torch.load(job.reference, weights_only=True, mmap=True)
    values, bounds = reference["values"], reference["bounds"]
    places = {Value(*fields).key: (number, fields) for number, fields in enumerate(reference["order"])}
    mesh = init_device_mesh("cpu", job.axes.sizes, mesh_dim_names=job.axes.names)
    if callable(job.entries):
        plan = job.entries(mesh)
    else:
        plan = Plan(mesh)
        for entry in job.entries:
            plan.add(entry)
    model, batch = _start(job)
    program = lower(plan, model)
    parallelize(model, plan)
    regions = tuple(f"{i.path}." for i in program if isinstance(i.op, Local))
    counts: Counter[str] = Counter()
    worst: dict[str, float] = {}
    first: list[tuple[int, Divergence]] = []
    taken: set[str] = set()

    def compare(value: Value, tensor: torch.Tensor) -> None:
        place = places.get(value.key)
        if place is None or _is_of_rank(value.kind, value.module, regions):
            return  # one device has nothing of that name: a gradient that nobody needs
        taken.add(value.key)
        counts[value.kind] += 1
        bound = 0.0 if value.is_exact else bounds.get(value.key, 0.0)
        found = _difference(value, place[1][4], rank, tensor, values[value.key], bound)
        if bound and tensor.shape == values[value.key].shape:
            worst[value.kind] = max(worst.get(value.kind, 0.0), _largest(tensor, values[value.key]) / bound)
        if found is not None and (not first or place[0] < first[0][0]):
            first[:] = [(place[0], found)]

    recorder = Recorder(model, compare)
    optimizer = _optimizer(job, model)
    with unchecked():  # what ranks have to have in common is found here, too, with the module that it begins in
        for step in range(job.num_steps):
            run_step(model, optimizer, recorder, step, batch, job.loss_fn)
    recorder.remove()
    for key, (number, (step, kind, module, what, op)) in places.items():
        must = kind in ("parameter gradient", "optimizer", "output", "loss")
        if must and key not in taken and not _is_of_rank(kind, module, regions) and (not first or number < first[0][0]):
            missing = Divergence(step, kind, module, what, op, rank, (), "nothing", "a tensor", math.inf, 0.0)
            first[:] = [(number, missing)]
    divergence = None
    if first:
        number, found = first[0]
        divergence = number, Divergence(**{**found.__dict__, "entries": _governing(program, found)})
    return Comparison(divergence, dict(counts), worst)


def _is_of_rank(kind: str, module: str, regions: tuple[str, ...]) -> bool:
    """Whether a value is computed inside of a region with local tensors (of experts, for example): it is this rank's part,
    of whatever tokens came there. What the region returns, and gradients of its parameters, are whole."""
    return kind in ("output", "gradient", "dropout") and bool(regions) and module.startswith(regions)


def _difference(
    value: Value, op: str, rank: int, found: torch.Tensor, expected: torch.Tensor, bound: float
) -> Divergence | None:
    def diverges(index: tuple[int, ...], own: str, other: str, difference: float) -> Divergence:
        return Divergence(
            value.step, value.kind, value.module, value.what, op, rank, index, own, other, difference, bound
        )

    if found.shape != expected.shape or found.dtype != expected.dtype:
        own, other = (f"{tuple(t.shape)} {t.dtype}" for t in (found, expected))
        return diverges((), own, other, math.inf)
    if bound == 0.0 or not found.is_floating_point():
        same = (found == expected) | ((found != found) & (expected != expected))
    else:
        same = ((found - expected).abs() <= bound) | (found == expected) | (found.isnan() & expected.isnan())
    if bool(same.all()):
        return None
    index = tuple(int(i) for i in (~same).nonzero()[0]) if same.ndim else ()
    own, other = (f"{t[index].item()!r}" for t in (found, expected))
    return diverges(index, own, other, _largest(found, expected))


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest absolute difference; infinite if only one of two elements is NaN."""
    if a.numel() == 0:
        return 0.0
    difference = (a.double() - b.double()).abs()
    difference = torch.where((a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b, 0.0, difference)
    return float(difference.nan_to_num(nan=math.inf).max())


def _governing(program: Program, found: Divergence) -> tuple[str, ...]:
    """Instructions for the value, else for the modules around it; with the lines of the plan."""
    own = [i for i in program if i.path == found.module]
    name = found.what.partition(" ")[0].removesuffix(".grad")
    path = f"{found.module}.{name}".strip(".")
    tensor = [i for i in program if f"{i.path}.{i.target}".strip(".") == path]
    target = "<in>" if "<in" in found.what else "<out>"
    boundary = [i for i in own if i.target == target]
    parameters = [
        i
        for i in program
        if f"{i.path}.{i.target}".rpartition(".")[0].strip(".") == found.module and i.source is not None
    ]
    chosen = tensor or [*boundary, *(i for i in parameters if i not in boundary)]
    around = found.module
    while not chosen and around:  # what it was made from comes from the modules around it
        around = around.rpartition(".")[0]
        chosen = [i for i in program if i.path == around and i.target == "<in>" and i.source is not None]
    texts = [f"`{i.text(program.axes)}`" + (f" of {i.source}" if i.source is not None else "") for i in chosen]
    return tuple(dict.fromkeys(texts))
