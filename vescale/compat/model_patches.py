"""Patches of DTensor and activation checkpointing that call the hooks of parallelized models (:class:`ModelHooks`)."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint as checkpointing
from torch import nn
from torch._subclasses import meta_utils
from torch.autograd.function import BackwardCFunction
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import _dispatch as tensor_dispatch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.utils import rnn
from torch.utils.hooks import BackwardHook

from vescale.compat.autograd import DATA_VIEWS, await_broken_off_backward, without_transforms
from vescale.compat.containers import tensors_in
from vescale.compat.dispatch import DISPATCHER, take_over_mixed_ops
from vescale.compat.dtensor import DTensorSpec, TensorMeta, keeps_memory, make_dtensor, make_spec, spec_of
from vescale.compat.model_hooks import ASKED_GRADIENTS, CHECKPOINTED_APART, REFUSES_REENTRANT, ModelHooks
from vescale.compat.native_dispatch import answer_mixed_calls, native_require_current, write_through_python
from vescale.compat.op_info import is_view
from vescale.compat.patching import Changes
from vescale.errors import ForeignToolError

_ONCE_A_JOB = ("does not support alltoall yet", "operations will be performed. This is suboptimal")


def _on_first_rank(record: logging.LogRecord) -> bool:
    """PyTorch says once a process that gloo gathers where an all-to-all would do, and that one collective would do for two
    axes: once a job is enough."""
    is_repeated = any(text in str(record.msg) for text in _ONCE_A_JOB)
    if not is_repeated or not dist.is_initialized():
        return True
    return dist.get_rank() == 0 and dist.get_backend() != "fake"  # of ranks that do not exist, never


def log_once_a_job(changes: Changes, _: Any) -> None:
    for name in ("_collective_utils", "_redistribute"):
        logger = logging.getLogger(f"torch.distributed.tensor.{name}")
        logger.addFilter(_on_first_rank)
        changes.on_undo(
            functools.partial(logger.removeFilter, _on_first_rank), f"logging.getLogger({logger.name}).filters"
        )


def observe_redistributions(changes: Changes, hooks: ModelHooks) -> None:
    dispatcher, listener = DTensor._op_dispatcher, hooks.listener
    original = dispatcher.redistribute_local_args

    @changes.method(dispatcher, "redistribute_local_args", DISPATCHER)
    def redistribute_local_args(op_info: Any, schema: Any, use_val: bool) -> None:
        wanted = schema.args_schema
        if op_info.args_tree_spec is not None:
            wanted = tensor_dispatch.pytree.tree_leaves(wanted)
        moves = [
            (position, op_info.local_args[position], found, wanted[position])
            for position, found in enumerate(op_info.flat_args_schema)
            if type(found) is DTensorSpec and found.placements != wanted[position].placements
        ]
        if not moves:
            return original(op_info, schema, use_val)
        listener.redistribution(schema.op, moves)
        original(op_info, schema, use_val)
        if is_view(schema.op):
            copies = [(local, found, op_info.local_args[position], to) for position, local, found, to in moves]
            listener.viewed_copies(schema.op, copies)


def observe_backwards(changes: Changes, hooks: ModelHooks) -> None:
    original, begins = torch.autograd._engine_run_backward, hooks.listener.begins_backward

    def run(
        losses: Any, gradients: Any, keep: Any, creates_graph: Any, inputs: Any = (), *args: Any, **kwargs: Any
    ) -> Any:
        begins(losses, gradients, bool(creates_graph))
        gradients = tuple(_like(loss, x) for loss, x in zip(losses, gradients, strict=True))
        returns = not kwargs.get("accumulate_grad")
        try:
            result = answered(losses, gradients, keep, creates_graph, inputs, returns, args, kwargs)
        except BaseException:
            await_broken_off_backward()
            raise
        if creates_graph and not returns:
            hooks.listener.recorded_backward(losses)
        return result

    def answered(
        losses: Any, gradients: Any, keep: Any, creates_graph: Any, inputs: Any, returns: bool, args: Any, kwargs: Any
    ) -> Any:
        for leaves, answers, _ in ASKED_GRADIENTS if inputs else ():
            found = leaves(inputs, returns_graph=returns and bool(creates_graph))
            if found is not None:
                result = original(losses, gradients, keep, creates_graph, tuple(found), *args, **kwargs)
                return answers(inputs, result) if returns else result
        result = original(losses, gradients, keep, creates_graph, inputs, *args, **kwargs)
        if creates_graph and returns:
            for asked in ASKED_GRADIENTS:
                asked.sees(result)
        return result

    changes.attribute(torch.autograd, "_engine_run_backward", functools.wraps(original)(backward_by_rows(run)))


def refuse_swaps(changes: Changes, hooks: ModelHooks) -> None:
    """The reducer of gradients holds the parameters, so that PyTorch cannot put others in their place."""
    original = torch.utils.swap_tensors

    @changes.method(torch.utils, "swap_tensors")
    def swap_tensors(t1: Any, t2: Any) -> None:
        if isinstance(t1, DTensor) and t1.requires_grad and weakref.getweakrefs(t1):
            raise ForeignToolError(
                f"a parameter of shape {tuple(t1.shape)} placed as {tuple(t1.placements)} would be replaced in place, "
                "but the gradient hooks of parallelize hold it. Add and remove parametrizations (orthogonal, "
                "spectral_norm), and move or convert the model, before parallelize"
            )
        if isinstance(t1, DTensor) and isinstance(t2, DTensor) and keeps_memory(t1) and keeps_memory(t2):
            raise ForeignToolError(
                f"two parameters of shapes {tuple(t1.shape)} and {tuple(t2.shape)} would be swapped, which are parts of "
                "buffers of units or of fully_shard, and stay there. Exchange their values: "
                "a.data, b.data = b.data.clone(), a.data.clone()"
            )
        hooks.listener.swaps()
        original(t1, t2)


def observe_writes(changes: Changes, hooks: ModelHooks) -> None:
    """Tell the listener of in-place ops and those with ``out=``, and bring copies up to date before they are read.

    C++ looks up what it calls at the end of such an op once in a process, so that another attribute would not be found. The
    function that it keeps calls ``get_active_debug_mode`` first, when the local tensors have been written to.
    """
    original = tensor_dispatch.get_active_debug_mode
    tail = type(DTensor._op_dispatcher)._dispatch_fast_path_python_tail.__code__
    copies, listener = hooks.view_copies, hooks.listener

    @changes.method(tensor_dispatch, "get_active_debug_mode")
    def get_active_debug_mode() -> Any:
        if copies:
            frame = sys._getframe(1)
            if frame.f_code is tail:
                for tensor in _written(frame.f_locals):
                    listener.wrote(tensor)
        return original()

    write_through_python(changes, copies)
    require = native_require_current() or listener.requires_current
    changes.attribute(DTensor, "to_local", _reading_locals(DTensor.to_local, require, listener))
    changes.attribute(DTensor, "full_tensor", _telling_of_reads(DTensor.full_tensor, require, listener))
    changes.attribute(DTensor, "redistribute", _telling_of_moves(DTensor.redistribute, require, listener))


def _reading_locals(
    method: Callable[..., Any], require: Callable[[DTensor], None], listener: Any
) -> Callable[..., Any]:
    """``to_local``, which reads the local tensor and runs no op for that."""

    @functools.wraps(method)
    def to_local(self: Any, *, grad_placements: Any = None) -> Any:
        require(self)
        listener.hands_out(self)
        for placement in self._spec.placements:
            if type(placement) not in _VALUES and isinstance(placement, Partial):
                listener.hands_out_summand(self)
                break
        return method(self) if grad_placements is None else method(self, grad_placements=grad_placements)

    return to_local


_VALUES = frozenset((Shard, Replicate))  # looked up faster than a class is compared


def _telling_of_reads(
    method: Callable[..., Any], require: Callable[[DTensor], None], listener: Any
) -> Callable[..., Any]:
    checked = listener.hashes_of_checked_meshes

    @functools.wraps(method)
    def full_tensor(self: Any, *, grad_placements: Any = None) -> Any:
        if hash(self._spec.mesh) in checked:
            listener.reads(self, "full_tensor()", True)
        require(self)
        return method(self, grad_placements=grad_placements)

    return full_tensor


def _telling_of_moves(
    method: Callable[..., Any], require: Callable[[DTensor], None], listener: Any
) -> Callable[..., Any]:
    checked = listener.hashes_of_checked_meshes

    @functools.wraps(method)
    def redistribute(self: Any, device_mesh: Any = None, placements: Any = None, *args: Any, **kwargs: Any) -> Any:
        if placements is not None and hash(self._spec.mesh) in checked:
            placements = tuple(placements)
            listener.moves(self, placements, "redistribute()")
        require(self)
        return method(self, device_mesh, placements, *args, **kwargs)

    return redistribute


def _written(call: Mapping[str, Any]) -> list[DTensor]:
    """What the op wrote to, of which these are the local variables of PyTorch's function."""
    found: list[Any] = []
    if call["participating"] and call["is_inplace_op"]:
        found = [call["args"][0]]
    elif call["participating"] and call["is_out_variant_op"]:
        found = [call["kwargs"].get(a.name) for a in call["op_call"]._schema.arguments if a.is_out]
    return [tensor for tensor in found if isinstance(tensor, DTensor)]


