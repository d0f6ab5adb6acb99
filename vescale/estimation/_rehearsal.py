"""``rehearse``: some steps of one rank of a parallelized model, with the engine's own code and without numbers."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale._parallelize import parallelize
from vescale.buffer import observe_allocations
from vescale.checks import unchecked
from vescale.comm import CommRecord, record_comms
from vescale.compat import local_of, note
from vescale.compat.simulated_ranks import fake_world
from vescale.estimation._bucket_gradients import BucketGradient, bucket_gradients, gradients_beside_units
from vescale.estimation._memory_log import Instant, MemoryLog, OpCosts, tensors_in
from vescale.estimation._stages import follow_stages
from vescale.estimation._unfilled import Routing, UnfilledTensors
from vescale.fsdp import state_of, values_are_of_no_interest
from vescale.ir import Local, Repeats
from vescale.plans import CheckpointEntry, MeshAxes, Plan
from vescale.rng import counting_draws
from vescale.runtime import Runtime, TokenExchange, current_activation, locate, observe_offloaded

# Expert ids of tokens that other ranks would send: those of the tokens that this rank sends to itself.


@contextlib.contextmanager
def balanced_tokens(routing: Routing) -> Iterator[None]:
    """Inside, an exchange of tokens among ranks that do not exist brings, from each of them, ids like the own ones."""
    original = TokenExchange.dispatch

    def dispatch(exchange: TokenExchange, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        received = original(exchange, *parts)
        found = []
        for part, there in zip(parts, received):
            if not part.is_floating_point() and len(there):
                first = sum(exchange.send[: exchange.group.index])
                own = exchange.rows[first : first + exchange.send[exchange.group.index]]
                rows = part[own if len(own) else exchange.rows]
                if len(rows):
                    there = rows[torch.arange(len(there)) % len(rows)]
            found.append(there)
        return tuple(found)

    TokenExchange.dispatch = dispatch  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        TokenExchange.dispatch = original  # type: ignore[method-assign]


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[[Any, Mapping[str, Any]], torch.Tensor]


@dataclass(frozen=True)
class StateTensor:
    """A tensor of the optimizer's state of a parameter."""

    num_bytes: int
    numel: int
    parameter_numel: int
    module: str | None


@dataclass
class Rehearsal:
    """What was seen.

    Attributes:
        log: all memory.
        kinds: by number of the storage, the category and the path of the module it belongs to.
        holders: of gradients, by number of the storage and name of the parameter, the module and the bytes in it.
        copies: of tensors in other dtypes: by number of the storage, that of what was copied.
        calls: paths of modules that ran, each with that of the module which called it.
        costs: of the ops of the last step.
        collectives: of the last step.
        states: of the optimizer.
        trained: elements that the optimizer gets, by the path of their module.
        in_buckets: gradients that the model's reducer completes; ``beside_units``: of parameters of units, those that are in
            no unit's buffer.
        num_steps: how many steps have run.
        has_host: whether what is offloaded is in another memory.
    """

    log: MemoryLog
    num_steps: int
    has_host: bool = False
    kinds: dict[int, tuple[str, str | None]] = field(default_factory=dict)
    holders: dict[int, dict[str, tuple[str, int]]] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    calls: set[tuple[str, str]] = field(default_factory=set)
    costs: OpCosts = field(default_factory=OpCosts)
    collectives: list[CommRecord] = field(default_factory=list)
    states: list[StateTensor] = field(default_factory=list)
    trained: dict[str, int] = field(default_factory=dict)
    in_buckets: list[BucketGradient] = field(default_factory=list)
    beside_units: list[BucketGradient] = field(default_factory=list)


