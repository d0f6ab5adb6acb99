"""DTensor's op dispatcher and the autograd engine: where vescale listens, and how an op is run as stock DTensor runs it.

Handlers and the listener belong to the process (DTensor has one dispatcher); what they do is decided by the caller, who
looks up the model that the running op belongs to.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from vescale.compat.dispatch import clear_sharding_cache, iterate_specs
from vescale.compat.dtensor import StridedShard
from vescale.compat.needs import self_check

__all__ = [
    "DispatchListener",
    "current_autograd_node",
    "in_transform",
    "install_dispatch",
    "no_torch_function",
    "node_sequence",
    "resume_compiling",
    "sequence_number",
    "stock_dispatch",
    "suspend_compiling",
    "tell_move",
    "telling",
]

# Switches __torch_function__ off for modes and subclasses alike: DTensor's ops (which use __torch_dispatch__) still run.
no_torch_function = torch._C.DisableTorchFunction

# What torch.compile does with this thread's frames; None: it lets them run as they are. Returns what it did before.
_set_compiler = torch._C._dynamo.eval_frame.set_eval_frame


def suspend_compiling() -> Any:
    """Let this thread run Python as it is, also in a compiled function. Returns what to resume with; None: nothing."""
    return _set_compiler(None)


def resume_compiling(compiler: Any) -> None:
    if compiler is not None:
        _set_compiler(compiler)


Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class DispatchListener:
    """What the dispatcher tells, and asks."""

    def redistribution(self, op: Any, moves: Sequence[tuple[int, torch.Tensor, DTensorSpec, DTensorSpec]]) -> None:
        """Before an op brings operands (position, local tensor, from, to) to other placements on its own account."""

    def placement_move(
        self, op: Any, operand: str, local: torch.Tensor, source: DTensorSpec, target: DTensorSpec
    ) -> None:
        """The same, for an op on vescale's placements, operand by operand."""

    def viewed_copies(
        self, op: Any, moves: Sequence[tuple[torch.Tensor, DTensorSpec, torch.Tensor, DTensorSpec]]
    ) -> None:
        """After operands of a view were brought elsewhere (local tensor and spec, before and now): the result is a view of
        the new ones, and what is written to it does not reach the old ones by itself."""

    def wrote(self, tensor: DTensor) -> None:
        """After an op has written to ``tensor`` in place."""

    def no_strategy(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stock DTensor has no rule for ``op``, or one that refuses: return its result, or NotImplemented to let the error
        out."""
        return NotImplemented

    def interleaved(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], schema: Any) -> Any:
        """Stock DTensor would move operands of ``op``, of which one is a ``_StridedShard``: return a sharding decision
        that does not, for it to cache, or the op's result, or None."""
        return None

    def moves_nothing(self, op: Any, schema: Any, sharding: Any) -> Any:
        """Stock DTensor would move operands of ``op`` by the decision ``sharding``: return one that does not, for it to
        cache, or None."""
        return None

    def plain_operand(self, op: Any, tensor: torch.Tensor) -> bool:
        """Whether a plain tensor among DTensors is the global one, the same on every rank; False: stock refuses it."""
        return False


# From so many mesh axes on, stock DTensor takes half a minute and more for one op with a _StridedShard among its operands:
# it searches the cheapest way from it to every candidate placement.
_LONG_SEARCH = 3

_LOCK = threading.Lock()
_INSTALLED: list[DispatchListener] = []


def install_dispatch(handlers: Mapping[Any, Handler], listener: DispatchListener) -> None:
    """Register op handlers and the listener with DTensor's dispatcher, once in a process; later calls do nothing.

    Raises UnsupportedTorchError when this torch lacks something that vescale builds on; nothing is changed then.
    """
    with _LOCK:
        if _INSTALLED:
            return
        self_check()
        _INSTALLED.append(listener)
        dispatcher = DTensor._op_dispatcher
        for op, handler in handlers.items():
            dispatcher._custom_op_handlers[op] = handler  # type: ignore[assignment]
        _listen_to_redistributions(dispatcher, listener)
        _listen_to_missing_strategies(dispatcher, listener)
        _listen_to_writes(dispatcher, listener)
        _listen_to_plain_operands(dispatcher, listener)
        _format_scalars()
        clear_sharding_cache()  # of decisions that the listener has not seen


def _format_scalars() -> None:
    """``f"{loss:.3f}"`` of a DTensor, which stock torch refuses, as of a plain tensor."""
    if "__format__" in vars(DTensor):
        return

    def __format__(self: DTensor, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else repr(self) if not spec else self, spec)

    DTensor.__format__ = __format__  # type: ignore[assignment,method-assign]


def _listen_to_redistributions(dispatcher: Any, listener: DispatchListener) -> None:
    original = dispatcher.redistribute_local_args

    @functools.wraps(original)
    def redistribute_local_args(op_info: Any, schema: Any, use_val: bool) -> None:
        wanted = schema.args_schema
        if op_info.args_tree_spec is not None:
            wanted = torch.utils._pytree.tree_leaves(wanted)
        moves = [
            (position, op_info.local_args[position], found, wanted[position])
            for position, found in enumerate(op_info.flat_args_schema)
            if isinstance(found, DTensorSpec) and found.placements != wanted[position].placements
        ]
        if moves:
            listener.redistribution(schema.op, moves)
        original(op_info, schema, use_val)
        if moves and schema.op._schema._is_view_op():
            copies = [(local, found, op_info.local_args[position], to) for position, local, found, to in moves]
            listener.viewed_copies(schema.op, copies)

    dispatcher.redistribute_local_args = redistribute_local_args


def _listen_to_writes(dispatcher: Any, listener: DispatchListener) -> None:
    def wrote(result: Any) -> None:
        for written in result if isinstance(result, tuple | list) else (result,):
            if isinstance(written, DTensor):
                listener.wrote(written)

    _replace_code(type(dispatcher)._dispatch_fast_path_python_tail, _telling_tail, wrote)

    handlers: Any = dispatcher._custom_op_handlers
    for op, handler in handlers.items():
        handlers[op] = telling(op, handler)


def telling(op: Any, handler: Handler) -> Handler:
    """A handler that tells the listener, also one installed later, when an in-place op has been handled."""
    if isinstance(handler, _Telling) or not op._schema.is_mutable or op._schema.name.startswith("aten::_foreach"):
        return handler
    return _Telling(handler)


class _Telling:
    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        functools.update_wrapper(self, handler)

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self.handler(op, args, kwargs)
        if args and isinstance(args[0], DTensor):
            for listener in _INSTALLED:
                listener.wrote(args[0])
        return result


def _telling_tail(
    self: Any,
    op_call: Any,
    args: Any,
    kwargs: Any,
    compute_mesh: Any,
    output_sharding: Any,
    local_results: Any,
    participating: bool,
    is_inplace_op: bool,
    is_out_variant_op: bool,
    original: Any = None,
    wrote: Any = None,
) -> Any:
    result = original(
        self,
        op_call,
        args,
        kwargs,
        compute_mesh,
        output_sharding,
        local_results,
        participating,
        is_inplace_op,
        is_out_variant_op,
    )
    if participating and (is_inplace_op or is_out_variant_op):
        wrote(result)
    return result


def _replace_code(function: types.FunctionType, replacement: Any, *helpers: Any) -> None:
    """Make ``function`` do what ``replacement`` does, which gets the original and ``helpers`` as its last arguments, and
    may use no other names: it runs among the globals of ``function``.

    For what C++ looks up once in a process, by the first op that needs it: another attribute would never be found there.
    """
    original = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    function.__code__, function.__defaults__ = replacement.__code__, (original, *helpers)


def _listen_to_missing_strategies(dispatcher: Any, listener: DispatchListener) -> None:
    original = dispatcher._propagate_op_sharding_dispatch_slow_path

    @functools.wraps(original)
    def propagate(op_call: Any, args: Any, kwargs: Any, op_info: Any, try_cache: bool) -> Any:
        # A function mode may be on where no torch function leads here (torch.vmap views its results): none of a model's is
        # for the tensors that shapes are found with.
        with no_torch_function():
            return decided(op_call, args, kwargs, op_info, try_cache)

    def decided(op_call: Any, args: Any, kwargs: Any, op_info: Any, try_cache: bool) -> Any:
        # The C++ caller takes anything that is no OutputSharding as the op's own result.
        has_strided = _has_strided(op_info.schema)
        if has_strided and op_info.compute_mesh.ndim >= _LONG_SEARCH:
            kept = listener.interleaved(op_call, args, kwargs, op_info.schema)
            if kept is not None:
                return kept
        try:
            sharding = original(op_call, args, kwargs, op_info, try_cache)
        except RuntimeError as error:
            if not _lacks_rule(error):
                raise
            if has_strided and (kept := listener.interleaved(op_call, args, kwargs, op_info.schema)) is not None:
                return kept
            result = listener.no_strategy(op_call, args, kwargs)
            if result is NotImplemented:
                raise
            return result
        if getattr(sharding, "needs_redistribute", False):
            if has_strided and (kept := listener.interleaved(op_call, args, kwargs, op_info.schema)) is not None:
                return kept
            if (kept := listener.moves_nothing(op_call, op_info.schema, sharding)) is not None:
                return kept
        if op_call._schema.is_mutable and _moves_written(sharding, op_info.schema):
            result = listener.no_strategy(op_call, args, kwargs)
            # A decision that is returned is cached, and the listener not asked again, where it may answer otherwise.
            return stock(op_call, args, kwargs, op_info, sharding) if result is NotImplemented else result
        return sharding

    def stock(op_call: Any, args: Any, kwargs: Any, op_info: Any, sharding: Any) -> Any:
        op_info.output_sharding = sharding
        mesh, inplace = op_info.compute_mesh, not any(argument.is_out for argument in op_call._schema.arguments)
        local = dispatcher._dispatch_get_local_results_slow_path(op_call, args, op_info)
        participating = mesh.get_coordinate() is not None
        return dispatcher._dispatch_fast_path_python_tail(
            op_call, args, kwargs, mesh, sharding, local, participating, inplace, not inplace
        )

    dispatcher._propagate_op_sharding_dispatch_slow_path = propagate


def _has_strided(schema: Any) -> bool:
    specs = iterate_specs((*schema.args_schema, *schema.kwargs_schema.values()))
    return any(isinstance(placement, StridedShard) for spec in specs for placement in spec.placements)


def _moves_written(sharding: Any, schema: Any) -> bool:
    """Whether a rule wants what an in-place op writes to elsewhere: stock DTensor would write to a copy, and label the
    tensor, which stays where it is, with the copy's placements."""
    wanted = getattr(sharding, "redistribute_schema", None)
    if wanted is None or not isinstance(schema.args_schema[0], DTensorSpec):
        return False
    written = schema.op._schema.arguments[0].alias_info
    if written is None or not written.is_write or not isinstance(wanted.args_schema[0], DTensorSpec):
        return False
    return schema.args_schema[0].placements != wanted.args_schema[0].placements


def _lacks_rule(error: BaseException | None) -> bool:
    """Whether propagation failed for want of a rule, and not because of the operands: there is none, the result's shape
    depends on the data (``nonzero``), or the rule refuses to redistribute (``unbind`` of a sharded dim)."""
    while error is not None:
        if isinstance(error, DynamicOutputShapeException | DataDependentOutputException | NotImplementedError):
            return True
        if any(
            text in str(error) for text in ("without redistribution", "redistribute the tensor", "placement changes")
        ):
            return True
        error = error.__cause__
    return False


def _listen_to_plain_operands(dispatcher: Any, listener: DispatchListener) -> None:
    original = dispatcher._try_replicate_spec_for_scalar_tensor

    @functools.wraps(original)
    def replicate_spec(op_call: Any, tensor: torch.Tensor, mesh: Any) -> DTensorSpec:
        if tensor.ndim and listener.plain_operand(op_call, tensor):
            meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
            return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
        return original(op_call, tensor, mesh)

    dispatcher._try_replicate_spec_for_scalar_tensor = replicate_spec


def tell_move(op: Any, operand: str, local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> None:
    """A rule of ours, not DTensor's own, brings an operand elsewhere; called before anything is communicated."""
    for listener in _INSTALLED:
        listener.placement_move(op, operand, local, source, target)


def stock_dispatch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on DTensors by DTensor's own rule, past any handler; for handlers that decline. Not for ``out=``."""
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    sharding: Any = dispatcher._propagate_op_sharding_dispatch_slow_path(op, args, kwargs, info, True)
    if not hasattr(sharding, "output_spec"):
        return sharding
    info.output_sharding = sharding
    local = dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    if op._schema.is_mutable:  # the rule of an in-place op keeps the placements of what it writes to, or raises
        for listener in _INSTALLED:
            listener.wrote(args[0])
        return args[0]
    return dispatcher.wrap(local, sharding.output_spec)


def current_autograd_node() -> Any:
    """The autograd node that this thread is evaluating, or None outside backward."""
    return torch._C._current_autograd_node()


def in_transform() -> bool:
    """Whether a function transform (``torch.vmap``, ``torch.func``) is running on this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def node_sequence(node: Any) -> int:
    """The number an autograd node got when forward made it; nodes that forward did not make have very large ones."""
    return int(node._sequence_nr())


def sequence_number() -> int:
    """The number that the next autograd node of this thread will get."""
    return int(torch._C._autograd._get_sequence_nr())