def observe_registrations(changes: Changes, hooks: ModelHooks) -> None:
    for name, register in (
        ("module", register_module_module_registration_hook),
        ("parameter", register_module_parameter_registration_hook),
    ):
        target = f"torch.nn.modules.module._global_{name}_registration_hooks"
        changes.on_undo(register(hooks.registered).remove, target)


def tell_of_exports(changes: Changes, hooks: ModelHooks) -> None:
    exports = hooks.listener.exports
    for tool, original in (
        ("torch.export", torch.export.export),
        ("torch.export", torch.export.draft_export),
        ("torch.jit.trace", torch.jit.trace),
    ):
        changes.function(original, _telling(tool, original, exports))


def _telling(tool: str, original: Callable[..., Any], exports: Callable[[str, Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def told(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())  # the model has another name in each of the tools
        exports(tool, given[0] if given else None)
        return original(*args, **kwargs)

    return told


def accept_plain_operands(changes: Changes, hooks: ModelHooks) -> None:
    """Take plain tensors in ops that C++ refuses them for before it asks for a decision, and in all others."""
    take_over_mixed_ops(changes, hooks)
    answer_mixed_calls(changes, hooks.listener.mixed, hooks.listener.mixed_sizes)
    dispatcher, listener = DTensor._op_dispatcher, hooks.listener
    original = dispatcher._try_replicate_spec_for_scalar_tensor

    @changes.method(dispatcher, "_try_replicate_spec_for_scalar_tensor", DISPATCHER)
    def replicate_spec(op_call: Any, tensor_arg: torch.Tensor, compute_mesh: Any) -> DTensorSpec:
        if tensor_arg.ndim and listener.plain_operand(op_call, tensor_arg):
            meta = TensorMeta(tensor_arg.shape, tensor_arg.stride(), tensor_arg.dtype)
            return DTensorSpec(compute_mesh, (Replicate(),) * compute_mesh.ndim, tensor_meta=meta)
        return original(op_call, tensor_arg, compute_mesh)


def _followed(around: Generator[None], follow: Callable[[Any], None], given: Any) -> Generator[None]:
    """What PyTorch has around a checkpointed function, with ``follow`` before and after that runs."""
    for _ in around:
        follow(given)
        yield
        follow(given)


def wrap_checkpointed_functions(changes: Changes, hooks: Any) -> None:
    """Have ``hooks.checkpointed(function, is_reentrant)`` computed again in backward instead of ``function``, both reentrant
    and not. If that has ``follow``, ``follow((args, kwargs))`` is called before and after ``function`` runs in forward.

    It is called when ``torch.utils.checkpoint.checkpoint`` is, and returns ``function`` itself where nothing is to be done.
    The two names behind ``checkpoint`` are replaced, because callers have bound ``checkpoint`` itself. Since torch 2.14,
    ``checkpoint`` calls the first one's ``_impl``.
    """
    original = getattr(checkpointing, "_checkpoint_without_reentrant_generator_impl", None)
    if original is None:
        original = checkpointing._checkpoint_without_reentrant_generator
    forward = checkpointing.CheckpointFunction.forward
    backward = checkpointing.CheckpointFunction.backward

    signature, apply = inspect.signature(original), checkpointing.CheckpointFunction.apply

    @functools.wraps(original)
    def generator(fn: Any, *args: Any, **kwargs: Any) -> Any:
        if CHECKPOINTED_APART:
            given = signature.bind_partial(fn, *args, **kwargs).arguments
            apart = _apart({name: given[name] for name in _OPTIONS if name in given})
            if apart is not None:
                return _as_it_is(apart)
        run = hooks.checkpointed(fn, False)
        follow = getattr(run, "follow", None)
        around = original(run, *args, **kwargs)
        if follow is None:
            return around
        given = signature.bind_partial(fn, *args, **kwargs).arguments
        return _followed(around, follow, (given.get("args", ()), given.get("kwargs", {})))

    def apply_reentrant(run_function: Any, preserve: bool, *args: Any) -> Any:
        apart = _apart({"preserve_rng_state": preserve})
        if apart is not None:
            with apart:
                return run_function(*args)
        if any(ask() for ask in REFUSES_REENTRANT):
            return checkpointing.checkpoint(run_function, *args, use_reentrant=False, preserve_rng_state=preserve)
        return apply(run_function, preserve, *args)

    @functools.wraps(forward)
    def reentrant(ctx: Any, run_function: Any, *args: Any) -> Any:
        outputs = forward(ctx, hooks.checkpointed(run_function, True), *args)
        found = outputs if isinstance(outputs, tuple) else (outputs,)
        ctx.vescale_specs = [spec_of(x) if isinstance(x, DTensor) else None for x in found]
        return outputs

    @functools.wraps(backward)
    def backward_of_reentrant(ctx: Any, *grads: Any) -> Any:
        """The gradients of outputs without one are zeros, which PyTorch makes plain tensors of global shape."""
        specs = getattr(ctx, "vescale_specs", None) or [None] * len(grads)
        return backward(ctx, *map(_global, grads, specs))

    changes.function(original, generator)
    frame = checkpointing._CheckpointFrame
    for name in ("get_inputs", "check_recomputed_tensors_match"):
        if hasattr(frame, name):  # 2.11 has no method of the first kind
            changes.attribute(frame, name, _telling_of_failures(getattr(frame, name)))
    changes.attribute(checkpointing.CheckpointFunction, "apply", staticmethod(apply_reentrant))
    changes.attribute(checkpointing.CheckpointFunction, "forward", staticmethod(reentrant))
    changes.attribute(checkpointing.CheckpointFunction, "backward", staticmethod(backward_of_reentrant))


_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


def _apart(options: Mapping[str, Any]) -> contextlib.AbstractContextManager[None] | None:
    return next((found for ask in CHECKPOINTED_APART if (found := ask(options)) is not None), None)


def _as_it_is(around: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """What ``checkpoint`` calls a function inside of, in place of PyTorch's generator."""
    with around:
        yield


def _telling_of_failures(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a checkpointed function's frame. The function says what its own recomputation fails with."""

    @functools.wraps(method)
    def told(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except RuntimeError as error:
            recompute = self.recompute_fn
            cells = dict(zip(recompute.__code__.co_freevars, recompute.__closure__ or ()))
            function = cells["fn"].cell_contents if "fn" in cells else None
            failure = getattr(inspect.unwrap(function), "recomputation_failed", None) if callable(function) else None
            if failure is None:
                raise
            raise failure(error) from error

    return told


def run_backwards_in_modules(changes: Changes, hooks: ModelHooks) -> None:
    """Have ``hooks.in_backward(function, *args)`` run what a program runs in backwards, on DTensors: the backward of its own
    functions (``torch.autograd.Function``), hooks of gradients, backward hooks of modules."""

    def inside(function: Callable[..., Any], owner: Any) -> Callable[..., Any]:
        if str(getattr(owner, "__module__", "")).partition(".")[0] in _AWARE:
            return function

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            if any(isinstance(x, DTensor) for x in tensors_in(args)):
                return hooks.in_backward(function, *args)
            return function(*args)

        return call

    def of_functions(original: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(original)(lambda self, *args: inside(original, self._forward_cls)(self, *args))

    for name in {"apply", "apply_boxed"} & vars(BackwardCFunction).keys():
        changes.attribute(BackwardCFunction, name, of_functions(getattr(BackwardCFunction, name)))
    register, make = torch.Tensor.register_hook, BackwardHook.__init__

    @functools.wraps(register)
    def register_hook(self: Any, hook: Any) -> Any:
        return register(self, inside(hook, getattr(hook, "func", hook)))

    @functools.wraps(make)
    def init(self: Any, module: Any, hooks: Any, pre_hooks: Any) -> None:
        make(self, module, [inside(hook, hook) for hook in hooks], [inside(hook, hook) for hook in pre_hooks])

    changes.attribute(DTensor, "register_hook", register_hook)
    changes.attribute(BackwardHook, "__init__", init)


# Packages whose functions know what they are given.
_AWARE = ("torch", "vescale")


def _like(loss: Any, grad: Any) -> Any:
    """What a backward of ``loss`` is given, as a DTensor if that is one; a plain tensor gets a DTensor's whole value, unless
    a transform has wrapped it, which may hold a DTensor."""
    if isinstance(loss, DTensor):
        return _global(grad, loss._spec)
    is_plain = isinstance(loss, torch.Tensor) and without_transforms(loss) is loss
    return grad.full_tensor() if is_plain and isinstance(grad, DTensor) else grad


def _global(grad: Any, spec: DTensorSpec | None) -> Any:
    """A plain gradient of a DTensor is the whole one, the same on every rank."""
    if spec is None or not isinstance(grad, torch.Tensor) or isinstance(grad, DTensor):
        return grad
    whole = (Replicate(),) * spec.mesh.ndim
    return make_dtensor(grad, make_spec(spec.mesh, whole, grad.shape, grad.stride(), grad.dtype))


def tell_of_edges(changes: Changes, hooks: ModelHooks) -> None:
    """A program asks for the node at which the gradient of a tensor arrives (``get_gradient_edge``,
    ``register_multi_grad_hook``)."""
    original: Any = torch.autograd.graph._get_grad_fn_or_grad_acc

    @changes.method(torch.autograd.graph, "_get_grad_fn_or_grad_acc")
    def _get_grad_fn_or_grad_acc(tensor: Any) -> Any:
        if isinstance(tensor, DTensor):
            hooks.listener.names_edge(tensor)
        return original(tensor)


def compile_with_sharded_gradients(changes: Changes, _: ModelHooks) -> None:
    original = meta_utils._grad_context_compatible

    @changes.method(meta_utils, "_grad_context_compatible")
    def _grad_context_compatible(symbolic_context: Any, grad_desc: Any) -> bool:
        is_alike = not grad_desc.is_traceable_wrapper_subclass or hasattr(symbolic_context, "inner_contexts")
        return is_alike and original(symbolic_context, grad_desc)


def note_data_views(changes: Changes, _: ModelHooks) -> None:
    """``parameter.data`` has a version of its own, so that what is written by way of it is written unseen."""
    read, write = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]

    def data(self: nn.Parameter) -> Any:
        found = read(self)
        views = self.__dict__.get(DATA_VIEWS)
        if views is not None:
            views.append((id(self), found))
        return found

    changes.attribute(nn.Parameter, "data", property(data, write))


def run_autocast_on_meta(changes: Changes, _: ModelHooks) -> None:
    """A forward without values names the device of its tensors to autocast, which changes no op on them."""
    original: Any = torch.autocast.__init__

    @changes.method(torch.autocast, "__init__")
    def __init__(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "meta":
            device = torch.accelerator.current_accelerator(check_available=True)
            device_type = "cpu" if device is None else device.type
        original(self, device_type, *args, **kwargs)


# Batches of gradients, ``torch.autograd.grad(..., is_grads_batched=True)``, for which collectives have no rule.

_enter: Callable[[], int] | None = getattr(torch._C, "_vmapmode_increment_nesting", None)


def backward_by_rows(run: Callable[..., Any]) -> Callable[..., Any]:
    """A backward of DTensors by ``run``, once for each gradient of a batch; without one, and of plain tensors, ``run``."""

    def backward(
        losses: Any, gradients: Any, keep: Any, creates_graph: Any, inputs: Any = (), *args: Any, **kwargs: Any
    ) -> Any:
        level = 0 if _enter is None or not any(isinstance(x, DTensor) for x in (*losses, *inputs)) else _level(_enter)
        if not level:
            return run(losses, gradients, keep, creates_graph, inputs, *args, **kwargs)
        rows: list[tuple[Any, ...]] = list(
            zip(*([None] if x is None else torch._remove_batch_dim(x, level, 1, 0) for x in gradients))
        )
        found: Sequence[Any] = [
            run(losses, row, keep or index < len(rows) - 1, creates_graph, inputs, *args, **kwargs)
            for index, row in enumerate(rows)
        ]
        return tuple(None if each[0] is None else _batched(torch.stack(each), level) for each in zip(*found))

    return backward


def _level(enter: Callable[[], int]) -> int:
    """How many batches this thread is in."""
    level = enter() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


def _batched(x: torch.Tensor, level: int) -> torch.Tensor:
    batched: torch.Tensor = torch._add_batch_dim(x, 0, level)
    return batched


# Sequences of unequal lengths: PyTorch writes them to a buffer, which for DTensors would be a plain tensor.


def pad_dtensors(changes: Changes, _: Any) -> None:
    """``pad_sequence`` of DTensors, which ``pack_sequence`` calls: each is padded by itself."""
    original = rnn.pad_sequence

    @changes.in_place_of(original)
    def pad_sequence(
        sequences: Any, batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
    ) -> Any:
        if padding_side not in ("left", "right") or not any(isinstance(x, DTensor) for x in sequences):
            return original(sequences, batch_first, padding_value, padding_side)
        return _padded(list(sequences), 0 if batch_first else 1, padding_value, padding_side == "left")


def _padded(sequences: Sequence[torch.Tensor], dim: int, value: float, is_left: bool) -> torch.Tensor:
    length = max(len(x) for x in sequences)
    missing = [length - len(x) for x in sequences]
    inner = (0, 0) * (sequences[0].ndim - 1)
    sides = [(*inner, *((size, 0) if is_left else (0, size))) for size in missing]
    return torch.stack([F.pad(x, each, value=value) if any(each) else x for x, each in zip(sequences, sides)], dim)