@dataclass
class _Place:
    """Where the run is. ``calls``: as of a rehearsal.

    What runs between the first two modules of a run of equal ones counts as the first one's, as often as modules are left
    out: a forward does it between all of them.
    """

    repeats: Sequence[Repeats] = ()
    step: int = -1
    phase: str = "start"
    stage: int | None = None
    microbatch: int | None = None
    calls: set[tuple[str, str]] = field(default_factory=set)
    _last: dict[tuple[Any, str, str], tuple[bool, str | None]] = field(default_factory=dict)
    """By forward, phase and run of modules: whether the first one ran last, or the one after it; and the caller's path."""

    def __call__(self) -> Instant:
        phase, path, activation = self.phase, None, None
        if phase in ("backward", "weights"):
            activation = current_activation()
            if activation is not None:
                phase, path = "recompute", _path(activation)
            else:
                found = locate()
                path = found.path if found is not None else None
        elif phase == "forward":
            activation = current_activation()
            phase, path = ("forward", _path(activation)) if activation is not None else ("loss", None)
            if activation is not None and len(activation.frames) > 1:
                self.calls.add((str(path), str(activation.frames[-2].path)))
        elif phase == "communication":  # before the first step of a pipeline, a trace of all modules
            from vescale.pipeline import current_run  # `vescale lint` does not wait for it

            path = getattr(current_run(), "inside", None)
        instant = Instant(self.step, phase, path, self.stage, self.microbatch)
        callers = [] if activation is None else [str(frame.path) for frame in activation.frames]
        return instant if path is None else instant._replace(module=self._counted(instant, path, callers))

    def _counted(self, instant: Instant, path: str, callers: list[str]) -> str:
        is_backward = instant.phase in ("backward", "weights")
        for run in self.repeats:
            key = (instant.run, "backward" if is_backward else instant.phase, run.stand_in)
            is_next = f"{path}.".startswith(f"{run.path}.{run.names[-1]}.".lstrip("."))
            if run.holds(path) or is_next:
                depth = len([caller for caller in callers if caller.startswith(f"{run.path}.".lstrip("."))])
                self._last[key] = is_next, None if is_backward or depth == len(callers) else callers[-depth - 1]
                return path
            is_after, caller = self._last.get(key, (not is_backward, None))
            if is_after is is_backward and (caller is None or caller in callers):
                return run.stand_in
        return path


def names_block(requester: str, repeats: Repeats) -> bool:
    """Whether a collective's requester is the block that stands for others, or inside of it."""
    named = f"{requester.replace(' ', '.').replace(':', '.')}."
    return repeats.stand_in in requester and f"{repeats.stand_in}." in named


def is_of_parameters(requester: str) -> bool:
    """Whether a collective moves parameters or their gradients, which compute hides."""
    return requester.startswith("bucket") or ("<" not in requester and ": " not in requester)


class _Located(list[CommRecord]):
    """Records, whose requesters tell for which module they count."""

    def __init__(self, place: _Place) -> None:
        super().__init__()
        self._place = place

    def append(self, record: CommRecord) -> None:
        module, requester = self._place().module, record.requester
        run = next((run for run in self._place.repeats if module == run.stand_in), None)
        if run is not None and not is_of_parameters(requester):
            is_named = any(
                names_block(requester, replace(run, names=(name,))) for name in (run.names[0], run.names[-1])
            )
            record = record if is_named else replace(record, requester=f"{module}: {requester}")
        super().append(record)


def _path(activation: Any) -> str:
    """Of the module that runs; the model's own while it begins or ends."""
    return str(activation.frames[-1].path) if activation.frames else ""


def rehearse(
    model: nn.Module,
    plan: Plan,
    axes: MeshAxes,
    rank: int,
    batch: Mapping[str, Any],
    make_optimizer: MakeOptimizer | None,
    loss: Loss,
    *,
    num_steps: int = 3,
    routing: Routing | None = None,
    repeats: Sequence[Repeats] = (),
    headers: dict[int, Any] | None = None,
    attention: contextlib.AbstractContextManager[Any] | None = None,
    has_host: bool = False,
) -> Rehearsal:
    """Run ``num_steps`` training steps of ``rank``. ``model`` is on the meta device, and is used up.

    ``repeats``: runs of modules of which the model has the first and the last. ``headers``: of a pipeline, of what enters
    each stage; empty: they are learned. ``attention``: of another device. ``has_host``: what is offloaded is in another
    memory than the device's.
    """
    place = _Place(repeats)
    log = MemoryLog(place)
    found = Rehearsal(log, num_steps, has_host=has_host, calls=place.calls)

    def offloaded(storage: torch.UntypedStorage) -> None:
        log.on_host.add(log.see(storage))

    watched: Any = observe_offloaded(offloaded) if has_host else contextlib.nullcontext()
    routing = routing or Routing()

    def note(op: Any, args: Any, kwargs: Any, result: Any) -> None:
        if op.overloadpacket.__name__ == "_to_copy":
            found.copies[log.see(result.untyped_storage())] = log.see(args[0].untyped_storage())
        if place.step == num_steps - 1:
            found.costs.add(place(), op, args, kwargs, result)

    saving = [e.path for e in plan.entries if isinstance(e, CheckpointEntry) and e.policy.kind in ("selective", "save")]

    @functools.cache
    def is_saving(module: str | None) -> bool:
        parts = (module or "").split(".")
        return any(path.matches(".".join(parts[:n])) for path in saving for n in range(len(parts) + 1))

    def note_on_dtensors() -> None:
        if place.step == num_steps - 1:
            here = place()
            found.costs.add_on_dtensors(here, is_saving(here.module))

    def note_crossings(number: int) -> None:
        if place.step == num_steps - 1:
            found.costs.add_host(place(), "crossing", number)

    mode = UnfilledTensors(log, routing, note, note_on_dtensors)

    def note_draw(name: str, local: torch.Tensor, skipped: int, num_spans: int) -> None:
        if local.is_floating_point():
            mode.forget(local)
        if place.step == num_steps - 1:
            on_host = (0, 0) if has_host else (skipped, num_spans)
            found.costs.add_draw(place(), name, local, *on_host)

    size = 1
    for n in axes.sizes:
        size *= n
    with (
        fake_world(size, rank),
        apart(),
        attention or contextlib.nullcontext(),
    ):  # the lock of worlds also serialises what apart changes in the process
        if headers is None:
            parallelize(model, plan)
        with mode, observe_allocations(log.resized), watched, balanced_tokens(routing), counting_draws(note_draw):
            with values_are_of_no_interest():
                model.to_empty(device="cpu")
            if headers is not None:  # a pipeline holds its parameters, which cannot be moved afterwards
                from vescale.pipeline import without_guesses

                with without_guesses():
                    parallelize(model, plan)
                follow_stages(model, place, headers)
            _watch_regions(model, note_crossings)
            inputs = {name: given(mode, value) for name, value in batch.items()}
            for value in inputs.values():
                if isinstance(value, torch.Tensor):
                    found.kinds[log.see(value.untyped_storage())] = ("input", None)
            parameters = [p for p in model.parameters() if p.requires_grad]
            optimizer = make_optimizer(parameters) if make_optimizer is not None and parameters else None
            for step in range(num_steps):
                place.step = step
                with record_comms() as ledger:
                    ledger.records = _Located(place)
                    _step(model, inputs, optimizer, loss, place, found)
                found.collectives = ledger.records
            place.phase = "start"
            found.states = list(_states(model, optimizer))
            found.in_buckets = bucket_gradients(model)
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    local = local_of(parameter) if isinstance(parameter, DTensor) else parameter
                    path = name.rpartition(".")[0]
                    found.trained[path] = found.trained.get(path, 0) + local.numel()
            log.is_closed = True
    return found


def _watch_regions(model: nn.Module, note: Callable[[int], None]) -> None:
    """``note`` is called with how many tensors enter or leave a local region: the module's own, its inputs and outputs."""
    runtime = Runtime.of(model)

    def crossed(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        note(sum(1 for _ in module.parameters()) + len(tensors_in(args, kwargs)) + len(tensors_in(output)))

    for instruction in runtime.program if runtime is not None else ():
        if isinstance(instruction.op, Local):
            model.get_submodule(instruction.path).register_forward_hook(crossed, with_kwargs=True)


def _step(
    model: nn.Module,
    inputs: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None,
    loss: Loss,
    place: _Place,
    found: Rehearsal,
) -> None:
    if "_pipeline_runner" in model.__dict__:
        place.phase = "communication"
        model.step(**inputs)  # type: ignore[operator]
    else:
        place.phase = "forward"
        output = model(**inputs)
        value = loss(output, inputs)
        del output
        place.phase = "backward"
        value.backward()
        del value
    place.phase = "optimizer"
    found.log.mark()
    classify(model, optimizer, found)
    found.beside_units = gradients_beside_units(model)
    if optimizer is not None:
        optimizer.step()
        classify(model, optimizer, found)
        optimizer.zero_grad()
    else:
        model.zero_grad()


def given(mode: UnfilledTensors, value: Any) -> Any:
    """An input of the model, whose floating-point numbers are not written."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        return torch.empty_like(value)
    return value.clone()


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """The program around sees neither random numbers, nor warnings, nor garbage collections."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), unchecked(), torch.enable_grad():
        warnings.simplefilter("ignore")
        with without_collections():
            yield


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Garbage collections look at all modules that are loaded, again and again."""
    was_collecting = gc.isenabled()
    note("estimation._rehearsal:process", "gc")
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()


def classify(model: nn.Module, optimizer: torch.optim.Optimizer | None, found: Rehearsal) -> None:
    """Note what memory belongs to parameters, gradients, optimizer and engine."""
    states = {path: state_of(module) for path, module in model.named_modules()}
    groups = [(path, group) for path, state in states.items() if state is not None for group in state.groups]
    if found.has_host:
        for _, group in groups:
            if group.at_rest.offloads:
                found.log.on_host |= {found.log.see(b.shards.local.untyped_storage()) for b in group.at_rest.buckets}

    def note(tensor: Any, category: str, path: str | None) -> None:
        local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
        if isinstance(local, torch.Tensor) and not local.is_meta:
            storage = local.untyped_storage()
            if storage.nbytes():
                found.kinds.setdefault(found.log.see(storage), (category, path))

    def note_storage(memory: Any, category: str, path: str | None) -> None:
        with contextlib.suppress(RuntimeError, AttributeError):  # it has never been allocated
            storage = memory.storage if category == "unsharded" else memory.local.untyped_storage()
            found.kinds.setdefault(found.log.see(storage), (category, path))

    for name, parameter in model.named_parameters():
        path = name.rpartition(".")[0]
        note(parameter, "parameters", path)
        is_on_host = _number(parameter, found) in found.log.on_host
        if parameter.grad is not None:
            note(parameter.grad, "gradients", path)
            local = local_of(parameter.grad) if isinstance(parameter.grad, DTensor) else parameter.grad
            number = found.log.see(local.untyped_storage())
            found.log.on_host |= {number} if is_on_host else set()
            found.holders.setdefault(number, {})[name] = path, local.numel() * local.element_size()
        for value in (optimizer.state.get(parameter, {}) if optimizer is not None else {}).values():
            note(value, "optimizer", path)
            if is_on_host and isinstance(value, torch.Tensor):
                found.log.on_host.add(_number(value, found))
    for name, buffer in model.named_buffers():
        note(buffer, "parameters", name.rpartition(".")[0])
    for path, group in groups:
        note_storage(group.memory.gathered, "unsharded", path)
        for bucket in group.buckets:
            with contextlib.suppress(AttributeError):  # before the first backward
                note_storage(bucket.unreduced.apart, "gradients", path)


def _number(tensor: torch.Tensor, found: Rehearsal) -> int:
    """Of its storage."""
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return found.log.see(local.untyped_storage())


def _states(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[StateTensor]:
    paths: dict[Any, str] = {parameter: name.rpartition(".")[0] for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        own = local_of(parameter) if isinstance(parameter, DTensor) else parameter
        for value in state.values():
            local = local_of(value) if isinstance(value, DTensor) else value
            if isinstance(local, torch.Tensor):
                num_bytes = local.numel() * local.element_size()
                yield StateTensor(num_bytes, local.numel(), own.numel(), paths.get(parameter))
